"""Runs that wait to be spilled to the next tier."""

from __future__ import annotations

import pytest

from kvarts.core.content import Content
from kvarts.core.tiers import store_policy
from kvarts.core.tiers.store_policy import Backlog, Duplicates, Spill
from kvarts.core.tiers.tier import MemoryTier


def content_of(*tokens: int) -> Content:
    return Content.from_tokens(tokens, page_size=1, owner=0)


def test_runs_that_follow_each_other_are_one() -> None:
    content, other = content_of(1, 2, 3, 4), content_of(1, 2, 9, 9)
    waiting = Backlog(2, lambda place, spill: True)
    waiting.add(0, content, 0, 0, 2)
    waiting.add(0, content, 0, 2, 3)
    waiting.add(0, content, 1, 3, 4)
    waiting.add(0, other, 1, 4, 4)
    waiting.add(0, other, 0, 2, 4)
    assert list(waiting.spills[0]) == [(content, 0, 0, 3), (content, 1, 3, 4), (other, 0, 2, 4)]


def test_nothing_is_spilled_from_the_last_tier_nor_pages_of_unknown_tokens() -> None:
    content = content_of(1, 2)
    waiting = Backlog(2, lambda place, spill: True)
    waiting.add(1, content, 0, 0, 2)
    waiting.add(0, content, 0, 0, 5)
    assert list(waiting.spills[0]) == [(content, 0, 0, 2)]
    assert len(waiting.spills) == 1


def test_a_way_that_is_behind_spills_nothing_before_a_transfer_has_ended() -> None:
    waiting = Backlog(2, lambda place, spill: True)
    waiting.add(0, content_of(1), 0, 0, 1)
    waiting.is_behind[1] = True
    assert not waiting.has_spills
    waiting.go_on()
    assert waiting.has_spills


def test_runs_that_were_evicted_are_removed_from_a_long_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_policy, "PRUNE_AT", 2)
    gone: list[Spill] = []
    waiting = Backlog(2, lambda place, spill: spill not in gone)
    contents = [content_of(token) for token in range(4)]
    for content in contents[:2]:
        waiting.add(0, content, 0, 0, 1)
    gone.append((contents[0], 0, 0, 1))
    for content in contents[2:]:
        waiting.add(0, content, 0, 0, 1)
    assert [content for content, *_ in waiting.spills[0]] == contents[1:]


def test_duplicates_that_the_device_or_host_memory_has_lost_are_removed_from_a_long_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_policy, "PRUNE_AT", 2)
    host, contents = MemoryTier("host", 4), [content_of(token) for token in range(4)]
    for content in contents[1:]:
        store = host.prepare_store(content, 0, 1)
        assert store is not None
        host.complete_store(store)
    duplicates = Duplicates([host], num_free=0, num_here=lambda content, end: 0 if content is contents[1] else end)
    for content in contents[:3]:
        duplicates.add(content, 0, 1)
    assert len(duplicates) == 1
    duplicates.add(contents[3], 0, 1)
    assert len(duplicates) == 2

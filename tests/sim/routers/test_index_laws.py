"""What routers know of prefixes and blocks, by runs and by worker, against sets of pages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.content import Content
from kvarts.core.kv.groups import GroupMemory, PartGroup
from kvarts.core.kv.transfer import Offer, PeersGain
from kvarts.sim.routers.directory import ActiveBlocks, EventIndex, IndexRule, IndexTree, PartIndex, PlacementIndex

from builders.grouped import STATES, part_groups
from oracles.naive_routers import NaiveActive, NaiveIndex, NaivePartIndex, NaivePlacements

pytestmark = pytest.mark.laws

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)
workers = st.integers(0, 2)


def content_of(prompt: tuple[int, ...], page_size: int = 1) -> Content:
    return Content.from_tokens([token for token in prompt for _ in range(page_size)], page_size=page_size, owner=0)


def assert_sound(tree: IndexTree) -> None:
    """Spans follow each other, and each of which nothing is known has something after it."""
    spans = list(tree.spans())
    assert len(spans) == tree.num_spans
    for span in spans:
        assert span.start < span.end and (span.children or any(span.counts))
        assert all(child.start == span.end and child.parent is span for child in span.children.values())


@given(st.data(), st.sampled_from([("device",), ("device", "host"), ("device", "host", "disk")]))
def test_the_index_by_events_is_a_set_of_pages(data: st.DataObject, tiers: tuple[str, ...]) -> None:
    index, naive = EventIndex(tiers), NaiveIndex(tiers)
    asked = data.draw(st.lists(prompts, min_size=1, max_size=4))
    for _ in range(data.draw(st.integers(1, 25))):
        prompt, worker, tier = data.draw(st.sampled_from(asked)), data.draw(workers), data.draw(st.sampled_from(tiers))
        start = data.draw(st.integers(0, len(prompt) - 1))
        end = data.draw(st.integers(start + 1, len(prompt)))
        has = [naive.has(worker, tier, prompt[: page + 1]) for page in range(start, end)]
        before = set(naive.pages)
        if not any(has):
            naive.store(worker, prompt, start, end, tier)
        elif all(has):
            naive.remove(worker, prompt, start, end, tier)
        if not naive.is_lawful():
            naive.pages = before
        elif naive.pages != before:
            change = index.remove if any(has) else index.store
            change(worker, content_of(prompt), start, end, tier)
        assert_sound(index)
        for each in asked:
            for limit in (len(each), len(each) - 1):
                assert index.matches(content_of(each), limit) == naive.matches(each, limit)
                for tier in tiers[1:]:
                    runs = index.elsewhere(content_of(each), range(limit + 1), limit, tier)
                    assert runs == {start: naive.elsewhere(each, start, limit, tier) for start in range(limit + 1)}
    index.forget(1)
    naive.pages = {page for page in naive.pages if page[0] != 1}
    assert_sound(index)
    for each in asked:
        assert index.matches(content_of(each), len(each)) == naive.matches(each, len(each))


def all_pages(offer: Offer, start: int, num_tokens: int) -> float:
    """A gain of all pages on offer."""
    assert all(begin < end and size > 0 for runs in offer.runs for _, begin, end, size in runs)
    return offer.num_pages


@given(
    st.data(),
    part_groups(by_page=True),
    st.integers(1, 3),
    st.sampled_from([("device",), ("device", "host"), ("device", "host", "disk")]),
)
def test_the_index_by_events_of_parts_is_a_set_of_parts(
    data: st.DataObject, groups: tuple[PartGroup, ...], page_size: int, tiers: tuple[str, ...]
) -> None:
    """What workers can resume from, with parts of all their groups, tiers, and of one other worker."""
    index = PartIndex(GroupMemory(groups), page_size, tiers)
    naive = NaivePartIndex([group.layer for group in groups], page_size, tiers)
    asked = data.draw(st.lists(prompts, min_size=1, max_size=4))
    gain = PeersGain("host", all_pages)
    for _ in range(data.draw(st.integers(1, 30))):
        prompt, worker, tier = data.draw(st.sampled_from(asked)), data.draw(workers), data.draw(st.sampled_from(tiers))
        group = data.draw(st.integers(0, len(groups) - 1))
        start = data.draw(st.integers(0, len(prompt) - 1))
        end = data.draw(st.integers(start + 1, len(prompt)))
        has = [naive.has(worker, [tier], group, prompt[: page + 1]) for page in range(start, end)]
        content = content_of(prompt, page_size)
        if not any(has):
            naive.store(worker, prompt, start, end, tier, group)
            index.store(worker, content, start, end, tier, group)
        elif all(has):
            naive.remove(worker, prompt, start, end, tier, group)
            index.remove(worker, content, start, end, tier, group)
        for each in asked:
            for limit in (len(each), len(each) - 1):
                found = naive.matches(each, limit)
                assert index.matches(content_of(each, page_size), limit) == found
                if "host" in tiers:
                    starts = [sum(found.get(worker, ())) for worker in range(3)]
                    saved = index.saved_elsewhere(content_of(each, page_size), starts, limit, 0, gain)
                    assert saved == [naive.elsewhere(n, each, start, limit, "host") for n, start in enumerate(starts)]
    index.forget(1)
    naive.parts = {part for part in naive.parts if part[0] != 1}
    for each in asked:
        assert index.matches(content_of(each, page_size), len(each)) == naive.matches(each, len(each))
    for worker, tier, group, pages in list(naive.parts):
        index.remove(worker, content_of(pages, page_size), len(pages) - 1, len(pages), tier, group)
    assert not any(list(tree.every()) for tree in index._trees.values())


@pytest.mark.parametrize("runs", [[(0, 2)], [(0, 1), (1, 2)]])
def test_each_snapshot_of_pages_in_a_row_counts(runs: list[tuple[int, int]]) -> None:
    index = PartIndex(GroupMemory(STATES), 1)
    content = content_of((0, 1))
    index.store(0, content, 0, 2, "device", 0)
    for start, end in runs:
        index.store(0, content, start, end, "device", 1)
    assert [index.matches(content, limit) for limit in (1, 2)] == [{0: (1,)}, {0: (2,)}]
    index.remove(0, content, 0, 1, "device", 1)
    assert [index.matches(content, limit) for limit in (1, 2)] == [{}, {0: (2,)}]


@given(
    st.lists(st.tuples(prompts, workers, st.integers(0, 3)), min_size=1, max_size=30),
    st.sampled_from([None, 1, 3, 6, 10]),
    st.sampled_from([0, 0, 4]),
    st.sampled_from([None, 2, 5]),
)
def test_the_index_by_placements_forgets_block_by_block(
    placements: list[tuple[tuple[int, ...], int, int]], most_blocks: int | None, every: int, ttl: int | None
) -> None:
    index = PlacementIndex(IndexRule(most_blocks=most_blocks, every_ns=every, ttl_ns=ttl), page_size=2)
    naive = NaivePlacements(most_blocks, every, ttl)
    now = 0
    for prompt, worker, later in placements:
        now += later
        content, num_blocks = index.read(content_of(prompt, page_size=2), len(prompt) * 2 + 1)
        assert num_blocks == len(prompt)
        for each, _, _ in placements:
            read, count = index.read(content_of(each, page_size=2), len(each) * 2)
            assert index.matches(read, count, now) == naive.matches(each, now)
        index.place(worker, content, num_blocks, now)
        naive.place(worker, prompt, now)
        assert_sound(index)
        assert {w: n for w, n in index.num_blocks.items() if n} == {w: len(b) for w, b in naive.blocks.items() if b}


@given(st.lists(st.tuples(prompts, workers, st.booleans()), min_size=1, max_size=30), st.data())
def test_distinct_blocks_are_counted_once(
    requests: list[tuple[tuple[int, ...], int, bool]], data: st.DataObject
) -> None:
    active, naive = ActiveBlocks(), NaiveActive()
    for prompt, worker, ends in requests:
        if ends and naive.requests:
            gone = naive.requests.pop(data.draw(st.integers(0, len(naive.requests) - 1)))
            active.remove(gone[0], content_of(gone[1]), len(gone[1]))
        shared = active.shared(content_of(prompt), len(prompt))
        for each in range(3):
            more = naive.distinct(each, prompt) - naive.distinct(each)
            assert shared.get(each, 0) == len(prompt) - more
        active.add(worker, content_of(prompt), len(prompt))
        naive.requests.append((worker, prompt))
        assert [active.num_blocks.get(each, 0) for each in range(3)] == [naive.distinct(each) for each in range(3)]
        assert_sound(active)
    for worker, prompt in naive.requests:
        active.remove(worker, content_of(prompt), len(prompt))
    assert not active.num_spans and not any(active.num_blocks.values())


def test_an_order_of_recency_does_not_grow_with_prompts_that_are_alike() -> None:
    index = PlacementIndex(IndexRule(most_blocks=100), page_size=1)
    content = content_of((0, 1, 0, 1))
    for number in range(5_000):
        index.place(number % 2, content, 4, number)
    assert sum(map(len, index._orders.values())) < 300
    assert index.num_spans == 1

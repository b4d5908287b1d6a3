"""The audit of the engine `sglang`: correct engines pass, and what is damaged is found, rule by rule."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from equal.sglang import ROWS, draw_load
from equal.sglang_ours import kvarts_steps
from equal.test_sglang import restated
from kvarts import ReplayConfig, replay
from kvarts.base.errors import ConfigError
from kvarts.core.build import OpenedAudit, Planning, Storage
from kvarts.core.config import EngineConfig
from kvarts.core.content import Content
from kvarts.core.events import (
    Admitted,
    ChunkComputed,
    Event,
    Finished,
    PagesRemoved,
    PagesStored,
    Preemption,
    StepDone,
)
from kvarts.core.kv.hicache import HostCopy, HostRadixTree
from kvarts.core.kv.radix import RadixCache, RadixTree
from kvarts.core.sched.scheduler import Scheduler
from kvarts.proof.audit.auditor import AuditError
from kvarts.proof.audit.batches import BatchAuditor
from kvarts.proof.audit.opening import open_audit
from kvarts.sim.traffic.mooncake import load_mooncake

from builders.fields import changed
from oracles.naive_sglang import Asked, SglangLoad

HOSTS: list[dict[str, Any]] = [
    {},
    {"hicache_ratio": 0.5},
    {"hicache_ratio": 0.5, "hicache_write_policy": "write_back"},
]


@pytest.mark.parametrize(
    ("row", "says"), [("windows", "sliding windows in a pool of its own"), ("states", "states in slots")]
)
def test_second_pools_are_not_audited(row: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        next(kvarts_steps(restated(draw_load(row, 5000)), audit=open_audit))


@pytest.mark.laws
@pytest.mark.parametrize("row", sorted({*ROWS} - {"windows", "states"}))
@pytest.mark.parametrize("seed", range(3))
def test_the_audit_of_a_correct_engine_finds_nothing(row: str, seed: int) -> None:
    for _ in kvarts_steps(restated(draw_load(row, 5000 + seed)), audit=open_audit):
        pass


@pytest.mark.parametrize("row", ["fcfs", "priority", "storage"])
def test_the_audit_follows_requests_that_are_cancelled(row: str) -> None:
    for _ in kvarts_steps(restated(draw_load(row, 6000)), audit=open_audit, cancels=0.1):
        pass


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("overlaps", [True, False])
def test_an_audited_replay_leaps_as_one_without_audit(host: dict[str, Any], overlaps: bool, tmp_path: Path) -> None:
    """`replay` compares both, and raises what differs."""
    rows = [
        {"timestamp": 40 * index, "input_length": 40, "output_length": 30, "hash_ids": [index % 3, 100 + index]}
        for index in range(20)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = ReplayConfig(
        engine="sglang",
        num_pages=60,
        page_size=4,
        disable_overlap_schedule=not overlaps,
        audit=True,
        cost="linear:step_ms=1",
        **host,
    )
    assert replay(load_mooncake(path, trace_block_size=20), config).summary["num_requests"] == 20


# What is damaged ------------------------------------------------------------------------------------------

STEM = [1, 2, 3, 4] * 3
LOAD = SglangLoad(
    page_size=4,
    size=100,
    chunk=16,
    max_running=4,
    asks=[Asked(3 * index, [*STEM, *[10 + index] * (5 + index)], [50 + index] * 40) for index in range(7)],
    ignore_eos=False,
    conservativeness=0.1,
)
"""Prompts that share their beginning, in a memory that is short: hits, retractions, evictions."""


class Recording:
    """A log of one engine, as its auditor hears it."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def open(self, config: EngineConfig, storage: Storage, planning: Planning) -> OpenedAudit:
        opening = open_audit(config, storage, planning)
        events = self.events

        class Opened:
            make_order = staticmethod(opening.make_order)

            def open(self, *args: Any, **named: Any) -> Any:
                reader = opening.open(*args, **named)

                class Reader:
                    def observe(self, told: Sequence[Event]) -> None:
                        events.extend(told)
                        reader.observe(told)

                return Reader()

        return Opened()


@pytest.fixture(scope="module")
def told() -> list[Event]:
    recording = Recording()
    for _ in kvarts_steps(LOAD, audit=recording.open):
        pass
    kinds = {type(event) for event in recording.events}
    assert kinds >= {Admitted, ChunkComputed, PagesStored, PagesRemoved, Preemption, Finished, StepDone}
    return recording.events


def audited(events: Sequence[Event], *, overlaps: bool = True) -> list[str]:
    auditor = BatchAuditor(LOAD.size // LOAD.page_size, LOAD.page_size, overlaps=overlaps)
    auditor.observe(events)
    return [str(finding) for finding in auditor.findings]


def test_a_log_as_it_was_passes(told: list[Event]) -> None:
    assert audited(told) == []
    assert audited(told, overlaps=False) != []


def first(events: Sequence[Event], kind: type, is_it: Callable[[Any], bool] = lambda event: True) -> int:
    return next(index for index, event in enumerate(events) if isinstance(event, kind) and is_it(event))


def damaged(kind: type, is_it: Callable[[Any], bool] = lambda event: True, **fields: Any) -> Callable[..., list[Event]]:
    """Return a function that changes the first event of a kind. A field may be a function of its value."""

    def damage(events: list[Event]) -> list[Event]:
        at = first(events, kind, is_it)
        new = {name: value(getattr(events[at], name)) if callable(value) else value for name, value in fields.items()}
        return [*events[:at], changed(events[at], **new), *events[at + 1 :]]

    return damage


def without(kind: type, is_it: Callable[[Any], bool] = lambda event: True) -> Callable[..., list[Event]]:
    def damage(events: list[Event]) -> list[Event]:
        at = first(events, kind, is_it)
        return [*events[:at], *events[at + 1 :]]

    return damage


def evicted_in_use(events: list[Event]) -> list[Event]:
    at = first(events, Admitted, lambda event: event.num_hit_pages)
    content: Content = events[at].content  # type: ignore[union-attr]
    return [*events[: at + 1], PagesRemoved(content, 0, 1), *events[at + 1 :]]


DAMAGES: dict[str, tuple[Callable[..., list[Event]], str]] = {
    "a hit that is longer": (
        damaged(Admitted, lambda event: event.num_hit_pages, num_hit_pages=lambda count: count + 1),
        "are resident",
    ),
    "a hit that is shorter": (
        damaged(Admitted, lambda event: event.num_hit_pages, num_hit_pages=0),
        "was hit 0 pages far",
    ),
    "tokens that are computed twice": (damaged(ChunkComputed, lambda event: event.start, start=0), "from 0 of"),
    "tokens that are not computed": (damaged(ChunkComputed, end=lambda end: end - 1), "computes tokens from"),
    "pages that can be found and are not told": (without(PagesStored), "no event says that it can be found"),
    "pages that nobody computed": (
        damaged(PagesStored, end_page=lambda end: end + 1),
        "no request has computed it",
    ),
    "pages that follow no page": (
        damaged(PagesStored, lambda event: event.start_page, parent=None),
        "does not precede it",
    ),
    "an eviction of what is in use": (evicted_in_use, "while it is in use"),
    "an eviction of half a run, from its front": (
        damaged(PagesRemoved, lambda event: event.end_page - event.start_page > 1, end_page=lambda end: end - 1),
        "before the page after it",
    ),
    "an eviction that is not told": (without(PagesRemoved), "is resident"),
    "a step that counts other memory": (damaged(StepDone, num_used=lambda count: count + 1), "the step counts"),
    "a step with other decodes": (damaged(StepDone, num_tokens=lambda count: count + 1), "decodes, and there are"),
    "tokens that a retraction did not lose": (
        damaged(Preemption, num_computed_tokens=lambda count: count - 1),
        "tokens; it had",
    ),
    "a retraction that is not told": (without(Preemption), ""),
    "an end that is too early": (
        lambda events: [
            *events[: (at := first(events, Finished)) - 6],
            events[at],
            *events[at - 6 : at],
            *events[at + 1 :],
        ],
        "finished with",
    ),
    "an end that is not told": (without(Finished), ""),
    "a request that is not there": (damaged(Admitted, request=99), "is not there"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_the_audit_finds_what_is_damaged(told: list[Event], name: str) -> None:
    damage, words = DAMAGES[name]
    findings = audited(damage(told))
    assert findings and any(words in finding for finding in findings), findings


# Engines that are wrong -----------------------------------------------------------------------------------


def finds_less(original: Any, tree: RadixTree, match: Any) -> None:
    match.num_pages = max(0, match.num_pages - 1)
    original(tree, match)


def leaks(original: Any, cache: RadixCache, *args: Any) -> None:
    original(cache, *args)
    cache.num_free -= 1


def evicts_more(original: Any, cache: RadixCache, count: int) -> None:
    original(cache, count + 8)


def keeps(original: Any, tree: HostRadixTree, copy: HostCopy) -> None:
    original(tree, copy)
    tree.lock(copy.node)


def leaks_below(original: Any, tree: HostRadixTree, node: Any) -> None:
    original(tree, node)
    tree.num_free_below -= 1


def says_nothing(original: Any, tree: HostRadixTree, node: Any) -> None:
    pass


FAULTS: dict[str, tuple[type, str, Callable[..., None], float, str]] = {
    "finds a page less": (RadixTree, "visit", finds_less, 0, "are resident"),
    "loses a page with each insertion": (RadixCache, "insert", leaks, 0, "the engine counts"),
    "evicts more than it must": (RadixCache, "make_room", evicts_more, 0, "pages were empty"),
    "keeps what a copy has read": (HostRadixTree, "end_copy", keeps, 1.0, "the engine counts"),
    "loses room in host memory": (HostRadixTree, "_drop", leaks_below, 0.5, "pages in host, the books"),
    "does not say what host memory evicts": (HostRadixTree, "_emit_removed_below", says_nothing, 0.5, "the books"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_audit_finds_an_engine_that_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the laws of its own counts, which find some of these, and sooner."""
    of, method, wrong, ratio, words = FAULTS[name]
    original = getattr(of, method)
    try:
        monkeypatch.setattr(of, method, lambda self, *args: wrong(original, self, *args))
    except (AttributeError, TypeError):
        pytest.skip(f"{method} is compiled, and cannot be replaced")
    monkeypatch.setattr(Scheduler, "check", lambda self: None)
    load = msgspec.structs.replace(LOAD, host_ratio=ratio)
    with pytest.raises(AuditError, match=words):
        for _ in kvarts_steps(load, audit=open_audit):
            pass

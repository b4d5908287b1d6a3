"""The auditor under an eviction order of a researcher: it follows the evictions it is told of, and judges them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any

import msgspec
import numpy as np
import pytest

from kvarts.core.config import EngineConfig
from kvarts.core.events import Admitted, CopiesRemoved, Event, PagesRemoved, PagesStored
from kvarts.core.kv.eviction import EvictionOrder, LruOrder
from kvarts.core.kv.groups import GroupMemory, PartGroup
from kvarts.proof.audit.auditor import AuditError, Finding, expect_same
from kvarts.sim.replaying import replay
from kvarts.sim.replica import NEVER_NS, Replica
from kvarts.sim.traffic.trace import Trace

from builders.case import Case, Row
from builders.engines import make_replica, whole_pages
from builders.grouped import FULL, WINDOW
from builders.guide_policies import LeastHits
from builders.orders import FewestHits, MostHits, plant_deaf
from builders.outcome import run_kvarts
from builders.tampering import PAGE_SIZE, SHARED, Plant, findings_of, hear, request, tamper, wrap

ORDERS: list[Callable[[], EvictionOrder]] = [LeastHits, FewestHits, partial(LruOrder)]


def run(
    plant: Plant | None, make_order: Callable[[], EvictionOrder] = LeastHits, memory: GroupMemory | None = None
) -> tuple[list[Finding], Replica]:
    """Pairs of requests that share a prefix and pairs that do not, by turns, on a device for little more than one."""
    config = EngineConfig(num_pages=13, page_size=PAGE_SIZE)
    engine = make_replica(config, audit=True, make_order=make_order, memory=memory)
    tokens = [
        [*SHARED, 100 + index, 7, 7, 7, 7] if index % 4 < 2 else [1000 + index, *range(20)] for index in range(12)
    ]
    return findings_of(engine, plant, [request(index, each, 6) for index, each in enumerate(tokens)]), engine


@pytest.mark.parametrize("make_order", ORDERS, ids=["LeastHits", "FewestHits", "lru"])
def test_an_engine_in_order_passes(make_order: Callable[[], EvictionOrder]) -> None:
    findings, engine = run(None, make_order)
    assert findings == []
    assert engine.scheduler.cache.num_evicted > 10


def test_the_order_is_not_lru() -> None:
    """Else the tests here show nothing."""
    told: list[list[tuple[int, int]]] = []
    for make_order in (LeastHits, LruOrder):
        evicted: list[tuple[int, int]] = []

        def keep(event: Event, evicted: list[tuple[int, int]] = evicted) -> Event:
            if isinstance(event, PagesRemoved):
                evicted.append((event.content.owner, event.start_page))
            return event

        findings, _ = run(lambda engine, keep=keep: tamper(engine, keep), make_order)  # type: ignore[misc]
        assert findings == []
        told.append(evicted)
    assert told[0] != told[1]


def test_a_double_free_is_found() -> None:
    def plant(engine: Replica) -> None:
        tree = whole_pages(engine.scheduler.cache).tree
        hits: list[Any] = []

        def pin(original: Callable[..., Any], match: Any) -> Any:
            path = original(match)
            if path and not hits:
                hits.append(path)
                for node in path:  # as if the references of the hit were never taken
                    node.refs -= 1
                tree.order.released(path)
                tree.num_cached += sum(node.end - node.start for node in path)
            return path

        wrap(tree, "pin", pin)
        wrap(engine.scheduler, "check", lambda original: None)  # which would find it first

    findings, _ = run(plant)
    assert "the step counts" in findings[0].what and "the engine counts" in findings[1].what
    assert any("the engine holds it 0 times, the ledger 1 times" in finding.what for finding in findings)


def test_a_lost_eviction_is_found() -> None:
    lost: list[Event] = []

    def change(event: Event) -> Event | None:
        if isinstance(event, PagesRemoved) and not lost:
            lost.append(event)
            return None
        return event

    findings, _ = run(lambda engine: tamper(engine, change))
    assert lost
    assert "was evicted and no event says so" in findings[0].what


def test_an_eviction_of_what_is_in_use_is_found() -> None:
    """The engine says that it evicted a page that the running request holds."""
    admitted: list[Admitted] = []
    changed: list[Event] = []

    def change(event: Event) -> Event | None:
        if isinstance(event, Admitted):
            admitted.append(event)
        if isinstance(event, PagesRemoved) and not changed and admitted[-1].num_hit_pages:
            changed.append(PagesRemoved(admitted[-1].content, 0, 1))
            return changed[0]
        return event

    findings, _ = run(lambda engine: tamper(engine, change))
    assert changed
    assert "was evicted while it was in use" in findings[0].what


def test_an_eviction_before_what_follows_it_is_found() -> None:
    """The engine says that it evicted the head of a run, and evicted its tail."""
    changed: list[Event] = []

    def change(event: Event) -> Event | None:
        if isinstance(event, PagesRemoved) and not changed and event.start_page > 1:
            changed.append(event)
            return msgspec.structs.replace(event, start_page=0, end_page=event.end_page - event.start_page)
        return event

    findings, _ = run(lambda engine: tamper(engine, change))
    assert changed
    assert any("was evicted before what follows it" in finding.what for finding in findings)


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("memory", [None, GroupMemory((PartGroup(FULL, 1), WINDOW))], ids=["whole pages", "KV groups"])
@pytest.mark.parametrize("make_order", [LeastHits, FewestHits])
def test_an_eviction_of_another_run_than_the_one_that_the_order_names_is_found(
    make_order: Callable[[], EvictionOrder], memory: GroupMemory | None, asks: bool
) -> None:
    assert run(None, make_order, memory)[0] == []
    findings, _ = run(lambda engine: plant_deaf(engine.scheduler.cache, asks=asks), make_order, memory)
    assert f"was evicted, and the order {'named pages' if asks else 'was not asked'}" in findings[0].what


def test_a_hit_of_what_is_gone_is_found() -> None:
    def change(event: Event) -> Event | None:
        if isinstance(event, Admitted) and event.request == 3:
            return msgspec.structs.replace(event, num_hit_pages=event.num_hit_pages + 1)
        return event

    findings, _ = run(lambda engine: tamper(engine, change))
    assert any("was hit and is not resident" in finding.what for finding in findings)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (PagesStored, "was stored, says an event, and should not have been"),
        (PagesRemoved, "was evicted while it is in use"),
        (CopiesRemoved, "was evicted (copy 1) while it is in use"),
    ],
)
def test_an_invented_event_is_found(kind: type[Any], what: str) -> None:
    invented: list[Event] = []

    def say_more(heard: Sequence[Event]) -> list[Event]:
        events = list(heard)
        stored = [event for event in events if isinstance(event, PagesStored)]
        if stored and not invented:
            one = stored[0]
            more: dict[Any, dict[str, Any]] = {PagesStored: {"parent": one.parent}, CopiesRemoved: {"copy": 1}}
            invented.append(kind(one.content, one.start_page, one.start_page + 1, **more.get(kind, {})))
            events.append(invented[0])
        return events

    findings, _ = run(lambda engine: hear(engine, say_more))
    assert invented
    assert findings[0].what == what


def test_which_of_several_copies_was_evicted_is_told() -> None:
    """Three copies of a page, the second in use: an order that evicts the third leaves the first one to be hit."""

    def row(arrival_ms: int, units: list[int], num_output_tokens: int) -> Row:
        return Row(arrival_ms, units, 4 * len(units), num_output_tokens, None, 0, None)

    same = [1] * 4
    computed_together = [row(0, same, num_output_tokens) for num_output_tokens in (3, 16, 1)]
    hit = row(300, [*same, 1], 6)
    case = Case([*computed_together, row(100, [2], 1), hit, row(480, [3], 1)], 4, 4, 9, 64, 8, "default", 1)

    events = run_kvarts(case, eviction=LeastHits).events[0]
    assert next(event.copy for event in events if isinstance(event, CopiesRemoved)) == 2


def test_an_eviction_of_another_copy_than_the_one_told_is_found() -> None:
    """The engine says that it evicted the copy that is in use."""

    def change(event: Event) -> Event:
        return msgspec.structs.replace(event, copy=1 - event.copy) if isinstance(event, CopiesRemoved) else event

    engine = make_replica(EngineConfig(num_pages=13, page_size=PAGE_SIZE), audit=True, make_order=LeastHits)
    tamper(engine, change)
    for index, num_output in enumerate((2, 34)):
        engine.submit(request(index, [*SHARED, 7, 7, 7, 7], num_output), 0)
    with pytest.raises(AuditError, match="was evicted while it was in use"):
        engine.run_until(NEVER_NS, [])


# A plain replay ----------------------------------------------------------------------------------------------


def row_of(index: int, unit: int) -> Row:
    return Row(300 * index, [unit] * 4 * PAGE_SIZE, 4 * PAGE_SIZE, 2, None, 0, None)


ONE_RETURNS = Case(
    [row_of(index, 0 if index % 2 else index) for index in range(12)], 1, PAGE_SIZE, 11, 64, 8, "default", 1
)
"""Every second prompt is the same, in a memory for two of them."""


def test_a_plain_replay_that_differs_is_found() -> None:
    """The audited replay has an order that the plain one has not."""

    def config(first: Callable[[], EvictionOrder]) -> Any:
        makers = chain([first], repeat(MostHits))

        def make() -> EvictionOrder:
            return next(makers)()

        return ONE_RETURNS.config(eviction=make, audit=True)

    replay(ONE_RETURNS.trace(), config(MostHits))
    with pytest.raises(AuditError, match="in a replay that is not audited") as caught:
        replay(ONE_RETURNS.trace(), config(FewestHits))
    step, request = caught.value.findings
    assert step.request is None
    assert request.request is not None and f"of request {request.request}, " in request.what
    # A stream is gone when the audited replay has ended.
    replay(Trace(iter(ONE_RETURNS.trace())), config(FewestHits))


def test_the_first_step_and_the_first_request_that_differ_are_named() -> None:
    requests = {"row": np.array([0, 1, 2]), "cached_tokens": np.array([0, 4, 8])}
    steps = {"used": np.array([3, 4, 5, 6]), "tokens": np.array([1, 1, 1, 1])}
    expect_same(requests, [steps, steps], dict(requests), [steps, dict(steps)])
    other = {**steps, "used": np.array([3, 4, 5, 7]), "tokens": np.array([1, 1, 2, 1])}
    fewer = {name: column[:1] for name, column in steps.items()}
    changed = {**requests, "cached_tokens": np.array([0, 4, 0])}
    for plain, row, words in (
        ([steps, other], 2, "tokens is 1, and 2 in a replay that is not audited in replica 1"),
        ([fewer, other], 1, "used is 4, and missing in a replay that is not audited in replica 0"),
    ):
        with pytest.raises(AuditError) as caught:
            expect_same(requests, [steps, steps], changed, plain)
        assert caught.value.findings == (
            Finding(row, words),
            Finding(3, "of request 2, cached_tokens is 8, and 0 in a replay that is not audited", 2),
        )

"""The auditor with tiers below: what is planted is found. That nothing else is, the laws of offloading show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvarts.core.config import EngineConfig
from kvarts.core.content import NOTHING, pack_units
from kvarts.core.events import Event, LoadStarted, PagesRemoved, PagesStored, StoreStarted
from kvarts.core.tiers.config import LoadKv, OffloadConfig
from kvarts.cost.polynomial import LinearCost
from kvarts.proof.audit.auditor import Finding
from kvarts.proof.audit.ledger import Ledger, LedgerGroup, LedgerPart
from kvarts.proof.audit.request_parts import PageDigests
from kvarts.proof.audit.tiers import EvictionsTold, TierBooks, Told
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.replica import Replica
from kvarts.sim.traffic.trace import Trace, TraceRequest

from builders.engines import make_replica, whole_pages
from builders.tampering import PAGE_SIZE, SHARED, Plant, findings_of, hear, request, tamper, wrap
from builders.tiers import offloader_of


def run(plant: Plant | None, policy: str = "eager", d2h: int = 10**6) -> tuple[list[Finding], Replica]:
    """Two prompts that share a beginning, in turns, on a device for one of them and host memory for both."""
    engine = make_replica(
        EngineConfig(num_pages=7, page_size=PAGE_SIZE),
        audit=True,
        offload=OffloadConfig(host_pages=20, policy=policy, target_free=3, d2h=d2h, kv_bytes_per_token=1000),  # type: ignore[arg-type]
    )
    requests = [request(index, [*SHARED, 10 + index % 2, *([index % 2] * 8)], 5) for index in range(6)]
    return findings_of(engine, plant, requests), engine


def tampering(change: Callable[[Event], Event | None]) -> Plant:
    return lambda engine: tamper(engine, change)


@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_an_engine_in_order_passes(policy: str) -> None:
    findings, engine = run(None, policy, d2h=10**8)
    assert findings == []
    assert offloader_of(engine).counts.num_loads > 0
    assert engine.scheduler.cache.num_evicted > 0


@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_pages_that_a_store_does_not_keep_are_found(policy: str) -> None:
    def plant(engine: Replica) -> None:
        tree = whole_pages(engine.scheduler.cache).tree
        wrap(tree, "hold_pages", lambda original, pages: None)
        wrap(tree, "unhold", lambda original, pages: [])
        wrap(engine.scheduler, "check", lambda original: None)  # which would find it first

    findings, _ = run(plant, policy)
    assert any("the engine counts" in finding.what for finding in findings)


def test_a_load_of_more_than_is_below_is_found() -> None:
    def change(event: Event) -> Event | None:
        if isinstance(event, LoadStarted):
            by_tier = tuple((name, count + 1) for name, count in event.by_tier)
            return msgspec.structs.replace(event, by_tier=by_tier)
        return event

    findings, _ = run(tampering(change))
    assert "pages are loaded, and" in findings[0].what


def test_what_is_below_and_not_loaded_is_found() -> None:
    def plant(engine: Replica) -> None:
        wrap(engine.scheduler.tiers, "lookup", lambda original, *args: None)

    findings, _ = run(plant)
    assert "is in host and was not loaded" in findings[0].what
    assert findings[0].request == 2


def test_a_store_of_what_is_not_there_is_found() -> None:
    def change(event: Event) -> Event | None:
        if isinstance(event, StoreStarted):
            return msgspec.structs.replace(
                event, runs=tuple((content, start, end + 1) for content, start, end in event.runs)
            )
        return event

    findings, _ = run(tampering(change))
    assert "is to be stored and is not resident" in findings[0].what


@pytest.mark.parametrize(
    ("kind", "what"),
    [(PagesStored, "was stored in host a second time"), (PagesRemoved, "was removed from host, and was not there")],
)
def test_a_tier_that_says_something_twice_is_found(kind: type[Any], what: str) -> None:
    def plant(engine: Replica) -> None:
        def again(event: Event) -> list[Event]:
            if isinstance(event, PagesStored) and event.medium == "host":
                told = event if kind is PagesStored else PagesRemoved(event.content, 0, 1, "host")
                return [told, told, event]
            return [event]

        hear(engine, lambda events: [told for event in events for told in again(event)])

    findings, _ = run(plant)
    assert what in findings[0].what


def told(used: str | None = None, *below: str) -> tuple[EvictionsTold, dict[str, LedgerPart], list[tuple[str, bytes]]]:
    """Pages a, then b and c after it, all cached but the one in use; some of them are below."""
    books = TierBooks(("host", "disk"), full_prompt_hits=False)
    findings: list[tuple[str, bytes]] = []
    evictions = EvictionsTold(books, 2, lambda what, group, name: findings.append((what, name)), PageDigests())
    ledger = evictions.ledger = Ledger((LedgerGroup("full", 1),), 3, choose=evictions.choose)
    parts = {}
    for name, before in (("a", None), ("b", b"a"), ("c", b"a")):
        part = parts[name] = taken(ledger)
        ledger.publish(part, name.encode(), before=before)
    for name, part in parts.items():
        if name != used:
            ledger.release(part)
        if name in below:
            books.add("host", name.encode())
    return evictions, parts, findings


def taken(ledger: Ledger) -> LedgerPart:
    part = ledger.take(0)
    assert part is not None
    return part


@pytest.mark.parametrize(
    ("says", "below", "what"),
    [
        ("b", "b", None),
        ("c", "", None),
        ("c", "b", "was lost, and there was a page to evict that a tier below has"),
        ("a", "abc", "was evicted before what follows it"),
        ("b", "a", None),
    ],
)
def test_an_eviction_is_judged(says: str, below: str, what: str | None) -> None:
    evictions, parts, findings = told(None, *below)
    evictions.told.append(Told(0, says.encode(), 0, NOTHING, 0))
    evictions.ledger.reserve(1)
    assert parts[says].name is None
    assert findings == ([] if what is None else [(what, says.encode())])


def test_an_eviction_of_what_is_in_use_is_found() -> None:
    evictions, parts, findings = told("b")
    evictions.told.append(Told(0, b"b", 0, NOTHING, 0))
    evictions.ledger.reserve(1)
    assert parts["a"].name is None and parts["b"].name == b"b"
    assert findings == [("was evicted while it was in use", b"b")]


@pytest.mark.parametrize(("load_kv", "num_loads"), [("placed", 1), ("async", 2)])
def test_a_client_that_gives_up_during_a_load_leaves_what_the_audit_expects(load_kv: LoadKv, num_loads: int) -> None:
    """With asynchronous loads, pages of a load that nobody waits for any more are not findable."""
    prompts = [list(range(10)), list(range(100, 110)), list(range(10)), list(range(10))]
    rows = [
        TraceRequest(
            index,
            index * 100_000_000,
            pack_units(units),
            len(units),
            2,
            cancel_after_ns=1_000_000 if index == 2 else None,
        )
        for index, units in enumerate(prompts)
    ]
    config = ReplayConfig(
        page_size=1,
        num_pages=12,
        cost=LinearCost(step_ms=1.0, chunk_token_ms=5.0),
        audit=True,
        offload=OffloadConfig(host_pages=40, load_kv=load_kv, h2d="1MB/s", d2h="1GB/s", kv_bytes_per_token=1000),
    )
    report = replay(Trace(rows), config)
    assert report.summary["num_cancelled"] == 1
    assert report.summary["transfers"]["num_loads"] == num_loads

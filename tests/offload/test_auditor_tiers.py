"""The auditor with tiers below: what is planted is found. That nothing else is, the laws of offloading show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvarts.audit.auditor import AuditError, Finding
from kvarts.audit.signals import FullBlock
from kvarts.audit.tiers import EvictionsTold, Followers, TierBooks
from kvarts.config import EngineConfig
from kvarts.events import Event, LoadStarted, PagesRemoved, PagesStored, StoreStarted
from kvarts.offload.config import OffloadConfig
from kvarts.sim.replica import Replica

from builders.engines import make_replica, whole_pages
from builders.tampering import PAGE_SIZE, SHARED, hear, request, tamper, wrap
from builders.tiers import offloader_of

Plant = Callable[[Replica], None]


def run(plant: Plant | None, policy: str = "eager") -> tuple[list[Finding], Replica]:
    """Two prompts that share a beginning, in turns, on a device for one of them and host memory for both."""
    engine = make_replica(
        EngineConfig(num_pages=7, page_size=PAGE_SIZE),
        audit=True,
        offload=OffloadConfig(host_pages=20, policy=policy, target_free=3, d2h=10**6, kv_bytes_per_token=1000),  # type: ignore[arg-type]
    )
    if plant is not None:
        plant(engine)
    now_ns = 0
    try:
        for index in range(6):
            tokens = [*SHARED, 10 + index % 2, *([index % 2] * 8)]
            engine.submit(request(index, tokens, 5), now_ns)
            while engine.has_work:
                engine.start(now_ns, now_ns + 1)
                now_ns = engine.now_ns
                engine.finish()
    except AuditError as error:
        return list(error.findings), engine
    return [], engine


def tampering(change: Callable[[Event], Event | None]) -> Plant:
    return lambda engine: tamper(engine, change)


@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_an_engine_in_order_passes(policy: str) -> None:
    findings, engine = run(None, policy)
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


def told(used: str | None = None, **below: bool) -> tuple[EvictionsTold, dict[str, FullBlock], list[tuple[str, bytes]]]:
    """Pages a, then b and c after it, all cached but the one in use; some of them are below."""
    books = TierBooks(full_prompt_hits=False)
    blocks = {name: FullBlock(name.encode()) for name in "abc"}
    copies = {name.encode(): [block] for name, block in blocks.items()}
    in_use = None if used is None else blocks[used]
    findings: list[tuple[str, bytes]] = []
    followers = Followers()
    evictions = EvictionsTold(
        books,
        copies,
        {block: name.encode() for name, block in blocks.items()},
        followers,
        lambda what, digest: findings.append((what, digest)),
        is_evictable=lambda block: block is not in_use,
    )
    followers.born(b"a", None)
    followers.born(b"b", b"a")
    followers.born(b"c", b"a")
    for name, is_below in below.items():
        if is_below:
            books.add("host", name.encode())
    return evictions, blocks, findings


@pytest.mark.parametrize(
    ("says", "below", "what"),
    [
        ("b", {"b": True}, None),
        ("c", {}, None),
        ("c", {"b": True}, "was lost, and there was a page to evict that a tier below has"),
    ],
)
def test_an_eviction_is_judged(says: str, below: dict[str, bool], what: str | None) -> None:
    evictions, blocks, findings = told(None, **below)
    evictions.told.append((says.encode(), 0))
    assert evictions.choose(iter(blocks.values())) is blocks[says]
    assert [digest for _, digest in findings] == ([] if what is None else [says.encode()])
    assert all(what is not None and what in found for found, _ in findings)


def test_an_eviction_is_judged_by_what_tiers_had_when_it_was_told() -> None:
    evictions, blocks, findings = told(None, b=True)
    books = evictions._books
    assert books is not None
    for name in ("b", "c"):
        evictions.told.append((name.encode(), 0))
        evictions.hear([name.encode()])
    books.remove("host", b"b")  # it was there when its eviction was told
    assert evictions.choose(iter(blocks.values())) is blocks["b"]
    books.add("host", b"b")  # and it was not there when that of the other was
    assert evictions.choose(iter(blocks.values())) is blocks["c"]
    assert findings == []
    evictions.begin()
    evictions.told.append((b"c", 0))
    evictions.hear([b"c"])
    evictions.choose(iter(blocks.values()))
    assert [digest for _, digest in findings] == [b"c"]


def test_an_eviction_of_what_is_in_use_is_found() -> None:
    evictions, blocks, findings = told(used="b")
    evictions.told.append((b"b", 0))
    assert evictions.choose(iter([blocks["c"]])) is blocks["c"]
    assert findings == [("was evicted while it was in use", b"b")]

"""The auditor finds what is planted, with step and page; that it finds nothing else, the laws show."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest

from kvarts.base.errors import ConfigError
from kvarts.core.config import EngineConfig
from kvarts.core.content import Content
from kvarts.core.events import Event, PagesRemoved, PagesStored
from kvarts.core.kv.cache import Cache
from kvarts.core.kv.eviction import walk
from kvarts.core.kv.groups import GroupMemory, PartGroup
from kvarts.core.kv.page_cache import PageCache
from kvarts.proof.audit.auditor import AuditError, Auditor, Finding
from kvarts.sim.replica import Replica

from builders.case import Case, Row
from builders.engines import make_replica, whole_pages
from builders.grouped import FULL
from builders.laws import assert_as_in_naive
from builders.outcome import run_kvarts
from builders.tampering import PAGE_SIZE, SHARED, Plant, findings_of, request, tamper, wrap

FULL_GROUP = PartGroup(FULL, 2)


def run(plant: Plant | None, *, num_pages: int = 40) -> list[Finding]:
    """Four requests with a shared prefix of three pages, one after the other half way; what the audit says."""
    engine = make_replica(EngineConfig(num_pages=num_pages, page_size=PAGE_SIZE), audit=True)
    requests = [request(index, [*SHARED, 100 + index, 200 + index, 0, 0, index], 14) for index in range(4)]
    return findings_of(engine, plant, requests, most_steps=4)


@pytest.mark.parametrize("num_pages", [40, 16, 11])
def test_an_engine_in_order_passes(num_pages: int) -> None:
    assert run(None, num_pages=num_pages) == []


def test_the_last_free_page_goes_to_the_decode_that_was_admitted_first() -> None:
    """A short prompt is computed before a long one that was admitted before it, and both then need a page."""
    rows = [
        Row(0, [0] * 7, 7, 3, None, -1, None),
        Row(0, [1] * 8, 8, 3, None, 0, None),
        Row(20, [0], 1, 4, None, 0, None),
    ]
    case = Case(rows, 1, 1, 21, 8, 3, "default", 1, long_prefill_token_threshold=2)
    outcome = run_kvarts(case)
    assert [(done.victim, done.asker) for _, done in outcome.steps[0].preemptions] == [(0, 0)]
    assert_as_in_naive(case, outcome, *case.naive())


def test_a_double_free_is_found() -> None:
    """When request 0 ends, its references to the shared prefix are dropped twice."""

    def plant(engine: Replica) -> None:
        tree = whole_pages(engine.scheduler.cache).tree
        num_releases = 0

        def release(original: Callable[..., None], path: Any) -> None:
            nonlocal num_releases
            num_releases += 1
            if num_releases == 1:
                # As if every other holder had dropped the shared prefix, too.
                *_, first = walk(path)
                for _ in range(first.refs - 1):
                    original([first])
            original(path)

        wrap(tree, "release", release)

    first, *pages = run(plant)
    assert first.step == 13
    assert "the engine counts" in first.what
    assert [(finding.request, finding.page) for finding in pages] == [(0, 0), (0, 1), (0, 2)]
    assert all("the engine holds it 0 times, the ledger 3 times" in finding.what for finding in pages)


def test_a_leak_is_found() -> None:
    """When request 1 ends, its last run of pages is not released."""

    def plant(engine: Replica) -> None:
        num_releases = 0

        def release(original: Callable[..., None], path: Any) -> None:
            nonlocal num_releases
            num_releases += 1
            original(path[:-1] if num_releases == 2 else path)

        wrap(whole_pages(engine.scheduler.cache).tree, "release", release)

    first, *pages = run(plant)
    assert first.step == 17
    assert {finding.request for finding in pages} == {1}
    assert {finding.page for finding in pages} <= set(range(3, 8)) and pages
    assert all("the engine holds it 1 times, the ledger 0 times" in finding.what for finding in pages)


def test_a_leaked_private_page_is_found() -> None:
    """A page that is only counted is not given back."""

    def plant(engine: Replica) -> None:
        cache = engine.scheduler.cache
        original_close = type(cache).close

        class LeakyCache(type(cache)):  # type: ignore[misc]
            __slots__ = ()

            def close(self, *args: Any) -> None:
                original_close(self, *args)
                self.num_free -= 1
                self.pool.take(1)

        cache.__class__ = LeakyCache

    findings = run(plant)
    assert findings[0].step == 13
    assert "the engine counts" in findings[0].what
    assert any("nothing else can find" in finding.what for finding in findings[1:])


def test_a_wrong_parent_is_found() -> None:
    """Pages of request 2 are said to follow pages of another prompt."""
    stranger = Content.from_tokens(range(500, 540), page_size=PAGE_SIZE, owner=0)

    def change(event: Event) -> Event | None:
        if isinstance(event, PagesStored) and event.content.owner == 2 and event.parent is not None:
            return PagesStored(event.content, event.start_page, event.end_page, stranger)
        return event

    findings = run(lambda engine: tamper(engine, change))
    assert (findings[0].step, findings[0].request, findings[0].page) == (8, 2, 3)
    assert "which does not precede it" in findings[0].what


@pytest.mark.parametrize(("kind", "what"), [(PagesStored, "was stored"), (PagesRemoved, "was evicted")])
def test_a_lost_event_is_found(kind: type[Event], what: str) -> None:
    lost: list[Any] = []

    def is_the_one(event: PagesStored | PagesRemoved) -> bool:
        return isinstance(event, PagesRemoved) or event.content.owner == 1

    def change(event: Event) -> Event | None:
        if isinstance(event, PagesStored | PagesRemoved) and isinstance(event, kind) and not lost and is_the_one(event):
            lost.append(event)
            return None
        return event

    findings = run(lambda engine: tamper(engine, change), num_pages=16)
    assert lost
    last_page = lost[0].end_page - 1
    first_told = lost[0].start_page if kind is PagesStored else last_page
    assert f"{what} and no event says so" in findings[0].what
    assert (findings[0].request, findings[0].page) == (lost[0].content.owner, first_told)
    assert findings[0].step > 0


def test_an_invented_event_is_found() -> None:
    def change(event: Event) -> Event | None:
        if isinstance(event, PagesStored) and event.content.owner == 1:
            return PagesStored(event.content, event.start_page, event.end_page + 1, event.parent)
        return event

    findings = run(lambda engine: tamper(engine, change))
    assert "says an event, and should not have been" in findings[0].what
    assert (findings[0].step, findings[0].request) == (4, 1)


def test_a_hit_of_what_is_gone_is_found() -> None:
    """The tree answers a page too many."""

    def plant(engine: Replica) -> None:
        from kvarts.core.events import Admitted

        def change(event: Event) -> Event | None:
            if isinstance(event, Admitted) and event.request == 3:
                return Admitted(event.request, event.content, event.num_hit_pages + 1)
            return event

        tamper(engine, change)

    findings = run(plant)
    assert (findings[0].step, findings[0].request, findings[0].page) == (12, 3, 3)
    assert "was hit and is not resident" in findings[0].what


class Miscounting:
    """What an engine says of its pages, with some used pages more."""

    def __init__(self, cache: PageCache) -> None:
        self.cache = cache
        self.num_too_many = 0

    @property
    def num_used(self) -> int:
        return self.cache.num_used + self.num_too_many

    @property
    def num_cached(self) -> int:
        return self.cache.num_cached

    @property
    def num_reserved(self) -> int:
        return self.cache.num_reserved

    def counts(self) -> tuple[int, ...]:
        return self.cache.counts()

    def runs(self) -> Iterable[tuple[int, Content, int, int, int]]:
        return self.cache.runs()


def test_an_auditor_that_knows_what_counts_pages_compares_by_itself() -> None:
    """Handed in as a reader of events, it needs nothing else of the engine."""
    counts: Miscounting
    auditor = Auditor(40, PAGE_SIZE, account=lambda: cast(Cache, counts))
    config = EngineConfig(num_pages=40, page_size=PAGE_SIZE)
    engine = make_replica(config, readers=[auditor])
    counts = Miscounting(whole_pages(engine.scheduler.cache))
    assert auditor.wants_details
    engine.submit(request(0, [*SHARED, 1, 2], 14), 0)
    engine.start(0)
    engine.finish()
    assert not auditor.findings
    counts.num_too_many = 1
    engine.start(engine.now_ns)
    with pytest.raises(AuditError, match="the engine counts 1 pages used and 6 cached, the ledger 0 and 6"):
        engine.finish()


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"num_draft_slots": 2}, "drafts before prompts"),
        ({"hands_over": True, "plans_ahead": True}, "engines hand over, with steps that are planned ahead"),
        ({"hands_over": True, "memory": GroupMemory((FULL_GROUP,))}, "engines hand over, with KV groups"),
    ],
)
def test_an_audit_refuses_what_its_ledger_does_not_follow(parts: dict[str, Any], words: str) -> None:
    config = EngineConfig(num_pages=40, page_size=PAGE_SIZE)
    with pytest.raises(ConfigError, match=f'audit: has a ledger that does not follow .*{words}.*"laws"'):
        make_replica(config, audit=True, **parts)


def test_the_laws_alone_are_asserted_where_that_was_asked_for() -> None:
    config = EngineConfig(num_pages=40, page_size=PAGE_SIZE)
    engine = make_replica(config, audit="laws", hands_over=True, plans_ahead=True)
    engine.submit(request(0, [*SHARED, 1, 2], 14), 0)
    engine.start(0)
    cache = whole_pages(engine.scheduler.cache)
    cache.num_free += 1
    with pytest.raises(AssertionError, match="L1"):
        engine.finish()

"""Orders that use hints and times, against a cache that looks at every page; without hints they are LRU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.content import Content
from kvarts.core.events import Event, PagesRemoved
from kvarts.core.hints import Hints, RetainedRange
from kvarts.core.kv.eviction import LruOrder
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.kv.pool import CountPool
from kvarts.core.kv.tree import PrefixTree
from kvarts.core.tiers.safe_first import SafeFirst
from kvarts.plan.cache import CachePlan, serial_hits
from kvarts.sim.orders import HintedOrder, SoonestReturnOrder
from kvarts.sim.sharing.memory import AgedOrder, ReleaseClock
from kvarts.sim.traffic.trace import Trace, TraceRequest

from builders.plan_traces import small_traces
from oracles.hinted_pages import Claims, NaivePages, of_page
from published_orders import ToolTtlOrder, best_ttl_ns

pytestmark = pytest.mark.laws

S = 1_000_000_000
NUM_PAGES = 9


def hinted_rank(claims: Claims, now_ns: int) -> tuple[float, ...]:
    """The largest priority since all times to live had passed, and whether one has not passed."""
    ends = [
        (at_ns, at_ns + (hints.ttl_ns if hints.ttl_ns is not None else 2 * (hints.pause_ns or 0)), hints)
        for at_ns, hints in claims
    ]
    since = 0
    for index in range(1, len(ends) + 1):
        at_ns = ends[index][0] if index < len(ends) else now_ns
        forever = any(
            hints.priority and hints.ttl_ms is None and hints.pause_ms is None for _, _, hints in ends[since:index]
        )
        if not forever and max(end_ns for _, end_ns, _ in ends[:index]) <= at_ns:
            since = index
    priority = max((hints.priority or 0 for _, _, hints in ends[since:]), default=0)
    return (priority, max(end_ns for _, end_ns, _ in ends) > now_ns)


def soonest_rank(claims: Claims, now_ns: int) -> tuple[float, ...]:
    """Whether any client is waited for, and when the last one returns."""
    pauses = [(at_ns, hints.pause_ns) for at_ns, hints in claims if hints.pause_ns is not None]
    if not any(at_ns + 2 * pause_ns > now_ns for at_ns, pause_ns in pauses):
        return (0, 0)
    return (1, -sum(pauses[-1]))


ORDERS: dict[str, tuple[Callable[[], Any], Callable[[Claims, int], tuple[float, ...]]]] = {
    "hinted": (HintedOrder, hinted_rank),
    "soonest-return": (SoonestReturnOrder, soonest_rank),
}

times_ms = st.none() | st.sampled_from([0.0, 1000.0, 2000.0, 5000.0])
prompts: st.SearchStrategy[list[int]] = st.lists(st.integers(0, 1), min_size=1, max_size=6)
ranges = st.builds(
    lambda start, length, **claim: RetainedRange(start=start, end=length and start + length, **claim),
    start=st.integers(0, 5),
    length=st.none() | st.integers(1, 4),
    priority=st.none() | st.integers(-1, 2),
    ttl_ms=times_ms,
)
hints_of = st.none() | st.builds(
    Hints,
    priority=st.none() | st.integers(-1, 2),
    ttl_ms=times_ms,
    pause_ms=times_ms,
    tool=st.sampled_from([None, "a"]),
    retain=st.just(()) | st.lists(ranges, max_size=3).map(tuple),
)


@pytest.mark.parametrize("name", list(ORDERS))
@pytest.mark.parametrize("wrap", [lambda order: order, lambda order: AgedOrder(order, ReleaseClock())])
@given(rows=st.lists(st.tuples(st.integers(0, 4), prompts, hints_of), max_size=14))
def test_what_goes_next_is_what_a_look_at_every_page_says(
    name: str, wrap: Callable[[Any], Any], rows: list[tuple[int, list[int], Hints | None]]
) -> None:
    make, rank = ORDERS[name]
    naive = NaivePages(NUM_PAGES, rank)
    cache = PageCache(CountPool(NUM_PAGES), PrefixTree(wrap(make())))
    events: list[Event] = []
    cache.tree.emit = events.append
    now_ns = 0
    for owner, (passed_s, tokens, hints) in enumerate(rows):
        now_ns += passed_s * S
        events.clear()
        content = Content.from_tokens(tokens, page_size=1, owner=owner, hints=hints)
        cache.set_time(now_ns)
        table = cache.open(cache.match(content, len(tokens)))
        found = table.num_pages
        cache.grow(table, len(tokens))
        cache.close(table, len(tokens), len(tokens))
        cache.check([])
        evicted = [
            tuple(event.content.tokens(0, page + 1))
            for event in events
            if isinstance(event, PagesRemoved)
            for page in reversed(range(event.start_page, event.end_page))
        ]
        assert (found, evicted) == naive.serve(tokens, hints, now_ns)


def test_a_low_priority_counts_where_no_earlier_claim_holds() -> None:
    """A prompt without hints claims nothing, so the page that it shares has the priority of the next request."""
    order = HintedOrder()
    cache = PageCache(CountPool(9), PrefixTree(order))
    for owner, (tokens, hints) in enumerate([([1, 2], None), ([1], Hints(priority=-1)), ([3], None)]):
        content = Content.from_tokens(tokens, page_size=1, owner=owner, hints=hints)
        table = cache.open(cache.match(content, len(tokens)))
        cache.grow(table, len(tokens))
        cache.close(table, len(tokens), len(tokens))
    assert [run.place.priority for run in order] == [-1, 0, 0]


@pytest.mark.parametrize("make", [HintedOrder, SoonestReturnOrder])
@given(small_traces(), st.integers(1, 4), st.integers(1, 20))
def test_without_hints_it_is_lru(make: Callable[[], Any], trace: Trace, page_size: int, num_pages: int) -> None:
    plan = CachePlan(trace, page_size)
    assert serial_hits(trace, page_size, num_pages, make) == plan.curve.hit_pages(num_pages)


@given(st.lists(st.integers(1, 20), max_size=12), st.sampled_from([0, 0.25, 1]), st.integers(0, 40))
def test_a_time_to_live_is_the_best_of_all(pauses: list[int], hits: float, life: int) -> None:
    def gain(ttl: int) -> float:
        """Returns before the end, minus the hits of others in the time kept."""
        return sum(pause <= ttl for pause in pauses) - sum(min(pause, ttl) for pause in pauses) * hits / life

    best = best_ttl_ns(pauses, hits, life)
    assert best in (0, *pauses)
    if life and best:
        assert gain(best) == pytest.approx(max(map(gain, pauses)))
    assert bool(best) == bool(life and any(gain(pause) > 0 for pause in pauses))


def sessions(tool: str | None) -> Trace:
    """Three sessions that return every second; between, one prompt that never returns, and every third second nine."""
    rows: list[TraceRequest] = []

    def ask(now_ns: int, which: int, name: str | None) -> None:
        first = 100 * which
        rows.append(TraceRequest(len(rows), now_ns, (range(first, first + 11),), 11, 1, hints=Hints(tool=name)))

    for second in range(120):
        for which in range(3):
            ask(second * S + which, which, tool)
        for each in range(9 if second % 3 == 2 else 1):
            ask(second * S + 10 + each, 100 + 10 * second + each, None)
    return Trace(rows)


def test_the_tool_of_a_pause_decides_how_long_it_is_kept() -> None:
    """Prompts that never return push sessions out of a pool for six, unless these have a tool that returns."""
    num_pages = 66
    lru, one, two = (
        serial_hits(sessions(tool), 1, num_pages, make)
        for tool, make in ((None, LruOrder), (None, ToolTtlOrder), ("bash", ToolTtlOrder))
    )
    assert lru == one < 0.9 * two
    assert two > 0.9 * 3 * 10 * 119


@given(st.lists(ranges, max_size=4).map(tuple), st.integers(1, 5), st.integers(1, 40))
def test_parts_of_a_prompt_are_as_long_as_their_pages_have_the_same_claim(
    retain: tuple[RetainedRange, ...], page_size: int, num_pages: int
) -> None:
    """A page has the claim of its first token, or a larger one of pages after it."""
    hints = Hints(priority=7, retain=retain)
    parts = hints.parts(page_size, num_pages)
    assert parts[0][0] == 0 and [first for first, _ in parts] == sorted({first for first, _ in parts})
    for page in range(num_pages):
        mine = [each for first, each in parts if first <= page][-1]
        assert mine == of_page(hints, page, num_pages, page_size)
    for (_, before), (_, after) in pairwise(parts):
        assert before != after


def test_a_range_of_the_prompt_ends_with_it() -> None:
    of_prompt = RetainedRange(start=4, priority=3, covers_output=False)
    hints = Hints(retain=(of_prompt, RetainedRange(priority=1)))
    assert hints.for_prompt(10) == Hints(retain=(RetainedRange(start=4, end=10, priority=3), RetainedRange(priority=1)))
    assert hints.for_prompt(4) == Hints(retain=(RetainedRange(priority=1),))
    assert Hints(priority=1).for_prompt(4) == Hints(priority=1)


def test_an_order_without_the_method_is_not_told() -> None:
    cache = PageCache(CountPool(4), PrefixTree(LruOrder()))
    assert not cache.keeps_time


def test_an_order_of_two_lists_tells_both() -> None:
    order = SafeFirst(HintedOrder)
    cache = PageCache(CountPool(6), PrefixTree(order, watcher=order))
    assert cache.keeps_time
    for owner, (tokens, hints) in enumerate([([1, 2], Hints(ttl_ms=5000)), ([3, 4], None), ([5, 6], None)]):
        content = Content.from_tokens(tokens, page_size=1, owner=owner, hints=hints)
        table = cache.open(cache.match(content, 2))
        cache.grow(table, 2)
        cache.close(table, 2, 2)
    assert list(order.next_run().content.tokens(0, 2)) == [3, 4]
    cache.set_time(6 * S)
    cache.close(cache.open(cache.match(Content.from_tokens([5], page_size=1, owner=9), 0)), 0, 0)
    assert list(order.next_run().content.tokens(0, 2)) == [1, 2]

"""Curves of all sizes equal one simulation a size, and the optimum equals the best of all that could be kept."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarts.core.kv.eviction import LruOrder
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.kv.pool import CountPool
from kvarts.core.kv.tree import PrefixTree
from kvarts.plan.curve import Optimum, lru_curve, stack_distances
from kvarts.plan.reuse import REQUESTS_PER_PASS, Reuse, find_reuse, find_token_reuse
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.request_columns import RequestColumns
from kvarts.sim.traffic.trace import Trace
from kvarts.sim.traffic.trace_request import PlainRow

from builders.plan_traces import small_traces
from oracles.naive_plan import best_of_all, naive_lru, naive_requests

pytestmark = pytest.mark.laws


@pytest.fixture
def sample_trace() -> Path:
    return Path(str(files("kvarts") / "data" / "mooncake-conversation-1000.jsonl"))


def lru_of_the_engine(trace: Trace, page_size: int, num_pages: int, *, count_outputs: bool = False) -> list[int]:
    """Pages that each request finds in the engine's own cache: the tree, the pool and the order of `kvarts replay`."""
    cache = PageCache(CountPool(num_pages), PrefixTree(LruOrder()))
    hits = []
    for owner, request in enumerate(trace):
        content = trace.content(request, page_size=page_size, owner=owner)
        num_computed = (request.num_prompt_tokens + request.num_output_tokens - 1) // page_size
        size = min(num_computed if count_outputs else min(content.num_known_pages, num_computed), num_pages)
        known = min(content.num_known_pages, size)
        match = cache.match(content, known)
        hits.append(min(match.num_pages, (request.num_prompt_tokens - 1) // page_size))
        table = cache.open(match)
        cache.grow(table, size)
        cache.publish_pages(table, known)
        cache.close(table, size, size)
        cache.check([])
    return hits


@given(small_traces(), st.integers(1, 8), st.booleans())
def test_the_curve_is_one_page_list_a_size(trace: Trace, page_size: int, count_outputs: bool) -> None:
    reuse = find_reuse(trace, page_size, count_outputs=count_outputs)
    curve = lru_curve(reuse)
    naive = naive_requests(trace, page_size, count_outputs=count_outputs)
    for num_pages in range(curve.most_pages + 3):
        assert curve.hit_pages(num_pages) == sum(naive_lru(naive, num_pages))


@given(small_traces(), st.integers(1, 8), st.booleans())
def test_the_curve_is_the_cache_of_the_engine(trace: Trace, page_size: int, count_outputs: bool) -> None:
    curve = lru_curve(find_reuse(trace, page_size, count_outputs=count_outputs))
    for num_pages in range(1, curve.most_pages + 3):
        hits = lru_of_the_engine(trace, page_size, num_pages, count_outputs=count_outputs)
        assert curve.hit_pages(num_pages) == sum(hits)


@given(small_traces(), st.integers(1, 8), st.integers(0, 40))
def test_each_request_finds_what_it_finds_in_a_page_list(trace: Trace, page_size: int, num_pages: int) -> None:
    reuse = find_reuse(trace, page_size)
    distances = stack_distances(reuse)
    found = np.clip(num_pages - distances, 0, reuse.hittable)
    by_request = np.bincount(reuse.request, found, len(reuse.num_pages)).tolist()
    assert by_request == naive_lru(naive_requests(trace, page_size), num_pages)


@given(small_traces(), st.integers(1, 8))
def test_spans_are_all_pages_once_and_their_order_is_that_of_use(trace: Trace, page_size: int) -> None:
    reuse = find_reuse(trace, page_size)
    naive = naive_requests(trace, page_size)
    last: dict[object, int] = {}
    rows = list(zip(reuse.request, reuse.start, reuse.end, reuse.previous, strict=True))
    for index, request in enumerate(naive):
        before = [last.get(page, -1) for page in request.pages]
        of_spans = [previous for row, start, end, previous in rows if row == index for _ in range(start, end)]
        assert of_spans == before
        last.update(dict.fromkeys(request.pages, index))


@st.composite
def plain_traces(draw: st.DrawFn) -> tuple[Trace, Trace]:
    """Return a trace of plain rows as columns, of which there are many in relation to their ids, and as a list."""
    unit_tokens, most_ids = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    ids = st.lists(st.sampled_from([0, 1, 2, 1 << 40]), min_size=1, max_size=most_ids)
    num_rows = most_ids * REQUESTS_PER_PASS + draw(st.integers(0, 5))
    rows = [
        PlainRow(len(each) * unit_tokens - draw(st.integers(0, unit_tokens - 1)), draw(st.integers(1, 3)), time, each)
        for time, each in enumerate(draw(st.lists(ids, min_size=num_rows, max_size=num_rows)))
    ]
    columns = RequestColumns()
    assert columns.add(rows, 0, unit_tokens) == num_rows
    return Trace(columns, unit_tokens=unit_tokens), Trace(list(columns), unit_tokens=unit_tokens)


@given(plain_traces())
def test_spans_of_columns_are_those_of_a_tree(traces: tuple[Trace, Trace]) -> None:
    found, expected = map(find_token_reuse, traces)
    for name in Reuse.__struct_fields__:
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name


@settings(max_examples=200)
@given(small_traces(most_requests=5, most_units=3), st.integers(2, 5), st.integers(0, 5))
def test_the_optimum_is_the_best_of_all_ways(trace: Trace, page_size: int, num_pages: int) -> None:
    naive = naive_requests(trace, page_size)
    if len({page for request in naive for page in request.pages}) > 7:
        return
    assert Optimum(find_reuse(trace, page_size)).hit_pages(num_pages) == best_of_all(naive, num_pages)


@given(small_traces(most_requests=25), st.integers(1, 8))
def test_the_optimum_is_never_below_lru_and_meets_it_at_the_ends(trace: Trace, page_size: int) -> None:
    reuse = find_reuse(trace, page_size)
    curve, optimum = lru_curve(reuse), Optimum(reuse)
    found = [optimum.hit_pages(num_pages) for num_pages in range(curve.most_pages + 2)]
    assert all(best >= curve.hit_pages(num_pages) for num_pages, best in enumerate(found))
    assert found == sorted(found)
    assert found[0] == 0
    assert found[-1] == curve.hit_pages(curve.most_pages) == sum(reuse.hittable)


@pytest.mark.parametrize("page_size", [pytest.param(16, marks=pytest.mark.slow), 512])
def test_the_curve_of_a_recorded_trace_is_the_cache_of_the_engine(sample_trace: Path, page_size: int) -> None:
    trace = load_trace(sample_trace)
    curve = lru_curve(find_reuse(trace, page_size))
    sizes = np.unique(np.geomspace(1, curve.most_pages + 1, 3).astype(int)).tolist()
    assert [curve.hit_pages(size) for size in sizes] == [sum(lru_of_the_engine(trace, page_size, n)) for n in sizes]


@pytest.mark.long
@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_forty_sizes_of_whole_traces(conversation_trace: Path, name: str) -> None:
    trace = load_trace(conversation_trace.with_name(f"{name}_trace.jsonl"))
    curve = lru_curve(find_reuse(trace, 512))
    for num_pages in np.geomspace(10, curve.most_pages + 1, 40).astype(int).tolist():
        assert curve.hit_pages(num_pages) == sum(lru_of_the_engine(trace, 512, num_pages))


@pytest.mark.parametrize(
    ("name", "of_blocks", "optimum_of_blocks"), [("conversation", 0.090, 0.320), ("synthetic", 0.248, 0.492)]
)
def test_known_figures(conversation_trace: Path, name: str, of_blocks: float, optimum_of_blocks: float) -> None:
    """At 4,000 pages of 512, as shares of the blocks of the trace, the last one of a prompt among them."""
    trace = load_trace(conversation_trace.with_name(f"{name}_trace.jsonl"))
    num_blocks = sum(len(request.units) // 8 for request in trace)
    reuse = find_reuse(trace, 512)
    assert lru_curve(reuse).hit_pages(4000) / num_blocks == pytest.approx(of_blocks, abs=0.0005)
    assert Optimum(reuse).hit_pages(4000) / num_blocks == pytest.approx(optimum_of_blocks, abs=0.0005)


def test_a_size_for_a_share_of_the_hits_is_the_smallest(sample_trace: Path) -> None:
    curve = lru_curve(find_reuse(load_trace(sample_trace), 512))
    for share in (0.1, 0.5, 0.9, 1.0):
        size = curve.size_for(share)
        most = curve.hit_pages(curve.most_pages)
        assert curve.hit_pages(size) >= share * most > curve.hit_pages(size - 1)

"""L1 to L4 for the page cache: against a list of pages and a dictionary, whatever is done in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarts.core.content import Content
from kvarts.core.kv.cache import BlockTable
from kvarts.core.kv.eviction import EvictionOrder, LruOrder
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.kv.pool import CountPool
from kvarts.core.kv.tree import PrefixTree

from builders.cache_machine import CacheMachine
from builders.orders import FewestHits
from oracles.page_by_page import FewestHitsPages, PageByPage

pytestmark = pytest.mark.laws


class IdCacheMachine(CacheMachine):
    with_page_ids = True


class FewestHitsMachine(CacheMachine):
    def make_order(self) -> EvictionOrder:
        return FewestHits()

    def make_model(self, num_pages: int) -> PageByPage:
        return FewestHitsPages(num_pages)


TestCountedPages = CacheMachine.TestCase
TestPagesWithIds = IdCacheMachine.TestCase
TestAnOrderOfOnesOwn = FewestHitsMachine.TestCase
for case in (TestCountedPages, TestPagesWithIds, TestAnOrderOfOnesOwn):
    case.settings = settings(stateful_step_count=40)
del case


def test_a_hit_inside_a_run_splits_it_and_the_tail_keeps_its_place() -> None:
    cache = PageCache(CountPool(16), PrefixTree(LruOrder()))

    def run(tokens: list[int], owner: int) -> None:
        content = Content.from_tokens(tokens, page_size=1, owner=owner)
        table = cache.open(cache.match(content, len(tokens)))
        cache.grow(table, len(tokens))
        cache.close(table, len(tokens), len(tokens))

    run([1, 2, 3, 4, 5, 6], 0)
    run([9], 1)
    run([1, 2, 3], 2)
    assert [(node.start, node.end) for node in cache.tree.order] == [(3, 6), (0, 1), (0, 3)]


def test_what_no_holder_accounts_for_is_found() -> None:
    """The audit bites: a page taken by nobody, and a block table forgotten."""
    cache = PageCache(CountPool(8), PrefixTree(LruOrder()))
    cache.take(1)
    with pytest.raises(AssertionError, match="L1"):
        cache.check([])
    cache = PageCache(CountPool(8), PrefixTree(LruOrder()))
    content = Content.from_tokens([1, 2, 3], page_size=1, owner=0)
    table = cache.open(cache.match(content, 3))
    cache.grow(table, 3)
    cache.publish_pages(table, 3)
    cache.check([(table, 3)])
    with pytest.raises(AssertionError, match="L2"):
        cache.check([])


def test_new_pages_after_a_run_that_was_hit_have_no_hits() -> None:
    """What an order remembers of a run is not said of pages that are computed later."""
    order = FewestHits()
    cache = PageCache(CountPool(3), PrefixTree(order))

    def run(content: Content, num_pages: int) -> None:
        table = cache.open(cache.match(content, num_pages))
        cache.grow(table, num_pages)
        cache.close(table, num_pages, num_pages)

    first, second = (Content.from_tokens([0], page_size=1, owner=owner) for owner in (0, 1))
    run(first, 1)
    run(first, 2)  # hits its page and computes another
    run(second, 2)  # hits the same page, and computes one of its own
    assert [(node.content, node.start) for node in order] == [(first, 1), (second, 1), (first, 0)]


@given(st.data())
def test_a_head_needs_no_less_until_pages_are_findable_that_can_follow_what_it_found(data: st.DataObject) -> None:
    """Whatever runs that were admitted before compute, and whatever is evicted for them."""
    cache = PageCache(CountPool(16), PrefixTree(LruOrder()))
    tokens = st.lists(st.integers(1, 2), min_size=1, max_size=6)
    running: list[BlockTable] = []

    def compute(table: BlockTable, num_tokens: int) -> None:
        if num_tokens - table.num_pages <= cache.num_free:
            cache.extend(table, num_tokens, is_end=False)

    def step() -> None:
        table = data.draw(st.sampled_from(running))
        num_computed = table.num_pages
        if data.draw(st.booleans()):
            compute(table, min(num_computed + data.draw(st.integers(1, 3)), table.content.num_known_pages + 2))
        else:
            running.remove(table)
            cache.close(table, num_computed, num_computed)

    for owner in range(data.draw(st.integers(1, 6))):
        content = Content.from_tokens(data.draw(tokens), page_size=1, owner=owner)
        running.append(cache.open(cache.match(content, 6)))
        compute(running[-1], data.draw(st.integers(1, 6)))
        if data.draw(st.booleans()):
            step()
    head = Content.from_tokens(data.draw(tokens), page_size=1, owner=9)
    found = cache.match(head, 6)
    needed = cache.needs.to_admit(found, 8, 8)
    cache.needs.watch()
    while running and not cache.needs.may_shrink(found.num_pages):
        assert cache.needs.to_admit(cache.match(head, 6), 8, 8) >= needed
        step()


def test_a_head_needs_less_when_the_first_of_two_copies_is_evicted_and_the_other_is_in_use() -> None:
    cache = PageCache(CountPool(16), PrefixTree(LruOrder()))
    first, second = (
        cache.open(cache.match(Content.from_tokens([1, 1], page_size=1, owner=owner), 2)) for owner in (0, 1)
    )
    for table in (first, second):
        cache.extend(table, 2, is_end=True)
    cache.close(first, 2, 2)
    head = Content.from_tokens([1, 1, 2], page_size=1, owner=2)
    assert cache.needs.to_admit(cache.match(head, 2), 3, 3) == 3
    cache.needs.watch()
    assert not cache.needs.may_shrink(2)
    cache.take(14)
    assert cache.needs.to_admit(cache.match(head, 2), 3, 3) == 1
    assert cache.needs.may_shrink(2)

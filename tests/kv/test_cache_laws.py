"""L1 to L4 for the page cache: against a list of pages and a dictionary, whatever is done in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import settings

from kvarts.content import Content
from kvarts.kv.eviction import EvictionOrder, LruOrder
from kvarts.kv.page_cache import PageCache
from kvarts.kv.pool import CountPool
from kvarts.kv.tree import PrefixTree

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
        holding = cache.open(cache.match(content, len(tokens)))
        cache.grow(holding, len(tokens))
        cache.close(holding, len(tokens), len(tokens))

    run([1, 2, 3, 4, 5, 6], 0)
    run([9], 1)
    run([1, 2, 3], 2)
    assert [(node.start, node.end) for node in cache.tree.order] == [(3, 6), (0, 1), (0, 3)]


def test_what_no_holder_accounts_for_is_found() -> None:
    """The audit bites: a page taken by nobody, and a holding forgotten."""
    cache = PageCache(CountPool(8), PrefixTree(LruOrder()))
    cache.take(1)
    with pytest.raises(AssertionError, match="L1"):
        cache.check([])
    cache = PageCache(CountPool(8), PrefixTree(LruOrder()))
    content = Content.from_tokens([1, 2, 3], page_size=1, owner=0)
    holding = cache.open(cache.match(content, 3))
    cache.grow(holding, 3)
    cache.publish_pages(holding, 3)
    cache.check([(holding, 3)])
    with pytest.raises(AssertionError, match="L2"):
        cache.check([])


def test_new_pages_after_a_run_that_was_hit_have_no_hits() -> None:
    """What an order remembers of a run is not said of pages that are computed later."""
    order = FewestHits()
    cache = PageCache(CountPool(3), PrefixTree(order))

    def run(content: Content, num_pages: int) -> None:
        holding = cache.open(cache.match(content, num_pages))
        cache.grow(holding, num_pages)
        cache.close(holding, num_pages, num_pages)

    first, second = (Content.from_tokens([0], page_size=1, owner=owner) for owner in (0, 1))
    run(first, 1)
    run(first, 2)  # hits its page and computes another
    run(second, 2)  # hits the same page, and computes one of its own
    assert [(node.content, node.start) for node in order] == [(first, 1), (second, 1), (first, 0)]

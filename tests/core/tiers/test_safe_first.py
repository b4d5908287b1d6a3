"""Safe pages first: L1 to L4 against pages one by one, and what every eviction order promises."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from kvarts.core.config import EngineConfig
from kvarts.core.content import Content
from kvarts.core.kv.cache import Match
from kvarts.core.kv.eviction import EvictionOrder, LruOrder, PinnedPages
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.kv.pool import CountPool
from kvarts.core.kv.tree import PrefixTree
from kvarts.core.tiers.config import OffloadConfig
from kvarts.core.tiers.opening import open_offloader
from kvarts.core.tiers.safe_first import NOT, STORED, SafeFirst
from kvarts.testing import EvictionOrderContract, drive, hold_found

from builders.cache_machine import CacheMachine
from builders.orders import FewestHits
from oracles.page_by_page import Name, PageByPage, SafeFirstPages

pytestmark = pytest.mark.laws

SMALL_STEPS = EngineConfig(page_size=1, max_num_batched_tokens=8, max_num_seqs=8)


class SafeFirstMachine(CacheMachine):
    def make_tree(self) -> PrefixTree:
        self.order = SafeFirst()
        return PrefixTree(self.order, self.events.append, watcher=self.order)

    def make_model(self, num_pages: int) -> PageByPage:
        return SafeFirstPages(num_pages)

    @property
    def stored(self) -> set[Name]:
        assert isinstance(self.model, SafeFirstPages)
        return self.model.stored

    def hold_match(self, match: Match, start: int, data: st.DataObject) -> PinnedPages:
        by_pointer = data.draw(st.booleans())
        if match.nodes and by_pointer:
            last = match.nodes[-1]
            one = data.draw(st.sampled_from(last.duplicates or [last]))
            match = Match(match.content, self.order.path_to(one, 0, match.num_pages), match.num_pages, 0)
        return hold_found(self.cache, match, start)

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), times=st.integers(1, 4))
    def mark(self, data: st.DataObject, times: int) -> None:
        """Several marks may come before what they move is moved."""
        for _ in range(times):
            transfer = data.draw(st.sampled_from(self.transfers))
            if any(page.orphans is not None for page in transfer.pages):
                continue
            below = data.draw(st.sampled_from([NOT, STORED, STORED]))
            start, end = sorted(data.draw(st.integers(0, len(transfer.pages))) for _ in range(2))
            first = transfer.held.start
            self.order.mark(self.cache.tree.isolate(transfer.held.runs, first + start, first + end), below)
            for page in transfer.pages[start:end]:
                assert page.name is not None
                (self.stored.add if below else self.stored.discard)(page.name)
        self.order.regroup()
        self.model.settle()

    @precondition(lambda self: self.closed)
    @rule(data=st.data(), limit=st.integers(1, 12))
    def store_at_once(self, data: st.DataObject, limit: int) -> None:
        content = data.draw(st.sampled_from(self.closed))
        tree, match = self.cache.tree, self.cache.match(content, limit)
        self.order.mark(tree.isolate(tree.cut(match), 0, match.num_pages), STORED)
        self.order.regroup()
        self.stored.update(page.name for page in self.model.lookup(self.names(content, limit)) if page.name)
        self.model.settle()

    @invariant()
    def counts_what_is_safe(self) -> None:
        if hasattr(self, "cache"):
            assert isinstance(self.model, SafeFirstPages)
            assert self.order.num_safe == sum(1 for page in self.model.safe if not page.holds)


TestSafePagesFirst = SafeFirstMachine.TestCase
TestSafePagesFirst.settings = settings(stateful_step_count=40)


class TestSafeFirstContract(EvictionOrderContract):
    def make_tree(self) -> PrefixTree:
        order = SafeFirst()
        return PrefixTree(order, watcher=order)


class TestSafeFirstOfAnOrderOfOnesOwn(EvictionOrderContract):
    def make_tree(self) -> PrefixTree:
        order = SafeFirst(FewestHits)
        return PrefixTree(order, watcher=order)


@pytest.mark.parametrize("make_order", [LruOrder, FewestHits])
@pytest.mark.parametrize("seed", range(5))
def test_what_is_below_is_known_whatever_comes_back_to_the_device(
    seed: int, make_order: Callable[[], EvictionOrder]
) -> None:
    """L4 for marks, also where a tier has the first pages only of what is computed again."""
    order = SafeFirst(make_order)
    cache = PageCache(CountPool(24), PrefixTree(order, watcher=order))
    config = OffloadConfig(host_pages=40, policy="lazy", target_free=8, kv_bytes_per_token=1000)
    offloader = open_offloader(config, cache, SMALL_STEPS, order=order)
    now_ns = 0

    def after(cache: PageCache) -> None:
        nonlocal now_ns
        now_ns += 20_000
        offloader.advance_to(now_ns)
        offloader.plan_stores(now_ns)
        offloader.check()

    drive(cache, seed, 300, after=after, transfers=offloader.holds)
    assert offloader.counts.num_stores > 0
    marked = [(node, order.below(node)) for node in cache.tree.nodes()]
    marked = [(node, below) for node, below in marked if below in (NOT, STORED)]
    assert {below for _, below in marked} == {NOT, STORED}
    for node, below in marked:  # a wrong mark of any run is noticed
        order.mark([node], STORED if below == NOT else NOT)
        order.regroup()
        with pytest.raises(AssertionError, match="L4"):
            offloader.check()
        order.mark([node], below)
        order.regroup()
        offloader.check()


def test_a_run_that_is_split_while_it_waits_to_move_moves_with_all_its_parts() -> None:
    order = SafeFirst()
    tree = PrefixTree(order, watcher=order)
    cache = PageCache(CountPool(16), tree)
    content = Content.from_tokens([1, 2, 3], page_size=1, owner=0)
    table = cache.open(cache.match(content, 3))
    cache.grow(table, 3)
    cache.close(table, 3, 3)
    order.mark(tree.isolate(tree.cut(cache.match(content, 3)), 0, 3), STORED)
    order.regroup()
    held = hold_found(cache, cache.match(content, 3))
    order.mark(tree.isolate(held.runs, 2, 3), NOT)
    order.mark(tree.isolate(held.runs, 0, 1), NOT)
    order.regroup()
    cache.check([], [held])
    assert [(node.start, node.end) for node in order.unsafe_nodes()] == [(2, 3), (1, 2), (0, 1)]


def test_marks_are_those_of_the_copy_that_is_found_where_the_copy_that_a_run_followed_was_evicted() -> None:
    """L4: two requests compute the same pages, two more pages follow the second copy, and a third finds the first."""
    order = SafeFirst()
    cache = PageCache(CountPool(10), PrefixTree(order, watcher=order))
    config = OffloadConfig(host_pages=64, policy="lazy", target_free=4, kv_bytes_per_token=1000)
    offloader = open_offloader(config, cache, SMALL_STEPS, order=order)
    content = [Content.from_tokens(range(6), page_size=1, owner=owner) for owner in range(3)]
    first, second = [cache.open(cache.match(each, 4)) for each in content[:2]]
    for table in (first, second):
        cache.grow(table, 4)
        cache.publish_pages(table, 4)
    cache.grow(second, 6)
    cache.close(second, 6, 6)
    third = cache.open(cache.match(content[2], 6))
    cache.close(first, 4, 4)
    cache.take(4)
    assert cache.num_cached == 0 and cache.match(content[2], 6).num_pages == 6, "the second copy was evicted"
    cache.close(third, 6, 6)
    offloader.plan_stores(0)
    offloader.advance_to(1 << 60)
    assert offloader.layout.tiers[0].held(content[2], 0, 6) == [(2, 6)]
    offloader.check()

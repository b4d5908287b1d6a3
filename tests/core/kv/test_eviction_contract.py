"""What every eviction order promises, for those of this room and for one that a researcher might write."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvarts.core.content import NOTHING, Content
from kvarts.core.kv.eviction import LruOrder, Node
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.kv.pool import IdPool
from kvarts.core.kv.tree import PrefixTree
from kvarts.testing import EvictionOrderContract, drive

from builders.guide_policies import LeastHits
from builders.orders import FewestHits

pytestmark = pytest.mark.laws


class TestLru(EvictionOrderContract):
    def make_tree(self) -> PrefixTree:
        return PrefixTree(LruOrder())


class TestAnOrderOfOnesOwn(EvictionOrderContract):
    def make_tree(self) -> PrefixTree:
        return PrefixTree(FewestHits())


class TestTheOrderOfTheGuide(EvictionOrderContract):
    def make_tree(self) -> PrefixTree:
        return PrefixTree(LeastHits())


def test_what_is_put_back_goes_first_in_the_same_order() -> None:
    order = LruOrder()
    old, young, *others = (Node(NOTHING, b"", page, page + 1, 0, None) for page in range(4))
    order.released([old, young])
    order.put_back(others)
    assert list(order) == [*others, old, young]


class FirstPagesFirst(LruOrder):
    """Names runs before those that follow them."""

    def __iter__(self) -> Iterator[Node]:
        return iter(sorted(super().__iter__(), key=lambda node: node.start))

    def next_run(self) -> Node:
        return next(node for node in self if not node.holds)


def test_a_run_between_the_named_one_and_one_that_is_held_is_evicted() -> None:
    """The held one leaves the tree, since a run before it is evicted; the one between them is nobody's to keep."""
    cache = PageCache(IdPool(9), PrefixTree(FirstPagesFirst()))
    content = Content.from_tokens(list(range(9)), page_size=1, owner=0)
    table = cache.open(cache.match(content, 9))
    cache.grow(table, 9)
    cache.publish_pages(table, 9)
    path = table.path
    cache.unhold(cache.hold(path, 4, 6))  # splits runs
    held = cache.hold(path, 6, 9)
    cache.close(table, 9, 9)
    cache.evict(3)
    cache.check([], [held])
    assert (cache.num_used, cache.num_cached, cache.num_free) == (3, 3, 6)
    cache.take(6)
    cache.unhold(held)
    assert cache.num_free == 3


@pytest.mark.parametrize("seed", range(20))
def test_the_laws_hold_with_an_order_that_names_first_pages_first(seed: int) -> None:
    drive(PageCache(IdPool(24), PrefixTree(FirstPagesFirst())), seed, num_turns=300)

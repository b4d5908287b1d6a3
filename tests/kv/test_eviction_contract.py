"""What every eviction order promises, for those of this room and for one that a researcher might write."""

from __future__ import annotations

import pytest

from kvarts.content import NOTHING
from kvarts.kv.eviction import LruOrder, Node
from kvarts.kv.tree import PrefixTree

from builders.eviction_contract import EvictionOrderContract
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

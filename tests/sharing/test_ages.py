"""Ages across the models of one device: the order that keeps them, and pages with ids in memory that is shared."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings

from kvarts.kv.eviction import EvictionOrder, LruOrder
from kvarts.kv.tree import PrefixTree
from kvarts.sharing.memory import AgedOrder, DeviceMemory, DevicePart, ReleaseClock, open_part

from builders.cache_machine import CacheMachine
from builders.engines import whole_pages
from builders.eviction_contract import EvictionOrderContract, leave
from builders.orders import FewestHits
from builders.parts import NO_OTHERS

pytestmark = pytest.mark.laws


class TestAged(EvictionOrderContract):
    def make_tree(self) -> PrefixTree:
        return PrefixTree(AgedOrder(LruOrder(), ReleaseClock()))


class TestAgedOfAnOrderOfOnesOwn(EvictionOrderContract):
    def make_tree(self) -> PrefixTree:
        return PrefixTree(AgedOrder(FewestHits(), ReleaseClock()))


class AgedMachine(CacheMachine):
    def make_order(self) -> EvictionOrder:
        return AgedOrder(LruOrder(), ReleaseClock())


TestAgedPages = AgedMachine.TestCase
TestAgedPages.settings = settings(stateful_step_count=40)


def test_the_oldest_run_of_all_models_goes_first() -> None:
    memory = DeviceMemory(60)
    parts = {
        name: open_part(name, memory, NO_OTHERS, page_bytes=size) for name, size in (("a", 10), ("b", 5), ("c", 10))
    }
    for owner, name in enumerate(("b", "a", "b")):
        leave(whole_pages(parts[name].cache), [10 * owner, 10 * owner + 1], owner)
    assert [parts[name].next_stamp for name in ("b", "a")] == [1, 2]
    parts["c"].refresh()
    parts["c"].cache.take(4)
    assert {name: part.cache.num_cached for name, part in parts.items()} == {"a": 1, "b": 2, "c": 0}
    memory.check()


@pytest.mark.parametrize("seed", range(4))
def test_each_model_numbers_its_own_pages(seed: int) -> None:
    """L1 with ids: each model's pages have one owner each, and all of them together fit the device."""
    dice = random.Random(seed)
    memory = DeviceMemory(60)
    parts: list[DevicePart] = [
        open_part("a", memory, NO_OTHERS, page_bytes=5, with_page_ids=True),
        open_part("b", memory, NO_OTHERS, page_bytes=3, with_page_ids=True, order=FewestHits()),
    ]
    for owner in range(200):
        part = dice.choice(parts)
        part.refresh()
        tokens = [dice.randrange(2) for _ in range(dice.randrange(1, 8))]
        leave(whole_pages(part.cache), tokens, owner)
        for each in parts:
            each.refresh()
            each.cache.check([])
    assert all(part.cache.num_evicted for part in parts)

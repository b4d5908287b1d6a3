"""Ages across the models of one device: the order that keeps them, and pages with ids in memory that is shared."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings

from kvarts.core.kv.eviction import EvictionOrder, LruOrder
from kvarts.core.kv.tree import PrefixTree
from kvarts.sim.sharing.memory import AgedOrder, DeviceMemory, DevicePart, ReleaseClock, open_part
from kvarts.testing import EvictionOrderContract, leave

from builders.cache_machine import CacheMachine
from builders.engines import whole_pages
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


@pytest.mark.parametrize("seed", range(60))
def test_pages_of_many_turns_are_taken_as_in_one_turn_after_the_other(seed: int) -> None:
    """The same pages are evicted, of all models, and the taker has as many cached after each turn."""
    after: list[list[int]] = []
    contents: list[list[tuple[int, int]]] = []
    for at_once in (False, True):
        dice = random.Random(seed)
        memory = DeviceMemory(dice.randrange(90, 130))
        sizes = dice.sample([2, 3, 5, 7], 3)
        guarantees = [dice.choice([0, 0, 10, 30]) for _ in sizes]
        parts = [
            open_part(name, memory, NO_OTHERS, page_bytes=size, guaranteed_bytes=guaranteed)
            for name, size, guaranteed in zip("abc", sizes, guarantees, strict=True)
        ]
        for owner in range(25):
            part = dice.choice(parts)
            part.refresh()
            leave(whole_pages(part.cache), [dice.randrange(3) for _ in range(dice.randrange(1, 7))], owner)
        taker = dice.choice(parts)
        taker.refresh()
        counts: list[int] = []
        while sum(counts) < taker.cache.num_free:
            counts.append(min(dice.choice([0, 0, 1, 1, 2, 5]), taker.cache.num_free - sum(counts)))
        if at_once:
            after.append(taker.take_in_turns(counts))
        else:
            after.append([])
            for count in counts:
                taker.cache.take(count)
                after[-1].append(taker.cache.num_cached)
        contents.append([(part.cache.num_cached, part.cache.num_evicted) for part in parts])
        memory.check()
    assert after[0] == after[1]
    assert contents[0] == contents[1]
    assert contents[0][parts.index(taker)][0] == 0

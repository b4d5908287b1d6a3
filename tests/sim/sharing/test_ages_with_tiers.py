"""Several models on one device, each with tiers below it: safe pages first within a model, the oldest across models."""

from __future__ import annotations

import random

import pytest

from kvarts.core.config import EngineConfig
from kvarts.core.kv.eviction import LruOrder
from kvarts.core.kv.tree import PrefixTree
from kvarts.core.tiers.config import OffloadConfig
from kvarts.core.tiers.opening import open_offloader
from kvarts.core.tiers.safe_first import SafeFirst
from kvarts.sim.sharing.memory import AgedOrder, DeviceMemory, ReleaseClock, open_part
from kvarts.testing import EvictionOrderContract, leave

from builders.engines import whole_pages
from builders.parts import NO_OTHERS

pytestmark = pytest.mark.laws

SMALL_STEPS = EngineConfig(page_size=1, max_num_batched_tokens=4, max_num_seqs=4)


class TestAgedSafeFirst(EvictionOrderContract):
    def make_tree(self) -> PrefixTree:
        safe_first = SafeFirst()
        return PrefixTree(AgedOrder(safe_first, ReleaseClock()), watcher=safe_first)


class TestSafeFirstOfAgedOrders(EvictionOrderContract):
    def make_tree(self) -> PrefixTree:
        clock = ReleaseClock()
        safe_first = SafeFirst(lambda: AgedOrder(LruOrder(), clock))
        return PrefixTree(safe_first, watcher=safe_first)


@pytest.mark.parametrize("policy", ["lazy", "eager"])
@pytest.mark.parametrize("seed", range(3))
def test_models_with_tiers_share_one_memory(policy: str, seed: int) -> None:
    dice = random.Random(seed)
    memory = DeviceMemory(60)
    parts, offloaders = [], []
    for name, page_bytes in (("a", 5), ("b", 3)):
        order = SafeFirst() if policy == "lazy" else None
        part = open_part(name, memory, NO_OTHERS, page_bytes=page_bytes, order=order, watcher=order)
        config = OffloadConfig(host_pages=16, policy=policy, kv_bytes_per_token=1000, target_free=4)  # type: ignore[arg-type]
        offloaders.append(open_offloader(config, whole_pages(part.cache), SMALL_STEPS, order=order))
        parts.append(part)
    for turn in range(300):
        which = dice.randrange(2)
        part, offloader = parts[which], offloaders[which]
        now_ns = turn * 20_000
        part.refresh()
        tokens = [dice.randrange(2) for _ in range(dice.randrange(1, 6))]
        if len(tokens) <= part.cache.num_free:
            content = leave(whole_pages(part.cache), tokens, turn)
            table = part.cache.open(part.cache.match(content, 0))
            offloader.confirm(content, part.cache.match(content, len(tokens)).num_pages, table)
        offloader.advance_to(now_ns)
        offloader.plan_stores(now_ns)
        for each, tiers in zip(parts, offloaders, strict=True):
            each.refresh()
            each.cache.check([], tiers.holds())
            tiers.check()
    assert all(offloader.counts.num_stores for offloader in offloaders)
    assert all(part.cache.num_evicted for part in parts)

"""Parts of pages that a step uses while their last layers are loaded."""

from __future__ import annotations

import pytest

from kvarts.core.content import Content
from kvarts.core.kv.group_pages import GroupPages, GroupsBelow, IncomingParts
from kvarts.core.kv.groups import GroupMemory, PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.core.kv.pool import CountPool
from kvarts.core.tiers import store_policy
from kvarts.core.tiers.channel import Channel
from kvarts.core.tiers.config import OffloadConfig
from kvarts.core.tiers.layout import ConnectedTier
from kvarts.core.tiers.offloader import Offloader
from kvarts.core.tiers.part_layout import PartLayout
from kvarts.core.tiers.part_policy import EagerParts
from kvarts.core.tiers.part_tier import PartTier

NUM_PAGES = 4
STEP_NS = 10**9


class Device:
    """A device of which host memory has room for one prompt, and files for several."""

    def __init__(self) -> None:
        memory = GroupMemory((PartGroup(KvLayer(kind="full", num_heads=1, head_numbers=2), part_bytes=1),), "all")
        self.cache = GroupPages(memory, CountPool(NUM_PAGES), page_size=1, most_new_tokens=8, below=GroupsBelow(2))
        tiers = [
            PartTier(name, num_blocks, memory, self.cache.parts.tree, place=place)
            for place, (name, num_blocks) in enumerate([("host", NUM_PAGES), ("disk", 4 * NUM_PAGES)])
        ]
        connected = [
            ConnectedTier(
                tier,
                Channel("to", latency_us=0.0, bytes_per_s=1000),
                Channel("from", latency_us=0.0, bytes_per_s=1000),
            )
            for tier in tiers
        ]
        self.policy = EagerParts(self.cache.parts)
        self.offloader = Offloader(
            self.cache, PartLayout(self.cache, connected, self.policy), OffloadConfig(num_layers=8)
        )
        self.now_ns = 0

    def serve(self, tokens: list[int]) -> Content:
        """Compute a prompt, and let the tiers store it."""
        content = Content.from_tokens(tokens, page_size=1, owner=tokens[0])
        parts = self.cache.parts
        table = parts.begin(content, parts.match(content, 0))
        parts.extend(table, NUM_PAGES)
        parts.close(table, NUM_PAGES, NUM_PAGES)
        self.cache.count()
        self.settle()
        return content

    def plan_stores(self) -> int:
        """Return how many stores and spills begin in the step."""
        num_transfers = self.offloader.num_transfers
        self.offloader.plan_stores(self.now_ns)
        return self.offloader.num_transfers - num_transfers

    def begin_step(self) -> None:
        """End all transfers, and begin a step."""
        self.now_ns += STEP_NS
        self.offloader.advance_to(self.now_ns)
        self.offloader.begin_step(self.now_ns)

    def settle(self) -> None:
        for _ in range(3):
            self.begin_step()
            self.plan_stores()
        self.begin_step()


def test_what_a_step_loads_is_copied_to_a_faster_tier_when_that_has_ended() -> None:
    device = Device()
    content = device.serve([0, 1, 2, 3])
    device.serve([10, 11, 12, 13])
    device.cache.parts.evict(device.cache.parts.free_bytes)
    device.policy.complete(content, 0, 0, NUM_PAGES)  # the way to host memory was behind
    device.begin_step()
    offer = device.offloader.lookup(1, content, 0, NUM_PAGES)
    assert offer is not None and offer.by_tier == (0, NUM_PAGES)
    incoming = device.cache.incoming
    assert isinstance(incoming, IncomingParts)
    table = incoming.open_offered(content, device.offloader.layout.offered(1), 0)
    load = device.offloader.num_transfers
    device.offloader.start_load(1, content, 0, NUM_PAGES, table)
    device.offloader.use_early(load)
    assert not device.plan_stores()
    device.begin_step()
    assert device.plan_stores() == 1


def test_what_has_just_arrived_is_not_removed_from_a_long_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_policy, "PRUNE_AT", 0)
    device = Device()
    content = device.serve([0, 1, 2, 3])
    device.cache.parts.evict(device.cache.parts.free_bytes)
    device.offloader.tiers[0].reset()
    offer = device.offloader.lookup(1, content, 0, NUM_PAGES)
    assert offer is not None and offer.by_tier == (0, NUM_PAGES)

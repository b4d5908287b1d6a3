"""Opening of tiers in two stages: the device's tree is made in between, with an eviction order that knows the tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from uuid import uuid4

from kvarts.config import EngineConfig
from kvarts.event_log import Tell
from kvarts.kv.eviction import EvictionOrder
from kvarts.kv.group_pages import GroupPages
from kvarts.kv.page_cache import PageCache
from kvarts.kv.transfer import PrefillTimes
from kvarts.kv.watcher import TreeWatcher
from kvarts.offload.bus import Bus
from kvarts.offload.channel import Channel
from kvarts.offload.config import OffloadConfig
from kvarts.offload.filetier import FileTier
from kvarts.offload.measured import MeasuredChannel
from kvarts.offload.offloader import Offloader
from kvarts.offload.part_files import PartFiles
from kvarts.offload.part_offloader import ConnectedParts, PartOffloader
from kvarts.offload.part_policy import EagerParts, LazyParts, PartPolicy
from kvarts.offload.part_tier import PartTier
from kvarts.offload.safe_first import SafeFirst
from kvarts.offload.spec import MakeChannel
from kvarts.offload.store_policy import EagerPolicy, LazyPolicy, StorePolicy
from kvarts.offload.tier import ConnectedTier, MemoryTier, Tier

__all__ = ["TiersToOpen", "open_offloader", "open_part_offloader"]


class TiersToOpen:
    """The tiers of `offload`, below an engine of `config` whose eviction orders `make_order` makes.

    With a lazy policy, the device first evicts pages that a lower tier also holds. `known_keys` and `namespace`: see
    FilesBelow. `more`: tiers below these, which are open already.
    """

    def __init__(
        self,
        offload: OffloadConfig,
        config: EngineConfig,
        make_order: Callable[[], EvictionOrder],
        *,
        known_keys: Iterable[bytes] = (),
        namespace: str | None = None,
        more: Sequence[ConnectedTier] = (),
    ) -> None:
        self._offload = offload
        self._more = more
        self._config = config
        self._known_keys = known_keys
        self._namespace = namespace
        self._safe_first = SafeFirst(make_order) if offload.policy == "lazy" else None
        self.order: EvictionOrder = make_order() if self._safe_first is None else self._safe_first
        self.watcher: TreeWatcher | None = self._safe_first
        self.evicts_safe_first = self._safe_first is not None
        self.full_prompt_hits = offload.full_prompt_hits

    def open_below(
        self,
        cache: PageCache,
        *,
        with_page_ids: bool,
        tell: Tell | None,
        prefill: PrefillTimes | None = None,
        fingerprint: Callable[[], str] | None = None,
    ) -> Offloader:
        """Open the tiers below `cache`. `fingerprint` returns the model's, for files without a namespace."""
        namespace = self._namespace
        if namespace is None and with_page_ids:
            namespace = f"engine {uuid4()}" if fingerprint is None else fingerprint()
        return open_offloader(
            self._offload,
            cache,
            page_size=self._config.page_size,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            with_page_ids=with_page_ids,
            tell=tell,
            known_keys=self._known_keys,
            namespace=namespace or "",
            order=self._safe_first,
            prefill=prefill,
            more=self._more,
        )


def open_offloader(
    offload: OffloadConfig,
    cache: PageCache,
    *,
    page_size: int,
    max_num_batched_tokens: int,
    with_page_ids: bool = False,
    tell: Tell | None = None,
    known_keys: Iterable[bytes] = (),
    namespace: str = "",
    order: SafeFirst | None = None,
    prefill: PrefillTimes | None = None,
    more: Sequence[ConnectedTier] = (),
) -> Offloader:
    """Open the tiers of `offload` below `cache`. `order`: the eviction order of `cache`, for a lazy policy.

    `more`: tiers below these, which are open already.
    """
    assert (order is not None) == (offload.policy == "lazy"), "a lazy policy stores what `order` would evict next"
    make, bus = _channels(offload, with_page_ids=with_page_ids)
    tiers = []
    for spec in offload.tier_specs(page_size):
        tier: Tier
        if spec.is_files and with_page_ids:
            tier = FileTier(spec.name, spec.num_pages, known_keys=known_keys, namespace=namespace)
        else:
            tier = MemoryTier(spec.name, spec.num_pages, with_slots=with_page_ids)
        tiers.append(ConnectedTier(tier, spec.write.open(make), spec.read.open(make)))
    tiers += more
    policy: StorePolicy[Any] = EagerPolicy(cache)
    if order is not None:
        num_below = sum(connected.tier.num_pages for connected in tiers)
        policy = LazyPolicy(cache, order, _target_free(offload, num_below, page_size, max_num_batched_tokens))
    return Offloader(
        cache,
        tiers,
        policy,
        page_bytes=offload.kv_bytes_per_token * page_size,
        order=order,
        prefill=prefill,
        full_prompt_hits=offload.full_prompt_hits,
        store_within_ns=round(offload.store_within_ms * 1e6),
        copy_slowdown=0.0 if with_page_ids else offload.copy_slowdown,
        bus=bus,
        num_layers=1 if with_page_ids or offload.load_overlap == "none" else offload.num_layers,
        step_tokens=max_num_batched_tokens,
        swaps=offload.preemption_mode == "swap" and len(tiers) > len(more),  # others would find no use for them
        deadline_ns=round(offload.deadline_s * 1e9),
        workers=offload.workers,
        fail_every=offload.fail_every,
        with_page_ids=with_page_ids,
        tell=tell,
    )


def open_part_offloader(
    offload: OffloadConfig,
    config: EngineConfig,
    cache: GroupPages,
    *,
    with_page_ids: bool = False,
    tell: Tell | None = None,
    prefill: PrefillTimes | None = None,
    fingerprint: Callable[[], str] | None = None,
    known_keys: Iterable[bytes] = (),
    namespace: str | None = None,
) -> PartOffloader:
    """Open the tiers of `offload` below the cache of a device with KV groups, of an engine of `config`."""
    memory, page_size = cache.memory, config.page_size
    make, bus = _channels(offload, with_page_ids=with_page_ids)
    tiers = []
    for place, spec in enumerate(offload.group_specs(memory, page_size)):
        tree, num_blocks = cache.parts.tree, spec.num_pages
        if spec.is_files and with_page_ids:
            if namespace is None:
                namespace = f"engine {uuid4()}" if fingerprint is None else fingerprint()
            tier: PartTier = PartFiles(
                spec.name, num_blocks, memory, tree, place=place, known_keys=known_keys, namespace=namespace, tell=tell
            )
        else:
            tier = PartTier(spec.name, num_blocks, memory, tree, place=place, with_slots=with_page_ids, tell=tell)
        tiers.append(ConnectedParts(tier, spec.write.open(make), spec.read.open(make)))
    policy: PartPolicy = EagerParts(cache.parts)
    if offload.policy == "lazy":
        num_blocks = sum(connected.tier.num_blocks for connected in tiers)
        num_pages = num_blocks * memory.block_bytes // memory.page_bytes
        target_free = _target_free(offload, num_pages, page_size, config.max_num_batched_tokens)
        policy = LazyParts(cache.parts, target_free * memory.page_bytes)
    return PartOffloader(
        cache,
        tiers,
        policy,
        prefill=prefill,
        store_within_ns=round(offload.store_within_ms * 1e6),
        num_layers=1 if with_page_ids or offload.load_overlap == "none" else offload.num_layers,
        step_tokens=config.max_num_batched_tokens,
        copy_slowdown=0.0 if with_page_ids else offload.copy_slowdown,
        bus=bus,
        swaps=offload.preemption_mode == "swap",
        deadline_ns=round(offload.deadline_s * 1e9),
        workers=offload.workers,
        fail_every=offload.fail_every,
        with_page_ids=with_page_ids,
        tell=tell,
    )


def _channels(offload: OffloadConfig, *, with_page_ids: bool) -> tuple[MakeChannel, Bus | None]:
    """Return what makes channels, and the bus that they are on, if they share one."""
    if with_page_ids:
        return MeasuredChannel, None
    if offload.bus is None:
        return Channel, None
    bus = Bus(offload.bytes_per_s("bus"))
    return bus.open, bus


def _target_free(offload: OffloadConfig, num_pages: int, page_size: int, max_num_batched_tokens: int) -> int:
    """Return the pages that a lazy policy covers, above tiers of `num_pages` pages in all."""
    target_free = offload.target_free
    if target_free is None:
        # Enough for the pages that a few requests take at once, but a small part of a small tier.
        step_pages = -(-max_num_batched_tokens // page_size)
        target_free = max(2 * step_pages, min(8 * step_pages, num_pages // 8))
    # More pages than the tiers hold would replace each other for ever.
    return min(target_free, num_pages)

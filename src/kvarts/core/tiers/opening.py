"""Opening of tiers in two stages: the device's tree is made in between, with an eviction order that knows the tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kvarts.core.config import EngineConfig
from kvarts.core.event_log import Emit
from kvarts.core.kv.cache import Cache
from kvarts.core.kv.eviction import EvictionOrder, TreeWatcher
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.kv.transfer import PrefillNs
from kvarts.core.tiers.channel import Channel, MeasuredChannel
from kvarts.core.tiers.config import OffloadConfig, TierSpec
from kvarts.core.tiers.layout import ConnectedTier, Layout
from kvarts.core.tiers.offloader import Offloader
from kvarts.core.tiers.page_layout import PageLayout
from kvarts.core.tiers.safe_first import SafeFirst
from kvarts.core.tiers.store_policy import EagerPolicy, LazyPolicy, PagePolicy
from kvarts.core.tiers.tier import MemoryTier

if TYPE_CHECKING:
    from kvarts.core.kv.group_pages import GroupPages
    from kvarts.core.kv.groups import GroupMemory
    from kvarts.core.tiers.pagefiles import PageFiles

__all__ = ["TiersToOpen", "open_offloader", "open_page_files", "prepare_tiers"]


class LeftInFiles(NamedTuple):
    """Keys of the pages in files that an earlier run has left, and their namespace, as in FileTier."""

    keys: Iterable[bytes] = ()
    namespace: str = ""


NOTHING_LEFT = LeftInFiles()
OpenTier = Callable[[Emit | None], ConnectedTier[Any]]


def prepare_tiers(
    offload: OffloadConfig,
    config: EngineConfig,
    make_order: Callable[[], EvictionOrder],
    memory: GroupMemory | None = None,
    *,
    known_keys: Iterable[bytes] = (),
    namespace: str | None = None,
) -> TiersToOpen | None:
    """Prepare tiers below an engine of `config`; None without tiers. `memory`: the KV groups of a device with any.

    `known_keys`, `namespace`: keys of the pages in files that an earlier run has left, and their namespace, as in
    FileTier. The default namespace is the fingerprint of the executor's model; without a fingerprint, pages are read
    only by the engine that wrote them. Raise ConfigError for options that support whole pages only.
    """
    specs = offload.specs(config.page_size, memory)
    if not specs:
        return None
    return TiersToOpen(offload, specs, config, make_order, memory, known_keys=known_keys, namespace=namespace)


def open_page_files(
    offload: OffloadConfig, directory: Path | str, page_size: int, memory: GroupMemory | None = None
) -> PageFiles:
    """Return the files of the tier below host memory, with those that are already in `directory`.

    `memory`: the KV groups of a device that has any. Raise OutputError for a directory that cannot hold them.
    """
    from kvarts.core.tiers.pagefiles import PAGE_KEY_BYTES, PART_KEY_BYTES, PageFiles, file_bytes

    num_files = sum(spec.num_pages for spec in offload.specs(page_size, memory) if spec.is_files)
    if memory is None:
        page_bytes = offload.kv_bytes_per_token * page_size
        num_bytes = num_files * file_bytes(PAGE_KEY_BYTES, page_bytes)
    else:  # at most one file per block
        num_bytes = num_files * file_bytes(PART_KEY_BYTES, memory.block_bytes)
    return PageFiles(directory, max_bytes=num_bytes)


class TiersToOpen:
    """The tiers `specs` of `offload`, below an engine of `config` whose eviction orders `make_order` makes.

    `memory`: the KV groups of a device that has any. Without, and with a lazy policy, the device first evicts pages
    that a lower tier also holds. `known_keys` and `namespace`: see `prepare_tiers`. `more`: open further tiers below
    these, given what receives the events of the engine; `on_opened` is called with the offloader of all.
    """

    def __init__(
        self,
        offload: OffloadConfig,
        specs: Sequence[TierSpec],
        config: EngineConfig,
        make_order: Callable[[], EvictionOrder],
        memory: GroupMemory | None = None,
        *,
        known_keys: Iterable[bytes] = (),
        namespace: str | None = None,
        more: Sequence[OpenTier] = (),
        on_opened: Callable[[Offloader[Any]], object] | None = None,
    ) -> None:
        self._offload = offload
        self._specs = specs
        self._more = more
        self._on_opened = on_opened
        self._config = config
        self._memory = memory
        self._known_keys = known_keys
        self._namespace = namespace
        self.is_lazy = offload.is_lazy
        self._safe_first = SafeFirst(make_order) if self.is_lazy and memory is None else None
        self.order: EvictionOrder = make_order() if self._safe_first is None else self._safe_first
        self.watcher: TreeWatcher | None = self._safe_first
        # What leaves the device passes through the first of exclusive tiers, whatever slower ones have.
        is_exclusive = _is_exclusive(offload, specs, config.page_size, config.max_num_batched_tokens, memory)
        num_tiers = 1 if is_exclusive else len(specs)
        self.num_safe_tiers = 0 if self._safe_first is None else num_tiers
        self.full_prompt_hits = offload.full_prompt_hits
        self.load_kv = offload.load_kv
        self.tier_names: Sequence[str] = [spec.name for spec in specs]

    def open_below(
        self,
        cache: Cache,
        *,
        with_page_ids: bool,
        emit: Emit | None,
        prefill: PrefillNs | None = None,
        fingerprint: Callable[[], str] | None = None,
        splits: bool = True,
    ) -> Offloader[Any]:
        """Open the tiers below `cache`. `fingerprint` returns the model's, for files without a namespace.

        `splits`: a request may compute its first pages while others are loaded.
        """
        namespace = self._namespace
        if namespace is None and with_page_ids and any(spec.is_files for spec in self._specs):
            from uuid import uuid4

            namespace = f"engine {uuid4()}" if fingerprint is None else fingerprint()
        opened = open_offloader(
            self._offload,
            cache,
            self._config,
            with_page_ids=with_page_ids,
            emit=emit,
            left=LeftInFiles(self._known_keys, namespace or ""),
            order=self._safe_first,
            prefill=prefill,
            splits=splits,
            more=[open_tier(emit) for open_tier in self._more],
        )
        if self._on_opened is not None:
            self._on_opened(opened)
        return opened


def open_offloader(
    offload: OffloadConfig,
    cache: Cache,
    config: EngineConfig,
    *,
    with_page_ids: bool = False,
    emit: Emit | None = None,
    left: LeftInFiles = NOTHING_LEFT,
    order: SafeFirst | None = None,
    prefill: PrefillNs | None = None,
    splits: bool = True,
    more: Sequence[ConnectedTier[Any]] = (),
) -> Offloader[Any]:
    """Open the tiers of `offload` below `cache`, the device's in an engine of `config`.

    `order`: the eviction order of `cache`, for a lazy policy without groups. `splits`: a request may compute its first
    pages while others are loaded. `more`: tiers below these, which are open already.
    """
    make = MeasuredChannel if with_page_ids else Channel
    page_size, max_num_batched_tokens = config.page_size, config.max_num_batched_tokens
    memory = cast("GroupPages", cache).memory if cache.counts() else None
    connected: list[ConnectedTier[Any]] = []
    specs = offload.specs(page_size, memory)
    is_exclusive = _is_exclusive(offload, specs, page_size, max_num_batched_tokens, memory)
    for place, spec in enumerate(specs):
        tier = _open_tier(
            spec,
            place,
            cache,
            memory,
            with_page_ids=with_page_ids,
            emit=emit,
            left=left,
        )
        connected.append(ConnectedTier(tier, spec.write.open(make), spec.read.open(make)))
    connected += more
    swaps = offload.preemption_mode == "swap" and len(connected) > len(more)  # others would find no use for them
    store_within_ns = round(offload.store_within_ms * 1e6)
    layout: Layout[Any]
    if memory is None:
        whole = cast(PageCache, cache)
        policy: PagePolicy = EagerPolicy(whole)
        assert (order is not None) == offload.is_lazy, "a lazy policy stores what `order` would evict next"
        if order is not None:
            num_pages = sum(each.tier.num_pages for each in connected)
            stored = is_exclusive and cache.pool.make_room is None
            target_free = _target_free(offload, num_pages, page_size, max_num_batched_tokens, stores_displaced=stored)
            policy = LazyPolicy(whole, order, target_free, is_exclusive=is_exclusive)
        layout = PageLayout(
            whole,
            connected,
            policy,
            page_bytes=offload.kv_bytes_per_token * page_size,
            order=order,
            swaps=swaps,
            store_within_ns=store_within_ns,
            with_page_ids=with_page_ids,
            emit=emit,
        )
    else:
        from kvarts.core.tiers.part_layout import PartLayout
        from kvarts.core.tiers.part_policy import EagerParts, ExclusiveParts, LazyParts, PartPolicy

        pages = cast("GroupPages", cache)
        of_parts: PartPolicy = EagerParts(pages.parts)
        if offload.is_lazy:
            num_pages = sum(each.tier.num_blocks for each in connected) * memory.block_bytes // memory.page_bytes
            target_free = _target_free(offload, num_pages, page_size, max_num_batched_tokens)
            if is_exclusive:
                of_parts = ExclusiveParts(pages.parts, target_free, connected[0].tier)
            else:
                of_parts = LazyParts(pages.parts, target_free * pages.parts.page_bytes)
        layout = PartLayout(
            pages,
            connected,
            of_parts,
            swaps=swaps,
            store_within_ns=store_within_ns,
            with_page_ids=with_page_ids,
            arrive_at_turns=offload.load_kv == "async",
        )
    return Offloader(
        cache,
        layout,
        offload,
        prefill=prefill,
        splits=splits,
        step_tokens=max_num_batched_tokens,
        with_page_ids=with_page_ids,
        emit=emit,
    )


def _open_tier(
    spec: TierSpec,
    place: int,
    cache: Cache,
    memory: GroupMemory | None,
    *,
    with_page_ids: bool,
    emit: Emit | None,
    left: LeftInFiles,
) -> Any:
    """Return the tier of `spec`, below `place` others."""
    has_keys = spec.is_files and with_page_ids
    if memory is None and has_keys:
        from kvarts.core.tiers.filetier import FileTier

        return FileTier(spec.name, spec.num_pages, known_keys=left.keys, namespace=left.namespace)
    if memory is None:
        return MemoryTier(spec.name, spec.num_pages, with_slots=with_page_ids)
    size = spec.name, spec.num_pages, memory, cast("GroupPages", cache).parts.tree
    if has_keys:
        from kvarts.core.tiers.part_files import PartFiles

        return PartFiles(*size, place=place, known_keys=left.keys, namespace=left.namespace, emit=emit)
    from kvarts.core.tiers.part_tier import PartTier

    return PartTier(*size, place=place, with_slots=with_page_ids, emit=emit)


def _is_exclusive(
    offload: OffloadConfig,
    specs: Sequence[TierSpec],
    page_size: int,
    max_num_batched_tokens: int,
    memory: GroupMemory | None,
) -> bool:
    """Return whether host memory releases what the device has again.

    These pages must be stored again before their eviction. Where the channel cannot even carry those of a step within
    `store_within_ms`, they would be lost instead, and `exclusive` does the same as `lazy`.
    """
    if offload.policy != "exclusive" or not specs:
        return False
    page_bytes = offload.kv_bytes_per_token * page_size if memory is None else memory.page_bytes
    step_bytes = -(-max_num_batched_tokens // page_size) * page_bytes
    return specs[0].write.open().within_ns(0, step_bytes) <= offload.store_within_ms * 1e6


def _target_free(
    offload: OffloadConfig,
    num_pages: int,
    page_size: int,
    max_num_batched_tokens: int,
    *,
    stores_displaced: bool = False,
) -> int:
    """Return the pages that a lazy policy covers, above tiers of `num_pages` pages in all.

    `stores_displaced`: pages that a load evicts need not be covered, since they are stored while it runs.
    """
    target_free = offload.target_free
    if target_free is None:
        # Enough for the pages that a few requests take at once, but a small part of a small tier.
        step_pages = -(-max_num_batched_tokens // page_size)
        # A step takes its pages while those for the next are stored, and a load that needs them too begins.
        least, most_part = (-(-3 * step_pages // 2), 16) if stores_displaced else (2 * step_pages, 8)
        target_free = max(least, min(8 * step_pages, num_pages // most_part))
    # More pages than the tiers hold would replace each other for ever.
    return min(target_free, num_pages)

"""A store that engines share: one index, and for each engine a tier and its channels to it.

`Shared` is what stores of whole pages and of parts in KV groups (`shared_parts.py`) have in common. A page is in the
store once, even if several engines store it. It can be found by all engines once its store has ended, and pages stay
while any of them reads or writes them. Evictions of one engine do not concern the store: it keeps pages even if only
some engines have the pages before them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar, cast

from kvarts.core.config import EngineConfig
from kvarts.core.content import Content
from kvarts.core.event_log import Emit
from kvarts.core.kv.eviction import EvictionOrder
from kvarts.core.kv.groups import GroupMemory
from kvarts.core.kv.transfer import Coming
from kvarts.core.tiers.channel import Channel
from kvarts.core.tiers.config import OffloadConfig
from kvarts.core.tiers.index import ALL, OnRemoved, OnStored, Placement, TierIndex, TierRun, check_index
from kvarts.core.tiers.layout import ConnectedTier
from kvarts.core.tiers.links import StoreLinks
from kvarts.core.tiers.offloader import Offloader
from kvarts.core.tiers.opening import TiersToOpen
from kvarts.core.tiers.tier import MemoryTier, Pin
from kvarts.core.tiers.transfers import NEVER_NS

__all__ = ["STORE", "Shared", "SharedChannel", "SharedStore", "SharedTier", "StoreView", "Write"]

STORE = "store"


class Write:
    """A write under way: transfer `transfer` of `worker`, and the engines with requests that wait for it."""

    __slots__ = ("number", "transfer", "waiting", "worker")

    def __init__(self, number: int, worker: int) -> None:
        self.number = number
        self.worker = worker
        self.transfer = -1
        self.waiting: list[int] = []


ViewT = TypeVar("ViewT")


class SharedTier(Generic[ViewT]):
    """A tier below those of several engines, of units of `unit_bytes` bytes, pages or blocks of parts."""

    def __init__(self, unit_bytes: int) -> None:
        self.unit_bytes = unit_bytes

    def below(self, worker: int, offload: OffloadConfig | None, kv_bytes_per_token: int) -> partial[TiersToOpen | None]:
        """Return what prepares the tiers of `worker`: those of `offload`, and this one below them.

        `kv_bytes_per_token`: bytes of a token on a device of the worker, unless `offload` has them.
        """
        return partial(self._prepare, worker, offload or OffloadConfig(kv_bytes_per_token=kv_bytes_per_token))

    def _prepare(
        self,
        worker: int,
        offload: OffloadConfig,
        config: EngineConfig,
        make_order: Callable[[], EvictionOrder],
        memory: GroupMemory | None,
    ) -> TiersToOpen | None:
        """Prepare the tiers below an engine of `config`: see `prepare_tiers`."""
        write, read = self.open_channels(worker)

        def open_tier(emit: Emit | None) -> ConnectedTier[Any]:
            view = self.open_view(worker, memory, config.page_size, emit)
            return ConnectedTier(cast(Any, view), write, read, is_read_only=write is read)

        def connect(opened: Offloader[Any]) -> None:
            write.tiers = read.tiers = opened
            self.opened(worker, opened)

        specs = offload.specs(config.page_size, memory)
        return TiersToOpen(offload, specs, config, make_order, memory, more=[open_tier], on_opened=connect)

    def open_channels(self, worker: int) -> tuple[SharedChannel, SharedChannel]:
        """Return the channels of `worker` to this tier and from it: the same one twice if nothing is stored there."""
        raise NotImplementedError

    def open_view(self, worker: int, memory: GroupMemory | None, page_size: int, emit: Emit | None) -> ViewT:
        """Return what `worker` sees of this tier. `memory`: the KV groups of its device; `emit` receives its events."""
        raise NotImplementedError

    def opened(self, worker: int, tiers: Offloader[Any]) -> None:
        """Note that all tiers of `worker` are open."""


class Shared(SharedTier[ViewT]):
    """A store of `size` units: pages, or blocks of parts. `links`: carry them, with `unit_bytes` bytes each.

    `before_removal`: called with a worker before it receives the removal of its pages by another one.
    """

    def __init__(self, size: int, unit_bytes: int, links: StoreLinks) -> None:
        super().__init__(unit_bytes)
        self.size = size
        self.links = links
        self.views: dict[int, ViewT] = {}
        self.loaded_from: dict[int, dict[int, int]] = {}
        """By engine, the units that it has loaded, by the engine that had stored them."""
        self.unsent: dict[int, list[Write]] = {}
        """By engine, its writes that no transfer carries yet."""
        self.writes: dict[object, Write] = {}
        """Writes under way, by what names them."""
        self.num_writes = 0
        self.before_removal: Callable[[int], object] | None = None
        self._waited_for: list[tuple[int, int]] = []

    def begin_write(self, worker: int, ticket: object) -> None:
        """Record that `worker` writes, from its next transfer on."""
        write = self.writes[ticket] = Write(self.num_writes, worker)
        self.num_writes += 1
        self.unsent.setdefault(worker, []).append(write)

    def await_write(self, number: int, worker: int) -> None:
        """Note that a request of `worker` waits for a write of another."""
        write = next(each for each in self.writes.values() if each.number == number)
        if worker not in write.waiting:
            write.waiting.append(worker)

    def num_loaded(self) -> dict[int, dict[int, int]]:
        """Return, by engine, the units that it has loaded, by the engine that had stored them."""
        return self.loaded_from

    def take_waited_for(self) -> list[tuple[int, int]]:
        """Return each write that has ended since the last call, behind each engine with requests that waited for it."""
        waited_for, self._waited_for = self._waited_for, []
        return waited_for

    def leave(self, worker: int) -> None:
        """Stop sending events to `worker`, which was removed; its stored pages stay."""
        raise NotImplementedError

    def end_write(self, ticket: object, *, is_stored: bool) -> None:
        """Record that a write has ended, or failed, or was given up, which ends its transfer."""
        write = self.writes.pop(ticket)
        if not is_stored:
            self.links.cancel(write.worker, write.transfer)
        self._waited_for += [(worker, write.number) for worker in write.waiting]

    def open_channels(self, worker: int) -> tuple[StoreChannel, StoreChannel]:
        """Return the channels of `worker` to the store and from it."""
        unsent = self.unsent.setdefault(worker, [])
        write = StoreChannel("store_write", self.links, worker, unit_bytes=self.unit_bytes, writes=unsent)
        return write, StoreChannel("store_read", self.links, worker, unit_bytes=self.unit_bytes)

    def told_removal(self, worker: int) -> None:
        """Prepare the readers of `worker` for the removal of its pages: another engine may cause it."""
        if self.before_removal is not None:
            self.before_removal(worker)


class SharedStore(Shared["StoreView"]):
    """A store of whole pages."""

    unit = "pages"
    """The unit of its sizes and counts."""

    def __init__(self, size: int, unit_bytes: int, links: StoreLinks) -> None:
        super().__init__(size, unit_bytes, links)
        self.index = TierIndex(size, with_slots=False)
        self.index.on_stored, self.index.on_removed = self._on_stored, self._on_removed

    def open_view(self, worker: int, memory: GroupMemory | None, page_size: int, emit: Emit | None) -> StoreView:
        """Return the store as a tier of `worker`, whose layout emits its events."""
        view = self.views[worker] = StoreView(self, worker)
        return view

    @property
    def num_cached(self) -> int:
        """Pages that can be found and that no transfer uses."""
        return self.index.num_cached

    @property
    def num_evicted(self) -> int:
        """Pages that were evicted to make room."""
        return self.index.num_evicted

    @property
    def num_refused(self) -> int:
        """Pages that were to be stored and found no room."""
        return self.index.num_refused

    def leave(self, worker: int) -> None:
        """Send no events to `worker`, which has left."""
        view = self.views.get(worker)
        if view is not None:
            view.listen(None, None)

    def _on_stored(self, content: Content, start: int, end: int, before: Content | None) -> None:
        on_stored = self.views[self.index.told_of].on_stored
        if on_stored is not None:
            on_stored(content, start, end, before)

    def _on_removed(self, content: Content, start: int, end: int) -> None:
        worker = self.index.told_of
        on_removed = self.views[worker].on_removed
        if on_removed is not None:
            self.told_removal(worker)
            on_removed(content, start, end)


class TierElsewhere(MemoryTier):
    """A tier that outlives the engine, or is of others. It counts this engine's transfers only."""

    def __init__(self, name: str, num_pages: int, index: TierIndex | None = None) -> None:
        super().__init__(name, num_pages, index=index)
        self._num_moving = 0

    @property
    def num_used_blocks(self) -> int:
        """Pages that transfers of this engine read or write."""
        return self._num_moving

    def prepare_load(self, holder: int, num_pages: int | None = None, num_front: int = 0) -> Pin:
        """Begin to load the next `num_pages` pages that were offered to `holder` after the first `num_front`."""
        load = super().prepare_load(holder, num_pages, num_front)
        self._num_moving += load.num_pages
        return load

    def complete_load(self, load: Pin, num_good_pages: int | None = None) -> None:
        """End a load. Pages that did not arrive are still where they were."""
        super().complete_load(load)
        self._num_moving -= load.num_pages

    def reset(self) -> None:
        """Do nothing: it outlives an engine that fails."""


class StoreView(TierElsewhere):
    """The store as a tier of one engine, `worker`. It counts and emits this engine's transfers only."""

    def __init__(self, store: SharedStore, worker: int) -> None:
        super().__init__(STORE, store.size, store.index)
        self.on_stored: OnStored | None = None
        self.on_removed: OnRemoved | None = None
        self.worker = worker
        self._loaded_from = store.loaded_from.setdefault(worker, {})
        self._store = store
        self._num_evicted = 0

    def lose(self, content: Content, start: int, end: int) -> None:
        """Do nothing: other engines may still have these pages."""

    def listen(self, on_stored: OnStored | None, on_removed: OnRemoved | None) -> None:
        """Set the callbacks for runs of this engine that become findable or stop being findable."""
        self.on_stored, self.on_removed = on_stored, on_removed

    @property
    def num_cached_blocks(self) -> int:
        """0: cached pages belong to all engines."""
        return 0

    @property
    def num_evicted_blocks(self) -> int:
        """Pages that were evicted to make room for pages of this engine."""
        return self._num_evicted

    @property
    def has_holes(self) -> bool:
        """False: the store keeps pages whose predecessors are elsewhere."""
        return False

    def prepare_store(
        self, content: Content, start: int, end: int, *, deepest_first: bool = False, limit: int = ALL
    ) -> Placement | None:
        """Make room for the missing pages of [start, end)."""
        self.index.writer = self.worker
        num_evicted = self.index.num_evicted
        store = super().prepare_store(content, start, end, deepest_first=deepest_first, limit=limit)
        self._num_evicted += self.index.num_evicted - num_evicted
        if store is not None:
            self._num_moving += store.num_pages
            self._store.begin_write(self.worker, store)
        return store

    def coming(self, content: Content, start: int, limit: int, now_ns: int) -> Coming | None:
        """Return the pages from `start` on that other engines are storing; None if `start` is not among these."""
        found = self.index.coming(content, start, limit)
        if found is None:
            return None
        placement, num_pages = found
        write = self._store.writes[placement]
        if write.transfer < 0:
            return None  # it begins in this step
        left_ns = self._store.links.left_ns(write.worker, write.transfer, now_ns)
        return Coming(write.number, num_pages, now_ns + left_ns, num_pages)

    def await_write(self, write: int) -> None:
        """Note that a request of this engine waits for a write of another."""
        self._store.await_write(write, self.worker)

    def complete_store(self, store: Placement, *, is_stored: bool = True) -> None:
        """End a store: its pages become findable, or are dropped."""
        super().complete_store(store, is_stored=is_stored)
        self._num_moving -= store.num_pages
        self._store.end_write(store, is_stored=is_stored)

    def prepare_load(self, holder: int, num_pages: int | None = None, num_front: int = 0) -> Pin:
        """Begin to load the next `num_pages` pages that were offered to `holder` after the first `num_front`."""
        node: TierRun | None = self._pins[holder].run
        load = super().prepare_load(holder, num_pages, num_front)
        while node is not None and node.end > load.start:
            count = min(node.end, load.end) - max(node.start, load.start)
            if count > 0:
                self._loaded_from[node.writer] = self._loaded_from.get(node.writer, 0) + count
            node = node.parent
        return load

    def check(self, is_above: Callable[[Content, int], bool]) -> None:
        """Assert laws L1 and L2; L3 does not hold, as pages before those of the store may be with any engine."""
        check_index(self.index, lambda _content, _num_pages: True)


class SharedChannel(Channel):
    """A Channel over links that other engines use as well, so that the end of a transfer is not known beforehand.

    A page or block has `unit_bytes` bytes there, those of all devices of the engine. `tiers` must be set before its
    first use.
    """

    __slots__ = ("_unit_bytes", "tiers")

    can_be_awaited = False

    def __init__(self, name: str, unit_bytes: int) -> None:
        super().__init__(name, latency_us=0.0, bytes_per_s=1)
        self._unit_bytes = unit_bytes
        self.tiers: Offloader[Any]

    def bytes_there(self, num_bytes: int) -> int:
        """Return the bytes on the links of the pages or blocks of `num_bytes` bytes here."""
        return num_bytes // self.tiers.block_bytes * self._unit_bytes

    def submit(self, now_ns: int, num_bytes: int) -> int:
        """Count the next transfer of `tiers`, which has begun; return NEVER_NS: when it ends is not known."""
        self.num_bytes += self.bytes_there(num_bytes)
        self.num_transfers += 1
        return NEVER_NS


class StoreChannel(SharedChannel):
    """A Channel between one engine and the store. `writes`: those that no transfer carries yet; None: it reads."""

    __slots__ = ("_is_read", "_links", "_num_under_way", "_worker", "_writes")

    def __init__(
        self, name: str, links: StoreLinks, worker: int, *, unit_bytes: int, writes: list[Write] | None = None
    ) -> None:
        super().__init__(name, unit_bytes)
        self._links = links
        self._worker = worker
        self._is_read = writes is None
        self._writes = writes
        self._num_under_way = 0
        """Bytes of transfers that have not ended."""

    def wait_ns(self, now_ns: int) -> int:
        """Return how long the transfers of this engine that are under way would take alone."""
        if not self._num_under_way:
            return 0
        return self._links.within_ns(self._worker, self._num_under_way, is_read=self._is_read)

    def within_ns(self, now_ns: int, num_bytes: int) -> int:
        """Return how long a transfer of `num_bytes` submitted now would take if no other began or ended."""
        return self._links.within_ns(self._worker, self.bytes_there(num_bytes), is_read=self._is_read)

    def num_within(self, now_ns: int, bound_ns: int, unit_bytes: int) -> int:
        """Return how many units of `unit_bytes` could be carried within `bound_ns`, after those under way."""
        wait_ns = self.wait_ns(now_ns)
        latency_ns = self.within_ns(now_ns, 0)
        unit_ns = self.within_ns(now_ns, unit_bytes * MANY) - latency_ns
        left_ns = bound_ns - wait_ns - latency_ns
        num_units = left_ns * MANY // max(1, unit_ns) if left_ns > 0 else 0
        return num_units if wait_ns or num_units else 1

    def submit(self, now_ns: int, num_bytes: int) -> int:
        """Begin the next transfer of `tiers`; return NEVER_NS: when it ends is not known."""
        bytes_there = self.bytes_there(num_bytes)
        self._num_under_way += bytes_there
        if self._writes is not None:
            for write in self._writes:
                write.transfer = self.tiers.num_transfers
            self._writes.clear()
        self._links.begin(self._worker, self.tiers.num_transfers, bytes_there, now_ns, is_read=self._is_read)
        return super().submit(now_ns, num_bytes)

    def withdraw(self, now_ns: int, num_bytes: int) -> None:
        """Do nothing: the store cancels the transfers that are given up."""

    def ended(self, num_bytes: int, duration_ns: int | None) -> None:
        """Note that a transfer has ended."""
        self._num_under_way -= self.bytes_there(num_bytes)


MANY = 1000
"""Units for which a duration is asked, so that rounding to nanoseconds does not matter."""

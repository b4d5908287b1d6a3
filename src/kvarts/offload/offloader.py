"""What goes on between the device and the tiers below it.

The scheduler asks: how much of this prompt is below (`lookup`), fetch it (`start_load`), what should be stored now
(`plan_stores`). Transfers end when every worker has reported them, or, in virtual time, when their lane is done.
Whatever a transfer reads or writes is held from its beginning to its end, however its request fares meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Any

import msgspec

from kvarts.content import Content
from kvarts.events import Event, PagesRemoved, PagesStored, StoreStarted, TransferEnded
from kvarts.kv.cache import Holding, PageCache
from kvarts.kv.safe import Below, SafeFirstTree
from kvarts.kv.transfer import Direction, Move, Transfer, TransferReport, TransferTotals
from kvarts.kv.tree import Path
from kvarts.offload.channel import Lane
from kvarts.offload.config import OffloadConfig
from kvarts.offload.filetier import FileTier
from kvarts.offload.store_policy import EagerPolicy, LazyPolicy, StorePolicy, precedes
from kvarts.offload.tier import MemoryTier, TierLoad, TierStore

__all__ = ["Loaded", "Offer", "OffloadCounts", "Offloader"]

NEVER_NS = 1 << 62
ALL = 1 << 62


class Offer(msgspec.Struct, frozen=True, gc=False):
    """What the tiers below have for a request: pages from each in turn, after those of the device."""

    num_pages: int
    by_tier: tuple[int, ...]
    is_async: bool


class Loaded(msgspec.Struct, frozen=True, gc=False):
    """A load ended: the request has its first `num_pages` pages, so many of them from each tier below."""

    request: int
    num_pages: int
    by_tier: tuple[int, ...]


class OffloadCounts(msgspec.Struct):
    """What happened so far. Pages by tier are those of loads and stores that ended well."""

    num_stores: int = 0
    num_loads: int = 0
    num_failed: int = 0
    num_stray_reports: int = 0
    """Late, repeated, or about a transfer that nobody knows."""
    num_pages_without_room: int = 0
    """Pages that were to be stored and found no room."""


class _UnderWay(msgspec.Struct, eq=False):
    """A transfer of `num_pages` pages that has begun. `waiting_for`: workers that have not reported it."""

    direction: Direction
    num_pages: int
    waiting_for: set[int]
    num_good_pages: int = ALL
    stores: tuple[tuple[MemoryTier, TierStore], ...] = ()
    paths: tuple[Path, ...] = ()
    loads: tuple[tuple[MemoryTier, TierLoad], ...] = ()
    request: int = -1
    start_page: int = 0


class Offloader:
    """Owner of the tiers below one device, of their lanes, and of every transfer under way.

    `with_page_ids`: transfers name pages, for an executor that copies them and reports; otherwise they end when their
    lane says so. `events` receives what happens. `known_keys` and `namespace`: see FileTier.
    """

    def __init__(
        self,
        config: OffloadConfig,
        cache: PageCache,
        *,
        page_size: int,
        max_num_batched_tokens: int,
        with_page_ids: bool = False,
        events: list[Event] | None = None,
        known_keys: Iterable[bytes] = (),
        namespace: str = "",
    ) -> None:
        self._known_keys = known_keys
        self._namespace = namespace
        self.config = config
        self.counts = OffloadCounts()
        self.page_bytes = config.kv_bytes_per_token * page_size
        self._cache = cache
        self._events = events
        self._with_page_ids = with_page_ids
        self._sizes = config.tiers(page_size)
        self.tiers = [self._make_tier(name, num_pages) for name, num_pages in self._sizes.items()]
        self.host = self.tiers[0]
        self.disk = self.tiers[1] if len(self.tiers) > 1 else None
        in_memory = {"latency_us": config.latency_us}
        on_disk = {"latency_us": config.disk_latency_us}
        self.lanes = {
            "d2h": Lane(**in_memory, bytes_per_s=config.bytes_per_s("d2h")),
            "h2d": Lane(**in_memory, bytes_per_s=config.bytes_per_s("h2d")),
            "disk_write": Lane(**on_disk, bytes_per_s=config.bytes_per_s("disk_write")),
            "disk_read": Lane(**on_disk, bytes_per_s=config.bytes_per_s("disk_read")),
        }
        target_free = config.target_free
        if target_free is None:
            target_free = 2 * -(-max_num_batched_tokens // page_size)
        self._lazy: LazyPolicy | None = None
        if config.policy == "lazy":
            # More than the tier holds would be stored in turns, for ever.
            self._lazy = LazyPolicy(cache, min(target_free, self.host.num_pages))
        self._policy: StorePolicy[Any] = EagerPolicy(cache) if self._lazy is None else self._lazy
        self.confirm = self._policy.confirm
        self._gone: list[tuple[Content, int, int]] = []
        cache.tree.tell_gone(self._gone)
        cache.on_gone = self._lose_gone
        if isinstance(cache.tree, SafeFirstTree):
            cache.tree.on_grown = self._mark_as_held
            # What is safe may be in files alone, and files may be there that this process never wrote.
            cache.tree.tells_all = len(self.tiers) > 1
        self._under_way: dict[int, _UnderWay] = {}
        self.num_transfers = 0
        """Transfers begun so far; and the number of the next."""
        self._due: list[tuple[int, int]] = []
        self._planned: list[Transfer] = []
        self._loaded: list[Loaded] = []
        self._spills: list[tuple[Content, int, int]] = []
        self._removed: list[tuple[Content, int, int]] = []
        self._now_ns = 0

    def _make_tier(self, name: str, num_pages: int) -> MemoryTier:
        if name == "disk" and self._with_page_ids:
            return FileTier(
                name,
                num_pages,
                known_keys=self._known_keys,
                namespace=self._namespace,
                on_stored=partial(self._on_stored, name),
                on_removed=partial(self._on_removed, name),
            )
        is_told = self._events is not None or len(self._sizes) > 1
        return MemoryTier(
            name,
            num_pages,
            with_slots=self._with_page_ids,
            on_stored=partial(self._on_stored, name) if is_told else None,
            on_removed=partial(self._on_removed, name) if is_told or self.config.policy == "lazy" else None,
        )

    # The scheduler asks -----------------------------------------------------------------------------------

    def plan_stores(self, now_ns: int) -> None:
        """Begins the stores of the step that starts at `now_ns`."""
        self._now_ns = now_ns
        stores: list[tuple[MemoryTier, TierStore]] = []
        paths: list[Path] = []
        for content, start, end, where in self._policy.choose():
            self._prepare(content, start, end, where, stores, paths)
        if stores:
            self._begin_stores(stores, paths)
        if self._spills:
            self._begin_spills()

    def lookup(self, request: int, content: Content, start: int, limit: int) -> Offer | None:
        """What the tiers have of `content` from page `start` on, up to page `limit`; None if nothing.

        It is pinned for `request`, in place of what was pinned for it before.
        """
        position = start
        by_tier = []
        is_async = False
        for tier in self.tiers:
            offer = tier.lookup(request, content, position, limit)
            by_tier.append(offer.num_pages)
            position += offer.num_pages
            is_async = is_async or (offer.num_pages > 0 and offer.is_async)
        if position == start:
            return None
        return Offer(position - start, tuple(by_tier), is_async)

    def forget(self, request: int) -> None:
        """`request` takes nothing of what was offered."""
        for tier in self.tiers:
            tier.forget(request)

    def start_load(self, request: int, content: Content, start: int, num_pages: int, holding: Holding) -> None:
        """Begins to load `num_pages` of what was offered to `request`, into its pages from page `start` on."""
        loads = []
        moves = []
        ends_ns = [self._now_ns]
        position = start
        num_left = num_pages
        for tier in self.tiers:
            num_offered = tier.offered(request)
            if not num_offered:
                continue
            if not num_left:
                tier.forget(request)
                continue
            load = tier.prepare_load(request, min(num_left, num_offered))
            count = load.num_pages
            loads.append((tier, load))
            if self._with_page_ids:
                assert holding.page_ids is not None
                sources = load.segments[0].slots
                assert sources is not None
                moves.append(Move(tier.name, sources, tuple(holding.page_ids[position : position + count])))
            else:
                lane = self.lanes["h2d" if tier is self.host else "disk_read"]
                ends_ns.append(lane.submit(self._now_ns, count * self.page_bytes))
            position += count
            num_left -= count
        under_way = _UnderWay(Direction.LOAD, position - start, self._workers(), loads=tuple(loads), request=request)
        under_way.start_page = start
        self._begin(under_way, max(ends_ns), moves)

    def take_planned(self) -> tuple[Transfer, ...]:
        """What an executor has to begin with this step."""
        planned = tuple(self._planned)
        self._planned.clear()
        return planned

    def take_loaded(self) -> list[Loaded]:
        """Loads that ended since last asked, in that order."""
        loaded = self._loaded
        self._loaded = []
        return loaded

    # The engine asks --------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a transfer is under way or about to be, or a load has ended that nobody took note of."""
        return bool(self._under_way or self._loaded or self._spills or self._policy.has_work)

    def num_pages(self) -> tuple[int, ...]:
        """Pages used and cached in each tier, one pair after the other."""
        counts: tuple[int, ...] = ()
        for tier in self.tiers:
            counts += tier.num_used, tier.num_cached
        return counts

    def totals(self) -> TransferTotals:
        """Return what moved so far."""
        channels = ("d2h", "h2d", "disk_write", "disk_read")[: 2 * len(self.tiers)]
        return TransferTotals(
            msgspec.structs.asdict(self.counts),
            {name: self.lanes[name].num_bytes for name in channels},
            {tier.name: tier.num_evicted for tier in self.tiers},
        )

    @property
    def next_ns(self) -> int:
        """When the next transfer ends, in virtual time."""
        return self._due[0][0] if self._due else NEVER_NS

    def pages_to_spare(self) -> int | None:
        """How many pages may be taken in steps alike before something happens down here; None: it does in the next."""
        if self._loaded or self._spills:
            return None
        spare = self._policy.pages_to_spare()
        if spare is not None and (self._lazy is not None or any(tier.has_holes for tier in self.tiers)):
            # Whatever follows a page that is lost goes with it, in that very step. A page that only files have is lost
            # to host memory.
            tree = self._cache.tree
            num_without_loss = self._cache.pool.num_empty
            if isinstance(tree, SafeFirstTree) and self.disk is None:
                num_without_loss += tree.num_safe
            return min(spare, num_without_loss)
        return spare

    def advance_to(self, now_ns: int) -> bool:
        """Ends the transfers that are due by `now_ns`; whether there were any."""
        due = self._due
        if not due or due[0][0] > now_ns:
            return False
        self._now_ns = now_ns
        fail_every = self.config.fail_every
        while due and due[0][0] <= now_ns:
            transfer_id = heappop(due)[1]
            under_way = self._under_way.pop(transfer_id)
            if fail_every and (transfer_id + 1) % fail_every == 0:
                under_way.num_good_pages = 0
            self._end(transfer_id, under_way)
        return True

    def report(self, reports: Sequence[TransferReport], now_ns: int) -> None:
        """What workers say at `now_ns`, in any order, over any number of steps."""
        self._now_ns = now_ns
        for report in reports:
            self._report(report)

    def reset(self) -> None:
        """Forgets what the tiers hold. Transfers under way end as they would have; what they store is not kept."""
        for tier in self.tiers:
            tier.reset()
        self._unmark_removed(Below.NOT)

    # Stores -----------------------------------------------------------------------------------------------

    def _prepare(
        self,
        content: Content,
        start: int,
        end: int,
        where: object,
        stores: list[tuple[MemoryTier, TierStore]],
        paths: list[Path],
    ) -> None:
        host = self.host
        num_refused = host.index.num_refused
        store = host.prepare_store(content, start, end, deepest_first=self._lazy is not None)
        num_refused = host.index.num_refused - num_refused
        self.counts.num_pages_without_room += num_refused
        tree = self._cache.tree
        if isinstance(tree, SafeFirstTree):
            self._unmark_removed()
            if num_refused and self._lazy is not None:
                self._lazy.is_stuck = True
            if store is None and not num_refused:
                self._mark_as_held(content, start, end)
        if store is None:
            return
        path = self._policy.hold(content, store.segments[-1].end, where)
        if isinstance(tree, SafeFirstTree):
            for segment in store.segments:
                tree.mark(path, segment.start, segment.end, Below.COMING)
        stores.append((host, store))
        paths.append(path)

    def _begin_stores(self, stores: list[tuple[MemoryTier, TierStore]], paths: list[Path]) -> None:
        num_pages = 0
        for _, store in stores:
            num_pages += store.num_pages
        moves = []
        end_ns = 0
        if self._with_page_ids:
            for (_, store), path in zip(stores, paths, strict=True):
                ids = self._cache.page_ids(path)
                for segment in store.segments:
                    assert segment.slots is not None
                    moves.append(Move(self.host.name, tuple(ids[segment.start : segment.end]), segment.slots))
        else:
            end_ns = self.lanes["d2h"].submit(self._now_ns, num_pages * self.page_bytes)
        under_way = _UnderWay(Direction.STORE, num_pages, self._workers(), stores=tuple(stores), paths=tuple(paths))
        self._begin(under_way, end_ns, moves)

    def _begin_spills(self) -> None:
        """What came to host memory goes on to files."""
        disk = self.disk
        assert disk is not None
        wanted, self._spills = self._spills, []
        stores = []
        sources: list[TierLoad] = []
        num_pages = 0
        moves: list[Move] = []
        for content, start, end in wanted:
            end = start + self.host.find(content, start, end)  # noqa: PLW2901
            if end == start:
                continue
            num_refused = disk.index.num_refused
            store = disk.prepare_store(content, start, end)
            self.counts.num_pages_without_room += disk.index.num_refused - num_refused
            if store is None:
                continue
            source = self.host.read(content, store.segments[0].start, store.segments[-1].end)
            stores.append((disk, store))
            sources.append(source)
            num_pages += store.num_pages
            if self._with_page_ids:
                first, slots = source.segments[0].start, source.segments[0].slots
                assert slots is not None
                for segment in store.segments:
                    assert segment.slots is not None
                    moves.append(Move(disk.name, slots[segment.start - first : segment.end - first], segment.slots))
        self._unmark_removed()
        if not stores:
            return
        end_ns = 0
        if not self._with_page_ids:
            end_ns = self.lanes["disk_write"].submit(self._now_ns, num_pages * self.page_bytes)
        loads = tuple((self.host, source) for source in sources)
        under_way = _UnderWay(Direction.SPILL, num_pages, self._workers(), stores=tuple(stores), loads=loads)
        self._begin(under_way, end_ns, moves)

    # Transfers --------------------------------------------------------------------------------------------

    def _workers(self) -> set[int]:
        return set(range(self.config.workers))

    def _begin(self, under_way: _UnderWay, end_ns: int, moves: list[Move]) -> None:
        transfer_id = self.num_transfers
        self.num_transfers += 1
        self._under_way[transfer_id] = under_way
        if self._events is not None and under_way.stores:
            runs = tuple(
                (store.content, segment.start, segment.end)
                for _, store in under_way.stores
                for segment in store.segments
            )
            self._events.append(StoreStarted(transfer_id, under_way.stores[0][0].name, runs))
        if self._with_page_ids:
            dropped = self.disk.take_dropped() if isinstance(self.disk, FileTier) else ()
            self._planned.append(Transfer(transfer_id, under_way.direction, tuple(moves), under_way.num_pages, dropped))
        else:
            heappush(self._due, (end_ns, transfer_id))

    def _report(self, report: TransferReport) -> None:
        under_way = self._under_way.get(report.transfer_id)
        if under_way is None or report.worker not in under_way.waiting_for:
            self.counts.num_stray_reports += 1
            return
        under_way.waiting_for.remove(report.worker)
        if report.num_good_pages is not None:
            under_way.num_good_pages = min(under_way.num_good_pages, max(0, report.num_good_pages))
        if not under_way.waiting_for:
            del self._under_way[report.transfer_id]
            self._end(report.transfer_id, under_way)

    def _end(self, transfer_id: int, under_way: _UnderWay) -> None:
        if self._lazy is not None:
            self._lazy.is_stuck = False
        if under_way.direction is Direction.LOAD:
            self._end_load(transfer_id, under_way)
        else:
            self._end_store(transfer_id, under_way)

    def _end_store(self, transfer_id: int, under_way: _UnderWay) -> None:
        is_stored = under_way.num_good_pages >= under_way.num_pages
        self.counts.num_stores += 1
        self.counts.num_failed += not is_stored
        if self._events is not None:
            num_pages = under_way.num_pages if is_stored else 0
            self._events.append(TransferEnded(transfer_id, -1, num_pages, self._now_ns))
        for tier, store in under_way.stores:
            tier.complete_store(store, is_stored=is_stored)
        for tier, source in under_way.loads:
            tier.end_read(source)
        if under_way.direction is Direction.SPILL:
            self._end_spill(under_way.stores, is_stored=is_stored)
        tree = self._cache.tree
        if isinstance(tree, SafeFirstTree):
            for path, (_, store) in zip(under_way.paths, under_way.stores, strict=False):
                is_whole = is_stored and self.host.is_stored(store)
                for segment in store.segments:
                    if is_whole:
                        tree.mark(path, segment.start, segment.end, Below.STORED)
                        continue
                    # Trying again and again would hold the pages for ever, and who needs them would wait for ever.
                    tree.mark(path, segment.start, segment.end, Below.NOT if is_stored else Below.FAILED)
                    self._mark_held(tree, store.content, segment.start, segment.end)
            tree.regroup()
        self._unmark_removed()
        for path in under_way.paths:
            self._cache.unhold(path)

    def _end_spill(self, stores: tuple[tuple[MemoryTier, TierStore], ...], *, is_stored: bool) -> None:
        """Host memory may have let go of its pages before they became files, or failed to."""
        for disk, store in stores:
            for segment in store.segments:
                if is_stored:
                    if self._lazy is not None:
                        self._mark_as_held(store.content, segment.start, segment.end)
                    continue
                num_above = self._cache.match(store.content, segment.end).num_pages
                num_above += self.host.find(store.content, num_above, segment.end)
                if num_above < segment.end:
                    disk.lose(store.content, max(segment.start, num_above), segment.end)

    def _end_load(self, transfer_id: int, under_way: _UnderWay) -> None:
        num_left = under_way.num_good_pages
        by_tier = dict.fromkeys((tier.name for tier in self.tiers), 0)
        is_whole = True
        for tier, load in under_way.loads:
            num_good = min(num_left, load.num_pages)
            num_left -= num_good
            by_tier[tier.name] = num_good
            is_whole = is_whole and num_good == load.num_pages
            tier.complete_load(load, num_good)
        self._unmark_removed()
        num_pages = sum(by_tier.values())
        self.counts.num_loads += 1
        self.counts.num_failed += not is_whole
        if self._events is not None:
            self._events.append(TransferEnded(transfer_id, under_way.request, num_pages, self._now_ns))
        loaded = Loaded(under_way.request, under_way.start_page + num_pages, tuple(by_tier.values()))
        self._loaded.append(loaded)

    # What tiers and the device tell -----------------------------------------------------------------------

    def _lose_gone(self) -> None:
        """Forgets what nobody can reach since the device evicted what is before it."""
        gone = self._gone
        if any(tier.has_holes for tier in self.tiers):
            for content, start, end in gone:
                self.host.lose(content, start, end)
                if self.disk is not None:
                    self.disk.lose(content, start + self.host.find(content, start, end), end)
            self._unmark_removed()
        gone.clear()

    def _on_stored(self, name: str, content: Content, start: int, end: int, parent: Content | None) -> None:
        if self._events is not None:
            self._events.append(PagesStored(content, start, end, parent, name))
        if self.disk is not None and name == "host":
            spills = self._spills
            if spills and precedes(spills[-1][0], spills[-1][2], content, start):
                start = spills.pop()[1]
            spills.append((content, start, end))

    def _on_removed(self, name: str, content: Content, start: int, end: int) -> None:
        if self._events is not None:
            self._events.append(PagesRemoved(content, start, end, name))
        if self._lazy is not None:
            self._removed.append((content, start, end))
        if self.disk is not None and name == "host":
            self.disk.lose(content, max(start, self._cache.match(content, end).num_pages), end)

    def _unmark_removed(self, below: Below = Below.FAILED) -> None:
        """What was removed below is lost if the device evicts it.

        It is not stored again while it lies there: a tier that is too small would be filled in turns, for ever.
        """
        tree = self._cache.tree
        if not self._removed or not isinstance(tree, SafeFirstTree):
            return
        for content, start, end in self._removed:
            if tree.has(content, start):
                tree.mark_match(self._cache.match(content, end), start, below)
                if self.disk is not None:
                    self._mark_held(tree, content, start, end)
        self._removed.clear()
        tree.regroup()

    def _mark_as_held(self, content: Content, start: int, end: int) -> int:
        """The device has pages [start, end), of which a tier may have some as well; how many."""
        tree = self._cache.tree
        assert isinstance(tree, SafeFirstTree)
        num_held = self._mark_held(tree, content, start, end)
        if num_held:
            tree.regroup()
        return num_held

    def _mark_held(self, tree: SafeFirstTree, content: Content, start: int, end: int) -> int:
        if self.disk is None:
            # Nothing can be found below after something that cannot, neither there nor on the device.
            num_held = self.host.find(content, start, end)
            if num_held:
                tree.mark_match(self._cache.match(content, start + num_held), start, Below.STORED)
            return num_held
        num_held = 0
        for tier in self.tiers:
            for first, last in tier.held(content, start, end):
                num_held += last - first
                tree.mark_match(self._cache.match(content, last), first, Below.STORED)
        return num_held

    # Laws -------------------------------------------------------------------------------------------------

    def holds(self) -> list[Path]:
        """What transfers hold on the device."""
        return [path for under_way in self._under_way.values() for path in under_way.paths]

    def check(self) -> None:
        """Asserts laws L1 to L3 in every tier below."""

        def on_device(content: Content, num_pages: int) -> bool:
            return self._cache.match(content, num_pages).num_pages >= num_pages

        def on_device_or_host(content: Content, num_pages: int) -> bool:
            match = self._cache.match(content, num_pages).num_pages
            return match + self.host.find(content, match, num_pages) >= num_pages

        if isinstance(self._cache.tree, SafeFirstTree):
            for node in self._cache.tree.nodes():
                held: set[int] = set()
                for tier in self.tiers:
                    for first, last in tier.held(node.content, node.start, node.end):
                        held.update(range(first, last))
                num_expected = node.end - node.start if node.below == Below.STORED else 0
                assert len(held) == num_expected, f"L4: {node} is marked {node.below}; {len(held)} pages are below"
        self.host.check(on_device)
        if self.disk is not None:
            self.disk.check(on_device_or_host)
        if not self._under_way:
            for tier in self.tiers:
                assert tier.has_offers or not tier.num_used, f"L2: {tier.num_used} pages of {tier.name} held at rest"

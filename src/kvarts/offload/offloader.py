"""Transfers between the device and the tiers below it.

The scheduler looks up how much of a prompt is in lower tiers (`lookup`), loads it (`start_load`), and stores pages
(`plan_stores`). Transfers end when every worker has reported them, or, in virtual time, when their channel is done. The
source and target pages of a transfer are held from its beginning to its end, even if its request is cancelled.

Longer than other files: stores, loads and spills work on the same three things, the device's order, the tiers and the
running transfers, so separate files would have to pass all of these to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from kvarts.content import Content
from kvarts.event_log import Tell
from kvarts.events import PagesRemoved, PagesStored, StoreStarted, TransferEnded
from kvarts.kv.cache import Holding
from kvarts.kv.node import HeldPages
from kvarts.kv.page_cache import PageCache
from kvarts.kv.transfer import (
    Awaited,
    Coming,
    Direction,
    Loaded,
    Move,
    Offer,
    PrefillTimes,
    TransferTotals,
    Weighed,
)
from kvarts.kv.tree import Node
from kvarts.offload.backlog import Backlog, Spill
from kvarts.offload.bus import Bus
from kvarts.offload.channel import Channel
from kvarts.offload.marks import Marks
from kvarts.offload.safe_first import Below, SafeFirst
from kvarts.offload.store_policy import StorePolicy
from kvarts.offload.tier import ConnectedTier, Tier, TierLoad, TierStore
from kvarts.offload.transfers import NEVER_NS, Transfers
from kvarts.offload.under_way import ALL, UnderWay
from kvarts.offload.weigher import Weigher

__all__ = ["Offloader"]


class Offloader(Transfers):
    """Owner of the tiers below one device, of their channels, and of every running transfer.

    `tiers`: the fastest first; pages stored in one are then stored in the next. `policy`: which pages are stored below
    the device, and when. `order`: the eviction order of `cache`, for a policy that stores the pages that are evicted
    next. `num_layers` and `step_tokens`: see Weigher. `copy_slowdown` and `bus`: see Transfers. `swaps`: preempted
    requests keep all their pages in the first tier. `with_page_ids`: transfers name pages, for an executor that copies
    them and reports; otherwise they end at the time that their channel predicts. `workers`: how many must report a
    transfer. Every `fail_every`-th fails; 0: no transfer does. `tell` receives events.
    """

    def __init__(
        self,
        cache: PageCache,
        tiers: Sequence[ConnectedTier],
        policy: StorePolicy[Any],
        *,
        page_bytes: int,
        order: SafeFirst | None = None,
        full_prompt_hits: bool = False,
        prefill: PrefillTimes | None = None,
        store_within_ns: int = ALL,
        num_layers: int = 1,
        step_tokens: int = 1,
        copy_slowdown: float = 0.0,
        bus: Bus | None = None,
        swaps: bool = False,
        deadline_ns: int = ALL,
        workers: int = 1,
        fail_every: int = 0,
        with_page_ids: bool = False,
        tell: Tell | None = None,
    ) -> None:
        lanes = [connected.read for connected in tiers]
        super().__init__(
            lanes,
            Weigher(
                lanes,
                page_bytes,
                prefill,
                splits=prefill is not None and not with_page_ids,
                num_layers=num_layers,
                step_tokens=step_tokens,
            ),
            copying=(tiers[0].write, *lanes),
            copy_slowdown=copy_slowdown,
            bus=bus,
            deadline_ns=deadline_ns,
            workers=workers,
            fail_every=fail_every,
            with_page_ids=with_page_ids,
        )
        self._cache = cache
        self._connected = tuple(tiers)
        self._policy = policy
        self._order = order
        self._tell = tell
        self._store_within_ns = store_within_ns
        self._swaps = swaps
        self.page_bytes = page_bytes
        self.full_prompt_hits = full_prompt_hits
        self.tiers = tuple(connected.tier for connected in tiers)
        self.tier_names = tuple(tier.name for tier in self.tiers)
        self.confirm = policy.confirm
        self._is_told_all = tell is not None or len(tiers) > 1
        for place, tier in enumerate(self.tiers):
            tier.listen(
                partial(self._on_stored, place) if self._is_told_all else None,
                partial(self._on_removed, place) if self._is_told_all or order is not None else None,
            )
        self._gone: list[tuple[Content, int, int]] = []
        cache.tree.on_removed = self._on_evicted
        cache.lender = self
        cache.on_evicted = self._lose_gone
        self._marks = Marks(cache, self.tiers, order)
        if order is not None:
            order.on_grown = self._marks.mark_as_held
            # Safe pages may be in the second tier only, and files may contain pages that this process never wrote.
            order.hears_all = len(self.tiers) > 1
        self._backlog = Backlog(len(tiers), lambda place, spill: bool(self.tiers[place].find(spill[0], *spill[2:])))

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The channels of each tier in turn: to it, and from it."""
        return tuple(channel for connected in self._connected for channel in (connected.write, connected.read))

    def totals(self) -> TransferTotals:
        """Return totals of transfers."""
        return TransferTotals(
            msgspec.structs.asdict(self.counts),
            {channel.name: channel.num_bytes for channel in self.channels},
            {tier.name: tier.num_evicted for tier in self.tiers},
            dict(self._waited_ns),
        )

    # Interface of the scheduler ---------------------------------------------------------------------------

    def plan_stores(self, now_ns: int) -> None:
        """Begin the stores of the step that starts at `now_ns`."""
        self._now_ns = now_ns
        if self._policy.stores_deepest_first:
            # What is to be stored next would replace what is on its way through a small tier.
            self._plan_spills()
        stores: list[tuple[Tier, TierStore]] = []
        held: list[tuple[HeldPages, ...]] = []
        room = -1
        for content, start, end, where in self._policy.choose():
            if room < 0:
                room = self._connected[0].write.num_within(now_ns, self._store_within_ns, self.page_bytes)
            position = num_here = start
            if room > 0:
                store, num_here = self._prepare(content, start, end, where, room, held)
                if store is not None:
                    stores.append((self.tiers[0], store))
                    room -= store.num_pages
                    position = store.segments[-1].end
            if room == 0 or (position < num_here and self._passes_through(num_here) and self._moves(stores)):
                self._policy.wait(position)
                break
        if stores:
            self._begin_stores(stores, held)
        self._plan_spills()

    def _plan_spills(self) -> None:
        backlog = self._backlog
        for place, wanted in enumerate(backlog.spills):
            if wanted and not backlog.is_behind[place + 1]:
                self._begin_spills(place)

    def preempted(self, content: Content, num_pages: int, holding: Holding) -> None:
        """Store the pages of a preempted request in the first tier, also those that only this request can find."""
        if self._swaps and num_pages:
            self._policy.preempted(content, num_pages, holding)

    def ended(self, content: Content) -> None:
        """Drop the pages below that only the request of `content` could find."""
        if self._swaps:
            self._policy.ended(content)
            self.tiers[0].drop(content, content.num_known_pages)
            self._marks.unmark_removed()

    def lookup(self, request: int, content: Content, start: int, limit: int) -> Offer | None:
        """Return how much the tiers have of `content` in pages [start, limit), from `start` on; None without pages.

        These pages are pinned for `request`, in place of its previous pins.
        """
        position = start
        by_tier = []
        for tier in self.tiers:
            num_pages = tier.lookup(request, content, position, limit)
            by_tier.append(num_pages)
            position += num_pages
        if position == start:
            return None
        return Offer(position - start, tuple(by_tier))

    def coming(self, content: Content, start: int, limit: int) -> Coming | None:
        """Return the pages of `content` from `start` on that other engines are storing in the last tier."""
        coming = self.tiers[-1].coming(content, start, limit, self._now_ns)
        if coming is None:
            return None
        num_bytes = coming.num_pages * self.page_bytes
        end_ns = coming.end_ns + self._connected[-1].read.within_ns(self._now_ns, num_bytes)
        return msgspec.structs.replace(coming, end_ns=end_ns)

    def await_write(self, write: int) -> None:
        """Note that a request waits for a write of another engine to the last tier."""
        self.tiers[-1].await_write(write)

    def weigh(
        self, offer: Offer, start: int, page_size: int, num_known: int, *, num_behind: int, awaited: Awaited | None
    ) -> Weighed:
        """Return how many pages of `offer`, which begins at page `start`, to load for a prompt of `num_known` tokens.

        `num_behind`: requests behind it that do not wait for memory. `awaited`: the pages of another request's load, if
        there is one.
        """
        return self._weigher.weigh(
            self._now_ns, offer, start, page_size, num_known, num_behind=num_behind, awaited=awaited
        )

    def forget(self, request: int) -> None:
        """End the pins of the offer to `request`."""
        for tier in self.tiers:
            tier.forget(request)

    def start_load(
        self,
        request: int,
        content: Content,
        start: int,
        num_pages: int,
        holding: Holding,
        num_front: int = 0,
        wait_ns: int | None = None,
    ) -> int:
        """Begin to load `num_pages` pages of the offer to `request` into its pages from page `start` on.

        They follow the first `num_front` pages of the offer. Return when that should end. `wait_ns`: see Weighed.
        """
        loads = []
        moves = []
        lanes = []
        end_ns, lane, least_ns, expected_ns = self._now_ns, "", 0, 0
        position = start
        num_left = num_pages
        for connected in self._connected:
            tier = connected.tier
            num_offered = tier.offered(request)
            if not num_offered:
                continue
            if not num_left or num_front >= num_offered:
                num_front -= min(num_front, num_offered)
                tier.forget(request)
                continue
            load = tier.prepare_load(request, min(num_left, num_offered - num_front), num_front)
            num_front = 0
            count = load.num_pages
            loads.append((tier, load))
            if self._with_page_ids:
                assert holding.page_ids is not None
                sources = load.segments[0].slots
                assert sources is not None
                moves.append(Move(tier.name, sources, tuple(holding.page_ids[position : position + count])))
            lanes.append((connected.read, count * self.page_bytes))
            within_ns = 0 if self._bus is None else connected.read.within_ns(self._now_ns, count * self.page_bytes)
            read_ns = connected.read.submit(self._now_ns, count * self.page_bytes)
            if read_ns > end_ns or within_ns > expected_ns:
                end_ns, lane, expected_ns = read_ns, connected.read.name, within_ns
            if least_ns < read_ns < NEVER_NS:
                least_ns = read_ns
            position += count
            num_left -= count
        under_way = UnderWay(Direction.LOAD, position - start, self._workers(), loads=tuple(loads), request=request)
        under_way.start_page, under_way.least_ns = start, least_ns
        under_way.lane, under_way.since_ns, under_way.lanes = lane, [self._now_ns], tuple(lanes)
        early_ns = NEVER_NS if wait_ns is None else self._now_ns + wait_ns
        self._begin(under_way, end_ns, moves, early_ns, self._now_ns + expected_ns)
        return end_ns if self._bus is None else self._now_ns + expected_ns

    @property
    def is_due(self) -> bool:
        """Whether a store or a spill is due, independent of later changes on the device."""
        return self._backlog.has_spills or self._policy.has_work

    def num_pages(self) -> tuple[int, ...]:
        """Return pages used and cached in each tier, alternating."""
        counts: tuple[int, ...] = ()
        for tier in self.tiers:
            counts += tier.num_used, tier.num_cached
        return counts

    def pages_to_spare(self) -> int | None:
        """Return how many pages can be taken in identical steps before the tiers must act; None: in the next step."""
        if self._loaded or self._backlog.has_spills:
            return None
        spare = self._policy.pages_to_spare()
        if spare is not None and (self._order is not None or any(tier.has_holes for tier in self.tiers)):
            # When a page is lost, all pages after it are dropped in the same step. A page that only the second tier has
            # is lost for the first.
            num_without_loss = self._cache.pool.num_empty
            if self._order is not None and len(self.tiers) == 1:
                num_without_loss += self._order.num_safe
            return min(spare, num_without_loss)
        return spare

    def reset(self) -> None:
        """Drop all pages, below and of those to be stored.

        Running transfers end as they would have; the pages that they store are dropped.
        """
        self._policy.forget()
        self._backlog.clear()
        for tier in self.tiers:
            tier.reset()
        self._marks.unmark_removed(Below.NOT)

    # Stores -----------------------------------------------------------------------------------------------

    def _num_idle_of(self, under_way: UnderWay) -> int:
        return sum(self._cache.num_idle(part) for pages in under_way.held for part in pages)

    def _prepare(
        self,
        content: Content,
        start: int,
        end: int,
        where: object,
        room: int,
        held: list[tuple[HeldPages, ...]],
    ) -> tuple[TierStore | None, int]:
        """Prepare to store at most `room` of pages [start, end), and hold these; return None if there are none.

        Return also how many pages the device has.
        """
        first = self.tiers[0]
        num_refused = first.num_refused
        path, end = self._policy.path(content, end, where)
        if self._passes_through(end):
            start = self._pass_through(content, start, end, room)
        deepest_first = self._policy.stores_deepest_first
        if room < end - start:
            start, deepest_first = self._policy.first_wanted(start, where), False
        store = first.prepare_store(content, start, end, deepest_first=deepest_first, limit=room)
        num_refused = first.num_refused - num_refused
        self.counts.num_pages_without_room += num_refused
        order = self._order
        if order is not None:
            self._marks.unmark_removed()
            if num_refused:
                self._policy.refuse()
            if store is None and not num_refused:
                self._marks.mark_as_held(content, start, end)
        if store is None:
            return None, end
        pages = tuple([self._cache.hold(path, segment.start, segment.end) for segment in store.segments])
        if order is not None:
            for part in pages:
                self._marks.mark_part(part, Below.COMING)
        held.append(pages)
        return store, end

    def _passes_through(self, num_pages: int) -> bool:
        """Return whether a prefix of `num_pages` goes through the first tier in pieces: it is too small for all."""
        is_small = len(self.tiers) > 1 and num_pages > self.tiers[0].num_pages
        return is_small and not self._policy.stores_deepest_first

    def _pass_through(self, content: Content, start: int, end: int, room: int) -> int:
        """Return the first of pages [start, end) that no tier has; make room for it and `room` pages in all.

        What makes room is what the first tier has of the same prefix, as far as the next tier has it as well.
        """
        first, second = self.tiers[0], self.tiers[1]
        position = -1
        while position < start:
            position = start
            for tier in self.tiers:
                start += tier.find(content, start, end)
        here = first.held(content, 0, start)
        num_here = sum(last - begin for begin, last in here)
        num_short = min(end - start, room, num_here) - (first.num_pages - first.num_used - num_here)
        if num_short > 0:
            begin, last = here[-1]
            begin = max(begin, last - num_short)
            if second.held(content, begin, last) == [(begin, last)]:
                first.vacate(content, last, last - begin)
        return start

    def _moves(self, stores: list[tuple[Tier, TierStore]]) -> bool:
        """Return whether something is on its way to a tier, or is to be: after it there may be room."""
        is_moving = any(under_way.direction is not Direction.LOAD for under_way in self._under_way.values())
        return bool(stores) or is_moving or self._backlog.has_spills

    def _begin_stores(self, stores: list[tuple[Tier, TierStore]], held: list[tuple[HeldPages, ...]]) -> None:
        num_pages = 0
        for _, store in stores:
            num_pages += store.num_pages
        moves = []
        if self._with_page_ids:
            for (_, store), pages in zip(stores, held, strict=True):
                for segment, part in zip(store.segments, pages, strict=True):
                    assert segment.slots is not None
                    moves.append(Move(self.tiers[0].name, tuple(self._cache.page_ids(part)), segment.slots))
        lane = self._connected[0].write
        end_ns = lane.submit(self._now_ns, num_pages * self.page_bytes)
        under_way = UnderWay(Direction.STORE, num_pages, self._workers(), stores=tuple(stores), held=tuple(held))
        under_way.lanes = ((lane, num_pages * self.page_bytes),)
        self._begin(under_way, end_ns, moves)

    def _begin_spills(self, place: int) -> None:
        """Begin to copy pages that have arrived in the tier at `place` to the next tier."""
        upper, lower = self.tiers[place], self.tiers[place + 1]
        wanted = self._backlog.spills[place]
        early: list[Spill] = []
        stores = []
        sources: list[TierLoad] = []
        num_pages = 0
        moves: list[Move] = []
        room = self._connected[place + 1].write.num_within(self._now_ns, self._store_within_ns, self.page_bytes)
        while wanted and room:
            content, _, start, end = wanted.popleft()
            source = upper.read(content, start, end)
            if source is None:
                continue
            num_above = self._num_above(place + 1, content, start)
            if num_above + lower.find(content, num_above, start) < start:
                # The device has evicted the pages before it, and their store in the tier above has not ended.
                upper.end_read(source)
                early.append((content, 0, start, end))
                continue
            num_refused = lower.num_refused
            store = lower.prepare_store(content, start, source.segments[0].end, limit=room)
            self.counts.num_pages_without_room += lower.num_refused - num_refused
            if store is None:
                upper.end_read(source)
                continue
            position = store.segments[-1].end
            upper.end_read_from(source, position)
            stores.append((lower, store))
            sources.append(source)
            num_pages += store.num_pages
            room -= store.num_pages
            if self._with_page_ids:
                slots = source.segments[0].slots
                assert slots is not None
                for segment in store.segments:
                    assert segment.slots is not None
                    part = slots[segment.start - start : segment.end - start]
                    moves.append(Move(lower.name, part, segment.slots))
            if not room and position < end:
                # Pages whose spill has begun are not tried again, even if it fails.
                wanted.appendleft((content, 0, position, end))
        wanted.extendleft(reversed(early))
        self._backlog.is_behind[place + 1] = not room or bool(early)
        self._marks.unmark_removed()
        if not stores:
            return
        lane = self._connected[place + 1].write
        end_ns = lane.submit(self._now_ns, num_pages * self.page_bytes)
        loads = tuple((upper, source) for source in sources)
        under_way = UnderWay(Direction.SPILL, num_pages, self._workers(), stores=tuple(stores), loads=loads)
        under_way.lanes = ((lane, num_pages * self.page_bytes),)
        self._begin(under_way, end_ns, moves)

    # Transfers --------------------------------------------------------------------------------------------

    def _begin(
        self, under_way: UnderWay, end_ns: int, moves: list[Move], early_ns: int = NEVER_NS, expected_ns: int = 0
    ) -> None:
        if self._tell is not None and under_way.stores:
            runs = tuple(
                (store.content, segment.start, segment.end)
                for _, store in under_way.stores
                for segment in store.segments
            )
            self._tell(StoreStarted(self.num_transfers, under_way.stores[0][0].name, runs))
        dropped: tuple[bytes, ...] = ()
        if self._with_page_ids:
            dropped = tuple(key for tier in self.tiers for key in tier.take_dropped())
        self._submit(under_way, end_ns, moves, dropped, early_ns, expected_ns)

    def _settle(self, transfer_id: int, under_way: UnderWay) -> None:
        self._policy.end_refusal()
        self._backlog.go_on()
        if under_way.direction is Direction.LOAD:
            self._end_load(transfer_id, under_way)
        else:
            self._end_store(transfer_id, under_way)

    def _end_store(self, transfer_id: int, under_way: UnderWay) -> None:
        is_stored = self._count_store(under_way)
        if self._tell is not None:
            num_pages = under_way.num_pages if is_stored else 0
            is_given_up = under_way.is_given_up
            self._tell(TransferEnded(transfer_id, -1, num_pages, self._now_ns, is_given_up=is_given_up))
        for tier, store in under_way.stores:
            tier.complete_store(store, is_stored=is_stored)
        for tier, source in under_way.loads:
            tier.end_read(source)
        if under_way.direction is Direction.SPILL and is_stored:
            for _, store in under_way.stores:
                for segment in store.segments:
                    self._marks.mark_as_held(store.content, segment.start, segment.end)
        if not is_stored:
            self._lose_after_failed(under_way.stores)
        order = self._order
        if order is not None:
            for pages, (_, store) in zip(under_way.held, under_way.stores, strict=False):
                is_whole = is_stored and self.tiers[0].is_stored(store)
                for part, segment in zip(pages, store.segments, strict=True):
                    if is_whole:
                        has_orphans = self._marks.mark_part(part, Below.STORED)
                    else:
                        # What fails again and again is not tried again; what was given up may be.
                        has_failed = not is_stored and not under_way.is_given_up
                        self._marks.mark_part(part, Below.FAILED if has_failed else Below.NOT)
                        has_orphans = True
                    if has_orphans:
                        self._marks.mark_held(store.content, segment.start, segment.end)
            order.regroup()
        self._marks.unmark_removed()
        for pages in under_way.held:
            for part in pages:
                self._cache.unhold(part)

    def _lose_after_failed(self, stores: tuple[tuple[Tier, TierStore], ...]) -> None:
        """Drop pages that were stored after pages that failed to be stored and that no faster tier has any more."""
        for tier, store in stores:
            for segment in store.segments:
                num_above = self._num_above(self.tiers.index(tier), store.content, segment.end)
                if num_above < segment.end:
                    tier.lose(store.content, max(segment.start, num_above), segment.end)

    def _all_loaded(self, under_way: UnderWay) -> Loaded:
        by_tier = dict.fromkeys(self.tier_names, 0) | {tier.name: load.num_pages for tier, load in under_way.loads}
        end = under_way.start_page + under_way.num_pages
        return Loaded(under_way.request, end, tuple(by_tier.values()), is_under_way=True)

    def _end_load(self, transfer_id: int, under_way: UnderWay) -> None:
        num_left = under_way.num_good_pages
        by_tier = dict.fromkeys((tier.name for tier in self.tiers), 0)
        is_whole = True
        for tier, load in under_way.loads:
            num_good = min(num_left, load.num_pages)
            num_left -= num_good
            by_tier[tier.name] = num_good
            is_whole = is_whole and num_good == load.num_pages
            tier.complete_load(load, num_good)
        self._marks.unmark_removed()
        num_pages = sum(by_tier.values())
        self._count_load(under_way, is_whole=is_whole)
        if self._tell is not None:
            self._tell(TransferEnded(transfer_id, under_way.request, num_pages, self._now_ns))
        loaded = Loaded(under_way.request, under_way.start_page + num_pages, tuple(by_tier.values()))
        self._loaded.append(loaded)

    # Callbacks of the tiers and the device ----------------------------------------------------------------

    def _on_evicted(self, node: Node, start: int, end: int) -> None:
        """Record an eviction of the device, if a tier may have later pages of the sequence."""
        order = self._order
        if order is None or order.hears_all or order.may_be_followed(node):
            self._gone.append((node.content, start, end))

    def _lose_gone(self) -> None:
        """Drop pages that cannot be reached since the device evicted pages before them."""
        gone = self._gone
        if not gone:
            return
        if any(tier.has_holes for tier in self.tiers):
            for content, start, end in gone:
                position = start
                for tier in self.tiers:
                    tier.lose(content, position, end)
                    position += tier.find(content, position, end)
            self._marks.unmark_removed()
        gone.clear()

    def _num_above(self, place: int, content: Content, end: int) -> int:
        """Return how many of the first `end` pages of `content` the device has, and tiers above `place` after it."""
        num_pages = self._cache.match(content, end).num_pages
        for tier in self.tiers[:place]:
            num_pages += tier.find(content, num_pages, end)
        return num_pages

    def _on_stored(self, place: int, content: Content, start: int, end: int, parent: Content | None) -> None:
        if self._tell is not None:
            self._tell(PagesStored(content, start, end, parent, self.tier_names[place]))
        self._backlog.add(place, content, 0, start, end)

    def _on_removed(self, place: int, content: Content, start: int, end: int) -> None:
        if self._tell is not None:
            self._tell(PagesRemoved(content, start, end, self.tier_names[place]))
        if self._order is not None:
            self._marks.removed.append((content, start, end))
        for below in range(place + 1, len(self.tiers)):
            if self.tiers[below].has_holes:
                self.tiers[below].lose(content, max(start, self._num_above(below, content, end)), end)

    # Laws -------------------------------------------------------------------------------------------------

    def holds(self) -> list[HeldPages]:
        """Return the pages that transfers hold on the device."""
        return [part for under_way in self._under_way.values() for pages in under_way.held for part in pages]

    def check(self) -> None:
        """Assert laws L1 to L3 in every lower tier."""

        def is_above(place: int, content: Content, num_pages: int) -> bool:
            return self._num_above(place, content, num_pages) >= num_pages

        if self._order is not None:
            for node in self._cache.tree.nodes():
                held: set[int] = set()
                for tier in self.tiers:
                    for first, last in tier.held(node.content, node.start, node.end):
                        held.update(range(first, last))
                below = self._order.below(node)
                num_expected = node.end - node.start if below == Below.STORED else 0
                assert len(held) == num_expected, f"L4: {node} is marked {below}; {len(held)} pages are below"
        for place, tier in enumerate(self.tiers):
            tier.check(partial(is_above, place))
        if not self._under_way:
            for tier in self.tiers:
                assert tier.has_offers or not tier.num_used, f"L2: {tier.num_used} pages of {tier.name} held at rest"

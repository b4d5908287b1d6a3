"""Transfers between a device and the tiers below it.

The scheduler looks up how much of a prompt is in lower tiers (`lookup`), loads it (`start_load`), and stores computed
pages (`plan_stores`). Pages that have arrived in a tier are spilled: copied to the next, so that they are still below
when they are evicted. Transfers end when every worker has reported them, or, in virtual time, when their channel is
done. Their source and target are held from their beginning to their end, even if their request is cancelled.

An example: a prompt of three pages on a device of three, above a host tier of four. A page takes 1 ms to the host and
0.5 ms back:

    ms          0          1            4           ...          10           11.5
    request     computes   ended                    another      the same prompt again
    channels               store ------ end                      load ------- end
    device      3 used     3 held       3 cached    evicted      3 held       3 found
    host                   3 coming     3 found     3 found      3 pinned     3 found

The request has ended at 1 ms, and its pages stay in use until the store ends: `plan_stores` began it in the step after
the one that computed them. At 10 ms `lookup` offers three pages, and pins them; `start_load` returns 11.5 ms.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Generic, TypeVar, cast

from kvarts.core.content import Content
from kvarts.core.event_log import Emit
from kvarts.core.events import StoreStarted, TransferEnded
from kvarts.core.kv.cache import BlockTable, Cache
from kvarts.core.kv.eviction import PinnedPages
from kvarts.core.kv.transfer import Awaited, Coming, Direction, Move, Offer, PrefillNs, TransferTotals, Weighed
from kvarts.core.tiers.channel import Channel
from kvarts.core.tiers.config import OffloadConfig
from kvarts.core.tiers.layout import Layout, Tier
from kvarts.core.tiers.transfers import NEVER_NS, Copies, Loading, Transfers, UnderWay
from kvarts.core.tiers.weigher import Weigher

__all__ = ["Offloader"]

LayoutT = TypeVar("LayoutT", bound=Layout[Any])


class Offloader(Transfers, Generic[LayoutT]):
    """Owner of the channels between one device and the tiers below it, and of every running transfer: LowerTiers.

    `layout`: the contents of device and tiers; `cache`: the device's. `splits` and `step_tokens`: see Weigher.
    `with_page_ids`: transfers name pages, for an executor that copies them and reports; otherwise they end at the time
    that their channel predicts. `emit` receives events.
    """

    def __init__(
        self,
        cache: Cache,
        layout: LayoutT,
        offload: OffloadConfig,
        *,
        prefill: PrefillNs | None = None,
        splits: bool = True,
        step_tokens: int = 1,
        with_page_ids: bool = False,
        emit: Emit | None = None,
    ) -> None:
        connected = tuple(layout.connected)
        lanes = [each.read for each in connected]
        super().__init__(
            lanes,
            Weigher(
                lanes,
                layout.page_bytes,
                prefill,
                splits=splits and prefill is not None and not with_page_ids and layout.can_split,
                num_layers=1 if with_page_ids or offload.load_overlap == "none" else offload.num_layers,
                step_tokens=step_tokens,
            ),
            deadline_ns=round(offload.deadline_s * 1e9),
            workers=offload.workers,
            fail_every=offload.fail_every,
            with_page_ids=with_page_ids,
        )
        cache.lender = self
        self.layout = layout
        self.full_prompt_hits = offload.full_prompt_hits
        self.block_bytes = layout.block_bytes
        self.tiers: tuple[Tier, ...] = tuple(each.tier for each in connected)
        self.tier_names = tuple(tier.name for tier in self.tiers)
        self.channels: tuple[Channel, ...] = tuple(
            lane for each in connected for lane in ((each.read,) if each.is_read_only else (each.write, each.read))
        )
        """The channels of each tier in turn: to it, and from it."""
        self._connected = connected
        self._backlog = layout.backlog
        self._emit = emit
        self.confirm = layout.confirm
        self.preempted = layout.preempted
        self.keep_state = layout.keep_state
        self.resumed = layout.resumed
        self.ended = layout.ended
        self.lookup = layout.lookup
        self.found = layout.found
        self.elsewhere = layout.elsewhere
        self.forget = layout.forget
        self.await_write = layout.await_write

    def num_pages(self) -> tuple[int, ...]:
        """Return blocks used and cached in each tier, alternating."""
        counts = []
        for tier in self.tiers:
            counts.append(tier.num_used_blocks)
            counts.append(tier.num_cached_blocks)
        return tuple(counts)

    def totals(self) -> TransferTotals:
        """Return totals of transfers."""
        return TransferTotals(
            {**self.counts.by_name(), **self.layout.totals()},
            {channel.name: channel.num_bytes for channel in self.channels},
            {tier.name: tier.num_evicted_blocks for tier in self.tiers},
            dict(self._waited_ns),
        )

    # Stores and spills --------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether a store or a spill is due, independent of later changes on the device."""
        return self.layout.has_work or self._backlog.has_spills

    def pages_to_spare(self) -> int | None:
        """Return how many pages can be taken in identical steps before the tiers must act; None: in the next step."""
        backlog = self._backlog
        if self._loaded or (backlog.spills and backlog.has_spills):
            return None
        return self.layout.pages_to_spare()

    def begin_step(self, now_ns: int) -> None:
        """Take note that the step that starts at `now_ns` is planned: pages of the last one can be stored."""
        self._now_ns = now_ns
        self._used.clear()
        self.layout.begin_step()

    def plan_stores(self, now_ns: int) -> None:
        """Begin the stores and spills of the step that starts at `now_ns`."""
        self._now_ns = now_ns
        layout, backlog = self.layout, self._backlog
        if backlog.spills and layout.spills_first:
            self._begin_spills()
        if not backlog.is_behind[0]:
            copies = layout.store(now_ns, self._is_moving)
            if copies is not None:
                self._begin_copies(Direction.STORE, copies)
        if backlog.spills:
            self._begin_spills()
        self.counts.num_pages_without_room = layout.num_refused

    def _begin_spills(self) -> None:
        backlog = self._backlog
        for place in range(len(backlog.spills)):
            if backlog.is_due(place):
                copies = self.layout.spill(place, self._now_ns)
                if copies is not None:
                    self._begin_copies(Direction.SPILL, copies)

    def _is_moving(self) -> bool:
        """Return whether something is on its way to a tier, or is to be: after it there may be room."""
        is_moving = any(under_way.direction is not Direction.LOAD for under_way in self._under_way.values())
        return is_moving or self._backlog.has_spills

    def _begin_copies(self, direction: Direction, copies: Copies) -> None:
        """Begin a store or a spill."""
        name, write = self.tier_names[copies.target], self._connected[copies.target].write
        if self._emit is not None:
            self._emit(StoreStarted(self.num_transfers, name, tuple(copies.runs), tuple(copies.groups)))
        moves = []
        if self._with_page_ids:
            moves.append(Move(tuple(copies.source_ids), tuple(copies.target_ids)))
        num_bytes = copies.num_blocks * self.block_bytes
        under_way = UnderWay(direction, self._workers(), copies, ((write, num_bytes),))
        dropped = self._dropped() if self._with_page_ids else ()
        self._submit(under_way, write.submit(self._now_ns, num_bytes), moves, dropped)
        self._backlog.begun(copies.target)

    def _dropped(self) -> tuple[bytes, ...]:
        """Return the keys of files to delete."""
        return tuple(key for tier in self.tiers for key in tier.take_dropped())

    def _num_idle_of(self, under_way: UnderWay) -> int:
        return self.layout.num_idle(under_way.copies)

    # Loads --------------------------------------------------------------------------------------------------

    def coming(self, content: Content, start: int, limit: int) -> Coming | None:
        """Return the pages of `content` from `start` on that other engines are storing in the last tier."""
        coming = self.layout.coming(content, start, limit, self._now_ns)
        if coming is None:
            return None
        num_bytes = coming.num_blocks * self.block_bytes
        end_ns = coming.end_ns + self._connected[-1].read.within_ns(self._now_ns, num_bytes)
        return Coming(coming.write, coming.num_pages, end_ns, coming.num_blocks)

    def weigh(
        self, offer: Offer, start: int, page_size: int, num_known: int, *, num_behind: int, awaited: Awaited | None
    ) -> Weighed:
        """Return how many pages of `offer`, the newest, which begins at page `start`, to load for `num_known` tokens.

        `num_behind`: requests behind it that do not wait for memory. `awaited`: the pages of another request's load, if
        there is one.
        """
        num_gaining = self.layout.num_gaining(num_behind)
        weighed = self._weigher.weigh(
            self._now_ns, offer, start, page_size, num_known, num_behind=num_gaining, awaited=awaited
        )
        self.layout.weighed(offer, weighed, self._now_ns)
        return weighed

    def start_load(
        self,
        request: int,
        content: Content,
        start: int,
        num_pages: int,
        table: BlockTable,
        num_front: int = 0,
        wait_ns: int | None = None,
    ) -> int:
        """Begin to load `num_pages` pages of the offer to `request` into its pages from page `start` on.

        They follow the first `num_front` pages of the offer. Return when that should end. `wait_ns`: see Weighed.
        """
        loading = self.layout.load(request, content, start, num_pages, table, num_front)
        now_ns = self._now_ns
        moves: list[Move] = []
        lanes: list[tuple[Channel, int]] = []
        end_ns, lane, least_ns = now_ns, "", 0
        for place, num_blocks, source_ids, target_ids in loading.reads:
            read, num_bytes = self._connected[place].read, num_blocks * self.block_bytes
            if self._with_page_ids:
                moves.append(Move(source_ids, target_ids))
            lanes.append((read, num_bytes))
            read_ns = read.submit(now_ns, num_bytes)
            if read_ns > end_ns:
                end_ns, lane = read_ns, read.name
            if least_ns < read_ns < NEVER_NS:
                least_ns = read_ns
        under_way = UnderWay(Direction.LOAD, self._workers(), loading, tuple(lanes))
        under_way.least_ns, under_way.lane, under_way.since_ns = least_ns, lane, [now_ns]
        early_ns = NEVER_NS if wait_ns is None else now_ns + wait_ns
        dropped = self._dropped() if self._with_page_ids else ()
        self._submit(under_way, end_ns, moves, dropped, early_ns)
        if loading.displaced is not None:
            self._begin_copies(Direction.STORE, loading.displaced)
            if self._with_page_ids:  # executors copy in this order, and the load writes what the store reads
                self._planned[-2:] = self._planned[-1], self._planned[-2]
        return end_ns

    def use_early(self, transfer: int) -> None:
        """Let the planned step use the pages of a load under way: it ends after the load."""
        super().use_early(transfer)
        self.layout.use_early(cast(Loading, self._under_way[transfer].copies))

    # Ends of transfers --------------------------------------------------------------------------------------

    def _settle(self, transfer_id: int, under_way: UnderWay) -> None:
        self._backlog.go_on()
        if under_way.direction is not Direction.LOAD:
            is_stored = self._count_store(under_way)
            self._tell_ended(transfer_id, under_way, under_way.num_pages if is_stored else 0)
            self.layout.end_store(under_way.copies, is_stored=is_stored, is_given_up=under_way.is_given_up)
            self._backlog.ended(under_way.copies.target, is_stored=is_stored)
            return
        emit_ended = partial(self._tell_ended, transfer_id, under_way)
        loading, num_good = cast(Loading, under_way.copies), under_way.num_good_pages
        loaded = self.layout.end_load(loading, num_good, emit_ended)
        self._count_load(under_way, is_whole=num_good >= under_way.num_pages)
        self._loaded.append(loaded)

    def _tell_ended(self, transfer_id: int, under_way: UnderWay, num_pages: int) -> None:
        if self._emit is not None:
            request = under_way.copies.request
            num_blocks = min(under_way.num_good_pages, under_way.num_pages) if self.layout.counts_blocks else 0
            self._emit(TransferEnded(transfer_id, request, num_pages, self._now_ns, num_blocks, under_way.is_given_up))

    def reset(self) -> None:
        """Drop everything below, and store nothing of earlier steps.

        Running transfers end as they would have; the pages that they store are dropped.
        """
        self.layout.reset()

    # Laws ---------------------------------------------------------------------------------------------------

    def holds(self) -> list[PinnedPages]:
        """Return what transfers hold on the device."""
        return [held for under_way in self._under_way.values() for held in self.layout.holds(under_way.copies)]

    def check(self, *, at_rest: bool = True) -> None:
        """Assert laws L1 to L3 in every lower tier; unless `at_rest`, where enough has moved for it to be worth it."""
        self.layout.check([under_way.copies for under_way in self._under_way.values()], at_rest=at_rest)

"""Transfers between a device with KV groups and the host memory below it.

They work as in Offloader, for runs of pages: stores wait while their lane is behind, loads begin if they save time, and
the source and target of a transfer are held until it ends. A transfer moves parts of pages, each of one or more blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec

from kvarts.content import Content
from kvarts.event_log import Tell
from kvarts.events import StoreStarted, TransferEnded
from kvarts.kv.cache import Holding
from kvarts.kv.group_pages import GroupPages, HeldParts, PartHolding
from kvarts.kv.node import NOTHING, HeldPages
from kvarts.kv.pool import PageId
from kvarts.kv.run_loads import arrive, holding_of_transfer, unhold
from kvarts.kv.spans import PartRun, RunHolding, RunMatch
from kvarts.kv.transfer import Awaited, Direction, Loaded, Move, Offer, PrefillTimes, TransferTotals, Weighed
from kvarts.offload.bus import Bus
from kvarts.offload.channel import Channel
from kvarts.offload.part_policy import PartPolicy
from kvarts.offload.part_tier import PartTier
from kvarts.offload.transfers import NEVER_NS, Transfers
from kvarts.offload.under_way import ALL, UnderWay
from kvarts.offload.weigher import Weigher

__all__ = ["PartOffloader"]


MOST_IDLE = 16
IDLE_WITHIN_NS = 10_000_000
"""Limit on unused blocks held by stores, and on the blocks of one store, since those in use may go out of use while it
is under way: those that their lane carries in IDLE_WITHIN_NS, or one in MOST_IDLE."""


class PartsUnderWay(UnderWay, kw_only=True):
    """A running transfer of parts. `below`: its pins in the tier. `above`: the runs that a store holds on the device.

    `loading`: the parts that a load fills, so that its request begins with the `num_loaded` pages from its first on;
    None once it uses them. `content`: that of its request.
    """

    below: RunHolding
    above: Sequence[RunHolding] = ()
    loading: RunHolding | None = None
    content: Content = NOTHING
    num_loaded: int = 0
    num_idle: int = 0
    """Blocks of `above` that were unused when their store began."""


class NewStore(msgspec.Struct, eq=False):
    """A store that is about to begin: its pins `below`, its holds `above`, and its copies, run by run.

    `room`: how many blocks its lane can carry in time.
    """

    below: RunHolding
    room: int
    above: list[RunHolding] = []
    source_ids: list[PageId] = []
    target_ids: list[PageId] = []
    runs: list[tuple[Content, int, int]] = []
    groups: list[int] = []
    num_blocks: int = 0


class Offered(msgspec.Struct, eq=False):
    """An offer to a request: `match` becomes available with the parts that `pin` pins in the tier."""

    match: RunMatch
    pin: RunHolding


class PartOffloader(Transfers):
    """Owner of the tier below one device, of its channels, and of every running transfer: LowerTiers for KV groups.

    `cache`: the device's. `write` and `read`: channels to the tier, and from it. `policy`: which parts are stored, and
    when. Other arguments are as in Offloader.
    """

    full_prompt_hits: bool = False

    def __init__(
        self,
        cache: GroupPages,
        tier: PartTier,
        policy: PartPolicy,
        *,
        write: Channel,
        read: Channel,
        prefill: PrefillTimes | None = None,
        store_within_ns: int = ALL,
        num_layers: int = 1,
        step_tokens: int = 1,
        copy_slowdown: float = 0.0,
        bus: Bus | None = None,
        deadline_ns: int = ALL,
        workers: int = 1,
        fail_every: int = 0,
        with_page_ids: bool = False,
        tell: Tell | None = None,
    ) -> None:
        super().__init__(
            [read],
            Weigher(
                [read],
                cache.memory.page_bytes,
                prefill,
                # A state at the end of the first pages would have to be replaced by that at the end of the others.
                splits=prefill is not None and not (with_page_ids or cache.memory.has_states),
                num_layers=num_layers,
                step_tokens=step_tokens,
            ),
            copying=(write, read),
            copy_slowdown=copy_slowdown,
            bus=bus,
            deadline_ns=deadline_ns,
            workers=workers,
            fail_every=fail_every,
            with_page_ids=with_page_ids,
        )
        self._cache = cache
        self._parts = cache.parts
        self._tell = tell
        cache.lender = self
        self.tier = tier
        self._policy = policy
        self.channels = (write, read)
        self._store_within_ns = store_within_ns
        self.tier_names: tuple[str, ...] = (tier.name,)
        self._block_bytes = cache.block_bytes
        self._num_stored = [0] * len(tier.part_blocks)
        self._num_loaded = list(self._num_stored)
        """Parts by group that have arrived so far, in the tier and on the device."""
        self._offered: dict[int, Offered] = {}
        self._least_idle = max(*tier.part_blocks, cache.pool.total // MOST_IDLE)
        self._num_idle = 0
        """Blocks that stores hold and that were unused when these began."""
        self._is_behind = False
        """Whether the channel to the tier is behind: no store begins before a transfer has ended."""

    @property
    def is_due(self) -> bool:
        """Whether a store is due, independent of later changes on the device."""
        return self._policy.has_work and not self._is_behind

    def num_pages(self) -> tuple[int, ...]:
        """Return blocks used and cached in the tier."""
        return self.tier.num_used_blocks, self.tier.num_cached_blocks

    def totals(self) -> TransferTotals:
        """Return totals of transfers."""
        counts = msgspec.structs.asdict(self.counts)
        for group, evicted in enumerate(self.tier.num_evicted):
            counts[f"num_stored_parts_group{group}"] = self._num_stored[group]
            counts[f"num_loaded_parts_group{group}"] = self._num_loaded[group]
            counts[f"num_evicted_parts_group{group}"] = evicted
        return TransferTotals(
            counts,
            {channel.name: channel.num_bytes for channel in self.channels},
            {self.tier.name: self.tier.num_evicted_blocks},
            dict(self._waited_ns),
        )

    def pages_to_spare(self) -> int | None:
        """Return None if a store is due, or the device must be checked in every step; else any number."""
        return None if self.is_due or not self._cache.follows_decodes else ALL

    def begin_step(self, now_ns: int) -> None:
        """Take note that what became complete in the last step is computed."""
        super().begin_step(now_ns)
        self._policy.begin_step()

    def confirm(self, content: Content, num_pages: int, holding: Holding) -> None:
        """Do nothing: the cache reports complete pages."""

    # Stores -----------------------------------------------------------------------------------------------

    def _num_idle_of(self, under_way: UnderWay) -> int:
        above = cast(PartsUnderWay, under_way).above
        return sum(
            (run.end - run.start) * self.tier.part_blocks[group]
            for held in above
            for group, runs in enumerate(held.held)
            for run in runs
            if len(run.holders) == 1
        )

    def plan_stores(self, now_ns: int) -> None:
        """Begin the store of the step that starts at `now_ns`."""
        self._now_ns = now_ns
        if self._is_behind:
            return
        room = min(
            self.channels[0].num_within(now_ns, self._store_within_ns, self._block_bytes),
            max(self._least_idle, self.channels[0].num_within(now_ns, IDLE_WITHIN_NS, self._block_bytes)),
        )
        store = NewStore(holding_of_transfer(len(self.tier.groups)), room)
        num_idle = self._num_idle
        for run, start, end in self._policy.choose():
            if not self._add(store, run, start, end):
                break
        num_blocks = store.num_blocks
        if not num_blocks:
            return
        self._cache.count()
        if self._tell is not None:
            self._tell(StoreStarted(self.num_transfers, self.tier.name, tuple(store.runs), tuple(store.groups)))
        moves = []
        if self._with_page_ids:
            moves.append(Move(self.tier.name, tuple(store.source_ids), tuple(store.target_ids)))
        under_way = PartsUnderWay(
            Direction.STORE, num_blocks, self._workers(), below=store.below, above=tuple(store.above)
        )
        write, num_bytes = self.channels[0], num_blocks * self._block_bytes
        under_way.lanes, under_way.num_idle = ((write, num_bytes),), self._num_idle - num_idle
        self._submit(under_way, write.submit(now_ns, num_bytes), moves)

    def _add(self, store: NewStore, run: PartRun, start: int, end: int) -> bool:
        """Add pages [start, end) of a run that are missing in the tier; return whether more can be stored now."""
        policy, tier, cache = self._policy, self.tier, self._cache
        index, span, write = run.group, run.span, self.channels[0]
        assert span is not None, "what cannot be found is to be stored"
        blocks = tier.part_blocks[index]
        while start < end:
            first, last = tier.gap(span, index, start, end)
            if first > start:
                policy.passed(run, start, first)
                start = first
                continue
            room = store.room - store.num_blocks
            if room <= 0:
                self._is_behind = True
                return False
            count = min(last - first, -(-room // blocks))
            is_idle = not run.holders
            if is_idle:
                # Unused parts are not available to requests that need memory while they are copied.
                soon = write.num_within(self._now_ns, IDLE_WITHIN_NS, self._block_bytes)
                idle_room = max(self._least_idle, soon) - self._num_idle
                cache.count()
                count = min(count, min(cache.num_free, idle_room) // blocks)
                if count <= 0:
                    return False
            num_fit = tier.free_bytes // tier.part_bytes[index]
            if not num_fit:
                self.counts.num_pages_without_room += last - first
                policy.passed(run, first, last)
                start = last
                continue
            count = min(count, num_fit)
            start = first + count
            target = tier.place(span, index, first, start, store.below)
            stored = run.cut(first, start)
            policy.passed(stored, first, start)
            held = holding_of_transfer(len(tier.groups))
            self._parts.hold_in_place(stored, held)
            if is_idle:
                self._num_idle += count * blocks
            store.above.append(held)
            store.source_ids += stored.ids
            store.target_ids += target.ids
            store.runs.append((span.content, first, start))
            store.groups.append(index)
            store.num_blocks += count * blocks
        return True

    # Loads ------------------------------------------------------------------------------------------------

    def lookup(self, request: int, content: Content, start: int, limit: int) -> Offer | None:
        """Return how far every group can resume with the tier's parts; None if that is not beyond `start`.

        Parts of it that the device lacks are pinned for `request`, in place of its previous pins.
        """
        self.forget(request)
        match = self._parts.tree.match(content, limit, with_below=True)
        if match.num_pages <= start:
            return None
        assert match.pieces is not None
        pin = self.tier.pin(match.pieces)
        self._offered[request] = Offered(match, pin)
        num_pages = match.num_pages - start
        sizes = self.tier.part_bytes
        runs = tuple((0, run.start, run.end, sizes[group]) for group, held in enumerate(pin.held) for run in held)
        # The first pages are computed up to the first that the device has a part of; some are left to be loaded.
        on_device = [
            max(begin, start)
            for group, pieces in enumerate(match.pieces)
            for run, begin, end in pieces
            if run.list_index == group and end > start
        ]
        most_front = min([max(end for _, _, end, _ in runs) - 1, *on_device]) - start
        return Offer(num_pages, (num_pages,), (self._num_blocks(pin) * self._block_bytes,), runs, most_front)

    def offered(self, request: int) -> RunMatch:
        """Return how far every group can resume with the parts offered to `request`."""
        return self._offered[request].match

    def weigh(
        self, offer: Offer, start: int, page_size: int, num_known: int, *, num_behind: int, awaited: Awaited | None
    ) -> Weighed:
        """Return whether to load `offer`, all of it or its last pages, see LowerTiers.

        Only the gain of the request itself counts: while it waits it holds memory, which is usually what later requests
        wait for.
        """
        return self._weigher.weigh(self._now_ns, offer, start, page_size, num_known, num_behind=0, awaited=awaited)

    def forget(self, request: int) -> None:
        """End the pins of the offer to `request`."""
        offered = self._offered.pop(request, None)
        if offered is not None:
            self.tier.unpin(offered.pin)

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
        """Begin to load the offer to `request` from page `start` on into `holding`, which was opened for it.

        Return when that should end. `wait_ns`: see Weighed.
        """
        pin = self._offered.pop(request).pin
        if num_front:
            self.tier.unpin_before(pin, start)
        loading = cast(PartHolding, holding).loading
        read = self.channels[1]
        num_blocks = self._num_blocks(pin)
        num_bytes = num_blocks * self._block_bytes
        moves = []
        if self._with_page_ids:
            moves.append(Move(self.tier.name, _blocks_of(pin), _blocks_of(loading, to_fill=True)))
        under_way = PartsUnderWay(
            Direction.LOAD, num_blocks, self._workers(), below=pin, loading=loading, request=request, start_page=start
        )
        under_way.num_loaded, under_way.content = num_pages, content
        expected_ns = self._now_ns + read.within_ns(self._now_ns, num_bytes)
        end_ns = read.submit(self._now_ns, num_bytes)
        under_way.lane, under_way.since_ns, under_way.lanes = read.name, [self._now_ns], ((read, num_bytes),)
        early_ns = NEVER_NS if wait_ns is None else self._now_ns + wait_ns
        self._submit(under_way, end_ns, moves, (), early_ns, expected_ns)
        return end_ns if self._bus is None else expected_ns

    def use_early(self, transfer: int) -> None:
        """Make the parts of a load under way findable: the planned step uses them, and ends after the load."""
        super().use_early(transfer)
        under_way = self._under_way[transfer]
        assert isinstance(under_way, PartsUnderWay) and under_way.loading is not None
        arrive(self._parts, under_way.loading, [ALL] * len(self.tier.groups))
        under_way.loading = None

    def reset(self) -> None:
        """Drop all parts, below and of those to be stored.

        Running transfers end as they would have; the parts that they store are dropped.
        """
        self._policy.forget()
        self.tier.reset()

    # Ends of transfers ------------------------------------------------------------------------------------

    def _settle(self, transfer_id: int, under_way: UnderWay) -> None:
        self._is_behind = False
        assert isinstance(under_way, PartsUnderWay)
        if under_way.direction is Direction.STORE:
            is_stored = self._count_store(under_way)
            self._tell_ended(transfer_id, under_way, under_way.num_pages if is_stored else 0)
            self._num_idle -= under_way.num_idle
            for group, runs in enumerate(under_way.below.held if is_stored else ()):
                self._num_stored[group] += sum(run.end - run.start for run in runs)
            self.tier.settle(under_way.below, is_stored=is_stored)
            for held in reversed(under_way.above):
                unhold(self._parts, held, go_first=is_stored and self._policy.goes_first)
        else:
            self._end_load(transfer_id, under_way)
        self._cache.count()

    def _tell_ended(self, transfer_id: int, under_way: PartsUnderWay, num_pages: int) -> None:
        if self._tell is not None:
            num_blocks = min(under_way.num_good_pages, under_way.num_pages)
            is_given_up = under_way.is_given_up
            self._tell(TransferEnded(transfer_id, under_way.request, num_pages, self._now_ns, num_blocks, is_given_up))

    def _end_load(self, transfer_id: int, under_way: PartsUnderWay) -> None:
        """Make loaded parts findable. If some failed, the request looks up again, and finds those that were loaded."""
        loading, pin = under_way.loading, under_way.below
        is_whole = under_way.num_good_pages >= under_way.num_pages
        num_pages = under_way.num_loaded if is_whole else 0
        self._tell_ended(transfer_id, under_way, num_pages)
        ends = self._good_ends(pin, under_way.num_good_pages)
        if loading is not None:
            arrive(self._parts, loading, ends)
        self.tier.drop(pin, ends)
        # The request used its whole prefix, including the part on the device.
        last = under_way.start_page + under_way.num_loaded
        spans, _ = self._parts.tree.walk(under_way.content, last)
        self.tier.unpin(pin)
        if spans:
            self.tier.touch(spans[-1], last)
        self._count_load(under_way, is_whole=is_whole)
        end = under_way.start_page + num_pages if is_whole else 0
        self._loaded.append(Loaded(under_way.request, end, (num_pages,)))

    def _all_loaded(self, under_way: UnderWay) -> Loaded:
        assert isinstance(under_way, PartsUnderWay)
        num_pages = under_way.num_loaded
        return Loaded(under_way.request, under_way.start_page + num_pages, (num_pages,), is_under_way=True)

    def _good_ends(self, pin: RunHolding, num_good: int) -> list[int]:
        """Return, by group, the page before which all parts of `pin` have arrived, if `num_good` blocks did."""
        ends: list[int] = []
        for group, runs in enumerate(pin.held):
            end = 0 if num_good < 0 else ALL
            for run in runs:
                count = run.end - run.start
                arrived = max(0, min(count, num_good // self.tier.part_blocks[group]))
                num_good -= arrived * self.tier.part_blocks[group]
                self._num_loaded[group] += arrived
                if arrived < count:
                    end, num_good = min(end, run.start + arrived), -1
                    break
            ends.append(end)
        return ends

    def _num_blocks(self, pin: RunHolding) -> int:
        return sum(
            (run.end - run.start) * self.tier.part_blocks[group] for group, runs in enumerate(pin.held) for run in runs
        )

    # Laws -------------------------------------------------------------------------------------------------

    def holds(self) -> list[HeldPages]:
        """Return the parts that stores hold on the device."""
        return [
            HeldParts(held) for under_way in self._under_way.values() for held in cast(PartsUnderWay, under_way).above
        ]

    def check(self) -> None:
        """Assert laws L1 and L2 in the tier."""
        pins = [offered.pin for offered in self._offered.values()]
        pins += [cast(PartsUnderWay, under_way).below for under_way in self._under_way.values()]
        self.tier.check(pins)
        if not self._under_way:
            assert not self._offered, "L2: an offer is pinned at rest"
            assert not self.tier.used_bytes, f"L2: {self.tier.num_used_blocks} blocks of {self.tier.name} held at rest"


def _blocks_of(holding: RunHolding, *, to_fill: bool = False) -> tuple[PageId, ...]:
    """Return the held blocks, by group, then page; with `to_fill`, only those that cannot be found yet."""
    return tuple(block for runs in holding.held for run in runs if not to_fill or run.span is None for block in run.ids)

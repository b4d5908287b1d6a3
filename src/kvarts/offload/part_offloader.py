"""Transfers between a device with KV groups and the tiers below it.

They work as in Offloader, for runs of pages: stores wait while their lane is behind, loads begin if they save time, and
the source and target of a transfer are held until it ends. A transfer moves parts of pages, each of one or more blocks.
Parts that arrive in a tier are spilled: copied to the next tier, so that they are still below when they are evicted.
Parts that are loaded from a slower tier than the first are stored in the first again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
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
from kvarts.offload.weigher import Weigher, between

__all__ = ["ConnectedParts", "PartOffloader"]


MOST_IDLE = 16
IDLE_WITHIN_NS = 10_000_000
"""Limit on unused blocks held by stores, and on the blocks of one store, since those in use may go out of use while it
is under way: those that their lane carries in IDLE_WITHIN_NS, or one in MOST_IDLE."""


PRUNE_AT = 10_000


class ConnectedParts(msgspec.Struct, frozen=True):
    """A tier, and the channels to it and from it."""

    tier: PartTier
    write: Channel
    read: Channel


class PartsUnderWay(UnderWay, kw_only=True):
    """A running transfer of parts. `pins`: by tier, the runs that it reads or writes there.

    `target`: the tier that a store or a spill writes. `above`: the runs that a store holds on the device. `loading`:
    the parts that a load fills, so that its request begins with the pages `by_tier` from its first on; None once it
    uses them. `content`: that of its request.
    """

    pins: tuple[RunHolding, ...]
    target: int = -1
    above: Sequence[RunHolding] = ()
    loading: RunHolding | None = None
    content: Content = NOTHING
    by_tier: tuple[int, ...] = ()
    num_idle: int = 0
    """Blocks of `above` that were unused when their store began."""


class NewStore(msgspec.Struct, eq=False):
    """A store or a spill that is about to begin: its `pins` by tier, its holds `above`, and its copies, run by run.

    `room`: how many blocks its lane can carry in time.
    """

    pins: tuple[RunHolding, ...]
    room: int
    above: list[RunHolding] = []
    source_ids: list[PageId | bytes] = []
    target_ids: list[PageId | bytes] = []
    runs: list[tuple[Content, int, int]] = []
    groups: list[int] = []
    num_blocks: int = 0


class Offered(msgspec.Struct, eq=False):
    """An offer to a request: `match` becomes available with the parts that `pins` pin, by tier.

    `content` and `limit`: what was looked up. `by_tier`: the pages that each tier adds, of which those of the first
    `depth` tiers are offered.
    """

    content: Content
    limit: int
    by_tier: tuple[int, ...]
    depth: int
    match: RunMatch
    pins: tuple[RunHolding, ...]


class PartOffloader(Transfers):
    """Owner of the tiers below one device, of their channels, and of every running transfer: LowerTiers for KV groups.

    `cache`: the device's. `tiers`: the fastest first. `policy`: which parts are stored in the first, and when. Other
    arguments are as in Offloader.
    """

    full_prompt_hits: bool = False

    def __init__(
        self,
        cache: GroupPages,
        tiers: Sequence[ConnectedParts],
        policy: PartPolicy,
        *,
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
                cache.memory.page_bytes,
                prefill,
                # A state at the end of the first pages would have to be replaced by that at the end of the others.
                splits=prefill is not None and not (with_page_ids or cache.memory.has_states),
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
        self._parts = cache.parts
        self._tell = tell
        cache.lender = self
        self._connected = tuple(tiers)
        self.tiers = tuple(connected.tier for connected in tiers)
        tier = self.tier = self.tiers[0]
        self._policy = policy
        self.channels = tuple(channel for connected in tiers for channel in (connected.write, connected.read))
        self._store_within_ns = store_within_ns
        # Requests of models with states cannot resume in generated tokens: no snapshots are made there.
        self._swaps = swaps and not cache.memory.has_states
        self.tier_names: tuple[str, ...] = tuple(each.name for each in self.tiers)
        self._block_bytes = cache.block_bytes
        self._num_stored = [0] * len(tier.part_blocks)
        self._num_loaded = list(self._num_stored)
        """Parts by group that have arrived so far, in the first tier and on the device."""
        self._offered: dict[int, Offered] = {}
        self._newest = -1
        """The request of the last offer."""
        self._no_pages = (0,) * len(tiers)
        self._least_idle = max(*tier.part_blocks, cache.pool.total // MOST_IDLE)
        self._num_idle = 0
        """Blocks that stores hold and that were unused when these began."""
        self._is_behind = [False] * len(tiers)
        """By tier, whether the way to it is behind: nothing is copied there before a transfer has ended."""
        self._spills: list[deque[tuple[Content, int, int, int]]] = [deque() for _ in tiers]
        """By tier, what has arrived and is to be copied to the next: contents, each with a group and its pages."""
        self._prune_at = PRUNE_AT
        """How many runs may wait to be spilled before those that have been evicted since are removed from the queue."""

    @property
    def is_due(self) -> bool:
        """Whether a store or a spill is due, independent of later changes on the device."""
        return (self._policy.has_work and not self._is_behind[0]) or self._has_spills

    @property
    def _has_spills(self) -> bool:
        """Whether there are parts to spill, and the way to the next tier is not behind."""
        return any(wanted and not self._is_behind[place + 1] for place, wanted in enumerate(self._spills))

    def num_pages(self) -> tuple[int, ...]:
        """Return blocks used and cached in each tier, alternating."""
        return tuple(count for tier in self.tiers for count in (tier.num_used_blocks, tier.num_cached_blocks))

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
            {tier.name: tier.num_evicted_blocks for tier in self.tiers},
            dict(self._waited_ns),
        )

    def pages_to_spare(self) -> int | None:
        """Return None if a store or a spill is due, or the device must be checked in every step; else any number."""
        return None if self.is_due or not self._cache.follows_decodes else ALL

    def begin_step(self, now_ns: int) -> None:
        """Take note that what became complete in the last step is computed."""
        super().begin_step(now_ns)
        self._policy.begin_step()

    def confirm(self, content: Content, num_pages: int, holding: Holding) -> None:
        """Do nothing: the cache reports complete pages."""

    def preempted(self, content: Content, num_pages: int, holding: Holding) -> None:
        """Store the parts of unknown tokens with which a preempted request could resume after `num_pages` pages."""
        known_end = content.num_known_pages
        if not self._swaps or num_pages <= known_end:
            return
        tree = self._parts.tree
        for index, group in enumerate(self.tier.groups):
            sink, first = tree.needed(index, num_pages * tree.page_size) if group.is_bounded else (0, known_end)
            for start, end in ((0, sink), (first, num_pages)):
                if start < end:
                    self._policy.preempted(content, index, start, end)

    def ended(self, content: Content) -> None:
        """Drop the parts below that only the request of `content` could find."""
        if self._swaps:
            self._policy.ended(content)
            self.tier.drop_from(content, content.num_known_pages)

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
        """Begin the spills and the store of the step that starts at `now_ns`.

        Spills come first: what is stored next could evict what is to be spilled.
        """
        self._now_ns = now_ns
        for place in range(len(self.tiers) - 1):
            if self._spills[place] and not self._is_behind[place + 1]:
                self._begin_spill(place)
        if self._is_behind[0]:
            return
        room = min(
            self.channels[0].num_within(now_ns, self._store_within_ns, self._block_bytes),
            max(self._least_idle, self.channels[0].num_within(now_ns, IDLE_WITHIN_NS, self._block_bytes)),
        )
        store = NewStore(self._new_pins(), room)
        num_idle = self._num_idle
        for run, start, end in self._policy.choose():
            if not self._add(store, run, start, end):
                break
        if store.num_blocks:
            self._cache.count()
            self._begin_store(Direction.STORE, 0, store, self._num_idle - num_idle)

    def _new_pins(self) -> tuple[RunHolding, ...]:
        return tuple([holding_of_transfer(len(tier.groups)) for tier in self.tiers])

    def _begin_store(self, direction: Direction, target: int, store: NewStore, num_idle: int = 0) -> None:
        """Begin a store, or a spill, to tier `target`. `num_idle`: see PartsUnderWay."""
        tier, num_blocks = self.tiers[target], store.num_blocks
        if self._tell is not None:
            self._tell(StoreStarted(self.num_transfers, tier.name, tuple(store.runs), tuple(store.groups)))
        moves = []
        if self._with_page_ids:
            moves.append(Move(tier.name, tuple(store.source_ids), tuple(store.target_ids)))
        under_way = PartsUnderWay(
            direction, num_blocks, self._workers(), pins=store.pins, target=target, above=tuple(store.above)
        )
        write, num_bytes = self._connected[target].write, num_blocks * self._block_bytes
        under_way.lanes, under_way.num_idle = ((write, num_bytes),), num_idle
        self._submit(under_way, write.submit(self._now_ns, num_bytes), moves, self._dropped())

    def _dropped(self) -> tuple[bytes, ...]:
        """Return the keys of files to delete."""
        return tuple(key for tier in self.tiers for key in tier.take_dropped())

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
                self._is_behind[0] = True
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
                if self._moves(store) and tier.part_bytes[index] <= tier.total_bytes:
                    self._is_behind[0] = True  # there may be room when that has ended
                    return False
                self.counts.num_pages_without_room += last - first
                policy.passed(run, first, last)
                start = last
                continue
            count = min(count, num_fit)
            start = first + count
            target = tier.place(span, index, first, start, store.pins[0])
            stored = run.cut(first, start)
            policy.passed(stored, first, start)
            held = holding_of_transfer(len(tier.groups))
            self._parts.hold_in_place(stored, held)
            if is_idle:
                self._num_idle += count * blocks
            store.above.append(held)
            store.source_ids += stored.ids
            store.target_ids += tier.names([target])
            store.runs.append((span.content, first, start))
            store.groups.append(index)
            store.num_blocks += count * blocks
        return True

    def _moves(self, store: NewStore) -> bool:
        """Return whether parts are on their way through the first of several tiers."""
        if len(self.tiers) == 1:
            return False
        return bool(store.num_blocks) or any(
            under_way.direction is not Direction.LOAD for under_way in self._under_way.values()
        )

    # Spills -----------------------------------------------------------------------------------------------

    def _begin_spill(self, place: int) -> None:
        """Begin to copy parts that have arrived in the tier at `place` to the next tier."""
        wanted, tree = self._spills[place], self._parts.tree
        room = self._connected[place + 1].write.num_within(self._now_ns, self._store_within_ns, self._block_bytes)
        spill = NewStore(self._new_pins(), room)
        while wanted:
            content, index, start, end = wanted[0]
            self.tiers[place + 1].recognise(content, end)
            for span in tree.walk(content, end)[0]:
                if span.end <= start:
                    continue
                for run, first, last in self.tiers[place].stored(span, index, start, end):
                    position = self._add_to_spill(spill, place, run, first, last)
                    if position < last:
                        # Parts whose spill has begun are not tried again, even if it fails.
                        wanted[0] = content, index, position, end
                        self._is_behind[place + 1] = True
                        break
                if self._is_behind[place + 1]:
                    break
            if self._is_behind[place + 1]:
                break
            wanted.popleft()
        if spill.num_blocks:
            self._begin_store(Direction.SPILL, place + 1, spill)

    def _add_to_spill(self, spill: NewStore, place: int, run: PartRun, start: int, end: int) -> int:
        """Add pages [start, end) of `run` that the tier below `place` lacks; return the first page without room."""
        upper, lower = self.tiers[place], self.tiers[place + 1]
        index, span = run.group, run.span
        assert span is not None, "what was evicted is to be spilled"
        blocks = lower.part_blocks[index]
        while start < end:
            first, last = lower.gap(span, index, start, end)
            if first == end:
                return end
            room = spill.room - spill.num_blocks
            if room <= 0:
                return first
            start = last
            count = min(last - first, -(-room // blocks), lower.free_bytes // lower.part_bytes[index])
            if not count:
                self.counts.num_pages_without_room += last - first
                continue
            start = first + count
            target = lower.place(span, index, first, start, spill.pins[place + 1])
            source = run.cut(first, start)
            upper.hold_in_place(source, spill.pins[place])
            spill.source_ids += upper.names([source])
            spill.target_ids += lower.names([target])
            spill.runs.append((span.content, first, start))
            spill.groups.append(index)
            spill.num_blocks += count * blocks
        return end

    def _note_arrived(self, place: int, pin: RunHolding) -> None:
        """Queue the runs of `pin`, which have arrived in the tier at `place`, to be spilled to the next one."""
        if place + 1 == len(self.tiers):
            return
        wanted = self._spills[place]
        for index, runs in enumerate(pin.held):
            for run in runs:
                span = run.span
                if span is None:
                    continue  # the tier was reset meanwhile
                end = min(run.end, span.content.num_known_pages)
                if run.start < end:
                    wanted.append((span.content, index, run.start, end))
        if len(wanted) > self._prune_at:
            self._spills[place] = deque(each for each in wanted if self._is_stored(place, *each))
            self._prune_at = max(PRUNE_AT, 2 * len(self._spills[place]))

    def _is_stored(self, place: int, content: Content, index: int, start: int, end: int) -> bool:
        """Return whether the tier at `place` has some of pages [start, end) of a group."""
        spans, _ = self._parts.tree.walk(content, end)
        return any(self.tiers[place].stored(span, index, start, end) for span in spans if span.end > start)

    # Loads ------------------------------------------------------------------------------------------------

    def recognise(self, content: Content) -> None:
        """Make the parts of `content` that an earlier process stored findable. No match may be in use."""
        for tier in self.tiers:
            tier.recognise(content, content.num_known_pages)

    def lookup(self, request: int, content: Content, start: int, limit: int) -> Offer | None:
        """Return how far every group can resume with the tiers' parts; None if that is not beyond `start`.

        Parts of it that the device lacks are pinned for `request`, in place of its previous pins.
        """
        self.forget(request)
        ends: list[int] = []
        runs: list[tuple[tuple[int, int, int, int], ...]] = []
        most_front: list[int] = []
        for depth in range(1, len(self.tiers) + 1):
            match = self._parts.tree.match(content, limit, depth=depth)
            ends.append(max(start, match.num_pages))
            runs.append(self._runs_of(match))
            most_front.append(self._most_front(start, match))
        if ends[-1] <= start:
            return None
        by_tier = tuple(end - before for before, end in pairwise([start, *ends]))
        self._offered[request] = self._pinned(content, limit, by_tier, len(self.tiers), match)
        self._newest = request
        return Offer(ends[-1] - start, by_tier, tuple(runs), tuple(most_front))

    def _runs_of(self, match: RunMatch) -> tuple[tuple[int, int, int, int], ...]:
        """Return the runs of `match` to load, see Offer."""
        assert match.pieces is not None
        count, part_bytes = len(self.tier.groups), self.tier.part_bytes
        return tuple(
            [
                ((run.list_index // count - 1) // 2, begin, end, part_bytes[index])
                for index, pieces in enumerate(match.pieces)
                for run, begin, end in pieces
                if run.list_index != index
            ]
        )

    def _most_front(self, start: int, match: RunMatch) -> int:
        """Return how many pages from `start` on may be computed while the others of `match` are loaded.

        They end before the first page of which the device has a part, and before the last that is loaded.
        """
        assert match.pieces is not None
        most, last = match.num_pages, start
        for index, pieces in enumerate(match.pieces):
            for run, begin, end in pieces:
                if run.list_index != index:
                    last = max(last, end - 1)
                elif end > start:
                    most = min(most, max(begin, start))
        return min(most, last) - start

    def _pinned(self, content: Content, limit: int, by_tier: tuple[int, ...], depth: int, match: RunMatch) -> Offered:
        assert match.pieces is not None
        pins = tuple([tier.pin(match.pieces) for tier in self.tiers])
        return Offered(content, limit, by_tier, depth, match, pins)

    def offer_up_to(self, request: int, depth: int) -> None:
        """Offer to `request` what the device and the first `depth` tiers have, and nothing of slower ones."""
        offered = self._offered[request]
        self.forget(request)
        match = self._parts.tree.match(offered.content, offered.limit, depth=depth)
        self._offered[request] = self._pinned(offered.content, offered.limit, offered.by_tier, depth, match)

    def offered(self, request: int) -> RunMatch:
        """Return how far every group can resume with the parts offered to `request`."""
        return self._offered[request].match

    def weigh(
        self, offer: Offer, start: int, page_size: int, num_known: int, *, num_behind: int, awaited: Awaited | None
    ) -> Weighed:
        """Return whether to load `offer`, the newest, up to the end of one of the tiers, or the last pages before it.

        What slower tiers have is then not offered any more. Only the gain of the request itself counts: while it waits
        it holds memory, which is usually what later requests wait for.
        """
        weighed = self._weigher.weigh(self._now_ns, offer, start, page_size, num_known, num_behind=0, awaited=awaited)
        if weighed.num_pages not in (0, sum(offer.by_tier[: self._offered[self._newest].depth])):
            last = max(place for place, num_pages in enumerate(weighed.by_tier) if num_pages)
            self.offer_up_to(self._newest, last + 1)
        return weighed

    def forget(self, request: int) -> None:
        """End the pins of the offer to `request`."""
        offered = self._offered.pop(request, None)
        if offered is not None:
            for tier, pin in zip(self.tiers, offered.pins, strict=True):
                tier.unpin(pin)

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
        offered = self._offered.pop(request)
        pins = offered.pins
        if num_front:
            for tier, pin in zip(self.tiers, pins, strict=True):
                tier.unpin_before(pin, start)
        loading = cast(PartHolding, holding).loading
        moves: list[Move] = []
        lanes: list[tuple[Channel, int]] = []
        num_blocks, end_ns, lane, least_ns, expected_ns = 0, self._now_ns, "", 0, 0
        for connected, pin in zip(self._connected, pins, strict=True):
            tier, read, count = connected.tier, connected.read, self._num_blocks(pin)
            if not count:
                continue
            if self._with_page_ids:
                sources = tier.names(run for runs in pin.held for run in runs)
                moves.append(Move(tier.name, sources, _targets(loading, pin, tier.part_blocks)))
            num_blocks += count
            num_bytes = count * self._block_bytes
            lanes.append((read, num_bytes))
            within_ns = 0 if self._bus is None else read.within_ns(self._now_ns, num_bytes)
            read_ns = read.submit(self._now_ns, num_bytes)
            if read_ns > end_ns or within_ns > expected_ns:
                end_ns, lane, expected_ns = read_ns, read.name, within_ns
            if least_ns < read_ns < NEVER_NS:
                least_ns = read_ns
        under_way = PartsUnderWay(
            Direction.LOAD, num_blocks, self._workers(), pins=pins, loading=loading, request=request, start_page=start
        )
        under_way.by_tier = between(offered.by_tier, num_front, num_front + num_pages)
        under_way.content, under_way.least_ns = content, least_ns
        under_way.lane, under_way.since_ns, under_way.lanes = lane, [self._now_ns], tuple(lanes)
        early_ns = NEVER_NS if wait_ns is None else self._now_ns + wait_ns
        self._submit(under_way, end_ns, moves, self._dropped(), early_ns, self._now_ns + expected_ns)
        return end_ns if self._bus is None else self._now_ns + expected_ns

    def use_early(self, transfer: int) -> None:
        """Make the parts of a load under way findable: the planned step uses them, and ends after the load."""
        super().use_early(transfer)
        under_way = self._under_way[transfer]
        assert isinstance(under_way, PartsUnderWay) and under_way.loading is not None
        self._policy.computes(under_way.loading, under_way.start_page)  # it is there when the step ends
        arrive(self._parts, under_way.loading, [ALL] * len(self.tier.groups))
        under_way.loading = None

    def reset(self) -> None:
        """Drop all parts, below and of those to be stored.

        Running transfers end as they would have; the parts that they store are dropped.
        """
        self._policy.forget()
        for wanted in self._spills:
            wanted.clear()
        for tier in self.tiers:
            tier.reset()

    # Ends of transfers ------------------------------------------------------------------------------------

    def _settle(self, transfer_id: int, under_way: UnderWay) -> None:
        self._is_behind = [False] * len(self.tiers)
        assert isinstance(under_way, PartsUnderWay)
        if under_way.direction is Direction.LOAD:
            self._end_load(transfer_id, under_way)
        else:
            self._end_store(transfer_id, under_way)
        self._cache.count()

    def _end_store(self, transfer_id: int, under_way: PartsUnderWay) -> None:
        """Make stored or spilled parts findable, unless that failed."""
        is_stored = self._count_store(under_way)
        self._tell_ended(transfer_id, under_way, under_way.num_pages if is_stored else 0)
        self._num_idle -= under_way.num_idle
        target = under_way.target
        pin = under_way.pins[target]
        if is_stored:
            self._note_arrived(target, pin)
            if not target:
                for group, runs in enumerate(pin.held):
                    self._num_stored[group] += sum(run.end - run.start for run in runs)
        self.tiers[target].settle(pin, is_stored=is_stored)
        if target:
            self.tiers[target - 1].unpin(under_way.pins[target - 1])
        for held in reversed(under_way.above):
            unhold(self._parts, held, go_first=is_stored and self._policy.goes_first)

    def _tell_ended(self, transfer_id: int, under_way: PartsUnderWay, num_pages: int) -> None:
        if self._tell is not None:
            num_blocks = min(under_way.num_good_pages, under_way.num_pages)
            is_given_up = under_way.is_given_up
            self._tell(TransferEnded(transfer_id, under_way.request, num_pages, self._now_ns, num_blocks, is_given_up))

    def _end_load(self, transfer_id: int, under_way: PartsUnderWay) -> None:
        """Make loaded parts findable. If some failed, the request looks up again, and finds those that were loaded."""
        loading, content = under_way.loading, under_way.content
        is_whole = under_way.num_good_pages >= under_way.num_pages
        num_pages = sum(under_way.by_tier) if is_whole else 0
        self._tell_ended(transfer_id, under_way, num_pages)
        ends_by_tier: list[list[int]] = []
        num_left = under_way.num_good_pages
        for pin in under_way.pins:
            ends_by_tier.append(self._good_ends(pin, num_left))
            num_left -= self._num_blocks(pin)
        ends = [min(of_group) for of_group in zip(*ends_by_tier, strict=True)]
        if loading is not None:
            arrive(self._parts, loading, ends)
        for place, (tier, pin, good_ends) in enumerate(zip(self.tiers, under_way.pins, ends_by_tier, strict=True)):
            for group, runs in enumerate(pin.held if place else ()):
                for run in runs:
                    if run.start < ends[group] and run.span is not None:
                        self._policy.complete(content, group, run.start, min(run.end, ends[group]))
            tier.drop(pin, good_ends)
        # The request used its whole prefix, including the part on the device.
        last = under_way.start_page + sum(under_way.by_tier)
        spans, _ = self._parts.tree.walk(content, last)
        for tier, pin in zip(self.tiers, under_way.pins, strict=True):
            tier.unpin(pin)
            if spans:
                tier.touch(spans[-1], last)
        self._count_load(under_way, is_whole=is_whole)
        end = under_way.start_page + num_pages if is_whole else 0
        self._loaded.append(Loaded(under_way.request, end, under_way.by_tier if is_whole else self._no_pages))

    def _all_loaded(self, under_way: UnderWay) -> Loaded:
        assert isinstance(under_way, PartsUnderWay)
        end = under_way.start_page + sum(under_way.by_tier)
        return Loaded(under_way.request, end, under_way.by_tier, is_under_way=True)

    def _good_ends(self, pin: RunHolding, num_good: int) -> list[int]:
        """Return, by group, the page before which all parts of `pin` have arrived, if `num_good` blocks did."""
        ends: list[int] = []
        for group, runs in enumerate(pin.held):
            blocks, end = self.tier.part_blocks[group], ALL
            for run in runs:
                count = run.end - run.start
                arrived = max(0, min(count, num_good // blocks))
                num_good -= count * blocks
                self._num_loaded[group] += arrived
                if arrived < count:
                    end = min(end, run.start + arrived)
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
        """Assert laws L1 and L2 in every tier."""
        every = [offered.pins for offered in self._offered.values()]
        every += [cast(PartsUnderWay, under_way).pins for under_way in self._under_way.values()]
        for place, tier in enumerate(self.tiers):
            tier.check([pins[place] for pins in every])
        if not self._under_way:
            assert not self._offered, "L2: an offer is pinned at rest"
            for tier in self.tiers:
                assert not tier.used_bytes, f"L2: {tier.num_used_blocks} blocks of {tier.name} held at rest"


def _targets(loading: RunHolding, pin: RunHolding, part_blocks: Sequence[int]) -> tuple[PageId, ...]:
    """Return the blocks of `loading` for the runs of `pin`, by group, then page."""
    targets: list[PageId] = []
    for held, runs, blocks in zip(loading.held, pin.held, part_blocks, strict=True):
        for run in runs:
            for to_fill in held:
                start, end = max(run.start, to_fill.start), min(run.end, to_fill.end)
                if to_fill.span is None and start < end:
                    targets += to_fill.ids[(start - to_fill.start) * blocks : (end - to_fill.start) * blocks]
    return tuple(targets)

"""Parts of pages in KV groups below a device: one tree for all of it, and the copies between them.

A transfer moves parts of pages, each of one or more blocks. Parts that are loaded from a slower tier than the first are
stored in the first again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import cast

import msgspec

from kvarts.core.content import Content
from kvarts.core.kv.cache import BlockTable
from kvarts.core.kv.eviction import PinnedPages
from kvarts.core.kv.group_pages import GroupPages, GroupTable, PinnedParts
from kvarts.core.kv.pool import PageId
from kvarts.core.kv.runs import PartRun, RunMatch, RunTable, table_of_transfer
from kvarts.core.kv.span_tree import find
from kvarts.core.kv.transfer import Coming, Loaded, Offer, Weighed
from kvarts.core.tiers.layout import ConnectedTier, Layout
from kvarts.core.tiers.part_policy import PartPolicy
from kvarts.core.tiers.part_tier import PartTier
from kvarts.core.tiers.store_policy import LateSpills, Spill
from kvarts.core.tiers.transfers import ALL, Copies, Loading
from kvarts.core.tiers.weigher import between

__all__ = ["PartLayout"]


MOST_IDLE = 16
MOST_OF_FREE = 4
IDLE_WITHIN_NS = 10_000_000
"""Limit on unused blocks held by stores, and on the blocks of one store, since those in use may go out of use while it
is under way: those that their lane carries in IDLE_WITHIN_NS, or one in MOST_IDLE, but no more than one unused block in
MOST_OF_FREE. Where few are unused, others would be evicted long before their turn while a slow lane carries these."""


class PartCopies(Copies):
    """A store or a spill of parts. `pins`: by tier, the runs that it reads or writes there; `room`: how many blocks its
    channel can carry in time. `above`: the runs that a store holds on the device.
    """

    __slots__ = ("above", "num_idle", "pins", "room")

    def __init__(self, target: int, pins: tuple[RunTable, ...], room: int) -> None:
        super().__init__(target)
        self.pins = pins
        self.room = room
        self.above: list[RunTable] = []
        self.num_idle = 0
        """Blocks of `above` that were unused when the store began."""


class PartLoading(Loading):
    """A load of parts. `pins`: by tier, the runs that it reads; `content`: that of its request.

    `loading`: the parts that it fills, so that its request begins with the pages `by_tier` from its first on; None once
    it uses them.
    """

    __slots__ = ("content", "loading", "pins")

    def __init__(
        self,
        request: int,
        start: int,
        by_tier: tuple[int, ...],
        pins: tuple[RunTable, ...],
        loading: RunTable | None,
        content: Content,
    ) -> None:
        super().__init__(request, start, by_tier)
        self.pins = pins
        self.loading = loading
        self.content = content


class Offered(msgspec.Struct, eq=False):
    """An offer to a request: `match` becomes available with the parts that `pins` pin, by tier.

    `content` and `limit`: the arguments of `lookup`. `by_tier`: the pages that each tier adds, of which those of
    the first `depth` tiers are offered.
    """

    content: Content
    limit: int
    by_tier: tuple[int, ...]
    depth: int
    match: RunMatch
    pins: tuple[RunTable, ...]


class PartLayout(Layout[PartTier]):
    """Parts of pages in KV groups, of `cache` and of the tiers below it.

    `policy`: which parts are stored in the first tier, and when. `swaps`: parts of a preempted request's generated
    tokens are stored there too, and dropped when it ends. `arrive_at_turns`: loaded parts become findable only when
    their request has its turn, which is not noted here.
    """

    def __init__(
        self,
        cache: GroupPages,
        connected: Sequence[ConnectedTier[PartTier]],
        policy: PartPolicy,
        *,
        swaps: bool = False,
        store_within_ns: int = ALL,
        with_page_ids: bool = False,
        arrive_at_turns: bool = False,
    ) -> None:
        super().__init__(
            connected,
            policy,
            block_bytes=cache.block_bytes,
            page_bytes=cache.memory.page_bytes,
            is_stored=self._is_stored,
            store_within_ns=store_within_ns,
            with_page_ids=with_page_ids,
        )
        self.counts_blocks = True
        self._late_spills: LateSpills | None = None
        if policy.exclusive_pages is not None:
            self.backlog = self._late_spills = LateSpills(len(self.own), policy.exclusive_pages)
        tier = self.tier = self.tiers[0]
        # A state at the end of the first pages would have to be replaced by that at the end of the others.
        self.can_split = not cache.memory.has_states
        self._cache = cache
        self._parts = cache.parts
        self._policy = policy
        self._arrive_at_turns = arrive_at_turns
        # The last tokens that a preempted request has computed need not fill a page: an executor could not copy them.
        self._swaps = swaps and not (cache.memory.has_states and with_page_ids)
        self._states = [index for index, group in enumerate(tier.groups) if group.is_state]
        self._num_stored = [0] * len(tier.part_blocks)
        self._num_loaded = list(self._num_stored)
        """Parts by group that have arrived so far, in the first tier and on the device."""
        self._offered: dict[int, Offered] = {}
        self._late: dict[int, list[Spill]] = {}
        """Parts of slower tiers that were loaded for a request, and are to be stored in the first from its turn on."""
        self._newest = -1
        """The request of the last offer."""
        self._no_pages = (0,) * len(connected)
        self._num_own = len(connected) - self.tiers[-1].is_elsewhere
        """The number of tiers whose parts are in the tree of the device."""
        self._most_idle = cache.pool.total // MOST_IDLE
        self._num_idle = 0
        """Blocks that stores hold and that were unused when these began."""

    def totals(self) -> dict[str, int]:
        """Return how many parts were stored, loaded and evicted, by group."""
        counts: dict[str, int] = {}
        for group, evicted in enumerate(self.tier.num_evicted):
            counts[f"num_stored_parts_group{group}"] = self._num_stored[group]
            counts[f"num_loaded_parts_group{group}"] = self._num_loaded[group]
            counts[f"num_evicted_parts_group{group}"] = evicted
        return counts

    def pages_to_spare(self) -> int | None:
        """Return None if a store is due, or the device must be checked in every step; else any number."""
        return None if self.has_work or self._cache.decodes is None else ALL

    def begin_step(self) -> None:
        """Take note that what became complete in the last step is computed."""
        self._policy.begin_step()

    def keep_state(self, content: Content, num_tokens: int, table: BlockTable) -> bool:
        """Let a request keep its state if no other could find it, and it is to be stored."""
        if not (self._swaps and self._states) or num_tokens // self._parts.page_size <= content.num_known_pages:
            return False
        cast(GroupTable, table).parts.swapped_tokens = num_tokens
        return True

    def resumed(self, content: Content) -> None:
        """Drop the state that was kept for a request: it is of fewer tokens than the request will have."""
        page = content.swapped_tokens // self._parts.page_size
        content.swapped_tokens = 0
        self._policy.resumed(content, self._states, page)
        self._parts.drop_state(content, page)
        self._cache.count()
        for tier in self.tiers:
            tier.drop_state(content, page)

    def preempted(self, content: Content, num_pages: int, table: BlockTable) -> None:
        """Store the parts of unknown tokens with which a preempted request could resume after `num_pages` pages."""
        known_end = content.num_known_pages
        if not self._swaps or num_pages <= known_end or (self._states and not content.swapped_tokens):
            return
        tree = self._parts.tree
        for index, group in enumerate(self.tier.groups):
            keeps_all = not (group.is_bounded or group.is_state)
            sink, first = (0, known_end) if keeps_all else tree.needed(index, num_pages * tree.page_size)
            for start, end in ((0, sink), (first, num_pages)):
                if start < end:
                    self._policy.preempted(content, index, start, end)

    def ended(self, content: Content) -> None:
        """Drop the parts below that only the request of `content` could find."""
        content.swapped_tokens = 0
        if self._swaps:
            self._policy.ended(content)
            self.tier.drop_from(content, content.num_known_pages)

    # Stores -----------------------------------------------------------------------------------------------

    def num_idle(self, copies: Copies) -> int:
        """Return the blocks of the device that a store holds and no request does."""
        return sum(
            (run.end - run.start) * self.tier.part_blocks[group]
            for held in _above(copies)
            for group, runs in enumerate(held.held)
            for run in runs
            if len(run.holders) == 1
        )

    def store(self, now_ns: int, is_moving: Callable[[], bool]) -> PartCopies | None:
        """Choose parts to store, make room for them, and hold them."""
        write = self.connected[0].write
        self._cache.count()
        share = min(self._most_idle, (self._cache.num_free + self._num_idle) // MOST_OF_FREE)
        in_time = write.num_within(now_ns, IDLE_WITHIN_NS, self.block_bytes)
        idle_room = max(*self.tier.part_blocks, share, in_time)
        room = min(self._room(0, now_ns), idle_room)
        store = PartCopies(0, self._new_pins(), room)
        num_idle = self._num_idle
        for run, start, end in self._policy.choose():
            if not self._add(store, run, start, end, idle_room, is_moving):
                break
        if not store.num_blocks:
            return None
        self._cache.count()
        store.num_idle = self._num_idle - num_idle
        return store

    def _new_pins(self) -> tuple[RunTable, ...]:
        return tuple([table_of_transfer(len(tier.groups)) for tier in self.tiers])

    def _add(
        self, store: PartCopies, run: PartRun, start: int, end: int, idle_room: int, is_moving: Callable[[], bool]
    ) -> bool:
        """Add pages [start, end) of a run that are missing in the tier; return whether more can be stored now.

        `idle_room`: the most unused blocks that stores may hold.
        """
        policy, tier, cache = self._policy, self.tier, self._cache
        index, span = run.group, run.span
        assert span is not None, "what cannot be found is to be stored"
        blocks = tier.part_blocks[index]
        while start < end:
            first, last = tier.gap(span, index, start, end)
            if first > start:
                policy.passed(run, start, first)
                self.backlog.used((first - start,))
                start = first
                continue
            room = store.room - store.num_blocks
            if room <= 0:
                self.backlog.is_behind[0] = True
                return False
            count = min(last - first, -(-room // blocks))
            is_idle = not run.holders
            if is_idle:
                # Unused parts are not available to requests that need memory while they are copied.
                cache.count()
                count = min(count, min(cache.num_free, idle_room - self._num_idle) // blocks)
                if count <= 0:
                    return False
            num_fit = tier.free_bytes // tier.part_bytes[index]
            if not num_fit:
                is_passing = len(self.own) > 1 and (store.num_blocks > 0 or is_moving())
                if is_passing and tier.part_bytes[index] <= tier.total_bytes:
                    self.backlog.is_behind[0] = True  # there may be room when that has ended
                    return False
                self.num_refused += last - first
                tier.num_refused += last - first
                policy.passed(run, first, last)
                start = last
                continue
            count = min(count, num_fit)
            start = first + count
            target = tier.place(span, index, first, start, store.pins[0])
            stored = run.cut(first, start)
            policy.passed(stored, first, start)
            held = table_of_transfer(len(tier.groups))
            self._parts.hold_in_place(stored, held)
            if is_idle:
                self._num_idle += count * blocks
            store.above.append(held)
            if self._with_page_ids:
                store.source_ids += stored.ids
                store.target_ids += tier.names([target])
            store.runs.append((span.content, first, start))
            store.groups.append(index)
            store.num_blocks += count * blocks
        return True

    # Spills -----------------------------------------------------------------------------------------------

    def spill(self, place: int, now_ns: int) -> PartCopies | None:
        """Choose parts that have arrived in the tier at `place`, and make room for them in the next tier."""
        if self._late_spills is not None:
            return self._spill_late(self._late_spills, place, now_ns)
        wanted, tree = self.backlog.spills[place], self._parts.tree
        room = self._room(place + 1, now_ns)
        spill = PartCopies(place + 1, self._new_pins(), room)
        is_behind = self.backlog.is_behind
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
                        is_behind[place + 1] = True
                        break
                if is_behind[place + 1]:
                    break
            if is_behind[place + 1]:
                break
            wanted.popleft()
        return spill if spill.num_blocks else None

    def _add_to_spill(self, spill: PartCopies, place: int, run: PartRun, start: int, end: int) -> int:
        """Add pages [start, end) of `run` that the tier below `place` lacks; return the first page without room."""
        lower, index, span = self.tiers[place + 1], run.group, run.span
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
                self.num_refused += last - first
                lower.num_refused += last - first
                continue
            start = first + count
            self._copy(spill, place, run, first, start)
        return end

    def _copy(self, spill: PartCopies, place: int, run: PartRun, start: int, end: int) -> None:
        """Add pages [start, end) of `run`, in the tier at `place`, for which the next tier has room."""
        upper, lower = self.tiers[place], self.tiers[place + 1]
        index, span = run.group, run.span
        assert span is not None, "what was evicted is to be spilled"
        target = lower.place(span, index, start, end, spill.pins[place + 1])
        source = run.cut(start, end)
        upper.hold_in_place(source, spill.pins[place])
        if self._with_page_ids:
            spill.source_ids += upper.names([source])
            spill.target_ids += lower.names([target])
        spill.runs.append((span.content, start, end))
        spill.groups.append(index)
        spill.num_blocks += (end - start) * lower.part_blocks[index]

    def _spill_late(self, late: LateSpills, place: int, now_ns: int) -> PartCopies | None:
        """Choose parts that the tier at `place` evicts next, the deepest first, and make room for them in the next."""
        upper, lower, tree = self.tiers[place], self.tiers[place + 1], self._parts.tree
        late.changed[place] = False
        spill = PartCopies(place + 1, self._new_pins(), self._room(place + 1, now_ns))
        for content, index, start, end in self._next_evictions(place):
            lower.recognise(content, end)
            for span in reversed(tree.walk(content, end)[0]):
                for run, first, last in reversed(upper.stored(span, index, start, end) if span.end > start else ()):
                    if not self._add_deepest(spill, place, run, first, last):
                        late.is_behind[place + 1] = late.changed[place] = True
                        return spill if spill.num_blocks else None
        return spill if spill.num_blocks else None

    def _next_evictions(self, place: int) -> list[Spill]:
        """Return what the tier at `place` evicts next, unless it has been spilled since it was used.

        Not of unknown tokens, nor what the device has yet to store.
        """
        upper, lower = self.tiers[place], self.tiers[place + 1]
        num_pages = self._policy.exclusive_pages
        assert num_pages is not None
        # More than a tier holds would replace each other for ever.
        num_bytes = min(num_pages * upper.page_bytes, upper.total_bytes, lower.total_bytes) - upper.empty_bytes
        chosen: list[Spill] = []
        for run in upper.listed():
            if num_bytes <= 0:
                break
            part_bytes = upper.part_bytes[run.group]
            start = max(run.start, run.end + -num_bytes // part_bytes)
            num_bytes -= (run.end - start) * part_bytes
            assert run.span is not None, "a part that cannot be found was cached"
            content = run.span.content
            above: list[tuple[PartRun, int, int]] = []
            find(run.span.parts[run.group], start, run.end, above)
            is_copy = above and all(each.is_wanted for each, _, _ in above)
            if run.is_wanted and not is_copy and start < (end := min(run.end, content.num_known_pages)):
                chosen.append((content, run.group, start, end))
        return chosen

    def _add_deepest(self, spill: PartCopies, place: int, run: PartRun, start: int, end: int) -> bool:
        """Add those of pages [start, end) that the next tier lacks, the last first; return whether the channel can."""
        lower, index, span = self.tiers[place + 1], run.group, run.span
        assert span is not None
        gaps: list[tuple[int, int]] = []
        while start < end:
            first, start = lower.gap(span, index, start, end)
            if first < end:
                gaps.append((first, start))
        for first, last in reversed(gaps):
            room = spill.room - spill.num_blocks
            if room <= 0:
                return False
            num_fitting = lower.free_bytes // lower.part_bytes[index]
            count = min(last - first, -(-room // lower.part_blocks[index]), num_fitting)
            if count < last - first and count == num_fitting:
                self.num_refused += last - first - count
                lower.num_refused += last - first - count
            if count:
                # It may be cut where an earlier copy began.
                for each, begin, until in reversed(self.tiers[place].stored(span, index, last - count, last)):
                    self._copy(spill, place, each, begin, until)
                if count < last - first and count < num_fitting:
                    return False
        return True

    def _is_stored(self, place: int, spill: Spill) -> bool:
        """Return whether the tier at `place` has some of a run."""
        content, index, start, end = spill
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
            match = self._match(content, limit, depth)
            ends.append(max(start, match.num_pages))
            runs.append(self._runs_of(match))
            most_front.append(match.most_front(start))
        if ends[-1] <= start:
            return None
        by_tier = tuple(end - before for before, end in pairwise([start, *ends]))
        self._offered[request] = self._pinned(content, limit, by_tier, len(self.tiers), match)
        self._newest = request
        return Offer(ends[-1] - start, by_tier, tuple(runs), tuple(most_front))

    def found(self, content: Content, start: int, limit: int) -> tuple[int, ...]:
        """Return how many of the pages [start, limit) of `content` each tier that is not elsewhere adds, in turn."""
        ends = [start]
        for depth in range(1, self._num_own + 1):
            ends.append(max(ends[-1], self._match(content, limit, depth).num_pages))
        return tuple(end - before for before, end in pairwise(ends))

    def elsewhere(self, content: Content, start: int, limit: int) -> Offer | None:
        """Return the parts that make pages from `start` on findable, and that another engine has; None without any."""
        found = self.tiers[-1].elsewhere(self._parts.tree, content, limit, self._num_own)
        if found is None or found[0].num_pages <= start:
            return None
        match, runs = found
        num_pages = match.num_pages - start
        most_front = match.most_front(start) if self.can_split else 0
        return Offer(num_pages, (num_pages,), (runs,), (most_front,))

    def _match(self, content: Content, limit: int, depth: int) -> RunMatch:
        """Return how far every group can resume with the parts of the device and of the first `depth` tiers."""
        last, tree = self.tiers[-1], self._parts.tree
        if last.is_elsewhere and depth == len(self.tiers):
            return last.match(tree, content, limit, self._num_own)
        return tree.match(content, limit, depth=depth)

    def _runs_of(self, match: RunMatch) -> tuple[tuple[int, int, int, int], ...]:
        """Return the runs of `match` to load, see Offer."""
        assert match.pieces is not None
        part_bytes, tiers = self.tier.part_bytes, self.tiers
        return tuple(
            [
                (next(place for place, tier in enumerate(tiers) if tier.has(run)), begin, end, part_bytes[index])
                for index, pieces in enumerate(match.pieces)
                for run, begin, end in pieces
                if run.list_index != index
            ]
        )

    def _pinned(self, content: Content, limit: int, by_tier: tuple[int, ...], depth: int, match: RunMatch) -> Offered:
        assert match.pieces is not None
        pins = tuple([tier.pin(match.pieces) for tier in self.tiers])
        return Offered(content, limit, by_tier, depth, match, pins)

    def offer_up_to(self, request: int, depth: int) -> None:
        """Offer to `request` what the device and the first `depth` tiers have, and nothing of slower ones."""
        offered = self._offered[request]
        self.forget(request)
        match = self._match(offered.content, offered.limit, depth)
        self._offered[request] = self._pinned(offered.content, offered.limit, offered.by_tier, depth, match)

    def offered(self, request: int) -> RunMatch:
        """Return how far every group can resume with the parts offered to `request`."""
        return self._offered[request].match

    def coming(self, content: Content, start: int, limit: int, now_ns: int) -> Coming | None:
        """Return how far every group can resume with what other engines are storing in the last tier as well."""
        last = self.tiers[-1]
        if not last.is_awaited:
            return None
        match = last.match_coming(self._parts.tree, content, limit, self._num_own)
        return last.coming(match, start, now_ns) if match.num_pages > start else None

    def await_write(self, write: int) -> None:
        """Note that a request waits for a write of another engine to the last tier."""
        self.tiers[-1].await_write(write)

    def num_gaining(self, num_behind: int) -> int:
        """Return 0: while a request waits it holds memory, which is usually what later requests wait for."""
        return 0

    def weighed(self, offer: Offer, weighed: Weighed, now_ns: int) -> None:
        """Offer no more than what slower tiers need not be read for.

        A load is of the whole newest offer, up to the end of one of the tiers, or of the last pages before it.
        """
        if weighed.num_pages and weighed.num_pages != sum(offer.by_tier[: self._offered[self._newest].depth]):
            last = max(place for place, num_pages in enumerate(weighed.by_tier) if num_pages)
            self.offer_up_to(self._newest, last + 1)

    def forget(self, request: int) -> None:
        """End the pins of the offer to `request`."""
        offered = self._offered.pop(request, None)
        if offered is not None:
            for tier, pin in zip(self.tiers, offered.pins, strict=True):
                tier.unpin(pin)

    def load(
        self, request: int, content: Content, start: int, num_pages: int, table: BlockTable, num_front: int
    ) -> PartLoading:
        """Pin the offer to `request` from page `start` on, for a load into `table`, which was opened for it."""
        offered = self._offered.pop(request)
        pins = offered.pins
        if num_front:
            for tier, pin in zip(self.tiers, pins, strict=True):
                tier.unpin_before(pin, start)
        by_tier = between(offered.by_tier, num_front, num_front + num_pages)
        target = cast(GroupTable, table).loading
        loading = PartLoading(request, start, by_tier, pins, target, content)
        for place, (tier, pin) in enumerate(zip(self.tiers, pins, strict=True)):
            count = tier.num_pinned(pin)
            if not count:
                continue
            tier.begin_load(pin)
            source_ids: tuple[PageId | bytes, ...] = ()
            target_ids: tuple[PageId | bytes, ...] = ()
            if self._with_page_ids:
                source_ids = tier.names(run for runs in pin.held for run in runs)
                target_ids = _targets(target, pin, tier.part_blocks)
            loading.reads.append((place, count, source_ids, target_ids))
            loading.num_blocks += count
        return loading

    def use_early(self, loading: Loading) -> None:
        """Make the parts of a load under way findable: the planned step uses them, and ends after the load."""
        of_parts = cast(PartLoading, loading)
        assert of_parts.loading is not None
        self._policy.computes(of_parts.loading, loading.start)  # it is there when the step ends
        self._parts.arrive(of_parts.loading, [ALL] * len(self.tier.groups))
        of_parts.loading = None

    # Ends of transfers ------------------------------------------------------------------------------------

    def end_store(self, copies: Copies, *, is_stored: bool, is_given_up: bool) -> None:
        """Make stored or spilled parts findable, unless that failed, and unpin them."""
        of_parts = cast(PartCopies, copies)
        self._num_idle -= of_parts.num_idle
        target = copies.target
        pin = of_parts.pins[target]
        arrived: list[Spill] = []
        if is_stored:
            arrived = [
                (run.span.content, group, run.start, run.end)
                for group, runs in enumerate(pin.held)
                for run in runs
                if run.span is not None  # else the tier was reset meanwhile
            ]
            if not target:
                for group, runs in enumerate(pin.held):
                    self._num_stored[group] += sum(run.end - run.start for run in runs)
        self.tiers[target].settle(pin, is_stored=is_stored)
        for spill in arrived:
            self.backlog.add(target, *spill)
        if target:
            source = of_parts.pins[target - 1]
            for run in (run for runs in source.held for run in runs if is_stored):
                run.is_wanted = False  # else parts that find no room together would replace each other for ever
            self.tiers[target - 1].unpin(source)
        for held in reversed(of_parts.above):
            self._parts.unhold(held, go_first=is_stored and self._policy.goes_first)
        self._cache.count()

    def end_load(self, loading: Loading, num_good: int, emit_ended: Callable[[int], None]) -> Loaded:
        """Make loaded parts findable. If some failed, the request looks up again, and finds those that were loaded."""
        of_parts = cast(PartLoading, loading)
        is_whole = num_good >= loading.num_blocks
        self.backlog.used(loading.by_tier)
        emit_ended(sum(loading.by_tier) if is_whole else 0)
        ends_by_tier: list[list[int]] = []
        for pin in of_parts.pins:
            ends_by_tier.append(self._good_ends(pin, num_good))
            num_good -= self.tier.num_pinned(pin)
        ends = [min(of_group) for of_group in zip(*ends_by_tier, strict=True)]
        if of_parts.loading is not None and not self._arrive_at_turns:
            self._parts.arrive(of_parts.loading, ends)
        for place, (tier, pin, good_ends) in enumerate(zip(self.tiers, of_parts.pins, ends_by_tier, strict=True)):
            for group, runs in enumerate(pin.held if place or self._policy.takes_back else ()):
                for run in runs:
                    if run.start < ends[group] and run.span is not None:
                        arrived = of_parts.content, group, run.start, min(run.end, ends[group])
                        if not self._arrive_at_turns:
                            self._policy.complete(*arrived)
                        elif is_whole:
                            self._late.setdefault(loading.request, []).append(arrived)
            tier.drop(pin, good_ends)
        # The request used its whole prefix, including the part on the device.
        last = loading.start + sum(loading.by_tier)
        for tier, pin in zip(self.tiers, of_parts.pins, strict=True):
            tier.end_load(pin, of_parts.content, last)
        self._cache.count()
        return (
            Loaded(loading.request, last, loading.by_tier) if is_whole else Loaded(loading.request, 0, self._no_pages)
        )

    def turn(self, request: int, *, is_used: bool) -> None:
        """Store what a load has brought from slower tiers: its request has its turn; not `is_used`: it has left."""
        for arrived in self._late.pop(request, ()):
            if is_used:
                self._policy.complete(*arrived)

    def _good_ends(self, pin: RunTable, num_good: int) -> list[int]:
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

    # Laws -------------------------------------------------------------------------------------------------

    def holds(self, copies: Copies) -> list[PinnedPages]:
        """Return the parts that a store holds on the device."""
        return [PinnedParts(held) for held in _above(copies)]

    def check(self, under_way: Sequence[Copies], *, at_rest: bool = True) -> None:
        """Assert laws L1 and L2 in every tier in which enough has moved, or at rest; `under_way`: all its copies."""
        every = [offered.pins for offered in self._offered.values()]
        every += [cast("PartCopies | PartLoading", copies).pins for copies in under_way]
        for place, tier in enumerate(self.tiers):
            if tier.is_check_due(at_rest=at_rest):
                tier.check([pins[place] for pins in every])
        if not under_way:
            assert not self._offered, "L2: an offer is pinned at rest"
            for tier in self.tiers:
                num_used = tier.num_used_blocks
                assert tier.guests or not num_used, f"L2: {num_used} blocks of {tier.name} held at rest"


def _above(copies: Copies) -> Sequence[RunTable]:
    return cast(PartCopies, copies).above if copies.target == 0 else ()


def _targets(loading: RunTable, pin: RunTable, part_blocks: Sequence[int]) -> tuple[PageId, ...]:
    """Return the blocks of `loading` for the runs of `pin`, by group, then page."""
    targets: list[PageId] = []
    for held, runs, blocks in zip(loading.held, pin.held, part_blocks, strict=True):
        for run in runs:
            for to_fill in held:
                start, end = max(run.start, to_fill.start), min(run.end, to_fill.end)
                if to_fill.span is None and start < end:
                    targets += to_fill.ids.part((start - to_fill.start) * blocks, (end - to_fill.start) * blocks)
    return tuple(targets)

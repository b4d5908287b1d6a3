"""Whole pages below a device: a tree for the device and one for each tier, and the copies between them.

Longer than other files: stores, loads and spills work on the same three things, the device's order, the tiers and their
callbacks, so separate files would have to pass all of these to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, cast

from kvarts.core.content import Content
from kvarts.core.event_log import Emit
from kvarts.core.events import PagesRemoved, PagesStored
from kvarts.core.kv.cache import BlockTable, Match
from kvarts.core.kv.eviction import PinnedPages
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.kv.pool import PageId
from kvarts.core.kv.transfer import Coming, Loaded, Offer, Weighed
from kvarts.core.kv.tree import Node
from kvarts.core.tiers.index import NodeState, Placement
from kvarts.core.tiers.layout import ConnectedTier, Layout
from kvarts.core.tiers.safe_first import COMING, FAILED, NOT, STORED, SafeFirst
from kvarts.core.tiers.store_policy import Duplicates, Exchange, LateSpills, PagePolicy, Spill, precedes
from kvarts.core.tiers.tier import MemoryTier, Pin
from kvarts.core.tiers.transfers import ALL, Copies, Loading

__all__ = ["Marks", "PageLayout", "next_evictions"]


class Marks:
    """Records in `order` whether `tiers` hold the runs of `cache`. Without an order it does nothing.

    `removed`: pages that left a tier and may still be marked, as content, first page, page after the last;
    `unmark_removed` consumes them.
    """

    def __init__(self, cache: PageCache, tiers: Sequence[MemoryTier], order: SafeFirst | None) -> None:
        self._cache = cache
        self.tiers = tiers
        self._order = order
        self.removed: list[tuple[Content, int, int]] = []

    def unmark_removed(self, below: int = FAILED) -> None:
        """Mark pages that were removed below with `below`: they are lost if the device evicts them.

        They are not stored again while the device has them: otherwise a tier that is too small would be refilled for
        ever.
        """
        order = self._order
        if not self.removed or order is None:
            return
        num_found = self._cache.tree.num_found
        for content, start, end in self.removed:
            if num_found(content, end) > start:
                self._mark_match(self._cache.match(content, end), start, below)
                if len(self.tiers) > 1:
                    self.mark_held(content, start, end)
        self.removed.clear()
        order.regroup()

    def mark_as_held(self, content: Content, start: int, end: int) -> None:
        """Mark those of pages [start, end), which the device has, that a tier has as well."""
        if self._order is not None and self.mark_held(content, start, end):
            self._order.regroup()

    def mark_held(self, content: Content, start: int, end: int) -> int:
        """Do the same without regrouping; return how many. Requires an order, and its `regroup` must follow."""
        num_held = 0
        for tier in self.tiers:
            for first, last in tier.held(content, start, end):
                num_held += last - first
                self._mark_match(self._cache.match(content, last), first, STORED)
        return num_held

    def mark_part(self, part: PinnedPages, below: int) -> bool:
        """Mark held pages that are still in the tree; return whether some are not. `regroup` must follow."""
        assert self._order is not None
        nodes = part.nodes()
        resident = [node for node in nodes if not node.is_orphan]
        self._order.mark(resident, below)
        return len(resident) < len(nodes)

    def _mark_match(self, match: Match, start: int, below: int) -> None:
        assert self._order is not None
        tree = self._cache.tree
        self._order.mark(tree.isolate(tree.cut(match), start, match.num_pages), below)


class PageCopies(Copies):
    """A store or a spill of pages. `held`: by store, the pages that it reads on the device, none if a load overwrites
    them; `sources`: the reads of a spill.
    """

    __slots__ = ("held", "sources", "stores")

    def __init__(self, target: int) -> None:
        super().__init__(target)
        self.stores: list[Placement] = []
        self.held: list[list[PinnedPages]] = []
        self.sources: list[Pin] = []


class PageLoading(Loading):
    """A load of pages. `loads`: each with its tier."""

    __slots__ = ("loads",)

    def __init__(self, request: int, start: int) -> None:
        super().__init__(request, start)
        self.loads: list[tuple[MemoryTier, Pin]] = []


class PageLayout(Layout[MemoryTier]):
    """Whole pages of `cache` and of the tiers below it: pages stored in one are then stored in the next.

    `policy`: which pages are stored below the device, and when. `order`: the eviction order of `cache`, for a policy
    that stores the pages that are evicted next. `swaps`: preempted requests keep all their pages in the first tier.
    """

    def __init__(
        self,
        cache: PageCache,
        connected: Sequence[ConnectedTier[MemoryTier]],
        policy: PagePolicy,
        *,
        page_bytes: int,
        order: SafeFirst | None = None,
        store_within_ns: int = ALL,
        swaps: bool = False,
        with_page_ids: bool = False,
        emit: Emit | None = None,
    ) -> None:
        super().__init__(
            connected,
            policy,
            block_bytes=page_bytes,
            page_bytes=page_bytes,
            is_stored=lambda place, spill: bool(self.own[place].find(spill[0], *spill[2:])),
            store_within_ns=store_within_ns,
            with_page_ids=with_page_ids,
        )
        self.spills_first = policy.stores_deepest_first  # these would replace pages on their way through a small tier
        self._cache = cache
        self._policy = policy
        self._order = order
        self._late_spills: LateSpills | None = None
        self._duplicates: Duplicates | None = None
        self._exchange: Exchange | None = None
        self._displaced: PageCopies | None = None
        """The store of what the load evicts that is about to begin."""
        if policy.exclusive_pages is not None:
            if cache.pool.make_room is None:  # else others might get the pages that a load evicts
                self._exchange = Exchange(connected[0].write, connected[0].read, page_bytes)
            self._duplicates = Duplicates(self.own, num_free=policy.exclusive_pages, num_here=cache.tree.num_found)
            self.backlog = self._late_spills = LateSpills(len(self.own), policy.exclusive_pages)
        self._swaps = swaps
        self._emit = emit
        for place, tier in enumerate(self.own):
            has_next = place + 1 < len(self.own)
            tier.listen(
                partial(self._on_stored, place) if emit is not None or has_next else None,
                partial(self._on_removed, place) if emit is not None or has_next or order is not None else None,
            )
        self._gone: list[tuple[Content, int, int]] = []
        cache.tree.on_removed = self._on_evicted
        cache.on_evicted = self._lose_gone
        # All pages that leave the device pass through the first of exclusive tiers.
        self._marks = Marks(cache, self.own if self._late_spills is None else self.own[:1], order)
        self._may_pass_through = len(self.own) > 1 and not policy.stores_deepest_first
        if order is not None:
            order.on_grown = self._on_grown
        self._has_one_marked = order is not None and len(self.own) == 1
        """Whether a run of the device that is marked as stored is stored in the only tier."""

    def confirm(self, content: Content, num_pages: int, table: BlockTable) -> None:
        """Record that the first `num_pages` pages of `content`, in `table`, are complete."""
        self._policy.confirm(content, num_pages, table)

    def preempted(self, content: Content, num_pages: int, table: BlockTable) -> None:
        """Store the pages of a preempted request in the first tier, also those that only this request can find."""
        if self._swaps and num_pages:
            self._policy.preempted(content, num_pages, table)

    def ended(self, content: Content) -> None:
        """Drop the pages below that only the request of `content` could find."""
        if self._swaps:
            self._policy.ended(content)
            self.tiers[0].drop(content, content.num_known_pages)
            self._marks.unmark_removed()

    def reset(self) -> None:
        """Drop all pages, below and of those to be stored."""
        super().reset()
        self._marks.unmark_removed(NOT)

    # Stores -----------------------------------------------------------------------------------------------

    def pages_to_spare(self) -> int | None:
        """Return how many pages can be taken in identical steps before the tiers must act; None: in the next step."""
        spare = ALL if self.backlog.is_behind[0] else self._policy.pages_to_spare()
        if spare is not None and (self._order is not None or any(tier.has_holes for tier in self.own)):
            # When a page is lost, all pages after it are dropped in the same step. A page that only the second tier has
            # is lost for the first.
            num_without_loss = self._cache.pool.num_empty
            if self._order is not None and len(self._marks.tiers) == 1:
                num_without_loss += self._order.num_safe
            return min(spare, num_without_loss)
        return spare

    def store(self, now_ns: int, is_moving: Callable[[], bool]) -> PageCopies | None:
        """Choose pages to store, make room for them, and hold them."""
        copies: PageCopies | None = None
        room = -1
        policy = self._policy
        for content, start, end, where in policy.choose():
            if room < 0:
                room = self._room(0, now_ns)
            position = num_here = start
            if room > 0:
                store, pages, num_here = self._prepare(content, start, end, where, room)
                if store is not None:
                    copies = copies or PageCopies(0)
                    self._add(copies, store)
                    copies.held.append(pages)
                    if self._with_page_ids:
                        for part in pages:
                            copies.source_ids += self._cache.page_ids(part)
                    room -= store.num_pages
                    position = store.segments[-1].end
            if room == 0 or (
                position < num_here and self._passes_through(num_here) and (copies is not None or is_moving())
            ):
                policy.wait(content, position)
                self.backlog.is_behind[0] = True
                break
            policy.tried(content)
        return copies

    def _add(self, copies: PageCopies, store: Placement) -> None:
        """Add a store, without the ids of its sources."""
        copies.stores.append(store)
        copies.num_blocks += store.num_pages
        for segment in store.segments:
            copies.runs.append((store.content, segment.start, segment.end))
            if self._with_page_ids:
                assert segment.slots is not None
                copies.target_ids += segment.slots

    def _prepare(
        self,
        content: Content,
        start: int,
        end: int,
        where: Any,
        room: int,
    ) -> tuple[Placement | None, list[PinnedPages], int]:
        """Prepare to store at most `room` of pages [start, end), and hold these; return None if there are none.

        Return also how many pages the device has.
        """
        first = self.tiers[0]
        num_refused = first.num_refused
        policy = self._policy
        deepest_first = policy.stores_deepest_first and room >= end - start
        path, start, end = policy.path(content, start, end, where, room)
        if self._may_pass_through and self._passes_through(end):
            start = self._pass_through(content, start, end, room)
        if self._duplicates is not None and len(self._duplicates):
            self._duplicates.make_room(min(room, first.missing(content, start, end)))
            self._marks.unmark_removed(NOT)  # when they near eviction, they are stored again
        store = first.prepare_store(content, start, end, deepest_first=deepest_first, limit=room)
        num_refused = first.num_refused - num_refused
        self.num_refused += num_refused
        order = self._order
        if order is not None:
            self._marks.unmark_removed()
            if num_refused:
                policy.wait(content, start)
                self.backlog.is_behind[0] = True
            if store is None and not num_refused:
                self._marks.mark_as_held(content, start, end)
        if store is None:
            return None, [], end
        parts = [self._cache.hold(path, segment.start, segment.end) for segment in store.segments]
        if order is not None:
            for part in parts:
                order.mark(part.runs, COMING)
        return store, parts, end

    def _passes_through(self, num_pages: int) -> bool:
        """Return whether a prefix of `num_pages` goes through the first tier in pieces: it is too small for all."""
        return self._may_pass_through and num_pages > self.tiers[0].num_pages

    def _pass_through(self, content: Content, start: int, end: int, room: int) -> int:
        """Return the first of pages [start, end) that no tier has; make room for it and `room` pages in all.

        What makes room is what the first tier has of the same prefix, as far as the next tier has it as well.
        """
        first, second = self.tiers[0], self.tiers[1]
        position = -1
        while position < start:
            position = start
            for tier in self.own:
                start += tier.find(content, start, end)
        here = first.held(content, 0, start)
        num_here = sum(last - begin for begin, last in here)
        num_short = min(end - start, room, num_here) - (first.num_pages - first.num_used_blocks - num_here)
        if num_short > 0:
            begin, last = here[-1]
            begin = max(begin, last - num_short)
            if second.held(content, begin, last) == [(begin, last)]:
                first.vacate(content, last, last - begin)
        return start

    def num_idle(self, copies: Copies) -> int:
        """Return the pages of the device that a store holds and no request does."""
        return sum(self._cache.num_idle(part) for part in self.holds(copies))

    def spill(self, place: int, now_ns: int) -> PageCopies | None:
        """Choose pages that have arrived in the tier at `place`, and make room for them in the next tier."""
        if self._late_spills is not None:
            return self._spill_late(self._late_spills, place, now_ns)
        upper = self.tiers[place]
        wanted = self.backlog.spills[place]
        early: list[Spill] = []
        copies = PageCopies(place + 1)
        room = self._room(place + 1, now_ns)
        while wanted and room:
            content, _, start, end = wanted.popleft()
            num_pages = upper.find(content, start, end)
            if not num_pages:
                continue
            if not self._is_reached(place + 1, content, start):
                # The device has evicted the pages before it, and their store in the tier above has not ended.
                early.append((content, 0, start, end))
                continue
            store = self._add_spill(copies, content, start, start + num_pages, room, deepest_first=False)
            if store is None:
                continue
            position = store.segments[-1].end
            room -= store.num_pages
            if not room and position < end:
                # Pages whose spill has begun are not tried again, even if it fails.
                wanted.appendleft((content, 0, position, end))
        wanted.extendleft(reversed(early))
        self.backlog.is_behind[place + 1] = not room or bool(early)
        self._marks.unmark_removed()
        return copies if copies.stores else None

    def _spill_late(self, late: LateSpills, place: int, now_ns: int) -> PageCopies | None:
        """Choose pages that the tier at `place` evicts next, the deepest first, and make room for them in the next."""
        upper, lower = self.tiers[place], self.tiers[place + 1]
        late.changed[place] = False
        copies = PageCopies(place + 1)
        room = self._room(place + 1, now_ns)
        # More pages than a tier holds would replace each other for ever.
        num_pages = min(late.num_pages, upper.num_pages, lower.num_pages) - upper.num_empty_blocks
        for content, start, end in next_evictions(upper, lower, num_pages):
            if room and not self._is_reached(place + 1, content, start):
                continue
            store = self._add_spill(copies, content, start, end, room, deepest_first=True) if room else None
            room -= 0 if store is None else store.num_pages
            if not room:
                late.is_behind[place + 1] = late.changed[place] = True
                break
        self._marks.unmark_removed()
        return copies if copies.stores else None

    def _is_reached(self, place: int, content: Content, start: int) -> bool:
        """Return whether the device, and then the tiers up to `place` one after the other, have all pages before it."""
        num_above = self._num_above(place, content, start)
        return num_above + self.tiers[place].find(content, num_above, start) >= start

    def _add_spill(
        self, copies: PageCopies, content: Content, start: int, end: int, room: int, *, deepest_first: bool
    ) -> Placement | None:
        """Add those of pages [start, end) that the target lacks, at most `room`; return None without any."""
        upper, lower = self.tiers[copies.target - 1], self.tiers[copies.target]
        num_refused = lower.num_refused
        store = lower.prepare_store(content, start, end, deepest_first=deepest_first, limit=room)
        self.num_refused += lower.num_refused - num_refused
        if store is None:
            return None
        if deepest_first:
            start = store.segments[0].start
        source = upper.read(content, start, store.segments[-1].end)
        assert source is not None
        self._add(copies, store)
        copies.sources.append(source)
        if self._with_page_ids:
            slots = source.slots
            assert slots is not None
            for segment in store.segments:
                copies.source_ids += slots[segment.start - start : segment.end - start]
        return store

    def end_store(self, copies: Copies, *, is_stored: bool, is_given_up: bool) -> None:
        """Make stored or spilled pages findable, unless that failed, and mark them on the device."""
        of_pages = cast(PageCopies, copies)
        tier = self.tiers[copies.target]
        for store in of_pages.stores:
            tier.complete_store(store, is_stored=is_stored)
        for place, source in enumerate(of_pages.sources):
            upper = self.tiers[copies.target - 1]
            if is_stored and self._late_spills is not None:
                for segment in of_pages.stores[place].segments:
                    upper.note_spilled(source.content, segment.start, segment.end)
            upper.end_read(source)
        if not is_stored:
            self._lose_after_failed(of_pages)
        order = self._order
        if order is not None:
            if copies.target and is_stored and self._late_spills is None:
                for store in of_pages.stores:
                    for segment in store.segments:
                        self._marks.mark_as_held(store.content, segment.start, segment.end)
            for place, parts in enumerate(of_pages.held):
                store = of_pages.stores[place]
                for segment in () if parts else store.segments:  # a load has overwritten them
                    self._marks.mark_held(store.content, segment.start, segment.end)
                is_whole = is_stored and store.run.state is NodeState.STORED
                for index, part in enumerate(parts):
                    segment = store.segments[index]
                    if is_whole:
                        has_orphans = self._marks.mark_part(part, STORED)
                    else:
                        # Pages that fail again and again are not tried again; those that were given up may be.
                        has_failed = not is_stored and not is_given_up
                        self._marks.mark_part(part, FAILED if has_failed else NOT)
                        has_orphans = True
                    if has_orphans:
                        self._marks.mark_held(store.content, segment.start, segment.end)
            order.regroup()
        self._marks.unmark_removed()
        if not copies.target:
            for parts in of_pages.held:
                for part in parts:
                    self._cache.unhold(part)

    def _lose_after_failed(self, copies: PageCopies) -> None:
        """Drop pages that were stored after pages that failed to be stored and that no faster tier has any more."""
        for store in copies.stores:
            for segment in store.segments:
                num_above = self._num_above(copies.target, store.content, segment.end)
                if num_above < segment.end:
                    start = max(segment.start, num_above)
                    self.tiers[copies.target].lose(store.content, start, segment.end)

    # Loads --------------------------------------------------------------------------------------------------

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

    def found(self, content: Content, start: int, limit: int) -> tuple[int, ...]:
        """Return how many of the pages [start, limit) of `content` each tier that is not elsewhere adds, in turn."""
        counts: list[int] = []
        for tier in self.own:
            counts.append(tier.find(content, start, limit))
            start += counts[-1]
        return tuple(counts)

    def coming(self, content: Content, start: int, limit: int, now_ns: int) -> Coming | None:
        """Return the pages of `content` from `start` on that other engines are storing in the last tier."""
        return self.tiers[-1].coming(content, start, limit, now_ns)

    def await_write(self, write: int) -> None:
        """Note that a request waits for a write of another engine to the last tier."""
        self.tiers[-1].await_write(write)

    def forget(self, request: int) -> None:
        """End the pins of the offer to `request`."""
        self._end_exchange()
        for tier in self.tiers:
            tier.forget(request)

    def weighed(self, offer: Offer, weighed: Weighed, now_ns: int) -> None:
        """Note which part of the newest `offer` is to be loaded: what that evicts may be stored meanwhile.

        Not if the request computes the first pages of the offer at once.
        """
        exchange = self._exchange
        if exchange is not None and weighed.by_tier[0] and not weighed.num_front:
            exchange.begin(weighed.by_tier[0], now_ns)

    def _end_exchange(self) -> None:
        """Note that no load is about to begin."""
        self._displaced = None
        if self._exchange is not None:
            self._exchange.num_pages = 0

    def load(
        self, request: int, content: Content, start: int, num_pages: int, table: BlockTable, num_front: int
    ) -> PageLoading:
        """Pin `num_pages` pages of the offer to `request`, after its first `num_front`, for a load into `table`."""
        counts = [0] * len(self.tiers)
        loading = PageLoading(request, start)
        position, end = start, start + num_pages
        for place, tier in enumerate(self.tiers):
            num_offered = tier.offered(request)
            if not num_offered:
                continue
            if position == end or num_front >= num_offered:
                num_front -= min(num_front, num_offered)
                tier.forget(request)
                continue
            load = tier.prepare_load(request, min(end - position, num_offered - num_front), num_front)
            num_front = 0
            count = counts[place] = load.num_pages
            loading.loads.append((tier, load))
            source_ids: tuple[PageId | bytes, ...] = ()
            target_ids: tuple[PageId | bytes, ...] = ()
            if self._with_page_ids:
                assert table.page_ids is not None and load.slots is not None
                source_ids, target_ids = load.slots, tuple(table.page_ids[position : position + count])
            loading.reads.append((place, count, source_ids, target_ids))
            position += count
        loading.num_blocks, loading.by_tier = position - start, tuple(counts)
        loading.displaced = self._displaced
        self._end_exchange()
        return loading

    def end_load(self, loading: Loading, num_good: int, emit_ended: Callable[[int], None]) -> Loaded:
        """Unpin the pages of a load, and drop those that were broken."""
        by_tier = []
        for num_pages in loading.by_tier:
            by_tier.append(min(num_good, num_pages))
            num_good -= by_tier[-1]
        num_left = sum(by_tier)
        self.backlog.used(loading.by_tier)
        for tier, load in cast(PageLoading, loading).loads:
            tier.complete_load(load, min(num_left, load.num_pages))
            num_left -= min(num_left, load.num_pages)
        self._marks.unmark_removed()
        emit_ended(sum(by_tier))
        return Loaded(loading.request, loading.start + sum(by_tier), tuple(by_tier))

    # Callbacks of the tiers and the device ----------------------------------------------------------------

    def _on_evicted(self, node: Node, start: int, end: int) -> None:
        """Record an eviction of the device, if a tier may lack these pages and have later ones of the sequence."""
        if self._has_one_marked and node.notes.below == STORED:
            return
        exchange = self._exchange
        if exchange is not None and exchange.num_pages:
            if node.notes.below == NOT and not node.is_orphan:
                exchange.add(node, start, end)
            self._gone.append((node.content, start, end))
            return
        for tier in self.own:
            if tier.has_holes:
                self._gone.append((node.content, start, end))
                return

    def _on_grown(self, content: Content, start: int, end: int) -> None:
        """Mark pages [start, end), which the device has again, as held by tiers, or release them there."""
        if self._duplicates is not None:
            self._duplicates.add(content, start, end)
        self._marks.mark_as_held(content, start, end)

    def _lose_gone(self) -> None:
        """Drop pages that cannot be reached since the device evicted pages before them."""
        gone = self._gone
        if not gone:
            return
        if self._exchange is not None and len(self._exchange):
            self._displaced = self._exchanged(self._exchange)
        last = self.own[-1]
        for content, start, end in gone:
            position = start
            for tier in self.own:
                tier.lose(content, position, end)
                if tier is not last:
                    position += tier.find(content, position, end)
        self._marks.unmark_removed()
        gone.clear()

    def _exchanged(self, exchange: Exchange) -> PageCopies | None:
        """Make room in host memory for pages that a load evicts, as many as there is time for; None without any.

        The last to be evicted have priority; host memory evicts them last.
        """
        assert self._duplicates is not None
        first, room = self.tiers[0], exchange.num_pages
        stores: list[tuple[Placement, int, list[PageId]]] = []
        for content, start, end, page_ids in exchange.take():
            num_missing = first.missing(content, start, end)
            self._duplicates.make_room(min(room, num_missing))
            self._marks.unmark_removed(NOT)
            num_refused = first.num_refused
            store = first.prepare_store(content, start, end, limit=room)
            self.num_refused += first.num_refused - num_refused
            self._marks.unmark_removed()
            if store is not None:
                stores.append((store, start, page_ids))
                room -= store.num_pages
                num_missing -= store.num_pages
            if num_missing or not room:
                break
        exchange.take()
        if not stores:
            return None
        copies = PageCopies(0)
        for store, start, page_ids in reversed(stores):
            self._add(copies, store)
            copies.held.append([])
            for segment in store.segments:
                copies.source_ids += page_ids[segment.start - start : segment.end - start]
        return copies

    def _num_above(self, place: int, content: Content, end: int) -> int:
        """Return how many of the first `end` pages of `content` the device has, and tiers above `place` after it."""
        num_pages = self._cache.tree.num_found(content, end)
        for tier in self.tiers[:place]:
            num_pages += tier.find(content, num_pages, end)
        return num_pages

    def _on_stored(self, place: int, content: Content, start: int, end: int, parent: Content | None) -> None:
        if self._emit is not None:
            self._emit(PagesStored(content, start, end, parent, self.tiers[place].name))
        self.backlog.add(place, content, 0, start, end)

    def _on_removed(self, place: int, content: Content, start: int, end: int) -> None:
        if self._emit is not None:
            self._emit(PagesRemoved(content, start, end, self.tiers[place].name))
        if self._order is not None and place < len(self._marks.tiers):
            self._marks.removed.append((content, start, end))
        for below in range(place + 1, len(self.own)):
            if self.tiers[below].has_holes:
                self.tiers[below].lose(content, max(start, self._num_above(below, content, end)), end)

    # Laws -----------------------------------------------------------------------------------------------------

    def holds(self, copies: Copies) -> list[PinnedPages]:
        """Return the pages that a store holds on the device."""
        if copies.target:
            return []
        return [part for parts in cast(PageCopies, copies).held for part in parts]

    def _check_marks(self, order: SafeFirst) -> None:
        """Assert that the mark of each run on the device is right: whether lower tiers have its pages.

        Tiers are asked once for a run and all runs before it that were not checked yet.
        """
        seen: set[int] = set()
        for deepest in reversed(list(self._cache.tree.nodes())):
            branch = list(takewhile(lambda node: id(node) not in seen, order.up_from(deepest)))
            seen.update(map(id, branch))
            if not branch:
                continue
            start = branch[-1].start
            pages = bytearray(deepest.end - start)
            for tier in self._marks.tiers:
                for first, last in tier.held(deepest.content, start, deepest.end):
                    pages[first - start : last - start] = b"\1" * (last - first)
            for node in branch:
                num_held = pages.count(1, node.start - start, node.end - start)
                below = order.below(node)
                num_expected = node.end - node.start if below == STORED else 0
                assert num_held == num_expected, f"L4: {node} is marked {below}; {num_held} pages are below"

    def check(self, under_way: Sequence[Copies], *, at_rest: bool = True) -> None:
        """Assert laws L1 to L3 in every tier, given the copies under way."""

        def is_above(place: int, content: Content, num_pages: int) -> bool:
            return self._num_above(place, content, num_pages) >= num_pages

        if self._order is not None:
            self._check_marks(self._order)
        for place, tier in enumerate(self.tiers):
            tier.check(partial(is_above, place))
        if not under_way:
            for tier in self.tiers:
                num_used = tier.num_used_blocks
                assert tier.has_offers or not num_used, f"L2: {num_used} pages of {tier.name} held at rest"


def next_evictions(upper: MemoryTier, lower: MemoryTier, num_pages: int) -> list[tuple[Content, int, int]]:
    """Return those of the next `num_pages` pages that `upper` evicts which `lower` lacks; not of unknown tokens.

    A page is spilled once, until it is used again: otherwise pages for which a lower tier that is too small has no room
    would replace each other for ever.
    """
    chosen: list[tuple[Content, int, int]] = []
    if num_pages <= 0:
        return chosen
    for run in upper.index.recency():
        content = run.content
        first = max(run.start, run.end - num_pages)
        num_pages -= run.end - first
        last = min(run.end, content.num_known_pages)
        missing = [] if run.is_spilled else lower.absent(content, first, last)
        for start, end in reversed(missing):
            if chosen and precedes(content, end, chosen[-1][0], chosen[-1][1]):
                chosen[-1] = chosen[-1][0], start, chosen[-1][2]
            else:
                chosen.append((content, start, end))
        if num_pages <= 0:
            break
    return chosen

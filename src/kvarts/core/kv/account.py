"""The memory of runs of parts, on the device or in a tier below: which runs are held, and which are evicted next.

Parts that nothing holds are in one list of entries, the least recently released first; or an eviction order lists them,
and the list contains only those to evict before them. Empty bytes are taken before anything is evicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final, Protocol

from kvarts.core.content import Content
from kvarts.core.event_log import Emit
from kvarts.core.events import CopiesRemoved, CopiesStored, PagesRemoved, PagesStored, PartsGivenBack
from kvarts.core.hints import Hints
from kvarts.core.kv.eviction import EvictionOrder, noter_of, ranges_read_by
from kvarts.core.kv.groups import GroupMemory
from kvarts.core.kv.pool import NO_IDS, IdPool, PageId, PageIds, SharedMemory
from kvarts.core.kv.runs import EvictionSlot, LruEntry, PartCounts, PartRun, RunTable, Span, Stream, Turns

__all__ = ["MOST_UNCHECKED", "RunAccount", "RunEvents", "Unchecked", "Wants"]

MOST_UNCHECKED: Final = 16
"""One part in this many may have moved before a check examines all runs again."""
FEW_IDS: Final = 1024
"""This many ids are examined with every check of the runs; more only once as many blocks have moved."""


class Unchecked:
    """Whether so much has moved since everything was last examined that examining it again costs little more."""

    __slots__ = ("_num_moved",)

    def __init__(self) -> None:
        self._num_moved = 0

    def is_due(self, num_moved: int, num_allowed: int) -> bool:
        """Return whether `num_allowed` have moved since this last returned True, given how many ever have."""
        if num_moved - self._num_moved < num_allowed:
            return False
        self._num_moved = num_moved
        return True


class Wants(Protocol):
    """Collects the parts to store in the tier below; it is notified of those that are worth storing."""

    def complete(self, content: Content, group: int, start: int, end: int) -> None:
        """Record that pages [start, end) of `content` are complete when the step ends.

        Called only for parts from which other sequences may continue: for groups that keep all tokens every full page,
        for windows and chunks the pages to which the token after a prompt or an end attends, with those that the same
        prompt needs, and snapshots.
        """

    def computes(self, owner: RunTable | PartRun, start: int) -> None:
        """Record that the current step computes the pages of `owner` from `start` on: a sequence, or a snapshot."""

    @property
    def has_work(self) -> bool:
        """Whether parts must be stored now, whatever happens on the device."""


class RunAccount(PartCounts):
    """The counts of parts, the holders of each run, and the list of those that nothing holds.

    If it shares its memory, `total_bytes` is its present part of that. `events`: receives parts that become findable,
    are evicted, or are released by windows. `eviction_order`: lists runs of parts, and chooses the next to evict;
    without it, that is the least recently released.
    """

    __slots__ = (
        "_num_checks",
        "_unchecked_ids",
        "events",
        "eviction_order",
        "lru",
        "note_request",
        "now_ns",
        "only_counts",
        "promised_bytes",
        "reads_ranges",
        "shared",
        "wants",
    )

    def __init__(
        self,
        memory: GroupMemory,
        *,
        total_bytes: int,
        blocks: IdPool | None = None,
        events: RunEvents | None = None,
        eviction_order: EvictionOrder | None = None,
    ) -> None:
        super().__init__(memory, total_bytes=total_bytes, blocks=blocks)
        self.shared: SharedMemory | None = None
        """The memory that provides all bytes, if others have parts in it as well."""
        self.events = events
        self.emits = events is not None
        self.eviction_order = eviction_order
        self.only_counts = blocks is None and events is None and eviction_order is None
        """Whether a released run only becomes the youngest of its list, since no order or reader has to know."""
        self.note_request = noter_of(eviction_order)
        self.reads_ranges = self.note_request is not None and ranges_read_by(eviction_order)
        self.wants: Wants | None = None
        """Collects the parts to store in the tier below, if there is one."""
        self.promised_bytes = 0
        """Free bytes that are reserved for requests that will take them."""
        self.now_ns = 0
        """The time, for an order that uses it."""
        self.lru = LruEntry()
        """A sentinel that closes the list to a ring: its `newer` is the oldest entry, its `older` the youngest."""
        self.lru.older = self.lru.newer = self.lru
        self._unchecked_ids = Unchecked()
        self._num_checks = 0

    @property
    def room_bytes(self) -> int:
        """Bytes that can be taken now and are not promised, here or from others if the memory is shared."""
        return self.free_bytes - self.promised_bytes if self.shared is None else self.shared.num_free_bytes

    @property
    def vacant_bytes(self) -> int:
        """Bytes that can be taken without an eviction, here or in a memory that is shared."""
        return self.empty_bytes + (0 if self.shared is None else self.shared.num_empty_bytes)

    # A memory that others share ---------------------------------------------------------------------------

    def share(self, memory: SharedMemory) -> None:
        """Take all bytes from `memory` from now on, and return empty ones to it; none may be in use yet."""
        assert self.empty_bytes == self.total_bytes, "what is to be shared is in use"
        self.shared = memory
        self.resize(-self.total_bytes)

    @property
    def is_shared(self) -> bool:
        """Whether others have parts of the same memory."""
        return self.shared is not None

    def give_back(self) -> None:
        """Return empty bytes to the memory, if it is shared."""
        if self.shared is not None:
            self.shared.take_back()

    def resize(self, num_bytes: int) -> None:
        """Add `num_bytes` empty bytes; if negative, remove that many."""
        self.total_bytes += num_bytes
        self.empty_bytes += num_bytes

    @property
    def next_stamp(self) -> int:
        """The stamp of the part that is evicted next; the memory is shared, and has cached parts here."""
        return self._oldest().stamp

    @property
    def next_bytes(self) -> int:
        """The bytes of that part, and of those evicted right after it."""
        return self._oldest().next_bytes(self)

    def _oldest(self) -> LruEntry:
        """Return the next entry to evict; it has parts."""
        lru = self.lru
        oldest = lru.newer
        if self.eviction_order is not None:
            return self.next_in_order()
        assert oldest is not None
        while oldest is not lru and not oldest.next_bytes(self):
            newer = oldest.newer
            oldest.evict(self, 0)  # it has no parts left, or is a place
            assert newer is not None
            oldest = newer
        return oldest

    # The list ---------------------------------------------------------------------------------------------

    def entries(self) -> Iterator[LruEntry]:
        """Iterate over the listed entries, the next to be evicted first."""
        entry = self.lru.newer
        while entry is not self.lru:
            assert entry is not None
            yield entry
            entry = entry.newer
        if self.eviction_order is not None:
            yield from self.eviction_order

    def next_in_order(self) -> LruEntry:
        """Return the next entry to evict if an eviction order lists the cached parts."""
        raise NotImplementedError

    def listed_counts(self) -> list[int]:
        """Return how many parts are listed, by group."""
        counts = [0] * len(self.groups)
        turns: Counter[Stream] = Counter()
        for entry in self.entries():
            if isinstance(entry, PartRun):
                counts[entry.group] += entry.end - entry.start
            elif isinstance(entry, Turns):
                turns.update(entry.streams[entry.at :])
        for stream, count in turns.items():
            counts[stream.group] += count - stream.num_holes(stream.low, stream.low + count)
        return counts

    # Laws -------------------------------------------------------------------------------------------------

    @property
    def moved_bytes(self) -> int:
        """Bytes that have been taken, released and evicted since the beginning."""
        return self.used_bytes + 2 * self.released_bytes + self.evicted_bytes

    def is_id_check_due(self) -> bool:
        """Return whether a check of all runs examines every id too: in a large pool, once as many have moved."""
        if self.blocks is None:
            return False
        self._num_checks += 1
        num_moved = self.moved_bytes // self.block_bytes + self._num_checks * FEW_IDS
        return self._unchecked_ids.is_due(num_moved, self.blocks.total)

    def append(self, entry: LruEntry) -> None:
        """List `entry` as the youngest; the caller counts its parts."""
        lru = self.lru
        youngest = lru.older
        assert youngest is not None
        entry.older, entry.newer = youngest, lru
        youngest.newer = lru.older = entry
        if self.shared is not None:
            entry.stamp = self.shared.tick()

    def move_first(self, entry: LruEntry) -> None:
        """Make a listed entry the next to be evicted."""
        entry.unlist()
        lru = self.lru
        oldest = lru.newer
        assert oldest is not None
        entry.older, entry.newer = lru, oldest
        oldest.older = lru.newer = entry
        if self.shared is not None:
            entry.stamp = self.shared.before_all()

    # Counts -----------------------------------------------------------------------------------------------

    def take(self, index: int, count: int) -> None:
        """Take `count` parts of a group, which must be free."""
        num_bytes = count * self.part_bytes[index]
        if self.empty_bytes < num_bytes:
            self.make_room(num_bytes)
        self.empty_bytes -= num_bytes
        self.num_used[index] = self.num_used[index] + count

    def take_pages(self, count: int) -> None:
        """Take the parts of `count` pages in every group that keeps tokens."""
        num_bytes = count * self.page_bytes
        if self.empty_bytes < num_bytes:
            if self.shared is not None:
                self.shared.make_room(num_bytes)
            elif self.only_counts and not self.emits:
                self._evict_counted(num_bytes)
            else:
                self.evict(num_bytes)
        self.empty_bytes -= num_bytes
        num_used = self.num_used
        for index in self._of_tokens:
            num_used[index] = num_used[index] + count

    def take_blocks(self, count: int) -> list[PageId]:
        """Take `count` blocks, which must be free, from the memory of the parts; return their ids."""
        assert self.blocks is not None, "memory without blocks is counted in bytes"
        num_bytes = count * self.block_bytes
        if self.empty_bytes < num_bytes:
            self.make_room(num_bytes)
        self.empty_bytes -= num_bytes
        return self.blocks.take(count)

    def give_blocks(self, block_ids: list[PageId]) -> None:
        """Return blocks that were taken by `take_blocks`."""
        self.give_ids(PageIds(block_ids))
        self.empty_bytes += len(block_ids) * self.block_bytes

    def make_room(self, num_bytes: int) -> None:
        """Evict until `num_bytes` bytes, which must be free, are empty."""
        if self.shared is None:
            self.evict(num_bytes)
        else:
            self.shared.make_room(num_bytes)

    def evict(self, num_bytes: int) -> None:
        """Evict parts until `num_bytes` bytes are empty; that many are empty or cached here."""
        if self.only_counts and not self.emits:
            self._evict_counted(num_bytes)
            return
        oldest = self.lru.newer
        while self.empty_bytes < num_bytes:
            if self.eviction_order is not None:
                oldest = self.next_in_order()
            assert oldest is not None
            newer = oldest.newer
            self.note_gone(oldest.evict(self, num_bytes - self.empty_bytes))
            oldest = newer
        if self.events is not None:
            self.events.flush()

    def _evict_counted(self, num_bytes: int) -> None:
        """Do the same without ids, events and an order, in one loop: this runs for every chunk in a full memory."""
        part_bytes, num_cached, num_evicted, evicted = self.part_bytes, self.num_cached, self.num_evicted, self._evicted
        all_bytes = missing_bytes = num_bytes - self.empty_bytes
        older: LruEntry = self.lru  # the last entry that stays; those between it and `oldest` are not listed any more
        oldest = older.newer
        while missing_bytes > 0:
            assert oldest is not None
            if not isinstance(oldest, PartRun):
                newer = oldest.newer
                older.newer, oldest.older = oldest, older
                missing_bytes -= oldest.evict(self, missing_bytes)
                if oldest.newer is not None:
                    older = oldest
                oldest = newer
                continue
            index = oldest.group
            size = part_bytes[index]
            count = oldest.end - oldest.start
            if (count - 1) * size >= missing_bytes:
                count = -(-missing_bytes // size)
                oldest.end -= count
            else:
                newer = oldest.newer
                oldest.older = oldest.newer = None
                oldest.start = oldest.end
                span = oldest.span
                if span is not None:  # `forget`, inlined
                    oldest.span = None
                    runs = span.parts[oldest.list_index]
                    if len(runs) == 1:
                        runs.pop()
                    elif runs[0] is oldest:
                        del runs[0]
                    else:
                        runs.remove(oldest)
                    if not (runs or span.num_users or span.children):
                        span.prune()
                oldest = newer
            num_cached[index] = num_cached[index] - count
            num_evicted[index] = num_evicted[index] + count
            missing_bytes -= count * size
            if evicted is not None:
                evicted.append(index)
                evicted.append(count)
        assert oldest is not None
        older.newer, oldest.older = oldest, older
        gone_bytes = all_bytes - missing_bytes
        self.evicted_bytes += gone_bytes  # `note_gone`, inlined
        self.cached_bytes -= gone_bytes
        self.empty_bytes += gone_bytes

    def evict_to(self, num_bytes: int, evicted: list[int]) -> None:
        """Do the same, and append the evictions to `evicted`: a group and its number of parts, repeated."""
        self.begin_evictions(evicted)
        self.evict(num_bytes)
        self.end_evictions()

    def begin_evictions(self, evicted: list[int]) -> None:
        """Append evictions from now on to `evicted`: a group and its number of parts, repeated."""
        self._evicted = evicted

    def end_evictions(self) -> None:
        """Append no more evictions."""
        self._evicted = None

    def emit_gone(self, run: PartRun, start: int, end: int, *, is_dropped: bool) -> None:
        """Emit the event that pages [start, end) of `run`, which is still findable, are evicted, the last one first."""
        assert self.events is not None
        self.events.goes(run, start, end, is_dropped=is_dropped)

    # Holders ----------------------------------------------------------------------------------------------

    def hold(self, run: PartRun, table: RunTable) -> None:
        """Make `table` a holder of a run, which follows the runs that it already holds in the group."""
        if run.holders:
            if run.slot is not None and not table.is_transfer:
                run.leave_slot()
            if self.is_bounded[run.group]:
                self.disturb(run)
        else:
            if run.stream is None:
                run.unlist()
            else:
                run.stream.take_out(run)
            self.note_used(run.group, run.end - run.start)
        run.holders.append(table)
        table.held[run.group].append(run)

    def hold_in_place(self, run: PartRun, table: RunTable) -> None:
        """Make a transfer a holder of `run`, which keeps its place in the list, unless a window has passed it."""
        slot: EvictionSlot | None = None
        if not (run.holders or run.is_passed or run.listed_by is not None):
            slot = EvictionSlot()
            slot.list_after(run)
        self.hold(run, table)
        if slot is not None:
            run.slot = slot

    def note_begin(self) -> None:
        """Let the order know the time, as a sequence begins."""
        if self.note_request is not None:
            self.note_request(None, self.now_ns)

    def hold_path(self, path: Sequence[PartRun], table: RunTable) -> None:
        """Hold the runs of `path` in one group, in order of page: a hit, with which a sequence begins."""
        order = self.eviction_order
        if order is not None and path:
            listed = [run for run in path if run.listed_by is not None]
            order.pinned(listed, path)
            for run in listed:
                run.leave_order()
        if not path:
            return
        index, is_transfer = path[0].group, table.is_transfer
        is_bounded, held = self.is_bounded[index], table.held[index]
        for run in path:  # `hold`, inlined: this runs for every request
            holders = run.holders
            if holders:
                if run.slot is not None and not is_transfer:
                    run.leave_slot()
                if is_bounded:
                    self.disturb(run)
            else:
                if run.stream is None:
                    run.unlist()
                else:
                    run.stream.take_out(run)
                self.note_used(index, run.end - run.start)
            holders.append(table)
            held.append(run)

    def free_skipped_in(self, table: RunTable, index: int, num_tokens: int) -> None:
        """Release the parts of a group that no token from `num_tokens` on attends to."""
        raise NotImplementedError

    def publish_to(self, table: RunTable, end: int) -> None:
        """Make parts of full pages up to `end` findable, both held and released ones."""
        raise NotImplementedError

    def name_emitted(self, table: RunTable) -> None:
        """Make pages of `table` findable whose events were emitted before."""
        raise NotImplementedError

    def disturb(self, run: PartRun) -> None:
        """Process that a held run, in a group with windows, gets another holder."""

    def lost_holder(self, run: PartRun) -> None:
        """Process that a run that is still held has lost one of its holders."""

    def release(self, index: int, runs: Iterable[PartRun], table: RunTable, *, is_passed: bool = False) -> None:
        """End the hold on `runs` of a group, one after the other; they are already removed from `table.held`.

        `is_passed`: the sequence continues without them.
        """
        before: PartRun | None = None
        num_cached = num_empty = 0
        events, order = self.events, self.eviction_order
        listed: list[PartRun] = []
        for run in runs:
            holders = run.holders
            if len(holders) == 1:
                holders.pop()
            else:
                holders.remove(table)
            if not table.is_transfer:
                run.is_passed = is_passed
            if holders:
                if run.is_kept and not is_passed:
                    self.lost_holder(run)
                before = None
                continue
            count = run.end - run.start
            if run.is_kept:
                num_cached += count
                if run.slot is not None:
                    run.take_slot()
                    before = None
                elif order is not None:
                    listed.append(run)
                elif before is None or not before.join(run):
                    self.append(run)
                    before = run
            else:
                num_empty += count
                if events is not None and run.span is not None:
                    events.goes(run, run.start, run.end, is_dropped=True)
                if run.ids:
                    self.give_ids(run.ids)
                    run.ids = NO_IDS
                run.forget()
        if events is not None:
            events.flush()
        if order is not None and listed:
            self._list_in(order, listed, table.content.hints)
        if num_cached:
            self.note_cached(index, num_cached)
        if num_empty:
            self.note_empty(index, num_empty)

    def _list_in(self, order: EvictionOrder, runs: Sequence[PartRun], hints: Hints | None) -> None:
        """Let `order` list runs of one group, the deepest first, of a request with `hints`."""
        if self.reads_ranges and hints is not None and hints.retain:
            content = runs[0].content
            num_pages = max(runs[0].end, content.num_known_pages)
            self._list_parts(order, list(runs), hints.parts(content.page_size, num_pages))
            return
        stamp = 0 if self.shared is None else self.shared.tick()
        for run in runs:
            run.listed_by, run.stamp = order, stamp
        note = self.note_request
        if note is None:
            order.released(runs)
        else:
            note(hints, self.now_ns)
            order.released(runs)
            note(None, self.now_ns)

    def _list_parts(self, order: EvictionOrder, runs: list[PartRun], parts: Sequence[tuple[int, Hints]]) -> None:
        """List runs of one group part by part, the deepest first; `parts`: the first page and the hints of each."""
        for first, hints in reversed(parts):
            listed: list[PartRun] = []
            while runs and runs[0].end > first:
                run = runs[0]
                if run.start < first:
                    runs[0] = run.split(first)
                else:
                    del runs[0]
                listed.append(run)
            if listed:
                self._list_in(order, listed, hints)

    def release_all(self, table: RunTable, order: Sequence[int]) -> None:
        """End all holds of `table`, by group in `order`, the latest first."""
        for index in order:
            held = table.held[index]
            if held:
                table.held[index] = []
                held.reverse()
                self.release(index, held, table)


class RunEvents:
    """Emits the events of a RunCache. Consecutive runs are one event, emitted by `flush`.

    `medium`: the tier; `offset`: the index of that tier's first group among the lists of a span.
    """

    def __init__(self, emit: Emit, *, medium: str = "device", offset: int = 0) -> None:
        self.emit: Final = emit
        self._medium = medium
        self._offset = offset
        self._came: list[list[tuple[int, int, Content | None]]] = []
        """By group, runs that became findable: pages, and the content before the first of them."""
        self._copied: list[tuple[int, int, int, Content | None]] = []
        """Runs that have one more copy: the group, the pages, and the content before the first of them."""
        self._by: Content | None = None
        """The content with which they became findable."""
        # The last evicted pages, and the fields that they have in common with those before them.
        self._span: Span | None = None
        self._content: Content | None = None
        self._start = 0
        self._end = 0
        self._group = 0
        self._copy: int | None = None
        self._is_dropped = False

    def came(self, content: Content, group: int, span: Span, start: int, end: int) -> None:
        """Record that pages [start, end) of `span`, which `content` has, become findable in a group.

        Those that have a resident copy get one more. The pages of a group must be recorded in their order.
        """
        self._by = content
        position = start
        for first, stop in (*_uncovered(span.parts[self._offset + group], start, end), (end, end)):
            if position < first:
                self._copied.append((group, position, first, _content_before(span, position)))
            if first < stop:
                self.came_new(content, group, span, first, stop)
            position = stop

    def came_new(self, content: Content, group: int, span: Span, start: int, end: int) -> None:
        """Do the same for pages without a resident copy."""
        while len(self._came) <= group:
            self._came.append([])
        self._by = content
        runs = self._came[group]
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], end, runs[-1][2])
        else:
            runs.append((start, end, _content_before(span, start)))

    def goes(self, run: PartRun, start: int, end: int, *, is_dropped: bool) -> None:
        """Record that pages [start, end) of `run`, which is still findable, are evicted, the last one first."""
        span, group = run.span, run.group
        assert span is not None
        siblings = span.parts[self._offset + group]
        # The pages between two cuts have the same copies.
        cuts: set[int] | None = None
        for other in siblings:
            if other is not run and other.start < end and start < other.end:
                cuts = cuts or {start, end}
                cuts.update((max(start, other.start), min(end, other.end)))
        if cuts is None:
            self.goes_alone(run, span, start, end, None, is_dropped=is_dropped)
            return
        stops = sorted(cuts, reverse=True)
        for stop, first in pairwise(stops):
            copies = [other for other in siblings if other.start <= first and stop <= other.end]
            copy = None if len(copies) == 1 else copies.index(run)
            self.goes_alone(run, span, first, stop, copy, is_dropped=is_dropped)

    def given_back(self, content: Content, group: int, start: int, end: int) -> None:
        """Emit the release of pages [start, end) by a running request."""
        self.emit(PartsGivenBack(content, start, end, group))

    def filled(self, content: Content, groups: Sequence[int], page: int) -> None:
        """Emit the event that the parts of `page` of a decode, without copies, become findable in `groups`."""
        before = content if page else None
        for group in groups:
            self.emit(PagesStored(content, page, page + 1, before, self._medium, group))

    def flush(self) -> None:
        """Emit the events recorded since the last call, before anything else is emitted."""
        if self._span is not None:
            self._emit_gone()
        if self._by is None:
            return
        by, self._by = self._by, None
        for group, runs in enumerate(self._came):
            for start, end, before in runs:
                self.emit(PagesStored(by, start, end, before, self._medium, group))
            runs.clear()
        for group, start, end, before in self._copied:
            if self._medium == "device":
                self.emit(CopiesStored(by, start, end, before, group))
        self._copied.clear()

    def goes_alone(self, run: PartRun, span: Span, start: int, end: int, copy: int | None, *, is_dropped: bool) -> None:
        """Record the same for pages that all have the same copies: `copy` is the place of `run` among them, or None."""
        last, group = self._span, run.group
        follows = (
            last is not None and self._start == end and (last is span or (last.parent is span and last.start == end))
        )
        if not follows or (group, copy, is_dropped) != (self._group, self._copy, self._is_dropped):
            if last is not None:
                self._emit_gone()
            self._content, self._end = run.content, end
            self._group, self._copy, self._is_dropped = group, copy, is_dropped
        self._span, self._start = span, start

    def _emit_gone(self) -> None:
        assert self._content is not None
        run = self._content, self._start, self._end
        self._span = None
        if self._copy is None:
            self.emit(PagesRemoved(*run, self._medium, group=self._group, is_dropped=self._is_dropped))
        else:
            self.emit(CopiesRemoved(*run, self._copy, self._group, self._is_dropped))


def _content_before(span: Span, page: int) -> Content | None:
    """Return a content that has the page before `page` of `span`; None at the root."""
    if page > span.start:
        return span.content
    parent = span.parent
    return None if parent is None or parent.parent is None else parent.content


def _uncovered(runs: list[PartRun], start: int, end: int) -> list[tuple[int, int]]:
    """Return the pages of [start, end) that none of `runs` has, as runs in order."""
    left = [(start, end)]
    # A window leaves a run for each page that it passed, so few of many runs have any of these pages.
    for run in [run for run in runs if run.end > start and run.start < end]:
        parts: list[tuple[int, int]] = []
        for first, stop in left:
            if run.end <= first or stop <= run.start:
                parts.append((first, stop))
                continue
            if first < run.start:
                parts.append((first, run.start))
            if run.end < stop:
                parts.append((run.end, stop))
        left = parts
    return left

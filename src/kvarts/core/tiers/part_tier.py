"""A tier below a device with KV groups: it holds runs of parts in blocks of the device's block size.

Runs are found by the spans of pages that device and tiers share. In each group, a page has at most one part here,
stored or coming. Stored runs form one list, the least recently used first, and are evicted in that order, each from its
tail. A pinned run is not evicted, and an entry stands for it in its place (`EvictionSlot`): only stores and loads count
as uses. Runs that were used together are evicted in the order of their value to other sequences: first windows, chunks
and snapshots, which serve one end only; then groups that keep all tokens, the deepest page first. Storing or loading a
part makes all earlier parts in those groups more recent than itself, so the rest of a sequence is always a prefix of
it.

    used together:  full     [0 ........ 96)      listed, the least recent first:
                    window         [80 .. 96)     window [80, 96), full [0, 96)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from kvarts.core.content import Content
from kvarts.core.event_log import Emit
from kvarts.core.kv.account import MOST_UNCHECKED, RunAccount, RunEvents, Unchecked
from kvarts.core.kv.groups import GroupMemory
from kvarts.core.kv.pool import NO_IDS, IdPool, PageId, PageIds, are_all_once
from kvarts.core.kv.runs import EvictionSlot, PartRun, RunMatch, RunTable, Span, first_list, table_of_transfer
from kvarts.core.kv.span_tree import SpanTree, find
from kvarts.core.kv.transfer import Coming

__all__ = ["PLACE", "PartTier", "PartsElsewhere", "ReadableParts", "tree_elsewhere"]

ReadableParts = tuple[RunMatch, tuple[tuple[int, int, int, int], ...]]
"""A match with parts of another engine, and the runs of these, see Offer."""


class PartTier(RunAccount):
    """Owner of `num_blocks` blocks, and of their contents, parts of `memory`. `tree`: the tree of the cache above.

    `place`: the number of faster tiers. `with_slots`: blocks have ids, for an executor that copies into them. `emit`
    receives the events of runs that become findable or stop being findable. Transfers and offers pin runs: each is a
    holder of runs.
    """

    def __init__(
        self,
        name: str,
        num_blocks: int,
        memory: GroupMemory,
        tree: SpanTree,
        *,
        place: int = 0,
        with_slots: bool = False,
        emit: Emit | None = None,
    ) -> None:
        count = len(memory.groups)
        first = first_list(place, count)
        super().__init__(
            memory,
            total_bytes=num_blocks * memory.block_bytes,
            blocks=IdPool(num_blocks) if with_slots else None,
            events=None if emit is None else RunEvents(emit, medium=name, offset=first),
        )
        self.name = name
        self.num_refused = 0
        """Parts that were to be stored and found no room."""
        self.is_elsewhere = False
        """Whether the tree of its parts is not the tree of the cache above."""
        self.owner = -1
        """The number of the engine that has it, if others read from it."""
        self.guests: dict[RunTable, None] = {}
        """Pins of other engines, which read parts from here."""
        self.num_blocks = num_blocks
        self.tree = self._tree = tree
        self._here, self._coming = first, first + count
        """The first list of a span for stored runs, and for runs that are coming."""
        self.lists, self.lists_to_come = (first,), (first, first + count)
        """The first list for stored runs, and with it that for runs that are coming."""
        self._unchecked = Unchecked()
        self._num_unlisted = [0] * count
        """By group, cached parts that are not in the list."""
        self._less = [index for index, group in enumerate(self.groups) if group.is_state or group.is_bounded]
        self._whole = [index for index in range(count) if index not in self._less]
        self.order = (*self._less, *self._whole)
        """Groups in order of eviction."""

    @property
    def num_used_blocks(self) -> int:
        """Blocks of parts that are pinned or coming."""
        return self.used_bytes // self.block_bytes

    @property
    def num_cached_blocks(self) -> int:
        """Blocks of parts that can be found and are not pinned."""
        return self.cached_bytes // self.block_bytes

    @property
    def num_evicted_blocks(self) -> int:
        """Blocks of parts that were evicted to make room."""
        return self.evicted_bytes // self.block_bytes

    # Storing and removing ---------------------------------------------------------------------------------

    def gap(self, span: Span, index: int, start: int, end: int) -> tuple[int, int]:
        """Return the first stretch of pages [start, end) that a group has neither here nor coming; (end, end): none."""
        runs = span.parts[self._here + index] + span.parts[self._coming + index]
        is_found = True
        while is_found and start < end:
            is_found = False
            for run in runs:
                if run.start <= start < run.end:
                    start, is_found = run.end, True
        if start >= end:
            return end, end
        return start, min([end, *(run.start for run in runs if run.start > start)])

    def place(self, span: Span, index: int, start: int, end: int, pin: RunTable) -> PartRun:
        """Make room for pages [start, end) of a span, which are neither here nor coming, and fit. `settle` must follow.

        `pin` holds them.
        """
        self.take(index, end - start)
        ids = self._ids_for(span, index, start, end)
        run = PartRun(index, span, start, end, [pin], is_kept=True, ids=ids, list_index=self._coming + index)
        run.writer = self.owner
        span.parts[run.list_index].append(run)
        pin.held[index].append(run)
        return run

    def _ids_for(self, span: Span, index: int, start: int, end: int) -> PageIds:
        """Return the ids of blocks for pages [start, end) of `span`, which were counted as used."""
        return self.take_ids(index, end - start)

    def names(self, runs: Iterable[PartRun]) -> tuple[PageId | bytes, ...]:
        """Return what an executor calls the blocks of `runs`, in their order."""
        return tuple(block for run in runs for block in run.ids)

    def take_dropped(self) -> tuple[bytes, ...]:
        """Return the keys of files to delete since the last call."""
        return ()

    def settle(self, pin: RunTable, *, is_stored: bool) -> None:
        """End a store: the runs that `pin` holds become findable, or are dropped."""
        ends: list[PartRun] = []
        for index, runs in enumerate(pin.held):
            for run in runs:
                span = run.span
                if span is None:
                    continue  # the tier was reset meanwhile
                span.parts[run.list_index].remove(run)
                if is_stored:
                    if self.events is not None:
                        self.events.came(run.content, index, span, run.start, run.end)
                        self.events.flush()
                    run.list_index = self._here + index
                    run.is_wanted = True
                    span.parts[run.list_index].append(run)
                    if index in self._whole:
                        ends.append(run)
                else:
                    self._doom(run, span)
        used = [(run.span, run.group, run.end) for run in ends]
        self.release_all(pin, self.order)
        for span, index, end in used:
            if span is not None:
                self._touch(span, index, 0, end)

    def drop(self, pin: RunTable, ends: Sequence[int]) -> None:
        """Drop broken parts that `pin` holds: by group, from page `ends[index]` on.

        Their blocks are released with the last pin.
        """
        for index, held in enumerate(pin.held):
            for run in tuple(held):
                span = run.span
                if span is not None and run.end > ends[index]:
                    if run.start < ends[index]:
                        run.split(ends[index])
                    self._emit_gone(run)
                    span.parts[run.list_index].remove(run)
                    self._doom(run, span)

    def _emit_gone(self, run: PartRun) -> None:
        """Emit the drop of a run, which is not an eviction."""
        if self.events is not None and run.list_index < self._coming:
            self.events.goes(run, run.start, run.end, is_dropped=True)
            self.events.flush()

    def _doom(self, run: PartRun, span: Span) -> None:
        """Release a pinned run, which must be unlisted from its span, when its last pin ends."""
        run.is_kept = False
        run.span = None
        if run.slot is not None:
            run.leave_slot()
        if not (span.num_users or span.children):
            span.prune()

    def reset(self) -> None:
        """Drop all parts. Pinned and coming parts cannot be found again, and are released when that ends."""
        for span in list(self._tree.every()):
            self._drop(span, span.start, span.end)

    def drop_from(self, content: Content, page: int) -> None:
        """Drop all parts of `content` from `page` on, which no other content has."""
        spans, end = self._tree.walk(content, 1 << 62)
        for span in reversed(spans) if page < end else ():
            self._drop(span, page, end)

    def drop_state(self, content: Content, page: int) -> None:
        """Drop the snapshots before `page` of `content`."""
        spans, num_pages = self._tree.walk(content, page)
        if num_pages == page:
            self._drop(spans[-1], page - 1, page, of_states=True)

    def _drop(self, span: Span, start: int, end: int, *, of_states: bool = False) -> None:
        """Drop pages [start, end) of a span; with `of_states`, only snapshots."""
        for runs in span.parts[self._here : self._here + 2 * len(self.groups)]:
            for each in tuple(runs):
                if each.end <= start or each.start >= end or (of_states and not self.groups[each.group].is_state):
                    continue
                run = each.cut(max(start, each.start), min(end, each.end))
                if run.holders:
                    self._emit_gone(run)
                    runs.remove(run)
                    self._doom(run, span)
                else:
                    self._empty(run)

    def _empty(self, run: PartRun) -> None:
        """Drop a run that is not pinned."""
        self._emit_gone(run)
        count = run.end - run.start
        run.unlist()
        self.note_used(run.group, count)
        self.note_empty(run.group, count)
        self.give_ids(run.ids)
        run.ids = NO_IDS
        run.forget()

    def evict_first(self, content: Content, index: int, start: int, end: int) -> None:
        """Make pages [start, end) of a group, which the device has again, the next evictions, but for pinned ones.

        The last to come are evicted first: the device evicts them last, and then they need not be stored again. Parts
        of groups that do not keep all tokens stay: the device drops them as soon as its request has passed them.
        """
        for span in self._tree.walk(content, end)[0] if index in self._whole else ():
            for run, first, last in self.stored(span, index, start, end) if span.end > start else ():
                if not run.holders:
                    self.move_first(run.cut(first, last))

    def evict_last(self, span: Span, index: int, start: int, end: int) -> None:
        """Make pages [start, end) of a group, which the device will lose, the most recently used.

        In groups that keep all tokens, all pages before them are more recent.
        """
        self._touch(span, index, 0 if index in self._whole else start, end)

    # Use --------------------------------------------------------------------------------------------------

    def recognise(self, content: Content, limit: int) -> None:
        """Make the parts of the first `limit` pages of `content` that an earlier process stored here findable.

        This may split spans, so no match may be in use.
        """

    def stored(self, span: Span, index: int, start: int, end: int) -> list[tuple[PartRun, int, int]]:
        """Return the stored runs of a group that have pages of [start, end) of `span`, with these pages."""
        found: list[tuple[PartRun, int, int]] = []
        find(span.parts[self._here + index], max(start, span.start), min(end, span.end), found)
        return found

    def match(self, tree: SpanTree, content: Content, limit: int, depth: int) -> RunMatch:
        """Return how far every group can resume with parts of a device, of its first `depth` tiers, and from here.

        `tree`: that of the device. The tier is below these, and its parts are in another tree.
        """
        raise NotImplementedError

    def match_coming(self, tree: SpanTree, content: Content, limit: int, depth: int) -> RunMatch:
        """Return the same match if parts that other engines are storing were here."""
        raise NotImplementedError

    def has(self, run: PartRun) -> bool:
        """Return whether a run, which a match has found, is here."""
        return run.list_index == self._here + run.group and (self.owner < 0 or run.writer == self.owner)

    def pin(self, pieces: list[list[tuple[PartRun, int, int]]]) -> RunTable:
        """Pin the tier's runs in `pieces`, see RunMatch; they keep their places in the list. `unpin` must follow."""
        pin = table_of_transfer(len(self.groups))
        for of_group in pieces:
            for run, start, end in of_group:
                if self.has(run):
                    self.hold_in_place(run.cut(start, end), pin)
        return pin

    def begin_load(self, pin: RunTable) -> None:
        """Note that the runs of `pin` are being loaded."""

    def end_load(self, pin: RunTable, content: Content, num_pages: int) -> None:
        """End the pin of a load, which is a use of all parts here of the first `num_pages` pages of `content`."""
        self.unpin(pin)
        self.touch(content, num_pages)

    @property
    def is_awaited(self) -> bool:
        """Whether another engine is storing something here."""
        return False

    def elsewhere(self, tree: SpanTree, content: Content, limit: int, depth: int) -> ReadableParts | None:
        """Return a match of `tree` with parts of another engine, and the runs of these; None: they are not here."""
        return None

    def coming(self, match: RunMatch, start: int, now_ns: int) -> Coming | None:
        """Return the pages of `match` from `start` on, some of which other engines are storing; None: none of them."""
        return None

    def await_write(self, write: int) -> None:
        """Never called, as no other engine stores here."""
        raise NotImplementedError

    def num_pinned(self, pin: RunTable) -> int:
        """Return the blocks of the runs that `pin` holds."""
        blocks = self.part_blocks
        return sum((run.end - run.start) * blocks[group] for group, runs in enumerate(pin.held) for run in runs)

    def unpin(self, pin: RunTable) -> None:
        """End a pin. It is not a use of its runs."""
        self.release_all(pin, self.order)

    def unpin_before(self, pin: RunTable, page: int) -> None:
        """End a pin of all parts before `page`."""
        passed = table_of_transfer(len(self.groups))
        for index, held in enumerate(pin.held):
            for run in tuple(held):
                if run.start >= page:
                    continue
                before = run if run.end <= page else run.split(page)
                held.remove(before)
                before.holders[before.holders.index(pin)] = passed
                passed.held[index].append(before)
        self.unpin(passed)

    def touch(self, content: Content, num_pages: int) -> None:
        """Make the tier's parts that a sequence of the first `num_pages` pages of `content` needs the most recent."""
        spans, end = self._tree.walk(content, num_pages)
        for index in self.order if spans else ():
            sink, first = self._tree.needed(index, num_pages * self._tree.page_size)
            if first < end:
                self._touch(spans[-1], index, first, end)
            if sink:
                self._touch(spans[-1], index, 0, min(sink, end))

    def _touch(self, span: Span | None, index: int, start: int, end: int) -> None:
        """Make pages [start, end) of a group, in `span` and before it, the most recently used, the deepest least so.

        There may be none: a window may begin behind the pages that are known.
        """
        if start >= end:
            return
        place = self._here + index
        before: PartRun | None = None
        while span is not None and span.end > start:
            for run in sorted(span.parts[place], key=_from_end):
                if run.start >= end or run.end <= start:
                    continue
                used = run.cut(max(start, run.start), min(end, run.end))
                used.is_wanted = True
                if used.holders:
                    slot = used.slot
                    assert slot is not None, "a pinned part has no place"
                    slot.unlist()
                    self.append(slot)
                    before = None
                    continue
                used.unlist()
                if before is None or not before.join(used):
                    self.append(used)
                    before = used
            span = span.parent

    # Laws -------------------------------------------------------------------------------------------------

    def listed(self) -> Iterator[PartRun]:
        """Return the runs that can be found and are not pinned, the least recently used first."""
        for entry in self.entries():
            if not isinstance(entry, EvictionSlot):
                assert isinstance(entry, PartRun)
                yield entry

    def is_check_due(self, *, at_rest: bool) -> bool:
        """Return whether a sixteenth of all parts has moved since every part was last examined, or nothing runs."""
        num_allowed = 0 if at_rest else (self.total_bytes - self.empty_bytes) // MOST_UNCHECKED
        return self._unchecked.is_due(self.moved_bytes, num_allowed)

    def check(self, pins: Sequence[RunTable]) -> None:
        """Assert laws L1 and L2. `pins`: the block tables of transfers and offers of the engine that has it."""
        held: dict[int, int] = {}
        used, cached = [0] * len(self.groups), self._num_unlisted.copy()
        blocks = self.blocks if self.is_id_check_due() else None
        ids = [] if blocks is None else [blocks.empty, *self._unlisted_ids()]
        for pin in (*pins, *self.guests):
            for runs in pin.held:
                for run in runs:
                    held[id(run)] = held.get(id(run), 0) + 1
                    assert pin in run.holders, "L2: a part below is pinned, and does not say so"
                    if held[id(run)] == 1:
                        used[run.group] += run.end - run.start
                        if blocks is not None:
                            ids.append(run.ids)
        for run in self.listed():
            assert not run.holders, "L2: a cached part below is pinned"
            assert run.span is not None and run in run.span.parts[run.list_index], (
                "L1: a cached part below is not found"
            )
            cached[run.group] += run.end - run.start
            if blocks is not None:
                ids.append(run.ids)
        for span in self._tree.every():
            for index in range(len(self.groups)):
                runs = span.parts[self._here + index] + span.parts[self._coming + index]
                for run in runs:
                    assert run.span is span and len(run.holders) == held.get(id(run), 0), "L2: a part is held by others"
                    assert span.start <= run.start < run.end <= span.end, "L1: a part below is not of its span"
                for run, after in pairwise(sorted(runs, key=_from_end)):
                    assert after.end <= run.start, "L1: a part is below twice"
        assert used == self.num_used, f"L1: {used} parts used below, counted {self.num_used}"
        assert cached == self.num_cached, f"L1: {cached} parts cached below, counted {self.num_cached}"
        num_bytes = sum(map(int.__mul__, used, self.part_bytes)) + sum(map(int.__mul__, cached, self.part_bytes))
        assert num_bytes + self.empty_bytes == self.total_bytes, "L1: bytes below are lost"
        if blocks is not None:
            assert are_all_once(ids, self.num_blocks), "L1: a block below has two owners"

    def _unlisted_ids(self) -> Iterable[PageIds]:
        """Return the ids of cached blocks that are not in the list."""
        return []


def _from_end(run: PartRun) -> int:
    return -run.start


PLACE = 2
"""The number of tiers that an engine may have above parts elsewhere, unless more are said."""


def tree_elsewhere(memory: GroupMemory, page_size: int, place: int = PLACE) -> SpanTree:
    """Return a tree for parts of `memory` that no device has, below `place` tiers."""
    return SpanTree(memory, page_size, _never_moving, num_below=place + 1)


class PartsElsewhere(PartTier):
    """Parts in a tree that is not that of the device: they outlive the engine, or are of others.

    `place`: at least the number of tiers of an engine, so that no run of these is in a list of their index.
    """

    def __init__(self, name: str, num_blocks: int, memory: GroupMemory, tree: SpanTree, place: int = PLACE) -> None:
        super().__init__(name, num_blocks, memory, tree, place=place)
        self.is_elsewhere = True

    def reset(self) -> None:
        """Do nothing: they stay if an engine that reads them fails."""


def _never_moving(span: Span) -> None:
    raise AssertionError("a decode has parts on its device only")

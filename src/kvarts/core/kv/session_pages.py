"""The pages of bounded sessions: their page tables, a check of these, and the engine's memory for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from itertools import chain, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarts.core.kv.cache import PageReserve
from kvarts.core.kv.groups import (
    GroupKeeps,
    GroupMemory,
    HeavyPages,
    PageTable,
    SinkWindow,
    most_blocks,
    retained_by_group,
)
from kvarts.core.kv.pool import PageId

__all__ = [
    "ChunkRoom",
    "HeavyTable",
    "Retained",
    "SessionMemory",
    "SessionPageTable",
    "SessionPages",
    "TableLayout",
]

TableLayout = tuple[int, int, int]
"""A page table between steps: number of its pages, of pages dropped after the sink, and of pages of the sink."""
SEES_ALL = 1 << 40
"""A window that is never passed. The window of a sequence that retains all tokens is another number."""

Scores = npt.NDArray[np.float64]


Retained = SinkWindow | HeavyPages | GroupKeeps
"""What a sequence retains in the layers of a page table."""


class ChunkRoom:
    """The pages that chunks of sessions may hold within one step, beyond those that sessions hold between steps.

    A page of tokens takes one page or, for a model with KV groups, one block per page table.
    """

    def __init__(self, num_pages: int, page_size: int, num_tables: int = 1) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._num_tables = num_tables
        self.num_used = 0
        """Pages in use in the current step."""

    @property
    def most_tokens(self) -> int:
        """Return how many tokens certainly fit now. At least 1: a single token never needs these pages."""
        return max(1, (self.num_pages - self.num_used) // self._num_tables * self.page_size)


class SessionPageTable:
    """The page tables of a session in one KV group, with page ids from `reserve`: `num_blocks` tables, which differ in
    their ids only. A page is taken and released in all of them as one.

    The reserve contains `retained.most_pages` pages for each, in addition to those of `room`.
    """

    def __init__(self, retained: Retained, reserve: PageReserve, room: ChunkRoom, num_blocks: int = 1) -> None:
        self.retained = retained
        """The tokens retained by the layers that use the table."""
        self.num_blocks = num_blocks
        """Number of tables: the blocks of a page."""
        self.num_dropped = 0
        """Number of pages dropped so far after those of the sink."""
        self._reserve = reserve
        self._room = room
        self._page_size = room.page_size
        self._most_pages = retained.most_pages(room.page_size)
        self.num_sink_pages = retained.num_sink_pages(room.page_size)
        """Number of its first pages, which stay when later ones are dropped."""
        self._page_ids: list[PageId] = []
        """Its pages in order of position, each by the id of its first block."""
        self._copies: list[tuple[PageId, PageId]] = []
        self._num_borrowed = 0
        """Number of its pages in the current step that are from `room`."""

    @property
    def num_pages(self) -> int:
        """The number of pages that it holds."""
        return len(self._page_ids)

    @property
    def named(self) -> Sequence[Sequence[PageId]]:
        """The ids that page tables of plans have, a sequence for each table, by GroupMemory.part_tables."""
        return (self._page_ids,) if self.retained.is_state else self.by_block

    @property
    def by_block(self) -> Sequence[Sequence[PageId]]:
        """The ids of the pages that it holds, in order of position: a sequence for each block of a page."""
        if self.num_blocks == 1:
            return (self._page_ids,)
        taken = [self._reserve.taken_with(page_id) for page_id in self._page_ids]
        return [self._page_ids, *([others[place] for others in taken] for place in range(self.num_blocks - 1))]

    def page_numbers(self) -> npt.NDArray[np.int64]:
        """Return the numbers of the pages that it holds, in the history."""
        places = np.arange(len(self._page_ids))
        return places + np.where(places < self.num_sink_pages, 0, self.num_dropped)

    def seen(self, rotates_late: bool) -> SinkWindow:
        """Return the tokens that layers see from here on, by their places in the table."""
        return SinkWindow(self.retained.sink if self.num_sink_pages else 0, self.retained.window, rotates_late)

    def observe(self, start: int, end: int, scores: npt.NDArray[np.float32]) -> None:
        """Ignore scores: which pages stay depends on positions only."""

    def most_tokens(self, start: int, num_tokens: int) -> int:
        """Return how many of `num_tokens` tokens from `start` on may be computed in one step."""
        return num_tokens

    def settle(self, position: int) -> bool:
        """Drop pages that no token at `position` or later can see; return whether there were any."""
        has_dropped = self._drop(position)
        if self._num_borrowed:
            num_borrowed = max(0, len(self._page_ids) - self._most_pages)
            self._room.num_used -= (self._num_borrowed - num_borrowed) * self.num_blocks
            self._num_borrowed = num_borrowed
        return has_dropped

    def _drop(self, position: int) -> bool:
        num_sink_pages = self._num_sink_pages(position)
        loses_sink = num_sink_pages < self.num_sink_pages
        if loses_sink:
            self._drop_sink(num_sink_pages)
        first = self.num_sink_pages
        num_dropped = self.retained.first_seen(position) // self._page_size - first - self.num_dropped
        if num_dropped > 0:
            for page_id in self._page_ids[first : first + num_dropped]:
                self._reserve.release(page_id)
            del self._page_ids[first : first + num_dropped]
            self.num_dropped += num_dropped
        return loses_sink or num_dropped > 0

    def _num_sink_pages(self, position: int) -> int:
        """Return the number of pages with tokens of the sink that are kept for the token at `position`."""
        return -(-self.retained.sink_seen(position) // self._page_size)

    def _drop_sink(self, num_pages: int) -> None:
        """Treat the pages of the sink like all others, except the first `num_pages`: drop those before the window."""
        if self.num_dropped:
            for page_id in self._page_ids[num_pages : self.num_sink_pages]:
                self._reserve.release(page_id)
            del self._page_ids[num_pages : self.num_sink_pages]
            self.num_dropped += self.num_sink_pages - num_pages
        self.num_sink_pages = num_pages

    def grow(self, start: int, end: int) -> bool:
        """Make tokens [start, end) writable; return whether that took a page.

        A page shared with a fork that contains some of these tokens is copied first.
        """
        page_ids, reserve, size = self._page_ids, self._reserve, self._page_size
        took = False
        for place in range(start // size - self.num_dropped, len(page_ids)):
            shared = page_ids[place]
            if reserve.is_shared(shared):
                page_ids[place] = own = reserve.take(self.num_blocks)
                reserve.release(shared)
                self._copies.append((shared, own))
                self._copies += zip(reserve.taken_with(shared), reserve.taken_with(own), strict=True)
                took = True
        for _ in range(-(-end // size) - self.num_dropped - len(page_ids)):
            page_ids.append(reserve.take(self.num_blocks))
            took = True
        num_over = len(page_ids) - self._most_pages - self._num_borrowed
        if num_over > 0:
            self._room.num_used += num_over * self.num_blocks
            self._num_borrowed += num_over
            assert self._room.num_used <= self._room.num_pages, "a chunk took more pages than there are for chunks"
        return took

    def take_copies(self) -> Sequence[tuple[PageId, PageId]]:
        """Return the pages to copy, and clear the list."""
        copies, self._copies = self._copies, []
        return copies

    def can_shorten(self, num_tokens: int) -> bool:
        """Return whether everything is present that the last of the first `num_tokens` tokens can see.

        That token is computed again before the next one is sampled.
        """
        if not self.num_dropped or num_tokens <= self.num_sink_pages * self._page_size:
            return True
        last = num_tokens - 1
        has_sink = self.num_sink_pages >= self._num_sink_pages(last)
        gone = (self.num_sink_pages + self.num_dropped) * self._page_size
        return has_sink and self.retained.first_seen(last) >= gone

    def shorten(self, num_tokens: int) -> None:
        """Release pages beyond the first `num_tokens` tokens, between steps."""
        if num_tokens <= self.num_sink_pages * self._page_size:
            self.num_dropped = 0  # pages after the dropped ones are released too
        num_pages = -(-num_tokens // self._page_size) - self.num_dropped
        for page_id in self._page_ids[num_pages:]:
            self._reserve.release(page_id)
        del self._page_ids[num_pages:]
        if not self.num_dropped:  # an earlier token may see more of the sink again
            self.num_sink_pages = self.retained.num_sink_pages(self._page_size)

    def fork(self) -> SessionPageTable:
        """Return a table that shares these pages, between steps."""
        other = copy(self)
        other._share(self)
        return other

    def _share(self, other: SessionPageTable) -> None:
        """Share the pages of `other`, of which this is a copy."""
        self._page_ids = list(other._page_ids)
        self._copies = []
        self._num_borrowed = 0
        for page_id in self._page_ids:
            self._reserve.share(page_id)

    def layout(self) -> TableLayout:
        """Return the layout of the pages, for `restore`."""
        return len(self._page_ids), self.num_dropped, self.num_sink_pages

    def restore(self, layout: TableLayout) -> None:
        """Take pages for KV that was saved elsewhere. The table must be empty."""
        assert not self._page_ids
        num_pages, self.num_dropped, self.num_sink_pages = layout
        self._page_ids = [self._reserve.take(self.num_blocks) for _ in range(num_pages)]

    def release(self) -> None:
        """Release all pages, between steps; nothing is computed then."""
        for page_id in self._page_ids:
            self._reserve.release(page_id)
        self._page_ids = []
        self.num_dropped = 0
        self.num_sink_pages = self.retained.num_sink_pages(self._page_size)


class SessionState:
    """The state of a session in layers that have one: `num_blocks` blocks from `reserve`, which has as many for it.

    It is written in place, and is that after the tokens that are computed: it never goes back.
    """

    def __init__(self, num_blocks: int, reserve: PageReserve) -> None:
        self._num_blocks = num_blocks
        self._reserve = reserve
        self.page_ids: list[PageId] = []
        """Its blocks; none before the first token."""
        self._copies: list[tuple[PageId, PageId]] = []

    def grow(self) -> bool:
        """Make it writable, after a copy if it is shared with a fork; return whether that took blocks."""
        before, reserve = self.page_ids, self._reserve
        if before and not reserve.is_shared(before[0]):
            return False
        self.page_ids = [reserve.take() for _ in range(self._num_blocks)]
        for page_id, other in zip(before, self.page_ids, strict=False):
            reserve.release(page_id)
            self._copies.append((page_id, other))
        return self._num_blocks > 0

    def take_copies(self) -> Sequence[tuple[PageId, PageId]]:
        """Return the blocks to copy, and clear the list."""
        copies, self._copies = self._copies, []
        return copies

    def fork(self) -> SessionState:
        """Return a state that shares these blocks, between steps."""
        other = SessionState(self._num_blocks, self._reserve)
        other.page_ids = list(self.page_ids)
        for page_id in other.page_ids:
            self._reserve.share(page_id)
        return other

    def restore(self, num_blocks: int) -> None:
        """Take blocks for a state that was saved elsewhere. It must be empty."""
        assert not self.page_ids
        self.page_ids = [self._reserve.take() for _ in range(num_blocks)]

    def release(self) -> None:
        """Release all blocks, between steps."""
        for page_id in self.page_ids:
            self._reserve.release(page_id)
        self.page_ids = []


class SessionPages:
    """PagesOfSession with a sink and a window. Methods other than those of PagesOfSession are called between steps.

    `retained`: of each KV group, the tokens retained by its page tables, and their number, the blocks of a page; by
    default, a single table that retains the same as the session. `make_table`: makes the tables of a group.
    `num_state_blocks`: the blocks of the state of a model with states.
    """

    def __init__(
        self,
        keeps: SinkWindow,
        reserve: PageReserve,
        room: ChunkRoom,
        retained: Sequence[tuple[Retained, int]] | None = None,
        make_table: Callable[[Any, PageReserve, ChunkRoom, int], SessionPageTable] = SessionPageTable,
        num_state_blocks: int = 0,
    ) -> None:
        self.keeps = keeps
        groups = ((keeps, 1),) if retained is None else retained
        self.tables = [make_table(one, reserve, room, num_blocks) for one, num_blocks in groups]
        self.places = set().union(*(table.retained.places(room.page_size) for table in self.tables))
        """The offsets in a page at which a token no longer needs a page that the previous token needed."""
        self.has_state = num_state_blocks > 0
        """Whether layers have a state, so that no token can be computed again."""
        self._state = SessionState(num_state_blocks, reserve)
        self._room = room
        self.most_held = 0
        """The most pages held so far, including within steps."""

    @property
    def page_ids(self) -> Sequence[PageId]:
        """The pages that it holds, table by table, and the blocks of its state."""
        page_ids = [page_id for table in self.tables for block in table.by_block for page_id in block]
        return page_ids + self._state.page_ids if self.has_state else page_ids

    @property
    def state(self) -> tuple[PageId, ...]:
        """The blocks of its state; empty without one, and before the first token."""
        return tuple(self._state.page_ids)

    @property
    def page_tables(self) -> tuple[PageTable, ...]:
        """The page tables, for the rows of an executor."""
        late = self.keeps.rotates_late
        return tuple(
            PageTable(
                tuple(block),
                table.num_dropped,
                table.num_sink_pages,
                table.seen(late),
            )
            for table in self.tables
            for block in table.named
        )

    def settle(self, position: int) -> bool:
        """Drop pages that no token at `position` or later can see; return whether there were any."""
        dropped = False
        for table in self.tables:
            dropped |= table.settle(position)
        return dropped

    def most_tokens(self, start: int, num_tokens: int) -> int:
        """Return how many of `num_tokens` tokens may be computed in this step."""
        return min(self._room.most_tokens, *(table.most_tokens(start, num_tokens) for table in self.tables))

    def observe(self, start: int, end: int, scores: npt.NDArray[np.float32]) -> None:
        """Add the attention that tokens [start, end) gave to each of the pages."""
        for table in self.tables:
            table.observe(start, end, scores)

    def grow(self, start: int, end: int) -> bool:
        """Make tokens [start, end) writable in every table; return whether that took a page."""
        took = False
        for table in self.tables:
            took |= table.grow(start, end)
        if self.has_state:
            took |= self._state.grow()
        if took:
            self._note_held()
        return took

    def take_copies(self) -> Sequence[tuple[PageId, PageId]]:
        """Return the pages to copy, and clear the list."""
        copies = [copied for table in self.tables for copied in table.take_copies()]
        return [*copies, *self._state.take_copies()]

    def can_shorten(self, num_tokens: int) -> bool:
        """Return whether everything is present that the last of the first `num_tokens` tokens can see.

        With a state it need not be: `shorten` lets all be computed again.
        """
        return self.has_state or all(table.can_shorten(num_tokens) for table in self.tables)

    def shorten(self, num_tokens: int, num_computed: int) -> int:
        """Release pages beyond the first `num_tokens` tokens, of which `num_computed` are computed or more.

        Return how many of them are still computed: none if that needs an earlier state, since it is made again from the
        first token on.
        """
        if self.has_state and num_computed >= num_tokens:
            self.release()
            return 0
        num_computed = min(num_computed, num_tokens)
        for table in self.tables:
            table.shorten(num_computed)
        return num_computed

    def fork(self) -> SessionPages:
        """Return pages shared with these."""
        other = copy(self)
        other.tables = [table.fork() for table in self.tables]
        other._state = self._state.fork()
        other.most_held = 0
        other._note_held()
        return other

    def layout(self) -> tuple[TableLayout, ...]:
        """Return the layout of the pages, table by table, and of a state as if it were one, for `restore`."""
        tables = tuple(chain.from_iterable(repeat(table.layout(), table.num_blocks) for table in self.tables))
        return (*tables, (len(self._state.page_ids), 0, 0)) if self.has_state else tables

    def restore(self, layout: Sequence[TableLayout]) -> Sequence[PageId]:
        """Take pages for KV that was saved elsewhere, and return them, table by table. All tables must be empty."""
        first = 0
        for table in self.tables:
            table.restore(layout[first])
            first += table.num_blocks
        assert first + self.has_state == len(layout), "the layout is of another model"
        if self.has_state:
            self._state.restore(layout[-1][0])
        self._note_held()
        return self.page_ids

    def release(self) -> None:
        """Release all pages; nothing is computed then."""
        for table in self.tables:
            table.release()
        self._state.release()

    def _note_held(self) -> None:
        num_held = sum(table.num_pages * table.num_blocks for table in self.tables) + len(self._state.page_ids)
        if num_held > self.most_held:
            self.most_held = num_held


class HeavyTable(SessionPageTable):
    """A SessionPageTable whose first pages are those of the sink, then those that were chosen, with gaps between them.

    Owner of the scores of its pages, and of the position of the last decision.
    """

    def __init__(self, keeps: HeavyPages, reserve: PageReserve, room: ChunkRoom, num_blocks: int = 1) -> None:
        super().__init__(keeps, reserve, room, num_blocks)
        self._keeps = keeps
        self._front = list(range(self.num_sink_pages))
        """The numbers of its first `num_sink_pages` pages; those after them have consecutive numbers."""
        self._decided = 0
        """The position of the last decision."""
        self._scores: Scores = np.zeros(0)
        """The score of each page at that time; later pages have none yet."""
        self._since: list[tuple[int, Scores]] = []
        """What pages received since then, step by step: the position after its tokens, and the scores."""

    def page_numbers(self) -> npt.NDArray[np.int64]:
        """Return the numbers of the pages that it holds, in the history."""
        later = np.arange(len(self._front), len(self._page_ids)) + self.num_dropped
        return np.concatenate((self._front[: len(self._page_ids)], later)).astype(np.int64)

    def scores(self) -> Scores:
        """Return the scores of the pages that it holds."""
        total = np.zeros(len(self._page_ids))
        for scores in (self._scores, *(scores for _, scores in self._since)):
            total[: len(scores)] += scores[: len(total)]
        return total

    def seen(self, rotates_late: bool) -> SinkWindow:
        """Return the tokens that layers see: all that are before them in the table."""
        return SinkWindow(len(self._front) * self._page_size, SEES_ALL, rotates_late)

    def observe(self, start: int, end: int, scores: npt.NDArray[np.float32]) -> None:
        """Add the scores that pages received from tokens [start, end), unless these were computed before."""
        if start >= (self._since[-1][0] if self._since else self._decided):
            self._since.append((end, scores.astype(np.float64)))

    def most_tokens(self, start: int, num_tokens: int) -> int:
        """Return how many of `num_tokens` tokens may be computed before the next decision."""
        return min(num_tokens, self._keeps.num_until_decision(start))

    def _drop(self, position: int) -> bool:
        """Decide which pages stay, if that is due before the token at `position`; return whether any was dropped."""
        decided = self._keeps.decided_at(position)
        if decided <= self._decided:
            return False
        self._decided = decided
        numbers, scores = self.page_numbers(), self.scores()
        num_sink = self._keeps.num_sink_pages(self._page_size)
        num_passed = int(np.count_nonzero(numbers < self._keeps.first_seen(position) // self._page_size))
        stays = [*range(min(num_sink, len(numbers)))]
        if num_passed > num_sink:
            stays += [num_sink + place for place in self._keeps.choose(scores[num_sink:num_passed].tolist())]
            self._front = numbers[stays].tolist()
            self.num_sink_pages = len(stays)
        num_passed = max(num_passed, len(stays))
        gone = sorted({*range(num_passed)} - {*stays})
        for place in gone:
            self._reserve.release(self._page_ids[place])
        self._page_ids = [page_id for place, page_id in enumerate(self._page_ids) if place not in gone]
        self.num_dropped += len(gone)
        self._scores = np.delete(scores, gone) if self._keeps.scoring.adds_up else np.zeros(0)
        self._since = []
        return bool(gone)

    def can_shorten(self, num_tokens: int) -> bool:
        """Return whether no decision was made since the last of the first `num_tokens` tokens was computed."""
        return self._keeps.decided_at(max(0, num_tokens - 1)) == self._decided

    def shorten(self, num_tokens: int) -> None:
        """Release pages beyond the first `num_tokens` tokens; scores of steps that computed later tokens are lost."""
        num_pages = -(-num_tokens // self._page_size) - self.num_dropped
        for page_id in self._page_ids[num_pages:]:
            self._reserve.release(page_id)
        del self._page_ids[num_pages:]
        self._since = [(end, scores) for end, scores in self._since if end <= num_tokens]

    def fork(self) -> HeavyTable:
        """Return a table that shares these pages, between steps."""
        other = copy(self)
        other._share(self)
        other._front, other._since = list(self._front), list(self._since)
        return other

    def release(self) -> None:
        """Release all pages, between steps; nothing is computed then."""
        super().release()
        self._front = list(range(self.num_sink_pages))
        self._decided, self._scores, self._since = 0, np.zeros(0), []


class SessionMemory:
    """Memory needs of sessions on an engine with `total` pages. With `groups`, all counts are in blocks instead."""

    def __init__(self, total: int, page_size: int, groups: GroupMemory | None = None) -> None:
        self.total = total
        self.page_size = page_size
        self.unit = "pages" if groups is None else "blocks"
        """The name of the unit of counts."""
        self._groups = groups
        self._page_blocks = 1 if groups is None else groups.page_bytes // groups.block_bytes

    def most_tokens(self, count: int) -> int:
        """Return the number of tokens of chunks that fit in `count` of them, in whole pages."""
        return count // self._page_blocks * self.page_size

    def most_pages(self, keeps: SinkWindow) -> int:
        """Return the most that a session holds between steps."""
        if self._groups is None:
            return keeps.most_pages(self.page_size)
        return most_blocks(self._groups, keeps, self.page_size)

    def room(self, num_tokens: int) -> ChunkRoom:
        """Return the room for chunks of `num_tokens` tokens."""
        num_pages = -(-num_tokens // self.page_size)
        return ChunkRoom(num_pages * self._page_blocks, self.page_size, self._page_blocks)

    def open(self, keeps: SinkWindow, reserve: PageReserve, room: ChunkRoom) -> SessionPages:
        """Return an empty set of pages for a session."""
        groups = self._groups
        make_table = HeavyTable if keeps.is_scored else SessionPageTable  # all layers have one table for what is scored
        if groups is None:
            return SessionPages(keeps, reserve, room, make_table=make_table)
        retained = None if keeps.is_scored else retained_by_group(groups, keeps)
        return SessionPages(keeps, reserve, room, retained, make_table, groups.num_state_blocks)

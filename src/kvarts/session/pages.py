"""The pages of one bounded session: one page table for each block of a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Protocol

from kvarts.kv.pool import PageId
from kvarts.kv.reserve import PageReserve
from kvarts.kv.sink_window import PageTable, SinkWindow

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["ChunkRoom", "Retained", "SessionPageTable", "SessionPages", "TableLayout"]

TableLayout = tuple[int, int, int]
"""A page table between steps: number of its pages, of pages dropped after the sink, and of pages of the sink."""


class Retained(Protocol):
    """What a sequence retains in the layers of a page table. Implemented by SinkWindow and GroupKeeps."""

    @property
    def sink(self) -> int:
        """Number of first tokens that are kept separately from the last ones."""

    @property
    def window(self) -> int:
        """The largest number of preceding tokens that a token attends to, besides the sink."""

    def first_seen(self, position: int) -> int:
        """Return the first position after the sink that the token at `position` attends to."""

    def sink_seen(self, position: int) -> int:
        """Return how many tokens of the sink are kept for the token at `position` and later ones."""

    def sees(self, positions: Any, num_tokens: int) -> Any:
        """Return, elementwise, whether a token after the first `num_tokens` can see `positions` of held pages."""

    def num_retained(self, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens are kept for later ones."""

    def num_sink_pages(self, page_size: int) -> int:
        """Return the number of pages that hold the sink."""

    def num_dropped(self, position: int, page_size: int) -> int:
        """Return how many pages after the sink no token at `position` or later can see."""

    def places(self, page_size: int) -> set[int]:
        """Return the offsets in a page at which a token no longer needs a page that the previous token needed."""

    def most_pages(self, page_size: int) -> int:
        """Return the most pages that a sequence holds between steps."""


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
    """One page table of a session, with page ids from `reserve`.

    The reserve contains `retained.most_pages` pages for it, in addition to those of `room`.
    """

    def __init__(self, retained: Retained, reserve: PageReserve, room: ChunkRoom) -> None:
        self.retained = retained
        """The tokens retained by the layers that use the table."""
        self.num_dropped = 0
        """Number of pages dropped so far after those of the sink."""
        self._reserve = reserve
        self._room = room
        self._page_size = room.page_size
        self._most_pages = retained.most_pages(room.page_size)
        self.num_sink_pages = retained.num_sink_pages(room.page_size)
        """Number of its first pages, which stay when later ones are dropped."""
        self._page_ids: list[PageId] = []
        self._copies: list[tuple[PageId, PageId]] = []
        self._num_borrowed = 0
        """Number of pages of `room` in use by it in the current step."""

    @property
    def page_ids(self) -> Sequence[PageId]:
        """The pages that it holds, in order of position."""
        return self._page_ids

    def page_numbers(self) -> npt.NDArray[np.int64]:
        """Return the numbers of the pages that it holds, in the history."""
        import numpy as np  # not imported for a replay

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
            self._room.num_used -= self._num_borrowed - num_borrowed
            self._num_borrowed = num_borrowed
        return has_dropped

    def _drop(self, position: int) -> bool:
        loses_sink = self.num_sink_pages > 0 and not self.retained.sink_seen(position)
        if loses_sink:
            self._drop_sink()
        first = self.num_sink_pages
        num_dropped = self.retained.first_seen(position) // self._page_size - first - self.num_dropped
        if num_dropped > 0:
            for page_id in self._page_ids[first : first + num_dropped]:
                self._reserve.release(page_id)
            del self._page_ids[first : first + num_dropped]
            self.num_dropped += num_dropped
        return loses_sink or num_dropped > 0

    def _drop_sink(self) -> None:
        """Treat pages of the sink like all others: drop those before the window."""
        if self.num_dropped:
            for page_id in self._page_ids[: self.num_sink_pages]:
                self._reserve.release(page_id)
            del self._page_ids[: self.num_sink_pages]
            self.num_dropped += self.num_sink_pages
        self.num_sink_pages = 0

    def grow(self, start: int, end: int) -> bool:
        """Make tokens [start, end) writable; return whether that took a page.

        A page shared with a fork that contains some of these tokens is copied first.
        """
        page_ids, reserve, size = self._page_ids, self._reserve, self._page_size
        took = False
        for place in range(start // size - self.num_dropped, len(page_ids)):
            shared = page_ids[place]
            if reserve.is_shared(shared):
                page_ids[place] = reserve.take()
                reserve.release(shared)
                self._copies.append((shared, page_ids[place]))
                took = True
        for _ in range(-(-end // size) - self.num_dropped - len(page_ids)):
            page_ids.append(reserve.take())
            took = True
        num_over = len(page_ids) - self._most_pages - self._num_borrowed
        if num_over > 0:
            self._room.num_used += num_over
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
        has_sink = self.num_sink_pages > 0 or not self.retained.sink_seen(last)
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
        if not self.num_dropped:  # an earlier token may see the sink again
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
        self._page_ids = [self._reserve.take() for _ in range(num_pages)]

    def release(self) -> None:
        """Release all pages, between steps; nothing is computed then."""
        for page_id in self._page_ids:
            self._reserve.release(page_id)
        self._page_ids = []
        self.num_dropped = 0
        self.num_sink_pages = self.retained.num_sink_pages(self._page_size)


class SessionPages:
    """OwnPages of a session with a sink and a window. Methods other than those of OwnPages are called between steps.

    `retained`: the tokens retained by each page table, one table per block of a page; by default, a single table that
    retains the same as the session. The tables of one KV group have the same pages. `make_table`: makes these tables.
    """

    def __init__(
        self,
        keeps: SinkWindow,
        reserve: PageReserve,
        room: ChunkRoom,
        retained: Sequence[Retained] | None = None,
        make_table: Callable[[Any, PageReserve, ChunkRoom], SessionPageTable] = SessionPageTable,
    ) -> None:
        self.keeps = keeps
        self.tables = [make_table(one, reserve, room) for one in ((keeps,) if retained is None else retained)]
        self.places = set().union(*(table.retained.places(room.page_size) for table in self.tables))
        """The offsets in a page at which a token no longer needs a page that the previous token needed."""
        self._room = room
        self.most_held = 0
        """The most pages held so far, including within steps."""

    @property
    def page_ids(self) -> Sequence[PageId]:
        """The pages that it holds, table by table."""
        return [page_id for table in self.tables for page_id in table.page_ids]

    @property
    def page_tables(self) -> tuple[PageTable, ...]:
        """The page tables, for the rows of an executor."""
        late = self.keeps.rotates_late
        return tuple(
            PageTable(
                tuple(table.page_ids),
                table.num_dropped,
                table.num_sink_pages,
                table.seen(late),
            )
            for table in self.tables
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
        if took:
            self._note_held()
        return took

    def take_copies(self) -> Sequence[tuple[PageId, PageId]]:
        """Return the pages to copy, and clear the list."""
        return [copied for table in self.tables for copied in table.take_copies()]

    def can_shorten(self, num_tokens: int) -> bool:
        """Return whether everything is present that the last of the first `num_tokens` tokens can see."""
        return all(table.can_shorten(num_tokens) for table in self.tables)

    def shorten(self, num_tokens: int) -> None:
        """Release pages beyond the first `num_tokens` tokens."""
        for table in self.tables:
            table.shorten(num_tokens)

    def fork(self) -> SessionPages:
        """Return pages shared with these."""
        other = copy(self)
        other.tables = [table.fork() for table in self.tables]
        other.most_held = 0
        other._note_held()
        return other

    def layout(self) -> tuple[TableLayout, ...]:
        """Return the layout of the pages, table by table, for `restore`."""
        return tuple(table.layout() for table in self.tables)

    def restore(self, layout: Sequence[TableLayout]) -> Sequence[PageId]:
        """Take pages for KV that was saved elsewhere, and return them, table by table. All tables must be empty."""
        for table, of_table in zip(self.tables, layout, strict=True):
            table.restore(of_table)
        self._note_held()
        return self.page_ids

    def release(self) -> None:
        """Release all pages; nothing is computed then."""
        for table in self.tables:
            table.release()

    def _note_held(self) -> None:
        num_held = sum(len(table.page_ids) for table in self.tables)
        if num_held > self.most_held:
            self.most_held = num_held

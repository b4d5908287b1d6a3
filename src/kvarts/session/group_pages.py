"""The pages of one bounded session of a model with KV groups: a page table for each block of a page."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from kvarts.kv.group_keeps import retained_by_group
from kvarts.kv.group_memory import GroupMemory
from kvarts.kv.pool import PageId
from kvarts.kv.reserve import PageReserve
from kvarts.kv.sink_window import OwnTable, SinkWindow
from kvarts.session.pages import ChunkRoom, SessionPages, TableLayout

__all__ = ["GroupSessionPages"]


class GroupSessionPages:
    """OwnTables of a session that keeps a sink and a window, in blocks of `memory` with ids from `reserve`.

    Each table keeps what the layers see that have it, and is as the pages of a session of a model without groups. The
    tables of one group have the same pages. Raises ConfigError for a model that cannot have such sessions.
    """

    num_dropped = 0
    """Each table has its own."""

    def __init__(self, keeps: SinkWindow, memory: GroupMemory, reserve: PageReserve, room: ChunkRoom) -> None:
        self.keeps = keeps
        self.tables: list[SessionPages] = [
            SessionPages(keeps, reserve, room, of_group)
            for of_group, num_blocks in retained_by_group(memory, keeps)
            for _ in range(num_blocks)
        ]
        self.places = set().union(*(table.places for table in self.tables))
        """The places in a page at which a token no longer needs a page that the token before it needed."""
        self._room = room
        self.most_held = 0
        """The most blocks it has held, within a step."""

    @property
    def page_ids(self) -> Sequence[PageId]:
        """The blocks that it holds, table by table."""
        return [block_id for table in self.tables for block_id in table.page_ids]

    @property
    def own_tables(self) -> tuple[OwnTable, ...]:
        """The page tables, for the rows of an executor."""
        late = self.keeps.rotates_late
        return tuple(
            OwnTable(
                tuple(table.page_ids),
                table.num_dropped,
                table.num_sink_pages,
                SinkWindow(table.retained.sink if table.num_sink_pages else 0, table.retained.window, late),
            )
            for table in self.tables
        )

    def settle(self, position: int) -> bool:
        """Drop blocks that no token at `position` or later can see; return whether there were any."""
        dropped = False
        for table in self.tables:
            dropped |= table.settle(position)
        return dropped

    def most_tokens(self, start: int, num_tokens: int) -> int:
        """Return how many of `num_tokens` tokens may be computed in this step."""
        return min(num_tokens, self._room.most_tokens)

    def grow(self, start: int, end: int) -> bool:
        """Make tokens [start, end) writable in every table; return whether that took a block."""
        took = False
        for table in self.tables:
            took |= table.grow(start, end)
        if took:
            self.most_held = max(self.most_held, sum(len(table.page_ids) for table in self.tables))
        return took

    def take_copies(self) -> Sequence[tuple[PageId, PageId]]:
        """Return the blocks to be copied, and forget them."""
        return [copy for table in self.tables for copy in table.take_copies()]

    def can_shorten(self, num_tokens: int) -> bool:
        """Return whether everything is there that the last of the first `num_tokens` tokens sees."""
        return all(table.can_shorten(num_tokens) for table in self.tables)

    def shorten(self, num_tokens: int) -> None:
        """Release blocks beyond the first `num_tokens` tokens, between steps."""
        for table in self.tables:
            table.shorten(num_tokens)

    def fork(self) -> GroupSessionPages:
        """Return blocks that are shared with these, between steps."""
        other = copy(self)
        other.tables = [table.fork() for table in self.tables]
        other.most_held = len(other.page_ids)
        return other

    def layout(self) -> tuple[TableLayout, ...]:
        """Return what the blocks are, table by table, for `restore`."""
        return tuple(layout for table in self.tables for layout in table.layout())

    def restore(self, layout: Sequence[TableLayout]) -> Sequence[PageId]:
        """Take blocks for KV that was kept elsewhere, where nothing is computed yet; return them, table by table."""
        for table, of_table in zip(self.tables, layout, strict=True):
            table.restore((of_table,))
        page_ids = self.page_ids
        self.most_held = max(self.most_held, len(page_ids))
        return page_ids

    def release(self) -> None:
        """Release all blocks, between steps; nothing is computed then."""
        for table in self.tables:
            table.release()

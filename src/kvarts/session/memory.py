"""The memory of an engine available to bounded sessions: pages, or blocks for a model with KV groups."""

from __future__ import annotations

from kvarts.kv.group_keeps import most_blocks, retained_by_group
from kvarts.kv.group_memory import GroupMemory
from kvarts.kv.reserve import PageReserve
from kvarts.kv.sink_window import SinkWindow
from kvarts.session.pages import ChunkRoom, SessionPages

__all__ = ["SessionMemory"]


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
        """Return the most that a session holds between steps. Raise ConfigError as retained_by_group does."""
        if self._groups is None:
            return keeps.most_pages(self.page_size)
        return most_blocks(self._groups, keeps, self.page_size)

    def room(self, num_tokens: int) -> ChunkRoom:
        """Return the room for chunks of `num_tokens` tokens."""
        num_pages = -(-num_tokens // self.page_size)
        return ChunkRoom(num_pages * self._page_blocks, self.page_size, self._page_blocks)

    def open(self, keeps: SinkWindow, reserve: PageReserve, room: ChunkRoom) -> SessionPages:
        """Return an empty set of pages for a session. Raise ConfigError as `most_pages` does."""
        if self._groups is None:
            if not keeps.is_scored:
                return SessionPages(keeps, reserve, room)
            from kvarts.session.heavy_table import HeavyTable  # which imports NumPy: a replay has no such sessions

            return SessionPages(keeps, reserve, room, make_table=HeavyTable)
        kept = retained_by_group(self._groups, keeps)
        return SessionPages(keeps, reserve, room, [one for one, num_blocks in kept for _ in range(num_blocks)])

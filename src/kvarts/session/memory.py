"""The memory that bounded sessions have of an engine: whole pages, or blocks of a model with KV groups."""

from __future__ import annotations

from typing import Protocol

from kvarts.kv.group_keeps import most_blocks
from kvarts.kv.group_memory import GroupMemory
from kvarts.kv.reserve import PageReserve
from kvarts.kv.sink_window import SinkWindow
from kvarts.session.group_pages import GroupSessionPages
from kvarts.session.pages import ChunkRoom, OwnTables, SessionPages

__all__ = ["BlockMemory", "PageMemory", "SessionMemory"]


class SessionMemory(Protocol):
    """What sessions take of an engine. All counts are of pages, or of blocks.

    `unit`: the word for what is counted. `total`: of the engine. `page_size`: the tokens of a page.
    """

    unit: str
    total: int
    page_size: int

    def most_tokens(self, count: int) -> int:
        """Return how many tokens of chunks `count` of them hold, to the page."""

    def most_pages(self, keeps: SinkWindow) -> int:
        """Return the most that a session holds between steps. Raise ConfigError if the model can have none such."""

    def room(self, num_tokens: int) -> ChunkRoom:
        """Return the room for chunks of `num_tokens` tokens."""

    def open(self, keeps: SinkWindow, reserve: PageReserve, room: ChunkRoom) -> OwnTables:
        """Return the pages of a session, of which it has none yet."""


class PageMemory:
    """A SessionMemory of `total` whole pages."""

    unit = "pages"

    def __init__(self, total: int, page_size: int) -> None:
        self.total = total
        self.page_size = page_size

    def most_tokens(self, count: int) -> int:
        """Return how many tokens of chunks `count` pages hold."""
        return count * self.page_size

    def most_pages(self, keeps: SinkWindow) -> int:
        """Return the most pages that a session holds between steps."""
        return keeps.most_pages(self.page_size)

    def room(self, num_tokens: int) -> ChunkRoom:
        """Return the room for chunks of `num_tokens` tokens."""
        return ChunkRoom(-(-num_tokens // self.page_size), self.page_size)

    def open(self, keeps: SinkWindow, reserve: PageReserve, room: ChunkRoom) -> OwnTables:
        """Return the pages of a session, of which it has none yet."""
        return SessionPages(keeps, reserve, room)


class BlockMemory:
    """A SessionMemory of `total` blocks of `memory`."""

    unit = "blocks"

    def __init__(self, total: int, page_size: int, memory: GroupMemory) -> None:
        self.total = total
        self.page_size = page_size
        self._memory = memory
        self._page_blocks = memory.page_bytes // memory.block_bytes

    def most_tokens(self, count: int) -> int:
        """Return how many tokens of chunks `count` blocks hold, in whole pages."""
        return count // self._page_blocks * self.page_size

    def most_pages(self, keeps: SinkWindow) -> int:
        """Return the most blocks that a session holds between steps. Raise ConfigError, see retained_by_group."""
        return most_blocks(self._memory, keeps, self.page_size)

    def room(self, num_tokens: int) -> ChunkRoom:
        """Return the room for chunks of `num_tokens` tokens."""
        num_pages = -(-num_tokens // self.page_size)
        return ChunkRoom(num_pages * self._page_blocks, self.page_size, self._page_blocks)

    def open(self, keeps: SinkWindow, reserve: PageReserve, room: ChunkRoom) -> OwnTables:
        """Return the blocks of a session, of which it has none yet."""
        return GroupSessionPages(keeps, self._memory, reserve, room)

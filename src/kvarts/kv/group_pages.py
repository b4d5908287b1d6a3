"""A cache with KV groups as schedulers, routers and reports see a cache: memory is counted in blocks.

A block is the largest size that divides the parts of all groups, see GroupMemory, so that every count is whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from kvarts.content import Content
from kvarts.kv.cache import Holding, PageCache
from kvarts.kv.eviction import LruOrder
from kvarts.kv.group_memory import GroupMemory
from kvarts.kv.match import Match
from kvarts.kv.node import HeldPages
from kvarts.kv.pool import CountPool
from kvarts.kv.run_cache import RunCache
from kvarts.kv.spans import RunHolding, RunMatch
from kvarts.kv.tree import PrefixTree

__all__ = ["GroupPages", "PartHolding", "PartMatch"]


class PartMatch(Match):
    """What a cache with KV groups has of a content. `found`: the pages that every group can go on from."""

    __slots__ = ("found",)

    def __init__(self, found: RunMatch) -> None:
        super().__init__([], found.num_pages, 0)
        self.found = found


class PartHolding(Holding):
    """What one running request holds. `parts`: in every group."""

    __slots__ = ("parts",)

    def __init__(self, parts: RunHolding) -> None:
        super().__init__([], 0, None)
        self.parts = parts


class GroupPages(PageCache):
    """A PageCache of `num_pages` whole pages of memory, in which parts of pages are held, see RunCache.

    Counts of pages are counts of blocks. A request takes its parts by `begin` and what follows it in RunCache; then
    `count` must be called. What is said here of runs of pages is not there: no tree, no ids, no transfers.
    """

    __slots__ = ("block_bytes", "memory", "parts")

    def __init__(self, memory: GroupMemory, *, num_pages: int, page_size: int) -> None:
        num_blocks = memory.num_blocks(num_pages)
        super().__init__(CountPool(num_blocks), PrefixTree(LruOrder()))
        self.memory = memory
        self.block_bytes = memory.block_bytes
        self.parts = RunCache(memory, page_size=page_size, total_bytes=num_blocks * self.block_bytes)
        self.match = self._match

    @property
    def num_cached(self) -> int:
        """Blocks of parts that can be found and are not in use."""
        return self.parts.cached_bytes // self.block_bytes

    @property
    def num_used(self) -> int:
        """Blocks of parts that requests hold."""
        return self.parts.used_bytes // self.block_bytes

    def counts(self) -> tuple[int, ...]:
        """Return the parts used and the parts cached in each group, one pair a group."""
        counts: list[int] = []
        for pair in zip(self.parts.num_used, self.parts.num_cached, strict=True):
            counts += pair
        return tuple(counts)

    def count(self) -> None:
        """Take note of what was taken and given back."""
        parts, block_bytes = self.parts, self.block_bytes
        self.num_free = parts.free_bytes // block_bytes
        self.num_released = parts.released_bytes // block_bytes
        self.num_evicted = parts.evicted_bytes // block_bytes

    def _match(self, content: Content, limit: int) -> PartMatch:
        return PartMatch(self.parts.match(content, limit))

    def has_empty(self, count: int) -> bool:
        """Return whether `count` blocks can be taken and nothing is evicted for them."""
        return count * self.block_bytes <= self.parts.empty_bytes

    def shed(self, count: int) -> None:
        """Evict everything that is cached: `count` is all of it."""
        assert count == self.num_cached, "parts are shed all together"
        self.parts.clear()
        self.count()

    def close(self, holding: Holding, content: Content, num_full_pages: int, num_pages: int) -> None:
        """Release everything that a request holds: parts of its full pages that can be found become cached."""
        self.parts.close(cast(PartHolding, holding).parts, num_full_pages)
        holding.is_open = False
        self.count()

    def check(self, holdings: Iterable[tuple[Holding, int]], holds: Iterable[HeldPages] = ()) -> None:
        """Assert laws L1 and L2 for every part."""
        self.parts.check([cast(PartHolding, holding).parts for holding, _ in holdings])
        assert self.num_used + self.num_free == self.pool.total, "L1: blocks are lost"

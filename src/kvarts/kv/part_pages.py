"""What schedulers ask of a cache with KV groups: a PageCache in which a request holds parts of pages.

Memory is counted in blocks, the largest size that divides the parts of all groups, see GroupMemory; so every count is
whole, and counts of pages are counts of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvarts.content import Content
from kvarts.kv.cache import Holding, PageCache
from kvarts.kv.eviction import LruOrder
from kvarts.kv.group_memory import GroupMemory
from kvarts.kv.match import Match
from kvarts.kv.node import HeldPages
from kvarts.kv.pool import Pool
from kvarts.kv.tree import PrefixTree

__all__ = ["Held", "PartPages"]


class Held(Protocol):
    """What others hold of the parts that a request was found to begin with, by the number of a group."""

    def num_shared(self, group: int, first_page: int) -> int:
        """Return how many parts others hold, of pages from `first_page` on and of the sink."""

    def num_idle(self, group: int) -> int:
        """Return how many snapshots of a group of states nothing holds."""


class PartPages(PageCache):
    """A PageCache of `pool`, a pool of blocks, in which requests hold parts of pages of `memory`.

    A request opens what was `found`, takes parts by `extend` and `take_page`, gives back what no later token sees by
    `settle`, and is closed. The caller sees to it that what is taken is free. What PageCache says of runs of pages is
    not there: no tree, no transfers.
    """

    __slots__ = ("block_bytes", "memory", "page_size")

    def __init__(self, pool: Pool, memory: GroupMemory, *, page_size: int) -> None:
        super().__init__(pool, PrefixTree(LruOrder()))
        self.memory = memory
        self.block_bytes = memory.block_bytes
        self.page_size = page_size
        self.match = self._match

    def _match(self, content: Content, limit: int) -> Match:
        return self.found(content, limit)[0]

    @property
    def num_published(self) -> int:
        """How often something of known tokens, which others may find, became findable since the beginning."""
        raise NotImplementedError

    def counts(self) -> tuple[int, ...]:
        """Return the parts used and the parts cached in each group, one pair a group."""
        raise NotImplementedError

    def num_evicted_parts(self) -> tuple[int, ...]:
        """Return the parts evicted of each group, one number a group."""
        raise NotImplementedError

    def found(self, content: Content, limit: int) -> tuple[Match, Held]:
        """Return the longest prefix, of at most `limit` full pages, that every group can go on from.

        And what of it others hold.
        """
        raise NotImplementedError

    def reach(self, content: Content, limit: int) -> tuple[int, ...]:
        """Return for each group from how many of at most `limit` full pages it could go on by itself.

        As far as any group has a part of a page. It explains why a hit was no longer.
        """
        raise NotImplementedError

    def open(self, match: Match) -> Holding:
        """Hold what was found, for a sequence that begins with it; the cache must not have changed since."""
        raise NotImplementedError

    def num_held(self, holding: Holding) -> int:
        """Return the blocks of all parts that `holding` has, those that others hold as well included."""
        raise NotImplementedError

    def missing_blocks(self, holding: Holding, num_new: int) -> int:
        """Return the blocks that the next `num_new` tokens need and `holding` does not have."""
        raise NotImplementedError

    def extend(self, holding: Holding, num_tokens: int, *, is_end: bool) -> None:
        """Take what tokens up to `num_tokens` need, and make the pages that they fill findable.

        `is_end`: other sequences may go on from here, as after a prompt.
        """
        raise NotImplementedError

    def take_page(self, holding: Holding, page: int) -> None:
        """Take the parts of `page`, the next of `holding`, of which no token is computed yet."""
        raise NotImplementedError

    def fill_page(self, holding: Holding, num_tokens: int) -> None:
        """Make the page that ends with `num_tokens` tokens findable; `take_page` took it."""
        raise NotImplementedError

    def drop_pages(self, holding: Holding, num_pages: int) -> None:
        """Give back the parts of all but the first `num_pages` pages, which `take_page` took: no token is in them."""
        raise NotImplementedError

    def settle(self, holding: Holding, num_tokens: int) -> None:
        """Give back what no token from `num_tokens` on attends to. `count` must follow."""
        raise NotImplementedError

    def count(self) -> None:
        """Take note of what was given back."""
        raise NotImplementedError

    def check(self, holdings: Iterable[tuple[Holding, int]], holds: Iterable[HeldPages] = ()) -> None:
        """Assert laws L1 and L2 for every part."""
        raise NotImplementedError

"""The empty pages of one memory, and the memory that several caches share.

Two pools with one contract: `CountPool` where it does not matter which page is taken (virtual time), `IdPool` where an
executor writes into them. A taken page belongs to the taker until it is returned; the pool does not know its use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NewType, Protocol, cast

from kvarts.errors import KvartsError
from kvarts.limits import MOST_COUNT, MOST_PAGES, check_whole

__all__ = ["CountPool", "IdPool", "PageError", "PageId", "Pool", "SharedMemory"]

PageId = NewType("PageId", int)


class PageError(KvartsError):
    """More pages were requested than are available, or pages were returned that were not held. Nothing has changed."""


class Pool(Protocol):
    """Promises: ids, where there are any, are from 0 to `total` - 1, and each has one owner at a time."""

    @property
    def total(self) -> int:
        """All pages, taken or empty."""

    @property
    def num_empty(self) -> int:
        """Pages that hold nothing and can be taken now."""

    @property
    def num_taken(self) -> int:
        """Pages that were taken and not returned."""

    @property
    def has_ids(self) -> bool:
        """Whether pages have ids."""

    @property
    def empty_ids(self) -> Sequence[PageId]:
        """The ids that are not taken, for audits; none from a pool that only counts."""

    def has_empty(self, count: int) -> bool:
        """Return whether `count` pages are empty, and stay empty until they are taken."""

    @property
    def make_room(self) -> Callable[[int], object] | None:
        """Evicts, here or from others, until the given number of pages is empty; that many are empty or cached.

        None for a pool that evicts nothing: the taker evicts its cached pages.
        """

    def take(self, count: int) -> list[PageId] | None:
        """Take `count` pages, at most `num_empty`; return their ids, or None from a pool that only counts."""

    def give(self, count: int, page_ids: Sequence[PageId] | None) -> None:
        """Return `count` pages to the pool as empty."""

    def check(self, num_free: int, num_cached: int) -> None:
        """Assert law L1, given a taker's number of cached pages and its count of free pages."""


class CountPool:
    """Pages without ids. Raises ConfigError if `total` is out of range."""

    __slots__ = ("num_empty", "num_taken", "total")

    has_ids = False
    make_room = None
    empty_ids: Sequence[PageId] = ()

    def __init__(self, total: Any) -> None:
        check_whole(total, "total", least=0, most=MOST_PAGES)
        self.total: int = total
        self.num_empty: int = total
        self.num_taken = 0

    def has_empty(self, count: int) -> bool:
        """Return whether `count` pages are empty."""
        return count <= self.num_empty

    def take(self, count: int) -> None:
        """Take `count` pages. Raise PageError if fewer are empty."""
        if not 0 <= count <= self.num_empty:
            raise PageError(f"{count} pages asked for, {self.num_empty} empty")
        self.num_empty -= count
        self.num_taken += count

    def give(self, count: int, page_ids: Sequence[PageId] | None) -> None:
        """Return `count` pages to the pool as empty. Raise PageError if fewer were taken."""
        if not 0 <= count <= self.num_taken:
            raise PageError(f"{count} pages given back, and {self.num_taken} were taken")
        self.num_empty += count
        self.num_taken -= count

    def check(self, num_free: int, num_cached: int) -> None:
        """Assert law L1 for the one taker of this pool."""
        assert num_free == self.num_empty + num_cached, "L1: free"
        assert self.num_empty + self.num_taken == self.total, "L1: total"


class IdPool:
    """Pages by id, the most recently emptied first: its memory is the likeliest to be warm.

    Raises ConfigError if `total` is out of range.
    """

    __slots__ = ("_empty_ids", "num_empty", "num_taken", "total")

    has_ids = True
    make_room = None

    def __init__(self, total: Any) -> None:
        check_whole(total, "total", least=0, most=MOST_COUNT)
        self.total: int = total
        self.num_empty: int = total
        self.num_taken = 0
        self._empty_ids = cast(list[PageId], list(range(total - 1, -1, -1)))

    @property
    def empty_ids(self) -> Sequence[PageId]:
        """The ids that are not taken."""
        return self._empty_ids

    def has_empty(self, count: int) -> bool:
        """Return whether `count` pages are empty."""
        return count <= self.num_empty

    def take(self, count: int) -> list[PageId]:
        """Take `count` pages; return their ids. Raise PageError if fewer are empty."""
        if not 0 <= count <= self.num_empty:
            raise PageError(f"{count} pages asked for, {self.num_empty} empty")
        self.num_empty -= count
        self.num_taken += count
        if count == 1:
            return [self._empty_ids.pop()]
        if count == 0:
            return []
        taken = self._empty_ids[-count:]
        del self._empty_ids[-count:]
        taken.reverse()
        return taken

    def give(self, count: int, page_ids: Sequence[PageId] | None) -> None:
        """Return `count` pages to the pool as empty. Raise PageError if fewer were taken, or ids are missing."""
        if page_ids is None or len(page_ids) != count:
            raise PageError(f"{count} pages given back with {0 if page_ids is None else len(page_ids)} ids")
        if count > self.num_taken:
            raise PageError(f"{count} pages given back, and {self.num_taken} were taken")
        self._empty_ids.extend(page_ids)
        self.num_empty += count
        self.num_taken -= count

    def check(self, num_free: int, num_cached: int) -> None:
        """Assert law L1 for the one taker of this pool."""
        assert num_free == self.num_empty + num_cached, "L1: free"
        assert self.num_empty + self.num_taken == self.total, "L1: total"


class SharedMemory(Protocol):
    """The memory of several caches, as one of them sees it. Empty bytes of a cache are returned to it in between."""

    def make_room(self, num_bytes: int) -> None:
        """Evict, there or from others, until `num_bytes` bytes, which must be free, are empty in the cache."""

    def take_back(self) -> None:
        """Take back the empty bytes of the cache."""

    @property
    def num_free_bytes(self) -> int:
        """Bytes that the cache could take now: empty or cached, there or elsewhere, and promised to no request."""

    @property
    def num_empty_bytes(self) -> int:
        """Empty bytes that were returned to it."""

    def tick(self) -> int:
        """Return the stamp of a release that happens now: earlier releases, in any of the caches, have smaller ones."""

    def before_all(self) -> int:
        """Return a stamp older than all others."""

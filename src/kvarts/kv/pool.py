"""The pages of one memory, as far as they are empty.

Two pools with one contract: `CountPool` where it does not matter which page is taken (virtual time), `IdPool` where an
executor writes into them. A page that is taken is the taker's until given back; the pool knows nothing of use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NewType, Protocol, cast

__all__ = ["CountPool", "IdPool", "PageId", "Pool"]

PageId = NewType("PageId", int)


class Pool(Protocol):
    """Promises: ids, where there are any, are from 0 to `total` - 1, and each has one owner at a time."""

    @property
    def total(self) -> int:
        """Pages that there can be."""

    @property
    def num_empty(self) -> int:
        """Pages that hold nothing and can be taken now."""

    @property
    def num_taken(self) -> int:
        """Pages that were taken and not given back."""

    @property
    def has_ids(self) -> bool:
        """Whether pages have ids."""

    @property
    def empty_ids(self) -> Sequence[PageId]:
        """The ids that are not taken, for audits; none from a pool that only counts."""

    def has_empty(self, count: int) -> bool:
        """Return whether `count` pages are empty, and stay so until they are taken."""

    @property
    def make_room(self) -> Callable[[int], object] | None:
        """Evicts, here or from others, until the given number of pages is empty; that many are empty or cached.

        None from a pool that evicts nothing: the taker evicts what it has cached.
        """

    def take(self, count: int) -> list[PageId] | None:
        """Take `count` pages, at most `num_empty`; return their ids, or None from a pool that only counts."""

    def give(self, count: int, page_ids: Sequence[PageId] | None) -> None:
        """Give `count` pages back as empty."""

    def check(self, num_free: int, num_cached: int) -> None:
        """Assert law L1, given what a taker has cached and believes to be free."""


class CountPool:
    """Pages without names."""

    __slots__ = ("num_empty", "num_taken", "total")

    has_ids = False
    make_room = None
    empty_ids: Sequence[PageId] = ()

    def __init__(self, total: int) -> None:
        self.total = total
        self.num_empty = total
        self.num_taken = 0

    def has_empty(self, count: int) -> bool:
        """Return whether `count` pages are empty."""
        return count <= self.num_empty

    def take(self, count: int) -> None:
        """Take `count` pages."""
        assert count <= self.num_empty, f"{count} pages asked for, {self.num_empty} empty"
        self.num_empty -= count
        self.num_taken += count

    def give(self, count: int, page_ids: Sequence[PageId] | None) -> None:
        """Give `count` pages back as empty."""
        self.num_empty += count
        self.num_taken -= count
        assert self.num_taken >= 0, "more pages given back than were taken"

    def check(self, num_free: int, num_cached: int) -> None:
        """Assert law L1 for the one taker of this pool."""
        assert num_free == self.num_empty + num_cached, "L1: free"
        assert self.num_empty + self.num_taken == self.total, "L1: total"


class IdPool:
    """Pages by id, the most recently emptied first: its memory is the likeliest to be warm."""

    __slots__ = ("_empty_ids", "num_empty", "num_taken", "total")

    has_ids = True
    make_room = None

    def __init__(self, total: int) -> None:
        self.total = total
        self.num_empty = total
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
        """Take `count` pages; return their ids."""
        assert count <= self.num_empty, f"{count} pages asked for, {self.num_empty} empty"
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
        """Give `count` pages back as empty."""
        assert page_ids is not None and len(page_ids) == count
        self._empty_ids.extend(page_ids)
        self.num_empty += count
        self.num_taken -= count
        assert self.num_taken >= 0, "more pages given back than were taken"

    def check(self, num_free: int, num_cached: int) -> None:
        """Assert law L1 for the one taker of this pool."""
        assert num_free == self.num_empty + num_cached, "L1: free"
        assert self.num_empty + self.num_taken == self.total, "L1: total"

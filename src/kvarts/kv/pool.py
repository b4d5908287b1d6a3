"""The pages of one device, as far as they are empty.

Two pools with one contract: `CountPool` where nobody needs to know which page (virtual time), `IdPool` where an
executor writes into them. A page that is taken is the taker's until given back; the pool knows nothing of use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType, Protocol, cast

__all__ = ["CountPool", "IdPool", "PageId", "Pool"]

PageId = NewType("PageId", int)


class Pool(Protocol):
    """Promises: `take` is asked for no more than `num_empty`; ids, where there are any, are handed out once."""

    total: int

    num_empty: int
    """Pages nobody uses and that hold nothing. Written by the pool only."""

    def take(self, count: int) -> list[PageId] | None:
        """Takes `count` empty pages; their ids, or None from a pool that only counts."""

    def give(self, count: int, page_ids: Sequence[PageId] | None) -> None:
        """Gives `count` pages back as empty."""


class CountPool:
    """Pages without names."""

    __slots__ = ("num_empty", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.num_empty = total

    def take(self, count: int) -> None:
        """See Pool."""
        assert count <= self.num_empty, f"{count} pages asked for, {self.num_empty} empty"
        self.num_empty -= count

    def give(self, count: int, page_ids: Sequence[PageId] | None) -> None:
        """See Pool."""
        self.num_empty += count
        assert self.num_empty <= self.total, "more pages given back than were taken"


class IdPool:
    """Pages by id, the most recently emptied first: its memory is the likeliest to be warm."""

    __slots__ = ("_empty_ids", "num_empty", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.num_empty = total
        self._empty_ids = cast(list[PageId], list(range(total - 1, -1, -1)))

    @property
    def empty_ids(self) -> Sequence[PageId]:
        """For audits."""
        return self._empty_ids

    def take(self, count: int) -> list[PageId]:
        """See Pool."""
        assert count <= self.num_empty, f"{count} pages asked for, {self.num_empty} empty"
        self.num_empty -= count
        if count == 1:
            return [self._empty_ids.pop()]
        if count == 0:
            return []
        taken = self._empty_ids[-count:]
        del self._empty_ids[-count:]
        taken.reverse()
        return taken

    def give(self, count: int, page_ids: Sequence[PageId] | None) -> None:
        """See Pool."""
        assert page_ids is not None and len(page_ids) == count
        self._empty_ids.extend(page_ids)
        self.num_empty += count
        assert self.num_empty <= self.total, "more pages given back than were taken"

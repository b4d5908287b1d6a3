"""The empty pages of one memory, and the memory that several caches share.

Two pools with one contract: `CountPool` where it does not matter which page is taken (virtual time), `IdPool` where an
executor writes into them. A taken page belongs to the taker until it is returned; the pool does not know its use.

Ids are kept as runs of consecutive ones, since the state of a sequence can have tens of thousands of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, NewType, Protocol, cast

from kvarts.base.errors import KvartsError
from kvarts.base.limits import MOST_COUNT, MOST_PAGES, check_whole

__all__ = ["NO_IDS", "CountPool", "IdPool", "PageError", "PageId", "PageIds", "Pool", "SharedMemory", "are_all_once"]

PageId = NewType("PageId", int)


class PageError(KvartsError):
    """More pages were requested than are available, or pages were returned that were not held. Nothing has changed."""


class PageIds:
    """Ids in an order, as runs of consecutive ones, upwards or downwards. A call takes a time for each run.

    `_firsts`: the first id of each run; `_counts`: the number of its ids, negative for a run downwards.
    """

    __slots__ = ("_counts", "_firsts", "_num_ids")

    def __init__(self, page_ids: Iterable[PageId] = ()) -> None:
        self._firsts: list[int] = []
        self._counts: list[int] = []
        self._num_ids = 0
        self.add(page_ids)

    @classmethod
    def down_from(cls, total: int) -> PageIds:
        """Return the first `total` ids, the greatest first."""
        every = cls()
        if total:
            every._add_run(total - 1, -total)
        return every

    def __len__(self) -> int:
        return self._num_ids

    def __iter__(self) -> Iterator[PageId]:
        return chain.from_iterable(map(_ids_of_run, self._firsts, self._counts))

    def add(self, page_ids: Iterable[PageId]) -> None:
        """Add ids one by one."""
        # As `_add_run` does: this runs for every page that is emptied.
        firsts, counts = self._firsts, self._counts
        first, count, num_added = -2, 1, 0  # no id follows that one
        if counts:
            first, count = firsts[-1], counts[-1]
        for page_id in page_ids:
            num_added += 1
            if count > 0 and page_id == first + count:
                count += 1
                counts[-1] = count
            elif count <= 1 and page_id == first - abs(count):
                count = -1 - abs(count)
                counts[-1] = count
            else:
                first, count = page_id, 1
                firsts.append(page_id)
                counts.append(1)
        self._num_ids += num_added

    def with_more(self, other: PageIds) -> PageIds:
        """Return all ids of this one, and then those of `other`."""
        every = self.part(0, self._num_ids)
        every.extend(other)
        return every

    def extend(self, other: PageIds) -> None:
        """Add all ids of `other`."""
        for first, count in zip(other._firsts, other._counts, strict=True):
            self._add_run(first, count)

    def _add_run(self, first: int, count: int) -> None:
        """Add a run, as part of the last one if it continues that. A single id continues in either direction."""
        self._num_ids += abs(count)
        if count == -1:
            count = 1
        if self._counts:
            last = self._counts[-1]
            if last > 0 and count > 0 and first == self._firsts[-1] + last:
                self._counts[-1] = last + count
                return
            if last <= 1 and count <= 1 and first == self._firsts[-1] - abs(last):
                self._counts[-1] = -abs(last) - abs(count)
                return
        self._firsts.append(first)
        self._counts.append(count)

    def at(self, place: int) -> PageId:
        """Return the id at `place`."""
        return self.every(self._num_ids, place)[0]

    def every(self, step: int, start: int = 0) -> list[PageId]:
        """Return the id at `start`, and that of every `step` places after it."""
        found: list[PageId] = []
        place = start
        for first, count in zip(self._firsts, self._counts, strict=True):
            num_ids = abs(count)
            while place < num_ids:
                found.append(PageId(first + place if count > 0 else first - place))
                place += step
            place -= num_ids
        return found

    def part(self, start: int, end: int) -> PageIds:
        """Return the ids at [start, end)."""
        found = PageIds()
        for first, count in zip(self._firsts, self._counts, strict=True):
            num_ids = abs(count)
            low, high = max(start, 0), min(end, num_ids)
            if low < high:
                found._add_run(first + low if count > 0 else first - low, high - low if count > 0 else low - high)
            start -= num_ids
            end -= num_ids
        return found

    def take_first(self, count: int) -> PageIds:
        """Remove the first `count` ids, and return them."""
        taken, rest = self.part(0, count), self.part(count, self._num_ids)
        self._firsts, self._counts, self._num_ids = rest._firsts, rest._counts, rest._num_ids
        return taken

    def cut(self, at: int) -> PageIds:
        """Remove the ids from place `at` on, and return them."""
        return self.pop(max(0, self._num_ids - at)).backwards()

    def backwards(self) -> PageIds:
        """Return the ids from the last to the first."""
        found = PageIds()
        for first, count in zip(reversed(self._firsts), reversed(self._counts), strict=True):
            found._add_run(first + count - 1 if count > 0 else first + count + 1, -count)
        return found

    def pop_one(self) -> PageId:
        """Remove the last id, and return it."""
        counts = self._counts
        count = counts[-1]
        self._num_ids -= 1
        if count == 1:
            counts.pop()
            return PageId(self._firsts.pop())
        if count > 0:
            counts[-1] = count - 1
            return PageId(self._firsts[-1] + count - 1)
        counts[-1] = count + 1 if count < -2 else 1
        return PageId(self._firsts[-1] + count + 1)

    def pop_few(self, count: int) -> list[PageId]:
        """Do what `pop` does, and return the ids as a list. Usually they are of one run, of which others are left."""
        first, last = self._firsts[-1], self._counts[-1]
        if last > count + 1:
            self._num_ids -= count
            self._counts[-1] = last - count
            return cast(list[PageId], list(range(first + last - 1, first + last - 1 - count, -1)))
        if last < -count - 1:
            self._num_ids -= count
            self._counts[-1] = last + count
            return cast(list[PageId], list(range(first + last + 1, first + last + 1 + count)))
        return list(self.pop(count))

    def pop(self, count: int) -> PageIds:
        """Remove the last `count` ids, and return them, the last first. There are that many."""
        taken = PageIds()
        firsts, counts = self._firsts, self._counts
        self._num_ids -= count
        while count > 0:
            first, last = firsts[-1], counts[-1]
            num_left = max(0, abs(last) - count)
            count -= abs(last) - num_left
            if last > 0:
                taken._add_run(first + last - 1, num_left - last)
            else:
                taken._add_run(first + last + 1, -last - num_left)
            if num_left:
                counts[-1] = num_left if last > 0 or num_left == 1 else -num_left
            else:
                del firsts[-1], counts[-1]
        return taken

    def spans(self) -> list[tuple[int, int]]:
        """Return the least id of each run, and the one after its greatest."""
        return [
            (first, first + count) if count > 0 else (first + count + 1, first + 1)
            for first, count in zip(self._firsts, self._counts, strict=True)
        ]


NO_IDS: Final = PageIds()
"""The ids of parts whose blocks are only counted; nothing adds to it."""


def _ids_of_run(first: int, count: int) -> Sequence[PageId]:
    return cast(Sequence[PageId], range(first, first + count, 1 if count > 0 else -1))


def are_all_once(every: Iterable[PageIds], total: int) -> bool:
    """Return whether each of the first `total` ids is in `every` exactly once."""
    end = 0
    for first, last in sorted(span for page_ids in every for span in page_ids.spans()):
        if first != end:
            return False
        end = last
    return end == total


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

    __slots__ = ("empty", "num_empty", "num_taken", "total")

    has_ids = True
    make_room = None

    def __init__(self, total: Any) -> None:
        check_whole(total, "total", least=0, most=MOST_COUNT)
        self.total: int = total
        self.num_empty: int = total
        self.num_taken = 0
        self.empty = PageIds.down_from(total)
        """The ids that are not taken, the next one last."""

    @property
    def empty_ids(self) -> Sequence[PageId]:
        """The ids that are not taken."""
        return list(self.empty)

    def has_empty(self, count: int) -> bool:
        """Return whether `count` pages are empty."""
        return count <= self.num_empty

    def take(self, count: int) -> list[PageId]:
        """Take `count` pages; return their ids. Raise PageError if fewer are empty."""
        if not 0 < count <= self.num_empty:
            return list(self.take_runs(count))
        self.num_empty -= count
        self.num_taken += count
        return [self.empty.pop_one()] if count == 1 else self.empty.pop_few(count)

    def take_runs(self, count: int) -> PageIds:
        """Do the same, with the ids as runs."""
        if not 0 <= count <= self.num_empty:
            raise PageError(f"{count} pages asked for, {self.num_empty} empty")
        self.num_empty -= count
        self.num_taken += count
        return self.empty.pop(count)

    def give(self, count: int, page_ids: Sequence[PageId] | None) -> None:
        """Return `count` pages to the pool as empty. Raise PageError if fewer were taken, or ids are missing."""
        if page_ids is None or len(page_ids) != count:
            raise PageError(f"{count} pages given back with {0 if page_ids is None else len(page_ids)} ids")
        self._count_given(count)
        self.empty.add(page_ids)

    def give_runs(self, page_ids: PageIds) -> None:
        """Return pages to the pool as empty. Raise PageError if fewer were taken."""
        self._count_given(len(page_ids))
        self.empty.extend(page_ids)

    def _count_given(self, count: int) -> None:
        if count > self.num_taken:
            raise PageError(f"{count} pages given back, and {self.num_taken} were taken")
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

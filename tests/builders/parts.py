"""What a part of a device asks for pages that are in use, where no model gives any; a memory of one cache; its list."""

from __future__ import annotations

from kvarts.core.kv.account import RunAccount
from kvarts.core.kv.run_cache import RunCache
from kvarts.core.kv.runs import PartRun, Turns
from kvarts.core.request import Request

from oracles.grouped_cache import GroupedCache

__all__ = ["NO_OTHERS", "MemoryOfOne", "listed_pages"]


class NoOthers:
    """Nothing is reserved, and no running work makes way."""

    def kept_for_others(self, model: str) -> int:
        """Return 0."""
        return 0

    def preempt_for(self, model: str, request: Request, num_pages: int, *, to_admit: bool) -> bool:
        """Return False."""
        return False


NO_OTHERS = NoOthers()


class MemoryOfOne:
    """A SharedMemory in which no other cache has parts."""

    def __init__(self, cache: GroupedCache | RunCache) -> None:
        self._cache = cache
        self.num_empty_bytes = cache.total_bytes
        self.num_stamps = self.first_stamp = 0
        cache.share(self)

    def make_room(self, num_bytes: int) -> None:
        """Evict what is missing."""
        self.take_back()
        self._cache.evict(max(0, num_bytes - self.num_empty_bytes))
        self.take_back()
        self.num_empty_bytes -= num_bytes
        self._cache.resize(num_bytes)

    def take_back(self) -> None:
        """Take what is empty in the cache."""
        num_bytes = self._cache.empty_bytes
        self._cache.resize(-num_bytes)
        self.num_empty_bytes += num_bytes

    @property
    def num_free_bytes(self) -> int:
        """Empty or cached."""
        return self.num_empty_bytes + self._cache.free_bytes

    def before_all(self) -> int:
        """Return a stamp older than all others."""
        self.first_stamp -= 1
        return self.first_stamp

    def tick(self) -> int:
        """Return one more than before."""
        self.num_stamps += 1
        return self.num_stamps


def listed_pages(account: RunAccount) -> list[tuple[int, int]]:
    """The group and page of each listed part, in order; for a snapshot the page before it."""
    pages: list[tuple[int, int]] = []
    low: dict[int, int] = {}
    for entry in account.entries():
        if isinstance(entry, PartRun):
            pages += [(entry.group, page) for page in range(entry.end - 1, entry.start - 1, -1)]
        elif isinstance(entry, Turns):
            for stream in entry.streams[entry.at :]:
                page = low.get(id(stream), stream.low)
                low[id(stream)] = page + 1
                if not stream.is_hole(page):
                    pages.append((stream.group, page))
    return pages

"""The pages of one model in the memory of a device that it shares with others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvarts.kv.pool import CountPool, IdPool, PageId
from kvarts.sharing.memory import DeviceMemory

__all__ = ["SharedPool"]


class SharedPool:
    """Pages of `page_bytes` in `memory`: what is given back is empty for all. A Pool.

    As with virtual memory, each model numbers its pages from 0 to `total` - 1 and the device counts bytes: `numbers`,
    a pool of `total` pages, says which of its numbers a model uses.
    """

    __slots__ = ("_ids", "_memory", "make_room", "num_taken", "page_bytes", "total")

    def __init__(self, memory: DeviceMemory, page_bytes: int, numbers: CountPool | IdPool) -> None:
        self._memory = memory
        self._ids = numbers if numbers.has_ids else None
        self.page_bytes = page_bytes
        self.total = numbers.total
        # Without a call in between: this runs for every page that is taken.
        self.make_room: Callable[[int], None] = partial(memory.make_room, self)
        """Evicts until so many pages are empty, here or from others."""
        self.num_taken = 0
        """Pages that this model took and did not give back."""

    @property
    def num_empty(self) -> int:
        """Pages for which there are empty bytes."""
        return self._memory.num_empty_bytes // self.page_bytes

    @property
    def has_ids(self) -> bool:
        """Whether pages have ids."""
        return self._ids is not None

    @property
    def empty_ids(self) -> Sequence[PageId]:
        """The ids that this model does not use."""
        return () if self._ids is None else self._ids.empty_ids

    def has_empty(self, count: int) -> bool:
        """Return False: others may take them at any time."""
        return False

    def take(self, count: int) -> list[PageId] | None:
        """Take `count` pages."""
        self.num_taken += count
        self._memory.num_empty_bytes -= count * self.page_bytes
        assert self._memory.num_empty_bytes >= 0, f"{count} pages asked for, more than are empty"
        return None if self._ids is None else self._ids.take(count)

    def give(self, count: int, page_ids: Sequence[PageId] | None) -> None:
        """Give `count` pages back, as bytes that are empty for all."""
        self.num_taken -= count
        self._memory.num_empty_bytes += count * self.page_bytes
        assert self.num_taken >= 0, "more pages were given back than were taken"
        if self._ids is not None:
            self._ids.give(count, page_ids)

    def check(self, num_free: int, num_cached: int) -> None:
        """Assert law L1 for the device. What is free here may have changed since the cache was refreshed."""
        self._memory.check()

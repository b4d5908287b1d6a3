"""The pages of one model in the memory of a device that it shares with others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvarts.kv.pool import CountPool, IdPool, PageId
from kvarts.sharing.memory import DeviceMemory

__all__ = ["SharedPool"]


class SharedPool:
    """A Pool of pages of `page_bytes` in `memory`: a released page becomes empty bytes, available to all models.

    As with virtual memory, each model numbers its pages from 0 to `total` - 1 and the device counts bytes: `numbers`, a
    pool of `total` pages, records which numbers the model uses.
    """

    __slots__ = ("_ids", "_memory", "make_room", "num_taken", "page_bytes", "total")

    def __init__(self, memory: DeviceMemory, page_bytes: int, numbers: CountPool | IdPool) -> None:
        self._memory = memory
        self._ids = numbers if numbers.has_ids else None
        self.page_bytes = page_bytes
        self.total = numbers.total
        # A partial instead of a method, which would add a call: this runs for every page that is taken.
        self.make_room: Callable[[int], None] = partial(memory.make_room, self)
        """Evicts until the given number of pages is empty, from this model or others."""
        self.num_taken = 0
        """Pages that this model has allocated and not released."""

    @property
    def num_empty(self) -> int:
        """Pages that the empty bytes are enough for."""
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
        """Return False: other models may take empty bytes at any time."""
        return False

    def take(self, count: int) -> list[PageId] | None:
        """Take `count` pages."""
        self.num_taken += count
        self._memory.num_empty_bytes -= count * self.page_bytes
        assert self._memory.num_empty_bytes >= 0, f"{count} pages asked for, more than are empty"
        return None if self._ids is None else self._ids.take(count)

    def give(self, count: int, page_ids: Sequence[PageId] | None) -> None:
        """Release `count` pages, as bytes that are empty for all models."""
        self.num_taken -= count
        self._memory.num_empty_bytes += count * self.page_bytes
        assert self.num_taken >= 0, "more pages were given back than were taken"
        if self._ids is not None:
            self._ids.give(count, page_ids)

    def check(self, num_free: int, num_cached: int) -> None:
        """Assert law L1 for the device. The free pages here may have changed since the cache was refreshed."""
        self._memory.check()

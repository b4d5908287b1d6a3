"""The memory of a device for a cache with KV groups: parts of pages draw on the bytes shared by all models."""

from __future__ import annotations

from typing import Protocol

from kvarts.kv.shared_memory import SharedMemory
from kvarts.sharing.memory import DeviceMemory
from kvarts.sharing.pool import SharedPool

__all__ = ["PartsMemory"]


class Parts(Protocol):
    """A cache of parts that can share its memory: RunCache."""

    empty_bytes: int
    cached_bytes: int

    def share(self, memory: SharedMemory) -> None:
        """Take all bytes from `memory` from now on."""

    def resize(self, num_bytes: int) -> None:
        """Add `num_bytes` empty bytes; a negative number removes them."""

    @property
    def next_stamp(self) -> int:
        """The release stamp of the part that is evicted next. There must be a cached part."""

    @property
    def next_bytes(self) -> int:
        """Bytes of that part, and of those that are evicted right after it."""


class PartsMemory:
    """The SharedMemory of `parts`, a cache of one model, in `memory`.

    Bytes are allocated and released through `pool`, whose pages are blocks.
    """

    __slots__ = ("_memory", "_parts", "_pool")

    def __init__(self, memory: DeviceMemory, pool: SharedPool, parts: Parts) -> None:
        self._memory = memory
        self._pool = pool
        self._parts = parts
        parts.share(self)

    def make_room(self, num_bytes: int) -> None:
        """Make `num_bytes` bytes empty in the cache, evicting from it or from other models."""
        self.take_back()
        pool = self._pool
        num_blocks = num_bytes // pool.page_bytes
        pool.make_room(num_blocks)
        pool.take(num_blocks)
        self._parts.resize(num_bytes)

    def take_back(self) -> None:
        """Return the cache's empty bytes to the pool."""
        parts, pool = self._parts, self._pool
        num_bytes = parts.empty_bytes
        if num_bytes:
            parts.resize(-num_bytes)
            pool.give(num_bytes // pool.page_bytes, None)

    @property
    def num_free_bytes(self) -> int:
        """Bytes that the cache could take now: empty or cached, here or in other models' caches."""
        return self._memory.num_free_bytes + self._parts.empty_bytes

    def tick(self) -> int:
        """Return the stamp of the present release."""
        return self._memory.clock.tick()

    @property
    def next_stamp(self) -> int:
        """The release stamp of the part that is evicted next. There must be a cached part."""
        return self._parts.next_stamp

    @property
    def num_next_pages(self) -> int:
        """Blocks of that part, and of those that are evicted right after it."""
        return self._parts.next_bytes // self._pool.page_bytes

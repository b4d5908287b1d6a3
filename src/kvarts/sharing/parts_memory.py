"""The memory of a device as a cache with KV groups sees it: parts of pages draw on the bytes of all models."""

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
        """Add `num_bytes` empty bytes; below 0, take so many away."""

    @property
    def next_stamp(self) -> int:
        """When the part was released that is evicted next; something is cached."""

    @property
    def next_bytes(self) -> int:
        """The bytes of that part, and of those that go right after it."""


class PartsMemory:
    """The SharedMemory of `parts`, a cache of one model, in `memory`.

    Bytes are taken and given back by `pool`, the pages of which are blocks.
    """

    __slots__ = ("_memory", "_parts", "_pool")

    def __init__(self, memory: DeviceMemory, pool: SharedPool, parts: Parts) -> None:
        self._memory = memory
        self._pool = pool
        self._parts = parts
        parts.share(self)

    def make_room(self, num_bytes: int) -> None:
        """See to it that `num_bytes` bytes are empty in the cache. Evicts there, or from others."""
        self.take_back()
        pool = self._pool
        num_blocks = num_bytes // pool.page_bytes
        pool.make_room(num_blocks)
        pool.take(num_blocks)
        self._parts.resize(num_bytes)

    def take_back(self) -> None:
        """Take what is empty in the cache."""
        parts, pool = self._parts, self._pool
        num_bytes = parts.empty_bytes
        if num_bytes:
            parts.resize(-num_bytes)
            pool.give(num_bytes // pool.page_bytes, None)

    @property
    def num_free_bytes(self) -> int:
        """Bytes that the cache could take now: empty or cached, there or elsewhere."""
        return self._memory.num_free_bytes + self._parts.empty_bytes

    def tick(self) -> int:
        """Return the stamp of a release that happens now."""
        return self._memory.clock.tick()

    @property
    def next_stamp(self) -> int:
        """When the part was released that is evicted next; something is cached."""
        return self._parts.next_stamp

    @property
    def num_next_pages(self) -> int:
        """Blocks of that part, and of those that go right after it."""
        return self._parts.next_bytes // self._pool.page_bytes

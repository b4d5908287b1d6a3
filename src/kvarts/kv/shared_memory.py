"""The requests of a cache of parts to a memory in which others have parts as well."""

from __future__ import annotations

from typing import Protocol

__all__ = ["SharedMemory"]


class SharedMemory(Protocol):
    """The memory of several caches, as one of them sees it. Empty bytes of a cache are returned to it in between."""

    def make_room(self, num_bytes: int) -> None:
        """Evict, there or from others, until `num_bytes` bytes, which must be free, are empty in the cache."""

    def take_back(self) -> None:
        """Take back the empty bytes of the cache."""

    @property
    def num_free_bytes(self) -> int:
        """Bytes that the cache could take now: empty or cached, there or elsewhere."""

    def tick(self) -> int:
        """Return the stamp of a release that happens now: earlier releases, in any of the caches, have smaller ones."""

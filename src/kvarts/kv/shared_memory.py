"""What a cache of parts asks of a memory in which others have parts as well."""

from __future__ import annotations

from typing import Protocol

__all__ = ["SharedMemory"]


class SharedMemory(Protocol):
    """The memory of several caches, as one of them sees it. What a cache has empty of it is given back in between."""

    def make_room(self, num_bytes: int) -> None:
        """See to it that `num_bytes` bytes are empty in the cache; so many are free. Evicts there, or from others."""

    def take_back(self) -> None:
        """Take what is empty in the cache."""

    @property
    def num_free_bytes(self) -> int:
        """Bytes that the cache could take now: empty or cached, there or elsewhere."""

    def tick(self) -> int:
        """Return the stamp of a release that happens now: what was released earlier, in whatever cache, has a less."""

"""The paged prefix cache of one model, in memory that it shares with others."""

from __future__ import annotations

from collections.abc import Sequence

from kvarts.errors import ConfigError
from kvarts.event_log import Tell
from kvarts.kv.cache import PageCache
from kvarts.kv.pool import PageId
from kvarts.kv.tree import Node, Path, PrefixTree
from kvarts.sharing.memory import DeviceMemory

__all__ = ["SharedCache"]


class SharedPool:
    """Pages of one size in shared memory: what is given back is empty for everybody. See Pool."""

    __slots__ = ("_memory", "_page_bytes", "num_taken", "total")

    def __init__(self, memory: DeviceMemory, page_bytes: int) -> None:
        self._memory = memory
        self._page_bytes = page_bytes
        self.total = memory.num_bytes // page_bytes
        self.num_taken = 0

    @property
    def num_empty(self) -> int:
        """See Pool."""
        return self._memory.num_empty_bytes // self._page_bytes

    def take(self, count: int) -> None:
        """See Pool."""
        self.num_taken += count
        self._memory.num_empty_bytes -= count * self._page_bytes
        assert self._memory.num_empty_bytes >= 0, f"{count} pages asked for, more than are empty"

    def give(self, count: int, page_ids: Sequence[PageId] | None = None) -> None:
        """See Pool."""
        self.num_taken -= count
        self._memory.num_empty_bytes += count * self._page_bytes
        assert self.num_taken >= 0, "more pages given back than were taken"


class AgedTree(PrefixTree):
    """A PrefixTree whose cached runs say when they were released. Writes `stamp` of its nodes."""

    def __init__(self, memory: DeviceMemory, tell: Tell | None) -> None:
        super().__init__(tell)
        self._memory = memory

    @property
    def oldest(self) -> Node:
        """The run that is evicted next; something is cached."""
        return self._lru.newer

    def release(self, path: Path) -> None:
        """See PrefixTree."""
        super().release(path)
        self._memory.last_stamp += 1
        stamp = self._memory.last_stamp
        for node in self.walk(path):
            if not node.refs:
                node.stamp = stamp


class SharedCache(PageCache):
    """A PageCache of pages of `page_bytes` in `memory`, of which `guaranteed_bytes` are its own whenever it needs them.

    Pages are only counted. `num_free` is what can be taken now, and true from one `refresh` until somebody else takes
    or releases something. Raises ConfigError for a page larger than the device, and see DeviceMemory.
    """

    __slots__ = ("claim", "claimed_bytes", "guaranteed_bytes", "memory", "name", "page_bytes")

    pool: SharedPool  # type: ignore[assignment]
    tree: AgedTree

    def __init__(
        self,
        name: str,
        memory: DeviceMemory,
        *,
        page_bytes: int,
        guaranteed_bytes: int = 0,
        tell: Tell | None = None,
    ) -> None:
        if not 1 <= page_bytes <= memory.num_bytes:
            raise ConfigError(
                f"one page has {page_bytes:,} bytes; the device has {memory.num_bytes:,}", field=f"{name}.page_bytes"
            )
        if guaranteed_bytes < 0:
            raise ConfigError(f"must be at least 0, got {guaranteed_bytes}", field=f"{name}.guarantee")
        super().__init__(memory.num_bytes // page_bytes, with_page_ids=False)
        self.name = name
        self.memory = memory
        self.page_bytes = page_bytes
        self.guaranteed_bytes = guaranteed_bytes
        self.claimed_bytes = 0
        """What somebody who waits needs: nobody who claimed later may be admitted with it beyond a guarantee."""
        self.claim = 0
        """The number of the claim; earlier ones go first."""
        self.pool = SharedPool(memory, page_bytes)
        self.tree = AgedTree(memory, tell)
        self.match = self.tree.match
        memory.add(self)

    @property
    def num_used(self) -> int:
        """See PageCache."""
        return self.pool.num_taken - self.tree.num_cached

    @property
    def num_used_bytes(self) -> int:
        """Of the pages that somebody references."""
        return self.num_used * self.page_bytes

    @property
    def num_beyond_bytes(self) -> int:
        """Of used and cached pages, how much is more than the guarantee; below 0 for less."""
        return self.pool.num_taken * self.page_bytes - self.guaranteed_bytes

    def is_within(self, num_pages: int) -> bool:
        """Whether it would use no more than its guarantee with `num_pages` more."""
        return self.num_used_bytes + num_pages * self.page_bytes <= self.guaranteed_bytes

    def refresh(self) -> None:
        """Brings `num_free` up to date."""
        self.num_free = self.memory.num_free_bytes // self.page_bytes

    def num_free_to_admit(self, num_pages: int) -> int:
        """See PageCache. What others claimed before is kept for them, unless all stays within its own guarantee."""
        claimed = 0
        for other in self.memory.caches.values():
            if other is not self and (not self.claimed_bytes or other.claim < self.claim):
                claimed += other.claimed_bytes
        if not claimed or self.is_within(num_pages):
            return self.num_free
        return self.num_free - -(-claimed // self.page_bytes)

    @property
    def num_most(self) -> int:
        """See PageCache. What is left if all others use what is guaranteed to them."""
        others = sum(cache.guaranteed_bytes for cache in self.memory.caches.values() if cache is not self)
        return (self.memory.num_bytes - others) // self.page_bytes

    def make_claim(self, num_pages: int, *, is_new: bool) -> bool:
        """Claims `num_pages`, or with 0 nothing; `is_new`: not for who claimed last. Whether others may gain by it."""
        num_bytes = num_pages * self.page_bytes
        is_less = num_bytes < self.claimed_bytes or (is_new and self.claimed_bytes > 0)
        if num_bytes and (is_new or not self.claimed_bytes):
            self.memory.last_claim += 1
            self.claim = self.memory.last_claim
        self.claimed_bytes = num_bytes
        return is_less

    def take(self, count: int) -> None:
        """See PageCache."""
        self.memory.make_room(self, count)
        self.num_free -= count
        self.pool.take(count)

    def shed(self, count: int) -> None:
        """Evicts `count` of its cached pages, for whoever needs the room."""
        self.tree.evict(count)
        self.num_evicted += count
        self.pool.give(count)

    def has_empty(self, count: int) -> bool:
        """See PageCache. Others may take them at any time."""
        return False

    def _check_free(self) -> None:
        self.memory.check()

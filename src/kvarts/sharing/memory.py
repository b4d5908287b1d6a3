"""The memory of one device, in bytes, that several caches share.

A page is used or cached by one of them; what is neither is *empty*, and nobody's. Cached pages and empty bytes are
free: whoever runs something may have them. Each cache is guaranteed a part. What it uses beyond that is on loan, see
`kvarts.sharing.loans`; what it keeps cached beyond that goes first when somebody needs room.

Room is made in this order: empty bytes; pages cached beyond a guarantee, oldest first across caches; then pages that
the asker itself has cached; then pages of others, oldest first across caches. So an idle model's cache is safe from
what a busy one would like to keep, and gives way to what a busy one has to run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvarts.errors import ConfigError

if TYPE_CHECKING:
    from kvarts.sharing.cache import SharedCache

__all__ = ["DeviceMemory"]


class DeviceMemory:
    """Owner of `num_empty_bytes`. `caches` are by name, in the order in which they came.

    Raises ConfigError for a device without memory.
    """

    def __init__(self, num_bytes: int) -> None:
        if num_bytes < 1:
            raise ConfigError(f"must be at least 1 byte, got {num_bytes}", field="kv_memory")
        self.num_bytes = num_bytes
        self.num_empty_bytes = num_bytes
        self.caches: dict[str, SharedCache] = {}
        self.last_stamp = 0
        """Counts releases, of all caches together: what was released earlier is older."""
        self.last_claim = 0
        """Counts claims, of all caches together."""

    def add(self, cache: SharedCache) -> None:
        """`cache` takes part from now on. Raises ConfigError for a name twice, and guarantees beyond the whole."""
        if cache.name in self.caches:
            raise ConfigError("is there already", field=cache.name)
        guaranteed = sum(other.guaranteed_bytes for other in self.caches.values()) + cache.guaranteed_bytes
        if guaranteed > self.num_bytes:
            raise ConfigError(
                f"would bring all guarantees to {guaranteed:,} bytes; the device has {self.num_bytes:,}",
                field=f"{cache.name}.guarantee",
            )
        self.caches[cache.name] = cache

    def remove(self, cache: SharedCache) -> None:
        """`cache`, of which nothing is used, gives up what it has cached, and goes."""
        assert cache.num_used == 0, f"L2: {cache.num_used} pages of {cache.name} are in use"
        cache.shed(cache.num_cached)
        del self.caches[cache.name]

    # Questions --------------------------------------------------------------------------------------------

    @property
    def num_free_bytes(self) -> int:
        """Empty or cached."""
        free = self.num_empty_bytes
        for cache in self.caches.values():
            free += cache.tree.num_cached * cache.page_bytes
        return free

    # Making room ------------------------------------------------------------------------------------------

    def make_room(self, asker: SharedCache, num_pages: int) -> None:
        """Evicts until `num_pages` pages of `asker` are empty; that much is free.

        What goes is what would go if they were taken one by one: pages there is room for count as taken.
        """
        page_bytes = asker.page_bytes
        needed = num_pages * page_bytes
        while (missing := needed - self.num_empty_bytes) > 0:
            ready = self.num_empty_bytes // page_bytes * page_bytes
            beyond = asker.pool.num_taken * page_bytes + ready - asker.guaranteed_bytes
            over = [
                cache
                for cache in self.caches.values()
                if cache.tree.num_cached and (beyond if cache is asker else cache.num_beyond_bytes) > 0
            ]
            if over:
                oldest, num_evicted = _oldest(over)
                if oldest is not asker:
                    missing = min(missing, oldest.num_beyond_bytes)
                if beyond <= 0 and asker.tree.num_cached:
                    # Up to the page with which the asker keeps more than its guarantee itself.
                    missing = min(missing, ready + (-beyond // page_bytes + 1) * page_bytes - self.num_empty_bytes)
            elif asker.tree.num_cached:
                oldest, num_evicted = asker, asker.tree.num_cached
            else:
                others = [cache for cache in self.caches.values() if cache.tree.num_cached]
                assert others, f"L1: {needed} bytes were free, and are not"
                oldest, num_evicted = _oldest(others)
            num_missing = -(-missing // oldest.page_bytes)
            oldest.shed(num_missing if num_missing < num_evicted else num_evicted)

    # Laws -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Asserts law L1 for the device."""
        held = sum((cache.num_used + cache.num_cached) * cache.page_bytes for cache in self.caches.values())
        assert held + self.num_empty_bytes == self.num_bytes, (
            f"L1: {held} bytes held and {self.num_empty_bytes} empty of {self.num_bytes}"
        )
        assert self.num_empty_bytes >= 0, "L1: more is held than there is"


def _oldest(caches: list[SharedCache]) -> tuple[SharedCache, int]:
    """The one with the oldest cached run, and how many pages of it are older than all that the others have."""
    if len(caches) == 1:
        return caches[0], caches[0].tree.num_cached
    cache = min(caches, key=lambda cache: cache.tree.oldest.stamp)
    return cache, cache.tree.oldest.end - cache.tree.oldest.start

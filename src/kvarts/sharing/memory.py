"""The memory of one device, in bytes, that several models share.

A page is used or cached by one of them; all other memory is *empty*, and belongs to no model. Cached pages and empty
bytes are free: any model may take them for running requests. Each model is guaranteed a part. Its use beyond that is on
loan, see `kvarts.sharing.loans`; its cached pages beyond that are the first to be evicted when another model needs
room.

Room is made in this order: empty bytes; pages cached beyond a guarantee, oldest first across models; then the asker's
own cached pages; then cached pages of others, oldest first across models. So an idle model's cache is safe from the
cache of a busy one, but gives way to a busy model's running requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvarts.errors import ConfigError
from kvarts.sharing.ages import ReleaseClock

if TYPE_CHECKING:
    from kvarts.sharing.part import DevicePart
    from kvarts.sharing.pool import SharedPool

__all__ = ["DeviceMemory"]


class DeviceMemory:
    """Owner of the bytes. `parts` are by name, in the order of `add`; their pools write `num_empty_bytes`.

    Raises ConfigError for a device without memory.
    """

    def __init__(self, num_bytes: int) -> None:
        if num_bytes < 1:
            raise ConfigError(f"must be at least 1 byte, got {num_bytes}", field="kv_memory")
        self.num_bytes = num_bytes
        self.num_empty_bytes = num_bytes
        self.parts: dict[str, DevicePart] = {}
        self._part_of: dict[SharedPool, DevicePart] = {}
        self.clock = ReleaseClock()
        """Counts releases, of all parts together."""
        self.last_claim = 0
        """Counts claims, of all parts together."""

    def add(self, part: DevicePart) -> None:
        """Add `part`. Raise ConfigError for a name that exists, and for guarantees beyond the whole."""
        if part.name in self.parts:
            raise ConfigError("is there already", field=part.name)
        guaranteed = sum(other.guaranteed_bytes for other in self.parts.values()) + part.guaranteed_bytes
        if guaranteed > self.num_bytes:
            raise ConfigError(
                f"would bring all guarantees to {guaranteed:,} bytes; the device has {self.num_bytes:,}",
                field=f"{part.name}.guarantee",
            )
        self.parts[part.name] = part
        self._part_of[part.pool] = part

    def remove(self, part: DevicePart) -> None:
        """Evict all cached pages of `part`, which must not have used pages, and remove it."""
        cache = part.cache
        assert cache.num_used == 0, f"L2: {cache.num_used} pages of {part.name} are in use"
        cache.shed(cache.num_cached)
        del self.parts[part.name], self._part_of[part.pool]

    # Queries ----------------------------------------------------------------------------------------------

    @property
    def num_free_bytes(self) -> int:
        """Empty or cached bytes."""
        free = self.num_empty_bytes
        for part in self.parts.values():
            free += part.cache.num_cached * part.page_bytes
        return free

    # Making room ------------------------------------------------------------------------------------------

    def make_room(self, pool: SharedPool, num_pages: int) -> None:
        """Evict until `num_pages` pages of `pool` are empty. At least that much must be free.

        The evicted pages are the same as if pages were taken one by one: pages that have room count as taken.
        """
        asker = self._part_of[pool]
        page_bytes = asker.page_bytes
        needed = num_pages * page_bytes
        while (missing := needed - self.num_empty_bytes) > 0:
            ready = self.num_empty_bytes // page_bytes * page_bytes
            beyond = pool.num_taken * page_bytes + ready - asker.guaranteed_bytes
            # `num_beyond_bytes` is spelled out: this runs for every page that is taken from a full device.
            over = [
                part
                for part in self.parts.values()
                if part.cache.num_cached
                and (beyond if part is asker else part.pool.num_taken * part.page_bytes - part.guaranteed_bytes) > 0
            ]
            if over:
                oldest, num_evicted = _oldest(over)
                if oldest is not asker:
                    missing = min(missing, oldest.num_beyond_bytes)
                if beyond <= 0 and asker.cache.num_cached:
                    # Up to the page with which the asker itself exceeds its guarantee.
                    missing = min(missing, ready + (-beyond // page_bytes + 1) * page_bytes - self.num_empty_bytes)
            elif asker.cache.num_cached:
                oldest, num_evicted = asker, asker.cache.num_cached
            else:
                others = [part for part in self.parts.values() if part.cache.num_cached]
                assert others, f"L1: {needed} bytes were free, and are not"
                oldest, num_evicted = _oldest(others)
            num_missing = -(-missing // oldest.page_bytes)
            oldest.cache.shed(num_missing if num_missing < num_evicted else num_evicted)

    # Laws -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert law L1 for the device."""
        held = sum((part.cache.num_used + part.cache.num_cached) * part.page_bytes for part in self.parts.values())
        assert held + self.num_empty_bytes == self.num_bytes, (
            f"L1: {held} bytes held and {self.num_empty_bytes} empty of {self.num_bytes}"
        )
        assert self.num_empty_bytes >= 0, "L1: more is held than there is"


def _oldest(parts: list[DevicePart]) -> tuple[DevicePart, int]:
    """Return the part with the oldest run to evict, and its number of pages to evict before any other part's."""
    if len(parts) == 1:
        return parts[0], parts[0].cache.num_cached
    part = min(parts, key=lambda part: part.next_stamp)
    return part, part.num_next_pages

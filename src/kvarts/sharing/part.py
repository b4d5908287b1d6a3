"""One model's part of a device's memory: its guarantee, its claim, and the pages that it may take."""

from __future__ import annotations

from typing import Protocol

from kvarts.errors import ConfigError
from kvarts.event_log import Tell
from kvarts.kv.cache import Cache
from kvarts.kv.eviction import EvictionOrder, LruOrder
from kvarts.kv.group_pages import GroupPages
from kvarts.kv.page_cache import PageCache
from kvarts.kv.pool import CountPool, IdPool
from kvarts.kv.tree import PrefixTree
from kvarts.kv.watcher import TreeWatcher
from kvarts.request import Request
from kvarts.sharing.ages import AgedOrder
from kvarts.sharing.memory import DeviceMemory
from kvarts.sharing.parts_memory import PartsMemory
from kvarts.sharing.pool import SharedPool

__all__ = ["DevicePart", "open_grouped_part", "open_part"]


class Others(Protocol):
    """The device, as seen by one of its parts: memory kept for the other models, and preemption of their requests."""

    def kept_for_others(self, model: str) -> int:
        """Return the free bytes that a request of `model` beyond its guarantee must leave to the others."""

    def make_way(self, model: str, request: Request, num_pages: int, *, to_admit: bool) -> bool:
        """Preempt requests of other models until `num_pages` can be taken for `request` of `model`; return success."""


class Ages(Protocol):
    """Age of a model's oldest cached pages, comparable across models."""

    @property
    def next_stamp(self) -> int:
        """The release stamp of the pages that are evicted next. There must be cached pages."""

    @property
    def num_next_pages(self) -> int:
        """Number of pages of that age that are evicted together. There must be cached pages."""


class DevicePart:
    """A PageSource: `guaranteed_bytes` of `memory` are available to `cache` on demand. Writes its `num_free`.

    `device` is asked to preempt other models' requests, and writes `is_draining`. `token_budget` is written by its
    Tenant. `cache` takes its pages from `pool`; for a model with KV groups these are
    blocks. Raises ConfigError for a guarantee below 0, and as DeviceMemory does.
    """

    __slots__ = (
        "_ages",
        "_device",
        "cache",
        "claim",
        "claimed_bytes",
        "guaranteed_bytes",
        "has_given_back",
        "is_alone",
        "is_draining",
        "memory",
        "name",
        "page_bytes",
        "pool",
        "token_budget",
    )

    def __init__(
        self,
        name: str,
        memory: DeviceMemory,
        device: Others,
        pool: SharedPool,
        ages: Ages,
        cache: Cache,
        *,
        guaranteed_bytes: int = 0,
    ) -> None:
        if guaranteed_bytes < 0:
            raise ConfigError(f"must be at least 0, got {guaranteed_bytes}", field=f"{name}.guarantee")
        self.name = name
        self.memory = memory
        self.pool = pool
        self.cache = cache
        self.page_bytes = pool.page_bytes
        self.guaranteed_bytes = guaranteed_bytes
        self.claimed_bytes = 0
        """Bytes that a waiting request needs. Requests with later claims may take them only within their guarantee."""
        self.claim = 0
        """The number of the claim; earlier claims are served first."""
        self.token_budget = 0
        self.is_draining = False
        self.has_given_back = False
        """Whether stores were given up for another model and its loop has not noticed yet."""
        self.is_alone = False
        self._ages = ages
        self._device = device
        memory.add(self)

    # Memory -----------------------------------------------------------------------------------------------

    @property
    def num_used_bytes(self) -> int:
        """Bytes of the used pages."""
        return self.cache.num_used * self.page_bytes

    @property
    def num_beyond_bytes(self) -> int:
        """Bytes of its used and cached pages minus the guarantee; may be negative."""
        return self.pool.num_taken * self.page_bytes - self.guaranteed_bytes

    @property
    def next_stamp(self) -> int:
        """The release stamp of the run that it would evict next. There must be a cached run."""
        return self._ages.next_stamp

    @property
    def num_next_pages(self) -> int:
        """Pages of the run that it would evict next. There must be a cached run."""
        return self._ages.num_next_pages

    def is_within(self, num_pages: int) -> bool:
        """Return whether it would use no more than its guarantee with `num_pages` more."""
        return self.num_used_bytes + num_pages * self.page_bytes <= self.guaranteed_bytes

    # Queries of a scheduler -------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Update `num_free` of the cache."""
        self.cache.refresh(self.memory.num_free_bytes // self.page_bytes)

    @property
    def num_most(self) -> int:
        """Pages that one request is sure to get eventually: those that remain if all others use their guarantees."""
        others = sum(part.guaranteed_bytes for part in self.memory.parts.values() if part is not self)
        return (self.memory.num_bytes - others) // self.page_bytes

    @property
    def num_withheld(self) -> int:
        """Pages that are not used here and cannot be taken, since others use them."""
        return self.pool.total - self.cache.num_used - self.cache.num_free

    def num_free_to_admit(self, num_pages: int) -> int:
        """Return the pages available now to a request that is admitted with `num_pages` of them.

        Within its model's guarantee it can take all free pages; beyond it, pages kept for the others stay free.
        """
        if self.is_within(num_pages):
            return self.cache.num_free
        # In bytes: the rest of a page may be enough for the others.
        kept = self._device.kept_for_others(self.name)
        return (self.memory.num_free_bytes - kept) // self.page_bytes if kept else self.cache.num_free

    def num_lent(self) -> int:
        """Return the idle pages that stores hold, of all models."""
        return self._lent_bytes() // self.page_bytes

    def _lent_bytes(self) -> int:
        return sum(part.cache.num_lent() * part.page_bytes for part in self.memory.parts.values())

    def reclaim(self, num_pages: int, num_matched: int = 0) -> bool:
        """Give up stores for `num_pages` pages, if that is enough: its own first."""
        short_bytes = num_pages * self.page_bytes
        if short_bytes + num_matched * self.page_bytes > self._lent_bytes():
            return False
        for part in (self, *(other for other in self.memory.parts.values() if other is not self)):
            num_lent = part.cache.num_lent()
            part.cache.give_back(min(num_lent, -(-short_bytes // part.page_bytes)))
            short_bytes -= (num_lent - part.cache.num_lent()) * part.page_bytes
            part.has_given_back |= part is not self and part.cache.num_lent() < num_lent
            if short_bytes <= 0:
                break
        self.refresh()
        return True

    def make_way(self, request: Request, num_pages: int, *, to_admit: bool) -> bool:
        """Preempt requests of other models until `num_pages` can be taken for `request`; return success."""
        return self._device.make_way(self.name, request, num_pages, to_admit=to_admit)

    # Claims -----------------------------------------------------------------------------------------------

    def make_claim(self, num_pages: int, *, is_new: bool) -> bool:
        """Claim `num_pages`, or with 0 drop the claim; return whether others may gain by it.

        `is_new`: for a different request than the previous claim.
        """
        num_bytes = num_pages * self.page_bytes
        is_less = num_bytes < self.claimed_bytes or (is_new and self.claimed_bytes > 0)
        if num_bytes and (is_new or not self.claimed_bytes):
            self.memory.last_claim += 1
            self.claim = self.memory.last_claim
        self.claimed_bytes = num_bytes
        return is_less


def open_part(
    name: str,
    memory: DeviceMemory,
    device: Others,
    *,
    page_bytes: int,
    guaranteed_bytes: int = 0,
    with_page_ids: bool = False,
    order: EvictionOrder | None = None,
    watcher: TreeWatcher | None = None,
    tell: Tell | None = None,
) -> DevicePart:
    """Return a part of `memory` with a new pool, tree and cache.

    `order` (default LruOrder) and `watcher`: see PrefixTree; any order is wrapped to record ages across models. Raises
    ConfigError for a page larger than the device, and as DevicePart does.
    """
    total = _num_pages(name, memory, page_bytes)
    pool = SharedPool(memory, page_bytes, IdPool(total) if with_page_ids else CountPool(total))
    aged = AgedOrder(LruOrder() if order is None else order, memory.clock)
    cache = PageCache(pool, PrefixTree(aged, tell, watcher=watcher))
    return DevicePart(name, memory, device, pool, aged, cache, guaranteed_bytes=guaranteed_bytes)


def open_grouped_part(
    name: str,
    memory: DeviceMemory,
    device: Others,
    cache: GroupPages,
    *,
    guaranteed_bytes: int = 0,
) -> DevicePart:
    """Return a part of `memory` for a model with KV groups: `cache`, which is empty, draws on it in blocks.

    It must have as many blocks as the memory. Raises ConfigError for a block larger than the device, and as DevicePart
    does.
    """
    total = _num_pages(name, memory, cache.block_bytes)
    assert cache.pool.total == total, f"{cache.pool.total} blocks, and the memory has {total}"
    pool = SharedPool(memory, cache.block_bytes, CountPool(total))
    parts = PartsMemory(memory, pool, cache.parts)
    part = DevicePart(name, memory, device, pool, parts, cache, guaranteed_bytes=guaranteed_bytes)
    cache.count()
    return part


def _num_pages(name: str, memory: DeviceMemory, page_bytes: int) -> int:
    """Return the number of pages that the whole device would hold for one model."""
    if not 1 <= page_bytes <= memory.num_bytes:
        raise ConfigError(
            f"one page has {page_bytes:,} bytes; the device has {memory.num_bytes:,}", field=f"{name}.page_bytes"
        )
    return memory.num_bytes // page_bytes

"""The memory of one device, in bytes, that several models share: the whole, and the part of each model.

A page is used or cached by one of them; all other memory is *empty*, and belongs to no model. Cached pages and empty
bytes are free: any model may take them for running requests. Each model is guaranteed a part. Its use beyond that is on
loan (`sim/sharing/device.py`); its cached pages beyond that are the first to be evicted when another model needs
room.

Room is made in this order: empty bytes; pages cached beyond a guarantee, oldest first across models; then the asker's
own cached pages; then cached pages of others, oldest first across models. So an idle model's cache is safe from the
cache of a busy one, but gives way to a busy model's running requests.

Ages of cached runs are comparable across the models: an order around each model's own records when runs were released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Protocol, TypeAlias

from kvarts.base.errors import ConfigError
from kvarts.core.event_log import Emit
from kvarts.core.kv.cache import Cache
from kvarts.core.kv.eviction import EvictionOrder, LruOrder, Node, TreeWatcher, noter_of, ranges_read_by
from kvarts.core.kv.group_pages import GroupPages
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.kv.pool import CountPool, IdPool, PageId
from kvarts.core.kv.run_cache import RunCache
from kvarts.core.kv.tree import PrefixTree
from kvarts.core.request import Request

__all__ = [
    "AgedOrder",
    "DeviceMemory",
    "DevicePart",
    "PartsMemory",
    "ReleaseClock",
    "SharedPool",
    "open_grouped_part",
    "open_part",
]


class ReleaseClock:
    """Counts the releases of all caches of one memory: an earlier release has a smaller stamp."""

    __slots__ = ("_first", "_last")

    def __init__(self) -> None:
        self._first = self._last = 0

    def tick(self) -> int:
        """Return the stamp of the present release."""
        self._last += 1
        return self._last

    def before_all(self) -> int:
        """Return a stamp older than all others."""
        self._first -= 1
        return self._first


class AgedOrder:
    """An EvictionOrder around `inner` that also records when each run was released.

    `inner` chooses the next run, even where its choice depends on later runs or on lower tiers. The stamps make the age
    of that run comparable with runs of other orders that have the same clock.
    """

    __slots__ = ("_clock", "_inner", "_stamps", "next_run", "note_request", "reads_ranges")

    def __init__(self, inner: EvictionOrder, clock: ReleaseClock) -> None:
        self._inner = inner
        self.next_run = inner.next_run
        """Returns the run that `inner` would evict next."""
        self.note_request = noter_of(inner)
        self.reads_ranges = ranges_read_by(inner)
        self._clock = clock
        self._stamps: dict[Node, int] = {}

    @property
    def next_stamp(self) -> int:
        """The release stamp of the run that is evicted next. There must be a cached run."""
        return self._stamps[self.next_run()]

    @property
    def num_next_pages(self) -> int:
        """Pages of that run."""
        node: Node = self.next_run()
        return node.end - node.start

    def __iter__(self) -> Iterator[Node]:
        """Return all listed runs, in the order of `inner`."""
        return iter(self._inner)

    def released(self, nodes: Sequence[Node]) -> None:
        """List `nodes`, all with the same age."""
        stamp = self._clock.tick()
        stamps = self._stamps
        for node in nodes:
            stamps[node] = stamp
        self._inner.released(nodes)

    def pinned(self, nodes: Sequence[Node], path: Sequence[Node]) -> None:
        """Unlist `nodes`."""
        stamps = self._stamps
        for node in nodes:
            del stamps[node]
        self._inner.pinned(nodes, path)

    def removed(self, node: Node) -> None:
        """Unlist `node`."""
        del self._stamps[node]
        self._inner.removed(node)

    def put_back(self, nodes: Sequence[Node]) -> None:
        """List `nodes`, older than all others."""
        for node in reversed(nodes):
            self._stamps[node] = self._clock.before_all()
        self._inner.put_back(nodes)

    def split(self, head: Node, tail: Node) -> None:
        """List `head` with the age of `tail`."""
        self._stamps[head] = self._stamps[tail]
        self._inner.split(head, tail)

    def held(self, node: Node) -> None:
        """Skip `node` until it is unheld."""
        self._inner.held(node)

    def unheld(self, node: Node) -> None:
        """Stop skipping `node`."""
        self._inner.unheld(node)


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
        self.evicted: list[tuple[DevicePart, int]] = []
        """Evictions of the last `make_room` that evicted anything, in order: a part, and the number of its pages."""
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

    # Queries ----------------------------------------------------------------------------------------------

    @property
    def num_free_bytes(self) -> int:
        """Empty or cached bytes that are promised to no request."""
        free = self.num_empty_bytes
        for part in self.parts.values():
            free += (part.cache.num_cached - part.cache.num_promised) * part.page_bytes
        return max(0, free)  # stores may hold what is promised; they give it back when it is taken

    # Making room ------------------------------------------------------------------------------------------

    def make_room(self, pool: SharedPool, num_pages: int) -> None:
        """Evict until `num_pages` pages of `pool` are empty. At least that much must be free.

        The evicted pages are the same as if pages were taken one by one: pages that have room count as taken.
        """
        page_bytes = pool.page_bytes
        needed = num_pages * page_bytes
        if needed <= self.num_empty_bytes:
            return
        evicted = self.evicted = []
        asker = self._part_of[pool]
        while (missing := needed - self.num_empty_bytes) > 0:
            ready = self.num_empty_bytes // page_bytes * page_bytes
            beyond = pool.num_taken * page_bytes + ready - asker.guaranteed_bytes
            # `num_beyond_bytes` is spelled out: this runs whenever pages are taken from a full device.
            num_over = 0
            for part in self.parts.values():
                num_cached = part.cache.num_cached
                if (
                    num_cached
                    and (beyond if part is asker else part.pool.num_taken * part.page_bytes - part.guaranteed_bytes) > 0
                ):
                    num_over += 1
                    oldest, num_evicted = part, num_cached
            if num_over:
                if num_over > 1:
                    oldest, num_evicted = _oldest(self._over(asker, beyond))
                if oldest is not asker:
                    missing = min(missing, oldest.num_beyond_bytes)
                if beyond <= 0 and asker.cache.num_cached:
                    # Up to the page with which the asker itself exceeds its guarantee.
                    missing = min(missing, ready + (-beyond // page_bytes + 1) * page_bytes - self.num_empty_bytes)
            elif asker.cache.num_cached:
                oldest, num_evicted = asker, asker.cache.num_cached
            else:
                others = [part for part in self.parts.values() if part.cache.num_cached]
                if not others:
                    given_back = asker.return_lent(missing)
                    assert given_back, f"L1: {needed} bytes were free, and are not"
                    continue
                oldest, num_evicted = _oldest(others)
            num_missing = -(-missing // oldest.page_bytes)
            if num_missing < num_evicted:
                num_evicted = num_missing
            oldest.cache.evict(num_evicted)
            evicted.append((oldest, num_evicted))

    def _over(self, asker: DevicePart, beyond: int) -> list[DevicePart]:
        """Return the parts with cached pages that exceed their guarantee: `asker` by `beyond` bytes."""
        return [
            part
            for part in self.parts.values()
            if part.cache.num_cached and (beyond if part is asker else part.num_beyond_bytes) > 0
        ]

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
        self.make_room: Callable[[int], object] = partial(memory.make_room, self)
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


class PartsMemory:
    """The SharedMemory of `parts`, a cache of one model, in `memory`.

    They are allocated and released through `pool`, whose pages are blocks. A block is the unit of the cache, a byte
    there.
    """

    __slots__ = ("_memory", "_parts", "_pool")

    def __init__(self, memory: DeviceMemory, pool: SharedPool, parts: RunCache) -> None:
        self._memory = memory
        self._pool = pool
        self._parts = parts
        parts.share(self)

    def make_room(self, num_bytes: int) -> None:
        """Make `num_bytes` bytes empty in the cache, evicting from it or from other models."""
        self.take_back()
        pool = self._pool
        pool.make_room(num_bytes)
        pool.take(num_bytes)
        self._parts.resize(num_bytes)

    def take_back(self) -> None:
        """Return the cache's empty bytes to the pool."""
        parts, pool = self._parts, self._pool
        num_bytes = parts.empty_bytes
        if num_bytes:
            parts.resize(-num_bytes)
            pool.give(num_bytes, None)

    @property
    def num_free_bytes(self) -> int:
        """Bytes that the cache could take now: empty or cached, here or in other models' caches."""
        return self._memory.num_free_bytes // self._pool.page_bytes + self._parts.empty_bytes

    @property
    def num_empty_bytes(self) -> int:
        """Empty bytes of the device."""
        return self._memory.num_empty_bytes // self._pool.page_bytes

    def tick(self) -> int:
        """Return the stamp of the present release."""
        return self._memory.clock.tick()

    def before_all(self) -> int:
        """Return a stamp older than all others."""
        return self._memory.clock.before_all()

    @property
    def next_stamp(self) -> int:
        """The release stamp of the part that is evicted next. There must be a cached part."""
        return self._parts.next_stamp

    @property
    def num_next_pages(self) -> int:
        """Blocks of that part, and of those that are evicted right after it."""
        return self._parts.next_bytes


class Others(Protocol):
    """The device, as seen by one of its parts: memory kept for the other models, and preemption of their requests."""

    def kept_for_others(self, model: str) -> int:
        """Return the free bytes that a request of `model` beyond its guarantee must leave to the others."""

    def preempt_for(self, model: str, request: Request, num_pages: int, *, to_admit: bool) -> bool:
        """Preempt requests of other models until `num_pages` can be taken for `request` of `model`; return success."""


Ages: TypeAlias = "AgedOrder | PartsMemory"
"""The age of a model's oldest cached pages, comparable across models."""


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
        """Bytes of the used pages, and of those promised to requests that wait for loads."""
        return (self.cache.num_used + self.cache.num_promised) * self.page_bytes

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

    def take_in_turns(self, counts: Sequence[int]) -> list[int]:
        """Take so many pages in each of these turns, between which no other part takes any; there must be enough.

        Return the cached pages after each turn.
        """
        cache, memory, page_bytes = self.cache, self.memory, self.page_bytes
        num_cached, num_empty = cache.num_cached, memory.num_empty_bytes
        cache.take(sum(counts))
        if cache.num_cached == num_cached:
            return [num_cached] * len(counts)
        evicted = memory.evicted[::-1]
        part, num_left = evicted.pop()
        if part is self and not evicted:
            num_most = num_cached + num_empty // page_bytes
            left = [num_most - num_taken for num_taken in accumulate(counts)]
            return [num_left if num_left < num_cached else num_cached for num_left in left]
        after: list[int] = []
        for count in counts:
            if count:
                num_empty -= count * page_bytes
                while num_empty < 0:
                    if not num_left:
                        part, num_left = evicted.pop()
                    num_evicted = -(num_empty // part.page_bytes)
                    if num_evicted > num_left:
                        num_evicted = num_left
                    num_left -= num_evicted
                    num_empty += num_evicted * part.page_bytes
                    if part is self:
                        num_cached -= num_evicted
            after.append(num_cached)
        return after

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
        return sum(part.cache.lender.num_lent() * part.page_bytes for part in self.memory.parts.values())

    def reclaim_lent(self, num_pages: int, num_matched: int = 0) -> bool:
        """Give up stores for `num_pages` pages, if that is enough: its own first."""
        short_bytes = num_pages * self.page_bytes
        if short_bytes + num_matched * self.page_bytes > self._lent_bytes():
            return False
        self.return_lent(short_bytes)
        self.refresh()
        return True

    def return_lent(self, num_bytes: int) -> bool:
        """Give up stores of this model, then of others, for `num_bytes` bytes; return whether there were any."""
        short_bytes = num_bytes
        for part in (self, *(other for other in self.memory.parts.values() if other is not self)):
            num_lent = part.cache.lender.num_lent()
            part.cache.lender.return_lent(min(num_lent, -(-short_bytes // part.page_bytes)))
            short_bytes -= (num_lent - part.cache.lender.num_lent()) * part.page_bytes
            part.has_given_back |= part is not self and part.cache.lender.num_lent() < num_lent
            if short_bytes <= 0:
                break
        return short_bytes < num_bytes

    def preempt_for(self, request: Request, num_pages: int, *, to_admit: bool) -> bool:
        """Preempt requests of other models until `num_pages` can be taken for `request`; return success."""
        return self._device.preempt_for(self.name, request, num_pages, to_admit=to_admit)

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
    emit: Emit | None = None,
) -> DevicePart:
    """Return a part of `memory` with a new pool, tree and cache.

    `order` (default LruOrder) and `watcher`: see PrefixTree; any order is wrapped to record ages across models. Raises
    ConfigError for a page larger than the device, and as DevicePart does.
    """
    total = _num_pages(name, memory, page_bytes)
    pool = SharedPool(memory, page_bytes, IdPool(total) if with_page_ids else CountPool(total))
    aged = AgedOrder(LruOrder() if order is None else order, memory.clock)
    cache = PageCache(pool, PrefixTree(aged, emit, watcher=watcher))
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

"""The bytes of a memory with KV groups: which parts are used, cached and empty, and which are evicted next.

Parts that nothing holds are in one list of entries, the least recently released first; or an eviction order lists them,
and the list contains only those to evict before them. Empty bytes are taken before anything is evicted.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvarts.kv.eviction import EvictionOrder, noter_of, ranges_read_by
from kvarts.kv.group_memory import GroupMemory
from kvarts.kv.pool import IdPool, PageId
from kvarts.kv.run_events import RunEvents
from kvarts.kv.shared_memory import SharedMemory

__all__ = ["Listed", "PartAccount", "Spot"]


class Listed:
    """An entry of the list of a PartAccount, between `older` and `newer`; both are None while it is not listed.

    `stamp`: when its parts were released, where ages are known.
    """

    __slots__ = ("newer", "older", "stamp")

    def __init__(self) -> None:
        self.older: Listed | None = None
        self.newer: Listed | None = None
        self.stamp = 0

    def next_bytes(self, account: PartAccount) -> int:
        """Return the bytes of its next part to evict, and of those evicted right after it; 0 if it has none."""
        raise AssertionError("no part is cached")

    def eat(self, account: PartAccount, num_bytes: int) -> None:
        """Evict its parts until `num_bytes` are empty or it has none left; in that case unlist it."""
        raise AssertionError("parts are missing, and none is cached")

    def list_after(self, older: Listed) -> None:
        """List it right after `older`, with the same age."""
        newer = older.newer
        assert newer is not None
        self.stamp = older.stamp
        self.older, self.newer = older, newer
        older.newer = newer.older = self

    def unlist(self) -> None:
        """Remove it from the list."""
        older, newer = self.older, self.newer
        assert older is not None and newer is not None
        older.newer, newer.older = newer, older
        self.older = self.newer = None


class Spot(Listed):
    """The place of an entry that is not listed for the time being. There is nothing to evict, and it stays."""

    def next_bytes(self, account: PartAccount) -> int:
        """Return 0."""
        return 0

    def eat(self, account: PartAccount, num_bytes: int) -> None:
        """Do nothing."""


class PartAccount:
    """Owner of the counts of all parts in `total_bytes`, and of the list.

    If it shares its memory, `total_bytes` is its present part of that. `blocks`: the memory as blocks with ids; without
    it, bytes are counted. `events`: receives parts that become findable, are evicted, or are released by windows.
    `eviction_order`: lists runs of parts, and chooses the next to evict; without it, that is the least recently
    released.
    """

    def __init__(
        self,
        memory: GroupMemory,
        *,
        total_bytes: int,
        blocks: IdPool | None = None,
        events: RunEvents | None = None,
        eviction_order: EvictionOrder | None = None,
    ) -> None:
        groups = self.groups = memory.groups
        self.total_bytes = total_bytes
        self.empty_bytes = total_bytes
        self.cached_bytes = 0
        self.num_used = [0] * len(groups)
        """Parts in use, by group."""
        self.num_cached = [0] * len(groups)
        """Parts that can be found and are not in use, by group."""
        self.num_evicted = [0] * len(groups)
        self.evicted_bytes = self.released_bytes = 0
        """Bytes of parts that were evicted, and of those that have gone out of use, since the beginning."""
        self.part_bytes = [group.part_bytes for group in groups]
        self.page_bytes = memory.page_bytes
        """The bytes of a page with all its parts."""
        self._of_tokens = [index for index, group in enumerate(groups) if not group.is_state]
        self.shared: SharedMemory | None = None
        """The memory that provides all bytes, if others have parts in it as well."""
        self.blocks = blocks
        self.block_bytes = memory.block_bytes
        self.part_blocks = [group.part_bytes // memory.block_bytes for group in groups]
        self.events = events
        self.eviction_order = eviction_order
        self.note_request = noter_of(eviction_order)
        self.reads_ranges = self.note_request is not None and ranges_read_by(eviction_order)
        self.now_ns = 0
        """The time, for an order that uses it."""
        self._evicted: list[int] | None = None
        # One sentinel closes the list to a ring: its `newer` is the oldest entry, its `older` the youngest.
        self._ring = Listed()
        self._ring.older = self._ring.newer = self._ring

    @property
    def free_bytes(self) -> int:
        """Bytes that can be taken now: empty or cached."""
        return self.empty_bytes + self.cached_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of parts that sequences hold."""
        return self.total_bytes - self.free_bytes

    @property
    def room_bytes(self) -> int:
        """Bytes that can be taken now, here or from others: the same as `free_bytes`, unless the memory is shared."""
        return self.free_bytes if self.shared is None else self.shared.num_free_bytes

    # A memory that others share ---------------------------------------------------------------------------

    def share(self, memory: SharedMemory) -> None:
        """Take all bytes from `memory` from now on, and return empty ones to it; none may be in use yet."""
        assert self.empty_bytes == self.total_bytes, "what is to be shared is in use"
        self.shared = memory
        self.resize(-self.total_bytes)

    @property
    def is_shared(self) -> bool:
        """Whether others have parts of the same memory."""
        return self.shared is not None

    def give_back(self) -> None:
        """Return empty bytes to the memory, if it is shared."""
        if self.shared is not None:
            self.shared.take_back()

    def resize(self, num_bytes: int) -> None:
        """Add `num_bytes` empty bytes; if negative, remove that many."""
        self.total_bytes += num_bytes
        self.empty_bytes += num_bytes

    @property
    def next_stamp(self) -> int:
        """The stamp of the part that is evicted next; the memory is shared, and has cached parts here."""
        return self._oldest().stamp

    @property
    def next_bytes(self) -> int:
        """The bytes of that part, and of those evicted right after it."""
        return self._oldest().next_bytes(self)

    def _oldest(self) -> Listed:
        """Return the next entry to evict; it has parts."""
        ring = self._ring
        oldest = ring.newer
        if self.eviction_order is not None:
            return self.next_in_order()
        assert oldest is not None
        while oldest is not ring and not oldest.next_bytes(self):
            newer = oldest.newer
            oldest.eat(self, self.empty_bytes)  # it has no parts left, or is a place
            assert newer is not None
            oldest = newer
        return oldest

    # The list ---------------------------------------------------------------------------------------------

    def entries(self) -> Iterator[Listed]:
        """Iterate over the listed entries, the next to be evicted first."""
        entry = self._ring.newer
        while entry is not self._ring:
            assert entry is not None
            yield entry
            entry = entry.newer
        if self.eviction_order is not None:
            yield from self.eviction_order

    def next_in_order(self) -> Listed:
        """Return the next entry to evict if an eviction order lists the cached parts."""
        raise NotImplementedError

    @property
    def first(self) -> Listed | None:
        """The first entry of the list; None if the list is empty."""
        first = self._ring.newer
        return None if first is self._ring else first

    @property
    def youngest(self) -> Listed | None:
        """The entry that was listed last."""
        return self._ring.older

    def append(self, entry: Listed) -> None:
        """List `entry` as the youngest; the caller counts its parts."""
        ring = self._ring
        youngest = ring.older
        assert youngest is not None
        entry.older, entry.newer = youngest, ring
        youngest.newer = ring.older = entry
        if self.shared is not None:
            entry.stamp = self.shared.tick()

    def move_first(self, entry: Listed) -> None:
        """Make a listed entry the next to be evicted."""
        entry.unlist()
        ring = self._ring
        oldest = ring.newer
        assert oldest is not None
        entry.older, entry.newer = ring, oldest
        oldest.older = ring.newer = entry

    # Counts -----------------------------------------------------------------------------------------------

    def take(self, index: int, count: int) -> None:
        """Take `count` parts of a group, which must be free."""
        num_bytes = count * self.part_bytes[index]
        if self.empty_bytes < num_bytes:
            self.make_room(num_bytes)
        self.empty_bytes -= num_bytes
        self.num_used[index] += count

    def take_pages(self, count: int) -> None:
        """Take the parts of `count` pages in every group that keeps tokens."""
        num_bytes = count * self.page_bytes
        if self.empty_bytes < num_bytes:
            if self.shared is None:
                self.evict(num_bytes)
            else:
                self.shared.make_room(num_bytes)
        self.empty_bytes -= num_bytes
        num_used = self.num_used
        for index in self._of_tokens:
            num_used[index] += count

    def note_pages_taken(self, count: int) -> None:
        """Count the parts of `count` pages that were empty as used."""
        self.empty_bytes -= count * self.page_bytes
        num_used = self.num_used
        for index in self._of_tokens:
            num_used[index] += count

    def take_ids(self, index: int, count: int) -> list[PageId]:
        """Return block ids for `count` parts of a group that were counted as used; empty without ids."""
        return [] if self.blocks is None else self.blocks.take(count * self.part_blocks[index])

    def give_ids(self, block_ids: list[PageId]) -> None:
        """Return the ids of parts that are now empty to the pool."""
        if self.blocks is not None:
            self.blocks.give(len(block_ids), block_ids)

    def take_blocks(self, count: int) -> list[PageId]:
        """Take `count` blocks, which must be free, from the memory of the parts; return their ids."""
        assert self.blocks is not None, "memory without blocks is counted in bytes"
        num_bytes = count * self.block_bytes
        if self.empty_bytes < num_bytes:
            self.make_room(num_bytes)
        self.empty_bytes -= num_bytes
        return self.blocks.take(count)

    def give_blocks(self, block_ids: list[PageId]) -> None:
        """Return blocks that were taken by `take_blocks`."""
        self.give_ids(block_ids)
        self.empty_bytes += len(block_ids) * self.block_bytes

    def make_room(self, num_bytes: int) -> None:
        """Evict until `num_bytes` bytes, which must be free, are empty."""
        if self.shared is None:
            self.evict(num_bytes)
        else:
            self.shared.make_room(num_bytes)

    def evict(self, num_bytes: int) -> None:
        """Evict parts until `num_bytes` bytes are empty; that many are empty or cached here."""
        oldest = self._ring.newer
        while self.empty_bytes < num_bytes:
            if self.eviction_order is not None:
                oldest = self.next_in_order()
            assert oldest is not None
            newer = oldest.newer
            oldest.eat(self, num_bytes)
            oldest = newer
        if self.events is not None:
            self.events.told()

    def evict_to(self, num_bytes: int, evicted: list[int]) -> None:
        """Do the same, and append the evictions to `evicted`: a group and its number of parts, repeated."""
        self._evicted = evicted
        self.evict(num_bytes)
        self._evicted = None

    def note_evicted(self, index: int, count: int, num_bytes: int) -> None:
        """Count cached parts of a group, with a total of `num_bytes`, as evicted."""
        if self._evicted is not None:
            self._evicted += (index, count)
        self.num_cached[index] -= count
        self.num_evicted[index] += count
        self.evicted_bytes += num_bytes
        self.cached_bytes -= num_bytes
        self.empty_bytes += num_bytes

    def note_cached(self, index: int, count: int) -> None:
        """Count used parts of a group as cached."""
        num_bytes = count * self.part_bytes[index]
        self.num_used[index] -= count
        self.num_cached[index] += count
        self.released_bytes += num_bytes
        self.cached_bytes += num_bytes

    def note_empty(self, index: int, count: int) -> None:
        """Count used parts of a group as empty."""
        num_bytes = count * self.part_bytes[index]
        self.num_used[index] -= count
        self.released_bytes += num_bytes
        self.empty_bytes += num_bytes

    def note_used(self, index: int, count: int) -> None:
        """Count cached parts of a group as used."""
        num_bytes = count * self.part_bytes[index]
        self.num_used[index] += count
        self.num_cached[index] -= count
        self.cached_bytes -= num_bytes

"""A tier below a device with KV groups: it holds parts of pages in blocks, of the size of the device's.

A part is found by the name of its page, which device and tier share. A page has one part in a group here at most.
Parts that are here and not pinned are one list, the least recently used first, and are evicted in that order. Of
parts that are used together the deepest page is the least recent, and what is stored makes all before it more recent
than itself: so what is left of a sequence is a prefix of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvarts.kv.below import BelowPart
from kvarts.kv.group_memory import GroupMemory
from kvarts.kv.parts import PageName, PageNames
from kvarts.kv.pool import CountPool, IdPool, PageId, Pool

__all__ = ["PartTier"]


class PartTier:
    """Owner of `num_blocks` blocks, and of what they hold of `memory`. `names`: of the cache above.

    `with_slots`: blocks have ids, for an executor that copies into them.
    """

    def __init__(
        self, name: str, num_blocks: int, memory: GroupMemory, names: PageNames, *, with_slots: bool = False
    ) -> None:
        self.name = name
        self.num_blocks = num_blocks
        self._names = names
        self._pool: Pool = IdPool(num_blocks) if with_slots else CountPool(num_blocks)
        self.part_blocks = [group.part_bytes // memory.block_bytes for group in memory.groups]
        self._whole = [index for index, group in enumerate(memory.groups) if not (group.is_state or group.is_bounded)]
        self.num_used_parts = [0] * len(memory.groups)
        """Parts that are pinned or coming, by group."""
        self.num_cached_parts = [0] * len(memory.groups)
        """Parts that can be found and are not pinned, by group."""
        self.num_evicted_parts = [0] * len(memory.groups)
        self.num_refused = 0
        """Parts that were to be stored and found no room."""
        self._cached: OrderedDict[BelowPart, None] = OrderedDict()

    @property
    def num_used(self) -> int:
        """Blocks of parts that are pinned or coming."""
        return self._blocks_of(self.num_used_parts)

    @property
    def num_cached(self) -> int:
        """Blocks of parts that can be found and are not pinned."""
        return self._blocks_of(self.num_cached_parts)

    @property
    def num_evicted(self) -> int:
        """Blocks of parts that were evicted to make room."""
        return self._blocks_of(self.num_evicted_parts)

    def _blocks_of(self, counts: Sequence[int]) -> int:
        return sum(count * blocks for count, blocks in zip(counts, self.part_blocks, strict=True))

    def has(self, name: PageName, group: int) -> bool:
        """Return whether a part is here or coming."""
        return name.below is not None and name.below[group] is not None

    # Coming and going -------------------------------------------------------------------------------------

    def place(self, name: PageName, group: int) -> BelowPart | None:
        """Make room for a part that is neither here nor coming; None if there is none. `settle` must follow."""
        blocks = self.part_blocks[group]
        if blocks > self._pool.num_empty + self.num_cached:
            self.num_refused += 1
            return None
        while blocks > self._pool.num_empty:
            self._evict()
        slots: Sequence[PageId] | None = self._pool.take(blocks)
        part = BelowPart(name, group, () if slots is None else tuple(slots))
        if name.below is None:
            name.below = [None] * len(self.part_blocks)
        name.below[group] = part
        self._names.use(name)
        self.num_used_parts[group] += 1
        return part

    def settle(self, parts: Iterable[BelowPart], *, is_stored: bool) -> None:
        """End a store: its parts can be found from now on, or will never come."""
        names: dict[PageName, set[int]] = {}
        for part in parts:
            if is_stored and self._is_there(part):
                part.is_here = True
                names.setdefault(part.name, set()).add(part.group)
            elif self._is_there(part):
                self._forget(part)
            part.pins -= 1
            if not part.pins:
                self._end_use(part)
        # All before a part are used with it.
        walked: set[PageName] = set()
        for name in list(names) if self._whole else ():
            before = name.parent
            while before is not None and before.parent is not None and before not in walked:
                walked.add(before)
                names.setdefault(before, set()).update(self._whole)
                before = before.parent
        deepest_first = sorted(names, key=lambda name: name.page, reverse=True)
        for name in deepest_first:
            for group in sorted(names[name]):
                used = None if name.below is None else name.below[group]
                if used is not None:
                    self._touch(used)

    def drop(self, part: BelowPart) -> None:
        """Forget a part that is broken. Its blocks are empty when nothing pins it any more."""
        if self._is_there(part):
            self._forget(part)
            if part in self._cached:
                del self._cached[part]
                self.num_cached_parts[part.group] -= 1
                self._give(part)

    def reset(self) -> None:
        """Forget all parts. What is pinned or coming gives its blocks back when that ends, and is not found again."""
        for part in list(self._cached):
            self.drop(part)
        self._forget_pinned()

    def _forget_pinned(self) -> None:
        todo = self._names.roots()
        while todo:
            name = todo.pop()
            todo += name.children.values()
            for part in list(name.below or ()):
                if part is not None:
                    self._forget(part)

    # Use --------------------------------------------------------------------------------------------------

    def pin(self, part: BelowPart) -> None:
        """Keep a part that is here. `unpin` must follow."""
        if not part.pins:
            del self._cached[part]
            self.num_cached_parts[part.group] -= 1
            self.num_used_parts[part.group] += 1
        part.pins += 1

    def unpin(self, part: BelowPart) -> None:
        """End a pin: the part is the most recently used."""
        part.pins -= 1
        if not part.pins:
            self._end_use(part)

    def touch(self, parts: Iterable[BelowPart]) -> None:
        """Make parts the most recently used, those of deeper pages less so than those before them."""
        for part in sorted(parts, key=lambda part: -part.name.page):
            self._touch(part)

    # Inside -----------------------------------------------------------------------------------------------

    def _is_there(self, part: BelowPart) -> bool:
        return part.name.below is not None and part.name.below[part.group] is part

    def _end_use(self, part: BelowPart) -> None:
        self.num_used_parts[part.group] -= 1
        if self._is_there(part):
            self._cached[part] = None
            self.num_cached_parts[part.group] += 1
        else:
            self._give(part)

    def _touch(self, part: BelowPart) -> None:
        if part in self._cached:
            self._cached.move_to_end(part)

    def _evict(self) -> None:
        part, _ = self._cached.popitem(last=False)
        self.num_cached_parts[part.group] -= 1
        self.num_evicted_parts[part.group] += 1
        self._forget(part)
        self._give(part)

    def _forget(self, part: BelowPart) -> None:
        name = part.name
        assert name.below is not None
        name.below[part.group] = None
        if not any(name.below):
            name.below = None
        part.is_here = False
        self._names.drop(name)

    def _give(self, part: BelowPart) -> None:
        self._pool.give(self.part_blocks[part.group], list(part.blocks))

    # Laws -------------------------------------------------------------------------------------------------

    def check(self, pins: Iterable[BelowPart]) -> None:
        """Assert laws L1 and L2. `pins`: what transfers and offers keep, once for each of them."""
        held: dict[BelowPart, int] = {}
        for part in pins:
            held[part] = held.get(part, 0) + 1
        used, cached = [0] * len(self.part_blocks), [0] * len(self.part_blocks)
        for part, count in held.items():
            assert part.pins == count, f"L2: a part below is pinned {count} times, counted {part.pins}"
            used[part.group] += 1
        for part in self._cached:
            assert part not in held and not part.pins, "L2: a cached part below is pinned"
            assert part.is_here and self._is_there(part), "L1: a cached part below cannot be found"
            cached[part.group] += 1
        assert used == self.num_used_parts, f"L1: {used} parts used below, counted {self.num_used_parts}"
        assert cached == self.num_cached_parts, f"L1: {cached} parts cached below, counted {self.num_cached_parts}"
        num_taken = self._blocks_of(used) + self._blocks_of(cached)
        assert num_taken + self._pool.num_empty == self.num_blocks, "L1: blocks below are lost"
        ids = [block for part in (*held, *self._cached) for block in part.blocks]
        if ids:
            assert sorted((*ids, *self._pool.empty_ids)) == list(range(self.num_blocks)), "L1: a block has two owners"

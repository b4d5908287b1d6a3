"""Parts of pages in one memory: what holds them, which can be found, and which is evicted next.

Cached parts of all KV groups are one list, the least recently released first; or an eviction order lists them, part by
part. Empty bytes are taken before anything is evicted. Where a real model computes, a part is made of blocks that have
ids.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import get_args

from kvarts.base.errors import ConfigError
from kvarts.base.limits import MOST_BYTES, MOST_PAGE_TOKENS, check_whole
from kvarts.core.event_log import Emit
from kvarts.core.kv.eviction import EvictionOrder
from kvarts.core.kv.groups import PartGroup, Retention
from kvarts.core.kv.pool import IdPool, PageId, SharedMemory

from oracles.part_events import PartEvents
from oracles.parts import PageName, PageNames, Part

__all__ = ["PartPool"]


class PartPool:
    """Owner of all parts in `total_bytes`, and of the names of their pages. Raises ConfigError for what cannot be.

    `groups` are given back and taken from in their order, which decides what is evicted first of what one sequence
    releases. `blocks`: the memory as blocks with ids, of a size that divides every part; left out, bytes are counted.
    `emit` receives events of parts. `order` lists parts, and says which goes next; in groups that keep all tokens that
    is after those that follow it, unless it has a copy.
    """

    def __init__(
        self,
        groups: Sequence[PartGroup],
        *,
        page_size: int,
        total_bytes: int,
        keeps: Retention = "all",
        blocks: IdPool | None = None,
        emit: Emit | None = None,
        order: EvictionOrder | None = None,
        aligns: bool = False,
    ) -> None:
        check_whole(page_size, "page_size", most=MOST_PAGE_TOKENS)
        check_whole(total_bytes, "total_bytes", least=0, most=MOST_BYTES)
        if not groups:
            raise ConfigError("there are none", field="groups")
        if keeps not in get_args(Retention):
            raise ConfigError(f"{keeps!r} is not known", field="keeps", hint=f"Use {' or '.join(get_args(Retention))}.")
        self.groups = tuple(groups)
        self._part_bytes = [group.part_bytes for group in groups]
        self._blocks = blocks
        block_bytes = total_bytes // blocks.total if blocks is not None and blocks.total else 1
        self._block_bytes = block_bytes
        self._part_blocks = [part_bytes // block_bytes for part_bytes in self._part_bytes]
        if blocks is not None and any(part_bytes % block_bytes for part_bytes in (total_bytes, *self._part_bytes)):
            raise ConfigError(f"{blocks.total} blocks of {total_bytes:,} bytes divide no part", field="blocks")
        self.page_size = page_size
        self.total_bytes = total_bytes
        self.keeps: Retention = keeps
        self.empty_bytes = total_bytes
        self.cached_bytes = 0
        self.num_used = [0] * len(groups)
        """Parts in use, by group."""
        self.num_evicted = [0] * len(groups)
        self.num_cached = [0] * len(groups)
        """Parts that can be found and are not in use, by group."""
        self.num_released = [0] * len(groups)
        """Parts that have gone out of use since the beginning, by group."""
        self.num_published = 0
        """How often something of known tokens, which others may find, became findable since the beginning."""
        self.aligns = aligns
        self._aligned = [aligns and group.has_states_by_page for group in groups]
        """Whether a group has a part only of the last page that a chunk takes."""
        self._names = PageNames(len(groups))
        self._shared: SharedMemory | None = None
        self._released: OrderedDict[Part, int] = OrderedDict()
        """Cached parts, with the stamps of their release where the memory is shared."""
        self._order = order
        self._events = None if emit is None else PartEvents(emit)

    @property
    def free_bytes(self) -> int:
        """Bytes that can be taken now: empty or cached."""
        return self.empty_bytes + self.cached_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of parts that sequences hold, and of blocks that were taken."""
        return self.total_bytes - self.free_bytes

    @property
    def room_bytes(self) -> int:
        """Bytes that can be taken now, here or from others: the same as `free_bytes`, unless the memory is shared."""
        return self.free_bytes if self._shared is None else self._shared.num_free_bytes

    # A memory that others share: as in RunCache -----------------------------------------------------------

    def share(self, memory: SharedMemory) -> None:
        """Take all bytes from `memory` from now on, and give what is empty back to it; nothing was taken yet."""
        assert self.empty_bytes == self.total_bytes, "what is to be shared is in use"
        self._shared = memory
        self.resize(-self.total_bytes)

    @property
    def is_shared(self) -> bool:
        """Whether others have parts of the same memory."""
        return self._shared is not None

    def return_lent(self) -> None:
        """Give what is empty back, where the memory is shared."""
        if self._shared is not None:
            self._shared.take_back()

    def resize(self, num_bytes: int) -> None:
        """Add `num_bytes` empty bytes; below 0, take so many away."""
        self.total_bytes += num_bytes
        self.empty_bytes += num_bytes

    @property
    def next_stamp(self) -> int:
        """When the part was released that is evicted next; something is cached, and the memory is shared."""
        return self._released[self._next()]

    @property
    def next_bytes(self) -> int:
        """The bytes of that part."""
        return self._part_bytes[self._next().group]

    # Taking and giving back -------------------------------------------------------------------------------

    # What runs for every page and group is spelled out in few loops.

    def evict(self, num_bytes: int) -> None:
        """Evict parts until `num_bytes` bytes are empty; that many are empty or cached here."""
        if self.empty_bytes >= num_bytes:
            return
        sizes, released, drop, events = self._part_bytes, self._released, self._names.drop, self._events
        empty_bytes, num_evicted, num_cached = self.empty_bytes, self.num_evicted, self.num_cached
        emptied: list[PageId] = []
        while empty_bytes < num_bytes:
            part = self._next()
            if self._order is not None:
                self._order.removed(part)
            del released[part]
            group, name = part.group, part.name
            assert name is not None, "a part that cannot be found was cached"
            if events is not None:
                events.goes(part, is_dropped=False)
            empty_bytes += sizes[group]
            num_evicted[group] += 1
            num_cached[group] -= 1
            name.copies[group].remove(part)
            drop(name)
            emptied += part.blocks
        if events is not None:
            events.told()
        self.cached_bytes -= empty_bytes - self.empty_bytes
        self.empty_bytes = empty_bytes
        if self._blocks is not None:
            self._blocks.give(len(emptied), emptied)

    def listed(self) -> Iterable[Part]:
        """Return the cached parts, the next to go first."""
        return self._released if self._order is None else self._order

    def _next(self) -> Part:
        """Return the part that goes next."""
        if self._order is None:
            return next(iter(self._released))
        part: Part = self._order.next_run()
        keeps_all = not (self.groups[part.group].is_state or self.groups[part.group].is_bounded)
        if not keeps_all or len(part.page_name.copies[part.group]) > 1:
            return part
        for child in reversed(part.page_name.children.values()):
            last = self._last_cached(child, part.group)
            if last is not None:
                return last
        return part

    def _last_cached(self, name: PageName, group: int) -> Part | None:
        """Return the deepest part of a group that is cached, of `name` or after it; of copies the oldest."""
        for child in reversed(name.children.values()):
            last = self._last_cached(child, group)
            if last is not None:
                return last
        return next((part for part in name.copies[group] if not part.refs), None)

    def _make_empty(self, num_bytes: int) -> None:
        """See to it that `num_bytes` bytes, which are free, are empty."""
        if self._shared is None:
            self.evict(num_bytes)
        elif self.empty_bytes < num_bytes:
            self._shared.make_room(num_bytes)

    def _forget(self, part: Part) -> None:
        name = part.name
        assert name is not None
        if self._events is not None:
            self._events.goes(part, is_dropped=True)
        name.copies[part.group].remove(part)
        self._names.drop(name)

    def _take(self, group: int, count: int) -> list[Part]:
        num_bytes = count * self._part_bytes[group]
        self._make_empty(num_bytes)
        self.empty_bytes -= num_bytes
        self.num_used[group] += count
        is_kept = self.keeps == "all" or not self.groups[group].is_bounded
        if self._blocks is None:
            return [Part(group, is_kept=is_kept) for _ in range(count)]
        each = self._part_blocks[group]
        ids = self._blocks.take(count * each)
        return [Part(group, is_kept=is_kept, blocks=tuple(ids[at : at + each])) for at in range(0, len(ids), each)]

    def _pin_path(self, path: Sequence[Part]) -> None:
        """Hold parts of one group, by page."""
        if self._order is not None and path:
            self._order.pinned([part for part in path if not part.refs], path)
        for part in path:
            self._pin(part)

    def _pin(self, part: Part) -> None:
        if not part.refs:
            del self._released[part]
            self.cached_bytes -= self.groups[part.group].part_bytes
            self.num_used[part.group] += 1
            self.num_cached[part.group] -= 1
        part.refs += 1

    def _release(self, group: int, parts: Iterable[Part]) -> None:
        """End a hold of `parts` of a group, one after the other."""
        released = self._released
        num_empty = num_cached = 0
        stamp = 0 if self._shared is None else self._shared.tick()
        emptied: list[PageId] = []
        listed: list[Part] = []
        for part in parts:
            part.refs -= 1
            if part.refs:
                continue
            if part.name is not None and part.is_kept:
                released[part] = stamp
                listed.append(part)
                num_cached += 1
                continue
            if part.name is not None:
                self._forget(part)
            num_empty += 1
            emptied += part.blocks
        if emptied and self._blocks is not None:
            self._blocks.give(len(emptied), emptied)
        if self._events is not None:
            self._events.told()
        if self._order is not None and listed:
            self._order.released(listed)
        self.num_used[group] -= num_empty + num_cached
        self.num_released[group] += num_empty + num_cached
        self.num_cached[group] += num_cached
        self.empty_bytes += num_empty * self._part_bytes[group]
        self.cached_bytes += num_cached * self._part_bytes[group]

    def _publish(self, part: Part, name: PageName) -> None:
        part.name = name
        name.copies[part.group].append(part)
        self._names.use(name)

    def take_blocks(self, count: int) -> list[PageId]:
        """Take `count` blocks, which are free, out of the memory that parts draw on; return their ids."""
        assert self._blocks is not None, "memory without blocks is counted in bytes"
        self._make_empty(count * self._block_bytes)
        self.empty_bytes -= count * self._block_bytes
        return self._blocks.take(count)

    def give_blocks(self, block_ids: Sequence[PageId]) -> None:
        """Give back blocks that `take_blocks` took."""
        assert self._blocks is not None
        self._blocks.give(len(block_ids), block_ids)
        self.empty_bytes += len(block_ids) * self._block_bytes

"""The tier of files: pages are named by their keys, so pages stored by an earlier process are found again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from kvarts.content import Content
from kvarts.keys import BlockKeys, root_key
from kvarts.offload.tier import MemoryTier, OnRemoved, OnStored, TierLoad, TierStore
from kvarts.offload.tier_run import ALL, Segment

__all__ = ["FileTier"]


class FileTier(MemoryTier):
    """A MemoryTier with keys as slots.

    `known_keys`: pages of earlier processes, the oldest first. Their content is unknown until it is looked up; they are
    evicted first. `namespace` is part of every key: everything that makes pages of the same tokens different, such as
    the model. `take_dropped` returns the files to delete.
    """

    def __init__(
        self,
        name: str,
        num_pages: int,
        *,
        known_keys: Iterable[bytes] = (),
        namespace: str = "",
        on_stored: OnStored | None = None,
        on_removed: OnRemoved | None = None,
    ) -> None:
        super().__init__(name, num_pages, on_stored=on_stored, on_removed=on_removed)
        self._root = root_key("sha256_cbor", namespace)
        self._dropped: dict[bytes, None] = {}
        self._reading: Counter[bytes] = Counter()
        """How many loads under way read a file."""
        self._unknown = dict.fromkeys(known_keys)
        while len(self._unknown) > num_pages:
            self._drop_unknown()
        self.index.pool.take(len(self._unknown))
        self.find = self._find

    @property
    def num_used_blocks(self) -> int:
        """Pages that are pinned or coming."""
        return self.index.num_used - len(self._unknown)

    @property
    def num_cached_blocks(self) -> int:
        """Pages that can be found, or have unknown content, and are not pinned."""
        return self.index.num_cached + len(self._unknown)

    def listen(self, on_stored: OnStored | None, on_removed: OnRemoved | None) -> None:
        """Set the callbacks for runs that become findable or stop being findable."""
        self._tell_removed = on_removed
        super().listen(on_stored, self._on_gone)

    def key(self, content: Content, page: int) -> bytes:
        """Return the key of a page of known tokens."""
        keys: BlockKeys | None = content.noted(self._root)
        if keys is None:
            keys = BlockKeys(content, algorithm="sha256_cbor", root=self._root)
            content.note(self._root, keys)
        return keys[page]

    def take_dropped(self) -> tuple[bytes, ...]:
        """Return the keys that left the tier since the last call, but for those that loads still read."""
        dropped = tuple(key for key in self._dropped if key not in self._reading)
        for key in dropped:
            del self._dropped[key]
        return dropped

    def lookup(self, holder: int, content: Content, start: int, limit: int) -> int:
        """Find consecutive pages, also of earlier processes, and pin them for `holder`."""
        self._recognise(content, 0, min(limit, content.num_known_pages))
        return super().lookup(holder, content, start, limit)

    def read(self, content: Content, start: int, end: int) -> TierLoad | None:
        """Begin to read consecutive pages, also of earlier processes; their slots are keys."""
        self._recognise(content, 0, min(end, content.num_known_pages))
        load = super().read(content, start, end)
        if load is not None:
            load.segments = self._named(load.content, load.segments)
        return load

    def held(self, content: Content, start: int, end: int) -> list[tuple[int, int]]:
        """Return the stretches of pages [start, end) that are stored, also by earlier processes."""
        self._recognise(content, 0, min(end, content.num_known_pages))
        return super().held(content, start, end)

    def prepare_store(
        self, content: Content, start: int, end: int, *, deepest_first: bool = False, limit: int = ALL
    ) -> TierStore | None:
        """Make room for the missing pages of [start, end), at most `limit`; their slots are keys."""
        end = min(end, content.num_known_pages)
        self._recognise(content, 0, end)
        num_short = min(limit, self.index.missing(content, start, end)) - self.index.pool.num_empty
        while num_short > 0 and self._unknown:
            self._drop_unknown()
            self.index.pool.give(1, None)
            num_short -= 1
        store = super().prepare_store(content, start, end, deepest_first=deepest_first, limit=limit)
        if store is not None:
            store.segments = self._named(content, store.segments)
            for segment in store.segments:
                for page in range(segment.start, segment.end):
                    self._dropped.pop(self.key(content, page), None)
        return store

    def complete_store(self, store: TierStore, *, is_stored: bool = True) -> bool:
        """End a store; return False if it had ended before."""
        is_first = super().complete_store(store, is_stored=is_stored)
        if is_first and not (is_stored and self.is_stored(store)):
            for segment in store.segments:
                self._dropped.update(
                    (self.key(store.content, page), None) for page in range(segment.start, segment.end)
                )
        return is_first

    def prepare_load(self, holder: int, num_pages: int | None = None, num_front: int = 0) -> TierLoad:
        """Begin to load pages that were offered to `holder`; their slots are keys."""
        load = super().prepare_load(holder, num_pages, num_front)
        load.segments = self._named(load.content, load.segments)
        self._reading.update(_keys_of(load))
        return load

    def complete_load(self, load: TierLoad, num_good_pages: int | None = None) -> bool:
        """End a load, and drop pages after the first `num_good_pages`; return False if it had ended before."""
        if load.is_open:
            self._reading -= Counter(_keys_of(load))
        return super().complete_load(load, num_good_pages)

    def reset(self) -> None:
        """Drop all pages, also those of earlier processes."""
        super().reset()
        self.index.pool.give(len(self._unknown), None)
        self._dropped.update(self._unknown)
        self._unknown.clear()

    def _named(self, content: Content, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        return tuple(
            msgspec.structs.replace(
                segment, slots=tuple(self.key(content, page) for page in range(segment.start, segment.end))
            )
            for segment in segments
        )

    def _find(self, content: Content, start: int, limit: int) -> int:
        self._recognise(content, 0, min(limit, content.num_known_pages))
        return self.index.find(content, start, limit)

    def _recognise(self, content: Content, start: int, end: int) -> None:
        """Make pages of `content` that an earlier process stored findable, the first ones first."""
        if not self._unknown:
            return
        position = start + self.index.find(content, start, end)
        known_end = position
        while known_end < end and self.key(content, known_end) in self._unknown:
            known_end += 1
        if known_end == position:
            return
        for page in range(position, known_end):
            del self._unknown[self.key(content, page)]
        self.index.pool.give(known_end - position, None)
        placement = self.index.place(content, position, known_end)
        if placement is not None:
            self.index.settle(placement, is_stored=True)

    def _drop_unknown(self) -> None:
        key = next(iter(self._unknown))
        del self._unknown[key]
        self._dropped[key] = None

    def _on_gone(self, content: Content, start: int, end: int) -> None:
        for page in range(start, end):
            self._dropped[self.key(content, page)] = None
        if self._tell_removed is not None:
            self._tell_removed(content, start, end)


def _keys_of(load: TierLoad) -> Iterator[bytes]:
    for segment in load.segments:
        for key in segment.slots or ():
            assert isinstance(key, bytes)
            yield key

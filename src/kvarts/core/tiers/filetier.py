"""The tier of files: pages are named by their keys, so pages stored by an earlier process are found again."""

from __future__ import annotations

from collections.abc import Iterable

from kvarts.core.content import Content
from kvarts.core.kv.pool import NO_IDS
from kvarts.core.tiers.index import ALL, OnRemoved, OnStored, Placement, Segment
from kvarts.core.tiers.pagefiles import FileNames
from kvarts.core.tiers.tier import MemoryTier, Pin

__all__ = ["FileTier"]


class FileTier(MemoryTier):
    """A MemoryTier with keys as slots.

    `known_keys`: pages of earlier processes, the oldest first. Their content is unknown until it is looked up; they are
    evicted first. Keys of other things, such as parts in KV groups, are dropped. `namespace`: see FileNames.
    `take_dropped` returns the files to delete.
    """

    def __init__(self, name: str, num_pages: int, *, known_keys: Iterable[bytes] = (), namespace: str = "") -> None:
        super().__init__(name, num_pages)
        self.listen(None, None)
        names = self.names = FileNames(namespace)
        self.key = names.of
        for key in dict.fromkeys(known_keys):
            if names.group_of(key) is None:
                names.refuse(key)
                continue
            names.unknown[key] = NO_IDS
            names.use([key])
        while len(names.unknown) > num_pages:
            self._drop_unknown()
        self.index.pool.take(len(names.unknown))

    @property
    def num_used_blocks(self) -> int:
        """Pages that are pinned or coming."""
        return self.index.num_used - len(self.names.unknown)

    @property
    def num_cached_blocks(self) -> int:
        """Pages that can be found, or have unknown content, and are not pinned."""
        return self.index.num_cached + len(self.names.unknown)

    def listen(self, on_stored: OnStored | None, on_removed: OnRemoved | None) -> None:
        """Set the callbacks for runs that become findable or stop being findable."""
        self._emit_removed = on_removed
        super().listen(on_stored, self._on_gone)

    def take_dropped(self) -> tuple[bytes, ...]:
        """Return the keys that left the tier since the last call, but for those that loads still read."""
        return self.names.take_dropped()

    def lookup(self, holder: int, content: Content, start: int, limit: int) -> int:
        """Find consecutive pages, also of earlier processes, and pin them for `holder`."""
        self._recognise(content, min(limit, content.num_known_pages))
        return super().lookup(holder, content, start, limit)

    def read(self, content: Content, start: int, end: int) -> Pin | None:
        """Begin to read consecutive pages, also of earlier processes; their slots are keys."""
        self._recognise(content, min(end, content.num_known_pages))
        pin = super().read(content, start, end)
        if pin is not None:
            pin.slots = self._keys(content, start, pin.end)
        return pin

    def held(self, content: Content, start: int, end: int) -> list[tuple[int, int]]:
        """Return the stretches of pages [start, end) that are stored, also by earlier processes."""
        self._recognise(content, min(end, content.num_known_pages))
        return super().held(content, start, end)

    def absent(self, content: Content, start: int, end: int) -> list[tuple[int, int]]:
        """Return the stretches of pages [start, end) that are neither here nor coming; earlier processes count."""
        self._recognise(content, min(end, content.num_known_pages))
        return super().absent(content, start, end)

    def prepare_store(
        self, content: Content, start: int, end: int, *, deepest_first: bool = False, limit: int = ALL
    ) -> Placement | None:
        """Make room for the missing pages of [start, end), at most `limit`; their slots are keys."""
        end = min(end, content.num_known_pages)
        self._recognise(content, end)
        num_short = min(limit, self.index.missing(content, start, end)) - self.index.pool.num_empty
        while num_short > 0 and self.names.unknown:
            self._drop_unknown()
            self.index.pool.give(1, None)
            num_short -= 1
        store = super().prepare_store(content, start, end, deepest_first=deepest_first, limit=limit)
        if store is not None:
            segments: list[Segment] = []
            for segment in store.segments:
                keys = self._keys(content, segment.start, segment.end)
                segments.append(Segment(segment.start, segment.end, keys))
                self.names.use(keys)
            store.segments = tuple(segments)
        return store

    def complete_store(self, store: Placement, *, is_stored: bool = True) -> None:
        """End a store, and delete the files of pages that are not here, even if they were written."""
        pages = [page for segment in store.segments for page in range(segment.start, segment.end)]
        self._release_others(store.content, pages, self.index.settle(store, is_stored=is_stored))

    def _release_others(self, content: Content, pages: Iterable[int], here: list[tuple[int, int]]) -> None:
        gone = [page for page in pages if not any(start <= page < end for start, end in here)]
        self.names.release([self.key(content, page) for page in gone])

    def prepare_load(self, holder: int, num_pages: int | None = None, num_front: int = 0) -> Pin:
        """Begin to load pages that were offered to `holder`; their slots are keys."""
        load = super().prepare_load(holder, num_pages, num_front)
        keys = load.slots = self._keys(load.content, load.start, load.end)
        self.names.use(keys)
        return load

    def complete_load(self, load: Pin, num_good_pages: int | None = None) -> None:
        """End a load, and drop pages after the first `num_good_pages`."""
        self.names.release(self._keys(load.content, load.start, load.end))
        super().complete_load(load, num_good_pages)

    def reset(self) -> None:
        """Drop all pages, also those of earlier processes."""
        super().reset()
        while self.names.unknown:
            self._drop_unknown()
            self.index.pool.give(1, None)

    def _keys(self, content: Content, start: int, end: int) -> tuple[bytes, ...]:
        return tuple([self.key(content, page) for page in range(start, end)])

    def find(self, content: Content, start: int, limit: int) -> int:
        """Return how many consecutive pages of `content` in [start, limit) are here, from `start` on."""
        self._recognise(content, min(limit, content.num_known_pages))
        return self.index.find(content, start, limit)

    def _recognise(self, content: Content, end: int) -> None:
        """Make pages of `content` that an earlier process stored findable, the first ones first."""
        if not self.names.unknown:
            return
        position = self.index.find(content, 0, end)
        known_end = self.names.unknown_to(content, position, end)
        if known_end == position:
            return
        for page in range(position, known_end):
            del self.names.unknown[self.key(content, page)]
        self.index.pool.give(known_end - position, None)
        placement = self.index.place(content, position, known_end)
        here = [] if placement is None else self.index.settle(placement, is_stored=True)
        self._release_others(content, range(position, known_end), here)

    def _drop_unknown(self) -> None:
        key = next(iter(self.names.unknown))
        del self.names.unknown[key]
        self.names.release([key])

    def _on_gone(self, content: Content, start: int, end: int) -> None:
        self.names.release(self._keys(content, start, end))
        if self._emit_removed is not None:
            self._emit_removed(content, start, end)

"""A tier of files below a device with KV groups: one file per part, named by the key of its page and its group.

Parts stored by an earlier process are found again.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvarts.core.content import Content
from kvarts.core.event_log import Emit
from kvarts.core.kv.groups import GroupMemory
from kvarts.core.kv.pool import PageId, PageIds
from kvarts.core.kv.runs import PartRun, Span, table_of_transfer
from kvarts.core.kv.span_tree import SpanTree
from kvarts.core.tiers.pagefiles import FileNames
from kvarts.core.tiers.part_tier import PartTier

__all__ = ["PartFiles"]


class PartFiles(PartTier):
    """A PartTier that names blocks by keys: all blocks of a part have the same key, and are one file.

    `known_keys`: parts of earlier processes, the oldest first. Their content is unknown until it is looked up; they are
    evicted first. Keys of other things, such as whole pages, are dropped. `namespace`: see FileNames; the groups are
    part of every key as well. `take_dropped` returns the files to delete.
    """

    def __init__(
        self,
        name: str,
        num_blocks: int,
        memory: GroupMemory,
        tree: SpanTree,
        *,
        place: int,
        known_keys: Iterable[bytes] = (),
        namespace: str = "",
        emit: Emit | None = None,
    ) -> None:
        super().__init__(name, num_blocks, memory, tree, place=place, with_slots=True, emit=emit)
        layers = [(group.layer.kind, group.layer.span, group.layer.sink, group.part_bytes) for group in memory.groups]
        names = self.files = FileNames(f"{namespace} {layers}", len(layers))
        self._keys: dict[PageId, bytes] = {}
        """Of every block with a part, the key of that. After `reset`, a part being written may have that of another."""
        for key in known_keys:
            index = names.group_of(key)
            if index is None or self.part_bytes[index] > self.total_bytes:
                names.refuse(key)
                continue
            while self.part_bytes[index] > self.empty_bytes:
                self._drop_unknown()
            self.take(index, 1)
            names.unknown[key] = self._named(self.take_ids(index, 1), [key])
            self.note_cached(index, 1)
            self._num_unlisted[index] += 1
        self.released_bytes = self.evicted_bytes = 0
        self.num_evicted = [0] * len(self.groups)

    def names(self, runs: Iterable[PartRun]) -> tuple[PageId | bytes, ...]:
        """Return the keys of the blocks of `runs`, in their order."""
        return tuple(self._keys[block] for run in runs for block in run.ids)

    def take_dropped(self) -> tuple[bytes, ...]:
        """Return the keys of files to delete since the last call."""
        return self.files.take_dropped()

    def give_ids(self, block_ids: PageIds) -> None:
        """Return the ids of blocks that are now empty; a key without blocks is dropped."""
        self.files.release(self._keys.pop(block) for block in block_ids)
        super().give_ids(block_ids)

    def evict(self, num_bytes: int) -> None:
        """Evict parts until `num_bytes` bytes are empty, those of unknown content first."""
        while self.empty_bytes < num_bytes and self.files.unknown:
            self._drop_unknown()
        super().evict(num_bytes)

    def reset(self) -> None:
        """Drop all parts, also those of earlier processes."""
        super().reset()
        while self.files.unknown:
            self._drop_unknown()

    def recognise(self, content: Content, limit: int) -> None:
        """Make the parts of the first `limit` pages of `content` that an earlier process stored here findable."""
        if not self.files.unknown:
            return
        found = self._runs_of(content, min(limit, content.num_known_pages))
        if not found:
            return
        for index, start, end in found:
            for page in range(start, end):
                self._release_unknown(index, self.files.of(content, page, index))
        pin = table_of_transfer(len(self.groups))
        with self._tree.spans_of(content, max(end for _, _, end in found)) as spans:
            for index, start, end in found:
                for span, first, last in spans:
                    if first < end and start < last:
                        self.place(span, index, max(start, first), min(end, last), pin)
            self.settle(pin, is_stored=True)

    def _ids_for(self, span: Span, index: int, start: int, end: int) -> PageIds:
        keys = [self.files.of(span.content, page, index) for page in range(start, end)]
        return self._named(self.take_ids(index, end - start), keys)

    def _unlisted_ids(self) -> Iterable[PageIds]:
        return self.files.unknown.values()

    def _named(self, blocks: PageIds, keys: list[bytes]) -> PageIds:
        """Name `blocks`, which were taken for parts of as many pages as there are `keys`; return them."""
        count = len(blocks) // len(keys)
        for place, block in enumerate(blocks):
            self._keys[block] = keys[place // count]
        self.files.use(self._keys[block] for block in blocks)
        return blocks

    # Parts of earlier processes -------------------------------------------------------------------------------

    def _runs_of(self, content: Content, end: int) -> list[tuple[int, int, int]]:
        """Return the parts of the first `end` pages of `content` that are unknown: a group, and consecutive pages."""
        found: list[tuple[int, int, int]] = []
        for index in range(len(self.groups)):
            page = 0
            while page < end:
                start, page = page, self.files.unknown_to(content, page, end, index)
                if start < page:
                    found.append((index, start, page))
                page += 1
        return found

    def _drop_unknown(self) -> None:
        """Drop the oldest unknown part, and count it as evicted."""
        key = next(iter(self.files.unknown))
        index = self.files.group_of(key)
        assert index is not None
        self._release_unknown(index, key)
        self.num_evicted[index] += 1
        self.evicted_bytes += self.part_bytes[index]

    def _release_unknown(self, index: int, key: bytes) -> None:
        """Make the blocks of an unknown part empty; its file is deleted unless a part of the same key follows."""
        self._num_unlisted[index] -= 1
        self.note_used(index, 1)
        self.note_empty(index, 1)
        self.give_ids(self.files.unknown.pop(key))

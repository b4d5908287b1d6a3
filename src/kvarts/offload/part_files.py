"""A tier of files below a device with KV groups: one file per part, named by the key of its page and its group.

Parts stored by an earlier process are found again.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvarts.content import Content
from kvarts.event_log import Tell
from kvarts.keys import BlockKeys, root_key
from kvarts.kv.group_memory import GroupMemory
from kvarts.kv.pool import PageId
from kvarts.kv.run_loads import holding_of_transfer
from kvarts.kv.span_tree import SpanTree
from kvarts.kv.spans import PartRun, Span
from kvarts.offload.part_tier import PartTier

__all__ = ["PART_KEY_BYTES", "PartFiles"]

GROUP_BYTES = 2
PART_KEY_BYTES = 32 + GROUP_BYTES
"""The length of a key: that of the page, and the number of the group."""


class PartFiles(PartTier):
    """A PartTier that names blocks by keys: all blocks of a part have the same key, and are one file.

    `known_keys`: parts of earlier processes, the oldest first. Their content is unknown until it is looked up; they are
    evicted first. Keys of other things, such as whole pages, are dropped. `namespace` is part of every key, with the
    groups: everything that makes pages of the same tokens different, such as the model. `take_dropped` returns the
    files to delete.
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
        tell: Tell | None = None,
    ) -> None:
        super().__init__(name, num_blocks, memory, tree, place=place, with_slots=True, tell=tell)
        layers = [(group.layer.kind, group.layer.span, group.layer.sink, group.part_bytes) for group in memory.groups]
        self._root = root_key("sha256_cbor", f"{namespace} {layers}")
        self._keys: dict[PageId, bytes] = {}
        """Of every block with a part, the key of that."""
        self._num_named: dict[bytes, int] = {}
        """The number of blocks of each key. After `reset`, that of a part that is being written may be of two parts."""
        self._dropped: dict[bytes, None] = {}
        self._unknown: dict[bytes, list[PageId]] = {}
        """Parts of earlier processes, with their blocks."""
        for key in known_keys:
            index = self._group_of(key)
            if index is None or self.part_bytes[index] > self.total_bytes:
                self._dropped[key] = None
                continue
            while self.part_bytes[index] > self.empty_bytes:
                self._drop_unknown()
            self.take(index, 1)
            self._unknown[key] = self._named(self.take_ids(index, 1), [key])
            self.note_cached(index, 1)
            self._num_unlisted[index] += 1
        self.released_bytes = self.evicted_bytes = 0
        self.num_evicted = [0] * len(self.groups)

    def names(self, runs: Iterable[PartRun]) -> tuple[PageId | bytes, ...]:
        """Return the keys of the blocks of `runs`, in their order."""
        return tuple(self._keys[block] for run in runs for block in run.ids)

    def take_dropped(self) -> tuple[bytes, ...]:
        """Return the keys of files to delete since the last call."""
        dropped = tuple(self._dropped)
        self._dropped.clear()
        return dropped

    def give_ids(self, block_ids: list[PageId]) -> None:
        """Return the ids of blocks that are now empty; a key without blocks is dropped."""
        for block in block_ids:
            key = self._keys.pop(block)
            self._num_named[key] -= 1
            if not self._num_named[key]:
                del self._num_named[key]
                self._dropped[key] = None
        super().give_ids(block_ids)

    def evict(self, num_bytes: int) -> None:
        """Evict parts until `num_bytes` bytes are empty, those of unknown content first."""
        while self.empty_bytes < num_bytes and self._unknown:
            self._drop_unknown()
        super().evict(num_bytes)

    def reset(self) -> None:
        """Drop all parts, also those of earlier processes."""
        super().reset()
        while self._unknown:
            self._drop_unknown()

    def recognise(self, content: Content, limit: int) -> None:
        """Make the parts of the first `limit` pages of `content` that an earlier process stored here findable."""
        if not self._unknown:
            return
        found = self._runs_of(content, min(limit, content.num_known_pages))
        if not found:
            return
        for index, start, end in found:
            for page in range(start, end):
                self._take_unknown(index, self._key(content, page, index))
        pin = holding_of_transfer(len(self.groups))
        with self._tree.spans_of(content, max(end for _, _, end in found)) as spans:
            for index, start, end in found:
                for span, first, last in spans:
                    if first < end and start < last:
                        self.place(span, index, max(start, first), min(end, last), pin)
            self.settle(pin, is_stored=True)

    def _ids_for(self, span: Span, index: int, start: int, end: int) -> list[PageId]:
        keys = [self._key(span.content, page, index) for page in range(start, end)]
        return self._named(self.take_ids(index, end - start), keys)

    def _unlisted_ids(self) -> list[PageId]:
        return [block for blocks in self._unknown.values() for block in blocks]

    # Keys ---------------------------------------------------------------------------------------------------

    def _key(self, content: Content, page: int, index: int) -> bytes:
        """Return the key of the part of a page of known tokens."""
        keys: BlockKeys | None = content.noted(self._root)
        if keys is None:
            keys = BlockKeys(content, algorithm="sha256_cbor", root=self._root)
            content.note(self._root, keys)
        return keys[page] + index.to_bytes(GROUP_BYTES, "big")

    def _group_of(self, key: bytes) -> int | None:
        """Return the group of a key; None if it is not one of a part."""
        index = int.from_bytes(key[-GROUP_BYTES:], "big")
        return index if len(key) == PART_KEY_BYTES and index < len(self.groups) else None

    def _named(self, blocks: list[PageId], keys: list[bytes]) -> list[PageId]:
        """Name `blocks`, which were taken for parts of as many pages as there are `keys`; return them."""
        count = len(blocks) // len(keys)
        for place, block in enumerate(blocks):
            key = self._keys[block] = keys[place // count]
            self._num_named[key] = self._num_named.get(key, 0) + 1
            self._dropped.pop(key, None)
        return blocks

    # Parts of earlier processes -------------------------------------------------------------------------------

    def _runs_of(self, content: Content, end: int) -> list[tuple[int, int, int]]:
        """Return the parts of the first `end` pages of `content` that are unknown: a group, and consecutive pages."""
        found: list[tuple[int, int, int]] = []
        for index in range(len(self.groups)):
            start = -1
            for page in range(end + 1):
                is_unknown = page < end and self._key(content, page, index) in self._unknown
                if is_unknown and start < 0:
                    start = page
                elif start >= 0 and not is_unknown:
                    found.append((index, start, page))
                    start = -1
        return found

    def _take_unknown(self, index: int, key: bytes) -> None:
        """Make the blocks of an unknown part empty; its file stays."""
        self._release_unknown(index, key)
        self._dropped.pop(key, None)

    def _drop_unknown(self) -> None:
        """Drop the oldest unknown part, and count it as evicted."""
        key = next(iter(self._unknown))
        index = self._group_of(key)
        assert index is not None
        self._release_unknown(index, key)
        self.num_evicted[index] += 1
        self.evicted_bytes += self.part_bytes[index]

    def _release_unknown(self, index: int, key: bytes) -> None:
        self._num_unlisted[index] -= 1
        self.note_used(index, 1)
        self.note_empty(index, 1)
        self.give_ids(self._unknown.pop(key))

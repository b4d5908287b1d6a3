"""The names of the files of a tier: keys of pages, or of their parts in KV groups, also of earlier processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvarts.content import Content
from kvarts.keys import BlockKeys, root_key
from kvarts.kv.pool import PageId

__all__ = ["PAGE_KEY_BYTES", "PART_KEY_BYTES", "FileNames"]

GROUP_BYTES = 2
PAGE_KEY_BYTES = 32
PART_KEY_BYTES = PAGE_KEY_BYTES + GROUP_BYTES
"""The length of a key: that of the page, and the number of the group."""


class FileNames:
    """Owner of the names in use, and of those whose files are to be deleted.

    `namespace` is part of every name: everything that makes pages of the same tokens different, such as the model.
    `num_groups`: the KV groups of the parts that are named; 0: whole pages are. A file stays while its name is in
    use: by a page or part in the tier, by one whose content is unknown, or by a transfer that reads it.
    """

    def __init__(self, namespace: str, num_groups: int = 0) -> None:
        self._root = root_key("sha256_cbor", namespace)
        self._num_groups = num_groups
        self._num_uses: dict[bytes, int] = {}
        self._dropped: dict[bytes, None] = {}
        self.unknown: dict[bytes, list[PageId]] = {}
        """What earlier processes stored, the oldest first, with its blocks, if these have ids. They use its names."""

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the names in use."""
        return iter(self._num_uses)

    def of(self, content: Content, page: int, group: int = 0) -> bytes:
        """Return the name of a page of known tokens, or of its part in `group`."""
        keys: BlockKeys | None = content.noted(self._root)
        if keys is None:
            keys = BlockKeys(content, algorithm="sha256_cbor", root=self._root)
            content.note(self._root, keys)
        return keys[page] + group.to_bytes(GROUP_BYTES, "big") if self._num_groups else keys[page]

    def group_of(self, name: bytes) -> int | None:
        """Return the group of a name, 0 for whole pages; None if it names something else."""
        if not self._num_groups:
            return 0 if len(name) == PAGE_KEY_BYTES else None
        group = int.from_bytes(name[-GROUP_BYTES:], "big")
        return group if len(name) == PART_KEY_BYTES and group < self._num_groups else None

    def use(self, names: Iterable[bytes]) -> None:
        """Record a use of each of `names`: their files stay, or are written again."""
        for name in names:
            self._num_uses[name] = self._num_uses.get(name, 0) + 1
            self._dropped.pop(name, None)

    def release(self, names: Iterable[bytes]) -> None:
        """End a use of each of `names`; a name without uses is to be deleted."""
        for name in names:
            self._num_uses[name] -= 1
            if not self._num_uses[name]:
                del self._num_uses[name]
                self._dropped[name] = None

    def refuse(self, name: bytes) -> None:
        """Delete a file of another kind, or one that does not fit."""
        self._dropped[name] = None

    def take_dropped(self) -> tuple[bytes, ...]:
        """Return the names of files to delete since the last call."""
        dropped = tuple(self._dropped)
        self._dropped.clear()
        return dropped

    def unknown_to(self, content: Content, start: int, end: int, group: int = 0) -> int:
        """Return the first page of [start, end) that no earlier process stored; `end` if there is none."""
        while start < end and self.of(content, start, group) in self.unknown:
            start += 1
        return start

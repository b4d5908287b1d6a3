"""Pages in files: one file per page, named by its key, written whole or not at all; and the names of a tier's files.

A file consists of a header with its format, the key, the length and a checksum of the bytes, followed by the bytes. It
gets its name when it is complete. Other files in the directory, and files that are cut short or changed, are not pages.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from stat import S_ISREG

from kvarts.base.errors import ConfigError, OutputError
from kvarts.base.files import make_directory, make_private, write_whole
from kvarts.base.leftovers import locked_leftover
from kvarts.core.content import Content
from kvarts.core.keys import BlockKeys, root_key
from kvarts.core.kv.pool import PageIds

__all__ = ["MOST_KEY_BYTES", "PAGE_KEY_BYTES", "PART_KEY_BYTES", "FileNames", "PageFiles", "file_bytes"]

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
        self.unknown: dict[bytes, PageIds] = {}
        """What earlier processes stored, the oldest first, with its blocks, if these have ids. They use its names."""

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


MAGIC = b"kvarts page 1\n"
MOST_KEY_BYTES = 64
HEADS = [struct.Struct(f"<{len(MAGIC)}s{num_bytes}sQ16s") for num_bytes in range(MOST_KEY_BYTES + 1)]
"""The header, by the length of the key, which the name of the file gives."""


def file_bytes(num_key_bytes: int, num_payload_bytes: int) -> int:
    """Return the size of the file of a page."""
    return HEADS[num_key_bytes].size + num_payload_bytes


class PageFiles:
    """A directory of pages, of at most `max_bytes` bytes with their headers. Raises ConfigError, OutputError.

    Keys have 1 to MOST_KEY_BYTES bytes; for any other, `write` and `read` raise ConfigError.

    The tier decides which pages are deleted: `write` refuses a page that would exceed `max_bytes`. At the beginning,
    excess pages are deleted, the oldest first; so are unfinished files, which a killed process left. After that, errors
    of the file system are not raised: a file that cannot be read is not a page, and files that cannot be written or
    deleted are counted in `num_errors`.
    """

    def __init__(self, directory: Path | str, *, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ConfigError(f"must be at least 1, got {max_bytes}", field="max_bytes")
        self.directory = Path(directory)
        self.max_bytes = max_bytes
        self.num_errors = 0
        """Files that could not be written or deleted."""
        self.num_unfinished = 0
        """Unfinished files that were found, and removed if possible."""
        try:
            make_private(self.directory, lambda name: len(name) == 2 and not set(name) - HEX_DIGITS)
            unfinished, pages = self._found()
        except OSError as error:
            raise OutputError(f"cannot hold pages: {error.strerror}", path=self.directory) from error
        self._sizes: dict[bytes, int] = {}
        self._leftover_sizes: dict[Path, int] = {}
        """Files that could not be deleted: they take room."""
        self.num_bytes = 0
        for _, path, size in unfinished:
            with locked_leftover(path) as is_left:
                if is_left:
                    self.num_unfinished += 1
                    self._remove(path, size)
        for _, path, size in pages:
            self._sizes[bytes.fromhex(path.stem)] = size
            self.num_bytes += size
        self._unclaimed = dict.fromkeys(self._sizes)
        """Pages found at the beginning that no tier has claimed: they are deleted to make room."""
        self._make_room(0)

    def keys(self) -> list[bytes]:
        """Return the keys of all pages in the directory, in the order in which they were written.

        From now on the caller decides when these are deleted.
        """
        self._unclaimed.clear()
        return list(self._sizes)

    def write(self, key: bytes, payload: bytes) -> bool:
        """Store a page. Return False if it would exceed `max_bytes` or cannot be written."""
        head = _head(key)
        size = head.size + len(payload)
        num_more = size - self._sizes.get(key, 0)
        self._unclaimed.pop(key, None)
        self._make_room(num_more)
        if self.num_bytes + num_more > self.max_bytes:
            return False
        path = self._path(key)
        digest = blake2b(payload, digest_size=16).digest()
        try:
            make_directory(path.parent)
            write_whole(path, head.pack(MAGIC, key, len(payload), digest) + payload)
        except (OSError, OutputError):
            self.num_errors += 1
            return False
        self.num_bytes += size - self._sizes.pop(key, 0) - self._leftover_sizes.pop(path, 0)
        self._sizes[key] = size
        return True

    def read(self, key: bytes) -> bytes | None:
        """Return the bytes of a page; None if its file is missing, cut short, changed, of another key, or no file."""
        head = _head(key)
        try:
            number = os.open(self._path(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(number, "rb") as file:  # noqa: PTH123  # a pipe opens without a writer, and is not read
                if not S_ISREG(os.fstat(number).st_mode):
                    return None
                text = file.read()
        except OSError:
            return None
        if len(text) < head.size:
            return None
        magic, named, length, digest = head.unpack_from(text)
        payload = text[head.size :]
        if magic != MAGIC or named != key or length != len(payload):
            return None
        return payload if blake2b(payload, digest_size=16).digest() == digest else None

    def delete(self, key: bytes) -> None:
        """Delete a page, if it is stored. A file that cannot be deleted takes room, but is not read any more."""
        self._unclaimed.pop(key, None)
        size = self._sizes.pop(key, 0)
        self.num_bytes -= size
        self._remove(self._path(key), size)

    def _make_room(self, num_bytes: int) -> None:
        """Delete pages that no tier has claimed, the oldest first, until there is room for `num_bytes`."""
        while self._unclaimed and self.num_bytes + num_bytes > self.max_bytes:
            self.delete(next(iter(self._unclaimed)))

    def _remove(self, path: Path, size: int) -> None:
        """Delete a file of `size` bytes that is not counted."""
        try:
            path.unlink(missing_ok=True)
        except OSError:
            self.num_errors += 1
            if path not in self._leftover_sizes:
                self._leftover_sizes[path] = size
                self.num_bytes += size
        else:
            self.num_bytes -= self._leftover_sizes.pop(path, 0)

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.directory / name[:2] / f"{name}.kv"

    def _found(self) -> tuple[list[Found], list[Found]]:
        """Return unfinished files and those that are named like pages, each with time and size, the oldest first."""
        unfinished: list[Found] = []
        pages: list[Found] = []
        for path in self.directory.glob("??/*"):
            is_unfinished = path.name.startswith(UNFINISHED) and not set(path.parent.name) - HEX_DIGITS
            digits = path.name.removesuffix(".kv")
            is_page = path.suffix == ".kv" and 0 < len(digits) <= 2 * MOST_KEY_BYTES and not set(digits) - HEX_DIGITS
            is_page = is_page and len(digits) % 2 == 0
            if not is_unfinished and not (is_page and path.parent.name == digits[:2]):
                continue
            try:
                status = path.lstat()
            except OSError:
                continue  # it has been deleted since
            if not S_ISREG(status.st_mode):
                continue
            found = status.st_mtime_ns, path, status.st_size
            (unfinished if is_unfinished else pages).append(found)
        return sorted(unfinished), sorted(pages)


def _head(key: bytes) -> struct.Struct:
    if not 0 < len(key) <= MOST_KEY_BYTES:
        raise ConfigError(f"must have 1 to {MOST_KEY_BYTES} bytes, got {len(key)}", field="key")
    return HEADS[len(key)]


Found = tuple[int, Path, int]
UNFINISHED = ".kvarts-"
"""Prefix of the names of files that `kvarts.base.files.whole_file` has not finished."""
HEX_DIGITS = set("0123456789abcdef")

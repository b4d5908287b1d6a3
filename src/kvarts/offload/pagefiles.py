"""Pages in files: one file a page, named by its key, written whole or not at all.

A file has a header line, with its format, the key, the length and a checksum of the bytes, and then the bytes. It gets
its name when it is complete; any other file in the directory, and any file that is cut short or changed, is no page.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from pathlib import Path

from kvarts.errors import ConfigError, OutputError
from kvarts.files import write_whole

__all__ = ["PageFiles"]

MAGIC = b"kvarts page 1\n"
HEAD = struct.Struct(f"<{len(MAGIC)}s32sQ16s")
KEY_BYTES = 32


class PageFiles:
    """A directory of pages, of at most `max_bytes` bytes with their headers. Raises ConfigError, OutputError.

    The tier decides which pages go: `write` refuses a page that would exceed `max_bytes`.
    """

    def __init__(self, directory: Path | str, *, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ConfigError(f"must be at least 1, got {max_bytes}", field="max_bytes")
        self.directory = Path(directory)
        self.max_bytes = max_bytes
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            found = sorted((path.stat().st_mtime_ns, path.name, path.stat().st_size) for path in self._candidates())
        except OSError as error:
            raise OutputError(f"cannot hold pages: {error.strerror}", path=self.directory) from error
        self._sizes = {bytes.fromhex(name[: 2 * KEY_BYTES]): size for _, name, size in found}
        self.num_bytes = sum(self._sizes.values())

    def keys(self) -> list[bytes]:
        """Return the keys of all pages in the directory, in the order in which they were written."""
        return list(self._sizes)

    def write(self, key: bytes, payload: bytes) -> bool:
        """Store a page. Return False if it would exceed `max_bytes` or cannot be written."""
        size = HEAD.size + len(payload)
        if self.num_bytes - self._sizes.get(key, 0) + size > self.max_bytes:
            return False
        path = self._path(key)
        digest = blake2b(payload, digest_size=16).digest()
        try:
            path.parent.mkdir(exist_ok=True)
            write_whole(path, HEAD.pack(MAGIC, key, len(payload), digest) + payload)
        except OSError:
            return False
        except OutputError:
            return False
        self.num_bytes += size - self._sizes.pop(key, 0)
        self._sizes[key] = size
        return True

    def read(self, key: bytes) -> bytes | None:
        """Return the bytes of a page; None if its file is missing, cut short, changed, or of another key."""
        try:
            text = self._path(key).read_bytes()
        except OSError:
            return None
        if len(text) < HEAD.size:
            return None
        magic, named, length, digest = HEAD.unpack_from(text)
        payload = text[HEAD.size :]
        if magic != MAGIC or named != key or length != len(payload):
            return None
        return payload if blake2b(payload, digest_size=16).digest() == digest else None

    def delete(self, key: bytes) -> None:
        """Delete a page, if it is stored."""
        self.num_bytes -= self._sizes.pop(key, 0)
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.directory / name[:2] / f"{name}.kv"

    def _candidates(self) -> list[Path]:
        """Return the files that are named like pages."""
        return [
            path
            for path in self.directory.glob("??/*.kv")
            if len(path.stem) == 2 * KEY_BYTES
            and not set(path.stem) - set("0123456789abcdef")
            and path.parent.name == path.stem[:2]
        ]

"""Pages in files: one file a page, named by its key, whole or not there.

A file is a line that says what it is, the key, the length and a checksum of the bytes, and the bytes. It appears under
its name when it is complete; whatever else lies in the directory, or was cut short or changed, is no page.
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
    """A directory of pages, of at most `max_bytes` bytes with all that describes them. Raises ConfigError, OutputError.

    Deciding what goes is the tier's business: `write` refuses what would be too much.
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
        """Keys of the pages that are here, in the order in which they were written."""
        return list(self._sizes)

    def write(self, key: bytes, payload: bytes) -> bool:
        """Stores a page. False if it would be too much, or cannot be written."""
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
        """The bytes of a page; None if it is not here, cut short, changed, or another."""
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
        """Forgets a page, if it is here."""
        self.num_bytes -= self._sizes.pop(key, 0)
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.directory / name[:2] / f"{name}.kv"

    def _candidates(self) -> list[Path]:
        """Files by the names that pages have."""
        return [
            path
            for path in self.directory.glob("??/*.kv")
            if len(path.stem) == 2 * KEY_BYTES
            and not set(path.stem) - set("0123456789abcdef")
            and path.parent.name == path.stem[:2]
        ]

"""Files that grow while a program runs: logs, journals and timelines."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import IO, TYPE_CHECKING

from kvarts.base.errors import OutputError
from kvarts.base.files import NumberedFile, is_replaceable, open_stream, write_all, writing

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

__all__ = ["GrowingFile"]


class GrowingFile:
    """A file to which each write adds all of its data, or nothing. Raises OutputError with the path.

    `keeps`: what the file contains stays, and is continued; else it begins empty. A device, a pipe or a socket is
    written to as well. Nothing is added after an error: each later write raises it again.
    """

    def __init__(self, path: Path, *, keeps: bool) -> None:
        self._path = path
        self._error: OutputError | None = None
        self._end = b""
        with writing(path):
            self._file: IO[bytes] | None = _opened(path, keeps=keeps) if is_replaceable(path) else open_stream(path)

    def write(self, data: bytes, *, end: bytes = b"") -> None:
        """Add `data`, and then `end`, which the next write replaces: for files that began empty."""
        if self._error is not None:
            raise self._error
        assert self._file is not None
        with writing(self._path):
            before = os.fstat(self._file.fileno())
        try:
            with writing(self._path):
                if self._end:
                    os.lseek(self._file.fileno(), -len(self._end), os.SEEK_END)
                write_all(self._file, data + end)
        except OutputError as error:
            self._error = error
            if stat.S_ISREG(before.st_mode):
                self._restore(before.st_size)
            raise
        self._end = end

    def sync(self) -> None:
        """Return when everything that was written is on disk."""
        assert self._file is not None
        with writing(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. Raise OutputError for an error that was not raised before."""
        file, self._file = self._file, None
        if file is not None:
            with writing(self._path):
                file.close()

    def __enter__(self) -> GrowingFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _restore(self, num_bytes: int) -> None:
        """Make the file what it was before a write that failed, as far as that is possible."""
        assert self._file is not None
        with suppress(OSError):
            os.ftruncate(self._file.fileno(), num_bytes)
            if self._end:
                os.lseek(self._file.fileno(), -len(self._end), os.SEEK_END)
                write_all(self._file, self._end)


def _opened(path: Path, *, keeps: bool) -> IO[bytes]:
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_APPEND if keeps else os.O_TRUNC), 0o666)
    return NumberedFile(number)

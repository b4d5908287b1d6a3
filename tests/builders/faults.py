"""Faults of a file system, below every reader and every writer: at the nth call that touches a folder, one fails."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvarts.base import leftovers

__all__ = ["ERRORS", "Disk", "without_inodes"]

T = TypeVar("T")

ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENAMETOOLONG)
BY_PATH = ("open", "stat", "lstat", "listdir", "scandir", "mkdir", "rmdir", "unlink", "rename", "replace", "readlink")
BY_NUMBER = ("write", "fchmod", "fsync", "ftruncate", "close")


class Disk:
    """Counts the calls that touch `folder`. `fail_at`: the number of the one that fails, with `error`.

    `is_short`: every write takes one byte of what it is given, and the rest is left to the caller.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder = os.path.realpath(folder)
        self._numbers: set[int] = set()
        self.calls: list[str] = []
        self.fail_at = -1
        self.error = errno.EIO
        self.is_short = False
        self.is_on = False
        for name in BY_PATH:
            patch.setattr(os, name, self._by_path(name, getattr(os, name)))
        for name in BY_NUMBER:
            patch.setattr(os, name, self._by_number(name, getattr(os, name)))
        opened = self._opened(io.open)
        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)

    @contextmanager
    def failing(self, place: int, error: int) -> Iterator[None]:
        """Fail the call at `place`, counted from now."""
        leftovers._looked_at.clear()  # a process looks for leftovers once in a folder
        self.calls.clear()
        self._numbers.clear()
        self.fail_at, self.error, self.is_on = place, error, True
        try:
            yield
        finally:
            self.is_on = False

    def _is_here(self, path: Any) -> bool:
        if isinstance(path, int):
            return path in self._numbers
        text = os.fsdecode(path)
        full = text if text.startswith("/") else f"{self._folder}/{text}"
        return full == self._folder or full.startswith(self._folder + "/")

    def each_fault(
        self, errors: Sequence[int], make: Callable[[], Path], do: Callable[[Path], T]
    ) -> Iterator[tuple[str, Path, T]]:
        """Call `do` with a new path of `make` for each call of the file system in it, which fails, with each error.

        Yield the name of the call that failed, the path, and the result of `do`.
        """
        path = make()
        with self.failing(-1, 0):
            do(path)
        calls = tuple(self.calls)
        for error in errors:
            for place, name in enumerate(calls):
                path = make()
                with self.failing(place, error):
                    result = do(path)
                assert self.calls[place] == name, f"{name} at {place} was {self.calls[place : place + 1]}"
                yield name, path, result

    def _count(self, name: str, path: Any = None) -> None:
        place = len(self.calls)
        self.calls.append(name)
        if place == self.fail_at:
            raise OSError(self.error, os.strerror(self.error), *([] if path is None else [str(path)]))

    def _by_path(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def faulted(path: Any = ".", *rest: Any, **named: Any) -> Any:
            is_relative = named.get("dir_fd") is not None  # as in shutil.rmtree
            if not self.is_on or is_relative or isinstance(path, int) or not self._is_here(path):
                return call(path, *rest, **named)
            self._count(name, path)
            result = call(path, *rest, **named)
            if name == "open":
                self._numbers.add(result)
            return result

        return faulted

    def _by_number(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def faulted(number: int, *values: Any) -> Any:
            if not self.is_on or number not in self._numbers:
                return call(number, *values)
            if name == "close":  # it is closed, and what was written may be lost
                self._numbers.discard(number)
                call(number)
                return self._count(name)
            self._count(name)
            if name == "write" and self.is_short:
                return call(number, bytes(values[0])[:7])
            return call(number, *values)

        return faulted

    def _opened(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def faulted(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
            if not self.is_on or isinstance(file, int) or not self._is_here(file):
                return call(file, mode, *rest, **named)
            self._count("open", file)
            if mode != "rb":
                return call(file, mode, *rest, **named)
            return io.BufferedReader(_Read(file, self._count))

        return faulted


class _Read(io.FileIO):
    def __init__(self, path: Any, count: Callable[[str], None]) -> None:
        super().__init__(path, "rb")
        self._count = count

    def readinto(self, buffer: Any) -> int:
        self._count("read")
        return super().readinto(buffer) or 0

    def readall(self) -> bytes:
        self._count("read")
        return super().readall()


def without_inodes(patch: pytest.MonkeyPatch) -> None:
    """From now on, nothing can be created in any folder: what is there can be read, written and deleted."""

    def full(path: Any) -> OSError:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    opened, number_of = builtins.open, os.open

    def open_number(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_CREAT and not os.path.lexists(path):
            raise full(path)
        return number_of(path, flags, *rest, **named)

    def open_file(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if not isinstance(file, int) and mode[0] in "wax" and not os.path.lexists(file):
            raise full(file)
        return opened(file, mode, *rest, **named)

    def make(path: Any, *_: Any, **__: Any) -> None:
        raise full(path)

    patch.setattr(os, "open", open_number)
    patch.setattr(builtins, "open", open_file)
    patch.setattr(io, "open", open_file)
    patch.setattr(os, "mkdir", make)

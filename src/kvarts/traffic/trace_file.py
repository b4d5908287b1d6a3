"""Input file of a trace: decompressed if needed; a pipe is read only once."""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from kvarts.errors import InputError
from kvarts.files import reading
from kvarts.samples import located, where_samples_are

__all__ = ["BLOCK_BYTES", "TraceFile"]

BLOCK_BYTES = 1 << 20
MOST_LINE_BYTES = 1 << 24
MOST_RECORDS = 20
GZIP = b"\x1f\x8b"


class TraceFile:
    """Bytes of one file. Reading raises MissingFileError, or InputError if the file is not readable.

    A regular file is opened again for each use; a pipe or a device is read completely, once.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = located(path)
        self._data: bytes | None = None

    @classmethod
    def of(cls, path: Path | str | TraceFile) -> TraceFile:
        """Return `path` as a TraceFile."""
        return path if isinstance(path, TraceFile) else cls(path)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.name or self.path.resolve().name

    @cached_property
    def is_directory(self) -> bool:
        """Whether the path is a directory."""
        with reading(self.path, hint=where_samples_are(self.path)):
            return self.path.is_dir()

    def read(self) -> bytes:
        """Return the whole content."""
        with self._open() as file, self._unpacking():
            return file.read()

    def text(self) -> str:
        """Return the whole content as text; line ends are normalised, as in `Path.read_text`."""
        try:
            return io.TextIOWrapper(io.BytesIO(self.read()), encoding="utf-8-sig").read()
        except UnicodeDecodeError as error:
            raise InputError(f"cannot be read: {error}", path=self.path) from error

    def blocks(self, size: int = BLOCK_BYTES) -> Iterator[bytes]:
        """Iterate over the bytes, at most `size` of them at a time."""
        with self._open() as file:
            while True:
                with self._unpacking():
                    data = file.read(size)
                if not data:
                    return
                yield data

    @cached_property
    def is_json_lines(self) -> bool:
        """Whether the file has one JSON value per line: its first line is one, or the whole file is not one."""
        if not self.is_json:
            return False
        if self._first_lines[0][1] is not None:
            return not self._first_lines[0][0].startswith(b"[")
        return _fields(self.read()) is None

    @cached_property
    def is_json(self) -> bool:
        """Whether the file is JSON, by its first character."""
        return bool(self._first_lines) and self._first_lines[0][0].lstrip(b"\xef\xbb\xbf \t\r")[:1] in {b"{", b"["}

    def records(self) -> Iterator[tuple[int, bytes]]:
        """Iterate over the JSON values of the file, with numbers from 1.

        The number is the line in JSON lines, or the position in an array. A file with a single object yields one value.
        """
        if self.is_json_lines:
            for line, row in enumerate(self.text().split("\n"), 1):
                if row.strip():
                    yield line, row.encode()
            return
        data = self.read().strip()
        if not data.startswith(b"["):
            yield 1, data
            return
        try:
            elements = msgspec.json.decode(data, type=list[msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(f"is not JSON: {error}", path=self.path, line=_line_of(error, data)) from error
        except RecursionError:
            raise InputError("is nested too deeply", path=self.path) from None
        for place, element in enumerate(elements, 1):
            yield place, bytes(element)

    @cached_property
    def first_fields(self) -> list[frozenset[str]]:
        """Field names of the first records that are JSON objects; empty for other kinds of files."""
        if not self.is_json:
            return []
        if self.is_json_lines:
            return [fields for _, fields in self._first_lines if fields]
        data = self.read().strip()
        if not data.startswith(b"["):
            fields = _fields(data)
            return [fields] if fields else []
        try:
            elements = msgspec.json.decode(data, type=list[msgspec.Raw])[:MOST_RECORDS]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return []
        return [fields for fields in map(_fields, map(bytes, elements)) if fields]

    def malformed(self) -> InputError:
        """Return the error for a file that begins like JSON but contains no JSON object."""
        data = self.read()
        what, line = "has no JSON object", None
        try:
            msgspec.json.decode(data)
        except RecursionError:
            what = "is nested too deeply"
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            what, line = f"is not JSON: {error}", _line_of(error, data)
        return InputError(
            what, path=self.path, line=line, hint="`kvarts trace forms` lists the forms that can be read."
        )

    @cached_property
    def header(self) -> tuple[str, ...]:
        """Column names in the first line; empty for JSON."""
        if self.is_json or not self._first_lines:
            return ()
        line = self._first_lines[0][0].removeprefix(b"\xef\xbb\xbf")
        return tuple(name.strip().strip('"') for name in line.decode("utf-8", "replace").split(","))

    @cached_property
    def _first_lines(self) -> list[tuple[bytes, frozenset[str] | None]]:
        """The first non-blank lines, each with its field names if it is a JSON object, None if it is not JSON."""
        lines: list[tuple[bytes, frozenset[str] | None]] = []
        with self._open() as file, self._unpacking():
            while len(lines) < MOST_RECORDS:
                line = file.readline(MOST_LINE_BYTES)
                if not line:
                    break
                if line.strip():
                    lines.append((line.strip(), _fields(line)))
        return lines

    def _open(self) -> BinaryIO:
        with reading(self.path, hint=where_samples_are(self.path)):
            if self._data is None and not self.path.is_file() and not self.path.is_dir():
                self._data = self.path.read_bytes()
            if self._data is not None:
                data = io.BytesIO(self._data)
                return _unpacked(data) if self._data.startswith(GZIP) else data
            with self.path.open("rb") as file:
                is_packed = file.read(2) == GZIP
            return _unpacked(self.path) if is_packed else self.path.open("rb")

    @contextmanager
    def _unpacking(self) -> Iterator[None]:
        try:
            with reading(self.path, hint=where_samples_are(self.path)):
                yield
        except (EOFError, zlib.error) as error:
            raise InputError(f"cannot be read: {error}", path=self.path) from error


def _unpacked(source: Path | BinaryIO) -> BinaryIO:
    import gzip  # few traces are compressed

    return cast(BinaryIO, gzip.open(source))


def _fields(data: bytes) -> frozenset[str] | None:
    """Return the field names of a JSON object; empty for another JSON value; None if `data` is not JSON."""
    try:
        return frozenset(msgspec.json.decode(data, type=dict[str, msgspec.Raw]))
    except (msgspec.ValidationError, RecursionError):
        return frozenset()
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    import json

    try:
        value = json.loads(data)  # accepts NaN and Infinity, which Python writes but standard JSON lacks
    except (ValueError, RecursionError):
        return None
    return frozenset(value) if isinstance(value, dict) else frozenset()


def _line_of(error: Exception, data: bytes) -> int | None:
    place = re.search(r"\(byte (\d+)\)", str(error))
    return None if place is None else data.count(b"\n", 0, int(place[1])) + 1

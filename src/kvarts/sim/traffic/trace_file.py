"""Input file of a trace: decompressed if needed; a pipe is read only once. And what all readers of its rows share.

JSON records become requests, prompts of unknown content are made, and requests are put in the order of arrival.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import msgspec

from kvarts.base.decoders import UNDECODED, decode_json
from kvarts.base.errors import InputError, problem_of
from kvarts.base.files import place_of, reading, where_samples_are
from kvarts.base.limits import LATEST_NS, brief
from kvarts.core.content import pack_units
from kvarts.sim.traffic.trace import TraceRequest

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "BLOCK_BYTES",
    "NO_ID",
    "REPEATED",
    "SKIP_HINT",
    "UNIT_TOKENS",
    "TraceFile",
    "by_arrival",
    "date_ns",
    "no_output_length",
    "nothing_left",
    "unlike_any_other",
]

BLOCK_BYTES = 1 << 20
MOST_LINE_BYTES = 1 << 24
LINE_BYTES = 1 << 17
"""Bytes of a file that are read at a time where lines are: a session of an agent is one."""
MOST_RECORDS = 20
GZIP, PARQUET = b"\x1f\x8b", b"PAR1"
REPEATED = "repeated lines"
TEXTS = ("prompt", "output_text", "messages", "input", "output")
LFS = b"version https://git-lfs.github.com/spec/"
UNIT_TOKENS = 512
NO_ID = 1 << 63
"""NO_ID plus the row number is a unit that no other prompt has."""
SKIP_HINT = "Mend the line, or pass --set skip_bad_lines=true to leave such lines out and count them."

SUFFIXES = (".json", ".jsonl", ".csv", ".gz", ".parquet")
"""Suffixes of the files considered in a directory."""

TIME = r"(?a)(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9})\d*)?( ?Z| ?UTC|[+-]\d\d:?\d\d)?"


class TraceFile:
    """Bytes of one file. Reading raises MissingFileError, or InputError if the file is not readable.

    A regular file is opened again for each use; a pipe or a device is read completely, once.
    """

    def __init__(self, path: Path | str) -> None:
        self.place = place_of(path)
        """The path, as text."""
        self._data: bytes | None = None
        self.on_read: Callable[[int], object] | None = None
        """Receives the number of bytes of each part of the content that is read for its rows."""

    @classmethod
    def of(cls, path: Path | str | TraceFile) -> TraceFile:
        """Return `path` as a TraceFile."""
        return path if isinstance(path, TraceFile) else cls(path)

    def beside(self, path: Path) -> TraceFile:
        """Return another file, of which reading is told to the same reader."""
        other = TraceFile(path)
        other.on_read = self.on_read
        return other

    @cached_property
    def path(self) -> Path:
        """The file, or directory."""
        from pathlib import Path

        return Path(self.place)

    @property
    def name(self) -> str:
        """The last part of the path."""
        name = os.path.basename(self.place)  # noqa: PTH119
        return name if name not in ("", ".") else self.path.resolve().name

    @cached_property
    def is_directory(self) -> bool:
        """Whether the path is a directory."""
        with self._reading():
            return os.path.isdir(self.place)  # noqa: PTH112

    def files(self) -> list[TraceFile]:
        """Return this file, or those of a directory that have the suffix of a trace, by name."""
        return list(self.walk()) if self.is_directory else [self]

    def walk(self) -> Iterator[TraceFile]:
        """Iterate over the files of a directory that have the suffix of a trace, by name, as they are found."""
        with reading(self.path):
            for path in _below(self.path):
                yield TraceFile(path)

    def read(self) -> bytes:
        """Return the whole content."""
        with self._open() as file, self._unpacking():
            data = file.read()
        if self.on_read is not None:
            self.on_read(len(data))
        return data

    def text(self) -> str:
        """Return the whole content as text; line ends are normalised, as in `Path.read_text`."""
        return self._text_of(self.read())

    def _text_of(self, data: bytes) -> str:
        try:
            return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig").read()
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
        is_array = self._beginning[0].startswith(b"[")
        if len(self._beginning) == 1 and not is_array:
            return True
        if self._first_lines[0][1] is not None:
            return not is_array
        return _fields(self.read()) is None

    @property
    def _is_one_line(self) -> bool:
        return len(self._beginning) == 1

    @cached_property
    def is_parquet(self) -> bool:
        """Whether the file is Parquet, by its first bytes."""
        return next(iter(self.blocks(len(PARQUET))), b"") == PARQUET

    def parquet(self) -> Any:
        """Return a pyarrow.parquet.ParquetFile. Raise InputError, also without pyarrow."""
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise InputError("Parquet needs pyarrow", path=self.path, hint="pip install 'kvarts[parquet]'.") from None
        try:
            return pq.ParquetFile(io.BytesIO(self.read()))
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"cannot be read: {error}", path=self.path) from error

    def parquet_rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Iterate over the rows of a Parquet file, with numbers from 1, without those that hold texts of prompts."""
        file = self.parquet()
        wanted = [name for name in self.header if name not in TEXTS]
        try:
            batches = map(_in_microseconds, file.iter_batches(columns=wanted))
            yield from enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), 1)
        except (OSError, ValueError) as error:  # an ArrowException is one of both
            raise InputError(f"cannot be read: {error}", path=self.path) from error

    @cached_property
    def is_json(self) -> bool:
        """Whether the file is JSON, by its first character."""
        return bool(self._beginning) and self._beginning[0].lstrip(b"\xef\xbb\xbf \t\r")[:1] in {b"{", b"["}

    def records(self) -> Iterator[tuple[int, bytes]]:
        """Iterate over the JSON values of the file, with numbers from 1.

        The number is the line in JSON lines, or the position in an array. A file with a single object yields one value.
        """
        if self.is_json_lines and not (self._is_one_line and _page(self._beginning[0])):
            beginning, is_whole = self._start
            for line, row in beginning if is_whole else enumerate(self._lines(), 1):
                if row.strip() and (row[0] in b'{["' or not row.decode(errors="replace").isspace()):
                    yield line, row.rstrip(b"\n")
            return
        data = self._elements()
        if not data.startswith(b"["):
            yield 1, data
            return
        try:
            elements = msgspec.json.decode(data, type=list[msgspec.Raw])
        except UNDECODED as error:
            raise InputError(f"is not JSON: {problem_of(error)}", path=self.path, line=_line_of(error, data)) from error
        for place, element in enumerate(elements, 1):
            yield place, bytes(element)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Iterate as `records` does, over JSON lines without holding more than a line of them."""
        if not self.is_json_lines:
            yield from self.records()
            return
        with self._open() as file:
            rows = enumerate(_lines_of(file), 1)
            while True:
                with self._unpacking():
                    line, row = next(rows, (0, b""))
                if not line:
                    return
                if len(row) >= MOST_LINE_BYTES:
                    raise InputError(f"is longer than {MOST_LINE_BYTES:,} bytes", path=self.path, line=line)
                if self.on_read is not None:
                    self.on_read(len(row) + 1)
                row = row.removeprefix(b"\xef\xbb\xbf") if line == 1 else row
                if not row.isspace() and row:
                    yield line, row

    def _elements(self) -> bytes:
        """Return the content of a file that is not JSON lines; of a page of a list, its `data`."""
        data = self.read().strip()
        return _page(data) or data

    def _lines(self) -> Iterable[bytes]:
        """Return the lines of the whole content; their ends are normalised."""
        data = self.read()
        return io.BytesIO(data if data.isascii() and b"\r" not in data else self._text_of(data).encode())

    @cached_property
    def first_fields(self) -> list[frozenset[str]]:
        """Field names of the first records that are JSON objects; empty for other kinds of files."""
        return [fields for fields in map(_fields, self._first_records) if fields]

    @cached_property
    def first_filled(self) -> list[frozenset[str]]:
        """As `first_fields`, without fields whose value is empty."""
        return [names for each in self._first_records if (names := _fields(each, is_filled=True))]

    @cached_property
    def _first_records(self) -> list[bytes]:
        if not self.is_json:
            return []
        if self.is_json_lines and not (self._is_one_line and _page(self._beginning[0])):
            return [line for line, fields in self._first_lines if fields]
        data = self._elements()
        if not data.startswith(b"["):
            return [data]
        try:
            return [bytes(each) for each in msgspec.json.decode(data, type=list[msgspec.Raw])[:MOST_RECORDS]]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return []

    def malformed(self) -> InputError:
        """Return the error for a file that begins like JSON but contains no JSON object."""
        data = self.read()
        what, line = "has no JSON object", None
        try:
            msgspec.json.decode(data)
        except UNDECODED as error:
            what, line = f"is not JSON: {problem_of(error)}", _line_of(error, data)
        return InputError(
            what, path=self.path, line=line, hint="`kvarts trace forms` lists the forms that can be read."
        )

    @property
    def is_sqlite(self) -> bool:
        """Whether the file is a database of SQLite."""
        return bool(self._beginning) and self._beginning[0].startswith(b"SQLite format 3\0")

    @cached_property
    def header(self) -> tuple[str, ...]:
        """Column names in the first line; empty for JSON."""
        if self.is_parquet:
            return tuple(self.parquet().schema_arrow.names)
        if self.is_json or not self._beginning:
            return ()
        if self.is_sqlite:
            return ("SQLite format 3",)
        line = self._beginning[0].removeprefix(b"\xef\xbb\xbf")
        return tuple(name.strip().strip('"') for name in line.decode("utf-8", "replace").split(","))

    @cached_property
    def _first_lines(self) -> list[tuple[bytes, frozenset[str] | None]]:
        """The first non-blank lines, each with its field names if it is a JSON object, None if it is not JSON."""
        return [(line, _fields(line)) for line in self._beginning]

    @cached_property
    def _beginning(self) -> list[bytes]:
        """The first non-blank lines."""
        return [line.strip() for _, line in self._start[0]]

    @cached_property
    def _start(self) -> tuple[list[tuple[int, bytes]], bool]:
        """The first non-blank lines with their numbers; whether no others follow, and these need no normalisation."""
        lines: list[tuple[int, bytes]] = []
        is_plain = True
        with self._open() as file, self._unpacking():
            for number, line in enumerate(_lines_of(file), 1):
                if len(lines) == MOST_RECORDS:
                    return lines, False
                is_plain = is_plain and len(line) < MOST_LINE_BYTES and line.isascii() and b"\r" not in line
                if line.strip():
                    lines.append((number, line))
        if lines and lines[0][1].startswith(LFS):
            raise self._pointer(lines)
        return lines, is_plain

    def _pointer(self, lines: Sequence[tuple[int, bytes]]) -> InputError:
        """Return the error for a pointer of Git LFS, which stands for a file that was not downloaded."""
        size = next((int(line[5:]) for _, line in lines if re.fullmatch(rb"size \d{1,18}", line.strip())), None)
        return InputError(
            "is a pointer of Git LFS, not the file itself" + ("" if size is None else f", which has {size:,} bytes"),
            path=self.path,
            hint="Run `git lfs pull` where it was cloned, or download the file.",
        )

    def _open(self) -> BinaryIO:
        with self._reading():
            if self._data is None and not os.path.isfile(self.place) and not self.is_directory:  # noqa: PTH113
                self._data = self.path.read_bytes()
            if self._data is not None:
                data = io.BytesIO(self._data)
                return _unpacked(data) if self._data.startswith(GZIP) else data
            file = io.BufferedReader(io.FileIO(self.place), LINE_BYTES)
            try:
                is_packed = file.peek(2).startswith(GZIP)
            except BaseException:
                file.close()
                raise
            if not is_packed:
                return file
            file.close()
            return _unpacked(self.path)

    def _reading(self) -> AbstractContextManager[None]:
        return reading(self.place, hint=where_samples_are(self.place))

    @contextmanager
    def _unpacking(self) -> Iterator[None]:
        try:
            with self._reading():
                yield
        except Exception as error:
            import zlib  # few traces are compressed

            if not isinstance(error, EOFError | zlib.error):
                raise
            raise InputError(f"cannot be read: {error}", path=self.path) from error


def _below(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        if path.is_dir():
            if not path.is_symlink():
                yield from _below(path)
        elif path.name.endswith(SUFFIXES) and path.is_file():
            yield path


def _lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of `file` without their ends. Its own `readline` compares bytes one by one.

    Of a line that is longer than MOST_LINE_BYTES, yield parts, all but the last one at least as long.
    """
    parts: list[bytes] = []
    while data := file.read(LINE_BYTES):
        start = 0
        while end := data.find(b"\n", start) + 1:
            yield b"".join((*parts, data[start : end - 1]))
            parts.clear()
            start = end
        parts.append(data[start:])
        if sum(map(len, parts)) >= MOST_LINE_BYTES:
            yield b"".join(parts)
            parts.clear()
    yield b"".join(parts)


def _unpacked(source: Path | BinaryIO) -> BinaryIO:
    import gzip  # few traces are compressed

    return cast(BinaryIO, gzip.open(source))


EMPTY = (b"null", b"{}", b"[]", b'""', b'"{}"', b'"[]"')


def _fields(data: bytes, *, is_filled: bool = False) -> frozenset[str] | None:
    """Return the field names of a JSON object; empty for another JSON value; None if `data` is not JSON.

    `is_filled`: only those of values that are not empty.
    """
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        return frozenset(name for name, value in fields.items() if not is_filled or bytes(value) not in EMPTY)
    except (msgspec.ValidationError, RecursionError):
        return frozenset()
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:
        value = decode_json(data)
    except (ValueError, RecursionError):
        return None
    return frozenset(name for name in value if not is_filled or value[name]) if isinstance(value, dict) else frozenset()


def _in_microseconds(batch: Any) -> Any:
    """Return a batch of Parquet whose times have microseconds: Python has no more."""
    import pyarrow as pa

    def kind(each: Any) -> Any:
        return pa.timestamp("us", each.tz) if pa.types.is_timestamp(each) and each.unit == "ns" else each

    schema = pa.schema([field.with_type(kind(field.type)) for field in batch.schema])
    return batch if schema == batch.schema else pa.Table.from_batches([batch]).cast(schema, safe=False)


def _page(data: bytes) -> bytes:
    """Return the `data` of a page of a list, as gateways answer with it; b"" if `data` is none."""
    if not data.startswith(b"{"):
        return b""
    try:
        items = msgspec.json.decode(data, type=_Page).data
        return bytes(items) if msgspec.json.decode(items, type=list[dict[str, msgspec.Raw]]) else b""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return b""


class _Page(msgspec.Struct, gc=False):
    data: msgspec.Raw


def _line_of(error: Exception, data: bytes) -> int | None:
    place = re.search(r"\(byte (\d+)\)", str(error))
    return None if place is None else data.count(b"\n", 0, int(place[1])) + 1


def nothing_left(
    file: TraceFile, left_out: Mapping[str, int] = MappingProxyType({}), num_skipped: int = 0
) -> InputError:
    """Return the error for a file without requests, with the numbers of records left out."""
    counts = [f"{count:,} {reason}" for reason, count in left_out.items()]
    if num_skipped:
        counts.append(f"{num_skipped:,} that cannot be read")
    why = f": {', '.join(counts)}" if counts else ""
    return InputError(
        f"has no requests{why}",
        path=file.path,
        hint="A trace has one request per line or row.",
    )


def no_output_length(file: TraceFile) -> InputError:
    """Return the error for a file in which no row has an output length."""
    return InputError(
        "has no output length in any row",
        path=file.path,
        field="output_tokens",
        hint="Give --output-tokens N for all of them, or the column that has it: --column output_tokens=NAME.",
    )


def by_arrival(requests: Sequence[TraceRequest], file: TraceFile) -> list[TraceRequest]:
    """Return requests stably sorted by arrival, the first at 0. Raise InputError if they span more than 73 years."""
    first_ns = min(request.arrival_ns for request in requests)
    if max(request.arrival_ns for request in requests) - first_ns > LATEST_NS:
        raise InputError("has times more than 73 years apart", path=file.path)
    moved = [msgspec.structs.replace(request, arrival_ns=request.arrival_ns - first_ns) for request in requests]
    moved.sort(key=lambda request: request.arrival_ns)
    return moved


def date_ns(text: str, field: str) -> int:
    """Return nanoseconds since 1970 for a date and time, in UTC unless it has an offset. Raise InputError."""
    from datetime import datetime  # a hundredth of a short replay, which has no dates

    match = re.fullmatch(TIME, text)
    try:
        if match is None:
            raise ValueError
        whole, fraction, offset = match.groups()
        time = datetime.fromisoformat(whole + (offset if offset and offset[0] in "+-" else "+00:00"))
    except (ValueError, OverflowError):
        raise InputError(f"{brief(text)} is not a time such as 2024-05-10 00:00:00.01+00:00", field=field) from None
    return int(time.timestamp()) * 1_000_000_000 + int((fraction or "").ljust(9, "0"))


def unlike_any_other(index: int, num_tokens: int, unit_tokens: int = UNIT_TOKENS, *, beside_ids: bool = False) -> bytes:
    """Return units of `unit_tokens` tokens that only row `index` has. `beside_ids`: other rows have hash ids."""
    first = (NO_ID if beside_ids else 0) + (index << 32)
    return pack_units(range(first, first - (-num_tokens // unit_tokens)))

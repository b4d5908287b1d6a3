"""Reads anyone's timeline, in chunks of rows, in bounded memory. Knows nothing of how kvarts writes one.

What is no timeline at all (malformed JSON, a file that breaks off) is an InputError. What is one, with a wrong field
somewhere, is read: the row is left out, and what is wrong with it comes along as a complaint.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from kvarts.errors import ConfigError, InputError, MissingFileError
from kvarts.verify.chunk import Chunk, Step, brief, chunk_of

__all__ = ["BodyRecording", "Recording", "open_recording"]

BLOCK_BYTES = 1 << 22
LARGEST_STEP_BYTES = 1 << 26
SLAB_ROWS = 1 << 16

_steps = msgspec.json.Decoder(list[Step])
_anything = msgspec.json.Decoder()


class Recording:
    """A timeline that can be read more than once.

    After `chunks` is through, `top` holds every other key of the body, and `notes` what is worth saying about how it
    was read.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = path
        self.top: dict[str, Any] = {}
        self.notes: list[str] = []
        self.has_timeline = False
        self.is_cut = False
        """Whether it ended before its totals."""

    def chunks(self) -> Iterator[Chunk]:
        """Iterate over the rows, in order."""
        self.top, self.notes, self.is_cut = {}, [], False
        self.has_timeline = False
        num_rows = 0
        for rows in self._slabs():
            chunk = chunk_of(rows, num_rows)
            num_rows += len(rows)
            yield chunk

    def _slabs(self) -> Iterator[list[Any]]:
        raise NotImplementedError

    def _broken(self, what: str, *, line: int | None = None) -> InputError:
        return InputError(what, path=self.path, line=line, hint="Is it the timeline that it should be?")


def open_recording(path: Path | str) -> Recording:
    """Return the recording in a file, packed with gzip or not.

    It is Parquet by its first bytes, JSON lines by the suffix .jsonl, else JSON. Raise MissingFileError, and InputError
    for what cannot be opened.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            first = file.read(4)
    except FileNotFoundError:
        raise MissingFileError("no such file", path=path, hint="Check the path of the timeline.") from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", path=path) from error
    suffixes = path.suffixes[:-1] if path.suffixes[-1:] == [".gz"] else path.suffixes
    if first == b"PAR1" or suffixes[-1:] == [".parquet"]:
        return _ParquetRecording(path)
    return _LinesRecording(path) if suffixes[-1:] in ([".jsonl"], [".ndjson"]) else _JsonRecording(path)


class BodyRecording(Recording):
    """A body that is in memory already."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self._body = body

    def _slabs(self) -> Iterator[list[Any]]:
        body = self._body
        if not isinstance(body, Mapping):
            return
        self.top = {name: value for name, value in body.items() if name != "timeline"}
        timeline = body.get("timeline")
        if isinstance(timeline, list | tuple):
            self.has_timeline = True
            for start in range(0, len(timeline), SLAB_ROWS):
                yield list(timeline[start : start + SLAB_ROWS])


# Bytes ----------------------------------------------------------------------------------------------------


class _FileRecording(Recording):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._path = path
        self._is_torn = False

    def _blocks(self) -> Iterator[bytes]:
        """Iterate over the text, unpacked, in blocks. A packed file that breaks off yields what there is."""
        self._is_torn = False
        try:
            with self._path.open("rb") as file:
                first = file.read(2)
                file.seek(0)
                yield from self._unpacked(file) if first == b"\x1f\x8b" else iter(lambda: file.read(BLOCK_BYTES), b"")
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}", path=self.path) from error

    def _unpacked(self, file: IO[bytes]) -> Iterator[bytes]:
        unpacker = zlib.decompressobj(31)
        try:
            while packed := unpacker.unconsumed_tail or unpacker.unused_data or file.read(BLOCK_BYTES):
                if unpacker.eof:
                    unpacker = zlib.decompressobj(31)
                text = unpacker.decompress(packed, BLOCK_BYTES)
                if text:
                    yield text
        except zlib.error as error:
            raise self._broken(f"is no readable gzip: {error}") from error
        self._is_torn = not unpacker.eof


class _LinesRecording(_FileRecording):
    """A line a row; before them a line about the whole, after them a line with the totals."""

    def _slabs(self) -> Iterator[list[Any]]:
        self.has_timeline = True
        num_lines = 0
        rest = b""
        held: bytes | None = None  # the last line: it may be the totals
        for block in self._blocks():
            text = rest + block
            cut = text.rfind(b"\n") + 1
            if not cut:
                rest = text
                if len(rest) > LARGEST_STEP_BYTES:
                    raise self._broken(f"has a line longer than {LARGEST_STEP_BYTES} bytes", line=num_lines + 1)
                continue
            lines = text[:cut].splitlines()
            rest = text[cut:]
            if held is not None:
                lines.insert(0, held)
            held = lines.pop()
            if not num_lines and lines:
                self._head(lines)
            yield self._decoded(lines, num_lines)
            num_lines += len(lines)
        lines = [] if held is None else [held]
        if rest.strip():
            if self._is_whole(rest):
                lines.append(rest)
            else:
                self.notes.append(f"line {num_lines + len(lines) + 1} breaks off and was left out")
                self.is_cut = True
        if not num_lines and lines:
            self._head(lines)
        if lines:
            totals = self._object(lines[-1])
            if totals is not None and "step" not in totals:
                self.top.update(totals)
                lines[-1] = b""
        self.is_cut |= self._is_torn or "peak_used_pct" not in self.top
        yield self._decoded(lines, num_lines)

    def _head(self, lines: list[bytes]) -> None:
        head = self._object(lines[0])
        if head is not None and "step" not in head:
            self.top.update(head)
            lines[0] = b""

    def _object(self, line: bytes) -> dict[str, Any] | None:
        try:
            value = _anything.decode(line)
        except (msgspec.DecodeError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    @staticmethod
    def _is_whole(line: bytes) -> bool:
        try:
            _anything.decode(line)
        except (msgspec.DecodeError, RecursionError):
            return False
        return True

    def _decoded(self, lines: list[bytes], num_before: int) -> list[Any]:
        try:
            return _steps.decode(b"[" + b",".join(line for line in lines if line.strip()) + b"]")
        except (msgspec.DecodeError, RecursionError):
            rows = []
            for number, line in enumerate(lines, num_before + 1):
                if line.strip():
                    try:
                        rows.append(_anything.decode(line))
                    except (msgspec.DecodeError, RecursionError) as error:
                        raise self._broken(f"is no JSON: {error}", line=number) from error
            return rows


_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"?|[][{},:]', re.DOTALL)


class _JsonRecording(_FileRecording):
    """One object with the rows in an array. The array is read piece by piece; the object around it is read as a whole.

    A piece of the array that is valid JSON between brackets ends between two of its elements, wherever it was cut: so a
    likely place is tried first, and brackets are counted only where that fails.
    """

    def _slabs(self) -> Iterator[list[Any]]:
        blocks = self._blocks()
        text = b""
        start: int | None = None
        for block in blocks:
            text += block
            start = _array_start(text)
            if start is not None:
                break
            self._check_size(text)
        if start is None:
            self._skeleton(text)
            return
        self.has_timeline = True
        skeleton = text[:start]
        text = text[start:]
        is_first, is_last = True, False
        while True:
            if not is_last and len(text) < BLOCK_BYTES:
                block = next(blocks, b"")
                is_last = not block
                text += block
                if not is_last:
                    continue
            rows, text, has_ended = self._piece(text, blocks, is_first=is_first, is_last=is_last)
            if rows:
                yield rows
                is_first = False
            if has_ended:
                break
        for block in blocks:
            text += block
            self._check_size(text)
        if self._is_torn:
            raise self._broken("breaks off")
        self._skeleton(skeleton + b"]" + text)

    def _check_size(self, text: bytes) -> None:
        if len(text) > LARGEST_STEP_BYTES:
            raise self._broken(f"has more than {LARGEST_STEP_BYTES} bytes outside of its rows, or in one of them")

    def _piece(
        self, text: bytes, blocks: Iterator[bytes], *, is_first: bool, is_last: bool
    ) -> tuple[list[Any], bytes, bool]:
        """Return some rows from the beginning of `text`, what follows them, and whether the array ended there."""
        body = text.lstrip()
        if not is_first and body[:1] == b",":
            body = body[1:]
        elif body[:1] == b"]":
            return [], body[1:], True
        elif not is_first:
            raise self._broken("breaks off, or lacks a comma between two rows" if body else "breaks off")
        last_row_ends, array_ends = body.rfind(b"}") + 1, body.rfind(b"]")
        for cut in (array_ends, last_row_ends) if is_last else (last_row_ends,):
            if cut > 0:
                rows = _decode(body[:cut])
                if rows:
                    rest = body[cut:]
                    has_ended = rest[:1] == b"]"
                    return rows, rest[1:] if has_ended else rest, has_ended
        while True:
            counted, has_ended = _last_boundary(body)
            if has_ended and not body[:counted].strip():
                raise self._broken("has a comma with no row after it")
            if counted:
                break
            block = next(blocks, b"")
            self._check_size(body)
            if not block:
                raise self._broken("breaks off")
            body += block
        rows = _decode(body[:counted])
        if rows is None:
            raise self._broken(f"is no JSON: {_why_not(body[:counted])}")
        rest = body[counted:]
        return rows, rest[1:] if has_ended else rest, has_ended

    def _skeleton(self, text: bytes) -> None:
        """Return the body without its rows."""
        try:
            body = _anything.decode(text.removeprefix(b"\xef\xbb\xbf"))
        except (msgspec.DecodeError, RecursionError) as error:
            raise self._broken(f"is no JSON: {error}") from error
        if not isinstance(body, dict):
            raise self._broken(f"must be an object, is {brief(body)}")
        if self.has_timeline and body.get("timeline") != []:
            raise self._broken("has two timelines")
        self.top = {name: value for name, value in body.items() if name != "timeline"}


def _array_start(text: bytes) -> int | None:
    """Return where the elements of the array `timeline` of the object begin; None where there is none so far."""
    depth = 0
    last_string = b""
    is_key = False
    for token in _TOKEN.finditer(text):
        mark = token[0]
        if mark in (b"{", b"["):
            if is_key and depth == 1 and mark == b"[" and last_string == b'"timeline"':
                return token.end()
            depth += 1
            is_key = False
        elif mark in (b"}", b"]"):
            depth -= 1
        elif mark == b":":
            is_key = True
        elif mark == b",":
            is_key = False
        elif not is_key:
            last_string = mark
    return None


def _last_boundary(text: bytes) -> tuple[int, bool]:
    """Return where the last element that is surely complete ends, and whether the array ends there."""
    depth = 0
    boundary = 0
    for token in _TOKEN.finditer(text):
        mark = token[0]
        if mark in (b"{", b"["):
            depth += 1
        elif mark in (b"}", b"]"):
            if depth == 0:
                return token.start(), True
            depth -= 1
        elif mark == b"," and depth == 0:
            boundary = token.start()
    return boundary, False


def _decode(piece: bytes) -> list[Any] | None:
    """Return the elements of a piece of an array; None if it is no JSON."""
    text = b"[" + piece + b"]"
    try:
        return _steps.decode(text)
    except msgspec.ValidationError:
        pass  # some row is not what it should be
    except (msgspec.DecodeError, RecursionError):
        return None
    try:
        values: list[Any] = _anything.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return values


def _why_not(piece: bytes) -> str:
    try:
        json.loads(b"[" + piece + b"]")
    except (ValueError, RecursionError) as error:
        return str(error)
    return "it is nested too deeply, or holds a number that JSON does not have"


class _ParquetRecording(_FileRecording):
    """Columns by the names of the fields; what is said of the whole is in the metadata of the schema."""

    def _slabs(self) -> Iterator[list[Any]]:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise ConfigError("Parquet needs pyarrow", path=self.path, hint="pip install 'kvarts[parquet]'.") from None
        import tempfile

        self.has_timeline = True
        with tempfile.TemporaryFile() as unpacked:
            source: Any = self._path
            with self._path.open("rb") as file:
                if file.read(2) == b"\x1f\x8b":
                    for block in self._blocks():
                        unpacked.write(block)
                    unpacked.seek(0)
                    source = unpacked
            try:
                table = pq.ParquetFile(source)
                metadata = table.schema_arrow.metadata or {}
                for name, value in metadata.items():
                    try:
                        self.top[name.decode()] = _anything.decode(value)
                    except (msgspec.DecodeError, UnicodeDecodeError):
                        continue  # other people's metadata
                names = [name for name in table.schema_arrow.names if name in Step.__struct_fields__]
                for batch in table.iter_batches(batch_size=SLAB_ROWS, columns=names):
                    yield batch.to_pylist()
            except (pa.ArrowException, OSError, ValueError) as error:
                raise self._broken(f"is no readable Parquet: {error}") from error

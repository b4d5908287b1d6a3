"""Reader of timelines from any recorder, in chunks of rows, in bounded memory. Knows nothing of kvarts' own writer.

Input that is not a timeline at all (malformed JSON, a file that breaks off) raises InputError. In a timeline with wrong
fields, each malformed row is left out and reported as a complaint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvarts.base.errors import InputError
from kvarts.base.files import temporary_file
from kvarts.proof.verify.chunk import NUMBERS, PARTS, Recording, brief
from kvarts.proof.verify.json_text import JsonText, LinesText
from kvarts.proof.verify.text import JSON_ERRORS, Broken, ByteSource, any_value, bytes_blocks, shortened

__all__ = ["SLAB_ROWS", "BodyRecording", "ParquetRecording", "TextRecording", "open_recording"]

SLAB_ROWS = 1 << 16
BATCH_ROWS = 1 << 14
LARGEST_FOOTER_BYTES = 1 << 24


def open_recording(path: Path | str) -> Recording:
    """Return the recording in a file, gzipped or not, or in a pipe.

    The format is Parquet by its first bytes; JSON lines by the suffix .jsonl; JSON by the suffix .json; otherwise JSON
    lines if the first line is a whole object and another follows. Raise MissingFileError, or InputError if the file
    cannot be opened.
    """
    path = Path(path)
    source = ByteSource(path)
    suffixes = path.suffixes[:-1] if path.suffixes[-1:] == [".gz"] else path.suffixes
    suffix = suffixes[-1] if suffixes else ""
    if source.head(4) == b"PAR1" or suffix == ".parquet":
        return ParquetRecording(source)
    if suffix in (".jsonl", ".ndjson") or (suffix != ".json" and _is_lines(source)):
        return _LinesRecording(source)
    return _JsonRecording(source)


def _is_lines(source: ByteSource) -> bool:
    """Return whether the first line is a whole object and another line begins like one."""
    for block in shortened(source.blocks(), source.broken, keeps_lines=True):
        first, _, more = block.lstrip().partition(b"\n")
        if not more.lstrip().startswith(b"{"):
            return False
        try:
            return isinstance(any_value(first), dict)
        except JSON_ERRORS:
            return False
    return False


class BodyRecording(Recording):
    """A body that is already in memory. Raises InputError if it is not an object."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        if not isinstance(body, Mapping):
            raise InputError(f"must be an object, is {brief(body)}", field="body")
        self._body = body

    def _slabs(self) -> Iterator[list[Any]]:
        body = self._body
        self.top = {name: value for name, value in body.items() if name != "timeline"}
        timeline = body.get("timeline")
        if isinstance(timeline, list | tuple):
            self.has_timeline = True
            for start in range(0, len(timeline), SLAB_ROWS):
                yield list(timeline[start : start + SLAB_ROWS])
        elif "timeline" in body:
            self.top["timeline"] = timeline


class TextRecording(Recording):
    """A JSON text in memory."""

    def __init__(self, text: bytes) -> None:
        super().__init__()
        self._text = text

    def _slabs(self) -> Iterator[list[Any]]:
        yield from _json_rows(self, bytes_blocks(self._text, _broken_body), _broken_body)


def _broken_body(what: str, *, line: int | None = None) -> InputError:
    return InputError(what, field="body", line=line)


def _json_rows(recording: Recording, blocks: Iterator[bytes], broken: Broken) -> Iterator[list[Any]]:
    """Iterate over the rows of one object, which holds them in an array."""
    text = JsonText(shortened(blocks, broken, keeps_lines=False), broken)
    recording.top, recording.twice = text.top, text.twice
    for rows in text.rows():
        recording.has_timeline = True
        yield rows
    recording.has_timeline = text.has_timeline


class _JsonRecording(Recording):
    def __init__(self, source: ByteSource) -> None:
        super().__init__(source.path)
        self._source = source

    def _slabs(self) -> Iterator[list[Any]]:
        yield from _json_rows(self, self._source.text(), self._source.broken)
        if self._source.is_torn:
            raise self._source.broken("breaks off")


class _LinesRecording(Recording):
    def __init__(self, source: ByteSource) -> None:
        super().__init__(source.path)
        self._source = source

    def _slabs(self) -> Iterator[list[Any]]:
        broken = self._source.broken
        self.has_timeline = True
        lines = LinesText(shortened(self._source.text(), broken, keeps_lines=True), broken)
        self.top, self.twice = lines.top, lines.twice
        yield from lines.rows()
        if lines.broken_line is not None:
            self.notes.append(f"line {lines.broken_line} breaks off and was left out")
        self.is_cut = lines.broken_line is not None or self._source.is_torn or "peak_used_pct" not in self.top


class ParquetRecording(Recording):
    """A Parquet file, optionally gzipped. Requires pyarrow."""

    def __init__(self, source: ByteSource) -> None:
        super().__init__(source.path)
        self._source = source

    def _slabs(self) -> Iterator[list[Any]]:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise InputError("Parquet needs pyarrow", path=self.path, hint="pip install 'kvarts[parquet]'.") from None
        self.has_timeline = True
        with temporary_file() as unpacked, self._source.open() as opened:
            file: Any = opened
            if file.read(2) == b"\x1f\x8b":
                for block in self._source.blocks():
                    unpacked.write(block)
                file = unpacked
            file.seek(0)
            try:
                table = pq.ParquetFile(
                    file,
                    thrift_string_size_limit=LARGEST_FOOTER_BYTES,
                    thrift_container_size_limit=LARGEST_FOOTER_BYTES,
                )
                schema = table.schema_arrow
                for name, value in (schema.metadata or {}).items():
                    try:
                        self.top[name.decode()] = any_value(value)
                    except JSON_ERRORS:
                        continue  # other people's metadata
                names = schema.names
                self.twice = sorted({name for name in names if name in (*NUMBERS, *PARTS) and names.count(name) > 1})
                numbers = [
                    name
                    for name in NUMBERS
                    if names.count(name) == 1 and pa.types.is_primitive(schema.field(name).type)
                ]
                # Columns that are not numbers are not read, however long: the type suffices for the complaint.
                others = {name: str(schema.field(name).type) for name in NUMBERS if names.count(name) == 1}
                others = {name: kind for name, kind in others.items() if name not in numbers}
                parts = [
                    name
                    for name in PARTS
                    if names.count(name) == 1
                    and pa.types.is_list(schema.field(name).type)
                    and pa.types.is_integer(schema.field(name).type.value_type)
                ]
                asked = ["asked"] if names.count("asked") == 1 else []
                for batch in table.iter_batches(batch_size=BATCH_ROWS, columns=[*numbers, *parts, *asked]):
                    yield [{**row, **others} for row in batch.to_pylist()]
            except (pa.ArrowException, OSError, ValueError, RecursionError, OverflowError) as error:
                raise self._source.broken(f"is no readable Parquet: {error}") from error

"""Reader of timelines in Parquet: columns are named like the fields, top-level fields are in the metadata."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvarts.errors import InputError
from kvarts.verify.chunk import NUMBERS, PARTS, Recording
from kvarts.verify.text import ByteSource
from kvarts.verify.values import JSON_ERRORS, any_value

__all__ = ["ParquetRecording"]

BATCH_ROWS = 1 << 14
LARGEST_FOOTER_BYTES = 1 << 24


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
        import tempfile

        self.has_timeline = True
        with tempfile.TemporaryFile() as unpacked, self._source.open() as opened:
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

"""Rows of a timeline as written and as columns. Splits well-formed rows from complaints about malformed ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, TypeGuard

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.proof.verify.text import Twice, any_value

__all__ = [
    "NUMBERS",
    "PARTS",
    "TOP_FIELDS",
    "Column",
    "Complaint",
    "Recording",
    "RequestedBlocks",
    "RowChunk",
    "TimelineRow",
    "brief",
    "chunk_of",
    "is_count",
    "is_real",
    "line_rows_of",
    "rows_of",
]

LARGEST_COUNT = 1 << 53
LARGEST_REAL = 1e18

_Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_COUNT)]
_Real = Annotated[float, msgspec.Meta(ge=0.0, le=LARGEST_REAL)]


class RequestedBlocks(msgspec.Struct, gc=False):
    """The blocks that a preempting step asked for, how many were free, and how many unused ones were promised."""

    blocks: _Count
    free_blocks: _Count
    request: str | int | None = None
    model: str | None = None
    promised_blocks: _Count | None = None


class TimelineRow(msgspec.Struct, gc=False):
    """One row. The first seven fields are required; an optional number that is missing is -1."""

    step: _Count
    t_ms: _Real
    used_blocks: _Count
    free_blocks: _Count
    used_pct: _Real
    active_seqs: _Count
    preempted_seqs: _Count
    cached_blocks: _Count = -1
    allocated: _Count = -1
    freed: _Count = -1
    waiting: _Count = -1
    withheld_blocks: _Count = -1
    host_used_blocks: _Count = -1
    host_cached_blocks: _Count = -1
    disk_used_blocks: _Count = -1
    disk_cached_blocks: _Count = -1
    reserved_blocks: _Count = -1
    asked: list[RequestedBlocks] | None = None
    group_used_parts: list[_Count] | None = None
    group_cached_parts: list[_Count] | None = None
    tier_used_blocks: list[_Count] | None = None
    tier_cached_blocks: list[_Count] | None = None


REQUIRED = TimelineRow.__struct_fields__[:7]
OPTIONAL = TimelineRow.__struct_fields__[7:-5]
PARTS = TimelineRow.__struct_fields__[-4:]
"""Lists with one number per KV group, or per tier below the device."""
REALS = ("t_ms", "used_pct")
NUMBERS = REQUIRED + OPTIONAL
_GETTERS = {name: attrgetter(name) for name in NUMBERS}
_ASKED = attrgetter("asked")

TOP_FIELDS = frozenset(
    {
        "timeline",
        "block_size_tokens",
        "total_blocks",
        "peak_used_pct",
        "preemption_count",
        "every",
        "initial_used_blocks",
        "block_bytes",
        "host_total_blocks",
        "disk_total_blocks",
        "kv_groups",
        "tiers",
    }
)
"""Top-level fields that rules and readers use."""

_step = msgspec.json.Decoder(TimelineRow)
_steps = msgspec.json.Decoder(list[TimelineRow])

Column = npt.NDArray[Any]


class Complaint(msgspec.Struct, frozen=True):
    """An error in the form of a row, or of the body if `row` is None."""

    row: int | None
    step: int | None
    what: str


class RowChunk(msgspec.Struct):
    """Consecutive well-formed rows. Optional columns hold -1 where a row lacks the field.

    `asked`: the asks of a row, by its place in this chunk.

    `parts`: the lists of each of PARTS, with None for a row that lacks the field.

    `rows`: the number of each row, from 0; a malformed row leaves a gap.
    """

    rows: Column
    columns: dict[str, Column]
    asked: dict[int, list[RequestedBlocks]]
    complaints: list[Complaint]
    parts: dict[str, list[list[int] | None]]


def chunk_of(rows: list[Any], first_row: int) -> RowChunk:
    """Return the well-formed rows as columns. Each of `rows` is a TimelineRow, or the value found in its place."""
    numbers = list(range(first_row, first_row + len(rows)))
    complaints: list[Complaint] = []
    if set(map(type, rows)) - {TimelineRow}:
        good: list[Any] = []
        good_numbers = []
        for number, row in zip(numbers, rows, strict=True):
            wrong = [] if type(row) is TimelineRow else _wrong_with(row)
            if wrong:
                step = row.get("step") if isinstance(row, Mapping) else None
                step = step if type(step) is int else None
                complaints += [Complaint(number, step, what) for what in wrong]
            else:
                good.append(row if type(row) is TimelineRow else _as_step(row))
                good_numbers.append(number)
        rows, numbers = good, good_numbers
    columns: dict[str, Column] = {
        name: np.fromiter(map(get, rows), np.float64 if name in REALS else np.int64, len(rows))
        for name, get in _GETTERS.items()
    }
    asked = {index: row.asked for index, row in enumerate(rows) if row.asked}
    parts = {name: [getattr(row, name) for row in rows] for name in PARTS}
    return RowChunk(np.array(numbers, np.int64), columns, asked, complaints, parts)


def rows_of(text: bytes) -> list[Any]:
    """Return the elements of a piece of an array, each a TimelineRow or the value in its place. Raise JSON_ERRORS."""
    text = b"[" + text + b"]"
    try:
        rows = _steps.decode(text)
    except msgspec.ValidationError:
        pass  # some row is not a valid TimelineRow
    else:
        if _are_unambiguous(text, rows):
            return rows
    values: list[Any] = any_value(text)
    return values


def line_rows_of(lines: Sequence[bytes]) -> list[Any]:
    """Return one row for each of `lines`, as `rows_of` does. Raise JSON_ERRORS."""
    try:
        rows = list(map(_step.decode, lines))
    except msgspec.ValidationError:
        pass
    else:
        if _are_unambiguous(b"\n".join(lines), rows):
            return rows
    return list(map(any_value, lines))


def _are_unambiguous(text: bytes, rows: list[TimelineRow]) -> bool:
    """Return whether no row in `text` can repeat a field, by comparing the number of field names with that of fields.

    Decoding silently keeps the last of two values. A field name outside its place, or any escape, also makes this
    False.
    """
    if b"\\" in text:
        return False
    if not any(map(_ASKED, rows)):
        # Each field has one colon. If there are exactly as many colons as fields, no field is repeated.
        num_fields = len(rows) * len(NUMBERS)
        for name in OPTIONAL:
            num_fields -= list(map(_GETTERS[name], rows)).count(-1)
        num_fields += sum(getattr(row, name) is not None for row in rows for name in PARTS)
        if text.count(b":") == num_fields:
            return True
    asks: list[RequestedBlocks] = []
    if text.count(b'"asked"'):
        lists = [row.asked for row in rows if row.asked is not None]
        asks = [ask for asked in lists for ask in asked]
        if text.count(b'"asked"') != len(lists):
            return False
        given = {"blocks": len(asks), "request": sum(ask.request is not None for ask in asks)}
        given["model"] = sum(ask.model is not None for ask in asks)
        given["promised_blocks"] = sum(ask.promised_blocks is not None for ask in asks)
        if any(text.count(b'"%b"' % name.encode()) != count for name, count in given.items()):
            return False
    for name in PARTS:
        if text.count(b'"%b"' % name.encode()) != sum(getattr(row, name) is not None for row in rows):
            return False
    for name in NUMBERS:
        count = text.count(b'"%b"' % name.encode()) - (len(asks) if name == "free_blocks" else 0)
        if count != len(rows) and (name in REQUIRED or count):
            count -= len(rows) - list(map(_GETTERS[name], rows)).count(-1)
            if name in REQUIRED or count:
                return False
        elif count and name in OPTIONAL and -1 in map(_GETTERS[name], rows):
            return False
    return True


def _as_step(row: Mapping[str, Any]) -> TimelineRow:
    known = {name: row[name] for name in TimelineRow.__struct_fields__ if row.get(name) is not None}
    return msgspec.convert(known, TimelineRow)


def _wrong_with(row: Any) -> list[str]:
    """Return every error in the form of `row`; empty if `_as_step` accepts it."""
    if not isinstance(row, Mapping):
        return [f"must be an object, is {brief(row)}"]
    wrong = [f"{name} is missing" for name in REQUIRED if name not in row]
    if isinstance(row, Twice):
        wrong += [f"{name} is given twice" for name in row.names if name in TimelineRow.__struct_fields__]
    for name in NUMBERS:
        if name in row and not (name in OPTIONAL and row[name] is None):
            complaint = _wrong_number(row[name], is_real=name in REALS)
            if complaint:
                wrong.append(f"{name} {complaint}")
    for name in PARTS:
        if row.get(name) is not None:
            try:
                msgspec.convert(row[name], list[_Count])
            except (msgspec.ValidationError, RecursionError, OverflowError) as error:
                wrong.append(f"{name}: {error}")
    asked = row.get("asked")
    for ask in asked if isinstance(asked, list) else ():
        if isinstance(ask, Twice):
            wrong += [
                f"asked: {name} is given twice" for name in ask.names if name in RequestedBlocks.__struct_fields__
            ]
    if asked is not None:
        try:
            msgspec.convert(asked, list[RequestedBlocks])
        except (msgspec.ValidationError, RecursionError, OverflowError) as error:
            wrong.append(f"asked: {error}")
    return wrong


def _wrong_number(value: Any, *, is_real: bool) -> str | None:
    allowed = (int, float) if is_real else (int,)
    if isinstance(value, bool) or not isinstance(value, allowed):
        return f"must be {'a number' if is_real else 'a whole number'}, is {brief(value)}"
    if not value >= 0:
        return f"must not be negative, is {brief(value)}"
    if value > (LARGEST_REAL if is_real else LARGEST_COUNT):
        return f"is too large: {brief(value)}"
    return None


def brief(value: Any) -> str:
    """Return a short text of a value, for a message."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 1 << 200:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_count(value: Any) -> TypeGuard[int]:
    """Return whether `value` is a whole number from 0 to LARGEST_COUNT."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_COUNT


def is_real(value: Any) -> TypeGuard[float]:
    """Return whether `value` is a number from 0 to LARGEST_REAL, small enough to be a time or a share."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST_REAL


class Recording:
    """A timeline that can be read more than once.

    After `chunks` is exhausted, `top` holds the other keys of the body, `twice` its repeated keys, and `notes` remarks
    on how it was read.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = path
        self.top: dict[str, Any] = {}
        self.twice: list[str] = []
        self.notes: list[str] = []
        self.has_timeline = False
        self.is_cut = False
        """Whether the recording ended before its totals."""

    def chunks(self) -> Iterator[RowChunk]:
        """Iterate over the rows, in order."""
        self.top, self.twice, self.notes, self.is_cut = {}, [], [], False
        self.has_timeline = False
        num_rows = 0
        for rows in self._slabs():
            chunk = chunk_of(rows, num_rows)
            num_rows += len(rows)
            yield chunk

    def _slabs(self) -> Iterator[list[Any]]:
        raise NotImplementedError

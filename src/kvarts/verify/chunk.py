"""Rows of a timeline as they were written, and as columns: what is well-formed, and what is wrong with the rest."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Annotated, Any, TypeGuard

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = [
    "NUMBERS",
    "Ask",
    "Chunk",
    "Column",
    "Complaint",
    "Step",
    "brief",
    "chunk_of",
    "is_count",
    "is_real",
]

LARGEST_COUNT = 1 << 53
LARGEST_REAL = 1e18

_Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_COUNT)]
_Real = Annotated[float, msgspec.Meta(ge=0.0, le=LARGEST_REAL)]


class Ask(msgspec.Struct, gc=False):
    """What a preempting step asked for."""

    blocks: _Count
    free_blocks: _Count
    request: str | int | None = None
    model: str | None = None


class Step(msgspec.Struct, gc=False):
    """One row. The first seven fields are required; an optional number that is not given is -1 here."""

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
    reserved_blocks: _Count = -1
    asked: list[Ask] | None = None


REQUIRED = Step.__struct_fields__[:7]
OPTIONAL = Step.__struct_fields__[7:13]
REALS = ("t_ms", "used_pct")
NUMBERS = REQUIRED + OPTIONAL
_GETTERS = {name: attrgetter(name) for name in NUMBERS}

Column = npt.NDArray[Any]


class Complaint(msgspec.Struct, frozen=True):
    """What is wrong with the form of a row, or of the whole (`row` None)."""

    row: int | None
    step: int | None
    what: str


class Chunk(msgspec.Struct):
    """Consecutive well-formed rows. Optional columns hold -1 where a row lacks the field; `asked` is by place here.

    `rows`: the number of each row, from 0; a row left out leaves a gap in it.
    """

    rows: Column
    columns: dict[str, Column]
    asked: dict[int, list[Ask]]
    complaints: list[Complaint]


def chunk_of(rows: list[Any], first_row: int) -> Chunk:
    """Return the well-formed ones of `rows`, each a Step or whatever came in place of one, in columns."""
    numbers = list(range(first_row, first_row + len(rows)))
    complaints: list[Complaint] = []
    if set(map(type, rows)) - {Step}:
        good: list[Any] = []
        good_numbers = []
        for number, row in zip(numbers, rows, strict=True):
            wrong = [] if type(row) is Step else _wrong_with(row)
            if wrong:
                step = row.get("step") if isinstance(row, Mapping) else None
                step = step if type(step) is int else None
                complaints += [Complaint(number, step, what) for what in wrong]
            else:
                good.append(row if type(row) is Step else _as_step(row))
                good_numbers.append(number)
        rows, numbers = good, good_numbers
    columns: dict[str, Column] = {
        name: np.fromiter(map(get, rows), np.float64 if name in REALS else np.int64, len(rows))
        for name, get in _GETTERS.items()
    }
    asked = {index: row.asked for index, row in enumerate(rows) if row.asked}
    return Chunk(np.array(numbers, np.int64), columns, asked, complaints)


def _as_step(row: Mapping[str, Any]) -> Step:
    known = {name: row[name] for name in Step.__struct_fields__ if row.get(name) is not None}
    return msgspec.convert(known, Step)


def _wrong_with(row: Any) -> list[str]:
    """Return everything that is wrong with the form of `row`; empty if `_as_step` will take it."""
    if not isinstance(row, Mapping):
        return [f"must be an object, is {brief(row)}"]
    wrong = [f"{name} is missing" for name in REQUIRED if name not in row]
    for name in NUMBERS:
        if name in row and not (name in OPTIONAL and row[name] is None):
            complaint = _wrong_number(row[name], is_real=name in REALS)
            if complaint:
                wrong.append(f"{name} {complaint}")
    asked = row.get("asked")
    if asked is not None:
        try:
            msgspec.convert(asked, list[Ask])
        except (msgspec.ValidationError, RecursionError) as error:
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
    """Return a value in as few words as will do, for a message."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 1 << 200:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_count(value: Any) -> TypeGuard[int]:
    """Return whether it is a whole number from 0 up."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_COUNT


def is_real(value: Any) -> TypeGuard[float]:
    """Return whether it is a finite number from 0 up."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")

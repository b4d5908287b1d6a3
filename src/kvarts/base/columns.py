"""Rows of integers, appended while a program runs and converted to NumPy columns on demand."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["Column", "ReadColumns", "Rows", "append_packed", "columns_of", "narrowed", "percentile_rank", "to_frame"]

Column = npt.NDArray[Any]

BITS = (("b", 7), ("h", 15), ("i", 31), ("q", 63))
"""Type codes of integers of 1, 2, 4 and 8 bytes, and their bits without the sign."""

PACK_AT: Final = 1 << 15
"""The number of integers that are kept as they were added before they are packed."""

UNITS_FROM: Final = 1 << 16
"""A common divisor of integers is searched if they are at least this far apart, as times in whole milliseconds are."""
FEW: Final = 16
"""If so many of them have no common divisor, the others are not read."""


def percentile_rank(percent: int, count: int) -> int:
    """Return which of `count` sorted values, from 0, is a percentile: p (n - 1), rounded, halves up.

    Of an even number, the median is the upper of the two middle values. It is the rule of Dynamo's reports.
    """
    return (percent * (count - 1) * 2 + 100) // 200


def narrowed(column: Column) -> Column:
    """Return a column of integers in as few bytes per integer as the largest of them needs."""
    least, most = int(column.min(initial=0)), int(column.max(initial=0))
    fits = next(kind for kind, bits in BITS if -1 << bits <= least and most < 1 << bits)
    return column.astype(fits, copy=False)


class ReadColumns(Mapping[str, Column]):
    """Columns of integers that are made each time that they are read by `read`."""

    def __init__(self, names: Iterable[str], read: Callable[[str], Column]) -> None:
        self._names = tuple(names)
        self._read = read

    def __getitem__(self, name: str) -> Column:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def append_packed(packed: array[int], numbers: list[int]) -> None:
    """Append `numbers` to `packed`, like `fromlist` but twice as fast."""
    packed.frombytes(struct.pack(f"{len(numbers)}{packed.typecode}", *numbers))


Packed = tuple[int, int, int, bytes]
"""Integers of one column: the least of them, a common divisor of their distances from it, and these distances, divided,
in this many bytes each."""


class Rows:
    """Rows of `width` integers, at most 8 bytes each. They are appended one by one, and packed by column when many.

    In each block of rows, a column has as few bytes per integer as the distance between its least and its largest
    needs. `near`: by column, another one whose integers are close to its own, from which it is then stored as the
    difference.
    """

    __slots__ = ("_blocks", "_near", "_num_packed", "_recent", "_sizes", "_width")

    def __init__(self, width: int, near: Mapping[int, int] | None = None) -> None:
        self._width = width
        self._near = {} if near is None else dict(near)
        self._blocks: list[list[Packed]] = [[] for _ in range(width)]
        """By column, in blocks of `_sizes` rows."""
        self._sizes: list[int] = []
        self._num_packed = 0
        self._recent: list[int] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how another process makes the rows: `pickle` does not find the state of native objects."""
        recent = struct.pack(f"{len(self._recent)}q", *self._recent)
        return _made_again, (self._width, self._near, self._blocks, self._sizes, recent)

    def restore(self, blocks: list[list[Packed]], sizes: list[int], recent: bytes) -> None:
        """Become rows that were packed, followed by others, in another process."""
        self._blocks, self._sizes = blocks, sizes
        self._num_packed = sum(sizes)
        self._recent = list(struct.unpack(f"{len(recent) >> 3}q", recent))

    def add(self, rows: Sequence[int]) -> None:
        """Append one row, or several concatenated ones."""
        self._recent += rows
        if len(self._recent) > PACK_AT:
            self._pack()

    def add_columns(self, columns: Sequence[Column]) -> None:
        """Append rows, which are given as columns of 8 bytes per integer."""
        self._pack()
        size = PACK_AT // self._width
        for start in range(0, len(columns[0]), size):
            self._add_block([column[start : start + size] for column in columns])

    def _pack(self) -> None:
        recent = self._recent
        if not recent:
            return
        self._recent = []
        rows = np.frombuffer(struct.pack(f"{len(recent)}q", *recent), np.int64).reshape(-1, self._width)
        self._add_block([rows[:, field] for field in range(self._width)])

    def _add_block(self, columns: Sequence[Column]) -> None:
        for field in range(self._width):
            column, near = columns[field], self._near.get(field)
            self._blocks[field].append(_packed(column if near is None else column - columns[near]))
        self._sizes.append(len(columns[0]))
        self._num_packed += len(columns[0])

    def column(self, field: int) -> Column:
        """Return a column in 8 bytes per integer; the rows are kept."""
        self._pack()
        column: Column = np.empty(self._num_packed, np.int64)
        end = 0
        for block, size in enumerate(self._sizes):
            column[end : end + size] = self._of_block(field, block)
            end += size
        return column

    def _of_block(self, field: int, block: int) -> Column:
        column, near = _unpacked(self._blocks[field][block], self._sizes[block]), self._near.get(field)
        if near is not None:
            column += self._of_block(near, block)
        return column

    def take_columns(self) -> list[Column]:
        """Return the columns in 8 bytes per integer, and clear the rows."""
        columns = [self.column(field) for field in range(self._width)]
        self._clear()
        return columns

    def _clear(self) -> None:
        self._blocks = [[] for _ in range(self._width)]
        self._sizes = []
        self._num_packed = 0

    def __len__(self) -> int:
        return self._num_packed + len(self._recent) // self._width


def _made_again(width: int, near: dict[int, int], blocks: list[list[Packed]], sizes: list[int], recent: bytes) -> Rows:
    rows = Rows(width, near)
    rows.restore(blocks, sizes, recent)
    return rows


def _packed(column: Column) -> Packed:
    low, high = int(column.min()), int(column.max())
    if low == high:
        return low, 1, 0, b""
    # Distances of 63 bits and more wrap around, here and when they are added again.
    distances = (column - low).astype("<u8")
    unit = 1
    if high - low >= UNITS_FROM and (high - low) < 1 << 63 and int(np.gcd.reduce(distances[:FEW])) != 1:
        unit = int(np.gcd.reduce(distances))
        if unit > 1:
            distances //= unit
    size = ((high - low) // unit).bit_length() + 7 >> 3
    return low, unit, size, distances.view(np.uint8).reshape(-1, 8)[:, :size].tobytes()


def _unpacked(packed: Packed, num_rows: int) -> Column:
    low, unit, size, content = packed
    if not size:
        return np.full(num_rows, low, np.int64)
    if size in [1, 2, 4, 8]:
        distances = np.frombuffer(content, f"<u{size}").astype(np.int64)
    else:
        wide = np.zeros((num_rows, 8), np.uint8)
        wide[:, :size] = np.frombuffer(content, np.uint8).reshape(num_rows, size)
        distances = wide.view("<i8").reshape(num_rows).astype(np.int64, copy=False)
    if unit > 1:
        distances *= unit
    distances += low
    return distances


def to_frame(columns: Mapping[str, Any]) -> Any:
    """Return `columns` as a pandas.DataFrame. Raise ModuleNotFoundError, with a hint, without pandas."""
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("to_pandas needs pandas: pip install pandas", name=error.name) from error
    return pd.DataFrame(dict(columns))


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the columns of rows; nested values have joined names (`ttft_ms_p99`), missing ones are None."""
    flat = [_flat(row) for row in rows]
    return {name: [row.get(name) for row in flat] for name in dict.fromkeys(name for row in flat for name in row)}


def _flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}_")
        else:
            found[prefix + name] = value
    return found

"""Rows of integers, appended while a program runs and converted to NumPy columns on demand."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvarts.few import Column, arrays_pay

__all__ = ["Column", "Rows", "append_packed", "to_frame"]

PACK_AT: Final = 1 << 18
"""Bytes of rows that are kept as they were added before packing: they fit in a core's private cache."""

MANY: Final = 1 << 16
"""Integers that are packed from which on NumPy is loaded, which a summary of so many needs."""

WIDER = {"b": "h", "h": "i", "i": "q"}
"""Type codes, in `array` and NumPy, of integers of 1, 2, 4 and 8 bytes: the next after each."""


def append_packed(packed: array[int], numbers: list[int]) -> None:
    """Append `numbers` to `packed`, like `fromlist` but twice as fast."""
    packed.frombytes(struct.pack(f"{len(numbers)}{packed.typecode}", *numbers))


class Rows:
    """Rows of `width` integers, at most 8 bytes each. They are appended one by one, and packed by column when many.

    A column has as few bytes per integer as its largest one so far needs.
    """

    __slots__ = ("_pack_row", "_packed", "_recent", "_width")

    def __init__(self, width: int) -> None:
        self._width = width
        self._packed = [array("b") for _ in range(width)]
        self._recent = bytearray()
        self._pack_row = struct.Struct(f"{width}q").pack

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how another process makes the rows: `pickle` does not find the state of native objects."""
        return _made_again, (self._width, self._packed, bytes(self._recent))

    def restore(self, packed: list[array[int]], recent: bytes) -> None:
        """Become rows that were packed, followed by others, in another process."""
        self._packed = packed
        self._recent = bytearray(recent)

    def add(self, rows: Sequence[int]) -> None:
        """Append one row, or several concatenated ones."""
        if len(rows) == self._width:
            self._recent += self._pack_row(*rows)
        else:
            self._recent += struct.pack(f"{len(rows)}q", *rows)
        if len(self._recent) > PACK_AT:
            self._pack()

    def _pack(self) -> None:
        width, recent = self._width, self._recent
        if not recent:
            return
        self._recent = bytearray()
        if arrays_pay(0) or len(self._packed[0]) * width > MANY:
            import numpy as np

            rows = np.frombuffer(recent, np.int64).reshape(-1, width)
            bounds = zip(rows.min(axis=0).tolist(), rows.max(axis=0).tolist(), strict=True)
            for field, (low, high) in enumerate(bounds):
                packed = self._with_room(field, low, high)
                packed.frombytes(rows[:, field].astype(packed.typecode).tobytes())
            return
        flat = array("q", bytes(recent))
        for field in range(width):
            numbers = flat[field::width].tolist()
            append_packed(self._with_room(field, min(numbers), max(numbers)), numbers)

    def _with_room(self, field: int, low: int, high: int) -> array[int]:
        """Return a packed column with a type for integers from `low` to `high`."""
        packed = self._packed[field]
        while not -1 << 8 * packed.itemsize - 1 <= low <= high < 1 << 8 * packed.itemsize - 1:
            packed = self._packed[field] = array(WIDER[packed.typecode], packed)
        return packed

    def take_narrow_columns(self) -> list[Column]:
        """Return the columns, each with the smallest type that has room for its integers, and clear the rows."""
        import numpy as np

        self._pack()
        packed, self._packed = self._packed, [array("b") for _ in range(self._width)]
        return [np.frombuffer(column, column.typecode) for column in packed]

    def take_columns(self) -> list[Column]:
        """Return the columns in 8 bytes per integer, and clear the rows."""
        import numpy as np

        narrow = self.take_narrow_columns()
        wide: list[Column] = []
        for column in reversed(narrow):  # memory never holds all of them twice
            wide.append(column.astype(np.int64))
            narrow.pop()
        return wide[::-1]

    def to_lists(self) -> list[list[int]]:
        """Return the rows as columns, for small numbers of rows; the rows are kept."""
        self._pack()
        return [column.tolist() for column in self._packed]

    def __len__(self) -> int:
        return len(self._packed[0]) + len(self._recent) // (8 * self._width)


def _made_again(width: int, packed: list[array[int]], recent: bytes) -> Rows:
    rows = Rows(width)
    rows.restore(packed, recent)
    return rows


def to_frame(columns: Mapping[str, Any]) -> Any:
    """Return `columns` as a pandas.DataFrame. Raise ModuleNotFoundError, with a hint, without pandas."""
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("to_pandas needs pandas: pip install pandas", name=error.name) from error
    return pd.DataFrame(dict(columns))

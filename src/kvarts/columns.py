"""Rows of integers, appended while a program runs and converted to NumPy columns on demand."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from kvarts.few import Column

__all__ = ["Column", "Rows", "append_packed", "to_frame"]

PACK_AT = 1 << 13
"""Number of integers kept as objects before packing: a few hundred kilobytes, which fit in a core's private cache."""


WIDER = {"b": "h", "h": "i", "i": "q"}
"""Type codes, in `array` and NumPy, of integers of 1, 2, 4 and 8 bytes: the next after each."""


def append_packed(packed: array[int], numbers: list[int]) -> None:
    """Append `numbers` to `packed`, like `fromlist` but twice as fast."""
    packed.frombytes(struct.pack(f"{len(numbers)}{packed.typecode}", *numbers))


class Rows:
    """Rows of `width` integers. They are appended to a list, which is packed by column when it gets long.

    A column has as few bytes per integer as its largest one so far needs.
    """

    __slots__ = ("_packed", "_recent", "_width")

    def __init__(self, width: int) -> None:
        self._width = width
        self._packed = [array("b") for _ in range(width)]
        self._recent: list[int] = []

    def add(self, rows: Sequence[int]) -> None:
        """Append one row, or several concatenated ones."""
        self._recent += rows
        if len(self._recent) > PACK_AT:
            self._pack()

    def _pack(self) -> None:
        width, recent = self._width, self._recent
        for field in range(width):
            numbers = recent[field::width]
            while True:
                packed = self._packed[field]
                try:
                    append_packed(packed, numbers)
                    break
                except struct.error:
                    if packed.typecode == "q":
                        raise
                    self._packed[field] = array(WIDER[packed.typecode], packed)
        recent.clear()

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
        return len(self._packed[0]) + len(self._recent) // self._width


def to_frame(columns: Mapping[str, Any]) -> Any:
    """Return `columns` as a pandas.DataFrame. Raise ModuleNotFoundError, with a hint, without pandas."""
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("to_pandas needs pandas: pip install pandas", name=error.name) from error
    return pd.DataFrame(dict(columns))

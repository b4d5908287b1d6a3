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


def append_packed(packed: array[int], numbers: list[int]) -> None:
    """Append `numbers` to `packed`, like `fromlist` but twice as fast."""
    packed.frombytes(struct.pack(f"{len(numbers)}{packed.typecode}", *numbers))


class Rows:
    """Rows of `width` integers. They are appended to a list, which is packed into 8 bytes each when it gets long."""

    __slots__ = ("_packed", "_recent", "_width")

    def __init__(self, width: int) -> None:
        self._width = width
        self._packed = array("q")
        self._recent: list[int] = []

    def add(self, rows: Sequence[int]) -> None:
        """Append one row, or several concatenated ones."""
        self._recent += rows
        if len(self._recent) > PACK_AT:
            self._pack()

    def _pack(self) -> None:
        append_packed(self._packed, self._recent)
        self._recent.clear()

    def take_columns(self) -> Column:
        """Return the rows as columns, shape [width, rows], and clear them, so that memory never holds two copies."""
        import numpy as np

        self._pack()
        packed, self._packed = self._packed, array("q")
        return np.ascontiguousarray(np.frombuffer(packed, np.int64).reshape(-1, self._width).T)

    def to_lists(self) -> list[list[int]]:
        """Return the rows as columns, for small numbers of rows; the rows are kept."""
        self._pack()
        return [self._packed[field :: self._width].tolist() for field in range(self._width)]

    def __len__(self) -> int:
        return (len(self._packed) + len(self._recent)) // self._width


def to_frame(columns: Mapping[str, Any]) -> Any:
    """Return `columns` as a pandas.DataFrame. Raise ModuleNotFoundError, with a hint, without pandas."""
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("to_pandas needs pandas: pip install pandas", name=error.name) from error
    return pd.DataFrame(dict(columns))

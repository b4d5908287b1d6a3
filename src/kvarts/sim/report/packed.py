"""A column of one integer per step, in blocks, which are compressed without loss once there are several.

The step times of a leap rise with the contexts, on a straight line except for rounding, so the differences of their
differences are close to 0. A block of them is stored as these, in a few bits per step, and the jumps where leaps begin.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np

from kvarts.base.columns import Column, append_packed

__all__ = ["BLOCK_STEPS", "PackedColumn"]

BLOCK_STEPS = 1 << 16
RECENT_STEPS = 1 << 12
"""Integers that stay Python objects: a few hundred kilobytes, which fit in a core's private cache."""
PACK_AT = 4 * BLOCK_STEPS
"""Fewer steps than this are not compressed: in a short replay, compression would cost more than it saves."""
MOST_JUMPS = 4
"""A block with more than one jump in this many steps would take more memory than its integers."""

_WIDTHS = ("b", "h", "i", "q")
"""Type codes, in `array` and NumPy, of integers of 1, 2, 4 and 8 bytes."""


class _Narrow(msgspec.Struct, frozen=True, gc=False):
    """Integers in as few bytes as the largest of them needs."""

    width: str
    packed: bytes

    def wide(self) -> Column:
        """Return them in 8 bytes each."""
        return np.frombuffer(self.packed, self.width).astype(np.int64)


class _Block(msgspec.Struct, frozen=True, gc=False):
    """The integers of a block: differences of their differences, in one byte each, compressed.

    `distances`: from each difference that needs more than a byte to the next, the first from the start; `jumps`: these
    differences. Without `differences`, `jumps` are the integers themselves.
    """

    differences: bytes
    distances: _Narrow
    jumps: _Narrow


class PackedColumn:
    """A column of integers, one per step. Its owner appends to `recent`, and calls `settle` after a batch.

    `typecode`: as in `array`. Columns that are appended to and settled together have blocks at the same places.
    """

    __slots__ = ("_blocks", "_later", "_typecode", "recent")

    def __init__(self, typecode: Literal["i", "q"]) -> None:
        self._typecode: Literal["i", "q"] = typecode
        self._blocks: list[_Block] = []
        self._later = array(typecode)
        """Integers after the blocks, in an array of this type code."""
        self.recent: list[int] = []
        """Integers after those."""

    def settle(self) -> None:
        """Move recent integers to more compact storage, if they are many."""
        if len(self.recent) >= RECENT_STEPS:
            self._keep_recent()
            if len(self._later) >= (BLOCK_STEPS if self._blocks else PACK_AT):
                self._pack()

    def _keep_recent(self) -> None:
        append_packed(self._later, self.recent)
        self.recent.clear()

    def _pack(self) -> None:
        values = np.frombuffer(self._later, self._typecode)
        end = len(values) // BLOCK_STEPS * BLOCK_STEPS
        for start in range(0, end, BLOCK_STEPS):
            self._blocks.append(_packed(values[start : start + BLOCK_STEPS].astype(np.int64)))
        self._later = self._later[end:]

    def __len__(self) -> int:
        return len(self._blocks) * BLOCK_STEPS + len(self._later) + len(self.recent)

    def blocks(self) -> Iterator[Column]:
        """Return the integers in order, BLOCK_STEPS at a time, and the rest in the last block."""
        for block in self._blocks:
            yield _unpacked(block)
        later = self._all_later()
        for start in range(0, len(later), BLOCK_STEPS):
            yield later[start : start + BLOCK_STEPS]

    def whole(self) -> Column:
        """Return all integers as an array; without compressed blocks it shares the column's memory."""
        if not self._blocks:
            return self._all_later()
        return np.concatenate([block.astype(self._typecode) for block in self.blocks()])

    def _all_later(self) -> Column:
        if self.recent:
            self._keep_recent()
        return np.frombuffer(self._later, self._typecode)


def _narrow(values: Column) -> _Narrow:
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    width = next(width for width in _WIDTHS if np.iinfo(width).min <= low and high <= np.iinfo(width).max)
    return _Narrow(width, values.astype(width).tobytes())


def _packed(values: Column) -> _Block:
    # A sum of sums undoes this, also where a difference of large numbers exceeds 64 bits and wraps around.
    differences = np.diff(np.diff(values, prepend=0), prepend=0)
    narrow = differences.astype(np.int8)
    places = np.flatnonzero(narrow != differences)
    if len(places) * MOST_JUMPS > len(values):
        return _Block(b"", _narrow(places[:0]), _narrow(values))
    narrow[places] = 0
    import zlib

    return _Block(zlib.compress(narrow.tobytes(), 1), _narrow(np.diff(places, prepend=0)), _narrow(differences[places]))


def _unpacked(block: _Block) -> Column:
    if not block.differences:
        return block.jumps.wide()
    import zlib

    values: Column = np.frombuffer(zlib.decompress(block.differences), np.int8).astype(np.int64)
    values[np.cumsum(block.distances.wide())] = block.jumps.wide()
    np.cumsum(values, out=values)
    return np.cumsum(values, out=values)

"""A column of one integer per step, in blocks, which are compressed without loss once there are many.

The step times of a leap rise with the contexts, on a straight line except for rounding. A block of them is stored as
its line and the rounding differences, a few bits per step.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator
from typing import Literal, NamedTuple

from kvarts.columns import Column, append_packed

__all__ = ["BLOCK_STEPS", "PackedColumn"]

BLOCK_STEPS = 1 << 16
RECENT_STEPS = 1 << 12
"""Integers that stay Python objects: a few hundred kilobytes, which fit in a core's private cache."""
PACK_AT = 64 * BLOCK_STEPS
"""Fewer steps than this are not compressed: compression would cost more than it saves."""

_WIDTHS = ("b", "h", "i", "q")
"""Type codes, in `array` and NumPy, of integers of 1, 2, 4 and 8 bytes."""


class _Block(NamedTuple):
    """The integers of a block: a line from the first to the last, and the difference of each from it.

    They are times, so within 2^62.
    """

    first: int
    last: int
    width: str
    differences: bytes


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
            if len(self._later) >= PACK_AT:
                self._pack()

    def _keep_recent(self) -> None:
        append_packed(self._later, self.recent)
        self.recent.clear()

    def _pack(self) -> None:
        import numpy as np

        values = np.frombuffer(self._later, self._typecode)
        end = len(values) // BLOCK_STEPS * BLOCK_STEPS
        for start in range(0, end, BLOCK_STEPS):
            self._blocks.append(_packed(values[start : start + BLOCK_STEPS].astype(np.int64)))
        self._later = self._later[end:]

    def __len__(self) -> int:
        return len(self._blocks) * BLOCK_STEPS + len(self._later) + len(self.recent)

    def to_list(self) -> list[int]:
        """Return all integers. There must be no compressed blocks."""
        assert not self._blocks
        return [*self._later, *self.recent]

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
        import numpy as np

        return np.concatenate([block.astype(self._typecode) for block in self.blocks()])

    def _all_later(self) -> Column:
        import numpy as np

        if self.recent:
            self._keep_recent()
        return np.frombuffer(self._later, self._typecode)


def _line(first: int, last: int) -> Column:
    """Return a block's line in whole numbers. It is reproducible, including its rounding."""
    import numpy as np

    line: Column = first + ((last - first) / (BLOCK_STEPS - 1) * np.arange(BLOCK_STEPS)).astype(np.int64)
    return line


def _packed(values: Column) -> _Block:
    import numpy as np

    first, last = int(values[0]), int(values[-1])
    differences = values - _line(first, last)
    low, high = int(differences.min()), int(differences.max())
    width = next(width for width in _WIDTHS if np.iinfo(width).min <= low and high <= np.iinfo(width).max)
    packed = differences.astype(width).tobytes()
    # Only rounding differences are worth compressing: wider ones hardly shrink.
    return _Block(first, last, width, zlib.compress(packed, 1) if width == "b" else packed)


def _unpacked(block: _Block) -> Column:
    import numpy as np

    packed = zlib.decompress(block.differences) if block.width == "b" else block.differences
    values: Column = _line(block.first, block.last) + np.frombuffer(packed, block.width)
    return values

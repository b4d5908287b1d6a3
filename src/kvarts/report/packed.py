"""A column of one integer per step, in blocks, which are compressed without loss once there are several.

The step times of a leap rise with the contexts, on a straight line except for rounding, so the differences of their
differences are close to 0. A block of them is stored as these, in a few bits per step, and the jumps where leaps begin.

The changes of the parts of KV groups in leaps are stored per leap, and expanded per step on demand.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from kvarts.columns import Column, Rows, append_packed
from kvarts.events import PartsMoved

__all__ = ["BLOCK_STEPS", "PackedColumn", "PartSteps"]

BLOCK_STEPS = 1 << 16
RECENT_STEPS = 1 << 12
"""Integers that stay Python objects: a few hundred kilobytes, which fit in a core's private cache."""
PACK_AT = 4 * BLOCK_STEPS
"""Fewer steps than this are not compressed: in a short replay, compression would cost more than it saves."""
MOST_JUMPS = 4
"""A block with more than one jump in this many steps would take more memory than its integers."""

_WIDTHS = ("b", "h", "i", "q")
"""Type codes, in `array` and NumPy, of integers of 1, 2, 4 and 8 bytes."""
BOUNDED = ("window", "chunk")
KEPT_WHOLE = ("full", "latent")


class _Narrow(NamedTuple):
    """Integers in as few bytes as the largest of them needs."""

    width: str
    packed: bytes

    def wide(self) -> Column:
        """Return them in 8 bytes each."""
        import numpy as np

        return np.frombuffer(self.packed, self.width).astype(np.int64)


class _Block(NamedTuple):
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


def _narrow(values: Column) -> _Narrow:
    import numpy as np

    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    width = next(width for width in _WIDTHS if np.iinfo(width).min <= low and high <= np.iinfo(width).max)
    return _Narrow(width, values.astype(width).tobytes())


def _packed(values: Column) -> _Block:
    import numpy as np

    # A sum of sums undoes this, also where a difference of large numbers exceeds 64 bits and wraps around.
    differences = np.diff(np.diff(values, prepend=0), prepend=0)
    narrow = differences.astype(np.int8)
    places = np.flatnonzero(narrow != differences)
    if len(places) * MOST_JUMPS > len(values):
        return _Block(b"", _narrow(places[:0]), _narrow(values))
    narrow[places] = 0
    return _Block(zlib.compress(narrow.tobytes(), 1), _narrow(np.diff(places, prepend=0)), _narrow(differences[places]))


def _unpacked(block: _Block) -> Column:
    import numpy as np

    if not block.differences:
        return block.jumps.wide()
    values: Column = np.frombuffer(zlib.decompress(block.differences), np.int8).astype(np.int64)
    values[np.cumsum(block.distances.wide())] = block.jumps.wide()
    np.cumsum(values, out=values)
    return np.cumsum(values, out=values)


class PartSteps:
    """Stores the changes of parts in the leaps of one engine. `memory`: description of its memory with KV groups."""

    def __init__(self, memory: Mapping[str, Any]) -> None:
        groups = memory["kv_groups"]
        self._part_blocks = [group["part_blocks"] for group in groups]
        self._bounded = [index for index, group in enumerate(groups) if group["kind"] in BOUNDED]
        self._of_tokens = [group["kind"] in BOUNDED + KEPT_WHOLE for group in groups]
        self._listed = [PackedColumn("i") for _ in self._bounded]
        self._emptied = [PackedColumn("i") for _ in self._bounded]
        self._num_leaps = 0
        # Evictions in leaps, in order: the number of the leap, the group, and the number of parts.
        self._evicted = Rows(3)

    def add(self, parts: PartsMoved) -> None:
        """Store the changes of a leap."""
        for columns, numbers in ((self._listed, parts.listed), (self._emptied, parts.emptied)):
            for column, of_group in zip(columns, numbers, strict=False):
                column.recent += of_group
                column.settle()
        evicted = parts.evicted
        for place in range(0, len(evicted), 2):
            self._evicted.add((self._num_leaps, evicted[place], evicted[place + 1]))
        self._num_leaps += 1

    def columns(self, num_steps: Column, taken: Column, before: Sequence[Column], num_blocks: int) -> list[Column]:
        """Return columns with a row for each step of a leap: blocks used, cached and released, then parts.

        `num_steps` of each leap, and the pages `taken` in each step. `before`: the same columns with one row per leap,
        before its first step. Parts: used and cached, for each group. `num_blocks`: size of the memory.
        """
        firsts = np.cumsum(num_steps) - num_steps

        def so_far(column: Column) -> Column:
            """Return the sums of all earlier steps of the leap."""
            sums = np.cumsum(column, dtype=np.int64) - column
            sums -= np.repeat(sums[firsts], num_steps)
            return sums

        used, cached, released, *parts = (np.repeat(column, num_steps) for column in before)
        num_empty = num_blocks - used - cached
        pages = so_far(taken) + taken
        page_blocks = sum(np.array(self._part_blocks)[self._of_tokens].tolist())
        listed = [np.zeros(len(taken), np.int64) for _ in self._part_blocks]
        emptied = list(listed)
        for place, index in enumerate(self._bounded):
            listed[index] = so_far(self._listed[place].whole())
            if len(self._emptied[place]):
                emptied[index] = so_far(self._emptied[place].whole())
        freed = sum(blocks * column for blocks, column in zip(self._part_blocks, emptied, strict=True))
        evicted = self._evicted_by_step(pages * page_blocks - freed - num_empty, num_steps, num_blocks)
        columns = [used + pages * page_blocks, cached, released]
        for index, blocks in enumerate(self._part_blocks):
            given = listed[index] + emptied[index]
            found = listed[index] - evicted[index]
            columns[0] = columns[0] - given * blocks
            columns[1] = columns[1] + found * blocks
            columns[2] = columns[2] + given * blocks
            columns += [parts[2 * index] - given + pages * self._of_tokens[index], parts[2 * index + 1] + found]
        return columns

    def _evicted_by_step(self, missing: Column, num_steps: Column, num_blocks: int) -> list[Column]:
        """Return, per group, the number of parts evicted in a leap up to each of its steps.

        `missing`: blocks taken up to the step, minus those that were empty.
        """
        leaps, groups, counts = self._evicted.take_columns()
        if not len(leaps):
            return [np.zeros(len(missing), np.int64) for _ in self._part_blocks]
        # A leap takes fewer blocks than this, so the sums of different leaps do not overlap.
        apart = 4 * num_blocks + max(1, int(np.abs(missing).max(initial=0)))
        offsets = np.repeat(np.arange(len(num_steps)) * apart, num_steps)
        # Evictions for a step are not undone when later steps find more empty blocks.
        wanted = np.maximum(np.maximum.accumulate(missing + offsets), offsets)
        sizes = np.array(self._part_blocks)[groups]
        blocks = counts * sizes
        sums = np.cumsum(blocks)
        first_of_leap = np.searchsorted(leaps, leaps)
        begins = sums - blocks
        begins += leaps * apart - begins[first_of_leap]
        place = np.minimum(np.searchsorted(begins + blocks, wanted), len(leaps) - 1)
        is_evicting = (wanted > offsets) & (leaps[place] * apart == offsets)
        within = -((begins[place] - wanted) // sizes[place])
        totals = []
        for index in range(len(self._part_blocks)):
            of_group = np.where(groups == index, counts, 0)
            earlier = np.cumsum(of_group) - of_group
            earlier -= earlier[first_of_leap]
            in_run = np.where(groups[place] == index, within, 0)
            totals.append(np.where(is_evicting, earlier[place] + in_run, 0))
        return totals

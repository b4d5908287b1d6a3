"""Changes of the parts of KV groups in leaps: stored per leap, and expanded per step on demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvarts.base.columns import Column, Rows
from kvarts.core.events import PartsMoved
from kvarts.sim.report.packed import PackedColumn

__all__ = ["PartSteps"]

BOUNDED = ("window", "chunk")
KEPT_WHOLE = ("full", "latent")


def _is_bounded(group: Mapping[str, Any]) -> bool:
    """Return whether running requests release parts of `group`; states by page have tokens."""
    return group["kind"] in BOUNDED or (group["kind"] == "state" and "tokens" in group)


class _Counts:
    """Numbers of parts in the steps of leaps, by group. Those of a group that is like the one before, and has the same
    ones in a leap, are not stored again."""

    def __init__(self, is_alike: Sequence[bool]) -> None:
        self._columns = [PackedColumn("i") for _ in is_alike]
        self._repeats = [PackedColumn("i") if alike else None for alike in is_alike]
        """For each leap, 1 if the group has the numbers of the one before it."""

    def add(self, by_group: Sequence[list[int]]) -> None:
        """Add the numbers of a leap; none if there are none in any leap."""
        for place, numbers in enumerate(by_group):
            column, repeats = self._columns[place], self._repeats[place]
            if repeats is not None:
                is_repeated = numbers == by_group[place - 1]
                repeats.recent.append(int(is_repeated))
                repeats.settle()
                if is_repeated:
                    continue
            column.recent += numbers
            column.settle()

    def columns(self, num_steps: Column) -> list[Column]:
        """Return the numbers of each group in all steps, of leaps with `num_steps` each; none if there are none."""
        found: list[Column] = []
        if self._columns and not len(self._columns[0]):
            return found
        for column, repeats in zip(self._columns, self._repeats, strict=True):
            stored = column.whole()
            if repeats is not None:
                is_repeated = np.repeat(repeats.whole().astype(bool), num_steps)
                every = found[-1].astype(np.int64)
                every[~is_repeated] = stored
                stored = every
            found.append(stored)
        return found


class PartSteps:
    """Stores the changes of parts in the leaps of one engine. `memory`: description of its memory with KV groups."""

    def __init__(self, memory: Mapping[str, Any]) -> None:
        groups = memory["kv_groups"]
        self._part_blocks = [group["part_blocks"] for group in groups]
        self._bounded = [index for index, group in enumerate(groups) if _is_bounded(group)]
        self._of_tokens = [group["kind"] in KEPT_WHOLE or _is_bounded(group) for group in groups]
        self._is_alike = [
            place > 0 and {**groups[index], "layers": 0} == {**groups[self._bounded[place - 1]], "layers": 0}
            for place, index in enumerate(self._bounded)
        ]
        """Whether a group is like the one before it, which usually releases the same pages."""
        self._listed = _Counts(self._is_alike)
        self._emptied = _Counts(self._is_alike)
        # Evictions in leaps, in order: the group, and the number of parts.
        self._evicted = Rows(2)
        self._num_evicted = PackedColumn("i")
        """The number of these evictions in each leap."""

    def add(self, parts: PartsMoved) -> None:
        """Store the changes of a leap."""
        self._listed.add(parts.listed)
        self._emptied.add(parts.emptied)
        self._evicted.add(parts.evicted)
        self._num_evicted.recent.append(len(parts.evicted) // 2)
        self._num_evicted.settle()

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
        for index, column in zip(self._bounded, self._listed.columns(num_steps), strict=False):
            listed[index] = so_far(column)
        for index, column in zip(self._bounded, self._emptied.columns(num_steps), strict=False):
            emptied[index] = so_far(column)
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
        if len(self._part_blocks) == 1 and self._of_tokens[0] and not self._bounded:
            # Nothing is released in a leap, and each missing block is evicted of the only group.
            return [-(-np.maximum(missing, 0) // self._part_blocks[0])]
        groups, counts = self._evicted.take_columns()
        if not len(groups):
            return [np.zeros(len(missing), np.int64) for _ in self._part_blocks]
        leaps = np.repeat(np.arange(len(num_steps)), self._num_evicted.whole())
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

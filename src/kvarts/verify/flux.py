"""The flux rule: used blocks change by those allocated and freed."""

from __future__ import annotations

import numpy as np

from kvarts.verify.chunk import RowChunk
from kvarts.verify.rule import TimelineRule

__all__ = ["Flux"]


class Flux(TimelineRule):
    """Used blocks change from row to row by allocated - freed."""

    name = "flux"

    def __init__(self, initial_used: int | None) -> None:
        super().__init__()
        self._before = initial_used
        self._row_before = -1
        self.why_not = "no two rows say what was allocated and freed"

    def feed(self, chunk: RowChunk) -> None:
        """Compare each row with the row before it, where both are present."""
        if not len(chunk.rows):
            return
        used, rows = chunk.columns["used_blocks"], chunk.rows
        allocated, freed = chunk.columns["allocated"], chunk.columns["freed"]
        before = np.concatenate(([0 if self._before is None else self._before], used[:-1]))
        known = (allocated >= 0) & (freed >= 0)
        known[0] &= self._before is not None
        known &= np.diff(rows, prepend=self._row_before) == 1  # not across a malformed row
        if known.any():
            self.why_not = None
        self.add_where(
            known & (used - before != allocated - freed),
            chunk,
            ("used_blocks", "allocated", "freed"),
            lambda used_blocks, allocated, freed, before: (
                f"used went from {before} to {used_blocks} with {allocated} allocated and {freed} freed"
            ),
            before=before,
        )
        self._before, self._row_before = int(used[-1]), int(rows[-1])

"""The order rule: steps and times never decrease."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvarts.verify.chunk import RowChunk
from kvarts.verify.rule import TimelineRule

__all__ = ["StepOrder"]


class StepOrder(TimelineRule):
    """Steps and times never decrease; no step is repeated and none is missing.

    A row at rest has the number of the step before it. It may be followed by another such row with another time or
    other counts: memory that is kept between requests can be released at rest. `every`: the body's sampling interval of
    rows. If it is None, missing steps are noted and are not violations.
    """

    name = "step_order"

    def __init__(self, every: int | None) -> None:
        super().__init__()
        self._every = every
        self._last: tuple[int, float, bool] | None = None
        self._last_counts = [0, 0, 0]
        self._last_row = -1
        self._num_missing = 0
        self._first_missing: int | None = None

    def feed(self, chunk: RowChunk) -> None:
        """Compare each row with the row before it."""
        if not len(chunk.rows):
            return
        step, t_ms, rows = chunk.columns["step"], chunk.columns["t_ms"], chunk.rows
        is_rest = (chunk.columns["active_seqs"] == 0) & (chunk.columns["preempted_seqs"] == 0)
        is_new = self._last is None
        last_step, last_t_ms, last_is_rest = self._last or (int(step[0]), float(t_ms[0]), False)
        before_step = np.concatenate(([last_step], step[:-1]))
        before_t_ms = np.concatenate(([last_t_ms], t_ms[:-1]))
        before_is_rest = np.concatenate(([last_is_rest], is_rest[:-1]))
        self.add_where(
            step < before_step,
            chunk,
            (),
            lambda before_step: f"comes after step {before_step}",
            before_step=before_step,
        )
        self.add_where(
            t_ms < before_t_ms,
            chunk,
            ("t_ms",),
            lambda t_ms, before_t_ms: f"t_ms {t_ms!r} comes after {before_t_ms!r}",
            before_t_ms=before_t_ms,
        )
        counts = [chunk.columns[name] for name in ("used_blocks", "cached_blocks", "reserved_blocks")]
        is_same = t_ms == before_t_ms
        for last, count in zip(self._last_counts, counts, strict=True):
            is_same &= count == np.concatenate(([last], count[:-1]))
        is_again = (step == before_step) & ~(is_rest & ~(before_is_rest & is_same))
        is_again[0] &= not is_new
        self.add_where(is_again, chunk, ("t_ms",), lambda t_ms: "is there twice")
        gaps = step - before_step - 1
        gaps[np.diff(rows, prepend=self._last_row) != 1] = 0  # a malformed row between them was left out
        if self._every is not None:
            self.add_where(
                gaps >= self._every,
                chunk,
                (),
                lambda before_step, gap: f"comes after step {before_step}: {gap} steps between them are missing",
                before_step=before_step,
                gap=gaps,
            )
        elif (gaps > 0).any():
            self._num_missing += int(gaps[gaps > 0].sum())
            if self._first_missing is None:
                self._first_missing = int(before_step[np.argmax(gaps > 0)]) + 1
        self._last = int(step[-1]), float(t_ms[-1]), bool(is_rest[-1])
        self._last_counts = [int(count[-1]) for count in counts]
        self._last_row = int(rows[-1])

    def finish(self, top: dict[str, Any]) -> None:
        """Note missing steps if the body does not state whether rows were left out."""
        if self._num_missing:
            self.notes.append(
                f"{self._num_missing:,} steps have no row, the first of them step {self._first_missing}, and the body "
                'has no "every" to say that rows were left out'
            )

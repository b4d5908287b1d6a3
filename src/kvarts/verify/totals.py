"""The arithmetic rules: the used share, and the totals of the body."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvarts.verify.chunk import RowChunk, is_count, is_real
from kvarts.verify.rule import TimelineRule

__all__ = ["PeakConsistency", "UsedPctArithmetic"]

PCT_TOLERANCE = 1e-9


class UsedPctArithmetic(TimelineRule):
    """used_pct = used / total."""

    name = "used_pct_arithmetic"

    def __init__(self, total: int) -> None:
        super().__init__()
        self._total = total

    def feed(self, chunk: RowChunk) -> None:
        """Divide used blocks by the total in each row."""
        total = self._total
        used, used_pct = chunk.columns["used_blocks"], chunk.columns["used_pct"]
        self.add_where(
            ~(np.abs(used_pct - used / total) <= PCT_TOLERANCE),
            chunk,
            ("used_pct", "used_blocks"),
            lambda used_pct, used_blocks: (
                f"used_pct {used_pct!r}, but {used_blocks} / {total} = {used_blocks / total!r}"
            ),
        )


class PeakConsistency(TimelineRule):
    """peak_used_pct is the maximum of used_pct, preemption_count the sum of preempted_seqs."""

    name = "peak_consistency"

    def __init__(self) -> None:
        super().__init__()
        self._peak = 0.0
        self._num_preempted = 0

    def feed(self, chunk: RowChunk) -> None:
        """Keep the maximum and the sum so far."""
        self._peak = max(self._peak, float(chunk.columns["used_pct"].max(initial=0.0)))
        self._num_preempted += sum(chunk.columns["preempted_seqs"][chunk.columns["preempted_seqs"] > 0].tolist())

    def finish(self, top: dict[str, Any]) -> None:
        """Compare the maximum and the sum with the body's totals."""
        peak, count = top.get("peak_used_pct"), top.get("preemption_count")
        if not is_real(peak) or not is_count(count):
            self.why_not = "the totals are missing"
            return
        if abs(peak - self._peak) > PCT_TOLERANCE:
            self.add(
                f"peak_used_pct {peak!r}, but the largest used_pct is {self._peak!r}",
                peak_used_pct=peak,
                largest_used_pct=self._peak,
            )
        if count != self._num_preempted:
            self.add(
                f"preemption_count {count}, but preempted_seqs add up to {self._num_preempted}",
                preemption_count=count,
                sum_of_preempted_seqs=self._num_preempted,
            )

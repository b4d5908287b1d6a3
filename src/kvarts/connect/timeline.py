"""A KV timeline of a watched engine: one row per sample of its metrics, which contain facts that events lack."""

from __future__ import annotations

import msgspec

from kvarts.connect.journal import Written
from kvarts.connect.metrics import EngineSample

__all__ = ["WatchedTimeline"]


class WatchedTimeline:
    """Writes rows to `file`, as JSON lines. The file remains the caller's; `close` writes the totals.

    Rows are samples of a running engine: they may miss its peaks, and preemptions are those since the previous row. A
    sample without usage or requests gives no row, and neither does any if a size was not observed (None).
    """

    def __init__(self, file: Written, *, total_blocks: int | None, block_size: int | None) -> None:
        self._file = file
        self._total = total_blocks or 0
        self._encode = msgspec.json.Encoder().encode
        self._peak_pct = 0.0
        self._num_preempted_before: int | None = None
        self._num_preempted = 0
        self.num_rows = 0
        self._write({"version": 1, "block_size_tokens": block_size, "total_blocks": total_blocks, "every": 1})

    def add(self, time_s: float, sample: EngineSample) -> None:
        """Write a row for a sample taken at `time_s`, in seconds from the start of the watch."""
        if not self._total or sample.usage is None or sample.num_running is None:
            return
        used = min(self._total, max(0, round(sample.usage * self._total)))
        before, total = self._num_preempted_before, sample.num_preempted
        # A restarted engine counts from 0.
        preempted = 0 if before is None or total is None or total < before else total - before
        self._num_preempted_before = total
        self._num_preempted += preempted
        used_pct = used / self._total
        self._peak_pct = max(self._peak_pct, used_pct)
        row = {
            "step": self.num_rows,
            "t_ms": round(time_s * 1000.0, 3),
            "used_blocks": used,
            "free_blocks": self._total - used,
            "used_pct": used_pct,
            "active_seqs": sample.num_running,
            "preempted_seqs": preempted,
        }
        if sample.num_waiting is not None:
            row["waiting"] = sample.num_waiting
        self._write(row)
        self.num_rows += 1

    def close(self) -> None:
        """Write the totals."""
        self._write({"peak_used_pct": self._peak_pct, "preemption_count": self._num_preempted})

    def _write(self, line: object) -> None:
        self._file.write(self._encode(line) + b"\n")

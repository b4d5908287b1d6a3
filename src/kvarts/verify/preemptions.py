"""The preemption rules: preempt only under memory pressure, and only for an allocation that did not fit."""

from __future__ import annotations

from kvarts.verify.chunk import RowChunk
from kvarts.verify.rule import TimelineRule

__all__ = ["PreemptionNeeded", "PreemptionTrigger"]


class PreemptionTrigger(TimelineRule):
    """Preemption happens only under memory pressure: used_pct at or above the threshold.

    A step that lists its asks is judged by `preemption_needed` instead.
    """

    name = "preemption_trigger"

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self._threshold = threshold

    def feed(self, chunk: RowChunk) -> None:
        """Judge rows that preempted and do not list their asks."""
        columns, threshold = chunk.columns, self._threshold
        bad = (columns["preempted_seqs"] > 0) & ~(columns["used_pct"] >= threshold)
        if chunk.asked:
            bad[list(chunk.asked)] = False
        self.add_where(
            bad,
            chunk,
            ("preempted_seqs", "used_pct"),
            lambda preempted_seqs, used_pct: (
                f"preempted {preempted_seqs} at used_pct {used_pct!r}, below the threshold {threshold!r}"
            ),
        )


class PreemptionNeeded(TimelineRule):
    """Where a preempting step lists its asks: no ask fitted, and there is one per preemption."""

    name = "preemption_needed"

    def __init__(self, total: int | None) -> None:
        super().__init__()
        self._total = total
        self.why_not = "no step says what was asked for"

    def feed(self, chunk: RowChunk) -> None:
        """Judge rows that list their asks."""
        for place, asks in chunk.asked.items():
            self.why_not = None
            step, row = int(chunk.columns["step"][place]), int(chunk.rows[place])
            preempted, free = int(chunk.columns["preempted_seqs"][place]), int(chunk.columns["free_blocks"][place])
            free -= max(0, int(chunk.columns["withheld_blocks"][place]))
            if not preempted:
                self.add("says what was asked for, and preempted no request", step=step, row=row, asks=len(asks))
            elif preempted != len(asks):
                self.add(
                    f"preempted {preempted}, and says of {len(asks)} what was asked for",
                    step=step,
                    row=row,
                    preempted_seqs=preempted,
                    asks=len(asks),
                )
            for ask in asks:
                by = "" if ask.request is None else f" by {ask.request}"
                if ask.blocks <= ask.free_blocks:
                    self.add(
                        f"{ask.blocks} blocks were asked for{by} with {ask.free_blocks} free: it fitted",
                        step=step,
                        row=row,
                        blocks=ask.blocks,
                        free_blocks=ask.free_blocks,
                    )
                elif ask.model is None and self._total is not None and ask.blocks > self._total:
                    self.add(
                        f"{ask.blocks} blocks were asked for{by}, more than there are",
                        step=step,
                        row=row,
                        blocks=ask.blocks,
                        total_blocks=self._total,
                    )
                elif ask.model is None and ask.free_blocks < free:
                    self.add(
                        f"{ask.free_blocks} blocks were free when {ask.blocks} were asked for{by}, but the step never "
                        f"had fewer than {free} free",
                        step=step,
                        row=row,
                        blocks=ask.blocks,
                        free_blocks=ask.free_blocks,
                        step_free_blocks=free,
                    )

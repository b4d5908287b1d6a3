"""The leak rule: without an active sequence, only reserved blocks and those that are being stored are used."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvarts.verify.chunk import RowChunk
from kvarts.verify.rule import TimelineRule

__all__ = ["Leak"]


class Leak(TimelineRule):
    """At rest, with no active sequence, only reserved blocks are used, and blocks that are being copied to host memory,
    which holds room for as many. A floor that keeps rising is reported.
    """

    name = "leak"

    def __init__(self) -> None:
        super().__init__()
        self.why_not = "the timeline has no moment at rest"
        self._first: int | None = None
        self._last = 0
        self._num_idle = self._num_rises = self._num_falls = 0

    def feed(self, chunk: RowChunk) -> None:
        """Judge rows at rest, and count rises and falls of their use."""
        columns = chunk.columns
        idle = (columns["active_seqs"] == 0) & (columns["preempted_seqs"] == 0) & (columns["waiting"] <= 0)
        excused = np.maximum(columns["reserved_blocks"], 0) + np.maximum(columns["host_used_blocks"], 0)
        left = np.maximum(columns["used_blocks"] - excused, 0)
        used = left[idle]
        if not len(used):
            return
        self.why_not = None
        if self._first is None:
            self._first = self._last = int(used[0])
        changes = np.diff(used, prepend=self._last)
        self._num_idle += len(used)
        self._num_rises += int((changes > 0).sum())
        self._num_falls += int((changes < 0).sum())
        self._last = int(used[-1])
        self.add_where(
            idle & (left > 0),
            chunk,
            ("used_blocks", "reserved_blocks"),
            lambda used_blocks, reserved_blocks: (
                f"{used_blocks} blocks are in use and no sequence is active"
                + (f"; {reserved_blocks} are reserved" if reserved_blocks > 0 else "")
            ),
        )

    def finish(self, top: dict[str, Any]) -> None:
        """Judge whether use at rest rose and never fell."""
        if self._num_rises > 1 and not self._num_falls and self._first is not None:
            self.add(
                f"the floor keeps rising: from {self._first} to {self._last} blocks "
                f"in {self._num_idle} moments at rest",
                first_used_blocks=self._first,
                last_used_blocks=self._last,
                idle_moments=self._num_idle,
            )

"""The boundedness rule: memory stays below a bound and does not grow."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvarts.verify.chunk import Column, RowChunk
from kvarts.verify.rule import TimelineRule

__all__ = ["Boundedness"]


class Boundedness(TimelineRule):
    """Memory stays below `max_bytes` and does not grow after warm-up, which is the first quarter of the rows.

    Growth is the slope of a least-squares line through the mean use of up to 1024 stretches of equal length. It is a
    violation if it adds up to more than one block and more than 1 % of the mean over the stretches, and the slope is
    more than four standard errors.
    """

    name = "boundedness"
    MAX_STRETCHES = 1024
    MIN_ROWS = 64
    """Rows after warm-up below which growth is not judged."""

    def __init__(self, max_bytes: int, block_bytes: int | None) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self._block_bytes = block_bytes
        self._sums = np.zeros(0)
        self._width = 1  # rows per stretch
        self._partial_sum = 0.0
        self._partial_rows = 0
        self._num_rows = 0

    def feed(self, chunk: RowChunk) -> None:
        """Compare the bytes of each row with the bound, and add its use to the stretches."""
        used = chunk.columns["used_blocks"]
        self._num_rows += len(used)
        block_bytes, max_bytes = self._block_bytes, self._max_bytes
        if block_bytes is not None:
            self.add_where(
                used * float(block_bytes) > max_bytes,
                chunk,
                ("used_blocks",),
                lambda used_blocks: (
                    f"{used_blocks} blocks are {used_blocks * block_bytes} bytes, more than {max_bytes}"
                ),
            )
        self._collect(used.astype(np.float64))

    def _collect(self, used: Column) -> None:
        while len(used):
            room = self._width - self._partial_rows
            if self._partial_rows or len(used) < self._width:
                self._partial_sum += float(used[:room].sum())
                self._partial_rows += min(room, len(used))
                used = used[room:]
                if self._partial_rows == self._width:
                    self._push(np.array([self._partial_sum]))
                    self._partial_sum, self._partial_rows = 0.0, 0
            else:
                fits = min(len(used) // self._width, 2 * self.MAX_STRETCHES - len(self._sums))
                self._push(used[: fits * self._width].reshape(fits, self._width).sum(axis=1))
                used = used[fits * self._width :]

    def _push(self, sums: Column) -> None:
        self._sums = np.concatenate((self._sums, sums))
        if len(self._sums) >= 2 * self.MAX_STRETCHES:
            self._sums = self._sums[0::2] + self._sums[1::2]
            self._width *= 2

    def finish(self, top: dict[str, Any]) -> None:
        """Judge growth over the stretches after warm-up."""
        if self._block_bytes is None:
            self.why_not = "nothing says how many bytes a block has: give --block-bytes"
        means = self._sums[len(self._sums) // 4 :] / self._width
        if len(means) * self._width < self.MIN_ROWS or len(means) < 8:
            self.why_open = f"{self._num_rows} rows are too few to tell a plateau from growth"
            return
        at = np.arange(len(means)) - (len(means) - 1) / 2
        spread = float(at @ at)
        slope = float(at @ means) / spread
        residuals = means - means.mean() - slope * at
        error = float(np.sqrt(residuals @ residuals / (len(means) - 2) / spread))
        growth = slope * len(means)
        if growth > max(1.0, 0.01 * float(means.mean())) and slope > 4 * error:
            self.add(
                f"use keeps growing after warm-up: by {growth:.1f} blocks over {len(means) * self._width} rows, "
                f"{slope / self._width * 1000:.3g} in 1,000",
                growth_blocks=growth,
                blocks_per_1000_rows=slope / self._width * 1000,
                rows=len(means) * self._width,
            )

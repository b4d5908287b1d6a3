"""Records every step and its duration, as input for `kvarts calibrate`, which fits a cost model of this machine."""

from __future__ import annotations

from typing import IO

import msgspec

from kvarts.executor.base import Executor
from kvarts.sched.plan import StepPlan, StepResult

__all__ = ["RecordingExecutor"]


class RecordingExecutor:
    """An Executor that writes one JSON line to `file` per step of the executor it wraps."""

    def __init__(self, executor: Executor, file: IO[bytes]) -> None:
        self._executor = executor
        self._file = file
        self._encoder = msgspec.json.Encoder()

    @property
    def needs_page_ids(self) -> bool:
        """The value of the wrapped executor."""
        return self._executor.needs_page_ids

    def execute(self, plan: StepPlan) -> StepResult:
        """Have the wrapped executor carry out a step, and write its line."""
        result = self._executor.execute(plan)
        batch = plan.batch
        # A drafted token costs as much as a decode with the same number of known tokens.
        known_tokens = 0 if plan.drafts is None else int(plan.drafts.positions.sum()) + batch.num_drafted
        line = {
            "duration_ns": result.duration_ns,
            "num_decodes": batch.num_decodes + batch.num_drafted,
            "decode_known_tokens": batch.decode_known_tokens + known_tokens,
            "chunks": [[chunk.start, chunk.num_tokens, chunk.num_known_tokens] for chunk in batch.chunks],
        }
        self._file.write(self._encoder.encode(line) + b"\n")
        return result

"""Executors around another one: they fit a cost model to its steps, record these, or postpone its waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.base.clock import PutOffClock
from kvarts.core.executor import Executor
from kvarts.core.sched.plan import Batch, StepPlan, StepResult

__all__ = ["MeasuredCost", "MeasuringExecutor", "RecordingExecutor", "WaitingExecutor"]

Numbers = npt.NDArray[np.float64]

NOISE = 0.2
"""Relative standard deviation of a step's duration."""
DRIFT = 0.02
"""How much each coefficient may change per step, as a share of its first estimate."""
ERROR_GAIN = 0.05
"""Weight of the last step in the mean error."""


class MeasuredCost:
    """The expected duration of a step: a constant, and a time per decode, per token of a chunk and per token that these
    attend to, plus the mean error of that.

    Coefficients follow the measured steps by a Kalman filter, on relative errors, so they adapt when a device becomes
    slower or faster. `first`: (tokens, seconds) of at least two measured steps without context, in rising order.
    """

    def __init__(self, first: Sequence[tuple[int, float]]) -> None:
        (few, short), (many, long) = first[0], first[-1]
        each = max((long - short) / (many - few), long / many * 0.01)
        self._values: Numbers = np.array([max(short - each * few, 0.01 * short), each, each, 0.0])
        self._scale: Numbers = np.array([short, each, each, 0.01 * each])
        self._most = np.square(self._scale)
        self._covariance: Numbers = np.diag(self._most)
        self._error = NOISE

    def step_ns(self, batch: Batch) -> int:
        """Return the expected duration of a step that computes `batch`, plus the mean error of that."""
        return round(self._seconds(_parts(batch)) * (1.0 + self._error) * 1e9)

    def note(self, batch: Batch, duration_ns: int) -> None:
        """Update the coefficients with a step that took `duration_ns`."""
        if duration_ns <= 0:
            return
        parts = _parts(batch) / (duration_ns / 1e9)
        # One slow step says little: an error is bounded, however long the step took.
        error = float(np.clip(1.0 - max(float(parts @ self._values), 0.0), -1.0, 1.0))
        self._error += ERROR_GAIN * (abs(error) - self._error)
        covariance = self._covariance + np.diag(np.square(DRIFT * self._scale))
        shrink = np.sqrt(np.minimum(1.0, self._most / np.diag(covariance)))
        covariance = covariance * shrink[:, None] * shrink
        seen = covariance @ parts
        gain = seen / (NOISE**2 + float(parts @ seen))
        self._covariance = covariance - np.outer(gain, seen)
        self._values = np.maximum(self._values + gain * error, 0.0)

    def _seconds(self, parts: Numbers) -> float:
        return float(parts @ self._values)


class MeasuringExecutor:
    """An Executor around another that passes the duration of its steps to `cost`."""

    def __init__(self, executor: Executor, cost: MeasuredCost) -> None:
        self.needs_page_ids = executor.needs_page_ids
        self._executor = executor
        self._cost = cost

    def execute(self, plan: StepPlan) -> StepResult:
        """Have the other executor carry out the step."""
        result = self._executor.execute(plan)
        if plan.batch.num_tokens:
            self._cost.note(plan.batch, result.duration_ns)
        return result


def _parts(batch: Batch) -> Numbers:
    """Return what a step's duration depends on: 1, decodes, chunk tokens, and tokens attended to."""
    tokens = attended = 0
    for chunk in batch.chunks:
        tokens += chunk.num_tokens
        attended += chunk.num_tokens * (chunk.start + chunk.num_tokens // 2)
    return np.array([1.0, batch.num_decodes + batch.num_drafted, tokens, batch.decode_known_tokens + attended])


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


class WaitingExecutor:
    """An Executor that waits for the end of a step after all of its work, instead of during it.

    A mock knows its tokens before they are due: with this executor, their text is also prepared before they are due,
    which leaves less to do at that time.
    """

    def __init__(self, executor: Executor, clock: PutOffClock) -> None:
        self.needs_page_ids = executor.needs_page_ids
        self._executor = executor
        self._clock = clock

    def execute(self, plan: StepPlan) -> StepResult:
        """Have the wrapped executor carry out a step, then wait for the step's end."""
        try:
            return self._executor.execute(plan)
        finally:
            self._clock.wait()

"""A cost model times a factor, to find how a result changes if steps take longer or shorter than modelled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from kvarts.limits import LATEST_NS, TooLateError

if TYPE_CHECKING:
    from kvarts.executor.base import CostModel
    from kvarts.sched.plan import Batch

__all__ = ["ScaledCost"]


class ScaledCost:
    """`cost` times `factor`. Rounds each step separately, so that sums do not depend on how the steps were queried."""

    def __init__(self, cost: CostModel, factor: float) -> None:
        self._cost = cost
        self._factor = factor

    @property
    def num_ranks(self) -> int:
        """Number of engines in lock step, as in the wrapped cost model."""
        return int(getattr(self._cost, "num_ranks", 1))

    def together_ns(self, batches: Sequence[Batch]) -> int:
        """Return the duration of a step of ranks in lock step. Raise TooLateError."""
        return self._scaled(cast("Any", self._cost).together_ns(batches))

    def decodes_together_ns(self, decodes: Sequence[tuple[int, int]], num_steps: int) -> list[int]:
        """Return the durations of steps of decodes of ranks in lock step. Raise TooLateError."""
        durations = cast("Any", self._cost).decodes_together_ns(decodes, num_steps)
        return [self._scaled(duration) for duration in durations]

    def step_ns(self, batch: Batch) -> int:
        """Return the duration of a step. Raise TooLateError if it is longer than virtual time."""
        return self._scaled(self._cost.step_ns(batch))

    def decode_ns(self, num_decodes: int, known_tokens: int, pool_tokens: int, num_steps: int) -> list[int]:
        """Return the durations of steps of decodes. Raise TooLateError."""
        durations = self._cost.decode_ns(num_decodes, known_tokens, pool_tokens, num_steps)
        return [self._scaled(duration) for duration in durations]

    def _scaled(self, duration_ns: int) -> int:
        scaled = duration_ns * self._factor
        if scaled > LATEST_NS:
            raise TooLateError
        return round(scaled)

    def __repr__(self) -> str:
        return f"{self._cost!r} times {self._factor:g}"

"""The executor of virtual time: it does nothing, and a cost model says how long that takes."""

from __future__ import annotations

from array import array

from kvarts.executor.cost import CostModel
from kvarts.sched.plan import Batch, StepPlan, StepResult

__all__ = ["SimExecutor"]


class SimExecutor:
    """An Executor that can also be asked for many steps of decodes at once."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self.step_ns = cost.step_ns

    def execute(self, plan: StepPlan) -> StepResult:
        """See Executor."""
        return StepResult(self._cost.step_ns(plan.batch))

    def decode_ns(self, batch: Batch, num_steps: int) -> array[int]:
        """Durations of `num_steps` steps alike, the first of which does `batch`."""
        assert not batch.chunks
        return self._cost.decode_ns(batch.num_decodes, batch.decode_known_tokens, batch.pool_tokens, num_steps)

"""The executor of virtual time: it does nothing, and a cost model says how long that takes."""

from __future__ import annotations

from kvarts.executor.cost import CostModel
from kvarts.sched.plan import StepPlan, StepResult

__all__ = ["SimExecutor"]


class SimExecutor:
    """An Executor that can also say beforehand how long decodes will take: `decode_ns`, see CostModel."""

    def __init__(self, cost: CostModel) -> None:
        self._step_ns = cost.step_ns
        self.decode_ns = cost.decode_ns

    def execute(self, plan: StepPlan) -> StepResult:
        """See Executor."""
        return StepResult(self._step_ns(plan.batch))

"""The executor of virtual time: it computes nothing; a cost model gives the duration of each step."""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from kvarts.executor.base import CostModel
from kvarts.sched.plan import StepPlan, StepResult

__all__ = ["SimExecutor"]


@mypyc_attr(allow_interpreted_subclasses=True)
class SimExecutor:
    """A VirtualExecutor with steps of the duration that `cost` gives. A step that computes nothing takes no time."""

    needs_page_ids = False

    def __init__(self, cost: CostModel) -> None:
        self._step_ns = cost.step_ns
        self.decode_ns = cost.decode_ns
        self.decode_times = getattr(cost, "decode_times", None)
        """Returns the durations of decodes by a rule; None if `cost` has none."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Return the duration of the step."""
        batch = plan.batch
        return StepResult(self._step_ns(batch) if batch.num_decodes or batch.chunks else 0)

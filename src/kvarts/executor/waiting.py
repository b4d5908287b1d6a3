"""An executor that postpones the waits of the executor it wraps."""

from __future__ import annotations

from kvarts.clock import PutOffClock
from kvarts.executor.base import Executor
from kvarts.sched.plan import StepPlan, StepResult

__all__ = ["WaitingExecutor"]


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

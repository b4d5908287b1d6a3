"""An executor around one that puts its waits off."""

from __future__ import annotations

from kvarts.clock import PutOffClock
from kvarts.executor.base import Executor
from kvarts.sched.plan import StepPlan, StepResult

__all__ = ["WaitingExecutor"]


class WaitingExecutor:
    """An Executor that waits for the end of a step when all of it is done, instead of in its midst.

    A mock knows its tokens before their time has come: with this, their text is made before as well, and when the time
    has come there is less to do.
    """

    def __init__(self, executor: Executor, clock: PutOffClock) -> None:
        self.needs_page_ids = executor.needs_page_ids
        self._executor = executor
        self._clock = clock

    def execute(self, plan: StepPlan) -> StepResult:
        """Have the other executor carry out a step, and wait for its end."""
        try:
            return self._executor.execute(plan)
        finally:
            self._clock.wait()

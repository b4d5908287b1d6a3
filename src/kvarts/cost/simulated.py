"""The executor of virtual time: it computes nothing; a cost model gives the duration of each step."""

from __future__ import annotations

from collections.abc import Iterator

from mypy_extensions import mypyc_attr

from kvarts.core.events import PerStep
from kvarts.core.executor import CostModel
from kvarts.core.sched.plan import Batch, Chunk, StepPlan, StepResult

__all__ = ["LeapTimes", "PrefillCost", "SimExecutor"]


class LeapTimes:
    """The durations of steps, the first of which is certain to happen. Written until they are in an event.

    `num_steps`: how many there are; `total_ns`: their sum; `last_ns`: that of the last.
    """

    __slots__ = ("_durations_ns", "last_ns", "num_steps", "total_ns")

    def __init__(self, durations_ns: list[int]) -> None:
        self._durations_ns = durations_ns
        self.num_steps = len(durations_ns)
        self.total_ns = sum(durations_ns) if durations_ns else 0
        self.last_ns = durations_ns[-1] if durations_ns else 0

    def end_before(self, within_ns: int) -> None:
        """Drop all steps but the first that start `within_ns` or more after the start of the first."""
        durations_ns = self._durations_ns
        if self.total_ns - self.last_ns < within_ns:
            return
        while len(durations_ns) > 1 and self.total_ns - durations_ns[-1] >= within_ns:
            self.total_ns -= durations_ns.pop()
        self.num_steps = len(durations_ns)
        self.last_ns = durations_ns[-1]

    def keep(self, num_steps: int) -> None:
        """Drop all steps after the first `num_steps`."""
        if num_steps < self.num_steps:
            del self._durations_ns[num_steps:]
            self.num_steps = num_steps
            self.total_ns = sum(self._durations_ns)
            self.last_ns = self._durations_ns[-1]

    @property
    def for_event(self) -> PerStep:
        """The durations, as an event has them."""
        return self._durations_ns

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[int]:
        return iter(self._durations_ns)


@mypyc_attr(allow_interpreted_subclasses=True)
class SimExecutor:
    """A VirtualExecutor with steps of the duration that `cost` gives. A step that computes nothing takes no time."""

    needs_page_ids = False

    def __init__(self, cost: CostModel) -> None:
        self.batch_ns = cost.step_ns
        """How long a batch takes, unless it is empty. An engine that has this needs no more of the executor."""
        self.decode_ns = cost.decode_ns
        self.decode_times = getattr(cost, "decode_times", None)
        """Returns the durations of decodes by a rule; None if `cost` has none."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Return the duration of the step."""
        batch = plan.batch
        return StepResult(self.batch_ns(batch) if batch.num_decodes or batch.chunks else 0)


class PrefillCost:
    """Times to compute prompts by `cost`, in steps of `token_budget` tokens with no other work."""

    def __init__(self, cost: CostModel, *, token_budget: int, pool_tokens: int) -> None:
        self._step_ns = cost.step_ns
        self._token_budget = token_budget
        self._pool_tokens = pool_tokens

    def prefill_ns(self, start: int, end: int) -> int:
        """Return the total duration of the steps that compute tokens [start, end) of a sequence."""
        duration_ns = 0
        while start < end:
            num_tokens = min(self._token_budget, end - start)
            duration_ns += self._step_ns(Batch((Chunk(start, num_tokens, end, end),), 0, 0, self._pool_tokens))
            start += num_tokens
        return duration_ns

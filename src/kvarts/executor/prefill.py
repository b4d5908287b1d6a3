"""Time to compute a prompt, by a cost model, for comparison with the time to load it."""

from __future__ import annotations

from kvarts.executor.base import CostModel
from kvarts.sched.plan import Batch, Chunk

__all__ = ["PrefillCost"]


class PrefillCost:
    """PrefillTimes by `cost`, for steps of `token_budget` tokens with no other work."""

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

"""How long prompts take to compute by a cost model, to be weighed against loading them."""

from __future__ import annotations

from kvarts.executor.cost import CostModel
from kvarts.sched.plan import Batch, Chunk

__all__ = ["PrefillCost"]


class PrefillCost:
    """PrefillTimes of `cost`, in steps of `token_budget` tokens that compute nothing else."""

    def __init__(self, cost: CostModel, *, token_budget: int, pool_tokens: int) -> None:
        self._step_ns = cost.step_ns
        self._token_budget = token_budget
        self._pool_tokens = pool_tokens

    def prefill_ns(self, start: int, end: int) -> int:
        """Return the duration of the steps that compute tokens [start, end) of a sequence."""
        duration_ns = 0
        while start < end:
            num_tokens = min(self._token_budget, end - start)
            duration_ns += self._step_ns(Batch((Chunk(start, num_tokens, end, end),), 0, 0, self._pool_tokens))
            start += num_tokens
        return duration_ns

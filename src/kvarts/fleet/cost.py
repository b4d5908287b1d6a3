"""Step times of Dynamo's mocker for workers that only generate."""

from __future__ import annotations

from kvarts.executor.base import CostModel
from kvarts.sched.plan import Batch

__all__ = ["DecodeOnly"]


class DecodeOnly:
    """Cost of a worker that generates: `cost` for the decodes; prompts take no time.

    A sequence whose recompute ends in the step counts as a decode, as it does for workers that compute prompts.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self.decode_ns = cost.decode_ns
        self.decode_times = getattr(cost, "decode_times", None)

    def step_ns(self, batch: Batch) -> int:
        """Return the duration of a step."""
        num_decodes, known_tokens = batch.num_decodes, batch.decode_known_tokens
        for chunk in batch.chunks:
            if chunk.is_last and chunk.end > chunk.num_prompt_tokens:
                num_decodes += 1
                known_tokens += chunk.end
        return self._cost.step_ns(Batch((), num_decodes, known_tokens, batch.pool_tokens))

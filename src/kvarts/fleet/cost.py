"""The step times of Dynamo's mocker by the role of a worker."""

from __future__ import annotations

from kvarts.executor.cost import CostModel
from kvarts.sched.plan import Batch

__all__ = ["DecodeOnly"]


class DecodeOnly:
    """The cost of a worker that generates: what `cost` says of the decodes, and prompts take no time.

    A sequence that ends its recompute in the step counts as a decode, as in the other role.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self.decode_ns = cost.decode_ns

    def step_ns(self, batch: Batch) -> int:
        """Return the duration of a step."""
        num_decodes, known_tokens = batch.num_decodes, batch.decode_known_tokens
        for chunk in batch.chunks:
            if chunk.is_last and chunk.end > chunk.num_prompt_tokens:
                num_decodes += 1
                known_tokens += chunk.end
        return self._cost.step_ns(Batch((), num_decodes, known_tokens, batch.pool_tokens))

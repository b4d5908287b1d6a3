"""The cost model of NVIDIA Dynamo 1.6's mocker, the default of a replay without a model or device."""

from __future__ import annotations

import msgspec

from kvarts.executor.mocker_formula import MockerTimes, mocker_decode_ns, mocker_step_ns
from kvarts.sched.plan import Batch

__all__ = ["PolynomialCost"]


class PolynomialCost(msgspec.Struct, frozen=True, tag_field="model", tag="polynomial"):
    """The cost model of NVIDIA Dynamo 1.6's mocker.

    Prefill, over the n chunks with prompt tokens: with I and P the mean prompt tokens after and before the step,
    rounded down, and t = n (I - P): 4.209989e-7 t^2 + 1.518344e-2 t + 16.50142 ms. Decode: with u = the decodes' known
    tokens over the pool's tokens, at most 1: max(1, -25.74 u^2 + 54.01 u + 5.74) ms. A sequence that ends its recompute
    in the step also counts as a decode.
    """

    def step_ns(self, batch: Batch) -> int:
        """Return the duration of a step."""
        return mocker_step_ns(batch)

    def decode_ns(self, num_decodes: int, known_tokens: int, pool_tokens: int, num_steps: int) -> list[int]:
        """Return the durations of `num_steps` steps of decodes."""
        return mocker_decode_ns(num_decodes, known_tokens, pool_tokens, num_steps)

    def decode_times(self, num_decodes: int, known_tokens: int, pool_tokens: int, num_steps: int) -> MockerTimes:
        """Return the durations of `num_steps` steps of decodes by their rule, without a list of them."""
        return MockerTimes(num_decodes, known_tokens, pool_tokens, num_steps)

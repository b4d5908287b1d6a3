"""Cost models: how long a step takes, in whole nanoseconds.

A cost model gives the duration of one step (`step_ns`), and of k consecutive steps of decodes (`decode_ns`), where
every sequence grows by one token per step. Both round each step separately, so that sums do not depend on how the steps
were queried.

Here are those that know no model and no device; `roofline.py` derives one from both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, cast

import msgspec
import numpy as np

from kvarts.base.errors import ConfigError
from kvarts.base.limits import LATEST_NS, MOST_MS, TooLateError, check_number
from kvarts.core.executor import CostModel, are_many, whole_ns
from kvarts.core.sched.plan import Batch
from kvarts.cost.mocker_formula import MockerTimes, mocker_decode_ns, mocker_step_ns

__all__ = ["CallableCost", "LinearCost", "PolynomialCost", "ScaledCost"]


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


class LinearCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="model", tag="linear"):
    """A cost linear in the step's parts: a constant, each chunk token, each decode, and each token a decode attends to.

    All coefficients are in milliseconds. Raises ConfigError for a negative one.

    >>> from kvarts import LinearCost, ReplayConfig, replay
    >>> config = ReplayConfig(num_pages=2_000, page_size=512, cost=LinearCost(step_ms=5, chunk_token_ms=0.02))
    >>> replay("sample:mooncake", config).summary["num_completed"]
    1000
    """

    step_ms: float = 0.0
    chunk_token_ms: float = 0.0
    decode_ms: float = 0.0
    context_token_ms: float = 0.0

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            check_number(getattr(self, field), f"cost.{field}", most=MOST_MS)

    def step_ns(self, batch: Batch) -> int:
        """Return the duration of a step."""
        chunk_tokens = sum(chunk.num_tokens for chunk in batch.chunks)
        ms = self.step_ms + self.chunk_token_ms * chunk_tokens
        ms = ms + self.decode_ms * batch.num_decodes + self.context_token_ms * batch.decode_known_tokens
        return round(ms * 1e6)

    def decode_ns(self, num_decodes: int, known_tokens: int, pool_tokens: int, num_steps: int) -> list[int]:
        """Return the durations of `num_steps` steps of decodes."""
        ms = self.step_ms + self.chunk_token_ms * 0 + self.decode_ms * num_decodes
        if not are_many(num_steps):
            known = range(known_tokens, known_tokens + num_steps * num_decodes, num_decodes)
            return [round((ms + self.context_token_ms * each) * 1e6) for each in known]
        return whole_ns((ms + self.context_token_ms * (known_tokens + num_decodes * np.arange(num_steps))) * 1e6)


class CallableCost:
    """A cost model around a Python callable that returns the milliseconds of a Batch. It is called for every step."""

    def __init__(self, step_ms: Callable[[Batch], float]) -> None:
        self._step_ms = step_ms

    def step_ns(self, batch: Batch) -> int:
        """Return the callable's result in nanoseconds. Raise ConfigError if it is not a valid duration."""
        ms: Any = self._step_ms(batch)
        is_number = isinstance(ms, Real)
        if not is_number or not 0.0 <= ms <= MOST_MS:
            raise ConfigError(f"the cost callable answered {ms!r} for {batch}", field="cost", hint="Return ms.")
        return round(float(ms) * 1e6)

    def decode_ns(self, num_decodes: int, known_tokens: int, pool_tokens: int, num_steps: int) -> list[int]:
        """Return the durations of `num_steps` steps of decodes, with one call of the callable per step."""
        return [
            self.step_ns(Batch((), num_decodes, known_tokens + step * num_decodes, pool_tokens))
            for step in range(num_steps)
        ]

    def __repr__(self) -> str:
        return f"CallableCost({getattr(self._step_ms, '__qualname__', self._step_ms)})"


class ScaledCost:
    """`cost` times `factor`. Rounds each step separately, so that sums do not depend on how the steps were queried."""

    def __init__(self, cost: CostModel, factor: float) -> None:
        self._cost = cost
        self._factor = factor

    @property
    def num_ranks(self) -> int:
        """Number of engines in lock step, as in the wrapped cost model."""
        return int(getattr(self._cost, "num_ranks", 1))

    def together_ns(self, batches: Sequence[Batch]) -> int:
        """Return the duration of a step of ranks in lock step. Raise TooLateError."""
        return self._scaled(cast("Any", self._cost).together_ns(batches))

    def decodes_together_ns(self, decodes: Sequence[tuple[int, int]], num_steps: int) -> list[int]:
        """Return the durations of steps of decodes of ranks in lock step. Raise TooLateError."""
        durations = cast("Any", self._cost).decodes_together_ns(decodes, num_steps)
        return [self._scaled(duration) for duration in durations]

    def step_ns(self, batch: Batch) -> int:
        """Return the duration of a step. Raise TooLateError if it is longer than virtual time."""
        return self._scaled(self._cost.step_ns(batch))

    def decode_ns(self, num_decodes: int, known_tokens: int, pool_tokens: int, num_steps: int) -> list[int]:
        """Return the durations of steps of decodes. Raise TooLateError."""
        durations = self._cost.decode_ns(num_decodes, known_tokens, pool_tokens, num_steps)
        return [self._scaled(duration) for duration in durations]

    def _scaled(self, duration_ns: int) -> int:
        scaled = duration_ns * self._factor
        if scaled > LATEST_NS:
            raise TooLateError
        return round(scaled)

    def __repr__(self) -> str:
        return f"{self._cost!r} times {self._factor:g}"

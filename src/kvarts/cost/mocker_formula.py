"""The formula of NVIDIA Dynamo 1.6's mocker for the duration of a step; PolynomialCost documents it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from mypy_extensions import i64

from kvarts.base.columns import Column
from kvarts.core.events import PerStep
from kvarts.core.executor import are_many, whole_ns
from kvarts.core.sched.plan import Batch
from kvarts.cost.simulated import LeapTimes

__all__ = ["MockerTimes", "mocker_decode_ns", "mocker_step_ns"]

IS_COMPILED: Final = not __file__.endswith(".py")
TO_WHOLE: Final = 4503599627370496.0
"""2**52: the last bit of a sum with it is that of 1, so it rounds half to even, as `round` does."""
MOST_WHOLE: Final = 2251799813685248.0
"""2**51: below it, `TO_WHOLE` rounds."""
FAR_NS: Final = 1e300
MANY_STEPS: Final = 50
"""The number of steps from which on their durations are summed by NumPy, if it pays."""


def mocker_step_ns(batch: Batch) -> int:
    """Return the duration of a step. Both of its parts are rounded, as by `round`."""
    num_prefills = after = before = 0
    num_decodes = batch.num_decodes
    known_tokens = batch.decode_known_tokens
    for chunk in batch.chunks:
        start = chunk.start
        end = start + chunk.num_tokens
        if end > (prompt := chunk.num_prompt_tokens):  # a recompute
            if end == chunk.num_known_tokens:
                num_decodes += 1
                known_tokens += end
            if start >= prompt:
                continue
            end = prompt
        num_prefills += 1
        before += start
        after += end
    duration_ns = 0
    if num_prefills:
        t = num_prefills * (after // num_prefills - before // num_prefills)
        if t:
            ns = (4.209989e-7 * t * t + 1.518344e-2 * t + 16.50142) * 1e6
            duration_ns = int((ns + TO_WHOLE) - TO_WHOLE) if ns < MOST_WHOLE else round(ns)
    if num_decodes:
        u = known_tokens / batch.pool_tokens
        if u > 1.0:
            u = 1.0
        # At least 5.74 for every u in [0, 1], so the floor of 1 ms is out of reach.
        duration_ns += int(((-25.74 * u * u + 54.01 * u + 5.74) * 1e6 + TO_WHOLE) - TO_WHOLE)
    return duration_ns


def mocker_decode_ns(num_decodes: int, known_tokens: int, pool_tokens: int, num_steps: int) -> list[int]:
    """Return the durations of `num_steps` steps of decodes."""
    if IS_COMPILED:
        return _one_by_one_ns(num_decodes, known_tokens, pool_tokens, num_steps)
    last = known_tokens + (num_steps - 1) * num_decodes
    is_few = not are_many(num_steps)
    if is_few and last <= pool_tokens:
        return [
            round((-25.74 * (u := known / pool_tokens) * u + 54.01 * u + 5.74) * 1e6)
            for known in range(known_tokens, last + 1, num_decodes)
        ]
    if is_few:
        durations = []
        for known in range(known_tokens, known_tokens + num_steps * num_decodes, num_decodes):
            u = known / pool_tokens
            if u > 1.0:
                u = 1.0
            durations.append(round((-25.74 * u * u + 54.01 * u + 5.74) * 1e6))
        return durations
    return whole_ns(_many_ns(np.arange(known_tokens, known_tokens + num_steps * num_decodes, num_decodes), pool_tokens))


def _many_ns(known_tokens: Column, pool_tokens: int) -> Column:
    """Return the durations, before they are rounded, of steps of decodes that know so many tokens in total."""
    # In place, and in the order of the loops, so that all round identically.
    use = known_tokens / pool_tokens
    np.minimum(use, 1.0, out=use)
    ms: Column = -25.74 * use
    ms *= use
    use *= 54.01
    ms += use
    ms += 5.74
    ms *= 1e6
    return ms


def _one_by_one_ns(num_decodes: i64, known_tokens: i64, pool_tokens: i64, num_steps: i64) -> list[int]:
    """Return the result of `mocker_decode_ns`. Compiled, a loop over machine numbers is faster than NumPy's calls."""
    durations: list[int] = []
    capacity = float(pool_tokens)
    known = known_tokens
    for _ in range(num_steps):
        u = float(known) / capacity
        known += num_decodes
        if u > 1.0:
            u = 1.0
        ns = (-25.74 * u * u + 54.01 * u + 5.74) * 1e6
        # `round`: half to even. The rest is exact.
        whole = i64(ns)
        rest = ns - float(whole)
        if rest > 0.5 or (rest == 0.5 and whole & 1):
            whole += 1
        durations.append(whole)
    return durations


class MockerTimes(LeapTimes):
    """The durations of steps of decodes by the formula, without a list: each is computed when it is read.

    In the first step, the `num_decodes` decodes know `known_tokens` tokens in total, and that many more in each later
    step.
    """

    __slots__ = ("known_tokens", "num_decodes", "pool_tokens")

    def __init__(self, num_decodes: int, known_tokens: int, pool_tokens: int, num_steps: int) -> None:
        self._durations_ns = []
        self.num_decodes = num_decodes
        self.known_tokens = known_tokens
        self.pool_tokens = pool_tokens
        self._take(num_steps, FAR_NS)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how another process makes the durations: `pickle` does not find the state of native objects."""
        return MockerTimes, (self.num_decodes, self.known_tokens, self.pool_tokens, self.num_steps)

    def _take(self, num_steps: int, within_ns: float) -> None:
        """Have `num_steps` steps, or fewer: all but the first start before `within_ns`."""
        if not IS_COMPILED and num_steps >= MANY_STEPS and are_many(num_steps):
            self._take_many(num_steps, within_ns)
            return
        capacity, known, more = float(self.pool_tokens), float(self.known_tokens), float(self.num_decodes)
        most: i64 = num_steps
        step: i64 = 0
        total_ns = whole_ns = 0.0  # whole numbers below 2**53, so their sum is exact
        while step < most:
            u = known / capacity
            known += more
            if u > 1.0:
                u = 1.0
            whole_ns = ((-25.74 * u * u + 54.01 * u + 5.74) * 1e6 + TO_WHOLE) - TO_WHOLE
            total_ns += whole_ns
            step += 1
            if total_ns >= within_ns:
                break
        self.num_steps = int(step)
        self.total_ns = int(total_ns)
        self.last_ns = int(whole_ns)

    def _take_many(self, num_steps: int, within_ns: float) -> None:
        known = np.arange(self.known_tokens, self.known_tokens + num_steps * self.num_decodes, self.num_decodes)
        ns = _many_ns(known, self.pool_tokens)
        np.rint(ns, out=ns)  # whole numbers below 2**53, so their sums are exact
        last = num_steps - 1
        if within_ns < FAR_NS:
            ends_ns = np.cumsum(ns)
            last = min(last, int(np.searchsorted(ends_ns, within_ns)))
            self.total_ns = int(ends_ns[last])
        else:
            self.total_ns = int(np.add.reduce(ns))
        self.num_steps = last + 1
        self.last_ns = int(ns[last])

    def end_before(self, within_ns: int) -> None:
        """Drop all steps but the first that start `within_ns` or more after the start of the first."""
        if self.total_ns - self.last_ns >= within_ns:
            self._take(self.num_steps, float(within_ns))

    def keep(self, num_steps: int) -> None:
        """Drop all steps after the first `num_steps`."""
        if num_steps < self.num_steps:
            self._take(num_steps, FAR_NS)

    @property
    def for_event(self) -> PerStep:
        """The rule, which an event has in place of a list."""
        return self

    def __iter__(self) -> Iterator[int]:
        return iter(self.listed_ns(self.num_decodes, self.known_tokens, self.num_steps))

    def listed_ns(self, num_decodes: int, known_tokens: int, num_steps: int) -> list[int]:
        """Return the durations of any steps of decodes of this engine."""
        return mocker_decode_ns(num_decodes, known_tokens, self.pool_tokens, num_steps)

    def of_steps_ns(self, known_tokens: Column) -> Column:
        """Return the durations of steps of this engine in which the decodes know so many tokens in total."""
        ns = _many_ns(known_tokens, self.pool_tokens)
        whole: Column = np.rint(ns, out=ns).astype(np.int64)
        return whole

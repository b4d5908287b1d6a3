"""The formula of NVIDIA Dynamo 1.6's mocker for the duration of a step; PolynomialCost documents it."""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from kvarts.executor.base import are_many, whole_ns
from kvarts.sched.plan import Batch

__all__ = ["mocker_decode_ns", "mocker_step_ns"]

IS_COMPILED: Final = not __file__.endswith(".py")


def mocker_step_ns(batch: Batch) -> int:
    """Return the duration of a step."""
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
            duration_ns = round((4.209989e-7 * t * t + 1.518344e-2 * t + 16.50142) * 1e6)
    if num_decodes:
        u = known_tokens / batch.pool_tokens
        if u > 1.0:
            u = 1.0
        # At least 5.74 for every u in [0, 1], so the floor of 1 ms is out of reach.
        duration_ns += round((-25.74 * u * u + 54.01 * u + 5.74) * 1e6)
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
    import numpy as np

    # In place, and in the order of the loop above, so that both round identically.
    use = np.arange(known_tokens, known_tokens + num_steps * num_decodes, num_decodes) / pool_tokens
    np.minimum(use, 1.0, out=use)
    ms = -25.74 * use
    ms *= use
    use *= 54.01
    ms += use
    ms += 5.74
    ms *= 1e6
    return whole_ns(ms)


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

"""A cost that is fitted to a device's steps finds what the device does, and follows when that changes."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.sched.plan import Batch, Chunk
from kvarts.cost.polynomial import LinearCost
from kvarts.run.wrappers import MeasuredCost

pytestmark = pytest.mark.laws


def batch_of(random: Random) -> Batch:
    chunks: Sequence[Chunk] = ()
    if random.random() < 0.5:
        start, num_tokens = random.randrange(2000), random.randrange(1, 512)
        chunks = (Chunk(start, num_tokens, 4000, 4000),)
    num_decodes = random.randrange(1, 33)
    return Batch(tuple(chunks), num_decodes, num_decodes * random.randrange(10, 2000), 1 << 20)


@given(st.floats(1.0, 50.0), st.floats(0.01, 1.0), st.floats(0.0, 0.5), st.floats(0.3, 3.0), st.integers(0, 1 << 20))
def test_it_follows_a_device(step_ms: float, token_ms: float, share: float, change: float, seed: int) -> None:
    """Within a tenth of the mean duration, plus its mean error, after 100 noisy steps; also when the speed changes.

    The contexts of a full batch take at most `share` of what a step takes without them: where they take more than all
    else, estimates can be too high by four fifths.
    """
    random = Random(seed)
    known_ms = share * step_ms / (32 * 1000)
    cost = MeasuredCost([(1, (step_ms + token_ms) / 1e3), (256, (step_ms + 256 * token_ms) / 1e3)])
    for factor in (1.0, change):
        linear = LinearCost(
            step_ms=step_ms * factor,
            chunk_token_ms=token_ms * factor,
            decode_ms=token_ms * factor,
            context_token_ms=known_ms * factor,
        )
        for _ in range(150):
            batch = batch_of(random)
            cost.note(batch, round(linear.step_ns(batch) * random.uniform(0.9, 1.1)))
        ratios = [cost.step_ns(batch) / linear.step_ns(batch) for batch in (batch_of(random) for _ in range(30))]
        assert 0.9 < sum(ratios) / len(ratios) < 1.4


def test_one_slow_step_changes_little_and_no_duration_is_negative() -> None:
    cost = MeasuredCost([(1, 0.01), (256, 0.06)])
    batch = Batch((Chunk(0, 100, 100, 100),), 4, 400, 1 << 20)
    for _ in range(50):
        cost.note(batch, 30_000_000)
    before = cost.step_ns(batch)
    cost.note(batch, 30_000_000_000)
    assert before <= cost.step_ns(batch) < 2 * before
    for _ in range(50):
        cost.note(batch, 1)
        cost.note(batch, 0)
    assert cost.step_ns(Batch((), 0, 0, 1)) >= 0

"""The mocker's formula gives the same nanoseconds one by one in machine numbers, in a Python loop, and in arrays."""

from __future__ import annotations

import numpy  # noqa: F401  # loaded, so that many steps are arrays
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvarts.executor.mocker_formula import _one_by_one_ns, mocker_decode_ns

pytestmark = pytest.mark.laws


def naive_ns(num_decodes: int, known_tokens: int, pool_tokens: int, num_steps: int) -> list[int]:
    durations = []
    for step in range(num_steps):
        u = min(1.0, (known_tokens + step * num_decodes) / pool_tokens)
        durations.append(round((-25.74 * u * u + 54.01 * u + 5.74) * 1e6))
    return durations


@given(st.integers(1, 1024), st.integers(1, 1 << 40), st.integers(1, 1 << 40), st.integers(1, 100))
@example(num_decodes=1, known_tokens=1, pool_tokens=8_388_608, num_steps=100)
@example(num_decodes=3, known_tokens=8_388_600, pool_tokens=8_388_608, num_steps=100)
def test_all_ways_give_the_same(num_decodes: int, known_tokens: int, pool_tokens: int, num_steps: int) -> None:
    expected = naive_ns(num_decodes, known_tokens, pool_tokens, num_steps)
    assert _one_by_one_ns(num_decodes, known_tokens, pool_tokens, num_steps) == expected
    assert mocker_decode_ns(num_decodes, known_tokens, pool_tokens, num_steps) == expected

"""The mocker's formula gives the same nanoseconds one by one in machine numbers, in a Python loop, and in arrays."""

from __future__ import annotations

import numpy  # loaded, so that many steps are arrays
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvarts.cost.mocker_formula import MockerTimes, _one_by_one_ns, mocker_decode_ns
from kvarts.cost.simulated import LeapTimes

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


def all_of(times: LeapTimes) -> tuple[int, int, int, list[int]]:
    assert len(times) == times.num_steps
    return times.num_steps, times.total_ns, times.last_ns, list(times)


@given(
    st.integers(1, 1024),
    st.integers(1, 1 << 24),
    st.integers(1, 1 << 24),
    st.integers(1, 100),
    st.integers(1, 100),
    st.floats(0, 1.2) | st.integers(0, 100),
)
@example(num_decodes=1, known_tokens=1, pool_tokens=8_388_608, num_steps=70, num_kept=40, within=0.5)
def test_the_rule_is_as_a_list_of_its_durations(
    num_decodes: int, known_tokens: int, pool_tokens: int, num_steps: int, num_kept: int, within: float
) -> None:
    """`within`: a share of the time that all steps take, or the end of one of them."""
    expected = naive_ns(num_decodes, known_tokens, pool_tokens, num_steps)
    rule, listed = MockerTimes(num_decodes, known_tokens, pool_tokens, num_steps), LeapTimes(expected.copy())
    assert all_of(rule) == all_of(listed) == (num_steps, sum(expected), expected[-1], expected)
    within_ns = sum(expected[:within]) if isinstance(within, int) else int(within * sum(expected))
    starts_ns = [sum(expected[:step]) for step in range(num_steps)]
    num_before = max(1, sum(start_ns < within_ns for start_ns in starts_ns))
    for times in (rule, listed):
        times.end_before(within_ns)
        assert all_of(times)[3] == expected[:num_before]
        times.keep(num_kept)
    kept = expected[: min(num_before, num_kept)]
    assert all_of(rule) == all_of(listed) == (len(kept), sum(kept), kept[-1], kept)
    assert rule.of_steps_ns(numpy.arange(known_tokens, known_tokens + num_steps)).tolist() == naive_ns(
        1, known_tokens, pool_tokens, num_steps
    )

"""The slope and its interval: against a naive one, and how often the interval holds the truth."""

from __future__ import annotations

from itertools import combinations
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.run.sessions.soak.rules import MAX_SECTIONS, slope_of

NUMBERS = st.floats(-1e6, 1e6).map(lambda number: round(number, 3))


@pytest.mark.laws
@given(y=st.lists(NUMBERS, min_size=3, max_size=30))
def test_the_slope_is_the_median_of_all_pairs(y: list[float]) -> None:
    found = slope_of(range(len(y)), y)
    naive = [(y[j] - y[i]) / (j - i) for i, j in combinations(range(len(y)), 2)]
    assert found.per_x == pytest.approx(median(naive))
    assert min(naive) - 1e-9 <= found.low <= found.per_x <= found.high <= max(naive) + 1e-9


@pytest.mark.laws
@given(y=st.lists(NUMBERS, min_size=5, max_size=30), slope=st.floats(-100, 100), scale=st.floats(0.1, 10))
def test_a_line_that_is_added_is_found(y: list[float], slope: float, scale: float) -> None:
    plain = slope_of(range(len(y)), y)
    tilted = slope_of(range(len(y)), [value * scale + slope * at for at, value in enumerate(y)])
    assert tilted.per_x == pytest.approx(plain.per_x * scale + slope, abs=1e-5, rel=1e-6)


def test_a_few_outliers_do_not_move_it() -> None:
    y = [1.0] * 100
    for at in (90, 95, 99):
        y[at] = 1000.0
    assert slope_of(range(100), y).per_x == 0


@pytest.mark.parametrize(("correlation", "least"), [(0.0, 0.92), (0.5, 0.92), (0.8, 0.90)])
def test_the_interval_holds_the_truth(correlation: float, least: float) -> None:
    """95 % for independent noise; the correction for autocorrelation keeps most of that."""
    rng = np.random.default_rng(1)
    held = 0
    runs = 300
    for _ in range(runs):
        noise = rng.normal(size=150)
        for at in range(1, len(noise)):
            noise[at] += correlation * noise[at - 1]
        found = slope_of(np.arange(150), 5 + 0.01 * np.arange(150) + noise)
        held += found.low <= 0.01 <= found.high
    assert held / runs >= least


def test_long_series_are_thinned() -> None:
    rng = np.random.default_rng(0)
    at = np.arange(20_000)
    found = slope_of(at, 1 + 1e-5 * at + rng.normal(size=len(at)))
    assert found.num_points == MAX_SECTIONS
    assert found.low < 1e-5 < found.high
    assert found.high - found.low < 2e-5

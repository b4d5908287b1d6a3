"""One rule for percentiles: an observed value, of two middle ones the upper, as in Dynamo's reports."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.columns import percentile_rank
from kvarts.plan.calibrate.comparison import statistics
from kvarts.sim.report.distributions import distribution_ms, weighted_distribution_ms


@given(st.sampled_from([50, 90, 95, 99]), st.integers(1, 10**9))
def test_the_rank_is_rounded_half_up(percent: int, count: int) -> None:
    exact = Decimal(percent) * (count - 1) / 100
    assert percentile_rank(percent, count) == int(exact.quantize(Decimal(1), rounding=ROUND_HALF_UP))


@pytest.mark.parametrize("count", [2, 4, 6, 8, 10])
def test_the_median_of_an_even_number_is_the_upper_middle_everywhere(count: int) -> None:
    values = np.arange(count, dtype=np.int64)
    upper = count // 2
    assert distribution_ms(values * 10**6)["p50"] == upper
    assert weighted_distribution_ms(lambda: [(values * 10**6, np.ones(count, np.int64))])["p50"] == upper
    assert statistics(values.astype(float))[1] == upper

"""The slope of noisy measurements, with its uncertainty.

The slope is the median of the slopes of all pairs, which is robust against outliers (Theil 1950; Sen 1968, "Estimates
of the regression coefficient based on Kendall's tau", JASA 63). Its interval is Sen's, as in Gilbert 1987, "Statistical
Methods for Environmental Pollution Monitoring", section 16.5: the pairs' slopes at ranks (N -+ z sqrt(Var S)) / 2, with
Var S = (n (n - 1) (2 n + 5) - sum t (t - 1) (2 t + 5)) / 18 for groups of t equal values.

That variance assumes independent noise, but slow minutes follow slow minutes. It is therefore multiplied by a
correction for autocorrelation of the ranks of the residuals: the larger of two estimates, and at least 1. One is
equation 9 of Hamed and Rao 1998, "A modified Mann-Kendall trend test for autocorrelated data", J. Hydrology 204, over
the lags up to the first negative one, as in Geyer 1992, "Practical Markov Chain Monte Carlo", section 3.3. The other is
that of a first-order process, (1 + r) / (1 - r), with r from the first lag if that is significant at 95 %, corrected
for its bias of (1 + 4 r) / n (Marriott and Pope 1954, "Bias in the estimation of autocorrelations", Biometrika 41).

Measured on 150 runs each of 40, 150 and 480 points with a trend in first-order noise: intervals contained the truth in
93 to 98 % of runs without autocorrelation, and in 91 % or more at r = 0.5, 0.8 and 0.9. With Hamed and Rao's sum over
all significant lags, which includes negative ones, they did in 63 to 84 %.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = ["Slope", "slope_of"]

Z = 1.959963984540054
"""Normal quantile of a two-sided interval of 95 %."""
MAX_POINTS = 600
"""Longer series are replaced by the medians of this many sections, since the number of pairs grows quadratically."""

MAX_CORRELATION = 0.98
"""The largest autocorrelation of noise that can still be distinguished from a trend."""

Column = npt.NDArray[np.float64]


class Slope(msgspec.Struct, frozen=True):
    """A line through measurements: `per_x`, its 95 % interval, and its value at the first x."""

    per_x: float
    low: float
    high: float
    first: float
    span_x: float
    num_points: int

    def growth(self, per_x: float) -> float:
        """Return the growth of a slope over the whole span, relative to the initial value."""
        return per_x * self.span_x / self.first


def slope_of(x: npt.ArrayLike, y: npt.ArrayLike) -> Slope:
    """Return the line through at least 3 points, with increasing x."""
    at, values = _thinned(np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64))
    n = len(at)
    assert n >= 3, "a slope with an interval needs three points"
    left, right = np.triu_indices(n, 1)
    slopes = np.sort((values[right] - values[left]) / (at[right] - at[left]))
    slope = float(np.median(slopes))
    rest = values - slope * at
    _, ties = np.unique(values, return_counts=True)
    variance = (n * (n - 1) * (2 * n + 5) - np.sum(ties * (ties - 1) * (2 * ties + 5))) / 18
    spread = Z * float(np.sqrt(max(0.0, variance) * _inflation(rest)))
    low = int(np.clip(np.floor((len(slopes) - spread) / 2) - 1, 0, len(slopes) - 1))
    high = int(np.clip(np.ceil((len(slopes) + spread) / 2), 0, len(slopes) - 1))
    return Slope(
        per_x=slope,
        low=float(slopes[low]),
        high=float(slopes[high]),
        first=float(np.median(rest) + slope * at[0]),
        span_x=float(at[-1] - at[0]),
        num_points=n,
    )


def _thinned(at: Column, values: Column) -> tuple[Column, Column]:
    if len(at) <= MAX_POINTS:
        return at, values
    bounds = np.linspace(0, len(at), MAX_POINTS + 1).astype(int)
    stretches = [slice(begin, end) for begin, end in pairwise(bounds)]
    at_medians, medians = (np.array([np.median(column[part]) for part in stretches]) for column in (at, values))
    return at_medians, medians


def _inflation(rest: Column) -> float:
    """Return the factor by which autocorrelation increases the variance of S."""
    n = len(rest)
    ranks = np.unique(rest, return_inverse=True)[1].astype(np.float64)
    ranks -= ranks.mean()
    power = float(ranks @ ranks)
    if not power:
        return 1.0
    correlation = np.array([float(ranks[:-lag] @ ranks[lag:]) / power for lag in range(1, n - 2)])
    if not len(correlation):
        return 1.0
    negative = np.flatnonzero(correlation < 0)
    lags = np.arange(1, 1 + (negative[0] if len(negative) else len(correlation)))
    weights = (n - lags) * (n - lags - 1.0) * (n - lags - 2.0)
    by_lags = 1.0 + 2.0 / (n * (n - 1.0) * (n - 2.0)) * float(weights @ correlation[: len(lags)])
    of_order_one = 1.0
    if correlation[0] > Z / np.sqrt(n):
        r = min(MAX_CORRELATION, correlation[0] + (1 + 4 * correlation[0]) / n)
        of_order_one = (1 + r) / (1 - r)
    return float(max(1.0, by_lags, of_order_one))

"""The uncertainty of a replay's latencies, where a fit gave the uncertainty of its cost model."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any

__all__ = ["spread_of"]

METRICS = ("ttft_ms", "tpot_ms", "e2e_ms")
STATISTICS = ("mean", "p50", "p90", "p95", "p99")

Distributions = dict[str, dict[str, float | None]]


def spread_of(pairs: list[tuple[Any, Any]], replayed: Callable[[Any], Distributions]) -> Distributions:
    """Return one standard deviation of each statistic of latency, in milliseconds.

    `replayed` replays with one of the cost models, and returns the distributions by metric. A statistic is None if
    a replay lacks it.
    """
    squares: dict[tuple[str, str], float | None] = {(a, b): 0.0 for a in METRICS for b in STATISTICS}
    for above, below in pairs:
        high, low = replayed(above), replayed(below)
        for (metric, statistic), sum_so_far in squares.items():
            one, other = high[metric][statistic], low[metric][statistic]
            if sum_so_far is None or one is None or other is None:
                squares[metric, statistic] = None
            else:
                squares[metric, statistic] = sum_so_far + ((one - other) / 2) ** 2
    spread: Distributions = {metric: {} for metric in METRICS}
    for (metric, statistic), total in squares.items():
        spread[metric][statistic] = None if total is None else sqrt(total)
    return spread

"""Exact mean, percentiles and maximum of times.

A percentile of n sorted values is the element round(p (n - 1)), halves up: an observed value, never one between two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import chain
from math import fsum

import numpy as np

from kvarts.base.columns import Column, percentile_rank

__all__ = [
    "MOST_SORTED",
    "NOTHING",
    "NS_PER_MS",
    "Distribution",
    "Extent",
    "Ranges",
    "distribution_ms",
    "dot",
    "exact_sum",
    "sorted_distribution_ms",
    "weighted_distribution_ms",
]

NS_PER_MS = 1e6
PERCENTILES = {"p50": 50, "p90": 90, "p95": 95, "p99": 99}
MOST_SORTED = 1 << 16
"""More values than this are not held in memory: percentiles are searched in several passes."""
NUM_BINS = 1 << 16
AT_ONCE = 1 << 10
"""Values that are summed together."""
MOST_EXACT = 1 << 53
"""Smaller integers are floats without rounding, and the sum of AT_ONCE of them has 64 bits."""

Distribution = dict[str, float | None]
_NOTHING: Distribution = dict.fromkeys(("mean", *PERCENTILES, "max"))

Parts = Iterable[tuple[Column, Column]]
Ranges = Sequence[tuple[int, int]]


Extent = tuple[int, int, int, int]
"""The number of times, each as often as its weight says, their sum, and the least and the largest of them."""

NOTHING: Extent = (0, 0, (1 << 63) - 1, -(1 << 63))


def distribution_ms(values_ns: Column) -> Distribution:
    """Return mean, percentiles and maximum in milliseconds."""
    return sorted_distribution_ms(values_ns.copy())


def sorted_distribution_ms(values_ns: Column) -> Distribution:
    """Return the same, and sort the times in place."""
    values_ns.sort()
    count = len(values_ns)
    if not count:
        return _NOTHING.copy()
    return _named(exact_sum(values_ns) / count, [int(values_ns[rank]) for rank in _ranks(count)])


def exact_sum(values: Column) -> float:
    """Return the exact sum as a float: no overflow, and independent of the order of addition."""
    if len(values) <= AT_ONCE:
        return fsum(values.tolist())
    starts = range(0, len(values), AT_ONCE)
    if values.dtype.kind == "i" and int(values.min()) > -MOST_EXACT and int(values.max()) < MOST_EXACT:
        return float(sum(int(values[start : start + AT_ONCE].sum()) for start in starts))
    return fsum(chain.from_iterable(values[start : start + AT_ONCE].tolist() for start in starts))


def weighted_distribution_ms(
    parts: Callable[[], Parts],
    *,
    within: Callable[[Ranges], Parts] | None = None,
    extent: Extent | None = None,
    most_sorted: int = MOST_SORTED,
) -> Distribution:
    """Return mean, percentiles and maximum in milliseconds of weighted times in ns. A weight is a count.

    `parts` returns the times and their weights, shape [n] each, in batches; it is called several times and returns the
    same each time. At most `most_sorted` of them are held in memory. `within` returns all times in some ranges [low,
    high), and may return others. `extent`: of all times, if that is known without a pass over them.
    """
    held: list[tuple[Column, Column]] = []
    num_values = 0
    for part in parts():
        num_values += len(part[0])
        if num_values > most_sorted:
            del held
            return _searched(parts, within or (lambda _: parts()), extent or _extent(parts))
        held.append(part)
    return _sorted(held)


def dot(counts: Column, times_ns: Column) -> int:
    """Return the exact sum of products; a sum that might exceed 64 bits is computed in two parts."""
    if int(counts.max(initial=0)) * int(times_ns.sum()) < 1 << 62:
        return int(counts.dot(times_ns))
    high, low = times_ns // (1 << 20), times_ns % (1 << 20)
    return (int(counts.dot(high)) << 20) + int(counts.dot(low))


def _ranks(count: int) -> list[int]:
    """Return the ranks of the percentiles, and of the maximum, among `count` sorted values."""
    return [*(percentile_rank(percent, count) for percent in PERCENTILES.values()), count - 1]


def _named(mean_ns: float, found_ns: list[int]) -> Distribution:
    names = ("mean", *PERCENTILES, "max")
    return dict(zip(names, (ns / NS_PER_MS for ns in (mean_ns, *found_ns)), strict=True))


def _sorted(parts: list[tuple[Column, Column]]) -> Distribution:
    """Return the distribution of weighted values that fit in memory."""
    empty = np.zeros(0, np.int64)
    values_ns, weights = (np.concatenate(columns) for columns in zip((empty, empty), *parts, strict=True))
    if not weights.all():
        is_counted = weights > 0
        values_ns, weights = values_ns[is_counted], weights[is_counted]
    if not len(values_ns):
        return _NOTHING.copy()
    total_ns = dot(weights, values_ns)
    order = np.argsort(values_ns)  # an unstable sort suffices: equal values are interchangeable
    ordered = values_ns[order]
    ends = np.cumsum(weights[order])
    count = int(ends[-1])
    found = [int(ordered[np.searchsorted(ends, rank, side="right")]) for rank in _ranks(count)]
    return _named(total_ns / count, found)


def _extent(parts: Callable[[], Parts]) -> Extent:
    count = total_ns = 0
    _, _, lowest, highest = NOTHING
    for values_ns, weights in parts():
        counted = values_ns[weights > 0]
        if len(counted):
            count += int(weights.sum())
            total_ns += dot(weights, values_ns)
            lowest, highest = min(lowest, int(counted.min())), max(highest, int(counted.max()))
    return count, total_ns, lowest, highest


def _searched(parts: Callable[[], Parts], within: Callable[[Ranges], Parts], extent: Extent) -> Distribution:
    """Return the distribution of weighted values that do not fit in memory, in passes over them."""
    count, total_ns, lowest, highest = extent
    if not count:
        return _NOTHING.copy()
    return _named(total_ns / count, _searched_at(parts, within, _ranks(count), lowest, highest + 1))


def _searched_at(
    parts: Callable[[], Parts], within: Callable[[Ranges], Parts], ranks: list[int], low: int, high: int
) -> list[int]:
    """Return the values at `ranks` among values in [low, high).

    Each pass counts values in bins of the ranges under search, and narrows each search to one bin.
    """
    whole = {(low, high)}
    searches = [_Search(rank, low, high) for rank in ranks]
    while wanted := {search.range for search in searches if not search.is_done}:
        bins = {each: _Bins(*each) for each in sorted(wanted)}
        for values_ns, weights in parts() if wanted == whole else within(sorted(wanted)):
            for each in bins.values():
                each.count(values_ns, weights)
        for search in searches:
            if not search.is_done:
                search.narrow(bins[search.range])
    return [low for low, _ in (search.range for search in searches)]


class _Bins:
    """Counts of values in equal parts of [low, high)."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self.width = -(-(high - low) // NUM_BINS)
        self._counts = np.zeros(NUM_BINS, np.int64)

    def count(self, values_ns: Column, weights: Column) -> None:
        is_in = (values_ns >= self.low) & (values_ns < self.high)
        if not is_in.any():
            return
        if not is_in.all():
            values_ns, weights = values_ns[is_in], weights[is_in]
        places = (values_ns - self.low) // self.width
        self._counts += np.bincount(places, weights=weights, minlength=NUM_BINS).astype(np.int64)

    @cached_property
    def ends(self) -> Column:
        """Cumulative counts up to the end of each part. Valid when all values are counted."""
        return np.cumsum(self._counts)


class _Search:
    """The search for the value at `rank` in `range`, [low, high); `rank` counts from `low`."""

    def __init__(self, rank: int, low: int, high: int) -> None:
        self.rank, self.range = rank, (low, high)

    @property
    def is_done(self) -> bool:
        """Whether one value is left."""
        low, high = self.range
        return high - low == 1

    def narrow(self, bins: _Bins) -> None:
        """Continue in one part of the range of `bins`."""
        at = int(np.searchsorted(bins.ends, self.rank, side="right"))
        self.rank -= int(bins.ends[at - 1]) if at else 0
        low = bins.low + at * bins.width
        self.range = low, min(bins.high, low + bins.width)

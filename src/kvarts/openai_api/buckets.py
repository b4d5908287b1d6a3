"""Histograms of metrics."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

__all__ = ["BucketCounts"]


class BucketCounts:
    """A histogram: the number of values up to each bound, and above the last.

    `published`: the bounds that are published, if they are fewer.
    """

    __slots__ = ("bounds", "counts", "published", "total")

    def __init__(self, bounds: Sequence[float], published: Sequence[float] | None = None) -> None:
        self.published = tuple(bounds if published is None else published)
        self.bounds = tuple(sorted({*bounds, *self.published}))
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Count `value`, `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def add_sorted(self, values: Sequence[float]) -> None:
        """Count ascending values, each once."""
        place = 0
        while place < len(values):
            bucket = bisect_left(self.bounds, values[place])
            end = len(values) if bucket == len(self.bounds) else bisect_right(values, self.bounds[bucket], place)
            self.counts[bucket] += end - place
            place = end
        self.total += sum(values)

    def take(self, other: BucketCounts) -> None:
        """Add what `other` has counted, and leave it with nothing. Its bounds are the first ones of these."""
        assert self.bounds[: len(other.bounds)] == other.bounds
        for bucket, count in enumerate(other.counts):
            self.counts[bucket] += count
        self.total += other.total
        other.counts = [0] * len(other.counts)
        other.total = 0.0

    def cumulative(self) -> list[int]:
        """Return the number of values up to each published bound, and of all."""
        sums = list(accumulate(self.counts))
        return [*(sums[bisect_left(self.bounds, bound)] for bound in self.published), sums[-1]]

"""Hits of a larger cache: blocks that are stored again after their eviction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import msgspec

__all__ = ["CurvePoint", "ReStores"]

MAX_REMEMBERED = 1 << 17


class CurvePoint(msgspec.Struct, frozen=True, gc=False):
    """With `extra_blocks` more, the cache would have kept `kept_blocks` of the blocks that were stored again."""

    extra_blocks: int
    kept_blocks: int


class ReStores:
    """Counts, for each block stored again, the evictions of other blocks since its own.

    Under an LRU order, a cache larger by about that number of blocks would have kept it. Only the last MAX_REMEMBERED
    evictions are remembered.
    """

    def __init__(self) -> None:
        self._evicted: OrderedDict[Hashable, int] = OrderedDict()
        self._num_evicted = 0
        self._by_distance: dict[int, int] = {}
        self.num_stored = 0
        self.num_again = 0

    def store(self, new: Sequence[Hashable]) -> None:
        """Record blocks that were stored on the device."""
        self.num_stored += len(new)
        for name in new:
            at = self._evicted.pop(name, None)
            if at is not None:
                self.num_again += 1
                # Powers of two are precise enough to decide how much more memory pays off.
                bucket = 1 << (self._num_evicted - at - 1).bit_length()
                self._by_distance[bucket] = self._by_distance.get(bucket, 0) + 1

    def evict(self, gone: Sequence[Hashable]) -> None:
        """Record blocks that were evicted from the device."""
        for name in gone:
            self._evicted[name] = self._num_evicted
            self._num_evicted += 1
        while len(self._evicted) > MAX_REMEMBERED:
            self._evicted.popitem(last=False)

    def forget(self) -> None:
        """Forget all evictions: the cache was cleared, which a larger one would not have prevented."""
        self._evicted.clear()

    def points(self) -> list[CurvePoint]:
        """Return the curve, in ascending order of extra blocks."""
        kept = 0
        points = []
        for extra_blocks in sorted(self._by_distance):
            kept += self._by_distance[extra_blocks]
            points.append(CurvePoint(extra_blocks, kept))
        return points

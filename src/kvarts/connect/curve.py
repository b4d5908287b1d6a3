"""What a larger cache would have kept: blocks that are stored again after they were evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from kvarts.connect.decoding import BlockHash

__all__ = ["CurvePoint", "ReStores"]

MAX_REMEMBERED = 1 << 17


class CurvePoint(msgspec.Struct, frozen=True, gc=False):
    """With `extra_blocks` more, `kept_blocks` of the blocks that were stored again would have been there."""

    extra_blocks: int
    kept_blocks: int


class ReStores:
    """Counts, for each block that is stored again, how many others were evicted since it was.

    Under an order that evicts the least recently used first, a cache with about as many blocks more would have kept it.
    The oldest of MAX_REMEMBERED evictions are forgotten.
    """

    def __init__(self) -> None:
        self._evicted: OrderedDict[BlockHash, int] = OrderedDict()
        self._num_evicted = 0
        self._by_distance: dict[int, int] = {}
        self.num_stored = 0
        self.num_again = 0

    def store(self, new: Sequence[BlockHash]) -> None:
        """Take note that blocks were stored on the device."""
        self.num_stored += len(new)
        for name in new:
            at = self._evicted.pop(name, None)
            if at is not None:
                self.num_again += 1
                # In powers of two: what is asked is how much more memory is worth it.
                bucket = 1 << (self._num_evicted - at - 1).bit_length()
                self._by_distance[bucket] = self._by_distance.get(bucket, 0) + 1

    def evict(self, gone: Sequence[BlockHash]) -> None:
        """Take note that blocks were evicted from the device."""
        for name in gone:
            self._evicted[name] = self._num_evicted
            self._num_evicted += 1
        while len(self._evicted) > MAX_REMEMBERED:
            self._evicted.popitem(last=False)

    def forget(self) -> None:
        """Forget evictions: everything was cleared, which no larger cache would have prevented."""
        self._evicted.clear()

    def points(self) -> list[CurvePoint]:
        """Return the curve, by more and more blocks."""
        kept = 0
        points = []
        for extra_blocks in sorted(self._by_distance):
            kept += self._by_distance[extra_blocks]
            points.append(CurvePoint(extra_blocks, kept))
        return points

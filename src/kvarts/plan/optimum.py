"""Upper bound on hits for pools of equal pages: the most that any policy with knowledge of the future could get.

A page may be kept from one request that uses it to the next, where it is then a hit. Such a stay occupies one page of
the pool between the two requests, in addition to the pages that every request in between needs while it runs. The most
hits are therefore the largest set of stays that never exceeds the room left by running requests. Whenever there are
too many stays, dropping the one that ends last is optimal. A page is used no later than the pages after it in its
sequence, so with ties broken by dropping the deepest first, no page outlives the one before it: a prefix cache can
reach the bound. A request larger than the pool keeps as much of itself as pays off.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import islice

import numpy as np

from kvarts.plan.reuse import Reuse

__all__ = ["Optimum"]

START_BITS = 31


class Optimum:
    """The stays of a trace, in the order in which they begin.

    Each stay has an integer key: the smallest key belongs to the stay that ends last, and among these to the deepest.
    """

    def __init__(self, reuse: Reuse) -> None:
        pages = reuse.hittable
        used = np.flatnonzero(pages)
        used = used[np.argsort(reuse.previous[used], kind="stable")]
        self._begins = reuse.previous[used]
        self._ends = reuse.request[used]
        self._sizes = pages[used]
        self._keys: list[int] = (-((self._ends << START_BITS) + reuse.start[used])).tolist()
        self._num_requests = len(reuse.num_pages)
        self._needed: list[int] = (reuse.num_pages + reuse.num_private).tolist()
        self._page_size = reuse.page_size
        self._num_prompt_tokens = reuse.num_prompt_tokens
        overlaps = np.zeros(self._num_requests + 1, np.int64)
        np.add.at(overlaps, self._begins + 1, self._sizes)
        np.subtract.at(overlaps, self._ends, self._sizes)
        concurrent = np.cumsum(overlaps[:-1]) + reuse.num_pages + reuse.num_private
        self.most_pages = int(concurrent.max(initial=0))
        """The smallest pool in which no stay needs to be dropped."""

    def hit_pages(self, num_pages: int) -> int:
        """Return the most pages that all requests together can find in a pool of `num_pages`."""
        hits = int(self._sizes.sum())
        if num_pages >= self.most_pages:
            return hits
        kept: list[int] = []
        size_of: dict[int, int] = {}
        ending = [0] * (self._num_requests + 1)

        def drop(count: int) -> None:
            # Only the stay that ends last is ever read from the heap: stays that have ended sort below all others.
            while count:
                last = heappop(kept)
                dropped = min(size_of[last], count)
                ending[-last >> START_BITS] -= dropped
                count -= dropped
                if dropped < size_of[last]:
                    size_of[last] -= dropped
                    heappush(kept, last)

        held = 0
        stays = zip(self._keys, self._ends.tolist(), self._sizes.tolist(), strict=True)
        begins = np.bincount(self._begins, minlength=self._num_requests).tolist()
        for now, (num_begun, needed) in enumerate(zip(begins, self._needed, strict=True)):
            held -= ending[now]
            room = num_pages - needed if num_pages > needed else 0
            if held > room:
                hits -= held - room
                drop(held - room)
                held = room
            for key, end, size in islice(stays, num_begun):
                heappush(kept, key)
                size_of[key] = size
                ending[end] += size
                held += size
            if held > num_pages:  # the request alone exceeds the pool
                hits -= held - num_pages
                drop(held - num_pages)
                held = num_pages
        return hits

    def hit_ratio(self, num_pages: int) -> float:
        """Return the upper bound on the share of prompt tokens that are hits in a pool of `num_pages`."""
        tokens = self._num_prompt_tokens
        return self.hit_pages(num_pages) * self._page_size / tokens if tokens else 0.0

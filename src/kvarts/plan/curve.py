"""Hits for every pool size at once: of prefix LRU, from the stack distances of spans; and the upper bound.

The curve of LRU equals this simulation, run for every number of pages C (`docs/guide-plan.md` explains it in words):

    cached = []                                   # the page used longest ago first
    for each request, in the order of the trace:
        hits = length of the longest prefix of its pages, ending before its last token, that is in cached
        cached = [cached pages that the request does not use] + [its pages, the deepest first]
        cached = the last C of these

If outputs are counted, a request also has private pages, which no other request shares, after the known ones.

A page is a hit for every C above its stack distance: the number of pages used after it, plus the pages before it in
its own sequence. The distance grows by one from each page of a span to the next, so a span is stored as one number.

`Optimum` is the upper bound for pools of equal pages: the most that any policy with knowledge of the future could get.

A page may be kept from one request that uses it to the next, where it is then a hit. Such a stay occupies one page of
the pool between the two requests, in addition to the pages that every request in between needs while it runs. The most
hits are therefore the largest set of stays that never exceeds the room left by running requests. Whenever there are
too many stays, dropping the one that ends last is optimal. A page is used no later than the pages after it in its
sequence, so with ties broken by dropping the deepest first, no page outlives the one before it: a prefix cache can
reach the bound. A request larger than the pool keeps as much of itself as pays off.

"""

from __future__ import annotations

from functools import cached_property
from heapq import heappop, heappush

import numpy as np

from kvarts.base.columns import Column
from kvarts.plan.reuse import Reuse, by_value

__all__ = ["HitCurve", "Optimum", "concave_hull", "find_knees", "lru_curve", "stack_distances"]

MOST_KNEES = 5
WORTHWHILE = 0.02
"""A knee must rise above the chord of its section by at least this share of all hits."""
LIMIT_32 = 1 << 31


class HitCurve:
    """Hit pages by number of cache pages. Linear between `sizes`, the first of which is 0."""

    def __init__(self, sizes: Column, hits: Column, *, page_size: int, num_prompt_tokens: int) -> None:
        self.page_size = page_size
        self.num_prompt_tokens = num_prompt_tokens
        self.sizes = sizes
        """Pool sizes at which the slope changes; beyond the last, the curve is flat."""
        self.hits = hits
        """Pages found by all requests together, at each of `sizes`."""

    @classmethod
    def of_spans(cls, distances: Column, num_pages: Column, *, page_size: int, num_prompt_tokens: int) -> HitCurve:
        """Return the curve of spans, exact at every whole number.

        `num_pages` of each can be hits, the first of them in pools larger than its distance.
        """
        counted = num_pages > 0
        first, last = distances[counted], distances[counted] + num_pages[counted]
        ends = np.concatenate([first << 1, (last << 1) + 1])  # the lowest bit tells which end it is
        ends.sort()
        sizes = ends >> 1
        is_last = np.append(sizes[1:] != sizes[:-1], np.ones(min(len(sizes), 1), bool))
        changes, slopes = sizes[is_last], np.cumsum(1 - ((ends & 1) << 1))[is_last]
        steps = np.diff(changes) * slopes[:-1]
        bends = np.ones(len(changes), bool)
        bends[1:] = np.diff(slopes) != 0
        hits = np.concatenate([[0], np.cumsum(steps)]) if len(changes) else np.zeros(0, np.int64)
        return cls(
            np.concatenate([[0], changes[bends]]).astype(np.int64),
            np.concatenate([[0], hits[bends]]).astype(np.int64),
            page_size=page_size,
            num_prompt_tokens=num_prompt_tokens,
        )

    def hit_pages(self, num_pages: int) -> int:
        """Return the number of pages that all requests together find in a pool of `num_pages`."""
        place = int(np.searchsorted(self.sizes, num_pages, side="right")) - 1
        low, hits = int(self.sizes[place]), int(self.hits[place])
        if place + 1 == len(self.sizes):
            return hits
        rise = (int(self.hits[place + 1]) - hits) * (num_pages - low)
        return hits + rise // (int(self.sizes[place + 1]) - low)

    def hit_ratio(self, num_pages: int) -> float:
        """Return the share of prompt tokens that are hits in a pool of `num_pages`."""
        return self.ratio_of(self.hit_pages(num_pages))

    @cached_property
    def most_pages(self) -> int:
        """The smallest pool that loses nothing."""
        return int(self.sizes[-1])

    @property
    def most_hit_ratio(self) -> float:
        """The share of prompt tokens that are hits if nothing is evicted."""
        return self.ratio_of(int(self.hits[-1]))

    def size_for(self, share: float) -> int:
        """Return the fewest pages that give at least `share` of all possible hits."""
        least = int(np.ceil(share * int(self.hits[-1])))
        place = int(np.searchsorted(self.hits, least))
        if place == 0 or not least:
            return 0
        low, hits = int(self.sizes[place - 1]), int(self.hits[place - 1])
        rise, width = int(self.hits[place]) - hits, int(self.sizes[place]) - low
        return low + -(-(least - hits) * width // rise)

    def ratio_of(self, hit_pages: int) -> float:
        """Return the share of prompt tokens in `hit_pages` pages."""
        return hit_pages * self.page_size / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


def lru_curve(reuse: Reuse, distances: Column | None = None) -> HitCurve:
    """Return the curve of prefix LRU. `distances`: the result of `stack_distances`, if the caller has it."""
    if distances is None:
        distances = stack_distances(reuse)
    return HitCurve.of_spans(
        distances, reuse.hittable, page_size=reuse.page_size, num_prompt_tokens=reuse.num_prompt_tokens
    )


def stack_distances(reuse: Reuse) -> Column:
    """Return for each span the pages used since its last use plus those before it in its sequence; -1 if never seen.

    Pages used since are those of all requests since then, less those that were used again by a request in between.
    """
    found = np.full(len(reuse.request), -1)
    seen = np.flatnonzero(reuse.previous >= 0)
    previous = reuse.previous[seen]
    pages_before = np.concatenate([[0], np.cumsum(reuse.num_pages + reuse.num_private)])
    since = pages_before[reuse.request[seen]] - pages_before[previous + 1]
    again = _sums_of_larger(previous, reuse.end[seen] - reuse.start[seen])
    found[seen] = reuse.start[seen] + since - again
    return found


def _sums_of_larger(values: Column, weights: Column) -> Column:
    """Return for each value the sum of the weights of larger values before it.

    Level by level, from the longest stretches of places on, values are in the order of their stretches, and by value in
    each. A value in the right half of a stretch adds the weights after it that are of the left half, and each half is
    a stretch of the next level.
    """
    count = len(values)
    order = by_value(values)
    places = order.astype(np.int32)
    weights = weights[order].astype(np.int32 if int(weights.sum()) < LIMIT_32 else np.int64)
    found = np.zeros_like(weights)
    for level in reversed(range((count - 1).bit_length() if count else 0)):
        half = 1 << level
        in_whole = count - count % (2 * half)  # the last stretch may be shorter
        is_right = (places & half) != 0
        sums = np.cumsum(np.where(is_right, 0, weights), dtype=weights.dtype)
        after = np.full_like(sums, sums[-1])
        after[:in_whole] = np.repeat(sums[2 * half - 1 : in_whole : 2 * half], 2 * half)
        after -= sums
        after *= is_right
        found += after
        lefts, rights = np.flatnonzero(~is_right), np.flatnonzero(is_right)
        order = np.empty(count, np.int64)
        halves = order[:in_whole].reshape(-1, 2, half)
        halves[:, 0] = lefts[: in_whole // 2].reshape(-1, half)
        halves[:, 1] = rights[: in_whole // 2].reshape(-1, half)
        order[in_whole:] = np.append(lefts[in_whole // 2 :], rights[in_whole // 2 :])
        places, weights, found = places[order], weights[order], found[order]
    return found.astype(np.int64)


def concave_hull(curve: HitCurve, least_pages: int) -> tuple[Column, Column]:
    """Return sizes and hits of the upper concave hull of `curve`, from `least_pages` on; gains only fall along it."""
    sizes: list[int] = [least_pages]
    hits: list[int] = [curve.hit_pages(least_pages)]
    above = curve.sizes > least_pages
    for size, hit in zip(curve.sizes[above].tolist(), curve.hits[above].tolist(), strict=True):
        while len(sizes) > 1 and (hits[-1] - hits[-2]) * (size - sizes[-1]) <= (hit - hits[-1]) * (
            sizes[-1] - sizes[-2]
        ):
            sizes.pop()
            hits.pop()
        sizes.append(size)
        hits.append(hit)
    return np.array(sizes), np.array(hits)


def find_knees(curve: HitCurve, least_pages: int = 0) -> list[int]:
    """Return the knees above `least_pages`, smallest first.

    The main knee is where the hull is farthest above the chord between its ends. Each side of a knee is searched in
    the same way, and has another knee if that stands out from the chord of the side.
    """
    sizes, hits = concave_hull(curve, least_pages)
    if len(sizes) < 3:
        return [int(sizes[-1])] if len(sizes) > 1 else []
    found: list[int] = []
    parts = [(0, len(sizes) - 1)]
    while parts and len(found) < MOST_KNEES:
        first, last = parts.pop(0)
        if last - first < 2:
            continue
        line = hits[first] + (hits[last] - hits[first]) * (sizes[first : last + 1] - sizes[first]) / (
            sizes[last] - sizes[first]
        )
        above = hits[first : last + 1] - line
        knee = int(np.argmax(above))
        if above[knee] < WORTHWHILE * (hits[-1] - hits[0]):
            continue
        found.append(first + knee)
        parts += [(first, first + knee), (first + knee, last)]
    return [int(sizes[place]) for place in sorted(found)]


class Optimum:
    """The stays of a trace, in the order in which they begin.

    Each stay has a rank: 0 is that of the stay that ends last, and among these of the deepest.
    """

    def __init__(self, reuse: Reuse) -> None:
        pages = reuse.hittable
        used = np.flatnonzero(pages)  # from the last rank to the first
        num_requests = len(reuse.num_pages)
        begins, ends, sizes = reuse.previous[used], reuse.request[used], pages[used]
        self._ranks: list[int] = (len(used) - 1 - by_value(begins)).tolist()
        self._ends: list[int] = ends[::-1].tolist()
        self._sizes: list[int] = sizes[::-1].tolist()
        """Ends and sizes by rank."""
        # NumPy sums as floats, and no sum is near 2**53.
        beginning = np.bincount(begins, sizes, num_requests).astype(np.int64)
        ending = np.bincount(ends, sizes, num_requests).astype(np.int64)
        self._num_begun: list[int] = np.cumsum(np.bincount(begins, minlength=num_requests)).tolist()
        """Number of stays that begin up to each request."""
        self._beginning: list[int] = beginning.tolist()
        self._ending: list[int] = ending.tolist()
        """Pages of the stays that begin, and that end, with each request."""
        self._needed: list[int] = (reuse.num_pages + reuse.num_private).tolist()
        self._page_size = reuse.page_size
        self._num_prompt_tokens = reuse.num_prompt_tokens
        overlaps = -ending
        overlaps[1:] += beginning[:-1]
        concurrent = np.cumsum(overlaps) + reuse.num_pages + reuse.num_private
        self.most_pages = int(concurrent.max(initial=0))
        """The smallest pool in which no stay needs to be dropped."""

    def hit_pages(self, num_pages: int) -> int:
        """Return the most pages that all requests together can find in a pool of `num_pages`."""
        hits = sum(self._sizes)
        if num_pages >= self.most_pages:
            return hits
        kept: list[int] = []
        num_kept = 0
        ranks, ends, sizes, ending = self._ranks, self._ends, self._sizes.copy(), self._ending.copy()

        def drop(count: int, num_begun: int, now: int) -> None:
            # Only the stay that ends last is ever read from the heap; stays that have ended are below all others.
            nonlocal num_kept
            for rank in ranks[num_kept:num_begun]:
                if ends[rank] > now:
                    heappush(kept, rank)
            num_kept = num_begun
            while count:
                rank = kept[0]
                dropped = min(sizes[rank], count)
                ending[ends[rank]] -= dropped
                count -= dropped
                sizes[rank] -= dropped
                if not sizes[rank]:
                    heappop(kept)

        held = num_before = 0
        requests = zip(self._needed, self._beginning, self._num_begun, strict=True)
        for now, (needed, beginning, num_begun) in enumerate(requests):
            held -= ending[now]
            room = num_pages - needed if num_pages > needed else 0
            if held > room:
                hits -= held - room
                drop(held - room, num_before, now)
                held = room
            held += beginning
            if held > num_pages:  # the request alone exceeds the pool
                hits -= held - num_pages
                drop(held - num_pages, num_begun, now)
                held = num_pages
            num_before = num_begun
        return hits

    def hit_ratio(self, num_pages: int) -> float:
        """Return the upper bound on the share of prompt tokens that are hits in a pool of `num_pages`."""
        tokens = self._num_prompt_tokens
        return self.hit_pages(num_pages) * self._page_size / tokens if tokens else 0.0

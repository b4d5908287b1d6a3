"""Hits of prefix LRU for every pool size at once, from the stack distances of spans.

The result equals this simulation, run for every number of pages C (`docs/guide-plan.md` explains it in words):

    cached = []                                   # the page used longest ago first
    for each request, in the order of the trace:
        hits = length of the longest prefix of its pages, ending before its last token, that is in cached
        cached = [cached pages that the request does not use] + [its pages, the deepest first]
        cached = the last C of these

If outputs are counted, a request also has private pages, which no other request shares, after the known ones.

A page is a hit for every C above its stack distance: the number of pages used after it, plus the pages before it in
its own sequence. The distance grows by one from each page of a span to the next, so a span is stored as one number.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from kvarts.columns import Column
from kvarts.plan.reuse import Reuse

__all__ = ["HitCurve", "concave_hull", "find_knees", "lru_curve", "stack_distances"]

MOST_KNEES = 5
WORTHWHILE = 0.02
"""A knee must rise above the chord of its section by at least this share of all hits."""


class HitCurve:
    """Hit pages by number of cache pages. Linear between `sizes`, exact at every whole number."""

    def __init__(self, distances: Column, num_pages: Column, *, page_size: int, num_prompt_tokens: int) -> None:
        """Sum the spans: `num_pages` of each can be hits, the first of them in pools larger than its distance."""
        counted = num_pages > 0
        first, last = distances[counted], distances[counted] + num_pages[counted]
        self.page_size = page_size
        self.num_prompt_tokens = num_prompt_tokens
        changes, where = np.unique(np.concatenate([first, last]), return_inverse=True)
        slopes = np.bincount(where, np.repeat([1, -1], [len(first), len(last)]), len(changes)).astype(np.int64)
        slopes = np.cumsum(slopes)
        steps = np.diff(changes) * slopes[:-1]
        bends = np.ones(len(changes), bool)
        bends[1:] = np.diff(slopes) != 0
        hits = np.concatenate([[0], np.cumsum(steps)]) if len(changes) else np.zeros(0, np.int64)
        self.sizes: Column = np.concatenate([[0], changes[bends]]).astype(np.int64)
        """Pool sizes at which the slope changes; beyond the last, the curve is flat."""
        self.hits: Column = np.concatenate([[0], hits[bends]]).astype(np.int64)
        """Pages found by all requests together, at each of `sizes`."""

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
        return self._ratio(self.hit_pages(num_pages))

    @cached_property
    def most_pages(self) -> int:
        """The smallest pool that loses nothing."""
        return int(self.sizes[-1])

    @property
    def most_hit_ratio(self) -> float:
        """The share of prompt tokens that are hits if nothing is evicted."""
        return self._ratio(int(self.hits[-1]))

    def size_for(self, share: float) -> int:
        """Return the fewest pages that give at least `share` of all possible hits."""
        least = int(np.ceil(share * int(self.hits[-1])))
        place = int(np.searchsorted(self.hits, least))
        if place == 0 or not least:
            return 0
        low, hits = int(self.sizes[place - 1]), int(self.hits[place - 1])
        rise, width = int(self.hits[place]) - hits, int(self.sizes[place]) - low
        return low + -(-(least - hits) * width // rise)

    def _ratio(self, hit_pages: int) -> float:
        return hit_pages * self.page_size / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


def lru_curve(reuse: Reuse, distances: Column | None = None) -> HitCurve:
    """Return the curve of prefix LRU. `distances`: the result of `stack_distances`, if the caller has it."""
    if distances is None:
        distances = stack_distances(reuse)
    return HitCurve(distances, reuse.hittable, page_size=reuse.page_size, num_prompt_tokens=reuse.num_prompt_tokens)


def stack_distances(reuse: Reuse) -> Column:
    """Return for each span the pages used since its last use plus those before it in its sequence; -1 if never seen.

    A Fenwick tree counts, for each request, the pages whose latest use is in that request.
    """
    num_requests = len(reuse.num_pages)
    tree = [0] * (num_requests + 1)
    found = [-1] * len(reuse.request)
    num_pages = (reuse.num_pages + reuse.num_private).tolist()
    total = 0
    now = 0
    spans = zip(reuse.request.tolist(), reuse.start.tolist(), reuse.end.tolist(), reuse.previous.tolist(), strict=True)
    for place, (request, start, end, previous) in enumerate(spans):
        while now < request:
            # The latest use of every page of the previous request is that request.
            size = num_pages[now]
            total += size
            now += 1
            index = now
            while size and index <= num_requests:
                tree[index] += size
                index += index & -index
        if previous < 0:
            continue
        older = 0
        index = previous + 1
        while index:
            older += tree[index]
            index &= index - 1
        found[place] = start + total - older
        size = end - start
        total -= size
        index = previous + 1
        while index <= num_requests:
            tree[index] -= size
            index += index & -index
    return np.array(found, np.int64)


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

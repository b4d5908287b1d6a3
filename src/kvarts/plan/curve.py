"""Hits for every pool size at once: of prefix LRU, from the stack distances of spans; the upper bound; and estimates.

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

`SampledCurve` estimates the curve from a hash-based sample of pages, with an error: SHARDS, for very large traces.

The hash of a page covers its whole prefix, so all requests with the page agree on whether it is sampled. A sampled page
stands for 1 / rate pages. The first pages of every prompt are always examined and stand for themselves: omitting a page
that begins most prompts would make an estimate wrong by all of its hits. The trace is read once, one request at a time;
only the examined pages stay in memory.

The error is one standard error: sampled pages are divided into groups by hash, each group gives its own estimate of the
curve, and the spread of these gives the error of their mean.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from functools import cached_property
from heapq import heappop, heappush
from typing import Any

import numpy as np

from kvarts.columns import Column
from kvarts.content import UNIT_BYTES, Content
from kvarts.errors import ConfigError, InputError
from kvarts.plan.reuse import Reuse, ReuseTree, by_value
from kvarts.traffic.trace import Trace

__all__ = ["HitCurve", "Optimum", "SampledCurve", "concave_hull", "find_knees", "lru_curve", "stack_distances"]

MOST_KNEES = 5
WORTHWHILE = 0.02
"""A knee must rise above the chord of its section by at least this share of all hits."""
NUM_GROUPS = 8
MANY_PAGES = 1000
"""Sampled pages that are enough for an estimate, in the hint of an error."""
NUM_FIRST = 16
"""Number of first pages of every prompt that are examined regardless of their hash."""
LIMIT_32 = 1 << 31
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


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


class SampledCurve:
    """An estimated curve for pools of any size. `rate`: the share of pages to sample.

    Raises ConfigError for a rate at which nothing can be said of this trace, InputError for a trace out of order.
    """

    def __init__(self, trace: Trace, page_size: int, rate: float) -> None:
        if not 0.0 < rate <= 1.0:
            raise ConfigError(f"must be above 0 and at most 1, got {rate}", field="sample")
        if page_size < 1:
            raise ConfigError(f"must be at least 1, got {page_size}", field="page_size")
        self.trace_name = trace.name
        self.page_size = page_size
        weight = max(1, round(1 / rate))
        self.rate = 1 / weight
        samples = [_Sample(weight * NUM_GROUPS) for _ in range(NUM_GROUPS)]
        whole = _Sample(weight)
        self.num_requests = self.num_prompt_tokens = num_rest = 0
        before_ns = -1
        for index, request in enumerate(trace):
            if request.arrival_ns < before_ns:
                raise InputError(
                    f"row {request.row + 1} arrives before the row before it", field="timestamp", hint="Sort the rows."
                )
            before_ns = request.arrival_ns
            self.num_requests += 1
            self.num_prompt_tokens += request.num_prompt_tokens
            content = trace.content(request, page_size=page_size, owner=index)
            computed = request.num_prompt_tokens + request.num_output_tokens - 1
            keys = _page_keys(content, min(content.num_known_pages, computed // page_size))
            limit = (request.num_prompt_tokens - 1) // page_size
            first = keys[:NUM_FIRST]
            num_rest += max(0, min(limit, len(keys)) - NUM_FIRST)
            hashes = keys[NUM_FIRST:] % np.uint64(weight * NUM_GROUPS)
            whole.add(first, keys[NUM_FIRST:], hashes % np.uint64(weight) == 0, limit)
            for group, sample in enumerate(samples):
                sample.add(first, keys[NUM_FIRST:], hashes == group * weight, limit)
        if not self.num_requests:
            raise InputError("has no requests", path=trace.name)
        # The number of pages is known, so hits are estimated as a share of it.
        self._whole = whole.curves(num_rest)
        self._groups = [sample.curves(num_rest) for sample in samples]
        if weight > 1 and num_rest and not all(group.num_found for group in self._groups):
            enough = min(1.0, MANY_PAGES / num_rest)
            raise ConfigError(
                f"{rate:g} of {num_rest:,} pages after the first {NUM_FIRST} of every prompt is too few to estimate "
                f"from: there are {NUM_GROUPS} groups, and not each has one",
                field="sample",
                hint=f"Give {enough:.2g}, or leave it out: the whole trace is read then.",
            )
        self.num_sampled_pages = self._whole.num_pages

    def hit_ratio(self, num_pages: int) -> float:
        """Return the estimated share of prompt tokens that are hits in a pool of `num_pages`."""
        return float(self._whole.hit_pages(num_pages) * self.page_size / self.num_prompt_tokens)

    def error(self, num_pages: int) -> float:
        """Return one standard error of that ratio."""
        ratios = [group.hit_pages(num_pages) * self.page_size / self.num_prompt_tokens for group in self._groups]
        return float(np.std(ratios, ddof=1)) / math.sqrt(NUM_GROUPS)

    def point(self, num_pages: int) -> dict[str, Any]:
        """Return the estimate at one size, JSON-able."""
        return {"pages": num_pages, "hit_ratio": self.hit_ratio(num_pages), "error": self.error(num_pages)}

    def to_builtins(self, sizes: Iterable[int] | None = None) -> dict[str, Any]:
        """Return all points, JSON-able. `sizes`: default: the sizes that give round shares of all possible hits."""
        if sizes is None:
            rest = self._whole.rest
            sizes = sorted({max(1, rest.size_for(share)) for share in (0.5, 0.8, 0.9, 0.99, 1)})
        return {
            "trace": self.trace_name,
            "num_requests": self.num_requests,
            "num_prompt_tokens": self.num_prompt_tokens,
            "page_size": self.page_size,
            "sample": {"rate": self.rate, "num_pages": self.num_sampled_pages},
            "at": [self.point(size) for size in sizes],
        }


class _Curves:
    """Hits of the first pages of all prompts, which are exact, and of the remaining pages, which are estimated."""

    def __init__(self, first: HitCurve, rest: HitCurve, *, num_rest: int, num_found: int, num_pages: int) -> None:
        self.first = first
        self.rest = rest
        self.num_found = num_found
        """Pages after the first ones that could be hits, as the sample has it."""
        self._share = num_rest / num_found if num_found else 0.0
        self.num_pages = num_pages

    def hit_pages(self, num_pages: int) -> float:
        """Return the estimated number of pages that all requests find together."""
        return float(self.first.hit_pages(num_pages) + self.rest.hit_pages(num_pages) * self._share)


class _Sample:
    """The examined pages of all requests. `weight`: the number of pages that a sampled page stands for."""

    def __init__(self, weight: int) -> None:
        self._weight = weight
        self._tree = ReuseTree()
        self._num_pages: list[int] = []
        self._limit: list[int] = []

    def add(self, first: Column, rest: Column, is_chosen: Column, limit: int) -> None:
        """Add a request: all its `first` pages and the chosen pages of the `rest`."""
        index = len(self._num_pages)
        keys = np.concatenate([first, rest[is_chosen]])
        content = Content(keys.tobytes(), num_tokens=len(keys), page_size=1, owner=index)
        self._tree.add(index, content, len(keys), -1)
        self._num_pages.append(len(keys))
        self._limit.append(min(limit, len(first)) + int(is_chosen[: max(0, limit - NUM_FIRST)].sum()))

    def curves(self, num_rest: int) -> _Curves:
        """Return the curves. `num_rest`: number of pages after the first ones that could be hits."""
        columns = self._tree.rows.take_columns()
        num_pages, limit = np.array(self._num_pages, np.int64), np.array(self._limit, np.int64)
        nothing = np.zeros(len(num_pages), np.int64)
        reuse = Reuse(
            page_size=1,
            request=columns[0],
            start=self._weighed(columns[1]),
            end=self._weighed(columns[2]),
            previous=columns[3],
            source=columns[4],
            num_pages=self._weighed(num_pages),
            num_private=nothing,
            limit=self._weighed(limit),
            prompt_tokens=num_pages,
            arrival_ns=nothing,
        )
        distances = stack_distances(reuse)
        hittable = reuse.hittable
        first = np.clip(NUM_FIRST - reuse.start, 0, hittable)
        num_found = int((self._weighed(limit) - np.minimum(limit, NUM_FIRST)).sum())
        return _Curves(
            HitCurve.of_spans(distances, first, page_size=1, num_prompt_tokens=0),
            HitCurve.of_spans(distances + first, hittable - first, page_size=1, num_prompt_tokens=0),
            num_rest=num_rest,
            num_found=num_found,
            num_pages=int(num_pages.sum()),
        )

    def _weighed(self, places: Column) -> Column:
        """Return the number of pages that the pages before each place stand for."""
        return np.where(places > NUM_FIRST, NUM_FIRST + (places - NUM_FIRST) * self._weight, places)


def _page_keys(content: Content, num_pages: int) -> Column:
    """Return a hash of each page that covers its whole prefix."""
    units = np.frombuffer(bytes(content.units), np.uint64, len(content.units) // UNIT_BYTES)
    places = np.arange(1, len(units) + 1, dtype=np.uint64)
    salt = np.uint64(0 if content.salt is None else 1 + zlib.crc32(content.salt.encode()))
    prefixes = np.cumsum(_mixed(units + places * GOLDEN)) + _mixed(np.array([salt]))[0]
    pages = np.arange(1, num_pages + 1)
    last_units = -(-pages * content.page_size // content.unit_tokens) - 1
    return _mixed(prefixes[last_units] + pages.astype(np.uint64) * MIX[0])


def _mixed(values: Column) -> Column:
    """Return 64-bit `values` mixed so that every bit depends on all others (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * MIX[0]
    values = (values ^ (values >> np.uint64(27))) * MIX[1]
    result: Column = values ^ (values >> np.uint64(31))
    return result

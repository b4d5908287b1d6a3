"""Estimates the curve of a trace from a hash-based sample of its pages, with an error: SHARDS, for very large traces.

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
from typing import Any

import numpy as np

from kvarts.columns import Column
from kvarts.content import UNIT_BYTES, Content
from kvarts.errors import ConfigError, InputError
from kvarts.plan.curve import HitCurve, stack_distances
from kvarts.plan.reuse import Reuse, ReuseTree
from kvarts.traffic.trace import Trace

__all__ = ["SampledCurve"]

NUM_GROUPS = 8
MANY_PAGES = 1000
"""Sampled pages that are enough for an estimate, in the hint of an error."""
NUM_FIRST = 16
"""Number of first pages of every prompt that are examined regardless of their hash."""
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


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
            HitCurve(distances, first, page_size=1, num_prompt_tokens=0),
            HitCurve(distances + first, hittable - first, page_size=1, num_prompt_tokens=0),
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

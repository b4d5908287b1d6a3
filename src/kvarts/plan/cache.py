"""The cache curves of a trace in one value: the part of `kvarts plan` that needs no model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from kvarts.limits import MOST_PAGES, check_whole
from kvarts.plan.breakdown import Breakdown
from kvarts.plan.curve import lru_curve, stack_distances
from kvarts.plan.knees import find_knees
from kvarts.plan.optimum import Optimum
from kvarts.plan.reuse import find_token_reuse
from kvarts.traffic.trace import Trace

__all__ = ["CachePlan"]

SHARES = (0.5, 0.8, 0.9, 0.95, 0.99, 1.0)
MOST_POINTS = 2000
"""Most points of a curve in the output; the curve is linear between them."""


class CachePlan:
    """Curve, optimum and breakdown of `trace` for pages of `page_size`. The trace must be a list, not a stream."""

    def __init__(self, trace: Trace, page_size: int, *, count_outputs: bool = False) -> None:
        self.trace = trace
        self.page_size = page_size
        self._tokens = find_token_reuse(trace)
        self._reuse = reuse = self._tokens.in_pages(page_size, count_outputs=count_outputs)
        self._distances = stack_distances(reuse)
        self.curve = lru_curve(reuse, self._distances)
        self.optimum = Optimum(reuse)
        self.least_pages = max(
            -(-(request.num_prompt_tokens + request.num_output_tokens - 1) // page_size) for request in trace
        )
        """The smallest pool that can hold each request alone."""
        self.knees = find_knees(self.curve, self.least_pages)
        self.count_outputs = count_outputs
        self._optima: dict[int, float] = {}

    @property
    def main_knee(self) -> int:
        """The middle knee; the smallest pool that loses nothing if the curve has none."""
        return self.knees[len(self.knees) // 2] if self.knees else max(self.least_pages, self.curve.most_pages)

    @property
    def sizes_under_pressure(self) -> list[int]:
        """The main knee, and half of it where every request still fits: sizes at which policies differ."""
        return sorted({max(self.least_pages, self.main_knee // 2), self.main_knee})

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return self._reuse.num_prompt_tokens

    def default_sizes(self) -> list[int]:
        """Return the knees, and the sizes that reach round shares of all possible hits; none is below `least_pages`."""
        return sorted({*self.knees, *(max(self.least_pages, self.curve.size_for(share)) for share in SHARES)})

    def point(self, num_pages: int) -> dict[str, Any]:
        """Return the hit ratio of LRU and of the optimum at one size."""
        check_whole(num_pages, "at", most=MOST_PAGES)
        if num_pages not in self._optima:
            self._optima[num_pages] = self.optimum.hit_ratio(num_pages)
        return {
            "pages": num_pages,
            "tokens": num_pages * self.page_size,
            "hit_ratio": self.curve.hit_ratio(num_pages),
            "optimum_hit_ratio": self._optima[num_pages],
        }

    def to_builtins(self, sizes: Iterable[int] | None = None) -> dict[str, Any]:
        """Return all curves and points, JSON-able. `sizes`: points of interest; None: `default_sizes`."""
        chosen = self.default_sizes() if sizes is None else list(sizes)
        breakdown = Breakdown(self.trace, self._tokens, self._reuse, self._distances)
        curve = self.curve
        kept = np.unique(np.linspace(0, len(curve.sizes) - 1, min(len(curve.sizes), MOST_POINTS)).round().astype(int))
        return {
            "trace": self.trace.name,
            "num_requests": len(self._reuse.num_pages),
            "num_prompt_tokens": self._reuse.num_prompt_tokens,
            "page_size": self.page_size,
            "count_outputs": self.count_outputs,
            "least_pages": self.least_pages,
            "most_hit_ratio": curve.most_hit_ratio,
            "most_pages": curve.most_pages,
            "knees": [self.point(size) for size in self.knees],
            "pages_for_share_of_hits": {f"{share:g}": curve.size_for(share) for share in SHARES},
            "at": [{**self.point(size), **breakdown.at(size)} for size in chosen],
            "curve": {
                "pages": curve.sizes[kept].tolist(),
                "hit_ratio": [curve.hit_ratio(size) for size in curve.sizes[kept].tolist()],
            },
        }

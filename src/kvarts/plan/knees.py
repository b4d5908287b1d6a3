"""Knees of a hit curve: sizes below which memory buys many hits, and above which it buys few."""

from __future__ import annotations

import numpy as np

from kvarts.columns import Column
from kvarts.plan.curve import HitCurve

__all__ = ["concave_hull", "find_knees"]

MOST_KNEES = 5
WORTHWHILE = 0.02
"""A knee must rise above the chord of its section by at least this share of all hits."""


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

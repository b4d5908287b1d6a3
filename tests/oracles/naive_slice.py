"""A naive slice: when a device of a model's own, on which every step takes 1 / share as long, would start its steps."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def latest_behind(steps: Sequence[tuple[int, int]], busy: Sequence[tuple[int, int]], share: Fraction) -> Fraction:
    """Return how much later than in its slice a step of the model started, at most, in ns.

    `steps`: start and duration of each. `busy`: begin and end of periods in which the model could always compute; they
    may overlap and touch. A slice begins again with each step that is earlier than in the last one.
    """
    slice_start = behind = Fraction(0)
    for start, duration in steps:
        begin = start
        while any(since < begin <= until for since, until in busy):
            begin = min(since for since, until in busy if since < begin <= until)
        slice_start = max(slice_start, Fraction(begin))
        behind = max(behind, start - slice_start)
        slice_start = min(slice_start, Fraction(start)) + duration / share
    return behind

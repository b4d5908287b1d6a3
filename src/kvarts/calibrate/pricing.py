"""Prices the courses of many points at once, under any constants.

Courses of equal engines (the same model, device, parallelism and settings) are priced as one: their steps are rows of
the same arrays. A hundred engines with 86,000 steps then take some 60 ms per set of constants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.calibrate.course import Course, means_of
from kvarts.calibrate.points import METRICS
from kvarts.executor.constants import COEFFICIENTS, LINKS
from kvarts.executor.roofline import RooflineCost
from kvarts.executor.step_arrays import StepArrays

__all__ = ["Pricing", "with_constants"]

Values = npt.NDArray[np.float64]


def with_constants(cost: RooflineCost, values: Mapping[str, float]) -> RooflineCost:
    """Return `cost` with constants; those of links only if the device has NVLink, for which they were fitted."""
    is_fitted_link = cost.hardware.link_kind == "nvlink"
    changes = {name: value for name, value in values.items() if is_fitted_link or name not in LINKS}
    changed = msgspec.structs.replace(cost, **changes)
    vars(changed).update(geometry=cost.geometry, hardware=cost.hardware)  # these take longest, and do not change
    return changed


class _Engine(NamedTuple):
    """Courses of equal engines. `places`: theirs among all courses. `first`: the first row of each in `steps`."""

    cost: RooflineCost
    active: frozenset[str]
    places: list[int]
    courses: list[Course]
    steps: StepArrays
    weights: Values
    first: npt.NDArray[np.int64]


class Pricing:
    """Courses, taken apart into arrays once."""

    def __init__(self, courses: Sequence[Course]) -> None:
        self._num_courses = len(courses)
        equal: dict[tuple[object, ...], list[int]] = {}
        for place, course in enumerate(courses):
            equal.setdefault(_engine_of(course.cost), []).append(place)
        self._engines = [_engine([courses[place] for place in places], places) for places in equal.values()]

    @property
    def active(self) -> frozenset[str]:
        """The constants that any course depends on."""
        return frozenset(name for engine in self._engines for name in engine.active)

    def predicted(self, values: Mapping[str, float]) -> Values:
        """Return the means under constants: shape [courses, METRICS]."""
        means = np.empty((self._num_courses, len(METRICS)))
        for engine in self._engines:
            means[engine.places] = _means(engine, values)
        return means

    def moved(self, means: Values, name: str, values: Mapping[str, float]) -> Values:
        """Return the means under `values`, given those under constants that differ in `name` only."""
        moved = means.copy()
        for engine in self._engines:
            if name in engine.active:
                moved[engine.places] = _means(engine, values)
        return moved


def _engine_of(cost: RooflineCost) -> tuple[object, ...]:
    """Return all fields of `cost` but its constants."""
    return tuple(
        getattr(cost, name) for name in cost.__struct_fields__ if name not in COEFFICIENTS and name != "uncertainty"
    )


def _engine(courses: list[Course], places: list[int]) -> _Engine:
    cost = courses[0].cost
    sizes = np.array([len(course.batches) for course in courses], np.int64)
    steps = StepArrays(cost, [batches for course in courses for batches in course.batches])
    weights = np.concatenate([course.weights for course in courses])
    return _Engine(cost, frozenset(cost.active_coefficients), places, courses, steps, weights, np.cumsum(sizes) - sizes)


def _means(engine: _Engine, values: Mapping[str, float]) -> Values:
    steps_ms = engine.steps.times_ms(with_constants(engine.cost, values))
    sums_ms: Values = np.add.reduceat(steps_ms[:, None] * engine.weights, engine.first)
    return means_of(engine.courses, sums_ms)

"""Fits the constants that all rooflines share to a table of points, and tests them on held-out points.

Each point is replayed once; its course (`course.py`) then prices the same batches under other constants, so that a fit
of hundreds of points takes a minute. The residuals are logarithms of predicted over measured times, with a loss that
limits the weight of outliers (soft L1), because the conditions of published measurements are never stated in full.
Points of one version of an engine with one model on one device share an unknown factor: a sweep that is slow as a whole
says less about the constants than how its times grow with the load. The distances of the constants from a prior are
added. Points under an open load are replayed again after the first fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.calibrate.coefficients import BOUNDS, needs_scipy
from kvarts.calibrate.course import Course, course_of
from kvarts.calibrate.points import Point
from kvarts.errors import ConfigError
from kvarts.executor.constants import COEFFICIENTS, LINKS, Constants, HeldOut
from kvarts.executor.roofline import RooflineCost

__all__ = ["HALVES", "Errors", "PointsFit", "Worth", "errors_of", "fit_points", "record", "test_halves"]

Values = npt.NDArray[np.float64]

SIGMA = 0.1
"""Relative error at which the loss changes from quadratic to linear."""
DEPENDENT = 3.0
"""Number of points that carry as much information as an independent one, since sweeps measure one engine repeatedly."""
COMMON = 0.2
"""Variance of the logarithm of the factor that a sweep shares, as a share of that of a single point."""
ROUNDS = 8
STEP = 1e-2
"""Difference of logarithms for slopes."""
LEAST_OF_WIDTH = 0.5
"""Smallest posterior deviation, as a share of the prior's: engines differ by more than a table of points shows."""

HALVES: Mapping[str, Callable[[Point], str]] = {
    "source": lambda point: point.source,
    "gpu": lambda point: point.gpu,
    "model": lambda point: point.model,
}
"""Fields by which a table is halved: each value is in one half, and each half has about half of the points."""


class Errors(msgspec.Struct, frozen=True):
    """Relative errors of one metric: the median and 90th percentile of absolute errors, and the median signed error."""

    median: float
    p90: float
    bias: float
    num_points: int

    @classmethod
    def of(cls, errors: Values) -> Errors | None:
        """Return the statistics of `errors`; None if empty."""
        if not len(errors):
            return None
        sizes = np.abs(errors)
        return cls(float(np.median(sizes)), float(np.percentile(sizes, 90)), float(np.median(errors)), len(errors))


class Worth(msgspec.Struct, frozen=True):
    """One constant: its prior and fitted value, its uncertainty, and its contribution to the fit.

    `deviation`: standard deviation of its logarithm. `gain`: increase of the objective with it at its prior, in nats.
    """

    name: str
    prior: float
    value: float
    deviation: float
    gain: float


class PointsFit(msgspec.Struct, frozen=True):
    """Fitted constants, the contribution of each, and the errors of the fitted points before and after, by metric."""

    constants: Constants
    worth: tuple[Worth, ...]
    before: dict[str, Errors]
    after: dict[str, Errors]


def record(points: Sequence[Point], constants: Constants, on_progress: Callable[[int], object] | None) -> list[Course]:
    """Replay each point under `constants`. Raise ConfigError, naming the point, if one cannot be replayed."""
    courses = []
    for point in points:
        try:
            config = point.config()
            courses.append(
                course_of(point, msgspec.structs.replace(config, cost=with_constants(config.cost, constants.values)))
            )
        except ConfigError as error:
            where = f"{point.model} on {point.gpu}, tp {point.tp}, {point.load} {point.level:g}"
            raise ConfigError(f"{where}: {error.what}", field=error.field, hint=error.hint, path=error.path) from error
        if on_progress is not None:
            on_progress(1)
    return courses


def with_constants(cost: RooflineCost, values: Mapping[str, float]) -> RooflineCost:
    """Return `cost` with constants; those of links only if the device has NVLink, for which they were fitted."""
    is_fitted_link = cost.hardware.link_kind == "nvlink"
    changes = {name: value for name, value in values.items() if is_fitted_link or name not in LINKS}
    changed = msgspec.structs.replace(cost, **changes)
    vars(changed).update(geometry=cost.geometry, hardware=cost.hardware)  # these take longest, and do not change
    return changed


class _Objective:
    """The objective of a fit: residuals of courses, and distances of the constants from their prior."""

    def __init__(self, courses: Sequence[Course], prior: Constants) -> None:
        self._courses = courses
        self.names = tuple(
            name for name in COEFFICIENTS if any(name in course.cost.active_coefficients for course in courses)
        )
        self.guess = np.log([prior.values[name] for name in self.names])
        self.widths = np.array([prior.deviations[name] for name in self.names])
        self._fixed = {name: value for name, value in prior.values.items() if name not in self.names}
        self._active = [frozenset(course.cost.active_coefficients) for course in courses]
        self._fitted = [_fitted(course.point) for course in courses]
        self._owner = np.repeat(np.arange(len(courses)), [len(each) for each in self._fitted])
        of_sweep = [
            (_sweep(course.point), name) for course, each in zip(courses, self._fitted, strict=True) for name in each
        ]
        places = {sweep: place for place, sweep in enumerate(dict.fromkeys(of_sweep))}
        self._sweep = np.array([places[sweep] for sweep in of_sweep], np.int64)
        self._size = np.bincount(self._sweep)

    def values(self, logs: Values) -> dict[str, float]:
        """Return all constants."""
        return {**self._fixed, **dict(zip(self.names, map(float, np.exp(logs)), strict=True))}

    def residuals(self, logs: Values) -> Values:
        """Return the residuals. The sum of their squares is twice the objective."""
        return self._weighed(self._errors(logs, range(len(self._courses))), logs)

    def jacobian(self, logs: Values) -> Values:
        """Return the slopes of the residuals. Only points that depend on a constant are predicted again for it."""
        errors = self._errors(logs, range(len(self._courses)))
        here = self._weighed(errors, logs)
        slopes = np.empty((len(here), len(logs)))
        for place, name in enumerate(self.names):
            moved = logs.copy()
            moved[place] += STEP
            again = [number for number, active in enumerate(self._active) if name in active]
            there = errors.copy()
            there[np.isin(self._owner, again)] = self._errors(moved, again)
            slopes[:, place] = (self._weighed(there, moved) - here) / STEP
        return slopes

    def _errors(self, logs: Values, places: Sequence[int]) -> Values:
        """Return the logarithms of predicted over measured times of the courses at `places`."""
        values = self.values(logs)
        errors = []
        for place in places:
            course = self._courses[place]
            predicted = course.predicted(with_constants(course.cost, values))
            errors += [_log_error(metric, predicted[metric], value) for metric, value in self._fitted[place].items()]
        return np.array(errors)

    def _weighed(self, errors: Values, logs: Values) -> Values:
        """Return the residuals of `errors`: independent for the points of a sweep, and limited for outliers."""
        means = np.bincount(self._sweep, errors) / self._size
        left = 1.0 - 1.0 / np.sqrt(1.0 + COMMON * self._size)
        scaled = (errors - (left * means)[self._sweep]) / SIGMA
        soft = np.sign(scaled) * np.sqrt(2.0 * (np.sqrt(1.0 + scaled**2) - 1.0)) / math.sqrt(DEPENDENT)
        return np.concatenate([soft, (logs - self.guess) / self.widths])


def _sweep(point: Point) -> tuple[object, ...]:
    """Return the key of the sweep that a point belongs to."""
    return (point.source, point.engine, point.version, point.model, point.gpu, point.weight)


def _fitted(point: Point) -> dict[str, float]:
    """Return the metrics of a point to fit: TPOT, or else throughput; and TTFT unless the load makes queues."""
    measured = point.measured
    kept = ["tpot_ms"] if "tpot_ms" in measured else ["tok_s_gpu"]
    if point.load == "open":
        kept.append("ttft_ms")
    return {name: measured[name] for name in kept if name in measured}


def _log_error(metric: str, predicted: float, measured: float) -> float:
    """Return the logarithm of predicted over measured time."""
    error = math.log(max(predicted, 1e-12) / measured)
    return -error if metric == "tok_s_gpu" else error


def fit_points(
    courses: Sequence[Course],
    prior: Constants,
    *,
    weigh: bool = True,
    on_progress: Callable[[int], object] | None = None,
) -> PointsFit:
    """Fit constants to courses recorded under `prior`. `weigh`: also compute the contribution of each constant.

    Raise ConfigError without SciPy.
    """
    needs_scipy()
    before = errors_of(courses, prior.values)
    objective, logs, jacobian = _fit(courses, prior, prior)
    if any(course.point.load == "open" for course in courses):
        # The batches of an open load depend on step times.
        first = msgspec.structs.replace(prior, values=objective.values(logs))
        courses = [
            record([course.point], first, None)[0] if course.point.load == "open" else course for course in courses
        ]
        objective, logs, jacobian = _fit(courses, prior, first)
    values = objective.values(logs)
    deviations = np.sqrt(np.diag(np.linalg.inv(jacobian.T @ jacobian)))
    least = float((objective.residuals(logs) ** 2).sum()) / 2
    worth = []
    for place, name in enumerate(objective.names):
        gain = 0.0
        if weigh:
            left = logs.copy()
            left[place] = objective.guess[place]
            gain = float((objective.residuals(left) ** 2).sum()) / 2 - least
            if on_progress is not None:
                on_progress(1)
        worth.append(Worth(name, prior.values[name], values[name], float(deviations[place]), gain))
    known = {each.name: each.deviation for each in worth}
    widths = {
        name: min(width, max(known.get(name, width), LEAST_OF_WIDTH * width))
        for name, width in prior.deviations.items()
    }
    constants = Constants(values=values, deviations=widths)
    return PointsFit(constants, tuple(worth), before, errors_of(courses, values))


def _fit(courses: Sequence[Course], prior: Constants, start: Constants) -> tuple[_Objective, Values, Values]:
    from scipy.optimize import least_squares

    objective = _Objective(courses, prior)
    low, high = (np.log([BOUNDS[name][side] for name in objective.names]) for side in (0, 1))
    first = np.clip(np.log([start.values[name] for name in objective.names]), low + 1e-6, high - 1e-6)
    found = least_squares(
        objective.residuals,
        first,
        jac=objective.jacobian,
        bounds=(low, high),
        max_nfev=ROUNDS,
        x_scale=objective.widths,
    )
    return objective, np.asarray(found.x, np.float64), np.asarray(found.jac, np.float64)


def errors_of(courses: Sequence[Course], values: Mapping[str, float]) -> dict[str, Errors]:
    """Return the relative errors of predictions with constants, by metric, over all points that have it."""
    errors = _errors(courses, values)
    return {metric: found for metric, each in errors.items() if (found := Errors.of(np.array(each))) is not None}


def _errors(courses: Sequence[Course], values: Mapping[str, float]) -> dict[str, list[float]]:
    errors: dict[str, list[float]] = {}
    for course in courses:
        predicted = course.predicted(with_constants(course.cost, values))
        for metric, measured in course.point.measured.items():
            errors.setdefault(metric, []).append(predicted[metric] / measured - 1.0)
    return errors


def halves_of(points: Sequence[Point], by: str) -> list[bool]:
    """Return the half of each point: values of the field, most frequent first, are put into the smaller half.

    Raise ConfigError if all points have the same value.
    """
    key = HALVES[by]
    counts: dict[str, int] = {}
    for point in points:
        counts[key(point)] = counts.get(key(point), 0) + 1
    if len(counts) < 2:
        raise ConfigError(f"all points have one {by}", field="hold_out", hint="Hold out by something else.")
    sizes = [0, 0]
    side = {}
    for value, count in sorted(counts.items(), key=lambda each: (-each[1], each[0])):
        smaller = int(sizes[1] < sizes[0])
        side[value] = bool(smaller)
        sizes[smaller] += count
    return [side[key(point)] for point in points]


def test_halves(
    courses: Sequence[Course], prior: Constants, by: str
) -> tuple[dict[str, Errors], dict[str, list[tuple[Course, float]]]]:
    """Fit to each half and predict the other. Return the errors by metric, and each error with its course."""
    half = halves_of([course.point for course in courses], by)
    found: dict[str, list[tuple[Course, float]]] = {}
    for side in (False, True):
        fitted = [course for course, where in zip(courses, half, strict=True) if where == side]
        others = [course for course, where in zip(courses, half, strict=True) if where != side]
        objective, logs, _ = _fit(fitted, prior, prior)
        values = objective.values(logs)
        for course in others:
            predicted = course.predicted(with_constants(course.cost, values))
            for metric, measured in course.point.measured.items():
                found.setdefault(metric, []).append((course, predicted[metric] / measured - 1.0))
    errors = {name: Errors.of(np.array([error for _, error in each])) for name, each in found.items()}
    return {name: each for name, each in errors.items() if each is not None}, found


def held_out_of(found: Sequence[Mapping[str, Sequence[tuple[Course, float]]]]) -> list[HeldOut]:
    """Return held-out errors by kind of model, for TPOT (including throughput, as time), TTFT and E2E."""
    rows = []
    for kind in ("dense", "experts"):
        for metric, names in (("tpot", ("tpot_ms", "tok_s_gpu")), ("ttft", ("ttft_ms",)), ("e2e", ("e2e_ms",))):
            sizes = np.array(
                [
                    abs(error)
                    for each in found
                    for name in names
                    for course, error in each.get(name, ())
                    if (course.cost.geometry.experts is not None) == (kind == "experts")
                    and (metric == "tpot" or course.point.load == "open")
                ]
            )
            if len(sizes):
                rows.append(
                    HeldOut(
                        kind=kind,
                        metric=metric,
                        median=round(float(np.median(sizes)), 4),
                        one_sigma=round(float(np.percentile(sizes, 68.3)), 4),
                        num_points=len(sizes) // len(found),
                    )
                )
    return rows

"""Fits the constants that all rooflines share to a table of points, tests them on held-out points, and writes them.

Each point is replayed once; the same batches (`course.py`) are then priced under other constants, all points at once
(`course.py`), so that a fit of hundreds of points takes seconds. The residuals are logarithms of predicted over
measured times, with a loss that limits the weight of outliers (soft L1), because the conditions of published
measurements are never stated in full. Points of one version of an engine with one model on one device share an unknown
factor: a sweep that is slow as a whole says less about the constants than how its times grow with the load. The
distances of the constants from a prior are added. Points under an open load are replayed again after the first fit, and
fitted again.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.base.errors import ConfigError, InputError
from kvarts.base.files import toml_text
from kvarts.base.processes import Processes
from kvarts.cost.roofline_settings import CELL, COEFFICIENTS, Constants, HeldOut, ScaleOf, shipped_constants
from kvarts.plan.calibrate.coefficients import BOUNDS, needs_scipy
from kvarts.plan.calibrate.schedule import (
    METRICS,
    Course,
    Point,
    Pricing,
    course_of,
    load_points,
    usable,
    with_constants,
)

__all__ = [
    "HALVES",
    "Errors",
    "PointsFit",
    "TableFit",
    "Worth",
    "cell_of",
    "errors_of",
    "fit_points",
    "fit_table",
    "held_out_of",
    "record",
    "sweep_of",
    "test_halves",
]

Values = npt.NDArray[np.float64]

SIGMA = 0.1
"""Relative error at which the loss changes from quadratic to linear."""
DEPENDENT = 3.0
"""Number of points that carry as much information as an independent one, since sweeps measure one engine repeatedly."""
COMMON = 0.2
"""Variance of the logarithm of the factor that a sweep shares, as a share of that of a single point."""
CLOSED_TTFT = 0.5
"""Weight of the residual of a closed loop's TTFT, of which sources do not state how arrivals are grouped."""
FEW_IN_FLIGHT = 64
"""The most requests in flight of a closed loop whose TTFT is fitted; with more it is the time in the queue."""
SCALE_WIDTH, VERSION_WIDTH = 0.4, 0.15
"""Standard deviations of the logarithms of factors before a fit: of engines and devices; of a version of an engine."""
SCALE_BOUNDS = (0.2, 8.0)
POINTS_AT_ONCE = 16
"""Number of points whose engines may be in memory at once."""
ROUNDS = 50
FEWEST = 5
"""The fewest points of a cell of held-out errors; smaller ones are part of the next wider cell only."""
STEP = 1e-3
"""Difference of logarithms, to either side, for slopes."""

HALVES: Mapping[str, Callable[[Point], str]] = {
    "source": lambda point: point.source,
    "gpu": lambda point: point.gpu,
    "model": lambda point: point.model,
}
"""Fields by which a table is halved: each value is in one half, and each half has about half of the points."""
UNITS = {"tpot_ms": "TPOT", "ttft_ms": "TTFT", "e2e_ms": "E2E", "tok_s_gpu": "tokens/s"}


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


def record(
    points: Sequence[Point],
    constants: Constants,
    on_progress: Callable[[int], object] | None,
    processes: Processes | None = None,
) -> list[Course]:
    """Replay each point under `constants`. Raise ConfigError, naming the point, if one cannot be replayed.

    `processes`: those that replay; default: this one.
    """
    courses: list[Course] = []
    tasks = [(point, constants) for point in points]
    for course in (Processes() if processes is None else processes).in_order(_recorded, tasks):
        courses.append(course)
        if len(courses) % POINTS_AT_ONCE == POINTS_AT_ONCE - 1:
            gc.collect()  # an engine refers to itself; its few large arrays do not make the collector run
        if on_progress is not None:
            on_progress(1)
    return courses


def _recorded(_: object, task: tuple[Point, Constants]) -> Course:
    """Replay a point under constants. Runs in other processes, too."""
    point, constants = task
    try:
        config = point.config()
        cost = with_constants(config.cost, constants, point.engine_name)
        return course_of(point, msgspec.structs.replace(config, cost=cost))
    except ConfigError as error:
        where = f"{point.model} on {point.gpu}, tp {point.tp}, {point.load} {point.level:g}"
        raise ConfigError(f"{where}: {error.what}", field=error.field, hint=error.hint, path=error.path) from error


class _Objective:
    """The objective of a fit: residuals of courses, and distances of the constants from their prior."""

    def __init__(self, courses: Sequence[Course], prior: Constants) -> None:
        self._pricing = Pricing(courses)
        self._prior = prior
        active = self._pricing.active
        coefficients = [name for name in COEFFICIENTS if name in active]
        self._scales = [
            (place, factor) for place, row in enumerate(prior.scale) if self._pricing.has(row) for factor in row.fitted
        ]
        rows = prior.scale
        of_scales = [f"{factor} of {rows[place].name}" for place, factor in self._scales]
        self._num_coefficients = len(coefficients)
        self.names = (*coefficients, *of_scales)
        firsts = [getattr(rows[place], factor) for place, factor in self._scales]
        widths = [VERSION_WIDTH if "==" in rows[place].of else SCALE_WIDTH for place, _ in self._scales]
        self.guess = np.log([*(prior.values[name] for name in coefficients), *firsts])
        self.widths = np.array([*(prior.deviations[name] for name in coefficients), *widths])
        bounds = np.log([*(BOUNDS[name] for name in coefficients), *[SCALE_BOUNDS] * len(firsts)])
        self.bounds = bounds[:, 0], bounds[:, 1]
        fitted = [
            (place, METRICS.index(name), value)
            for place, course in enumerate(courses)
            for name, value in _fitted(course.point).items()
        ]
        self._places = np.array([place for place, _, _ in fitted], np.int64)
        self._columns = np.array([column for _, column, _ in fitted], np.int64)
        self._measured = np.array([value for _, _, value in fitted])
        is_queued = [METRICS[each] == "ttft_ms" and courses[at].point.load == "closed" for at, each, _ in fitted]
        self._shares = np.where(is_queued, CLOSED_TTFT, 1.0)
        of_sweep = [(sweep_of(courses[place].point), column) for place, column, _ in fitted]
        places = {sweep: place for place, sweep in enumerate(dict.fromkeys(of_sweep))}
        self._sweep = np.array([places[sweep] for sweep in of_sweep], np.int64)
        self._size = np.bincount(self._sweep)

    def constants(self, logs: Values) -> Constants:
        """Return all constants and scales."""
        numbers = list(map(float, np.exp(logs)))
        count = self._num_coefficients
        rows = list(self._prior.scale)
        for (place, factor), value in zip(self._scales, numbers[count:], strict=True):
            rows[place] = msgspec.structs.replace(rows[place], **{factor: value})
        values = {**self._prior.values, **dict(zip(self.names[:count], numbers[:count], strict=True))}
        return msgspec.structs.replace(self._prior, values=values, scale=rows)

    def residuals(self, logs: Values) -> Values:
        """Return the residuals. The sum of their squares is twice the objective."""
        return self._weighed(self._errors(self._pricing.predicted(self.constants(logs))), logs)

    def jacobian(self, logs: Values) -> Values:
        """Return the slopes of the residuals. Only points that depend on a constant are predicted again for it."""
        means = self._pricing.predicted(self.constants(logs))
        slopes = []
        changed: list[str | ScaleOf] = [*self.names[: self._num_coefficients]]
        changed += [self._prior.scale[place] for place, _ in self._scales]
        for place, what in enumerate(changed):
            sides = []
            for step in (STEP, -STEP):
                moved = logs.copy()
                moved[place] += step
                there = self._pricing.moved(means, what, self.constants(moved))
                sides.append(self._weighed(self._errors(there), moved))
            slopes.append((sides[0] - sides[1]) / (2 * STEP))
        return np.column_stack(slopes)

    def _errors(self, means: Values) -> Values:
        """Return the logarithms of predicted over measured times."""
        errors: Values = np.log(np.maximum(means[self._places, self._columns], 1e-12) / self._measured)
        return errors * np.where(self._columns == METRICS.index("tok_s_gpu"), -1.0, 1.0)

    def _weighed(self, errors: Values, logs: Values) -> Values:
        """Return the residuals of `errors`: independent for the points of a sweep, and limited for outliers."""
        means = np.bincount(self._sweep, errors) / self._size
        left = 1.0 - 1.0 / np.sqrt(1.0 + COMMON * self._size)
        scaled = (errors - (left * means)[self._sweep]) / SIGMA
        soft = np.sign(scaled) * np.sqrt(2.0 * (np.sqrt(1.0 + scaled**2) - 1.0)) / math.sqrt(DEPENDENT)
        soft *= self._shares
        return np.concatenate([soft, (logs - self.guess) / self.widths])


def sweep_of(point: Point) -> tuple[object, ...]:
    """Return the key of the sweep that a point belongs to."""
    return (point.source, point.engine, point.version, point.model, point.gpu, point.weight)


def _fitted(point: Point) -> dict[str, float]:
    """Return the metrics of a point to fit: TPOT, else throughput or E2E; and TTFT unless the load makes queues."""
    measured = point.measured
    kept = [next(name for name in ("tpot_ms", "tok_s_gpu", "e2e_ms", "ttft_ms") if name in measured)]
    if point.load == "open" or (point.load == "closed" and point.level <= FEW_IN_FLIGHT):
        kept.append("ttft_ms")
    return {name: measured[name] for name in kept if name in measured}


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
    before = errors_of(courses, prior)
    courses, objective, logs, jacobian = _fit_twice(courses, prior)
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
        first, found = float(np.exp(objective.guess[place])), float(np.exp(logs[place]))
        worth.append(Worth(name, first, found, float(deviations[place]), gain))
    # One engine may differ from others as much as before: the table shows their mean.
    constants = msgspec.structs.replace(objective.constants(logs), held_out=[])
    return PointsFit(constants, tuple(worth), before, errors_of(courses, constants))


def _fit_twice(courses: Sequence[Course], prior: Constants) -> tuple[Sequence[Course], _Objective, Values, Values]:
    """Fit, replay open loads under the fitted constants, since their batches depend on step times, and fit again."""
    objective, logs, jacobian = _fit(courses, prior)
    if any(course.point.load == "open" for course in courses):
        courses = _replayed(courses, objective.constants(logs))
        objective, logs, jacobian = _fit(courses, prior, logs)
    return courses, objective, logs, jacobian


def _replayed(courses: Sequence[Course], constants: Constants) -> list[Course]:
    """Return the courses, those of open loads recorded again under `constants`."""
    return [record([course.point], constants, None)[0] if course.point.load == "open" else course for course in courses]


def _fit(courses: Sequence[Course], prior: Constants, start: Values | None = None) -> tuple[_Objective, Values, Values]:
    from scipy.optimize import least_squares

    objective = _Objective(courses, prior)
    low, high = objective.bounds
    first = np.clip(objective.guess if start is None else start, low + 1e-6, high - 1e-6)
    found = least_squares(
        objective.residuals,
        first,
        jac=objective.jacobian,
        bounds=(low, high),
        max_nfev=ROUNDS,
        x_scale=objective.widths,
    )
    return objective, np.asarray(found.x, np.float64), np.asarray(found.jac, np.float64)


def errors_of(courses: Sequence[Course], constants: Constants) -> dict[str, Errors]:
    """Return the relative errors of predictions with constants, by metric, over all points that have it."""
    errors = _errors(courses, constants)
    return {metric: found for metric, each in errors.items() if (found := Errors.of(np.array(each))) is not None}


def _errors(courses: Sequence[Course], constants: Constants) -> dict[str, list[float]]:
    errors: dict[str, list[float]] = {}
    for course, predicted in zip(courses, _predictions(courses, constants), strict=True):
        for metric, measured in course.point.measured.items():
            errors.setdefault(metric, []).append(predicted[metric] / measured - 1.0)
    return errors


def _predictions(courses: Sequence[Course], constants: Constants) -> list[dict[str, float]]:
    """Return the predicted means of each course, by metric."""
    return [dict(zip(METRICS, row, strict=True)) for row in Pricing(courses).predicted(constants).tolist()]


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
    courses: Sequence[Course], prior: Constants, by: str, processes: Processes
) -> tuple[dict[str, Errors], dict[str, list[tuple[Course, float]]]]:
    """Fit to each half and predict the other. Return the errors by metric, and each error with its course.

    `processes`: those that fit.
    """
    half = halves_of([course.point for course in courses], by)
    found: dict[str, list[tuple[Course, float]]] = {}
    for errors in processes.all(_predicted_half, [(courses, prior, half, side) for side in (False, True)]):
        for place, metric, error in errors:
            found.setdefault(metric, []).append((courses[place], error))
    of_metrics = {name: Errors.of(np.array([error for _, error in each])) for name, each in found.items()}
    return {name: each for name, each in of_metrics.items() if each is not None}, found


def _predicted_half(
    _: object, task: tuple[Sequence[Course], Constants, list[bool], bool]
) -> list[tuple[int, str, float]]:
    """Fit to one half and predict the other; return the errors of its courses. Runs in other processes, too."""
    courses, prior, half, side = task
    fitted = [course for course, where in zip(courses, half, strict=True) if where == side]
    places = [place for place, where in enumerate(half) if where != side]
    _, objective, logs, _ = _fit_twice(fitted, prior)
    found_there = objective.constants(logs)
    others = _replayed([courses[place] for place in places], found_there)
    predictions = _predictions(others, found_there)
    return [
        (place, metric, predicted[metric] / measured - 1.0)
        for place, course, predicted in zip(places, others, predictions, strict=True)
        for metric, measured in course.point.measured.items()
    ]


def cell_of(course: Course) -> tuple[str, str, str, str]:
    """Return the vendor of a course's device, its kind of model, its load, and its number format."""
    load = "offline" if course.point.load == "batch" else course.point.load
    return course.cost.hardware.vendor, course.cost.kind, load, course.cost.weight_format


def held_out_of(found: Sequence[Mapping[str, Sequence[tuple[Course, float]]]]) -> list[HeldOut]:
    """Return held-out errors of TPOT (or else throughput, as time), TTFT and E2E, in cells of at least FEWEST points.

    A cell is a vendor of devices and a kind of model, and then a load and a number format (`CELL`). Its errors are
    those of split conformal prediction: of n errors, the share (n + 1) / n x 68.3 or 95.4 % is not larger.
    """
    cells: dict[tuple[Any, ...], list[float]] = {}
    for metric, names in (("tpot", ("tpot_ms", "tok_s_gpu")), ("ttft", ("ttft_ms",)), ("e2e", ("e2e_ms",))):
        for each in found:
            for measured, course, error in ((name, *pair) for name in names for pair in each.get(name, ())):
                if measured == "tok_s_gpu":
                    if "tpot_ms" in course.point.measured:
                        continue
                    error = 1.0 / (1.0 + error) - 1.0  # noqa: PLW2901
                vendor, *of = cell_of(course)
                for depth in range(1, len(CELL) + 1):
                    cell = (metric, vendor, *of[:depth], *[None] * (len(CELL) - depth))
                    cells.setdefault(cell, []).append(abs(error))
    rows = []
    for (metric, vendor, *of_cell), errors in sorted(cells.items(), key=lambda each: str(each[0])):
        num_points = len(errors) // len(found)
        if num_points < FEWEST:
            continue
        shares = [min(1.0, share * (1.0 + 1.0 / num_points)) for share in (0.5, 0.683, 0.954)]
        sizes = [round(float(size), 4) for size in np.quantile(errors, shares, method="higher")]
        values: dict[str, Any] = dict(zip(("median", "one_sigma", "two_sigma"), sizes, strict=True))
        cell_values: dict[str, Any] = dict(zip(CELL, of_cell, strict=True))
        rows.append(HeldOut(metric=metric, vendor=vendor, **cell_values, **values, num_points=num_points))
    return rows


class TableFit(msgspec.Struct, frozen=True):
    """Result of a fit to the `num_points` points of the table `name`. `held_out`: errors by field and metric.

    `left_out`: the number of points that were not used, by reason.
    """

    name: str
    num_points: int
    left_out: Mapping[str, int]
    found: PointsFit
    held_out: Mapping[str, Mapping[str, Errors]]
    constants: Constants

    def to_text(self) -> str:
        """Return the text that `kvarts calibrate --points` prints, with a line end."""
        left_out = "".join(f"; {count:,} left out: {reason}" for reason, count in self.left_out.items())
        lines = [
            f"{self.num_points:,} points{left_out}",
            f"  {'':<24}{'prior':>9}{'fitted':>9}{'±':>7}   worth, in nats",
        ]
        lines += [
            f"  {each.name:<24}{each.prior:>9.4g}{each.value:>9.4g}{each.deviation:>7.0%}{each.gain:>10,.1f}"
            for each in self.found.worth
        ]
        lines.append("  error                      median     p90    bias  points")
        lines += _errors_text("before", self.found.before)
        lines += _errors_text("after", self.found.after)
        for by, errors in self.held_out.items():
            lines += _errors_text(f"held out by {by}", errors)
        return "\n".join(lines) + "\n"

    def to_builtins(self) -> dict[str, Any]:
        """Return the fit, JSON-able."""
        return {
            "num_points": self.num_points,
            "left_out": dict(self.left_out),
            "constants": msgspec.to_builtins(self.found.worth),
            "before": msgspec.to_builtins(self.found.before),
            "after": msgspec.to_builtins(self.found.after),
            "held_out": {by: msgspec.to_builtins(errors) for by, errors in self.held_out.items()},
        }

    def to_toml(self) -> str:
        """Return the constants in the format of load_constants, to four digits."""
        of_constants: dict[str, Any] = {
            title: {key: float(f"{value:.4g}") for key, value in getattr(self.constants, title).items()}
            for title in ("values", "deviations")
        }
        if self.constants.measured:
            of_constants["measured"] = dict(self.constants.measured)
        of_rows = {
            title: [
                {
                    key: float(f"{value:.4g}") if isinstance(value, float) else value
                    for key, value in msgspec.to_builtins(row).items()
                }
                for row in rows
            ]
            for title, rows in (("scale", self.constants.scale), ("held_out", self.constants.held_out))
            if rows
        }
        head = f"Fitted by kvarts calibrate --points to {self.num_points:,} points of {self.name}."
        return toml_text([head], of_constants | of_rows)


def fit_table(
    path: Path | str,
    *,
    prior: Constants | None = None,
    hold_out: Sequence[str] = (),
    workers: int | None = 1,
    on_progress: Callable[[int], object] | None = None,
) -> TableFit:
    """Fit to the points at `path`, starting from `prior`; default: the built-in constants.

    `hold_out`: fields by which the points are also halved; each half is predicted from a fit to the other.
    `workers`: processes that replay and fit, with the same result; None: one per core, where that pays. `on_progress`
    receives the number of points replayed. Raise ConfigError without SciPy, for an unknown field, and for
    a point that cannot be replayed; MissingFileError and InputError for files.
    """
    for name in hold_out:
        if name not in HALVES:
            raise ConfigError(f"{name!r} is not one of {', '.join(HALVES)}", field="hold_out")
    path = Path(path)
    prior = prior or shipped_constants()
    points, left_out = usable(load_points(path))
    if not points:
        raise InputError("holds no point that can be compared", path=path, hint="; ".join(left_out))
    halves: dict[str, dict[str, Errors]] = {}
    held_out = []
    with Processes(workers) as processes:
        courses = record(points, prior, on_progress, processes)
        found = fit_points(courses, prior)
        for by in hold_out:
            halves[by], each = test_halves(courses, prior, by, processes)
            held_out.append(each)
    constants = msgspec.structs.replace(
        found.constants, held_out=held_out_of(held_out) if held_out else [], measured=_measured(points)
    )
    return TableFit(path.name, len(points), left_out, found, halves, constants)


def _measured(points: Sequence[Point]) -> dict[str, list[str]]:
    """Return the names of the models of `points`, by device; a model given as a file is named after it."""
    found: dict[str, set[str]] = {}
    for point in points:
        name = Path(point.model).stem if point.model.endswith(".json") else point.model
        found.setdefault(point.gpu, set()).add(name)
    return {device: sorted(found[device]) for device in sorted(found)}


def _errors_text(when: str, errors: Mapping[str, Errors]) -> list[str]:
    return [
        f"  {when:<18}{UNITS[metric]:<8}{each.median:>7.1%}{each.p90:>8.1%}{each.bias:>+8.1%}{each.num_points:>8,}"
        for metric, each in errors.items()
    ]

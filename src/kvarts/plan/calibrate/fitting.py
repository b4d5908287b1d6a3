"""Fits the coefficients of a roofline to measured runs, by replaying them.

All runs share the coefficients, but each has its own model, device and parallelism. The search maximises the posterior:
it minimises the squared residuals of every run, in standard deviations, plus the squared distances of the coefficients
from the prior, in standard deviations of the prior. Coefficients that the runs do not determine therefore stay at their
prior values. A replay takes a fraction of a second, and queues make the objective rough, so the search is direct:
points drawn from the prior (Sobol), rounds of linear fits around the best of them, and finally Nelder and Mead's
simplex. All of this works on logarithms. The result depends only on the input and the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.base.errors import ConfigError
from kvarts.base.processes import Processes
from kvarts.cost.roofline import RooflineCost
from kvarts.cost.roofline_settings import Constants, Uncertainty
from kvarts.plan.calibrate.coefficients import (
    at_limit,
    beyond_transfer,
    coefficients_text,
    cost_of,
    cost_toml,
    cost_values,
    finite,
    log_bounds,
    logs_of,
    names_of,
    needs_scipy,
    widths_of,
)
from kvarts.plan.calibrate.comparison import Comparison
from kvarts.plan.calibrate.run import CalibrationRun, FittedRun

__all__ = ["KNOWN", "Calibration", "OfRun", "Search", "calibrate_runs", "covariance_of", "most_replays"]

Values = npt.NDArray[np.float64]

NUM_SPREAD = 32
NUM_STARTS = 2
ROUNDS = 16
CLOUD = 3
"""Number of points of a round, per coefficient."""
WIDEST, NARROWEST = 0.6, 0.05
"""Largest distance of these points from the best one, as a share of the prior's standard deviation: in the first round,
and the lower limit in any round."""
EVALUATIONS = 120
"""Evaluations of the objective for each simplex."""
RESTARTS = (0.05, 0.02)
"""Widths of the simplices, in logarithms."""
SLOPE, LIKELY = 0.5, 2.0
"""The same for the points that measure the uncertainty; closer points would mistake roughness for information. LIKELY
is for the second measurement, in standard deviations of the posterior after the first."""
POINTS = 10
"""Number of points in each of these measurements, per coefficient."""
DEPENDENT = 2.0
"""Number of correlated statistics of one run that carry as much information as an independent one."""
OWN_PART = 2.0
"""Variance of a constant between models and devices of one engine, relative to that between engines. A fit to n of them
then moves a constant for others by n / (n + OWN_PART) of what it moves for these."""
KNOWN = 0.7
"""If the posterior keeps more than this share of the prior's standard deviation, the data do not identify a
coefficient."""


class OfRun(msgspec.Struct, frozen=True):
    """The errors of one run: `before`, under the initial coefficients, and `overall`, under the fitted ones.

    `fitted` compares the requests used in the fit; `held_out` the others, if any.
    """

    name: str
    cost: RooflineCost
    num_requests: int
    before: Comparison
    overall: Comparison
    fitted: Comparison
    held_out: Comparison | None


class Calibration(msgspec.Struct, frozen=True):
    """The fitted `cost`, for the model and device of the first run, and the errors of each run.

    `uncertainty`: relative standard deviation of each coefficient; `guessed`: that of its prior; `moves`: its distance
    from the prior, as a logarithm.
    """

    cost: RooflineCost
    uncertainty: dict[str, float]
    guessed: dict[str, float]
    runs: tuple[OfRun, ...]
    num_replays: int
    moves: dict[str, float] = {}

    @property
    def beyond_transfer(self) -> list[str]:
        """The coefficients that moved too far from the prior to be expected to hold for another model."""
        return beyond_transfer(self.moves, self.guessed)

    @property
    def not_identified(self) -> list[str]:
        """The coefficients that the data do not determine: close to their prior, and almost as uncertain."""
        return [name for name, share in self.uncertainty.items() if share > KNOWN * self.guessed[name]]

    @property
    def at_limit(self) -> list[str]:
        """The coefficients at the ends of their bounds, which a wider search might have moved further."""
        return at_limit(self.cost, self.uncertainty)

    @property
    def before(self) -> Comparison:
        """Comparison of the first run under the initial coefficients."""
        return self.runs[0].before

    @property
    def overall(self) -> Comparison:
        """Comparison of the first run under the fitted coefficients."""
        return self.runs[0].overall

    @property
    def fitted(self) -> Comparison:
        """Comparison of the first run's fitted requests."""
        return self.runs[0].fitted

    @property
    def held_out(self) -> Comparison | None:
        """Comparison of the first run's held-out requests."""
        return self.runs[0].held_out

    def to_text(self) -> str:
        """Return the text that `kvarts calibrate` prints: coefficients, and the errors of each run, with a line end."""
        why = "a guess, of which these data say little"
        parts = [coefficients_text(self.cost, self.uncertainty, self.not_identified, why, self.beyond_transfer)]
        for of in self.runs:
            named = f"{of.num_requests} requests" if len(self.runs) == 1 else f"{of.name}: {of.num_requests} requests"
            parts.append(f"before ({named})\n{of.before.to_text()}")
            parts.append(f"after ({named}, {self.num_replays:,} replays)\n{of.overall.to_text()}")
            if of.held_out is not None:
                num_fitted = of.fitted.num_requests
                parts.append(f"fitted to the first {num_fitted}\n{of.fitted.to_text()}")
                parts.append(f"held out ({of.num_requests - num_fitted})\n{of.held_out.to_text()}")
        return "\n".join(parts)

    def to_builtins(self) -> dict[str, Any]:
        """Return the calibration, JSON-able."""
        of_runs = [
            {
                "name": of.name,
                "cost": cost_values(of.cost),
                "before": of.before.to_builtins(),
                "after": of.overall.to_builtins(),
                "fitted": of.fitted.to_builtins(),
                "held_out": None if of.held_out is None else of.held_out.to_builtins(),
            }
            for of in self.runs
        ]
        return {
            "cost": cost_values(self.cost),
            "uncertainty": finite(self.uncertainty),
            "guessed": self.guessed,
            "not_identified": self.not_identified,
            "beyond_transfer": self.beyond_transfer,
            "at_limit": self.at_limit,
            "num_replays": self.num_replays,
            **{name: of_runs[0][name] for name in ("before", "after", "fitted", "held_out")},
            "runs": of_runs,
            "posterior": msgspec.to_builtins(self.cost.uncertainty),
        }

    def to_toml(self) -> str:
        """Return the cost model as a file of `kvarts replay --cost`; its posterior lets replays state uncertainties."""
        return cost_toml(self.cost, self.uncertainty, [of.name for of in self.runs])

    def __repr__(self) -> str:
        errors = [f"{of.name}: {of.overall.verdict.rstrip('.')}" for of in self.runs]
        return f"<Calibration of {self.cost.llm} on {self.cost.device}; {'; '.join(errors)}>"


def most_replays(num_runs: int, num_coefficients: int) -> int:
    """Return an upper bound on the number of replays of a calibration."""
    rounds = NUM_STARTS * (ROUNDS * (CLOUD * num_coefficients + 1) + 2) + 2 * POINTS * num_coefficients
    return num_runs * (NUM_SPREAD + 2 + rounds + (EVALUATIONS + 1) * len(RESTARTS) + 6)


def calibrate_runs(
    runs: Sequence[CalibrationRun],
    *,
    seed: int = 0,
    guesses: float = 1.0,
    prior: Constants | None = None,
    workers: int | None = 1,
    on_progress: Callable[[int], object] | None = None,
) -> Calibration:
    """Fit the coefficients that `runs` share. The search begins at those of their costs, which are the prior means.

    `guesses`: the weight of the prior; with 0, only the data count. `prior`: its standard deviations; default: those
    of the built-in constants. `workers`: processes that replay, with the same result; None: one per core, where that
    pays. Raise ConfigError without SciPy, for another cost model, or if a request does not fit in the pool.
    """
    needs_scipy()
    if not runs:
        raise ConfigError("names no run", field="runs")
    fitted = [FittedRun(run, on_progress) for run in runs]
    costs = [run.cost for run in runs]
    before = [each.compare(each.run.cost) for each in fitted]
    with Processes(workers, fitted) as processes:
        search = Search(fitted, names_of(costs), guesses, prior=prior, processes=processes)
        best = search.run(seed)
        covariance = search.covariance(best)
    measured_on = tuple(dict.fromkeys(cost.measured_on for cost in costs))
    carried = len(measured_on) / (len(measured_on) + OWN_PART)
    elsewhere = np.exp(search.guess + carried * (best - search.guess))
    uncertainty = Uncertainty(
        coefficients=search.names,
        covariance=tuple(map(tuple, covariance.tolist())),
        measured=measured_on,
        elsewhere=dict(zip(search.names, elsewhere.tolist(), strict=True)),
        deviations=dict(zip(search.names, (np.sqrt(1.0 - carried) * search.widths).tolist(), strict=True)),
    )
    of_runs = []
    for each, was in zip(fitted, before, strict=True):
        cost = cost_of(each.run.cost, best, search.names)
        fit_on, num_requests = each.run.fit_on, len(each.run.measured)
        overall = each.compare(cost)
        held_out = None if fit_on in (None, num_requests) else each.compare(cost, slice(fit_on, None))
        part = overall if held_out is None else each.compare(cost, slice(fit_on))
        of_runs.append(OfRun(each.run.name, cost, num_requests, was, overall, part, held_out))
    deviations = np.sqrt(np.diag(covariance))
    return Calibration(
        msgspec.structs.replace(of_runs[0].cost, uncertainty=uncertainty),
        dict(zip(search.names, map(float, deviations), strict=True)),
        dict(zip(search.names, map(float, search.widths), strict=True)),
        tuple(of_runs),
        sum(each.num_replays for each in fitted),
        dict(zip(search.names, map(float, best - search.guess), strict=True)),
    )


def _residuals(runs: Sequence[FittedRun], task: tuple[int, RooflineCost]) -> Values:
    """Return the residuals of a run under a cost. Runs in other processes, too."""
    place, cost = task
    return runs[place].residuals(cost)


class Search:
    """The objective, and the search for its minimum.

    `processes`: those that replay, which share `runs`; default: this one.
    """

    def __init__(
        self,
        runs: Sequence[FittedRun],
        names: tuple[str, ...],
        guesses: float,
        guess: Values | None = None,
        prior: Constants | None = None,
        processes: Processes | None = None,
    ) -> None:
        self._processes = Processes(shared=runs) if processes is None else processes
        self.names = names
        self.widths = widths_of(names, prior)
        self._runs = list(runs)
        self.guess = logs_of([each.run.cost for each in runs], names) if guess is None else guess
        self._weights = guesses / self.widths
        self._low, self._high = log_bounds(names)

    def run(self, seed: int) -> Values:
        """Return the logarithms of the likeliest coefficients."""
        from scipy.optimize import minimize
        from scipy.stats import norm, qmc

        drawn = norm.ppf(np.clip(qmc.Sobol(len(self.names), rng=seed).random(NUM_SPREAD), 1e-3, 1 - 1e-3))
        spread = [self._clip(self.guess + self.widths * point) for point in drawn]
        starts = [self.guess, *self._by_error(spread)[: NUM_STARTS - 1]]
        best = self._by_error([self._descend(start, seed) for start in starts])[0]
        box = list(zip(self._low, self._high, strict=True))
        for width in RESTARTS:
            simplex = np.array([best, *(best + width * step for step in np.eye(len(best)))])
            found = minimize(
                self.error,
                best,
                method="Nelder-Mead",
                bounds=box,
                options={
                    "maxfev": EVALUATIONS,
                    "initial_simplex": self._clip(simplex),
                    "xatol": 1e-4,
                    "fatol": 1e-6,
                },
            )
            best = found.x
        return np.asarray(best, np.float64)

    def residuals(self, logs: Values) -> Values:
        """Return the distances from the data and from the prior, in standard deviations."""
        return self._all_residuals([logs])[0]

    def _all_residuals(self, points: Sequence[Values]) -> list[Values]:
        tasks = [
            (place, cost_of(each.run.cost, logs, self.names))
            for logs in points
            for place, each in enumerate(self._runs)
        ]
        found = []
        for each, of_run in zip(self._runs * len(points), self._processes.in_order(_residuals, tasks), strict=True):
            each.count()
            found.append(of_run)
        num_runs = len(self._runs)
        return [
            np.concatenate([*found[place * num_runs : (place + 1) * num_runs], (logs - self.guess) * self._weights])
            for place, logs in enumerate(points)
        ]

    def _by_error(self, points: Sequence[Values]) -> list[Values]:
        errors = [float((residuals**2).sum()) for residuals in self._all_residuals(points)]
        return [points[place] for place in sorted(range(len(points)), key=errors.__getitem__)]

    def error(self, logs: Values) -> float:
        """Return the sum of the squared residuals."""
        return float((self.residuals(logs) ** 2).sum())

    def covariance(self, logs: Values) -> Values:
        """Return the covariance of the logarithms: Laplace's approximation at the best point."""
        return covariance_of(self.information(logs), self.widths)

    def information(self, logs: Values) -> Values:
        """Return the Fisher information at `logs`, in units of the prior: shape [coefficients, coefficients].

        Measured twice: with points spread as widely as the prior, then with points spread like the resulting posterior.
        """
        near = covariance_of(self._information(logs, SLOPE * np.diag(self.widths)), self.widths)
        return self._information(logs, LIKELY * np.asarray(np.linalg.cholesky(near), np.float64))

    def _information(self, logs: Values, axes: Values) -> Values:
        """Return the information from a linear fit of the residuals at points around `logs`, drawn along `axes`.

        Deviations of a statistic from the linear fit are roughness. They are treated as noise that the measurement has
        to the same extent and that statistics share. If the data are farther away than their standard deviations
        predict, these are scaled up to match.
        """
        points, residuals = self._cloud(logs, axes, POINTS * len(logs), 1)
        num_data = residuals.shape[1] - len(logs)
        slopes, _, rough = _linear(points - logs, residuals[:, :num_data])
        here = self.residuals(logs)[:num_data]
        roughness = rough.T @ rough / len(rough)
        noise = roughness + DEPENDENT * max(1.0, float((here**2).mean())) * np.eye(num_data)
        weights = np.linalg.inv(noise)
        # Slopes due to roughness alone would look like information: their expected share is subtracted.
        moves = points - points.mean(axis=0)
        spurious = float((weights * roughness).sum()) * np.linalg.inv(moves.T @ moves)
        scale = np.diag(self.widths)
        strengths, directions = np.linalg.eigh(scale @ (slopes @ weights @ slopes.T - spurious) @ scale)
        information: Values = (directions * np.maximum(strengths, 0.0)) @ directions.T  # information is never negative
        return information

    def _clip(self, logs: Values) -> Values:
        return np.clip(logs, self._low, self._high)

    def _cloud(self, logs: Values, axes: Values, count: int, seed: int) -> tuple[Values, Values]:
        """Return `count` points around `logs` and their residuals: shapes [count, coefficients], [count, residuals].

        `axes`: the largest distances, one column per direction.
        """
        from scipy.stats import qmc

        spread = 2.0 * qmc.LatinHypercube(len(logs), rng=seed).random(count) - 1.0
        points = logs + spread @ axes.T
        return points, np.array(self._all_residuals(list(points)))

    def _descend(self, logs: Values, seed: int) -> Values:
        """Return the end point of the rounds from `logs`.

        Each round fits residuals linearly at points around the best one, which smooths their roughness, and moves to
        the minimum of the fit. The spread of the points shrinks when a round gains nothing.
        """
        reach, least = WIDEST, self.error(logs)
        for number in range(ROUNDS):
            points, residuals = self._cloud(logs, reach * np.diag(self.widths), CLOUD * len(logs), seed + number)
            slopes, level, _ = _linear(points - logs, residuals)
            damped = slopes @ slopes.T + np.diag(1e-3 / self.widths**2)
            step = np.linalg.solve(damped, -slopes @ level)
            longest = float(np.abs(step / self.widths).max())
            step *= min(1.0, 2 * reach / max(longest, 1e-12))
            there = self._clip(logs + step)
            errors = [*(residuals**2).sum(axis=1), self.error(there)]
            candidates = [*map(self._clip, points), there]
            place = int(np.argmin(errors))
            if errors[place] < least and np.array_equal(candidates[place], [*points, there][place]):
                logs, least = candidates[place], float(errors[place])
            if place != len(errors) - 1 or errors[place] > least:
                reach = max(reach / 1.6, NARROWEST)
        return logs


def covariance_of(information: Values, widths: Values) -> Values:
    """Return the posterior covariance, given prior standard deviations `widths`."""
    covariance: Values = widths[:, None] * np.linalg.inv(np.eye(len(widths)) + information) * widths
    return (covariance + covariance.T) / 2


def _linear(moves: Values, residuals: Values) -> tuple[Values, Values, Values]:
    """Return the linear fit of residuals: slopes [coefficients, residuals], level [residuals], and what remains."""
    design = np.column_stack([moves, np.ones(len(moves))])
    plane = np.linalg.lstsq(design, residuals, rcond=None)[0]
    left: Values = (residuals - design @ plane) * np.sqrt(len(moves) / max(1, len(moves) - design.shape[1]))
    slopes, level = np.asarray(plane[:-1], np.float64), np.asarray(plane[-1], np.float64)
    return slopes, level, left

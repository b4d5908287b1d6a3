"""Fits the coefficients of a roofline to a measured run, by replaying it.

A replay takes a fraction of a second, so the search simply tries: points spread over the box of what is physically
plausible (Sobol), then Nelder and Mead's simplex from the best of them, in logarithms of the coefficients; a queue
makes the landscape rough, so it begins anew from where it ended, with ever smaller simplices. What is made small is the
root of the sum of squares of the relative errors of all statistics, and of a fifth of the distance of the KV curves,
which never gets small: a curve is sampled once a second.
Same input, same seed, same coefficients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.calibrate.comparison import METRICS, Comparison, Replayed, compare, latencies_ms, statistics
from kvarts.calibrate.measured import Measured
from kvarts.calibrate.series import Series
from kvarts.errors import ConfigError
from kvarts.executor.roofline import COEFFICIENTS, RooflineCost
from kvarts.replayer import ReplayConfig, Report, Trace, replay

__all__ = ["BOUNDS", "Calibration", "calibrate", "needs_scipy", "replayed"]

Values = npt.NDArray[np.float64]

BOUNDS: Mapping[str, tuple[float, float]] = {
    "compute_efficiency": (0.2, 1.0),
    "bandwidth_efficiency": (0.3, 1.0),
    "attention_efficiency": (0.1, 1.0),
    "step_us": (50.0, 20_000.0),
    "sequence_us": (0.5, 200.0),
}
NUM_SPREAD = 64
NUM_STARTS = 5
EVALUATIONS = 120
"""Of each simplex."""
RESTARTS = (0.1, 0.05, 0.025)
"""How wide the simplices are that go on from the best."""
CURVE_WEIGHT = 0.2
MOST_REPLAYS = 1 + NUM_SPREAD + 1 + EVALUATIONS * (NUM_STARTS + 2 * len(RESTARTS)) + 1 + 2 * len(COEFFICIENTS) + 3
NUDGE = 0.05
UNSURE = 0.2
"""A coefficient that the data leave uncertain by more than this share is not identified by them."""


class Calibration(msgspec.Struct, frozen=True):
    """The fitted `cost`, with what it leaves. `uncertainty`: of each coefficient, as a share of it, to first order.

    `fitted` compares the requests it was fitted to, `held_out` the others, if there are any, `before` all with the
    coefficients that the search began with, `overall` all with those it found.
    """

    cost: RooflineCost
    uncertainty: dict[str, float]
    before: Comparison
    overall: Comparison
    fitted: Comparison
    held_out: Comparison | None
    num_replays: int

    @property
    def not_identified(self) -> list[str]:
        """Coefficients that these data say little about."""
        return [name for name, share in self.uncertainty.items() if not share <= UNSURE]


def needs_scipy() -> None:
    """Raises ConfigError where SciPy, an extra, is not installed."""
    try:
        import scipy.optimize  # noqa: F401
    except ImportError:
        raise ConfigError("calibration needs SciPy", hint="Install it: pip install 'kvarts[calibrate]'.") from None


def replayed(report: Report) -> Replayed:
    """A report as a Comparison takes it."""
    rows, steps = report.requests, report.steps
    curve = Series(
        time_s=np.asarray(steps["start_ms"]) / 1e3,
        running=np.asarray(steps["running"], np.float64),
        waiting=np.asarray(steps["waiting"], np.float64),
        kv_pct=np.asarray(steps["used_pages"]) * (100.0 / report.config.num_pages),
    )
    return Replayed(
        np.asarray(rows["arrival_ms"]),
        np.asarray(rows["first_token_ms"]),
        np.asarray(rows["last_token_ms"]),
        np.asarray(rows["output_tokens"], np.int64),
        int(np.asarray(rows["preemptions"]).sum()),
        curve,
    )


def calibrate(
    measured: Measured,
    config: ReplayConfig,
    *,
    prompts: Trace | None = None,
    series: Series | None = None,
    fit_on: int | None = None,
    seed: int = 0,
    on_progress: Callable[[int], object] | None = None,
) -> Calibration:
    """Fits `config.cost`, a RooflineCost, to `measured`, from where it is.

    `prompts`: what the prompts hold, see Measured.trace. `fit_on`: fit to the first so many requests, and hold out the
    rest; all are replayed. Raises ConfigError without SciPy, for another cost model, or if a request does not fit.
    """
    needs_scipy()
    from scipy.optimize import minimize
    from scipy.stats import qmc

    start = config.cost
    if not isinstance(start, RooflineCost):
        raise ConfigError("only the roofline can be fitted", field="cost", hint="Give a model and a device.")
    if fit_on is not None and not 2 <= fit_on <= len(measured):
        raise ConfigError(f"must be from 2 to {len(measured)}, got {fit_on}", field="fit_on")
    some = slice(fit_on)
    trace = measured.trace(prompts)
    search = _Search(measured, trace, config, series, some, on_progress)
    low, high = (np.log([BOUNDS[name][side] for name in COEFFICIENTS]) for side in (0, 1))
    first = np.clip(np.log([getattr(start, name) for name in COEFFICIENTS]), low, high)
    before = search.compare(start)
    spread = qmc.scale(qmc.Sobol(len(COEFFICIENTS), rng=seed).random(NUM_SPREAD), low, high)
    starts = sorted([first, *spread], key=search.error)[:NUM_STARTS]
    box = list(zip(low, high, strict=True))

    def descend(point: Values, width: float) -> tuple[float, Values]:
        simplex = np.array([point, *(point + width * step for step in np.eye(len(point)))])
        found = minimize(
            search.error,
            point,
            method="Nelder-Mead",
            bounds=box,
            options={
                "maxfev": EVALUATIONS,
                "initial_simplex": np.clip(simplex, low, high),
                "xatol": 1e-4,
                "fatol": 1e-6,
            },
        )
        return float(found.fun), found.x

    _, best = min((descend(point, 0.2) for point in starts), key=lambda pair: pair[0])
    for width in RESTARTS:
        _, best = min((descend(best, sign * width) for sign in (1, -1)), key=lambda pair: pair[0])
    cost = search.cost(best)
    return Calibration(
        cost,
        search.uncertainty(best),
        before,
        search.compare(cost),
        search.compare(cost, some),
        None if fit_on is None or fit_on == len(measured) else search.compare(cost, slice(fit_on, None)),
        search.num_replays,
    )


class _Search:
    """Replays with other coefficients, and how far off each is."""

    def __init__(
        self,
        measured: Measured,
        trace: Trace,
        config: ReplayConfig,
        series: Series | None,
        some: slice,
        on_progress: Callable[[int], object] | None,
    ) -> None:
        self._measured, self._trace, self._config, self._series = measured, trace, config, series
        self._some, self._on_progress = some, on_progress
        latencies = latencies_ms(measured, some)
        self._aim = np.concatenate([statistics(latencies[metric]) for metric in METRICS])
        # A metric without a value (TPOT where nobody has two tokens) says nothing.
        self._counts = np.isfinite(self._aim) & (self._aim > 0)
        # The curve of the others is not to be fitted to.
        self._until_s = float(measured.arrival_ns[some][-1]) / 1e9
        self.num_replays = 0

    def cost(self, logs: Values) -> RooflineCost:
        values = dict(zip(COEFFICIENTS, map(float, np.exp(logs)), strict=True))
        cost: RooflineCost = msgspec.structs.replace(self._config.cost, **values)
        return cost

    def _replay(self, cost: RooflineCost) -> Replayed:
        self.num_replays += 1
        if self._on_progress is not None:
            self._on_progress(1)
        outcome = replayed(replay(self._trace, msgspec.structs.replace(self._config, cost=cost)))
        if np.isnan(outcome.last_token_ms).any():
            raise ConfigError(
                "is too small for some of the measured requests", field="pages", hint="Give what the engine had."
            )
        return outcome

    def compare(self, cost: RooflineCost, some: slice | None = None) -> Comparison:
        return compare(self._measured, self._replay(cost), self._series, some=some)

    def residuals(self, logs: Values) -> Values:
        """Relative errors of the statistics, and the weighted distance of the KV curves as a share of the pool."""
        ours = self._replay(self.cost(logs))
        latencies = latencies_ms(ours, self._some)
        values = np.concatenate([statistics(latencies[metric]) for metric in METRICS])
        errors: Values = (values[self._counts] - self._aim[self._counts]) / self._aim[self._counts]
        if self._series is None or ours.curve is None:
            return errors
        near = self._series.time_s <= self._until_s
        at = np.searchsorted(ours.curve.time_s, self._series.time_s[near], side="right") - 1
        used = np.where(at >= 0, ours.curve.kv_pct[np.maximum(at, 0)], 0.0)
        distance = np.abs(used - self._series.kv_pct[near]).mean() / 100 if near.any() else 0.0
        return np.append(errors, CURVE_WEIGHT * distance)

    def error(self, logs: Values) -> float:
        return float(np.sqrt((self.residuals(logs) ** 2).sum()))

    def uncertainty(self, logs: Values) -> dict[str, float]:
        """Of least squares, to first order: how far each coefficient could go before the residuals would notice."""
        residuals = self.residuals(logs)
        columns = []
        for index in range(len(logs)):
            step = np.zeros(len(logs))
            step[index] = NUDGE
            columns.append((self.residuals(logs + step) - self.residuals(logs - step)) / (2 * NUDGE))
        jacobian = np.array(columns).T
        scale = np.sqrt((residuals**2).sum() / max(1, len(residuals) - len(logs)))
        covariance = np.linalg.pinv(jacobian.T @ jacobian, rcond=1e-10)
        errors = scale * np.sqrt(np.diag(covariance))
        # A coefficient that changes nothing has no error either; it is not known at all.
        unfelt = np.abs(jacobian).max(axis=0) < 1e-9
        return {
            name: float("inf") if blind else float(error)
            for name, error, blind in zip(COEFFICIENTS, errors, unfelt, strict=True)
        }

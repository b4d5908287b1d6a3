"""Fits the coefficients of a roofline to a measured run, by replaying it.

A replay takes a fraction of a second, so the search is direct. It evaluates points spread over the box of physically
plausible values (Sobol), then runs Nelder and Mead's simplex from the best of them, in logarithms of the coefficients.
Queues make the objective rough, so the simplex restarts from where it ended, each time with a smaller one. The
objective is the root of the sum of squares of the relative errors of all statistics and of a fifth of the distance of
the KV curves. The curves have a small weight because their distance never gets small: a curve is sampled once a second.
Same input, same seed, same coefficients.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.calibrate.coefficients import cost_of, log_bounds, logs_of, needs_scipy, not_identified, uncertainty_of
from kvarts.calibrate.comparison import METRICS, Comparison, compare, latencies_ms, statistics
from kvarts.calibrate.measured import Measured
from kvarts.calibrate.replayed import Replayed, replayed_of
from kvarts.calibrate.series import Series
from kvarts.errors import ConfigError
from kvarts.executor.roofline import COEFFICIENTS, RooflineCost
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replay import replay
from kvarts.traffic.trace import Trace

__all__ = ["MOST_REPLAYS", "Calibration", "calibrate"]

Values = npt.NDArray[np.float64]

NUM_SPREAD = 64
NUM_STARTS = 5
EVALUATIONS = 120
"""Evaluations of the objective for each simplex."""
RESTARTS = (0.1, 0.05, 0.025)
"""Widths of the simplices that restart from the best point, in logarithms."""
CURVE_WEIGHT = 0.2
MOST_REPLAYS = 1 + NUM_SPREAD + 1 + EVALUATIONS * (NUM_STARTS + 2 * len(RESTARTS)) + 1 + 2 * len(COEFFICIENTS) + 3
NUDGE = 0.05


class Calibration(msgspec.Struct, frozen=True):
    """The fitted `cost` and its errors. `uncertainty`: of each coefficient, as a share of it, to first order.

    `fitted` compares the requests that were fitted, `held_out` the others, if there are any. `before` compares all
    requests under the coefficients that the search began with, `overall` under those that it found.
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
        """The coefficients that the data do not identify."""
        return not_identified(self.uncertainty)


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
    """Fit `config.cost`, a RooflineCost, to `measured`; the search begins at its coefficients.

    `prompts`: the content of the prompts, as for Measured.trace. `fit_on`: fit to the first `fit_on` requests and hold
    out the rest; all are replayed. Raise ConfigError without SciPy, for another cost model, or if a request does not
    fit in the pool.
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
    low, high = log_bounds()
    before = search.compare(start)
    spread = qmc.scale(qmc.Sobol(len(COEFFICIENTS), rng=seed).random(NUM_SPREAD), low, high)
    starts = sorted([logs_of(start), *spread], key=search.error)[:NUM_STARTS]
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
    cost = cost_of(start, best)
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
    """Replays with other coefficients and measures the error of each."""

    def __init__(
        self,
        measured: Measured,
        trace: Trace,
        config: ReplayConfig,
        series: Series | None,
        some: slice,
        on_progress: Callable[[int], object] | None,
    ) -> None:
        self._measured, self._trace, self._config = measured, trace, config
        # The curve over the held-out requests must not be fitted.
        self._all_series = series
        self._series = None if series is None else series.until(float(measured.arrival_ns[some][-1]) / 1e9)
        self._some, self._on_progress = some, on_progress
        latencies = latencies_ms(measured, some)
        self._aim = np.concatenate([statistics(latencies[metric]) for metric in METRICS])
        # A metric without a value (TPOT if no request has two tokens) says nothing.
        self._counts = np.isfinite(self._aim) & (self._aim > 0)
        self.num_replays = 0

    def _replay(self, cost: RooflineCost) -> Replayed:
        self.num_replays += 1
        if self._on_progress is not None:
            self._on_progress(1)
        outcome = replayed_of(replay(self._trace, msgspec.structs.replace(self._config, cost=cost)))
        if np.isnan(outcome.last_token_ms).any():
            raise ConfigError(
                "is too small for some of the measured requests", field="pages", hint="Give what the engine had."
            )
        return outcome

    def compare(self, cost: RooflineCost, some: slice | None = None) -> Comparison:
        return compare(self._measured, self._replay(cost), self._all_series, some=some)

    def residuals(self, logs: Values) -> Values:
        """Return relative errors of the statistics and the weighted distance of the KV curves, a share of the pool."""
        ours = self._replay(cost_of(self._config.cost, logs))
        latencies = latencies_ms(ours, self._some)
        values = np.concatenate([statistics(latencies[metric]) for metric in METRICS])
        errors: Values = (values[self._counts] - self._aim[self._counts]) / self._aim[self._counts]
        if self._series is None or ours.curve is None:
            return errors
        return np.append(errors, CURVE_WEIGHT / 100 * self._series.kv_distance(ours.curve))

    def error(self, logs: Values) -> float:
        return float(np.sqrt((self.residuals(logs) ** 2).sum()))

    def uncertainty(self, logs: Values) -> dict[str, float]:
        """Return the uncertainty of each coefficient at `logs`, as a share of it."""
        columns = [
            (self.residuals(logs + step) - self.residuals(logs - step)) / (2 * NUDGE)
            for step in NUDGE * np.eye(len(logs))
        ]
        return uncertainty_of(self.residuals(logs), np.array(columns).T)

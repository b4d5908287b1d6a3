"""Fits the coefficients of a roofline to a measured run, by replaying it.

A replay takes a fraction of a second, so the search simply tries: points spread over the box of what is physically
plausible (Sobol), then Nelder and Mead's simplex from the best of them, in logarithms of the coefficients; a queue
makes the landscape rough, so it begins anew from where it ended, with ever smaller simplices. What is made small is the
root of the sum of squares of the relative errors of all statistics, and of a fifth of the distance of the KV curves,
which never gets small: a curve is sampled once a second.
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
"""Of each simplex."""
RESTARTS = (0.1, 0.05, 0.025)
"""How wide the simplices are that go on from the best."""
CURVE_WEIGHT = 0.2
MOST_REPLAYS = 1 + NUM_SPREAD + 1 + EVALUATIONS * (NUM_STARTS + 2 * len(RESTARTS)) + 1 + 2 * len(COEFFICIENTS) + 3
NUDGE = 0.05


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
        self._measured, self._trace, self._config = measured, trace, config
        # The curve of those that are held out is not to be fitted to.
        self._all_series = series
        self._series = None if series is None else series.until(float(measured.arrival_ns[some][-1]) / 1e9)
        self._some, self._on_progress = some, on_progress
        latencies = latencies_ms(measured, some)
        self._aim = np.concatenate([statistics(latencies[metric]) for metric in METRICS])
        # A metric without a value (TPOT where nobody has two tokens) says nothing.
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
        """Relative errors of the statistics, and the weighted distance of the KV curves as a share of the pool."""
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
        """See uncertainty_of."""
        columns = [
            (self.residuals(logs + step) - self.residuals(logs - step)) / (2 * NUDGE)
            for step in NUDGE * np.eye(len(logs))
        ]
        return uncertainty_of(self.residuals(logs), np.array(columns).T)

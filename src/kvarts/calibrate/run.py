"""A measured run during a fit: the measurement, its engine, and the residuals of a replay under a given cost."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.calibrate.comparison import METRICS, Comparison, compare, latencies_ms
from kvarts.calibrate.measured import Measured
from kvarts.calibrate.replayed import Replayed, replayed_of
from kvarts.calibrate.series import Series
from kvarts.errors import ConfigError
from kvarts.executor.roofline import RooflineCost
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replay import replay
from kvarts.traffic.trace import Trace

BANDS = ((0.4, 0.6), (0.85, 0.95), (0.97, 1.0))
"""Ranges of rank, as shares. The mean of a range is used instead of a percentile, since a single request is noisy."""

__all__ = ["CalibrationRun", "FittedRun"]

Values = npt.NDArray[np.float64]

SIGMA = 0.01
"""Relative standard deviation of a replayed statistic from the measured one under the right coefficients."""
PART_SIGMA = 0.03
NUM_PARTS = 6
LEAST_OF_PART = 4
"""The mean of a metric in each sixth of the requests is compared too: the first requests wait less, and the last ones
decode in smaller batches. A part has at least this many requests."""
PART_SCALE = 0.25
"""A part with a mean below this share of the overall mean is compared relative to that share."""
CURVE_SIGMA_POINTS = 5.0
"""The same for the mean difference of the curves of KV use, which stays large, as curves are sampled once a second."""


class CalibrationRun(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement, and the engine it was made on: `config` has a RooflineCost.

    `prompts`: the content of the prompts, as for Measured.trace. `fit_on`: only the first `fit_on` requests count,
    though all are replayed.
    """

    measured: Measured
    config: ReplayConfig
    prompts: Trace | None = None
    series: Series | None = None
    fit_on: int | None = None
    name: str = ""

    @property
    def cost(self) -> RooflineCost:
        """The cost model at which the fit begins."""
        cost: RooflineCost = self.config.cost
        return cost


class FittedRun:
    """Replays of one run. Owner of their count."""

    def __init__(self, run: CalibrationRun, on_progress: Callable[[int], object] | None) -> None:
        if not isinstance(run.config.cost, RooflineCost):
            raise ConfigError("only the roofline can be fitted", field="cost", hint="Give a model and a device.")
        measured, fit_on = run.measured, run.fit_on
        if fit_on is not None and not 2 <= fit_on <= len(measured):
            raise ConfigError(f"must be from 2 to {len(measured)}, got {fit_on}", field="fit_on")
        self.run = run
        self._trace = measured.trace(run.prompts)
        self._on_progress = on_progress
        self._some = slice(fit_on)
        self._theirs = latencies_ms(measured, self._some)
        self._aim = _levels(self._theirs)
        # A metric without a value (TPOT if no request has two tokens) is left out.
        self._counts = np.isfinite(self._aim) & (self._aim > 0)
        self._series = run.series
        if run.series is not None and fit_on is not None:
            # The curve over the held-out requests must not be fitted.
            self._series = run.series.until(float(measured.arrival_ns[:fit_on][-1]) / 1e9)
        self.num_replays = 0

    def _replay(self, cost: RooflineCost) -> Replayed:
        self.num_replays += 1
        if self._on_progress is not None:
            self._on_progress(1)
        outcome = replayed_of(replay(self._trace, msgspec.structs.replace(self.run.config, cost=cost)))
        if np.isnan(outcome.last_token_ms).any():
            raise ConfigError(
                "is too small for some of the measured requests", field="pages", hint="Give the engine's value."
            )
        return outcome

    def compare(self, cost: RooflineCost, some: slice | None = None) -> Comparison:
        """Compare a replay under `cost` with the measurement."""
        return compare(self.run.measured, self._replay(cost), self.run.series, some=some)

    def residuals(self, cost: RooflineCost) -> Values:
        """Return the differences between a replay under `cost` and the measurement, in standard deviations."""
        replayed = self._replay(cost)
        ours = latencies_ms(replayed, self._some)
        values = _levels(ours)
        errors = [(values[self._counts] / self._aim[self._counts] - 1.0) / SIGMA]
        for metric in METRICS:
            theirs = self._theirs[metric]
            parts = min(NUM_PARTS, len(theirs) // LEAST_OF_PART)
            if parts < 2 or not theirs.mean() > 0:
                continue
            scale = PART_SCALE * theirs.mean()
            pairs = zip(np.array_split(theirs, parts), np.array_split(ours[metric], parts), strict=True)
            errors.append(np.array([(b.mean() - a.mean()) / max(a.mean(), scale) for a, b in pairs]) / PART_SIGMA)
        if self._series is not None and replayed.curve is not None:
            distance = self._series.kv_distance(replayed.curve)
            if distance is not None:
                errors.append(np.array([distance / CURVE_SIGMA_POINTS]))
        return np.concatenate(errors)


def _levels(latencies: dict[str, Values]) -> Values:
    """Return, per metric, the mean of all requests and of each of BANDS; NaN without values."""
    levels: list[float] = []
    for metric in METRICS:
        values = np.sort(latencies[metric])
        count = len(values)
        if not count:
            levels += [float("nan")] * (1 + len(BANDS))
            continue
        levels.append(float(values.mean()))
        for low, high in BANDS:
            first = min(int(low * count), count - 1)
            levels.append(float(values[first : max(first + 1, int(np.ceil(high * count)))].mean()))
    return np.array(levels)

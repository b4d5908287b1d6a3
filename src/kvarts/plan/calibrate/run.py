"""A measured run during a fit: the measurement, its engine, and the residuals of a replay under a given cost.

Runs are loaded from files of measurements, or from .toml files that also give the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.base.errors import ConfigError, InputError
from kvarts.base.files import PREFIX, read_toml
from kvarts.base.settings import Given, given_in
from kvarts.cost.roofline import RooflineCost
from kvarts.plan.calibrate.comparison import METRICS, Comparison, Replayed, compare, latencies_ms, replayed_of
from kvarts.plan.calibrate.recorded_run import Measured, Series, load_measured, load_series
from kvarts.sim.config import SECTIONS, ReplayConfig, resolve_replay
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.mooncake import load_mooncake
from kvarts.sim.traffic.trace import Trace

__all__ = ["CalibrationRun", "FittedRun", "RunOptions", "load_runs"]

BANDS = ((0.4, 0.6), (0.85, 0.95), (0.97, 1.0))
"""Ranges of rank, as shares. The mean of a range is used instead of a percentile, since a single request is noisy."""


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
FILES = ("measured", "prompts", "series")
OF_RUN = (*FILES, "trace_block_size", "time_unit", "columns", "fit_on")
"""Keys of a run's .toml other than the settings of a replay."""


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

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, in which replays are not reported."""
        return {**vars(self), "_on_progress": None}

    def count(self) -> None:
        """Count a replay."""
        self.num_replays += 1
        if self._on_progress is not None:
            self._on_progress(1)

    def _replay(self, cost: RooflineCost) -> Replayed:
        outcome = replayed_of(replay(self._trace, msgspec.structs.replace(self.run.config, cost=cost)))
        if np.isnan(outcome.last_token_ms).any():
            raise ConfigError(
                "is too small for some of the measured requests", field="pages", hint="Give the engine's value."
            )
        return outcome

    def compare(self, cost: RooflineCost, some: slice | None = None) -> Comparison:
        """Compare a replay under `cost` with the measurement."""
        self.count()
        return compare(self.run.measured, self._replay(cost), self.run.series, some=some)

    def residuals(self, cost: RooflineCost) -> Values:
        """Return the differences between a replay under `cost` and the measurement, in standard deviations.

        The caller counts the replay, which may be in another process.
        """
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


class RunOptions(NamedTuple):
    """How to read the files of a run: the arguments of `kvarts.calibrate`."""

    prompts: Path | None
    trace_block_size: int
    series: Path | None
    columns: Mapping[str, str] | None
    time_unit: str
    fit_on: int | None


def load_runs(paths: Sequence[Path], given: Given, options: RunOptions) -> list[CalibrationRun]:
    """Load the runs at `paths`. `given` and `options` apply where a run's .toml sets nothing.

    Raise ConfigError if the model or the device is missing, or if prompts or a series are given for several runs;
    MissingFileError and InputError for files.
    """
    if len(paths) > 1:
        for field, value in (("prompts", options.prompts), ("series", options.series), ("fit_on", options.fit_on)):
            if value is not None:
                raise ConfigError("is of one run, and there are several", field=field, hint="Give it in a RUN.toml.")
    return [_load(path, given, options) for path in paths]


def _load(path: Path, given: Given, options: RunOptions) -> CalibrationRun:
    measured_path = path
    if path.suffix == ".toml":
        measured_path, given, options = _described(path, given, options)
    config = resolve_replay(given, counts_groups=False)
    if not isinstance(config.cost, RooflineCost):
        raise ConfigError(
            "model and device are missing",
            path=path if path.suffix == ".toml" else None,
            hint="Name the measured model and device: --model NAME --device NAME, or these keys in a RUN.toml.",
        )
    measured = load_measured(measured_path, columns=options.columns, time_unit=options.time_unit)
    block = options.trace_block_size
    return CalibrationRun(
        measured=measured,
        config=config,
        prompts=None if options.prompts is None else load_mooncake(options.prompts, trace_block_size=block),
        series=None if options.series is None else load_series(options.series),
        fit_on=options.fit_on,
        name=path.name,
    )


def _described(path: Path, given: Given, options: RunOptions) -> tuple[Path, Given, RunOptions]:
    """Return the settings of a run: the .toml's where present, else those of the command line."""
    values = read_toml(path, hint="Check the path of the run.")
    own = {name: values.pop(name) for name in OF_RUN if name in values}
    if "measured" not in own:
        raise InputError("is missing", path=path, field="measured", hint="It is the file with the measured requests.")
    kinds: dict[str, type] = dict.fromkeys(("trace_block_size", "fit_on"), int)
    kinds["columns"] = dict
    for name, value in own.items():
        kind = kinds.get(name, str)
        is_low = isinstance(value, int) and value < 1
        if not isinstance(value, kind) or isinstance(value, bool) or value == "" or is_low:
            raise InputError(f"{value!r} is no {name}", path=path, field=name)
    files: dict[str, Any] = {name: _beside(path, own.pop(name)) for name in FILES if name in own}
    measured = files.pop("measured")
    if columns := own.get("columns"):
        for name, value in columns.items():
            if not isinstance(value, str):
                raise InputError(f"{value!r} is not a name", path=path, field=f"columns.{name}")
    of_run = given_in(values, SECTIONS, path)
    return measured, of_run.over(given), options._replace(**files, **own)


def _beside(path: Path, file: str) -> Path:
    """Return the path of a file named in `path`: relative to it, unless it is a sample's name."""
    return Path(file) if file.startswith(PREFIX) else path.parent / file

"""`kvarts.calibrate`: fits a cost model to measurements, from files or from values in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import overload

from msgspec.structs import replace

from kvarts.base.errors import ConfigError
from kvarts.base.files import located
from kvarts.base.limits import MOST_COUNT, check_whole
from kvarts.base.settings import Given
from kvarts.cost.roofline import RooflineCost
from kvarts.cost.roofline_settings import Constants, load_constants
from kvarts.plan.calibrate.fitting import Calibration, calibrate_runs
from kvarts.plan.calibrate.recorded_run import Measured, Series, load_measured, load_series
from kvarts.plan.calibrate.run import CalibrationRun, RunOptions, load_runs
from kvarts.plan.calibrate.schedule import with_constants
from kvarts.plan.calibrate.stepfit import (
    StepFit,
    fit_steps,
    is_iteration_log,
    is_step_record,
    load_iterations,
    load_steps,
)
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replay import Traffic
from kvarts.sim.traffic.mooncake import load_mooncake
from kvarts.sim.traffic.trace import Trace
from kvarts.sim.traffic.workload import Workload

__all__ = ["fit", "is_of_steps"]

File = Path | str


def is_of_steps(path: File) -> bool:
    """Return whether a file contains steps rather than requests: a record of steps, or the log of a server."""
    return is_step_record(path) or is_iteration_log(path)


@overload
def fit(
    runs: Measured | CalibrationRun | Sequence[File | CalibrationRun],
    config: ReplayConfig | None = None,
    *,
    prompts: Traffic | None = None,
    series: File | Series | None = None,
    trace_block_size: int = 512,
    fit_on: int | None = None,
    seed: int = 0,
    prior: File | Constants | None = None,
    workers: int | None = 1,
    on_progress: Callable[[int], object] | None = None,
) -> Calibration: ...


@overload
def fit(
    runs: File,
    config: ReplayConfig | None = None,
    *,
    prompts: Traffic | None = None,
    series: File | Series | None = None,
    trace_block_size: int = 512,
    fit_on: int | None = None,
    seed: int = 0,
    prior: File | Constants | None = None,
    workers: int | None = 1,
    on_progress: Callable[[int], object] | None = None,
) -> Calibration | StepFit: ...


def fit(
    runs: File | Measured | CalibrationRun | Sequence[File | CalibrationRun],
    config: ReplayConfig | None = None,
    *,
    prompts: Traffic | None = None,
    series: File | Series | None = None,
    trace_block_size: int = 512,
    fit_on: int | None = None,
    seed: int = 0,
    prior: File | Constants | None = None,
    workers: int | None = 1,
    on_progress: Callable[[int], object] | None = None,
) -> Calibration | StepFit:
    """Fit the coefficients of a roofline to measured runs, by replaying them some thousand times.

    `runs`: one or several. A file of requests or of steps, as `kvarts calibrate` reads it, was measured on the engine
    that `config` describes: `ReplayConfig.for_device(model, device, ...)`. A .toml gives its own file and engine, and a
    MeasuredRun contains both. A file of steps is fitted without replays and returns a StepFit.

    For a single run: `prompts` gives the prefixes that its prompts share; `series` its KV use over time; with `fit_on`,
    the fit uses the first `fit_on` requests and is tested on the others. `trace_block_size`: how to read prompts; for
    measured times in other columns or units, give what `load_measured` returns. `prior`: initial constants with their
    uncertainty, instead of the built-in ones. `workers`: processes that replay, with the same result; more than one
    requires a script that can be imported; None: one per core, where that pays. `on_progress` receives the number of
    replays made. The result depends only on the input and `seed`.

    Raise ConfigError without SciPy, for incompatible arguments, for a cost model other than a roofline, and for a pool
    that is too small for a measured request; MissingFileError and InputError for files.
    """
    check_whole(seed, "seed", least=0, most=MOST_COUNT)
    if fit_on is not None:
        check_whole(fit_on, "fit_on")
    if isinstance(runs, Path | str) and Path(runs).suffix != ".toml" and is_of_steps(located(runs)):
        of_requests = {"prompts": prompts, "series": series, "fit_on": fit_on, "prior": prior}
        for field, value in of_requests.items():
            if value is not None:
                raise ConfigError("is for a run of requests, and this is one of steps", field=field, hint="Omit it.")
        return _fit_steps(located(runs), config)
    several = [runs] if isinstance(runs, Path | str | Measured | CalibrationRun) else list(runs)
    options = RunOptions(None, trace_block_size, None, None, "s", None)
    loaded = [_run(run, config, options) for run in several]
    of_one = {
        "prompts": None if prompts is None else _prompts(prompts, trace_block_size),
        "series": load_series(series) if isinstance(series, Path | str) else series,
        "fit_on": fit_on,
    }
    changes = {field: value for field, value in of_one.items() if value is not None}
    if changes:
        if len(loaded) != 1:
            hint = "Give a MeasuredRun for each, with its own."
            raise ConfigError(f"is of one run, and there are {len(loaded)}", field=next(iter(changes)), hint=hint)
        loaded = [replace(loaded[0], **changes)]
    if isinstance(prior, Path | str):
        prior = load_constants(Path(prior))
    if prior is not None:
        loaded = [
            replace(run, config=replace(run.config, cost=with_constants(run.cost, prior, run.config.engine)))
            for run in loaded
        ]
    return calibrate_runs(loaded, seed=seed, prior=prior, workers=workers, on_progress=on_progress)


def _run(run: File | Measured | CalibrationRun, config: ReplayConfig | None, options: RunOptions) -> CalibrationRun:
    """Return a run together with the engine it was measured on."""
    if isinstance(run, CalibrationRun):
        return run
    if isinstance(run, Path | str) and Path(run).suffix == ".toml":
        if config is not None:
            raise ConfigError(f"is in {run} already", field="config", hint="Leave it out, or give the measured file.")
        return load_runs([Path(run)], Given(), options)[0]
    if config is None:
        raise ConfigError(
            "is missing: the device on which the run was measured",
            field="config",
            hint="Give ReplayConfig.for_device(...).",
        )
    if not isinstance(run, Measured):
        run = load_measured(run, columns=options.columns, time_unit=options.time_unit)
    if not isinstance(config.cost, RooflineCost):
        raise ConfigError("only the roofline can be fitted", field="cost", hint="Give a model and a device.")
    return CalibrationRun(measured=run, config=config, name=run.name)


def _prompts(prompts: Traffic, trace_block_size: int) -> Trace:
    if isinstance(prompts, Workload):
        return prompts.trace()
    return prompts if isinstance(prompts, Trace) else load_mooncake(prompts, trace_block_size=trace_block_size)


def _fit_steps(path: Path, config: ReplayConfig | None) -> StepFit:
    cost = None if config is None else config.cost
    if not isinstance(cost, RooflineCost):
        raise ConfigError("model and device are missing", field="config", hint="Give ReplayConfig.for_device(...).")
    if is_step_record(path):
        return replace(fit_steps(load_steps(path), cost), name=path.name)
    log = load_iterations(path)
    return replace(fit_steps(log.steps, cost), name=path.name, left_out=log.left_out)

"""Loads the runs that a cost model is fitted to: files of measurements, or .toml files that also give the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvarts.calibrate.measured import load_measured
from kvarts.calibrate.run import CalibrationRun
from kvarts.calibrate.series import load_series
from kvarts.errors import ConfigError, InputError
from kvarts.executor.roofline import RooflineCost
from kvarts.files import read_toml
from kvarts.samples import PREFIX
from kvarts.settings import Given, given_in
from kvarts.sim.config import SECTIONS, resolve_replay
from kvarts.traffic.mooncake import load_mooncake

__all__ = ["RunOptions", "load_runs"]

FILES = ("measured", "prompts", "series")
OF_RUN = (*FILES, "trace_block_size", "time_unit", "columns", "fit_on")
"""Keys of a run's .toml other than the settings of a replay."""


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

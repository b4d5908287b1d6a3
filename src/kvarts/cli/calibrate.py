"""`kvarts calibrate` fits a cost model to a measured run; `kvarts compare` compares a replay with one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvarts.base.errors import ConfigError
from kvarts.base.files import check_writable, is_standard_output, write_whole
from kvarts.base.limits import MOST_COUNT, check_whole
from kvarts.base.settings import Given, given_by_flags, given_in
from kvarts.cli.options import INPUT, OUTPUT, Command, key_option, open_option, options_of
from kvarts.cli.outputs import check_opening, open_page
from kvarts.cli.process import Progress, print_json
from kvarts.sim.config import SECTIONS, resolve_replay

if TYPE_CHECKING:
    from kvarts.plan.calibrate.fitting import Calibration
    from kvarts.plan.calibrate.joint_fit import TableFit
    from kvarts.plan.calibrate.recorded_run import Measured
    from kvarts.plan.calibrate.run import CalibrationRun, RunOptions
    from kvarts.plan.calibrate.stepfit import StepFit

__all__ = ["calibrate_command", "compare_command"]


RUNS = click.Argument(["runs"], type=INPUT, nargs=-1, metavar="[RUN]...")
KEYS = (
    "model",
    "device",
    "tensor_parallel",
    "data_parallel",
    "expert_parallel",
    "pipeline_parallel",
    "weight_dtype",
    "kv_dtype",
    "cost",
    "pages",
    "memory_fraction",
    "page_size",
    "max_batched_tokens",
    "max_seqs",
    "replicas",
    "router",
)
"""Settings of a replay that describe the measured engine."""
SHOWN = ("model", "device", "tensor_parallel", "cost", "pages", "max_batched_tokens")
"""Those with an option of their own."""


@click.command("calibrate", cls=Command, params=[RUNS, *options_of(SECTIONS, KEYS, SHOWN)])
@click.option("--prompts", metavar="FILE", type=INPUT,
              help="Mooncake trace of the same requests in the same order: which share prefixes.")  # fmt: skip
@key_option("--trace-block-size", metavar="TOKENS", type=click.IntRange(min=1), default=512, show_default=True,
              help="Tokens that a hash id of it stands for.")  # fmt: skip
@click.option("--series", metavar="FILE", type=INPUT,
              help="CSV of t, running, waiting and kv_cache_pct, second by second.")  # fmt: skip
@key_option("--column", "columns", metavar="FIELD=NAME", multiple=True,
              help="The name in the run of request_id, arrival, scheduled, first_token, last_token, prompt_tokens or "
                   "output_tokens. May be repeated.")  # fmt: skip
@key_option("--time-unit", metavar="UNIT", default="s", show_default=True, help="s, ms, us or ns.")
@key_option("--fit-on", metavar="N", type=int, help="Fit to the first N requests, and hold out the rest.")
@key_option(
    "--seed",
    metavar="N",
    type=int,
    default=0,
    show_default=True,
    help="Seed of the points that the search tries first.",
)
@click.option("--points", metavar="FILE", type=INPUT,
              help="Instead of a RUN: a table of measured points, of any models and devices, one line per load. Fits "
              "the constants that all rooflines share.")  # fmt: skip
@key_option("--prior", metavar="FILE", type=INPUT,
              help="Constants to begin from, and how sure they are: a file that --points wrote. "
              "[those that ship]")  # fmt: skip
@key_option("--hold-out", metavar="FIELDS",
              help="For --points: also fit to one half and test on the other, both ways, by source, gpu and model, or "
              "some of them: source,gpu.")  # fmt: skip
@click.option("--design", "asks_design", is_flag=True,
              help="Without a RUN: propose the shortest benchmarks that would identify the coefficients of the engine "
              "that options describe.")  # fmt: skip
@key_option("--workers", metavar="N", type=click.IntRange(min=1),
              help="Processes that replay. [as many as there are cores, if the fit takes longer than a "
              "second]")  # fmt: skip
@click.option("--out", metavar="FILE", type=OUTPUT,
              help="Write the cost model to FILE, for `kvarts replay --cost FILE`; with --points, constants for "
              "--set prior.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def calibrate_command(
    runs: tuple[Path, ...], points: Path | None, asks_design: bool, out: Path | None, as_json: bool, **values: Any
) -> None:
    """Fit a cost model to measured runs, by replaying them some thousand times.

    A RUN is a file with one line per request, with times and token counts: JSON lines with the names of vLLM's timings,
    CSV, or the results of `vllm bench serve`, GuideLLM, AIPerf, evalscope or inference-perf. Or it has one line per
    step, with its work and its duration: a record of steps, or the log of a vLLM started with
    --enable-logging-iteration-details. Or it is a .toml that names such a file and describes the engine: `measured`,
    settings by their long names (tensor_parallel for --tensor-parallel), and prompts, trace_block_size, series,
    time_unit and a table [columns] as in the options. Options apply to all runs, where the .toml leaves a setting out.
    Needs the extra kvarts[calibrate].
    """
    given = given_by_flags(values, SECTIONS)
    prior, workers = values["prior"], values["workers"]
    if runs and (points is not None or asks_design):
        raise ConfigError("is not read with --points, nor with --design", field="runs", hint="Leave it out.")
    if not (runs or asks_design or points is not None):
        raise ConfigError("is missing", field="runs", hint="Give a measured run, or --design.")
    from kvarts.plan.calibrate.coefficients import needs_scipy

    needs_scipy()  # before anything is read
    if points is not None:
        _write(_fit_points(points, prior, values["hold_out"], out, workers), out, as_json=as_json)
        return
    if asks_design:
        _design(given, as_json=as_json)
        return
    from kvarts.plan.calibrate.calibrating import is_of_steps

    if out is not None:
        check_writable(out)
    if len(runs) == 1 and is_of_steps(runs[0]):
        of_requests = ("prompts", "series", "columns", "fit_on", "prior", "workers")
        _refuse("is for a run of requests, and RUN is one of steps", {name: values[name] for name in of_requests})
        found: Calibration | StepFit = _fit_steps(runs[0], given)
    else:
        from kvarts.plan.calibrate.run import load_runs

        check_whole(values["seed"], "seed", least=0, most=MOST_COUNT)
        found = _fit_requests(load_runs(runs, given, _run_options(values)), values["seed"], prior, workers)
    _write(found, out, as_json=as_json)


def _write(found: Calibration | StepFit | TableFit, out: Path | None, *, as_json: bool) -> None:
    """Print the result of a fit, and write the file that it produces."""
    if as_json and not is_standard_output(out):
        print_json(found.to_builtins())
    elif not is_standard_output(out):
        click.echo(found.to_text(), nl=False)
    if out is not None:
        write_whole(out, found.to_toml().encode())
        click.echo(f"kvarts: wrote {out}", err=True)


def _run_options(values: dict[str, Any]) -> RunOptions:
    from kvarts.plan.calibrate.run import RunOptions

    if values["fit_on"] is not None:
        check_whole(values["fit_on"], "fit_on")
    names = ("prompts", "trace_block_size", "series", "time_unit", "fit_on")
    return RunOptions(columns=_columns_of(values["columns"]), **{name: values[name] for name in names})


def _refuse(why: str, values: dict[str, Any]) -> None:
    """Raise ConfigError for the first of `values` that was given."""
    for name, value in values.items():
        if value:
            raise ConfigError(why, field=name.removeprefix("set_"), hint="Leave it out.")


def _fit_points(
    points: Path, prior: Path | None, hold_out: str | None, out: Path | None, workers: int | None
) -> TableFit:
    from kvarts.cost.roofline_settings import load_constants
    from kvarts.plan.calibrate.joint_fit import fit_table

    if out is not None:
        check_writable(out)
    with Progress("fitting", None, "points") as progress:
        return fit_table(
            points,
            prior=None if prior is None else load_constants(prior),
            hold_out=[] if hold_out is None else hold_out.split(","),
            workers=workers,
            on_progress=progress.update,
        )


def _columns_of(given: tuple[str, ...]) -> dict[str, str] | None:
    """Return the column names of the key `column`, FIELD=NAME, by field; None without it."""
    columns = {}
    for text in given:
        field, equals, name = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"{text!r} is not FIELD=NAME", field="column")
        if field in columns:
            raise ConfigError(f"is given twice for {field}", field="column", hint="Keep one of them.")
        columns[field] = name
    return columns or None


def _fit_requests(runs: list[CalibrationRun], seed: int, prior: Path | None, workers: int | None) -> Calibration:
    import kvarts

    for run in runs:
        _say(run.measured)
        if run.series is not None and run.series.left_out is not None:
            click.echo(f"kvarts: {run.series.left_out}", err=True)
    with _progress(runs) as progress:
        return kvarts.calibrate(runs, seed=seed, prior=prior, workers=workers, on_progress=progress.update)


def _say(measured: Measured) -> None:
    """Write to standard error how the times of a result file are defined, and what cannot be trusted."""
    for note in measured.notes:
        click.echo(f"kvarts: {measured.name}: {note}", err=True)


def _fit_steps(path: Path, given: Given) -> Calibration | StepFit:
    import kvarts
    from kvarts.cost.roofline import RooflineCost

    # Steps are not replayed, so any number of pages will do.
    config = resolve_replay(given.over(given_in({"pages": 1}, SECTIONS)), counts_groups=False)
    if not isinstance(config.cost, RooflineCost):
        raise ConfigError(
            "model and device are missing", hint="Give the measured model and device: --model NAME --device NAME."
        )
    with Progress(f"fitting {path}"):
        found = kvarts.calibrate(path, config)
    if (left_out := getattr(found, "left_out", None)) is not None:
        click.echo(f"kvarts: {left_out}", err=True)
    return found


def _design(given: Given, *, as_json: bool) -> None:
    from kvarts.plan.calibrate.experiment import design

    config = resolve_replay(given, counts_groups=False)
    with Progress("designing"):
        proposals, unknown = design(config)
    if as_json:
        print_json({"benchmarks": [msgspec.to_builtins(each) for each in proposals], "not_identified": unknown})
        return
    for number, each in enumerate(proposals, 1):
        found = f"identifies {', '.join(each.identifies)}" if each.identifies else "makes them surer"
        click.echo(f"{number}. some {each.duration_s:,.0f} s, {found}\n   {each.bench.command(config.cost.llm)}")
        surer = ", ".join(f"{name} {share:.0%}" for name, share in each.uncertainty.items())
        click.echo(f"   uncertain after it: {surer}")
    if unknown:
        click.echo(f"None of them identifies {', '.join(unknown)}: guesses will stand for these.")


def _progress(runs: list[CalibrationRun]) -> Progress:
    from kvarts.plan.calibrate.coefficients import names_of
    from kvarts.plan.calibrate.fitting import most_replays

    most = most_replays(len(runs), len(names_of([run.cost for run in runs])))
    return Progress("fitting", most, "replays at most")


@click.command("compare", cls=Command)
@click.argument("replayed", metavar="REPLAY", type=INPUT)
@click.argument("measured", type=INPUT)
@click.option("--series", metavar="FILE", type=INPUT,
              help="CSV of t, running, waiting and kv_cache_pct, second by second. REPLAY must be a run "
              "directory.")  # fmt: skip
@key_option("--column", "columns", metavar="FIELD=NAME", multiple=True,
              help="The name of a field in MEASURED, as in `kvarts calibrate`.")  # fmt: skip
@key_option("--time-unit", metavar="UNIT", default="s", show_default=True, help="s, ms, us or ns.")
@click.option("--html", "html_file", metavar="FILE", type=OUTPUT,
              help="Write one page that needs no network: the distributions and the curves of both.")  # fmt: skip
@open_option()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def compare_command(
    replayed: Path,
    measured: Path,
    series: Path | None,
    columns: tuple[str, ...],
    time_unit: str,
    html_file: Path | None,
    opens: bool,
    as_json: bool,
) -> None:
    """Compare a replay with a measured run.

    REPLAY is the output of `kvarts replay --run-dir` or `--requests` for the requests in MEASURED. Requests are matched
    by their ids, or by their rows if the trace is without ids.
    """
    from kvarts.plan.calibrate import compare, load_measured, load_series
    from kvarts.plan.calibrate.comparison import load_replayed, render_page

    if html_file is not None:
        check_writable(html_file)
    check_opening(html_file, opens=opens)
    with Progress(f"reading {replayed} and {measured}"):
        ours = load_replayed(replayed)
        theirs = load_measured(measured, columns=_columns_of(columns), time_unit=time_unit)
        curve = None if series is None else load_series(series)
    if curve is not None and curve.left_out is not None:
        click.echo(f"kvarts: {curve.left_out}", err=True)
    _say(theirs)
    comparison = compare(theirs, ours, curve)
    if is_standard_output(html_file):
        pass
    elif as_json:
        print_json({**comparison.to_builtins(), "notes": list(theirs.notes)})
    else:
        click.echo(comparison.to_text(), nl=False)
    if html_file is not None:
        write_whole(html_file, render_page(theirs, ours, curve, comparison, name=replayed.name))
        click.echo(f"kvarts: wrote {html_file}", err=True)
        open_page(html_file, opens=opens)

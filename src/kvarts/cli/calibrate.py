"""`kvarts calibrate` fits a cost model to a measured run; `kvarts compare` holds a replay against one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec.structs import replace

from kvarts.cli.options import Command, given_by_flags, options_of
from kvarts.cli.pages import check_opening, open_option, open_page
from kvarts.cli.paths import INPUT, OUTPUT
from kvarts.cli.printing import print_json
from kvarts.cli.progress import Progress
from kvarts.errors import ConfigError
from kvarts.executor.constants import COEFFICIENTS
from kvarts.files import check_writable, is_standard_output, write_whole
from kvarts.limits import MOST_COUNT, check_whole
from kvarts.settings import Given, given_in
from kvarts.sim.config import SECTIONS, resolve_replay

__all__ = ["calibrate_command", "compare_command"]


RUNS = click.Argument(["runs"], type=INPUT, nargs=-1, metavar="RUN...")
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
"""Settings of a replay that say what was measured."""
KEPT = ("tensor_parallel", "graph_tokens", *COEFFICIENTS)
"""Fields that a file with a cost model holds also where they are at their default, which other releases may change."""


@click.command("calibrate", cls=Command, params=[RUNS, *options_of(SECTIONS, KEYS)])
@click.option("--prompts", metavar="FILE", type=INPUT,
              help="Mooncake trace of the same requests in the same order: which share prefixes.")  # fmt: skip
@click.option("--trace-block-size", metavar="TOKENS", type=click.IntRange(min=1), default=512, show_default=True,
              help="Tokens that a hash id of it stands for.")  # fmt: skip
@click.option("--series", metavar="FILE", type=INPUT,
              help="CSV of t, running, waiting and kv_cache_pct, second by second.")  # fmt: skip
@click.option("--column", "columns", metavar="FIELD=NAME", multiple=True,
              help="What a run calls request_id, arrival, scheduled, first_token, last_token, prompt_tokens or "
              "output_tokens. Once for each.")  # fmt: skip
@click.option("--time-unit", metavar="UNIT", default="s", show_default=True, help="s, ms, us or ns.")
@click.option("--fit-on", metavar="N", type=int, help="Fit to the first N requests, and hold out the rest.")
@click.option(
    "--seed", metavar="N", type=int, default=0, show_default=True, help="Of the points the search tries first."
)
@click.option("--points", metavar="FILE", type=INPUT,
              help="Instead of a RUN: a table of measured points, of any models and devices, one line per load. Fits "
              "the constants that all rooflines share.")  # fmt: skip
@click.option("--prior", metavar="FILE", type=INPUT,
              help="Constants to begin from, and how sure they are: a file that --points wrote. "
              "[those that ship]")  # fmt: skip
@click.option("--hold-out", metavar="FIELDS",
              help="For --points: also fit to one half and test on the other, both ways, by source, gpu and model, or "
              "some of them: source,gpu.")  # fmt: skip
@click.option("--design", "asks_design", is_flag=True,
              help="Without a RUN: propose the shortest benchmarks that would identify the coefficients of the engine "
              "that options describe.")  # fmt: skip
@click.option("--out", metavar="FILE", type=OUTPUT,
              help="Write the cost model to FILE, for `kvarts replay --cost FILE`.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def calibrate_command(
    runs: tuple[Path, ...],
    prompts: Path | None,
    trace_block_size: int,
    series: Path | None,
    columns: tuple[str, ...],
    time_unit: str,
    fit_on: int | None,
    seed: int,
    points: Path | None,
    prior: Path | None,
    hold_out: str | None,
    asks_design: bool,
    out: Path | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Fit a cost model to measured runs, by replaying them some thousand times.

    A RUN has a line a request, with times and token counts: JSON lines as vLLM's timings have them, CSV, or what `vllm
    bench serve`, GuideLLM or AIPerf wrote. Or it has a line a step, with its work and its duration: a record of steps,
    or the log of a vLLM that was started with --enable-logging-iteration-details. Or it is a .toml that says where that
    is and what it ran on: `measured`, with settings by their long names (tensor_parallel for --tensor-parallel), and
    prompts, trace_block_size, series, time_unit and a table [columns] as the options. What it does not say, options
    say, of all runs. Needs the extra kvarts[calibrate].
    """
    from kvarts.calibrate.iteration_log import is_iteration_log
    from kvarts.calibrate.stepfit import is_step_record
    from kvarts.cli.calibrate_runs import RunOptions, load_runs

    given = given_by_flags(settings, SECTIONS)
    if hold_out is not None and points is None:
        raise ConfigError("is for a table of points", field="hold_out", hint="Give the table: --points FILE.")
    if points is not None:
        _refuse(
            "is for runs, and points are none",
            {"runs": runs, "prompts": prompts, "series": series, "column": columns, "fit_on": fit_on,
             "design": asks_design, **settings},
        )  # fmt: skip
        _fit_points(points, prior, hold_out, out, as_json=as_json)
        return
    if asks_design:
        for name, unwanted in {
            "runs": runs,
            "out": out,
            "prompts": prompts,
            "series": series,
            "fit_on": fit_on,
        }.items():
            if unwanted:
                raise ConfigError("is for a fit, and a design has none", field=name, hint="Leave it out.")
        _design(given, as_json=as_json)
        return
    if not runs:
        raise ConfigError("is missing", field="runs", hint="Name what was measured, or ask for a --design.")
    if out is not None:
        check_writable(out)
    is_of_steps = len(runs) == 1 and (is_step_record(runs[0]) or is_iteration_log(runs[0]))
    of_requests = {"prompts": prompts, "series": series, "column": columns or None, "fit_on": fit_on}
    for name, value in of_requests.items():
        if is_of_steps and value is not None:
            raise ConfigError("is for a run of requests, and RUN is one of steps", field=name, hint="Leave it out.")
    check_whole(seed, "seed", least=0, most=MOST_COUNT)
    if fit_on is not None:
        check_whole(fit_on, "fit_on")
    if is_of_steps and prior is not None:
        raise ConfigError("is for runs of requests, and RUN is one of steps", field="prior", hint="Leave it out.")
    if is_of_steps:
        text, report, cost = _fit_steps(runs[0], given)
    else:
        options = RunOptions(prompts, trace_block_size, series, _columns_of(columns), time_unit, fit_on)
        text, report, cost = _fit_requests(load_runs(runs, given, options), seed, prior)
    if is_standard_output(out):
        pass
    elif as_json:
        print_json(report)
    else:
        click.echo(text, nl=False)
    if out is not None:
        write_whole(out, _as_toml(cost, [path.name for path in runs], report).encode())
        click.echo(f"kvarts: wrote {out}", err=True)


def _refuse(why: str, values: dict[str, Any]) -> None:
    """Raise ConfigError for the first of `values` that was given."""
    for name, value in values.items():
        if value:
            raise ConfigError(why, field=name.removeprefix("set_"), hint="Leave it out.")


def _fit_points(points: Path, prior: Path | None, hold_out: str | None, out: Path | None, *, as_json: bool) -> None:
    from kvarts.cli.calibrate_points import fit_table, parse_hold_out
    from kvarts.executor.constants import load_constants, shipped_constants

    by = parse_hold_out(hold_out)
    if out is not None:
        check_writable(out)
    constants = shipped_constants() if prior is None else load_constants(prior)
    with Progress("fitting", None, "points") as progress:
        text, report, toml = fit_table(points, constants, by, progress.update)
    if as_json:
        print_json(report)
    elif not is_standard_output(out):
        click.echo(text, nl=False)
    if out is not None:
        write_whole(out, toml.encode())
        click.echo(f"kvarts: wrote {out}", err=True)


def _columns_of(given: tuple[str, ...]) -> dict[str, str] | None:
    """Return the names that `--column FIELD=NAME` gives to fields; None without the option."""
    columns = {}
    for text in given:
        field, equals, name = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"{text!r} is not FIELD=NAME", field="column")
        if field in columns:
            raise ConfigError(f"is given twice for {field}", field="column", hint="Keep one of them.")
        columns[field] = name
    return columns or None


def _fit_requests(runs: list[Any], seed: int, prior_file: Path | None) -> tuple[str, dict[str, Any], Any]:
    from kvarts.calibrate import calibrate_runs
    from kvarts.calibrate.coefficients import at_limit

    for run in runs:
        if run.series is not None and run.series.left_out is not None:
            click.echo(f"kvarts: {run.series.left_out}", err=True)
    prior = None
    if prior_file is not None:
        from kvarts.calibrate.shared import with_constants
        from kvarts.executor.constants import load_constants

        prior = load_constants(prior_file)
        runs = [
            replace(run, config=replace(run.config, cost=with_constants(run.config.cost, prior.values))) for run in runs
        ]
    with _progress(runs) as progress:
        found = calibrate_runs(runs, seed=seed, prior=prior, on_progress=progress.update)
    lines = [
        _coefficients(
            found.cost,
            found.uncertainty,
            found.not_identified,
            "a guess, of which these data say little",
            found.beyond_transfer,
        )
    ]
    for run, of in zip(runs, found.runs, strict=True):
        of_run = f"{of.num_requests} requests" if len(runs) == 1 else f"{of.name}: {of.num_requests} requests"
        lines.append(f"before ({of_run})\n{of.before.to_text()}")
        lines.append(f"after ({of_run}, {found.num_replays:,} replays)\n{of.overall.to_text()}")
        if of.held_out is not None:
            lines.append(f"fitted to the first {run.fit_on}\n{of.fitted.to_text()}")
            lines.append(f"held out ({of.num_requests - (run.fit_on or 0)})\n{of.held_out.to_text()}")
    of_runs = [
        {
            "name": of.name,
            "cost": _of_cost(of.cost),
            "before": of.before.to_builtins(),
            "after": of.overall.to_builtins(),
            "fitted": of.fitted.to_builtins(),
            "held_out": None if of.held_out is None else of.held_out.to_builtins(),
        }
        for of in found.runs
    ]
    first = of_runs[0]
    report = {
        "cost": _of_cost(found.cost),
        "uncertainty": _finite(found.uncertainty),
        "guessed": found.guessed,
        "not_identified": found.not_identified,
        "beyond_transfer": found.beyond_transfer,
        "at_limit": at_limit(found.cost, found.uncertainty),
        "num_replays": found.num_replays,
        **{name: first[name] for name in ("before", "after", "fitted", "held_out")},
        "runs": of_runs,
        "posterior": msgspec.to_builtins(found.cost.uncertainty),
    }
    return "\n".join(lines), report, found.cost


def _design(given: Given, *, as_json: bool) -> None:
    from kvarts.calibrate.design import design

    config = resolve_replay(given)
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


def _of_cost(cost: Any) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(cost)
    del values["uncertainty"]
    return values


def _fit_steps(path: Path, given: Given) -> tuple[str, dict[str, Any], Any]:
    from kvarts.calibrate.coefficients import at_limit
    from kvarts.calibrate.iteration_log import load_iterations
    from kvarts.calibrate.stepfit import fit_steps, is_step_record, load_steps
    from kvarts.executor.roofline import RooflineCost

    # Steps are not replayed: an engine of any size will do.
    start = resolve_replay(given.over(given_in({"pages": 1}, SECTIONS))).cost
    if not isinstance(start, RooflineCost):
        raise ConfigError("model and device are missing", hint="Say what was measured: --model NAME --device NAME.")
    if is_step_record(path):
        steps = load_steps(path)
    else:
        log = load_iterations(path)
        if log.left_out is not None:
            click.echo(f"kvarts: {log.left_out}", err=True)
        steps = log.steps
    found = fit_steps(steps, start)
    text = _coefficients(found.cost, found.uncertainty, found.not_identified, "hardly identified by these data")
    text += (
        f"\n{found.num_steps:,} steps: error of one {found.median_error:.2%} (median), {found.p90_error:.2%} (p90); "
        f"of all together {found.total_error:+.2%}\n"
    )
    report = {
        "cost": _of_cost(found.cost),
        "uncertainty": _finite(found.uncertainty),
        "not_identified": found.not_identified,
        "at_limit": at_limit(found.cost, found.uncertainty),
        "num_steps": found.num_steps,
        "median_error": found.median_error,
        "p90_error": found.p90_error,
        "total_error": found.total_error,
    }
    return text, report, found.cost


def _finite(shares: dict[str, float]) -> dict[str, float | None]:
    return {name: share if share < float("inf") else None for name, share in shares.items()}


def _coefficients(
    cost: Any,
    uncertainty: dict[str, float],
    not_identified: list[str],
    why: str,
    beyond_transfer: Sequence[str] = (),
) -> str:
    from kvarts.calibrate.coefficients import at_limit

    limited = at_limit(cost, uncertainty)
    lines = [f"{cost.llm} on {cost.device}"]
    for name, share in uncertainty.items():
        unsure = "these data do not say" if share == float("inf") else f"+- {share:.0%}"
        if name in not_identified and share < float("inf"):
            unsure += f", {why}"
        if name in beyond_transfer:
            unsure += ", farther from its prior than holds for other models"
        if name in limited:
            unsure += ", at the limit of the search: is the device what was measured?"
        lines.append(f"  {name:<22}{cost.coefficient(name):>12.4g}   {unsure}")
    return "\n".join(lines) + "\n"


def _as_toml(cost: Any, measured: list[str], report: dict[str, Any]) -> str:
    lines = [f"# Fitted by kvarts calibrate to {', '.join(measured)}.", "[cost]"]
    defaults = {field.name: field.default for field in msgspec.structs.fields(cost)}
    for name, value in report["cost"].items():
        if value is not None and (name in KEPT or value != defaults.get(name, msgspec.NODEFAULT)):
            lines.append(f"{name} = {_toml(value)}")
    lines += ["", "[uncertainty]  # as a share of each; left out, these data do not say"]
    lines += [f"{name} = {share!r}" for name, share in report["uncertainty"].items() if share is not None]
    posterior = report.get("posterior")
    if posterior is not None:
        lines += ["", "[posterior]  # of the logarithms: what replays say of their uncertainty follows from it"]
        lines.append(f"coefficients = {_toml(posterior['coefficients'])}")
        lines.append("covariance = [")
        lines += [f"  {_toml(row)}," for row in posterior["covariance"]]
        lines.append("]")
        for each in posterior["measured"]:
            lines += ["", "[[posterior.measured]]", *(f"{name} = {_toml(value)}" for name, value in each.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _progress(runs: list[Any]) -> Progress:
    from kvarts.calibrate.coefficients import names_of
    from kvarts.calibrate.fitting import most_replays

    most = most_replays(len(runs), len(names_of([run.cost for run in runs])))
    return Progress("fitting", most, "replays at most")


@click.command("compare", cls=Command)
@click.argument("replayed", metavar="REPLAY", type=INPUT)
@click.argument("measured", type=INPUT)
@click.option("--series", metavar="FILE", type=INPUT,
              help="CSV of t, running, waiting and kv_cache_pct, second by second. REPLAY must be a run "
              "directory.")  # fmt: skip
@click.option("--column", "columns", metavar="FIELD=NAME", multiple=True,
              help="What MEASURED calls a field, as in `kvarts calibrate`.")  # fmt: skip
@click.option("--time-unit", metavar="UNIT", default="s", show_default=True, help="s, ms, us or ns.")
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
    """State how far a replay is from what was measured.

    REPLAY is what `kvarts replay --run-dir` or `--requests` wrote, of the requests in MEASURED. Requests are matched by
    their ids, or by their rows where the trace had none.
    """
    from kvarts.calibrate import compare, load_measured, load_series
    from kvarts.calibrate.page import render_page
    from kvarts.calibrate.replayed import load_replayed

    if html_file is not None:
        check_writable(html_file)
    check_opening(html_file, opens=opens)
    ours = load_replayed(replayed)
    theirs = load_measured(measured, columns=_columns_of(columns), time_unit=time_unit)
    curve = None if series is None else load_series(series)
    if curve is not None and curve.left_out is not None:
        click.echo(f"kvarts: {curve.left_out}", err=True)
    comparison = compare(theirs, ours, curve)
    if is_standard_output(html_file):
        pass
    elif as_json:
        print_json(comparison.to_builtins())
    else:
        click.echo(comparison.to_text(), nl=False)
    if html_file is not None:
        write_whole(html_file, render_page(theirs, ours, curve, comparison, name=replayed.name))
        click.echo(f"kvarts: wrote {html_file}", err=True)
        open_page(html_file, opens=opens)

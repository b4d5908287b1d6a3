"""`kvarts calibrate` fits a cost model to a measured run; `kvarts compare` holds a replay against one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from kvarts.cli.options import Command, GroupedCommand, given_by_flags, options_of
from kvarts.cli.paths import INPUT, OUTPUT
from kvarts.cli.printing import print_json
from kvarts.errors import ConfigError
from kvarts.files import check_writable, is_standard_output, write_whole
from kvarts.limits import MOST_COUNT, check_whole
from kvarts.settings import given_in
from kvarts.sim.config import SECTIONS, resolve_replay

__all__ = ["calibrate_command", "compare_command"]


MEASURED = click.Argument(["measured"], type=INPUT)
KEYS = (
    "model",
    "device",
    "tensor_parallel",
    "weight_dtype",
    "kv_dtype",
    "cost",
    "pages",
    "page_size",
    "max_batched_tokens",
    "max_seqs",
)
"""Settings of a replay that say what was measured."""


@click.command("calibrate", cls=GroupedCommand, params=[MEASURED, *options_of(SECTIONS, KEYS)])
@click.option("--prompts", metavar="FILE", type=INPUT,
              help="Mooncake trace of the same requests in the same order: which share prefixes.")  # fmt: skip
@click.option("--trace-block-size", metavar="TOKENS", type=click.IntRange(min=1), default=512, show_default=True,
              help="Tokens that a hash id of it stands for.")  # fmt: skip
@click.option("--series", metavar="FILE", type=INPUT,
              help="CSV of t, running, waiting and kv_cache_pct, second by second.")  # fmt: skip
@click.option("--column", "columns", metavar="FIELD=NAME", multiple=True,
              help="What MEASURED calls request_id, arrival, scheduled, first_token, last_token, prompt_tokens or "
              "output_tokens. Once for each.")  # fmt: skip
@click.option("--time-unit", metavar="UNIT", default="s", show_default=True, help="s, ms, us or ns.")
@click.option("--fit-on", metavar="N", type=int, help="Fit to the first N requests, and hold out the rest.")
@click.option(
    "--seed", metavar="N", type=int, default=0, show_default=True, help="Of the points the search tries first."
)
@click.option("--out", metavar="FILE", type=OUTPUT,
              help="Write the cost model to FILE, for `kvarts replay --cost FILE`.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def calibrate_command(
    measured: Path,
    prompts: Path | None,
    trace_block_size: int,
    series: Path | None,
    columns: tuple[str, ...],
    time_unit: str,
    fit_on: int | None,
    seed: int,
    out: Path | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Fit a cost model to a measured run, by replaying it some thousand times.

    MEASURED has a line a request, with times and token counts: JSON lines as vLLM's timings have them, or CSV; or a
    line a step, with its work and its duration. Needs the extra kvarts[calibrate].
    """
    from kvarts.calibrate.stepfit import is_step_record
    from kvarts.executor.roofline import RooflineCost

    if out is not None:
        check_writable(out)
    given = given_by_flags(settings, SECTIONS)
    is_of_steps = is_step_record(measured)
    of_requests = {"prompts": prompts, "series": series, "column": columns or None, "fit_on": fit_on}
    for name, value in of_requests.items():
        if is_of_steps and value is not None:
            raise ConfigError(
                "is for a run of requests, and MEASURED is one of steps", field=name, hint="Leave it out."
            )
    check_whole(seed, "seed", least=0, most=MOST_COUNT)
    if fit_on is not None:
        check_whole(fit_on, "fit_on")
    if is_of_steps:
        given = given.over(given_in({"pages": 1}, SECTIONS))  # steps are not replayed
    config = resolve_replay(given)
    if not isinstance(config.cost, RooflineCost):
        raise ConfigError("model and device are missing", hint="Say what was measured: --model NAME --device NAME.")
    if is_of_steps:
        text, report, cost = _fit_steps(measured, config.cost)
    else:
        text, report, cost = _fit_requests(
            measured, config, prompts, trace_block_size, series, _columns_of(columns), time_unit, fit_on, seed
        )
    if is_standard_output(out):
        pass
    elif as_json:
        print_json(report)
    else:
        click.echo(text, nl=False)
    if out is not None:
        write_whole(out, _as_toml(cost, measured, report).encode())
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


def _fit_requests(
    path: Path,
    config: Any,
    prompts: Path | None,
    trace_block_size: int,
    series: Path | None,
    columns: dict[str, str] | None,
    time_unit: str,
    fit_on: int | None,
    seed: int,
) -> tuple[str, dict[str, Any], Any]:
    from kvarts.calibrate import calibrate, load_measured, load_series
    from kvarts.traffic.mooncake import load_mooncake

    measured = load_measured(path, columns=columns, time_unit=time_unit)
    known = None if prompts is None else load_mooncake(prompts, trace_block_size=trace_block_size)
    curve = None if series is None else load_series(series)
    with _Progress() as progress:
        found = calibrate(measured, config, prompts=known, series=curve, fit_on=fit_on, seed=seed, on_progress=progress)
    lines = [_coefficients(found.cost, found.uncertainty, found.not_identified)]
    lines.append(f"before ({len(measured)} requests)\n{found.before.to_text()}")
    lines.append(f"after ({len(measured)} requests, {found.num_replays:,} replays)\n{found.overall.to_text()}")
    if found.held_out is not None:
        lines.append(f"fitted to the first {fit_on}\n{found.fitted.to_text()}")
        lines.append(f"held out ({len(measured) - (fit_on or 0)})\n{found.held_out.to_text()}")
    report = {
        "cost": msgspec.to_builtins(found.cost),
        "uncertainty": _finite(found.uncertainty),
        "not_identified": found.not_identified,
        "num_replays": found.num_replays,
        "before": found.before.to_builtins(),
        "after": found.overall.to_builtins(),
        "fitted": found.fitted.to_builtins(),
        "held_out": None if found.held_out is None else found.held_out.to_builtins(),
    }
    return "\n".join(lines), report, found.cost


def _fit_steps(path: Path, start: Any) -> tuple[str, dict[str, Any], Any]:
    from kvarts.calibrate.stepfit import fit_steps, load_steps

    found = fit_steps(load_steps(path), start)
    text = _coefficients(found.cost, found.uncertainty, found.not_identified)
    text += (
        f"\n{found.num_steps:,} steps: error of one {found.median_error:.2%} (median), {found.p90_error:.2%} (p90); "
        f"of all together {found.total_error:+.2%}\n"
    )
    report = {
        "cost": msgspec.to_builtins(found.cost),
        "uncertainty": _finite(found.uncertainty),
        "not_identified": found.not_identified,
        "num_steps": found.num_steps,
        "median_error": found.median_error,
        "p90_error": found.p90_error,
        "total_error": found.total_error,
    }
    return text, report, found.cost


def _finite(shares: dict[str, float]) -> dict[str, float | None]:
    return {name: share if share < float("inf") else None for name, share in shares.items()}


def _coefficients(cost: Any, uncertainty: dict[str, float], not_identified: list[str]) -> str:
    lines = [f"{cost.llm} on {cost.device}"]
    for name, share in uncertainty.items():
        unsure = "these data do not say" if share == float("inf") else f"+- {share:.0%}"
        if name in not_identified and share < float("inf"):
            unsure += ", hardly identified by these data"
        lines.append(f"  {name:<22}{getattr(cost, name):>12.4g}   {unsure}")
    return "\n".join(lines) + "\n"


def _as_toml(cost: Any, measured: Path, report: dict[str, Any]) -> str:
    lines = [f"# Fitted by kvarts calibrate to {measured.name}.", "[cost]"]
    for name, value in report["cost"].items():
        if value is not None:
            lines.append(f"{name} = {msgspec.json.encode(value).decode()}")
    lines += ["", "[uncertainty]  # as a share of each; left out, these data do not say"]
    lines += [f"{name} = {share!r}" for name, share in report["uncertainty"].items() if share is not None]
    return "\n".join(lines) + "\n"


class _Progress:
    """A progress bar on standard error, if that is a terminal."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __enter__(self) -> Callable[[int], object] | None:
        if not sys.stderr.isatty():
            return None
        from tqdm import tqdm

        from kvarts.calibrate.fitting import MOST_REPLAYS

        self._bar = tqdm(total=MOST_REPLAYS, unit=" replays", file=sys.stderr, leave=False)
        update: Callable[[int], object] = self._bar.update
        return update

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


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
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def compare_command(
    replayed: Path,
    measured: Path,
    series: Path | None,
    columns: tuple[str, ...],
    time_unit: str,
    html_file: Path | None,
    as_json: bool,
) -> None:
    """State how far a replay is from what was measured.

    REPLAY is what `kvarts replay --run-dir` or `--requests` wrote, of the requests in MEASURED.
    """
    from kvarts.calibrate import compare, load_measured, load_series
    from kvarts.calibrate.page import render_page
    from kvarts.calibrate.replayed import load_replayed

    if html_file is not None:
        check_writable(html_file)
    ours = load_replayed(replayed)
    theirs = load_measured(measured, columns=_columns_of(columns), time_unit=time_unit)
    curve = None if series is None else load_series(series)
    comparison = compare(theirs, ours, curve)
    if is_standard_output(html_file):
        pass
    elif as_json:
        print_json(comparison.to_builtins())
    else:
        click.echo(comparison.to_text(), nl=False)
    if html_file is not None:
        write_whole(html_file, render_page(theirs, ours, curve, comparison))
        click.echo(f"kvarts: wrote {html_file}", err=True)

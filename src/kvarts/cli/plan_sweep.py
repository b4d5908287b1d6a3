"""`kvarts sweep`."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
import time
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvarts import __version__
from kvarts.cli.options import Command
from kvarts.cli.paths import DIRECTORY, INPUT
from kvarts.cli.plan_policy import check_policy, with_policy
from kvarts.cli.printing import print_bytes, print_json
from kvarts.cli.replay import all_sections
from kvarts.cli.table import as_number, as_percent
from kvarts.errors import ConfigError, KvartsError
from kvarts.files import read_bytes, reading

if TYPE_CHECKING:
    from kvarts.traffic.trace import Trace

__all__ = ["sweep_command"]

SMALLER = ("kv_tokens", "ttft_ms_p99")
LARGER = ("request_throughput_per_s",)
MEASURES = ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms")
JOURNAL, TABLE, PARQUET, PAGE = "journal.jsonl", "points.json", "points.parquet", "points.html"
PICTURES = ("png", "svg")


@click.command("sweep", cls=Command)
@click.argument("config_file", metavar="CONFIG", type=INPUT)
@click.option("-o", "--output", "directory", metavar="DIR", type=DIRECTORY, required=True,
              help="Where results go, and where a sweep that was interrupted goes on.")  # fmt: skip
@click.option("--workers", metavar="N", type=click.IntRange(min=1), help="Processes. [as many as there are cores]")
@click.option("--ray", "ray_address", metavar="ADDRESS",
              help="Run points on the Ray cluster at ADDRESS, or auto, instead. Needs kvarts[ray]; the trace must be "
              "at the same path on its nodes.")  # fmt: skip
@click.option("--plot", "with_pictures", is_flag=True,
              help="Write the charts of the page as points.png and points.svg too. Needs kvarts[plan].")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print all rows as JSON instead of the Pareto front.")
def sweep_command(
    config_file: Path,
    directory: Path,
    workers: int | None,
    ray_address: str | None,
    with_pictures: bool,
    as_json: bool,
) -> None:
    """Replay every point of a grid.

    CONFIG is a file of `kvarts replay --config` with a table [grid] of lists, of which every combination is a point, or
    tables [[points]]. DIR gets points.json, and points.parquet where pyarrow is installed: a row a point; and
    points.html, a page with charts. The Pareto front of KV memory, TTFT and throughput goes to standard output.
    """
    import msgspec

    from kvarts.directories import own_directory
    from kvarts.files import read_toml, write_whole
    from kvarts.plan.page import render_page
    from kvarts.plan.pictures import check_installed, draw
    from kvarts.plan.sweep import pareto, points_of, run_sweep, with_changes
    from kvarts.plan.sweep_page import sweep_values

    if with_pictures:
        check_installed()
    values = read_toml(config_file, hint="Check the path of the configuration.")
    changes = points_of(values, config_file)
    points = [
        {"path": str(config_file), "changes": changed, "values": with_changes(values, changed)} for changed in changes
    ]
    digests: dict[Path, str] = {}
    for point in points:
        point["traffic"] = _checked(point, digests)
        point["version"] = __version__
    with own_directory(directory):
        rows = run_sweep(
            points,
            partial(run_point, base=Path.cwd()),
            directory / JOURNAL,
            workers=workers or os.cpu_count() or 1,
            ray_address=ray_address,
            on_done=_Progress(),
        )
        sweep = shlex.join(["kvarts", "sweep", str(config_file), "-o", str(directory)])
        rows = [
            {**row, "pareto": on_front, "command": _replay_command(point)}
            for point, row, on_front in zip(points, rows, pareto(rows, SMALLER, LARGER), strict=True)
        ]
        keys = sorted({key for changed in changes for key in changed})
        slo = values.get("slo") if not any(key.startswith("slo.") for key in keys) else None
        drawn = sweep_values(config_file.name, rows, keys, sweep, slo)
        write_whole(directory / TABLE, msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n")
        _write_parquet(rows, directory / PARQUET)
        write_whole(directory / PAGE, render_page(drawn))
        for form in PICTURES if with_pictures else ():
            write_whole(directory / f"points.{form}", draw(drawn, form))
    if as_json:
        print_json(rows)
    else:
        print_bytes(_front(rows, keys).encode())


def run_point(point: dict[str, Any], base: Path) -> dict[str, Any]:
    """Replay one point and return its row. `base`: where its path is counted from, in whichever process."""
    from kvarts.settings import given_in
    from kvarts.sim.config import resolve_replay
    from kvarts.sim.replay import replay

    sections = all_sections()
    path = base / point["path"]
    given = given_in(point["values"], sections, path)
    config = resolve_replay(given, sections).certain
    traffic = _traffic(str(path), _frozen(point["values"]), point["traffic"])
    summary = replay(traffic, with_policy(config, given, traffic)).summary
    goodput = summary["goodput"]
    row = {
        **point["changes"],
        "kv_tokens": config.num_pages * config.page_size * config.replicas,
        "hit_ratio": summary["prefix_hit_ratio"],
    }
    for name in MEASURES:
        row |= {f"{name}_{column}": summary[name][column] for column in ("mean", "p50", "p90", "p99")}
    return row | {
        "request_throughput_per_s": summary["request_throughput_per_s"],
        "output_throughput_tokens_per_s": summary["output_throughput_tokens_per_s"],
        "goodput_per_s": None if goodput is None else goodput["requests_per_s"],
        "slo_ratio": None if goodput is None else goodput["ratio"],
        "num_rejected": summary["num_rejected"],
        "num_preemptions": summary["num_preemptions"],
        "num_evicted_pages": summary["num_evicted_pages"],
        "limited_by": summary["limited_by"]["cause"],
    }


def _replay_command(point: dict[str, Any]) -> str | None:
    """Return the command line that replays a point; None where a setting of it has no option."""
    from kvarts.cli.plan_command import command_line
    from kvarts.settings import Flags, Given, given_in

    sections = all_sections()
    in_file = given_in(point["values"], sections, Path(point["path"]))
    given = Given()
    trace = None
    for setting in (setting for section in sections if not section.is_named for setting in section.settings):
        if setting.key == "trace" and "trace" in in_file:
            trace = in_file.path_of("trace")
        elif setting.key in in_file:
            if setting.flag is None or isinstance(in_file[setting.key], dict):
                return None
            given.add(setting, in_file[setting.key], Flags())
    return command_line(given, sections, trace, None, {})


def _checked(point: dict[str, Any], digests: dict[Path, str]) -> str:
    """Return what tells the traffic of a point from any other. Raise KvartsError for a point that cannot run."""
    from kvarts.settings import given_in
    from kvarts.sim.config import resolve_replay

    sections = all_sections()
    try:
        given = given_in(point["values"], sections, Path(point["path"]))
        resolve_replay(given, sections)
        check_policy(given)
        if "trace" not in given and "workload" not in given:
            raise ConfigError("is missing", path=point["path"], field="trace", hint="Give trace or [workload].")
        if "trace" not in given:
            return "workload"
        path = given.path_of("trace")
        if path not in digests:
            digests[path] = _digest(path)
        return digests[path]
    except KvartsError as error:
        changed = ", ".join(f"{key} = {value!r}" for key, value in point["changes"].items())
        error.hint = f"{error.hint or ''} This is the point {changed}.".strip()
        raise


def _digest(path: Path) -> str:
    """Return a hash of the bytes of a trace: another trace under its name is another point. Raise InputError."""
    with reading(path):
        files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    found = hashlib.sha256()
    for file in files:
        found.update(read_bytes(file))
    return found.hexdigest()


def _frozen(values: dict[str, Any]) -> str:
    """Return what of a point says how its traffic is read, as a text."""
    import msgspec

    keys = ("trace", "trace_block_size", "skip_bad_lines", "session_turns", "workload")
    return msgspec.json.encode({key: values[key] for key in keys if key in values}).decode()


@cache
def _traffic(path: str, reading: str, digest: str) -> Trace:
    """Load the traffic of a point; a process loads it once for all its points. `digest`: of its bytes."""
    import msgspec

    from kvarts.cli.sample import SECTION, load_traffic
    from kvarts.settings import given_in

    return load_traffic(given_in(msgspec.json.decode(reading), (SECTION,), Path(path)), None)


class _Progress:
    """Says on standard error, where that is a terminal, how many points are done, and how long the rest may take."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic()
        self._first: int | None = None

    def __call__(self, num_done: int, num_points: int) -> None:
        if not sys.stderr.isatty():
            return
        if self._first is None:
            self._first = num_done - 1
        each_s = (time.monotonic() - self._begun_s) / (num_done - self._first)
        left_s = each_s * (num_points - num_done)
        end = "\n" if num_done == num_points else ""
        click.echo(f"\rkvarts: {num_done} of {num_points} points, {left_s:,.0f} s left ", err=True, nl=bool(end))


def _write_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        click.echo("kvarts: no points.parquet without pyarrow: pip install 'kvarts[parquet]'", err=True)
        return
    from kvarts.files import whole_file

    names = list(dict.fromkeys(name for row in rows for name in row))
    try:
        table = pa.table({name: [row.get(name) for row in rows] for name in names})
    except pa.ArrowInvalid:  # a setting with values of several types
        table = pa.table({name: _as_text([row.get(name) for row in rows]) for name in names})
    with whole_file(path) as file:
        pq.write_table(table, file)


def _as_text(values: list[Any]) -> list[Any]:
    kinds = {type(value) for value in values if value is not None}
    return values if len(kinds) < 2 or kinds <= {int, float} else [None if v is None else str(v) for v in values]


def _front(rows: list[dict[str, Any]], keys: list[str]) -> str:
    lines = [
        f"{len(rows):,} points; those that no other beats in KV memory, TTFT p99 and throughput:",
        "",
        f"{'KV tokens':>14}{'hits':>9}{'TTFT p99':>12}{'TPOT p99':>12}{'requests/s':>12}  settings",
    ]
    for row in rows:
        if row["pareto"]:
            changed = ", ".join(f"{key}={row[key]}" for key in keys if key in row)
            lines.append(
                f"{row['kv_tokens']:>14,}{as_percent(row['hit_ratio']):>9}{as_number(row['ttft_ms_p99']):>12}"
                f"{as_number(row['tpot_ms_p99']):>12}{as_number(row['request_throughput_per_s']):>12}  {changed}"
            )
    return "\n".join(lines) + "\n"

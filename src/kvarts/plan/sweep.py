"""`kvarts.sweep`: replays every point of a grid and returns one value that prints, plots and serialises."""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec

from kvarts.base.errors import ConfigError, KvartsError
from kvarts.base.files import own_directory, read_toml, reading, write_whole
from kvarts.base.leftovers import temporary_folder
from kvarts.base.settings import Flags, Given, Section, given_in
from kvarts.base.units import as_duration, as_hits
from kvarts.plan.commands import command_line
from kvarts.plan.grid import Row, UserCode, Values, fronts, load_of, points_of, run_sweep, with_changes
from kvarts.plan.policy import SECTION as POLICY
from kvarts.plan.policy import check_policy, with_policy
from kvarts.sim.config import SECTIONS, TABLES, ReplayConfig, resolve_replay
from kvarts.sim.replaying import replay
from kvarts.sim.report.words import number
from kvarts.sim.traffic.settings import SECTION as TRAFFIC
from kvarts.sim.traffic.settings import load_given
from kvarts.sim.traffic.trace import Trace
from kvarts.sim.traffic.trace_file import TraceFile

__all__ = ["Sweep", "run_point", "sweep"]

SMALLER = ("kv_tokens", "ttft_ms_p99")
LARGER = ("request_throughput_per_s",)
MEASURES = ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms")
AT_ONCE = 1 << 20
"""Bytes of a trace that are read at once."""
JOURNAL, TABLE, PARQUET, PAGE = "journal.jsonl", "points.json", "points.parquet", "points.html"


class Sweep:
    """The rows of all points, in the order of the grid, with the front of each load.

    `rows`: one mapping per point; the reference lists its fields. `keys`: the settings that points change. `slo`: the
    bounds that all points share. `command`: that of the sweep; empty if it was not started on the command line.
    """

    def __init__(
        self, name: str, rows: list[Row], keys: list[str], slo: Mapping[str, Any] | None, command: str
    ) -> None:
        self.name = name
        self.rows = rows
        self.keys = keys
        self.slo = slo
        self.command = command

    @property
    def front(self) -> list[Row]:
        """The rows on the Pareto front of their load in KV memory, TTFT p99 and throughput; equal rows once."""
        return [row for row in self.rows if row["pareto"]]

    def to_text(self) -> str:
        """Return the text that `kvarts sweep` prints: the front of each load, with a line end."""
        loads = load_of(self.keys)
        others = [key for key in self.keys if key not in loads]
        num_same = Counter(row["same_as"] for row in self.rows)
        by_load: dict[str, list[tuple[int, Row]]] = {}
        for place, row in enumerate(self.rows):
            if row["pareto"]:
                by_load.setdefault(_settings(row, loads), []).append((place, row))
        lines = [
            f"{len(self.rows):,} points; those of each load that no other beats in KV memory, TTFT p99 and throughput"
        ]
        for load, on_front in by_load.items():
            lines += ["", *([load] if load else [])]
            lines.append("  ".join(f"{head:>{width}}" for head, width in HEADS) + "  settings")
            for place, row in on_front:
                also = f" (and {num_same[place]:,} that measure the same)" if num_same[place] else ""
                cells = "  ".join(f"{cell:>{width}}" for cell, (_, width) in zip(_cells(row), HEADS, strict=True))
                lines.append(f"{cells}  {_settings(row, others)}{also}".rstrip())
        return "\n".join(lines) + "\n"

    def to_html(self) -> bytes:
        """Return a self-contained page with charts and a table of all points."""
        from kvarts.plan.page import render_page

        return render_page(self._drawn)

    def to_json(self) -> bytes:
        """Return `rows` as indented JSON, with a line end."""
        return msgspec.json.format(msgspec.json.encode(self.rows), indent=2) + b"\n"

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame, one row per point. Raise ConfigError if pandas is not installed."""
        from kvarts.base.columns import to_frame

        return to_frame(self._columns)

    def to_arrow(self) -> Any:
        """Return a pyarrow.Table, a row per point. Raise ModuleNotFoundError without pyarrow."""
        import pyarrow as pa

        try:
            return pa.table(self._columns)
        except pa.ArrowInvalid:  # a setting with values of several types
            return pa.table({name: _as_text(values) for name, values in self._columns.items()})

    def plot(self) -> Any:
        """Return the charts of the page as a matplotlib Figure. Raise ConfigError if matplotlib is not installed."""
        from kvarts.plan.page import figure_of
        from kvarts.sim.report.pictures import check_installed

        check_installed("plot")
        return figure_of(self._drawn)

    def picture(self, form: str) -> bytes:
        """Return the charts as a file of `form`: png or svg."""
        from kvarts.plan.page import draw

        return draw(self._drawn, form)

    @property
    def _drawn(self) -> dict[str, Any]:
        from kvarts.plan.series import sweep_values

        return sweep_values(self.name, self.rows, self.keys, self.command, self.slo)

    @property
    def _columns(self) -> dict[str, list[Any]]:
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        return {name: [row.get(name) for row in self.rows] for name in names}

    def __repr__(self) -> str:
        keys = ", ".join(self.keys)
        return f"<Sweep {self.name}: {len(self.rows):,} points over {keys}; {len(self.front):,} on a front>"

    def _repr_html_(self) -> str:
        from kvarts.sim.report.page import table_html

        heads = [f">{head}" for head, _ in HEADS]
        rows = [[_settings(row, self.keys), *_cells(row)] for row in self.front]
        what = "those that no other of their load beats in KV memory, TTFT p99 and throughput"
        return table_html(f"Sweep {self.name}", [f"{len(self.rows):,} points; {what}"], ["settings", *heads], rows)


HEADS = (("KV tokens", 14), ("GiB", 6), ("hits", 7), ("TTFT p99", 10), ("TPOT p99", 9), ("requests/s", 10))
"""Columns of a front, with their widths."""


def _cells(row: Row) -> list[str]:
    return [
        f"{row['kv_tokens']:,}",
        f"{row['kv_bytes'] / (1 << 30):,.1f}" if row.get("kv_bytes") else "-",
        as_hits(row["hit_ratio"]),
        as_duration(row["ttft_ms_p99"]),
        as_duration(row["tpot_ms_p99"]),
        number(row["request_throughput_per_s"]),
    ]


def _settings(row: Row, keys: Sequence[str]) -> str:
    return ", ".join(f"{key}={row[key]}" for key in keys if key in row)


def _as_text(values: list[Any]) -> list[Any]:
    kinds = {type(value) for value in values if value is not None}
    return values if len(kinds) < 2 or kinds <= {int, float} else [None if v is None else str(v) for v in values]


def sweep(
    config: Path | str | Mapping[str, Any],
    directory: Path | str | None = None,
    *,
    workers: int = 1,
    ray_address: str | None = None,
    on_done: Callable[[int, int], object] | None = None,
) -> Sweep:
    """Replay every point of a grid, and return one row per point.

    `config`: a file of `kvarts replay --config`, or a mapping with its keys. It has either a table `grid` of lists,
    whose product gives the points, or a list `points` of tables, or both; its `trace` is a path or a sample's name. In
    a mapping, `eviction`, `admission`, `router` and `cost` may also be classes or objects, which rows name. `directory`
    receives the rows, a page, and a journal from which an interrupted sweep resumes. `workers`: number of processes;
    more than one requires a script that can be imported. `ray_address`: a Ray cluster to use instead. `on_done`
    receives the number of finished points and the total, first with the number that the journal contains.

    Raise ConfigError and InputError for a point that cannot run, before any runs; OutputError for the directory.

    >>> from kvarts import sweep
    >>> grid = {"pages": [500, 1_000], "eviction": ["lru", "auto"]}
    >>> len(sweep({"trace": "sample:mooncake", "page_size": 512, "grid": grid}).rows)
    4
    """
    code = UserCode()
    path, values = _read(config, code)
    code.check_sendable(workers if ray_address is None else 2)
    changes = points_of(values, path)
    points: list[Values] = []
    digests: dict[str, str] = {}
    for changed in changes:
        point: Values = {
            "path": None if path is None else str(path),
            "changes": changed,
            "values": with_changes(values, changed, _sections()),
        }
        point["code"] = code.used_by(point["values"])
        point["traffic"] = _checked(point, digests, code.objects)
        point["version"] = sys.modules["kvarts"].__version__  # not imported: the package imports this room
        points.append(point)
    run = partial(run_point, base=Path.cwd(), code=code.objects)

    def rows_in(folder: Path) -> list[Row]:
        return run_sweep(points, run, folder / JOURNAL, workers=workers, ray_address=ray_address, on_done=on_done)

    if directory is None:
        with temporary_folder() as folder:
            return _sweep_of(values, path, "", changes, points, rows_in(folder))
    directory = Path(directory)
    command = "" if path is None else shlex.join(["kvarts", "sweep", str(path), "-o", str(directory)])
    with own_directory(directory):
        found = _sweep_of(values, path, command, changes, points, rows_in(directory))
        write_whole(directory / TABLE, found.to_json())
        _write_parquet(found, directory / PARQUET)
        write_whole(directory / PAGE, found.to_html())
    return found


def _read(config: Path | str | Mapping[str, Any], code: UserCode) -> tuple[Path | None, Values]:
    if isinstance(config, Mapping):
        config = code.named(config)
        try:  # rows, the journal and other processes need plain values
            return None, msgspec.json.decode(msgspec.json.encode(config, enc_hook=_plain))
        except TypeError as error:
            raise ConfigError(f"{error}", field="config", hint="Name a trace by its path.") from error
    return Path(config), read_toml(Path(config), hint="Check the path of the configuration.")


def _plain(value: object) -> str:
    """Return a path as a string, as in a file. Raise TypeError for a value that a file cannot hold."""
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not a value that a file can hold")


def _sweep_of(
    values: Values, path: Path | None, command: str, changes: list[Values], points: list[Values], rows: list[Row]
) -> Sweep:
    rows = [
        {**row, "command": _replay_command(point)}
        for point, row in zip(points, fronts(rows, changes, SMALLER, LARGER), strict=True)
    ]
    keys = sorted({key for changed in changes for key in changed})
    slo = values.get("slo") if not any(key.startswith("slo.") for key in keys) else None
    return Sweep("grid" if path is None else path.name, rows, keys, slo, command)


def _write_parquet(sweep: Sweep, path: Path) -> None:
    """Write the rows as Parquet if pyarrow is installed."""
    try:
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        return
    from kvarts.base.files import whole_file

    with whole_file(path) as file:
        pq.write_table(sweep.to_arrow(), file)


# One point --------------------------------------------------------------------------------------------------------


@cache
def _sections() -> tuple[Section, ...]:
    return (*SECTIONS, TRAFFIC, *TABLES, POLICY)


def _config(point: Values, given: Given, code: Mapping[str, Any]) -> ReplayConfig:
    """Return the configuration of a point, with its objects. Raise ConfigError."""
    config = resolve_replay(given, _sections())
    objects = {field: code[name] for field, (name, _) in point["code"].items()}
    return msgspec.structs.replace(config, **objects) if objects else config


def _given(point: Values, base: Path = Path()) -> Given:
    path = None if point["path"] is None else base / point["path"]
    several = [name for name in ("models", "sharing") if name in point["values"]]
    if several:
        raise ConfigError(
            "is of several models, and a sweep replays one", path=path, field=several[0], hint="Sweep each model alone."
        )
    values = {key: value for key, value in point["values"].items() if key not in point["code"]}
    return given_in(values, _sections(), path)


def run_point(point: Values, base: Path, code: Mapping[str, Any]) -> Row:
    """Replay one point and return its row. `base`: the directory that its relative path starts from.

    `code`: the classes and objects that points name.
    """
    given = _given(point, base)
    config = _config(point, given, code).certain
    traffic = _traffic(point["path"] and str(base / point["path"]), _frozen(point["values"]), point["traffic"])
    summary = replay(traffic, with_policy(config, given, traffic)).summary
    goodput = summary["goodput"]
    row = {
        **point["changes"],
        "kv_tokens": (kv_tokens := config.num_pages * config.page_size * config.replicas),
        "kv_bytes": None if config.placement is None else kv_tokens // config.page_size * config.page_bytes,
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


def _replay_command(point: Values) -> str | None:
    """Return the command line that replays a point; None if one of its settings has no option."""
    if point["code"]:
        return None
    in_file = _given(point)
    given = Given()
    trace = None
    for setting in (setting for section in _sections() if not section.is_named for setting in section.settings):
        if setting.key == "trace" and "trace" in in_file:
            trace = in_file.path_of("trace")
        elif setting.key in in_file:
            if setting.flag is None or isinstance(in_file[setting.key], dict):
                return None
            given.add(setting, in_file[setting.key], Flags())
    return command_line(given, _sections(), trace, None, {})


def _checked(point: Values, digests: dict[str, str], code: Mapping[str, Any]) -> str:
    """Return an identifier of the traffic of a point. Raise KvartsError for a point that cannot run."""
    try:
        given = _given(point)
        _config(point, given, code)
        check_policy(given)
        if "trace" not in given and "workload" not in given:
            raise ConfigError("is missing", path=point["path"], field="trace", hint="Give trace or [workload].")
        if "trace" not in given:
            return "workload"
        path = given.path_of("trace")
        if str(path) not in digests:
            digests[str(path)] = _digest(path)
        return digests[str(path)]
    except KvartsError as error:
        changed = ", ".join(f"{key} = {value!r}" for key, value in point["changes"].items())
        error.hint = f"{error.hint or ''} This is the point {changed}.".strip()
        raise


def _digest(path: Path) -> str:
    """Return a hash of the files of a trace, so that a changed one makes a new point. Raise InputError."""
    found = hashlib.sha256()
    for file in TraceFile(path).files():
        with reading(file.path), file.path.open("rb") as opened:
            while part := opened.read(AT_ONCE):
                found.update(part)
    return found.hexdigest()


def _frozen(values: Values) -> str:
    """Return the settings of a point that control how its traffic is read, as JSON."""
    keys = tuple(setting.key for setting in TRAFFIC.settings)
    return msgspec.json.encode({key: values[key] for key in keys if key in values}).decode()


@cache
def _traffic(path: str | None, reading: str, digest: str) -> Trace:
    """Load the traffic of a point; each process loads it once for all its points. `digest`: hash of its contents."""
    found = load_given(given_in(msgspec.json.decode(reading), (TRAFFIC,), None if path is None else Path(path)))
    assert found is not None
    return found

"""Compares a replay with a measurement: the replay in the same form, the differences, and their page of HTML.

TTFT and E2E count from arrival. TPOT is the time from the first to the last token divided by the number of tokens after
the first, for requests with more than one. Percentiles are interpolated linearly between observed values, on both
sides.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.base.columns import percentile_rank
from kvarts.base.decoders import UNDECODED
from kvarts.base.errors import InputError, problem_of
from kvarts.base.files import read_bytes, reading
from kvarts.base.limits import brief
from kvarts.plan.calibrate.recorded_run import Measured, Series
from kvarts.proof.verify.reader import open_recording
from kvarts.sim.report.page import fill_page
from kvarts.sim.report.report import Report
from kvarts.sim.report.run_directory import RunDirectory

__all__ = [
    "METRICS",
    "STATISTICS",
    "Comparison",
    "Replayed",
    "compare",
    "latencies_ms",
    "load_replayed",
    "render_page",
    "replayed_of",
    "statistics",
]

METRICS = ("ttft", "tpot", "e2e")
STATISTICS = ("mean", "p50", "p90", "p99")
NS_PER_MS = 1e6
AS_MEASURED = 0.01
"""A replay is too slow or too fast if all its errors have the same sign and exceed this."""

Values = npt.NDArray[np.float64]
MAX_POINTS = 2000


class Replayed(msgspec.Struct, frozen=True):
    """Requests in order of arrival. Times are in ms; arrays have shape [n].

    `curve`, if known: per step, its start in seconds, running and waiting requests, and KV use in per cent.
    `request_ids`: None if unknown; the order is then that of the measurement.
    """

    arrival_ms: Values
    first_token_ms: Values
    last_token_ms: Values
    output_tokens: npt.NDArray[np.int64]
    num_preemptions: int
    curve: Series | None = None
    request_ids: list[str] | None = None

    def ordered(self, order: npt.NDArray[np.int64]) -> Replayed:
        """Return the same replay with its requests in `order`."""
        return Replayed(
            self.arrival_ms[order],
            self.first_token_ms[order],
            self.last_token_ms[order],
            self.output_tokens[order],
            self.num_preemptions,
            self.curve,
            None if self.request_ids is None else [self.request_ids[place] for place in order.tolist()],
        )


def replayed_of(report: Report) -> Replayed:
    """Return the replay of `report`, with its curve if it has a single engine."""
    rows, steps = report.requests, report.steps
    curve = None
    if report.config.replicas == 1:
        curve = Series(
            time_s=np.asarray(steps["start_ms"]) / 1e3,
            running=np.asarray(steps["running"], np.float64),
            waiting=np.asarray(steps["waiting"], np.float64),
            kv_pct=np.asarray(steps["used_pages"]) * (100.0 / report.config.num_pages),
        )
    return Replayed(
        np.asarray(rows["arrival_ms"]),
        np.asarray(rows["first_token_ms"]),
        np.asarray(rows["last_token_ms"]),
        np.asarray(rows["output_tokens"], np.int64),
        int(np.asarray(rows["preemptions"]).sum()),
        curve,
        [str(name) for name in rows["request_id"]],
    )


class _Row(msgspec.Struct):
    arrival_ms: float
    first_token_ms: float | None
    last_token_ms: float | None
    output_tokens: int
    preemptions: int
    replica: int
    status: str
    request_id: str | int | None = None


def load_replayed(path: Path | str) -> Replayed:
    """Read a run directory, or a file written by `kvarts replay --requests`.

    Raise MissingFileError; InputError for a file that is not a replay or has unfinished requests.
    """
    path = Path(path)
    rows_path, curve = path, None
    with reading(path):
        is_run = path.is_dir()
    if is_run:
        run = RunDirectory(path)
        rows_path = path / "requests.jsonl"
        timelines = run.timelines()
        if len(timelines) == 1:
            curve = _curve(timelines[0][1])
    data = read_bytes(rows_path, hint="Write it with `kvarts replay --requests`.")
    try:
        rows = msgspec.json.Decoder(_Row).decode_lines(data)
    except UNDECODED as error:
        raise InputError(f"is not a list of replayed requests: {problem_of(error)}", path=rows_path) from error
    for line, row in enumerate(rows, 1):
        if row.first_token_ms is None or row.last_token_ms is None:
            raise InputError(f"was {row.status}, and never ended", path=rows_path, line=line, field="last_token_ms")

    def column(name: str) -> Values:
        return np.array([getattr(row, name) for row in rows], np.float64)

    return Replayed(
        column("arrival_ms"),
        column("first_token_ms"),
        column("last_token_ms"),
        np.array([row.output_tokens for row in rows], np.int64),
        sum(row.preemptions for row in rows),
        curve,
        None if any(row.request_id is None for row in rows) else [str(row.request_id) for row in rows],
    )


def _curve(path: Path) -> Series | None:
    chunks = list(open_recording(path).chunks())
    columns: dict[str, Any] = {}
    for name in ("t_ms", "used_pct", "active_seqs", "waiting"):
        if not chunks or name not in chunks[0].columns:
            return None
        columns[name] = np.concatenate([chunk.columns[name] for chunk in chunks]).astype(np.float64)
    return Series(columns["t_ms"] / 1e3, columns["active_seqs"], columns["waiting"], columns["used_pct"] * 100)


class Comparison(msgspec.Struct, frozen=True):
    """`metrics[metric][statistic]` is (measured ms, replayed ms).

    `num_preemptions`: in the replay. `kv_error_points`: mean absolute difference of the curves of KV use, in percentage
    points. `peak_waiting`: (measured, replayed). Both are None without curves; all three are None for a subset of
    requests.
    """

    num_requests: int
    metrics: dict[str, dict[str, tuple[float, float]]]
    num_preemptions: int | None = None
    kv_error_points: float | None = None
    peak_waiting: tuple[float, float] | None = None

    @property
    def worst(self) -> float:
        """The largest relative error of any statistic."""
        return max(abs(_relative(*pair)) for row in self.metrics.values() for pair in row.values())

    @property
    def mean(self) -> float:
        """The mean of the absolute relative errors of all statistics."""
        errors = [abs(_relative(*pair)) for row in self.metrics.values() for pair in row.values()]
        return sum(errors) / len(errors)

    @property
    def verdict(self) -> str:
        """A sentence with the largest error, and whether the replay is too slow or too fast overall."""
        errors = {
            f"{metric.upper()} {name}": _relative(*pair)
            for metric, row in self.metrics.items()
            for name, pair in row.items()
            if np.isfinite(pair).all()
        }
        if not errors:
            return "No request has a latency to compare."
        least, most = min(errors.values()), max(errors.values())
        worst = max(errors, key=lambda name: abs(errors[name]))
        if min(abs(least), abs(most)) < AS_MEASURED or least < 0 < most:
            most = 100 * abs(errors[worst])
            return f"Latencies of the replay are within {most:.2f} % of those measured; worst: {worst}."
        way = "long" if least > 0 else "short"
        near, far = sorted((abs(least), abs(most)))
        return f"Latencies of the replay are {100 * near:.1f} to {100 * far:.1f} % too {way}; worst: {worst}."

    def to_text(self) -> str:
        """Return a table, with a line end."""
        lines = [f"{'':<6}{'':<6}{'measured':>14}{'replayed':>14}{'error':>9}"]
        for metric, row in self.metrics.items():
            for name, (measured, replayed) in row.items():
                error = _relative(measured, replayed)
                lines.append(f"{metric.upper():<6}{name:<6}{measured:>11,.1f} ms{replayed:>11,.1f} ms{error:>+9.2%}")
        if self.kv_error_points is not None:
            lines.append(f"KV use: mean absolute error {self.kv_error_points:.2f} points")
        if self.peak_waiting is not None:
            lines.append(f"peak waiting: measured {self.peak_waiting[0]:,.0f}, replayed {self.peak_waiting[1]:,.0f}")
        if self.num_preemptions is not None:
            lines.append(f"preemptions: replayed {self.num_preemptions:,}")
        return "\n".join(lines) + "\n"

    def to_builtins(self) -> dict[str, Any]:
        """Return the comparison, JSON-able."""
        return {
            "num_requests": self.num_requests,
            **{
                metric: {
                    name: {"measured_ms": measured, "replayed_ms": replayed, "error": _relative(measured, replayed)}
                    for name, (measured, replayed) in row.items()
                }
                for metric, row in self.metrics.items()
            },
            "kv_error_points": self.kv_error_points,
            "peak_waiting": self.peak_waiting,
            "num_preemptions": self.num_preemptions,
        }


def _relative(measured: float, replayed: float) -> float:
    return (replayed - measured) / measured if measured else (0.0 if replayed == measured else float("inf"))


def latencies_ms(measured: Measured | Replayed, some: slice = slice(None)) -> dict[str, Values]:
    """Return TTFT, TPOT and E2E of the requests in `some`; TPOT only for requests with several tokens."""
    if isinstance(measured, Measured):
        arrival, first = measured.arrival_ns / NS_PER_MS, measured.first_token_ns / NS_PER_MS
        last = measured.last_token_ns / NS_PER_MS
    else:
        arrival, first, last = measured.arrival_ms, measured.first_token_ms, measured.last_token_ms
    tokens = measured.output_tokens[some]
    ttft, e2e = (first - arrival)[some], (last - arrival)[some]
    several = tokens > 1
    return {"ttft": ttft, "tpot": (e2e - ttft)[several] / (tokens[several] - 1), "e2e": e2e}


def statistics(values: Values) -> Values:
    """Return the values of STATISTICS; NaN if `values` is empty."""
    if not len(values):
        return np.full(len(STATISTICS), np.nan)
    ordered = np.sort(values)
    return np.array([values.mean(), *(ordered[percentile_rank(percent, len(ordered))] for percent in (50, 90, 99))])


def compare(
    measured: Measured, replayed: Replayed, series: Series | None = None, *, some: slice | None = None
) -> Comparison:
    """Compare all requests, or only the latencies of `some`. Raise InputError if the requests differ.

    Requests are matched by id, or by row if a trace had no ids.
    """
    replayed = _joined(measured, replayed)
    theirs, ours = (latencies_ms(side, some or slice(None)) for side in (measured, replayed))
    metrics = {}
    for metric in METRICS:
        pairs = zip(STATISTICS, statistics(theirs[metric]), statistics(ours[metric]), strict=True)
        metrics[metric] = {name: (float(a), float(b)) for name, a, b in pairs}
    if some is not None:
        return Comparison(len(theirs["e2e"]), metrics)
    error_points = peaks = None
    if series is not None and replayed.curve is not None:
        error_points = series.kv_distance(replayed.curve)  # None if KV use was not measured
        peaks = float(series.waiting.max()), float(replayed.curve.waiting.max())
    return Comparison(len(theirs["e2e"]), metrics, replayed.num_preemptions, error_points, peaks)


def _joined(measured: Measured, replayed: Replayed) -> Replayed:
    """Return the replay with its requests in the measured order."""
    hint = "Replay the same requests."
    if len(replayed.arrival_ms) != len(measured):
        raise InputError(
            f"holds {len(measured)} requests, the replay {len(replayed.arrival_ms)}", path=measured.name, hint=hint
        )
    if replayed.request_ids is not None:
        places = {request_id: place for place, request_id in enumerate(replayed.request_ids)}
        wanted = measured.request_ids
        if places.keys() != set(wanted):
            wanted = [str(row) for row in measured.rows.tolist()]
        missing = next((request_id for request_id in wanted if request_id not in places), None)
        if missing is not None or len(places) < len(measured):
            named = brief(measured.request_ids[0] if missing is None else measured.request_ids[wanted.index(missing)])
            raise InputError(f"holds request {named}, which the replay does not", path=measured.name, hint=hint)
        replayed = replayed.ordered(np.array([places[request_id] for request_id in wanted], np.int64))
    differing = np.flatnonzero(replayed.output_tokens != measured.output_tokens)
    if len(differing):
        place = int(differing[0])
        raise InputError(
            f"has {measured.output_tokens[place]} output tokens for request {brief(measured.request_ids[place])}, "
            f"the replay {replayed.output_tokens[place]}",
            path=measured.name,
            hint=hint,
        )
    return replayed


def render_page(
    measured: Measured, replayed: Replayed, series: Series | None, comparison: Comparison, *, name: str = "a replay"
) -> bytes:
    """Return the page: the table of errors, the distributions, and the curves if both sides have them.

    `name`: name of the replay.
    """
    theirs, ours = latencies_ms(measured), latencies_ms(replayed)
    data: dict[str, Any] = {
        "title": f"{name} compared with {Path(measured.name).name}",
        "subtitle": f"{comparison.num_requests:,} requests, replayed and measured",
        "verdict": comparison.verdict,
        "rows": [row for metric in METRICS for row in _rows(metric, comparison)],
        "more": _more(comparison),
        "distributions": {
            metric: [_thinned(np.sort(values)) for values in (theirs[metric], ours[metric])] for metric in METRICS
        },
        "curves": None,
    }
    if series is not None and replayed.curve is not None:
        ours_thin = slice(None, None, max(1, len(replayed.curve.time_s) // MAX_POINTS))
        data["curves"] = [
            {
                "t": curve.time_s[thin].tolist(),
                "kv": None if curve.kv_pct is None else curve.kv_pct[thin].tolist(),
                "waiting": curve.waiting[thin].tolist(),
            }
            for curve, thin in ((series, slice(None)), (replayed.curve, ours_thin))
        ]
    assets = files("kvarts.plan.calibrate") / "assets"
    template = (assets / "compare.html").read_text(encoding="utf-8")
    return fill_page(template, {"compare.js": (assets / "compare.js").read_text(encoding="utf-8")}, data)


def _rows(metric: str, comparison: Comparison) -> list[list[str]]:
    """Return one table row per statistic: name, measured, replayed, and error."""
    out = []
    for name, row in comparison.to_builtins()[metric].items():
        pair = row["measured_ms"], row["replayed_ms"]
        if not np.isfinite(pair).all():
            continue
        out.append([f"{metric.upper()} {name}", *(f"{ms:,.1f} ms" for ms in pair), f"{100 * row['error']:+.2f} %"])
    return out


def _more(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the comparisons other than latencies."""
    out = []
    if comparison.kv_error_points is not None:
        out.append(("KV use", f"off by {comparison.kv_error_points:.2f} points on average"))
    if comparison.peak_waiting is not None:
        measured, replayed = comparison.peak_waiting
        out.append(("peak waiting", f"{measured:,.0f} measured, {replayed:,.0f} replayed"))
    if comparison.num_preemptions is not None:
        out.append(("preemptions", f"{comparison.num_preemptions:,} replayed"))
    return out


def _thinned(ordered: Values) -> list[tuple[float, float]]:
    """Return at most MAX_POINTS of the sorted values, each with its cumulative percentage."""
    at = np.unique(np.linspace(0, len(ordered) - 1, min(MAX_POINTS, len(ordered))).round().astype(np.int64))
    return [(float(ordered[place]), 100 * (place + 1) / len(ordered)) for place in at.tolist()]

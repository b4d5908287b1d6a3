"""Compares a replay with a measurement.

TTFT and E2E count from arrival. TPOT is the time from the first to the last token divided by the number of tokens after
the first, for requests with more than one. Percentiles are interpolated linearly between observed values, on both
sides.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.calibrate.measured import Measured
from kvarts.calibrate.replayed import Replayed
from kvarts.calibrate.series import Series
from kvarts.errors import InputError
from kvarts.limits import brief

__all__ = ["METRICS", "STATISTICS", "Comparison", "compare", "latencies_ms", "statistics"]

METRICS = ("ttft", "tpot", "e2e")
STATISTICS = ("mean", "p50", "p90", "p99")
NS_PER_MS = 1e6
AS_MEASURED = 0.01
"""A replay is too slow or too fast if all its errors have the same sign and exceed this."""

Values = npt.NDArray[np.float64]


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
    return np.concatenate([[values.mean()], np.percentile(values, [50, 90, 99])])


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

"""A self-contained HTML page that compares a replay with its measurement."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from kvarts.calibrate.comparison import METRICS, Comparison, Values, latencies_ms
from kvarts.calibrate.measured import Measured
from kvarts.calibrate.replayed import Replayed
from kvarts.calibrate.series import Series
from kvarts.report.page import fill_page

__all__ = ["render_page"]

MAX_POINTS = 2000


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
    assets = files("kvarts.calibrate") / "assets"
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

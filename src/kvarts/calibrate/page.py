"""A self-contained page of HTML that shows a replay over its measurement."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import numpy as np

from kvarts.calibrate.comparison import METRICS, Comparison, latencies_ms
from kvarts.calibrate.measured import Measured
from kvarts.calibrate.replayed import Replayed
from kvarts.calibrate.series import Series
from kvarts.report.page import fill_page

__all__ = ["render_page"]

MAX_POINTS = 2000


def render_page(measured: Measured, replayed: Replayed, series: Series | None, comparison: Comparison) -> bytes:
    """Return the page: the table of errors, the distributions, and the curves if both sides have them."""
    theirs, ours = latencies_ms(measured), latencies_ms(replayed)
    data: dict[str, Any] = {
        "title": measured.name,
        "comparison": comparison.to_builtins(),
        "distributions": {
            metric: [np.sort(values).tolist() for values in (theirs[metric], ours[metric])] for metric in METRICS
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

"""Views of a run: a self-contained page of HTML, and a few lines for a terminal.

The page holds every step: columns packed in base64, drawn by uPlot (MIT licence, in `assets/`), which thins them to the
available pixels. All values of the run enter the page as data, never as markup.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import numpy as np

from kvarts.columns import Column
from kvarts.report.page import fill_page
from kvarts.report.page_data import ShownOverview, ShownTokens, ShownWait, columns_of, page_data
from kvarts.report.run_directory import RunDirectory
from kvarts.report.words import facts, wrapped

__all__ = ["ShownOverview", "ShownTokens", "ShownWait", "render_html", "render_text", "sparkline"]

SPARKS = "▁▂▃▄▅▆▇█"


def render_html(run: RunDirectory, overviews: Mapping[Path, ShownOverview | None] | None = None) -> bytes:
    """Return the whole page. `overviews`: the overview of each of `run.runs()`, by its path.

    Raise InputError for files that cannot be read.
    """
    assets = files("kvarts.report") / "assets"
    template = (assets / "report.html").read_text(encoding="utf-8")
    script = (assets / "report.js").read_text(encoding="utf-8")
    return fill_page(template, {"report.js": script}, page_data(run, overviews or {}))


def render_text(run: RunDirectory, *, width: int = 60) -> str:
    """Return, for each model, a sparkline of KV use of each replica and a short table, ending in a line end."""
    runs = run.runs()
    texts = [_run_text(each, width=width, title=None if each is run else each.path.name) for each in runs]
    return "\n".join(texts)


def _run_text(run: RunDirectory, *, width: int, title: str | None) -> str:
    trace = run.summary.trace or run.path.name
    lines = [trace if title is None else f"{title}: {trace}"]
    timelines = run.timelines()
    for number, path in timelines:
        columns = columns_of(path)
        name = f"KV use r{number}" if len(timelines) > 1 else "KV use"
        lines.append(f"{name:<14}{sparkline(columns['t_ms'], columns['used_pct'], width)}")
    for name, value in facts(run.summary):
        lines += wrapped(value, f"{name:<14}", " " * 14)
    return "\n".join(lines) + "\n"


def sparkline(times: Column, shares: Column, width: int) -> str:
    """Return, as characters, the maximum of `shares` (in [0, 1]) in each of `width` equal stretches of time.

    A stretch without rows repeats the level before it.
    """
    if not len(times):
        return ""
    span = float(times[-1] - times[0]) or 1.0
    at = np.minimum(((times - times[0]) / span * width).astype(np.int64), width - 1)
    highest = np.full(width, -1.0)
    np.maximum.at(highest, at, shares)
    line = ""
    level = 0
    for value in highest.tolist():
        if value >= 0:
            level = min(round(value * (len(SPARKS) - 1)), len(SPARKS) - 1)
        line += SPARKS[level]
    return line

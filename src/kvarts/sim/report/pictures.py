"""A report as a picture, for notebooks. Requires matplotlib, which is imported only here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from io import BytesIO
from typing import Any

import numpy as np

from kvarts.base.columns import Column
from kvarts.base.errors import ConfigError
from kvarts.base.units import as_duration
from kvarts.core.config import Slo
from kvarts.sim.report.requests import of_prompts
from kvarts.sim.report.words import LATENCIES

__all__ = ["check_installed", "figure_of", "new_figure"]

Columns = Mapping[str, Sequence[Any] | Column]
"""Columns of a report, by name."""

INCHES = (12.0, 9.0)
STRETCHES = 200
"""Number of equal stretches of a run, for the hit ratio of the requests admitted in each."""


def check_installed(field: str) -> None:
    """Raise ConfigError, for the option or method `field`, if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ConfigError("needs matplotlib", field=field, hint="pip install 'kvarts[notebook]'.")


def new_figure(inches: tuple[float, float]) -> Any:
    """Return an empty matplotlib Figure that notebooks show, whether pyplot was imported or not."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class Shown(Figure):  # type: ignore[misc, unused-ignore]  # matplotlib is not always installed
        def _repr_png_(self) -> bytes:
            out = BytesIO()
            self.savefig(out, format="png", metadata={"Software": None})
            return out.getvalue()

    Shown.__name__ = Shown.__qualname__ = "Figure"
    figure = Shown(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def figure_of(title: str, steps: Columns, requests: Columns, slo: Slo) -> Any:
    """Return KV use, queues, hits and latencies of a replay as a matplotlib Figure."""
    check_installed("plot")
    figure = new_figure(INCHES)
    figure.suptitle(title)
    memory, queues, hits, latencies = (figure.add_subplot(4, 1, place) for place in range(1, 5))
    replicas = np.asarray(steps["replica"])
    for replica in np.unique(replicas).tolist():
        mine = {field: column[replicas == replica] for field, column in steps.items()}
        name = f", replica {replica}" if replicas.max() else ""
        resident = mine["used_pages"] + mine["cached_pages"]
        for axes, label, values, idle in (
            (memory, "used and cached", resident, resident),
            (memory, "used", mine["used_pages"], None),
            (queues, "running", mine["running"], None),
            (queues, "waiting", mine["waiting"], None),
        ):
            axes.step(*_until_idle(mine, values, idle), where="post", label=label + name, linewidth=0.8)
    memory.set_ylabel("KV pages")
    queues.set_ylabel("requests")
    _hits(hits, requests)
    _latencies(latencies, requests, slo)
    for axes in (memory, queues, hits):
        axes.set_xlabel("time, s")
    for axes in (memory, queues, hits, latencies):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(loc="upper right")
    return figure


def _until_idle(steps: dict[str, Column], values: Column, idle: Column | None) -> tuple[Column, Column]:
    """Return times in seconds and values of the steps, with `idle` or 0 at the end of each step before a pause."""
    start, end = steps["start_ms"], steps["start_ms"] + steps["duration_ms"]
    pauses = np.flatnonzero(np.append(start[1:] > end[:-1] + 1e-6, len(end) > 0))
    after = np.zeros(len(pauses)) if idle is None else idle[pauses]
    times = np.concatenate([start, end[pauses]]) / 1e3
    order = np.argsort(times, kind="stable")
    return times[order], np.concatenate([values, after])[order]


def _hits(axes: Any, rows: Columns) -> None:
    """Draw the hit ratio of prompt tokens of the requests admitted in each stretch of time."""
    admitted_ms = np.asarray(rows["first_admitted_ms"])
    known = ~np.isnan(admitted_ms)
    end_ms = float(admitted_ms[known].max(initial=0.0)) or 1.0
    at = np.minimum(admitted_ms[known] / end_ms * STRETCHES, STRETCHES - 1).astype(np.int64)
    cached_tokens, input_tokens = (np.asarray(rows[name])[known] for name in ("cached_tokens", "input_tokens"))
    hit, tokens = (
        np.bincount(at, weights=each, minlength=STRETCHES)
        for each in (of_prompts(cached_tokens, input_tokens), input_tokens)
    )
    filled = np.flatnonzero(tokens)
    axes.plot((filled + 1) * end_ms / STRETCHES / 1e3, 100 * hit[filled] / tokens[filled], ".-", linewidth=0.8)
    axes.set_ylabel("prefix hits, %")


def _latencies(axes: Any, rows: Columns, slo: Slo) -> None:
    """Draw the share of requests within each TTFT and E2E, and the SLO if there is one."""
    ends = {"ttft_ms": "first_token_ms", "e2e_ms": "last_token_ms"}
    names = {field: name for name, field in LATENCIES.items()}
    for colour, (field, end) in enumerate(ends.items()):
        ms = np.asarray(rows[end]) - np.asarray(rows["arrival_ms"])
        ms = np.sort(ms[~np.isnan(ms)])
        if not len(ms):
            continue
        axes.step(
            np.maximum(ms, 1e-3), 100 * np.arange(1, len(ms) + 1) / len(ms), label=names[field], color=f"C{colour}"
        )
        bound = getattr(slo, field)
        if bound is not None:
            axes.axvline(bound, linestyle="--", color=f"C{colour}", label=f"SLO {as_duration(bound)}")
    axes.set_xscale("log")
    axes.set_xlabel("time, ms")
    axes.set_ylabel("% of requests within")

"""A plan as a page, and its charts as a picture. Requires matplotlib for a picture, which is imported only here."""

from __future__ import annotations

from importlib.resources import files
from io import BytesIO
from typing import Any

from kvarts.base.units import as_hits, as_memory, as_percent
from kvarts.plan.series import charts_of, sweep_table
from kvarts.plan.tables import heading_of
from kvarts.sim.report.page import fill_page, table_html
from kvarts.sim.report.pictures import new_figure
from kvarts.sim.report.words import duration, number, opening, page_bytes_of, plus_minus

__all__ = ["draw", "figure_of", "render_page", "summary_html"]

Chart = dict[str, Any]

COLUMNS = 2
INCHES = (7.0, 4.2)


def draw(values: dict[str, Any], form: str) -> bytes:
    """Return the charts as `png` or `svg`, byte-identical for equal values."""
    import matplotlib

    figure = figure_of(values)
    out = BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "kvarts"}):
        figure.savefig(out, format=form, metadata={"Date": None} if form == "svg" else {"Software": None})
    return out.getvalue()


def figure_of(values: dict[str, Any]) -> Any:
    """Return the charts as a matplotlib Figure, which notebooks show."""
    charts = [chart for chart in charts_of(values) if chart["kind"] != "note"]
    num_rows = -(-len(charts) // COLUMNS)
    figure = new_figure((INCHES[0] * COLUMNS, INCHES[1] * num_rows))
    figure.suptitle(values["trace"])
    for place, chart in enumerate(charts, 1):
        axes = figure.add_subplot(num_rows, COLUMNS, place)
        axes.set_title(chart["name"])
        DRAWN_BY[chart["kind"]](axes, chart)
    return figure


def _bars(axes: Any, chart: Chart) -> None:
    labels = [bar["label"] for bar in chart["bars"]][::-1]
    axes.barh(labels, [bar["value"] for bar in chart["bars"]][::-1])
    axes.set_xlabel(_titled(chart, "y"))
    if chart["limit"]:
        axes.axvline(chart["most"], linestyle="--", label=chart["limit"])
        axes.legend()


def _scatter(axes: Any, chart: Chart) -> None:
    for is_on_front, label in ((False, "points"), (True, chart.get("front", "Pareto front"))):
        among = [point for point in chart["points"] if point["is_on_front"] == is_on_front]
        xs, ys = [point["x"] for point in among], [point["y"] for point in among]
        axes.scatter(xs, ys, label=label, marker="o" if is_on_front else ".")
        for point in among:
            if point.get("error"):
                low, high = point["error"]
                axes.vlines(point["x"], low, high, linewidth=2)
    _label(axes, [point for point in chart["points"] if point.get("label")])
    if chart["limit"]:
        axes.axhline(chart["limit"]["y"], linestyle="--", label=chart["limit"]["text"])
    _finish(axes, chart)


def _label(axes: Any, points: list[Chart]) -> None:
    """Write the labels of points right of them, the answer's first, where they cover no other label."""
    figure = axes.figure
    figure.canvas.draw()
    taken: list[Any] = []
    for point in sorted(points, key=lambda each: not each["is_on_front"]):
        text = axes.annotate(
            point["label"], (point["x"], point["y"]), xytext=(6, -10), textcoords="offset points", fontsize=7
        )
        box = text.get_window_extent()
        if any(box.overlaps(other) for other in taken) or box.x1 > axes.bbox.x1:
            text.remove()
        else:
            taken.append(box)


def _lines(axes: Any, chart: Chart) -> None:
    styles: dict[str, Chart] = {
        "line": {},
        "points": {"marker": "o"},
        "dots": {"marker": "o", "linestyle": "none", "markersize": 8, "alpha": 0.6},
        "limit": {"linestyle": "--"},
    }
    for series in chart["series"]:
        axes.plot(series["x"], series["y"], label=series["label"], **styles[series["style"]])
    for mark in chart["marks"]:
        axes.axvline(mark["x"], linestyle=":", label=mark["text"])
    if chart["log"]:
        axes.set_xscale("log")
    if chart["log_y"]:
        axes.set_yscale("log")
    _finish(axes, chart)


def _finish(axes: Any, chart: Chart) -> None:
    if chart["y_unit"] == "%":
        axes.set_ylim(bottom=0)
    axes.set_xlabel(_titled(chart, "x"))
    axes.set_ylabel(_titled(chart, "y"))
    axes.legend()
    axes.grid(alpha=0.3)


def _titled(chart: Chart, axis: str) -> str:
    """Return the title of an axis with its unit."""
    title, unit = chart[axis], chart[f"{axis}_unit"]
    return f"{title}, {unit}" if unit else str(title)


DRAWN_BY = {"bars": _bars, "lines": _lines, "scatter": _scatter}


OPTION_HEADS = (
    "",
    ">replicas",
    ">pages of each",
    ">memory of each",
    ">host memory",
    ">hits",
    ">TTFT p99",
    ">TPOT p99",
    ">keep the SLO",
    "limited by",
)
"""Heads of the table of options. A head that begins with > is of a column of numbers."""

FLEET_HEADS = (
    "",
    "fleet",
    ">devices",
    ">device hours",
    ">goodput/s",
    ">per device",
    ">hits",
    ">TTFT p99",
    ">TPOT p99",
    ">keep the SLO",
    "limited by",
)
"""The same for fleets."""


USERS_HEADS = (
    "",
    ">users",
    "on",
    ">price an hour",
    ">per user",
    ">hits",
    ">TTFT p99",
    ">TPOT p99",
    ">keep the SLO",
    "limited by",
)
"""The same for users."""


def render_page(values: dict[str, Any]) -> bytes:
    """Return the page of a plan, of a search for users, or of a sweep."""
    assets = files("kvarts.plan") / "assets"
    template = (assets / "plan.html").read_text(encoding="utf-8")
    script = (assets / "plan.js").read_text(encoding="utf-8")
    return fill_page(template, {"plan.js": script}, _data(values))


def summary_html(values: dict[str, Any]) -> str:
    """Return a notebook view: the plan's sentence and its table of options, or of sizes if nothing was replayed."""
    data = _data(values)
    if data["options"]:
        heads, rows = data["option_heads"], [option["cells"] for option in data["options"]]
    elif values.keys() & {"users", "routers"}:
        heads, rows = (), []
    else:
        heads = ("", ">pages", ">hits", ">optimum")
        knees = {point["pages"] for point in (values.get("groups") or values)["knees"]}
        rows = [
            [
                "knee" if point["pages"] in knees else "",
                f"{point['pages']:,}",
                as_percent(point.get("group_hit_ratio", point["hit_ratio"])),
                as_percent(point.get("group_optimum_hit_ratio", point["optimum_hit_ratio"])),
            ]
            for point in values["at"]
        ]
    return table_html(data["title"], [data["subtitle"], data["verdict"]], heads, rows)


def _data(values: dict[str, Any]) -> dict[str, Any]:
    found = values.get("fleets") or values.get("users") or values.get("latency", {})
    options = values["users"]["answers"] if "users" in values else found.get("options", [])
    heads: tuple[str, ...] = OPTION_HEADS
    cells_of = _cells
    if "fleets" in values:
        heads, cells_of = FLEET_HEADS, _fleet_cells
    elif "users" in values:
        heads, cells_of = USERS_HEADS, _users_cells
    page_bytes = page_bytes_of(values.get("config") or {})
    slo_share = found.get("slo_share")
    return {
        "title": _title(values),
        "subtitle": _subtitle(values),
        "command": values.get("command", ""),
        "charts": charts_of(values),
        "verdict": _sentence(values.get("advice")),
        "option_heads": heads,
        "options": [
            {
                "name": option["name"],
                "what": option["what"],
                "cells": cells_of(option, page_bytes, slo_share),
                "reasons": [*option["notes"], *option["would_change"]],
                "command": option["command"],
            }
            for option in options
        ],
        "sweep": sweep_table(values["sweep"]) if "sweep" in values else None,
    }


def _sentence(text: str | None) -> str:
    return "" if not text else f"{text}."


def _cells(option: dict[str, Any], page_bytes: int | None, slo_share: float | None) -> list[str]:
    """Return a row under OPTION_HEADS. `page_bytes`: None if no model gives the size of a page."""
    kept = option["keeps_slo"]
    unsure = option.get("uncertainty", {})
    return [
        option["name"],
        f"{option['replicas']:,}",
        f"{option['pages']:,}",
        "-" if page_bytes is None else as_memory(option["pages"] * page_bytes),
        f"{as_memory(option['host_bytes'])}, {option['policy']}" if option["host_bytes"] else "-",
        as_hits(option["hit_ratio"]),
        *(
            "-" if (ms := option[f"{metric}_p99"]) is None else plus_minus(ms, unsure.get(metric, {}).get("p99"))
            for metric in ("ttft_ms", "tpot_ms")
        ),
        "-" if kept is None else f"{as_percent(option['slo_ratio'], bound=slo_share)}, {'yes' if kept else 'no'}",
        option["limited_by"].replace("kv_pages", "KV pages").replace("_", " "),
    ]


def _users_cells(option: dict[str, Any], page_bytes: int | None, slo_share: float | None) -> list[str]:
    """Return a row under USERS_HEADS."""
    prices = (f"{option[name]:,.4g}" for name in ("price_per_hour", "price_per_user_hour"))
    return [option["name"], f"{option['users']:,}", option["named"], *prices, *_outcome(option, slo_share)]


def _outcome(option: dict[str, Any], slo_share: float | None) -> list[str]:
    """Return hits, latencies, the share of requests that keep the SLO, and the limit."""
    return [
        as_hits(option["hit_ratio"]),
        *(duration(option[f"{metric}_p99"]) for metric in ("ttft_ms", "tpot_ms")),
        f"{as_percent(option['slo_ratio'], bound=slo_share)}, {'yes' if option['keeps_slo'] else 'no'}",
        option["limited_by"].replace("kv_pages", "KV pages").replace("_", " "),
    ]


def _fleet_cells(option: dict[str, Any], page_bytes: int | None, slo_share: float | None) -> list[str]:
    """Return a row under FLEET_HEADS."""
    return [
        option["name"],
        option["fleet"],
        f"{option['devices']:,}",
        f"{option['device_hours']:.3f}",
        number(option["goodput_per_s"]),
        number(option["goodput_per_s_per_device"]),
        *_outcome(option, slo_share),
    ]


def _title(values: dict[str, Any]) -> str:
    if "users" in values:
        return f"How many users fit: {values['trace']}"
    if "routers" in values:
        return f"Routers for {values['trace']}"
    if "fleets" in values:
        return f"Fleets for {values['trace']}"
    return f"Sweep of {values['trace']}" if "sweep" in values else f"Plan for {values['trace']}"


def _subtitle(values: dict[str, Any]) -> str:
    if "subtitle" in values:
        return str(values["subtitle"])
    config = values.get("config") or {}
    of_run = heading_of(config) if "fleets" in values else opening(config)
    replayed_on = "; ".join(line.strip() for line in of_run)
    if values.keys() & {"users", "routers", "fleets"}:
        return replayed_on
    return f"{replayed_on}. " * bool(replayed_on) + (
        f"{values['num_requests']:,} requests, {values['num_prompt_tokens']:,} prompt tokens, "
        f"pages of {values['page_size']} tokens"
    )

"""The charts of a plan as a picture. Requires matplotlib, which is imported only here."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from kvarts.plan.series import charts_of

__all__ = ["draw", "figure_of"]

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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    charts = [chart for chart in charts_of(values) if chart["kind"] != "note"]
    num_rows = -(-len(charts) // COLUMNS)
    figure = Figure(figsize=(INCHES[0] * COLUMNS, INCHES[1] * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
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
    for is_on_front, label in ((False, "points"), (True, "Pareto front")):
        among = [point for point in chart["points"] if point["is_on_front"] == is_on_front]
        xs, ys = [point["x"] for point in among], [point["y"] for point in among]
        axes.scatter(xs, ys, label=label, marker="o" if is_on_front else ".")
    if chart["limit"]:
        axes.axhline(chart["limit"]["y"], linestyle="--", label=chart["limit"]["text"])
    _finish(axes, chart)


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

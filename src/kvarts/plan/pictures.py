"""The charts of a plan as a picture. Needs matplotlib, which is imported only here."""

from __future__ import annotations

from importlib.util import find_spec
from io import BytesIO
from typing import Any

from kvarts.errors import ConfigError
from kvarts.plan.series import charts_of

__all__ = ["check_installed", "draw"]

COLUMNS = 2
INCHES = (7.0, 4.2)


def check_installed() -> None:
    """Raise ConfigError where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ConfigError("needs matplotlib", field="--plot", hint="pip install 'kvarts[plan]', or write --html.")


def draw(values: dict[str, Any], form: str) -> bytes:
    """Return the charts as a `png` or `svg`; the same values give the same bytes. Raise ConfigError for no chart."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    charts = charts_of(values)
    num_rows = -(-len(charts) // COLUMNS)
    figure = Figure(figsize=(INCHES[0] * COLUMNS, INCHES[1] * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(values["trace"])
    for place, chart in enumerate(charts, 1):
        axes = figure.add_subplot(num_rows, COLUMNS, place)
        axes.set_title(chart["name"])
        if chart["kind"] == "bars":
            labels = [bar["label"] for bar in chart["bars"]][::-1]
            axes.barh(labels, [bar["value"] for bar in chart["bars"]][::-1])
            axes.set_xlabel(chart["y"])
            if chart["limit"]:
                axes.axvline(chart["most"], linestyle="--", label=chart["limit"])
                axes.legend()
            continue
        if chart["kind"] == "scatter":
            for is_on_front, label in ((False, "points"), (True, "Pareto front")):
                among = [point for point in chart["points"] if point["is_on_front"] == is_on_front]
                xs, ys = [point["x"] for point in among], [point["y"] for point in among]
                axes.scatter(xs, ys, label=label, marker="o" if is_on_front else ".")
        for series in chart.get("series", ()):
            axes.plot(series["x"], series["y"], label=series["label"], marker="o" if series["points"] else "")
        axes.set_xlabel(chart["x"])
        axes.set_ylabel(chart["y"])
        if chart.get("log"):
            axes.set_xscale("log")
        if chart.get("log_y"):
            axes.set_yscale("log")
        axes.legend()
        axes.grid(alpha=0.3)
    out = BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "kvarts"}):
        figure.savefig(out, format=form, metadata={"Date": None} if form == "svg" else {"Software": None})
    return out.getvalue()

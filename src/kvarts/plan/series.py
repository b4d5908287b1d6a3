"""The charts of a plan as values: what a page draws, and what pictures are drawn from.

A chart has axes, series, and points in series that have a text and a command.
"""

from __future__ import annotations

from typing import Any

from kvarts.plan.sweep import pareto
from kvarts.plan.sweep_page import sweep_charts

__all__ = ["charts_of", "usual_points"]

Chart = dict[str, Any]

WIDE = 50.0
"""Between the largest and the smallest value of a chart, from which on its y axis is logarithmic."""


def charts_of(values: dict[str, Any]) -> list[Chart]:
    """Return the charts that there are values for."""
    if "users" in values:
        return _users(values["users"])
    if "sweep" in values:
        return sweep_charts(values["sweep"])
    charts = [_curve(values)]
    if values.get("league"):
        charts += _league(values["league"])
    if values.get("tiers"):
        charts += _tiers(values["tiers"], str(values.get("command", "")))
    if values.get("latency"):
        charts += _latencies(values["latency"], values["page_size"])
    return charts


def _chart(name: str, x: str, y: str, series: list[Chart], *, log: bool = False, note: str = "") -> Chart:
    ys = [value for each in series for value in each["y"] if value is not None]
    log_y = bool(ys) and min(ys) > 0 and max(ys) > WIDE * min(ys)
    return {"name": name, "kind": "lines", "x": x, "y": y, "series": series, "log": log, "log_y": log_y, "note": note}


def _series(label: str, xs: list[float], ys: list[float | None], points: list[Chart] | None = None) -> Chart:
    """Return a line; with `points`, of the same number, each has a text and a command."""
    return {"label": label, "x": xs, "y": ys, "points": points or []}


def _point(text: str, command: str) -> Chart:
    return {"text": text, "command": command}


def _curve(values: dict[str, Any]) -> Chart:
    curve = values["curve"]
    knees = {point["pages"] for point in values["knees"]}
    at = sorted(values["at"], key=lambda point: int(point["pages"]))
    points = [
        _point(
            f"{point['pages']:,} pages{', a knee' if point['pages'] in knees else ''}: LRU {point['hit_ratio']:.1%}, "
            f"optimum {point['optimum_hit_ratio']:.1%}",
            str(point.get("command", "")),
        )
        for point in at
    ]
    sizes = [point["pages"] for point in at]
    inside = [pair for pair in zip(curve["pages"], curve["hit_ratio"], strict=True) if pair[0] > 0]
    return _chart(
        "Hits by memory",
        "pages",
        "% of prompt tokens",
        [
            _series("LRU", [pages for pages, _ in inside], [100 * ratio for _, ratio in inside]),
            _series("LRU, looked at", sizes, [100 * point["hit_ratio"] for point in at], points),
            _series("optimum", sizes, [100 * point["optimum_hit_ratio"] for point in at], points),
        ],
        log=True,
        note="Knees: " + (", ".join(f"{pages:,}" for pages in sorted(knees)) or "none") + " pages.",
    )


def _league(rows: list[dict[str, Any]]) -> list[Chart]:
    charts = []
    for size in dict.fromkeys(row["pages"] for row in rows if "replayed" not in row):
        of_size = [row for row in rows if row["pages"] == size and "replayed" not in row]
        bars = [
            {
                "label": row["policy"],
                "value": 100 * row["hit_ratio"],
                **_point(f"{row['policy']}: {row['hit_ratio']:.1%} of prompt tokens", row["command"]),
            }
            for row in of_size
        ]
        best = 100 * of_size[0]["optimum_hit_ratio"]
        charts.append(_bars(f"Policies, {size:,} pages", "% of prompt tokens", bars, most=best, limit="optimum"))
    replayed = [row for row in rows if "replayed" in row]
    for size in dict.fromkeys(row["pages"] for row in replayed):
        bars = [
            {
                "label": row["policy"],
                "value": row["ttft_ms"]["mean"] or 0.0,
                **_point(f"{row['policy']}: TTFT mean {row['ttft_ms']['mean']} ms", row["command"]),
            }
            for row in replayed
            if row["pages"] == size
        ]
        charts.append(_bars(f"Policies replayed, {size:,} pages", "TTFT mean, ms", bars))
    return charts


def _bars(name: str, y: str, bars: list[Chart], *, most: float = 0.0, limit: str = "") -> Chart:
    most = max([most, *(bar["value"] for bar in bars)])
    return {"name": name, "kind": "bars", "y": y, "bars": bars, "most": most, "limit": limit, "note": ""}


def _tiers(tiers: dict[str, Any], command: str) -> list[Chart]:
    charts = []
    for name, title, curve in (("host", "Host memory", tiers["curve"]), ("disk", "Disk", tiers["disk_curve"])):
        if not curve:
            continue
        points = [
            _point(f"{point['gib'][name]:,.1f} GiB of {title.lower()} save {point['saved_s']:,.1f} s", command)
            for point in curve
        ]
        line = _series(
            "saved",
            [point["gib"][name] for point in curve],
            [point["saved_ms_per_request"] for point in curve],
            points,
        )
        charts.append(_chart(title, f"GiB of {title.lower()}", "ms of prefill saved, a request", [line]))
    bars = [
        {
            "label": each["tier"],
            "value": max(0.0, each["saved_ms_per_request"]),
            **_point(
                f"a GiB more of {each['tier']} saves {each['saved_ms_per_request']:.3f} ms a request{_priced(each)}",
                command,
            ),
        }
        for each in tiers["next_gib"]
    ]
    return [*charts, _bars("The next GiB", "ms of prefill saved, a request", bars)]


def _priced(each: dict[str, Any]) -> str:
    return "" if each["price"] is None else f", {each['saved_s_per_price']:,.2f} s in all for a unit of price"


def _latencies(latency: dict[str, Any], page_size: int) -> list[Chart]:
    points = usual_points(latency)
    rates = [point["rate"] for point in points]
    usual = max(set(rates), key=rates.count) if rates else 1.0
    by_memory = [point for point in points if point["rate"] == usual]
    by_memory.sort(key=lambda point: int(point["pages"] * point["replicas"]))
    charts = []
    if by_memory:
        tokens = [point["pages"] * point["replicas"] * page_size for point in by_memory]
        rows = [
            {"tokens": size, "ttft": point["ttft_ms"]["p99"]} for size, point in zip(tokens, by_memory, strict=True)
        ]
        front = pareto(rows, ("tokens", "ttft"))
        texts = [_latency_point(point, is_on) for point, is_on in zip(by_memory, front, strict=True)]
        charts.append(
            _chart(
                "Latency by memory",
                "tokens of KV memory, all replicas",
                "TTFT, ms",
                [
                    _series("p50", tokens, [point["ttft_ms"]["p50"] for point in by_memory], texts),
                    _series("p99", tokens, [point["ttft_ms"]["p99"] for point in by_memory], texts),
                    _series(
                        "Pareto front",
                        [size for size, is_on in zip(tokens, front, strict=True) if is_on],
                        [point["ttft_ms"]["p99"] for point, is_on in zip(by_memory, front, strict=True) if is_on],
                        [text for text, is_on in zip(texts, front, strict=True) if is_on],
                    ),
                ],
                log=True,
            )
        )
    by_rate = [point for point in points if _step(point) == _most_rates(points)]
    if len({point["rate"] for point in by_rate}) > 1:
        by_rate.sort(key=lambda point: float(point["rate"]))
        texts = [_latency_point(point, False) for point in by_rate]
        xs = [point["rate"] for point in by_rate]
        charts.append(
            _chart(
                "Latency by rate",
                "times the rate of the trace",
                "TTFT, ms",
                [
                    _series("p50", xs, [point["ttft_ms"]["p50"] for point in by_rate], texts),
                    _series("p99", xs, [point["ttft_ms"]["p99"] for point in by_rate], texts),
                ],
            )
        )
    return charts


def usual_points(latency: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the replays with the router and the costs that were given; others were made to see what they change."""
    return [
        point
        for point in latency["points"]
        if point["cost_factor"] == latency["cost_factor"]
        and (point["replicas"] == 1 or point["router"] == latency["router"])
    ]


def _step(point: dict[str, Any]) -> tuple[int, int]:
    return point["replicas"], point["pages"]


def _most_rates(points: list[dict[str, Any]]) -> tuple[int, int]:
    """Return the step that was replayed at most rates."""
    rates: dict[tuple[int, int], set[float]] = {}
    for point in points:
        rates.setdefault(_step(point), set()).add(point["rate"])
    return max(rates, key=lambda step: (len(rates[step]), step))


def _latency_point(point: dict[str, Any], is_on_front: bool) -> Chart:
    kept = "" if point["slo_ratio"] is None else f", SLO kept by {point['slo_ratio']:.1%}"
    p99 = point["ttft_ms"]["p99"]
    text = (
        f"{point['replicas']} x {point['pages']:,} pages at {point['rate']:.3g} times the rate: "
        f"TTFT p99 {'-' if p99 is None else f'{p99:,.0f} ms'}{kept}{', on the Pareto front' if is_on_front else ''}"
    )
    return _point(text, point["command"])


def _users(users: dict[str, Any]) -> list[Chart]:
    points = users["points"]
    texts = [
        _point(
            f"{point['users']} users: TTFT p99 {point['ttft_ms']['p99']} ms"
            + ("" if point["slo_ratio"] is None else f", SLO kept by {point['slo_ratio']:.1%}"),
            point["command"],
        )
        for point in points
    ]
    xs = [point["users"] for point in points]
    charts = [
        _chart(
            "Latency by users",
            "users",
            "TTFT, ms",
            [_series(column, xs, [point["ttft_ms"][column] for point in points], texts) for column in ("p50", "p99")],
        )
    ]
    if users["slo_share"] is not None:
        kept = [100 * point["slo_ratio"] for point in points]
        charts.append(_chart("SLO by users", "users", "% of requests", [_series("SLO kept", xs, kept, texts)]))
    return charts

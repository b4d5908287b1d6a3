"""The charts of a plan and of a sweep as values, from which pages and pictures are drawn; and the table of a sweep.

A chart has axes with units and series of points; each point has a text and a command.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from itertools import product
from typing import Any

from kvarts.base.units import as_hits, as_memory
from kvarts.plan.grid import load_of, pareto
from kvarts.sim.report.words import duration, in_memory, percent

__all__ = ["charts_of", "distinct_points", "sweep_charts", "sweep_table", "sweep_values", "usual_points"]

Chart = dict[str, Any]
GIB = 1 << 30

WIDE = 50.0
"""Ratio of the largest to the smallest latency above which a chart has a logarithmic y axis."""
HITS = "hits, of prompt tokens"
KEPT = "requests that keep the SLO"
SAVED = "prefill saved per request"
REPLAYED = "Replayed fleets only; where more workers never lower the goodput, no other fleet is better than the front."
Row = dict[str, Any]
MOST_ROWS = 2000
"""Rows of the table on a page; points.json contains all."""
MEMORY = ("tokens of KV memory, all replicas", "kv_tokens", "")
TTFT = ("TTFT p99", "ttft_ms_p99", "ms")
HITS_OF_SWEEP = ("hits, of prompt tokens", "hit_ratio", "%")
THROUGHPUT = ("requests/s", "request_throughput_per_s", "")


def sweep_values(
    name: str, rows: Sequence[Row], keys: Sequence[str], command: str, slo: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the values of a page. `keys`: the settings that points change. `slo`: set if all points have the same.

    `command`: that of the sweep, also used for points without a command.
    """
    rows = [{**row, "command": row["command"] or command} for row in rows]
    points = distinct_points(rows, keys)
    on_front = sum(point["pareto"] for point in points)
    same = "" if len(points) == len(rows) else f", {len(points):,} that measure different things"
    return {
        "trace": name,
        "sweep": {"points": points, "keys": list(keys), "slo": dict(slo or {})},
        "command": command,
        "subtitle": f"{len(rows):,} points{same}; {on_front:,} on the Pareto front of their load, in KV memory, "
        "TTFT p99 and throughput",
    }


def distinct_points(rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """Return the rows with equal measurements merged; `settings` contains all values of each key.

    Rows are merged only if they form a full product of these values, so a page lists no combination that was not
    replayed.
    """
    groups: dict[int, list[Row]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(place if row["same_as"] is None else row["same_as"], []).append(row)
    points = []
    for group in groups.values():
        for among in [group] if _is_product(group, keys) else [[row] for row in group]:
            settings = {key: list(dict.fromkeys(_text(row[key]) for row in among if key in row)) for key in keys}
            points.append({**among[0], "pareto": group[0]["pareto"], "settings": settings})
    return points


def _is_product(rows: Sequence[Row], keys: Sequence[str]) -> bool:
    found = {tuple(_text(row.get(key)) for key in keys) for row in rows}
    values = [dict.fromkeys(_text(row.get(key)) for row in rows) for key in keys]
    return found == set(product(*values))


def _text(value: Any) -> str:
    return str(value)


def sweep_charts(sweep: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the charts of a sweep."""
    points = sweep["points"]
    charts = [
        _scatter("TTFT by memory", MEMORY, TTFT, points, sweep["slo"].get("ttft_ms")),
        _scatter("Throughput by TTFT", TTFT, THROUGHPUT, points),
        _scatter("Hits by memory", MEMORY, HITS_OF_SWEEP, points),
    ]
    return [chart for chart in charts if chart["points"]]


def sweep_table(sweep: dict[str, Any]) -> dict[str, Any]:
    """Return the table, and the setting by which points are coloured.

    It is a setting of the load if possible, else the setting with most values; never one without effect.
    """
    points, keys = sweep["points"], sweep["keys"]

    def place(key: str) -> tuple[bool, bool, int]:
        num_values = len({value for point in points for value in point["settings"][key]})
        is_mixed = any(len(point["settings"][key]) > 1 for point in points)
        return not is_mixed and num_values > 1, bool(load_of([key])), num_values

    has_slo = any(point.get("slo_ratio") is not None for point in points)
    heads = [
        *keys,
        ">KV tokens",
        ">KV memory",
        ">hits",
        ">TTFT p99",
        ">TPOT p99",
        ">requests/s",
        *([">keep the SLO"] if has_slo else []),
    ]
    shown = points[:MOST_ROWS]
    return {
        "keys": keys,
        "colour_by": max(keys, key=place) if keys else None,
        "heads": [*heads, "Pareto front"],
        "points": [
            {
                "text": _said(point),
                "command": point["command"],
                "settings": point["settings"],
                "cells": [*(" or ".join(point["settings"][key]) or "-" for key in keys), *_cells(point, has_slo)],
            }
            for point in shown
        ],
        "left_out": len(points) - len(shown),
    }


def _cells(point: Row, has_slo: bool) -> list[str]:
    rate = point["request_throughput_per_s"]
    return [
        f"{point['kv_tokens']:,}",
        as_memory(point["kv_bytes"]) if point.get("kv_bytes") else "-",
        as_hits(point["hit_ratio"]),
        *("-" if ms is None else duration(ms) for ms in (point["ttft_ms_p99"], point["tpot_ms_p99"])),
        "-" if rate is None else f"{rate:,.2f}",
        *([percent(point["slo_ratio"])] if has_slo else []),
        "yes" if point["pareto"] else "",
    ]


def _scatter(
    name: str, x: tuple[str, str, str], y: tuple[str, str, str], points: Sequence[Row], slo_ms: float | None = None
) -> dict[str, Any]:
    """Return a chart of the points that have both values. `x`, `y`: title, column and unit."""
    (x_title, x_key, x_unit), (y_title, y_key, y_unit) = x, y
    return {
        "name": name,
        "kind": "scatter",
        "x": x_title,
        "x_unit": x_unit,
        "y": y_title,
        "y_unit": y_unit,
        "points": [
            {
                "x": point[x_key],
                "y": 100 * point[y_key] if y_unit == "%" else point[y_key],
                "is_on_front": point["pareto"],
                "text": _said(point),
                "command": point["command"],
                "settings": point["settings"],
            }
            for point in points
            if point[x_key] is not None and point[y_key] is not None
        ],
        "limit": None if slo_ms is None else {"y": slo_ms, "text": f"SLO {duration(slo_ms)}"},
        "note": "Filled: on the Pareto front. A number: points at one place.",
    }


def _said(point: Row) -> str:
    changed = ", ".join(f"{key} {' or '.join(values)}" for key, values in point["settings"].items() if values)
    ttft, rate = point["ttft_ms_p99"], point["request_throughput_per_s"]
    return (
        f"{changed}: {point['kv_tokens']:,} KV tokens, {as_hits(point['hit_ratio'])} hits, "
        f"TTFT p99 {'-' if ttft is None else duration(ttft)}, {'-' if rate is None else f'{rate:,.2f}'} requests/s"
    )


def charts_of(values: dict[str, Any]) -> list[Chart]:
    """Return the charts for the values present. A chart without data is replaced by a note with the reason."""
    if "users" in values:
        return _users(values["users"])
    if "routers" in values:
        return _routers(values["routers"])
    if "fleets" in values:
        return _fleets(values["fleets"])
    if "sweep" in values:
        return sweep_charts(values["sweep"])
    charts = _purchases(values.get("latency") or {})
    charts.append(_note("Hits", values["unknown_hits"]) if "unknown_hits" in values else _curve(values))
    if values.get("league"):
        charts += _league(values["league"])
    if values.get("tiers"):
        note = "The list has the parts that memory below a device keeps." if "groups" in values else ""
        charts += _tiers(values["tiers"], str(values.get("command", "")), note)
    if values.get("latency"):
        charts += _latencies(values["latency"], values["page_size"])
    return charts


def _chart(
    name: str,
    x: tuple[str, str],
    y: tuple[str, str],
    series: list[Chart],
    *,
    log: bool = False,
    note: str = "",
    marks: list[Chart] | None = None,
) -> Chart:
    """Return a chart of lines. `x`, `y`: title and unit (ms, %, GiB or empty).

    The y axis is logarithmic only for latencies that differ by more than WIDE. `marks`: labelled values of x.
    """
    ys = [value for each in series for value in each["y"] if value is not None]
    log_y = y[1] == "ms" and bool(ys) and min(ys) > 0 and max(ys) > WIDE * min(ys)
    return {
        "name": name,
        "kind": "lines",
        "x": x[0],
        "x_unit": x[1],
        "y": y[0],
        "y_unit": y[1],
        "series": series,
        "log": log,
        "log_y": log_y,
        "note": note,
        "marks": marks or [],
    }


def _series(
    label: str, xs: list[float], ys: list[float | None], points: list[Chart] | None = None, style: str = ""
) -> Chart:
    """Return a line. `points`, if given, has a text and a command for each value.

    `style`: line, points (a line with a circle at each), dots (circles only), or limit (dashed).
    """
    return {
        "label": label,
        "x": xs,
        "y": ys,
        "points": points or [],
        "style": style or ("points" if points else "line"),
    }


def _limit(label: str, xs: list[float], at: float) -> Chart:
    """Return a dashed line across `xs`, at a bound that should not be exceeded."""
    return _series(label, [min(xs), max(xs)], [at, at], style="limit")


def _point(text: str, command: str) -> Chart:
    return {"text": text, "command": command}


def _curve(values: dict[str, Any]) -> Chart:
    counted = values.get("groups") or values
    knees = {point["pages"] for point in counted["knees"]}
    at = sorted(values["at"], key=lambda point: int(point["pages"]))

    def memory(pages: int) -> str:
        return f"{pages:,} pages{in_memory(pages, values.get('config') or {})}"

    def lines(hit: str, most: str, said: str, label: str, label_of_most: str, marked: Set[int]) -> list[Chart]:
        texts = [
            _point(
                f"{memory(point['pages'])}{', a knee' if point['pages'] in marked else ''}: "
                + said.format(percent(point[hit]), percent(point[most])),
                str(point.get("command", "")),
            )
            for point in at
        ]
        sizes = [point["pages"] for point in at]
        return [
            _series(f"{label}, in the table", sizes, [100 * point[hit] for point in at], texts, "dots"),
            _series(label_of_most, sizes, [100 * point[most] for point in at], texts),
        ]

    line = _of_sizes("LRU", values["curve"])
    if values.get("command"):
        line["at"] = _point("{X} pages: LRU {Y}", f"{values['command']} --at {{x}}")
    series = [line, *lines("hit_ratio", "optimum_hit_ratio", "LRU {}, optimum {}", "LRU", "optimum", knees)]
    note = f"Knees: {', '.join(f'{pages:,}' for pages in sorted(knees))} pages." if knees else "The curve has no knee."
    if "groups" in values:
        said = "with KV groups {}, at most {}"
        series += [
            _of_sizes("KV groups counted", counted["curve"]),
            *lines("group_hit_ratio", "group_optimum_hit_ratio", said, "KV groups", "KV groups, bound", frozenset()),
        ]
        note += " Knees are those with KV groups, of which more memory can find less: each size was simulated."
    num_pages = max((point["pages"] for point in (values.get("latency") or {}).get("points", [])), default=None)
    return _chart(
        "Hits by memory",
        ("pages", ""),
        (HITS, "%"),
        series,
        log=True,
        note=note,
        marks=[] if num_pages is None else [{"x": num_pages, "text": f"one replica: {memory(num_pages)}"}],
    )


def _of_sizes(label: str, curve: Mapping[str, list[Any]]) -> Chart:
    """Return the line of a curve of hits."""
    inside = [pair for pair in zip(curve["pages"], curve["hit_ratio"], strict=True) if pair[0] > 0]
    return _series(label, [pages for pages, _ in inside], [100 * ratio for _, ratio in inside])


def _league(rows: list[dict[str, Any]]) -> list[Chart]:
    charts = []
    for size in dict.fromkeys(row["pages"] for row in rows if "replayed" not in row):
        of_size = [row for row in rows if row["pages"] == size and "replayed" not in row]
        bars = [
            {
                "label": row["policy"],
                "value": 100 * row["hit_ratio"],
                **_point(f"{row['policy']}: {as_hits(row['hit_ratio'])} of prompt tokens", row["command"]),
            }
            for row in of_size
        ]
        best = 100 * of_size[0]["optimum_hit_ratio"]
        charts.append(_bars(f"Policies, {size:,} pages", (HITS, "%"), bars, most=best, limit="optimum"))
    replayed = [row for row in rows if "replayed" in row]
    for size in dict.fromkeys(row["pages"] for row in replayed):
        bars = [
            {
                "label": row["policy"],
                "value": row["ttft_ms"]["mean"] or 0.0,
                **_point(f"{row['policy']}: TTFT mean {_ms(row['ttft_ms']['mean'])}", row["command"]),
            }
            for row in replayed
            if row["pages"] == size
        ]
        charts.append(_bars(f"Policies replayed, {size:,} pages", ("TTFT mean", "ms"), bars))
    return charts


def _bars(name: str, y: tuple[str, str], bars: list[Chart], *, most: float = 0.0, limit: str = "") -> Chart:
    most = max([most, *(bar["value"] for bar in bars)])
    return {"name": name, "kind": "bars", "y": y[0], "y_unit": y[1], "bars": bars, "most": most, "limit": limit}


def _note(name: str, text: str) -> Chart:
    return {"name": name, "kind": "note", "note": text}


def _tiers(tiers: dict[str, Any], command: str, note: str) -> list[Chart]:
    charts = []
    titles = {"host": "Host memory", "disk": "Disk"}
    for name, curve in zip(tiers["load_us_per_token"], (tiers["curve"], tiers["disk_curve"]), strict=False):
        title = titles.get(name, name)
        if not curve:
            continue
        if len({point["saved_s"] for point in curve}) == 1:
            charts.append(_note(title, "It would save nothing: everything that is found again fits above it."))
            continue
        sizes = [point["gib"][name] for point in curve]
        bound: list[float | None] = [100 * sum(point["hit_ratio"].values()) for point in curve]
        points = [
            _point(
                f"{size:,.1f} GiB of {title.lower()}: at most {ratio:.1f} % hits{_replayed(point)}",
                str(point.get("command", command)),
            )
            for size, ratio, point in zip(sizes, bound, curve, strict=True)
        ]
        series = [_series("as one LRU list, one request at a time", sizes, bound, points)]
        if any(point.get("replayed") for point in curve):
            found = [None if each is None else 100 * each["hit_ratio"] for each in (at["replayed"] for at in curve)]
            series.insert(0, _series("replayed", sizes, found, points))
        charts.append(_chart(title, (title.lower(), "GiB"), (HITS, "%"), series, note=note))
    bars = [
        {
            "label": each["tier"],
            "value": max(0.0, each["saved_ms_per_request"]),
            **_point(
                f"a GiB more of {each['tier']} saves {_ms(each['saved_ms_per_request'])} per request{_priced(each)}",
                command,
            ),
        }
        for each in tiers["next_gib"]
    ]
    if not any(bar["value"] for bar in bars):
        return [*charts, _note("The next GiB", "It saves nothing in any tier: everything that is found again fits.")]
    return [*charts, _bars("The next GiB", (SAVED, "ms"), bars)]


def _replayed(point: dict[str, Any]) -> str:
    found = point.get("replayed")
    return "" if not found else f", replayed {as_hits(found['hit_ratio'])}; TTFT p99 {_ms(found['ttft_ms']['p99'])}"


def _priced(each: dict[str, Any]) -> str:
    return "" if each["price"] is None else f", {each['saved_s_per_price']:,.2f} s in all for a unit of price"


def _purchases(latency: dict[str, Any]) -> list[Chart]:
    """Return what each purchase that was replayed costs and serves, with the answer marked; empty without an answer."""
    if latency.get("slo_share") is None or not any(option["keeps_slo"] for option in latency["options"]):
        return []
    prices, chosen = latency["prices"], latency["options"][0]
    bought = ("replicas", "pages", "host_bytes", "policy")
    rate = min(point["rate"] for point in latency["points"] if all(point[name] == chosen[name] for name in bought))
    points = [
        {
            **point,
            "price_per_hour": point["devices"] * (prices["device"] + point["host_bytes"] / GIB * prices["host_gib"]),
        }
        for point in usual_points(latency)
        if point["rate"] == rate and point["pages"] == chosen["pages"]
    ]
    (answer,) = (point for point in points if all(point[name] == chosen[name] for name in bought))
    return [_costs(points, answer, latency, lambda point: "")]


def _costs(points: list[Row], answer: Row, found: Mapping[str, Any], shape_of: Callable[[Row], str]) -> Chart:
    """Return the goodput of points by their price, with the answer marked and the error of its goodput.

    Labels are devices, shape and host memory. `found`: the latencies or fleets of the plan.
    """
    prices, sure = found["prices"], found["confidence"]
    drawn = []
    for point in points:
        host = as_memory(point["devices"] * point["host_bytes"]) if point["host_bytes"] else ""
        memory = f"{host} of host memory ({point['policy']})" if host else ""
        size = f"{point['devices']:,} GPU{'s' * (point['devices'] != 1)}"
        text = ", ".join(filter(None, (size, shape_of(point), memory)))
        text += f": SLO kept by {percent(point['slo_ratio'])}"
        label = " ".join(filter(None, (size, shape_of(point), f"+ {host}" if host else "")))
        is_answer = point is answer
        drawn.append(
            {
                "x": point["price_per_hour"],
                "y": point["goodput_per_s"],
                "is_on_front": is_answer,
                "label": label,
                "error": [sure["goodput_per_s"]["least"], sure["goodput_per_s"]["most"]]
                if is_answer and sure
                else None,
                **_point(f"{text}, {sure['text']}" if is_answer and sure else text, point["command"]),
                "settings": {},
            }
        )
    bar = "" if sure is None else " Its bar: steps longer or shorter by their error, so 8 of 10 worlds."
    return {
        "name": "Goodput by cost",
        "kind": "scatter",
        "x": f"{prices['currency']} per hour" if prices["currency"] else "price, in devices",
        "x_unit": "",
        "y": "requests that keep the SLO, per s",
        "y_unit": "",
        "points": drawn,
        "limit": None,
        "front": "the answer",
        "note": f"Filled: the answer.{bar} A number: points at one place.",
    }


def _latencies(latency: dict[str, Any], page_size: int) -> list[Chart]:
    points = usual_points(latency)
    rates = [point["rate"] for point in points]
    usual = max(set(rates), key=rates.count) if rates else 1.0
    by_memory = [point for point in points if point["rate"] == usual]
    by_memory.sort(key=lambda point: int(point["pages"] * point["replicas"]))
    slo_ms = latency["slo"]["ttft_ms"]
    charts = []
    if by_memory:
        tokens = [point["pages"] * point["replicas"] * page_size for point in by_memory]
        rows = [
            {"tokens": size, "ttft": point["ttft_ms"]["p99"]} for size, point in zip(tokens, by_memory, strict=True)
        ]
        front = pareto(rows, ("tokens", "ttft"))
        texts = [_latency_point(point, is_on) for point, is_on in zip(by_memory, front, strict=True)]
        x = (MEMORY[0], "")
        lines = [*_ttft(tokens, by_memory, texts, slo_ms), _front(tokens, by_memory, texts, front)]
        charts.append(_chart("Latency by memory", x, ("TTFT", "ms"), lines, log=True))
        charts += _kept("memory", x, tokens, by_memory, texts, latency, log=True)
    by_rate = [point for point in points if _step(point) == _most_rates(points)]
    if len({point["rate"] for point in by_rate}) > 1:
        by_rate.sort(key=lambda point: float(point["rate"]))
        texts = [_latency_point(point, False) for point in by_rate]
        xs = [point["rate"] for point in by_rate]
        x = ("times the rate of the trace", "")
        charts.append(_chart("Latency by rate", x, ("TTFT", "ms"), _ttft(xs, by_rate, texts, slo_ms)))
        charts += _kept("rate", x, xs, by_rate, texts, latency)
    return charts


def _ttft(xs: list[float], points: list[dict[str, Any]], texts: list[Chart], slo_ms: float | None) -> list[Chart]:
    """Return the lines of TTFT, and the SLO if there is one."""
    lines = [_series(column, xs, [point["ttft_ms"][column] for point in points], texts) for column in ("p50", "p99")]
    return lines if slo_ms is None else [*lines, _limit("SLO", xs, slo_ms)]


def _front(xs: list[float], points: list[dict[str, Any]], texts: list[Chart], is_on: list[bool]) -> Chart:
    """Return the p99s on the Pareto front of memory and TTFT, as dots."""
    on = [index for index, each in enumerate(is_on) if each]
    return _series(
        "p99 on the Pareto front",
        [xs[index] for index in on],
        [points[index]["ttft_ms"]["p99"] for index in on],
        [texts[index] for index in on],
        "dots",
    )


def _kept(
    by: str,
    x: tuple[str, str],
    xs: list[float],
    points: list[dict[str, Any]],
    texts: list[Chart],
    asked: dict[str, Any],
    *,
    log: bool = False,
) -> list[Chart]:
    """Return the chart of requests that keep the SLO that was `asked` for; empty without an SLO."""
    share = asked["slo_share"]
    if share is None:
        return []
    kept: list[float | None] = [100 * point["slo_ratio"] for point in points]
    lines = [_series("SLO kept", xs, kept, texts), _limit("asked for", xs, 100 * share)]
    return [_chart(f"SLO kept, by {by}", x, (KEPT, "%"), lines, log=log)]


def usual_points(latency: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the replays with the given router and costs; others only show the effect of changing these."""
    return [
        point
        for point in latency["points"]
        if point["cost_factor"] == latency["cost_factor"]
        and point["length"] == 1.0
        and point["share_of_agents"] is None
        and (point["replicas"] == 1 or point["router"] == latency["router"])
    ]


def _step(point: dict[str, Any]) -> tuple[int, int]:
    return point["replicas"], point["pages"]


def _most_rates(points: list[dict[str, Any]]) -> tuple[int, int]:
    """Return the step that was replayed at the most rates."""
    rates: dict[tuple[int, int], set[float]] = {}
    for point in points:
        rates.setdefault(_step(point), set()).add(point["rate"])
    return max(rates, key=lambda step: (len(rates[step]), step))


def _latency_point(point: dict[str, Any], is_on_front: bool) -> Chart:
    text = (
        f"{point['replicas']} x {point['pages']:,} pages at {point['rate']:.3g} times the rate: {_measured(point)}"
        f"{', on the Pareto front' if is_on_front else ''}"
    )
    return _point(text, point["command"])


def _measured(point: dict[str, Any]) -> str:
    kept = "" if point["slo_ratio"] is None else f", SLO kept by {percent(point['slo_ratio'])}"
    return f"TTFT p50 {_ms(point['ttft_ms']['p50'])}, p99 {_ms(point['ttft_ms']['p99'])}{kept}"


def _ms(value: float | None) -> str:
    return "-" if value is None else duration(value)


def _users(users: dict[str, Any]) -> list[Chart]:
    points = users["points"]
    texts = [_point(f"{point['users']} users: {_measured(point)}", point["command"]) for point in points]
    xs = [point["users"] for point in points]
    x = ("users", "")
    latency = _chart("Latency by users", x, ("TTFT", "ms"), _ttft(xs, points, texts, users["slo"]["ttft_ms"]))
    return [latency, *_kept("users", x, xs, points, texts, users)]


def _routers(routers: dict[str, Any]) -> list[Chart]:
    """Return the mean TTFT behind each router, and the requests that keep the SLO, if there is one."""

    def bars(name: str, y: tuple[str, str], value_of: Callable[[Row], float]) -> Chart:
        return _bars(
            name,
            y,
            [
                {
                    "label": " ".join(filter(None, (point["router"], point["age"]))),
                    "value": value_of(point),
                    **_point(f"{point['router']}: {_measured(point)}", point["command"]),
                }
                for point in routers["points"]
            ],
        )

    charts = [bars("TTFT by router", ("TTFT mean", "ms"), lambda point: point["ttft_ms"]["mean"] or 0.0)]
    if routers["best"]["slo_ratio"] is not None:
        charts.append(bars("SLO kept, by router", (KEPT, "%"), lambda point: 100 * point["slo_ratio"]))
    return charts


def _fleets(fleets: dict[str, Any]) -> list[Chart]:
    """Return the goodput, and the share of requests that keep the SLO, of the best replayed fleets by their devices."""
    lines = {"front": fleets["front"]}
    for label, is_apart in (("mixed", False), ("prefill and decode apart", True)):
        best: dict[int, dict[str, Any]] = {}
        for point in fleets["points"]:  # the best of each number of devices is the first
            if point["is_apart"] is is_apart:
                best.setdefault(point["devices"], point)
        if best:
            lines[label] = list(best.values())

    def series(of: Callable[[dict[str, Any]], float]) -> list[Chart]:
        return [
            _series(
                label,
                [point["devices"] for point in points],
                [of(point) for point in points],
                [_fleet_point(point) for point in points],
                "dots" if label == "front" else "",
            )
            for label, points in lines.items()
        ]

    devices = [point["devices"] for points in lines.values() for point in points]
    kept = series(lambda point: 100 * point["slo_ratio"])
    kept.append(_limit("asked for", devices, 100 * fleets["slo_share"]))
    x = ("devices", "")
    return [
        *_fleet_costs(fleets),
        _chart("Goodput by devices", x, ("requests that keep the SLO, per s", ""), series(_goodput), note=REPLAYED),
        _chart("SLO kept, by devices", x, (KEPT, "%"), kept, note=REPLAYED),
    ]


def _fleet_costs(fleets: dict[str, Any]) -> list[Chart]:
    """Return the goodput of all replayed fleets by price; empty if none keeps the SLO."""
    if not fleets["options"][0]["keeps_slo"]:
        return []
    chosen = fleets["options"][0]["fleet"]
    answer = next(point for point in fleets["points"] if point["name"] == chosen)
    return [
        _costs(fleets["points"], answer, fleets, lambda point: point["name"].partition(",")[0].partition(" and ")[0])
    ]


def _goodput(point: dict[str, Any]) -> float:
    goodput: float = point["goodput_per_s"]
    return goodput


def _fleet_point(point: dict[str, Any]) -> Chart:
    return _point(
        f"{point['name']}, {point['devices']:,} devices, {point['device_hours']:.3f} hours: "
        f"{point['goodput_per_s']:.3g} requests/s, SLO kept by {percent(point['slo_ratio'])}, "
        f"TTFT p99 {_ms(point['ttft_ms']['p99'])}",
        point["command"],
    )

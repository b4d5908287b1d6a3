"""The charts and the table of a sweep: each point with the settings it changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from kvarts.plan.sweep import load_of
from kvarts.report.words import duration, percent
from kvarts.units import as_memory

__all__ = ["distinct_points", "sweep_charts", "sweep_table", "sweep_values"]

Row = dict[str, Any]
MOST_ROWS = 2000
"""Rows of the table on a page; points.json contains all."""
MEMORY = ("tokens of KV memory, all replicas", "kv_tokens", "")
TTFT = ("TTFT p99", "ttft_ms_p99", "ms")
HITS = ("hits, of prompt tokens", "hit_ratio", "%")
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
        _scatter("Hits by memory", MEMORY, HITS, points),
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
        percent(point["hit_ratio"]),
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
        f"{changed}: {point['kv_tokens']:,} KV tokens, {percent(point['hit_ratio'])} hits, "
        f"TTFT p99 {'-' if ttft is None else duration(ttft)}, {'-' if rate is None else f'{rate:,.2f}'} requests/s"
    )

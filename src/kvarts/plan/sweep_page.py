"""The charts of a sweep: every point, and those that no other beats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["sweep_charts", "sweep_values"]

Row = dict[str, Any]


def sweep_values(name: str, rows: Sequence[Row], keys: Sequence[str], command: str) -> dict[str, Any]:
    """Return what a page is made from. `keys`: the settings that points change.

    `command`: that of the sweep, which is also that of a point for which none is known.
    """
    return {
        "trace": name,
        "sweep": {"rows": [{**row, "command": row["command"] or command} for row in rows], "keys": list(keys)},
        "command": command,
        "subtitle": f"{len(rows):,} points; {sum(row['pareto'] for row in rows):,} that no other beats in KV memory, "
        "TTFT p99 and throughput",
    }


def sweep_charts(sweep: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the charts."""
    rows, keys = sweep["rows"], sweep["keys"]
    memory = "tokens of KV memory, all replicas"
    charts = [
        _scatter("TTFT by memory", (memory, "kv_tokens"), ("TTFT p99, ms", "ttft_ms_p99"), rows, keys),
        _scatter(
            "Throughput by TTFT",
            ("TTFT p99, ms", "ttft_ms_p99"),
            ("requests/s", "request_throughput_per_s"),
            rows,
            keys,
        ),
        _scatter("Hits by memory", (memory, "kv_tokens"), ("hits, of prompt tokens", "hit_ratio"), rows, keys),
    ]
    return [chart for chart in charts if chart["points"]]


def _scatter(
    name: str, x: tuple[str, str], y: tuple[str, str], rows: Sequence[Row], keys: Sequence[str]
) -> dict[str, Any]:
    """Return every row that has both values as a point with a text and a command. `x`, `y`: a title, and a column."""
    (x_title, x_key), (y_title, y_key) = x, y
    points = [
        {
            "x": row[x_key],
            "y": row[y_key],
            "is_on_front": row["pareto"],
            "text": _text(row, keys),
            "command": row["command"],
        }
        for row in rows
        if row[x_key] is not None and row[y_key] is not None
    ]
    return {
        "name": name,
        "kind": "scatter",
        "x": x_title,
        "y": y_title,
        "points": points,
        "note": "Filled: the Pareto front.",
    }


def _text(row: Row, keys: Sequence[str]) -> str:
    changed = ", ".join(f"{key}={row[key]}" for key in keys if key in row)
    hits, ttft, rate = row["hit_ratio"], row["ttft_ms_p99"], row["request_throughput_per_s"]
    return (
        f"{changed}: {row['kv_tokens']:,} KV tokens, {'-' if hits is None else f'{hits:.1%}'} hits, "
        f"TTFT p99 {'-' if ttft is None else f'{ttft:,.0f} ms'}, {'-' if rate is None else f'{rate:,.2f}'} requests/s"
    )

"""A self-contained HTML page with the charts of a plan; each point shows the command that reproduces it."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from kvarts.plan.series import charts_of, sweep_table
from kvarts.plan.tables import answer_for_users, heading_of
from kvarts.report.page import fill_page, table_html
from kvarts.report.words import duration, number, opening, page_bytes_of, plus_minus
from kvarts.units import as_memory, as_percent

__all__ = ["render_page", "summary_html"]

OPTION_HEADS = (
    "",
    ">replicas",
    ">pages of each",
    ">memory of each",
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
    else:
        heads = ("", ">pages", ">hits", ">optimum")
        knees = {point["pages"] for point in values["knees"]}
        rows = [
            [
                "knee" if point["pages"] in knees else "",
                f"{point['pages']:,}",
                as_percent(point["hit_ratio"]),
                as_percent(point["optimum_hit_ratio"]),
            ]
            for point in values["at"]
        ]
    return table_html(data["title"], [data["subtitle"], data["verdict"]], heads, rows)


def _data(values: dict[str, Any]) -> dict[str, Any]:
    found = values.get("fleets") or values.get("latency", {})
    options = found.get("options", [])
    page_bytes = page_bytes_of(values.get("config") or {})
    slo_share = found.get("slo_share")
    return {
        "title": _title(values),
        "subtitle": _subtitle(values),
        "command": values.get("command", ""),
        "charts": charts_of(values),
        "verdict": _sentence(answer_for_users(values["users"]) if "users" in values else values.get("advice")),
        "option_heads": FLEET_HEADS if "fleets" in values else OPTION_HEADS,
        "options": [
            {
                "name": option["name"],
                "what": option["what"],
                "cells": _fleet_cells(option, slo_share)
                if "fleets" in values
                else _cells(option, page_bytes, slo_share),
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
        as_percent(option["hit_ratio"]),
        *(
            "-" if (ms := option[f"{metric}_p99"]) is None else plus_minus(ms, unsure.get(metric, {}).get("p99"))
            for metric in ("ttft_ms", "tpot_ms")
        ),
        "-" if kept is None else f"{as_percent(option['slo_ratio'], bound=slo_share)}, {'yes' if kept else 'no'}",
        option["limited_by"].replace("kv_pages", "KV pages").replace("_", " "),
    ]


def _fleet_cells(option: dict[str, Any], slo_share: float | None) -> list[str]:
    """Return a row under FLEET_HEADS."""
    ttft, tpot = (duration(option[f"{metric}_p99"]) for metric in ("ttft_ms", "tpot_ms"))
    return [
        option["name"],
        option["fleet"],
        f"{option['devices']:,}",
        f"{option['device_hours']:.3f}",
        number(option["goodput_per_s"]),
        number(option["goodput_per_s_per_device"]),
        as_percent(option["hit_ratio"]),
        ttft,
        tpot,
        f"{as_percent(option['slo_ratio'], bound=slo_share)}, {'yes' if option['keeps_slo'] else 'no'}",
        option["limited_by"].replace("kv_pages", "KV pages").replace("_", " "),
    ]


def _title(values: dict[str, Any]) -> str:
    if "users" in values:
        return f"How many users fit: {values['trace']}"
    if "fleets" in values:
        return f"Fleets for {values['trace']}"
    return f"Sweep of {values['trace']}" if "sweep" in values else f"Plan for {values['trace']}"


def _subtitle(values: dict[str, Any]) -> str:
    if "subtitle" in values:
        return str(values["subtitle"])
    config = values.get("config") or {}
    of_run = heading_of(config) if "fleets" in values else opening(config)
    replayed_on = "; ".join(line.strip() for line in of_run)
    if "users" in values or "fleets" in values:
        return replayed_on
    return f"{replayed_on}. " * bool(replayed_on) + (
        f"{values['num_requests']:,} requests, {values['num_prompt_tokens']:,} prompt tokens, "
        f"pages of {values['page_size']} tokens"
    )

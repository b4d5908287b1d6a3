"""A self-contained page of HTML with the charts of a plan; each point has the command that gives it."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from kvarts.plan.series import GIB, charts_of
from kvarts.plan.sweep_page import sweep_table
from kvarts.report.page import fill_page
from kvarts.report.words import duration, percent

__all__ = ["render_page"]

OPTION_HEADS = (
    "",
    ">replicas",
    ">pages of each",
    ">GiB of each",
    ">hits",
    ">TTFT p99",
    ">TPOT p99",
    ">keep the SLO",
    "limited by",
)
"""Of the table of options; a head that begins with > stands over numbers."""


def render_page(values: dict[str, Any]) -> bytes:
    """Return the page of a plan, of how many users fit, or of a sweep."""
    assets = files("kvarts.plan") / "assets"
    template = (assets / "plan.html").read_text(encoding="utf-8")
    script = (assets / "plan.js").read_text(encoding="utf-8")
    return fill_page(template, {"plan.js": script}, _data(values))


def _data(values: dict[str, Any]) -> dict[str, Any]:
    options = values.get("latency", {}).get("options", [])
    token_bytes = (values.get("tiers") or {}).get("kv_bytes_per_token")
    page_bytes = token_bytes * values["page_size"] if token_bytes else None
    return {
        "title": _title(values),
        "subtitle": _subtitle(values),
        "command": values.get("command", ""),
        "charts": charts_of(values),
        "verdict": _verdict_on_users(values["users"]) if "users" in values else _verdict(values.get("latency")),
        "option_heads": OPTION_HEADS,
        "options": [
            {
                "name": option["name"],
                "what": option["what"],
                "cells": _cells(option, page_bytes),
                "reasons": [*option["notes"], *option["would_change"]],
                "command": option["command"],
            }
            for option in options
        ],
        "sweep": sweep_table(values["sweep"]) if "sweep" in values else None,
    }


def _verdict(latency: dict[str, Any] | None) -> str:
    """Return the sentence that a plan comes to."""
    if latency is None or not latency["options"]:
        return ""
    if latency["slo_share"] is not None and latency["options"][0]["name"] != "cheapest":
        share = percent(latency["slo_share"])
        return (
            f"Nothing that was replayed keeps the SLO for {share} of the requests: no memory and no number of replicas."
        )
    text: str = latency["options"][0]["what"]
    return text[0].upper() + text[1:]


def _verdict_on_users(users: dict[str, Any]) -> str:
    """Return how many users fit in a sentence; nothing without an SLO."""
    fits, fails = users["fits"], users["fails_at"]
    if users["slo_share"] is None:
        return ""
    share = f"{percent(users['slo_share'])} of the requests"
    if fits is None:
        return f"{fails:,} users are too many: the SLO is not kept for {share}."
    until = "no limit was found up to there" if fails is None else f"with {fails:,} it is not"
    return f"{fits:,} users fit: the SLO is kept for {share}, and {until}."


def _cells(option: dict[str, Any], page_bytes: int | None) -> list[str]:
    """Return a row under OPTION_HEADS. `page_bytes`: None where no model gives the size of a page."""
    kept = option["keeps_slo"]
    return [
        option["name"],
        f"{option['replicas']:,}",
        f"{option['pages']:,}",
        "-" if page_bytes is None else f"{option['pages'] * page_bytes / GIB:,.1f}",
        percent(option["hit_ratio"]),
        *("-" if ms is None else duration(ms) for ms in (option["ttft_ms_p99"], option["tpot_ms_p99"])),
        "-" if kept is None else f"{percent(option['slo_ratio'])}, {'yes' if kept else 'no'}",
        option["limited_by"].replace("kv_pages", "KV pages").replace("_", " "),
    ]


def _title(values: dict[str, Any]) -> str:
    if "users" in values:
        return f"How many users fit: {values['trace']}"
    return f"Sweep of {values['trace']}" if "sweep" in values else f"Plan for {values['trace']}"


def _subtitle(values: dict[str, Any]) -> str:
    if "subtitle" in values:
        return str(values["subtitle"])
    if "users" in values:
        return str(values["setting"])
    return (
        f"{values['num_requests']:,} requests, {values['num_prompt_tokens']:,} prompt tokens, "
        f"pages of {values['page_size']} tokens"
    )

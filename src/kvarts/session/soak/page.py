"""A self-contained HTML page of a soak: its verdict, bytes, latency, and the server's memory."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import msgspec

from kvarts.report.page import fill_page
from kvarts.report.words import duration
from kvarts.session.soak.record import Sample, SoakRecord
from kvarts.session.soak.rules import SoakVerdict, expected_bytes

__all__ = ["render_soak_page"]

MIB = 1 << 20
MAX_POINTS = 4000
"""Most samples on the page; a longer run is thinned evenly. The verdict covers all samples."""


def render_soak_page(record: SoakRecord, verdict: SoakVerdict) -> bytes:
    """Return the page of a soak."""
    shown = record.samples[:: -(-len(record.samples) // MAX_POINTS) or 1]
    turns = [sample for sample in shown if sample.phase == "turn"]
    slope = next((result.slope for result in verdict.rules if result.rule == "latency"), None)
    plan = record.plan
    data: dict[str, Any] = {
        "title": f"Soak of {plan.target}: {verdict.verdict}",
        "subtitle": f"{plan.num_sessions} sessions of {plan.sink} + {plan.window} tokens, {verdict.num_turns:,} turns, "
        f"{duration(1e3 * record.duration_s)}",
        "rules": msgspec.to_builtins(verdict.rules),
        "bytes": {
            "t": [sample.at_s for sample in shown],
            "live_mib": [_mib(sample.kv_live_bytes) for sample in shown],
            "expected_mib": [_mib(_expected(verdict, sample)) for sample in shown],
            "bound_mib": _mib(expected_bytes(verdict.layers, plan.bound_tokens) if verdict.layers else None),
        },
        "turns": {
            "turn": [sample.turn for sample in turns],
            "itl_ms": [_ms(sample.itl_s) for sample in turns],
            "ttft_ms": [_ms(sample.ttft_s) for sample in turns],
            "rss_mib": [_mib(sample.rss_bytes) for sample in turns],
        },
        "slope": None if slope is None else msgspec.to_builtins(slope),
    }
    assets = files("kvarts.session.soak") / "assets"
    template = (assets / "soak.html").read_text(encoding="utf-8")
    return fill_page(template, {"soak.js": (assets / "soak.js").read_text(encoding="utf-8")}, data)


def _expected(verdict: SoakVerdict, sample: Sample) -> int | None:
    return expected_bytes(verdict.layers, sample.num_sent_tokens) if verdict.layers else None


def _mib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / MIB


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds

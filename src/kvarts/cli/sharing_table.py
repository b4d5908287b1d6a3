"""The report of several models on shared devices as a table, at most 80 columns wide for up to four models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvarts.cli.table import as_bytes
from kvarts.report.words import number
from kvarts.units import as_duration, as_percent

__all__ = ["render_shared_table"]

WIDTH = 14


def render_shared_table(summary: dict[str, Any]) -> str:
    """Return the lines of the table, with a newline at the end."""
    models = summary["models"]
    devices = summary.get("devices", [])
    total = summary["total"] if devices else summary["device"]
    split = "split, nothing is lent" if total["static_split"] else "shared"
    rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("trace", lambda model: _fit(model["trace"])),
        ("requests", lambda model: f"{model['num_completed']:,}"),
        ("rejected", lambda model: f"{model['num_rejected']:,}"),
        ("failed", lambda model: f"{model['num_failed']:,}"),
        ("TTFT mean", lambda model: as_duration(model["ttft_ms"]["mean"])),
        ("TTFT p50", lambda model: as_duration(model["ttft_ms"]["p50"])),
        ("TTFT p99", lambda model: as_duration(model["ttft_ms"]["p99"])),
        ("ITL mean", lambda model: as_duration(model["itl_ms"]["mean"])),
        ("ITL p99", lambda model: as_duration(model["itl_ms"]["p99"])),
        ("out tokens/s", lambda model: number(model["output_throughput_tokens_per_s"])),
        ("prefix hits", lambda model: as_percent(model["prefix_hit_ratio"])),
        ("preempted", lambda model: f"{model['num_preemptions_inside']:,}"),
        ("for others", lambda model: f"{model['num_preemptions_for_others']:,}"),
        ("share owned", lambda model: as_percent(model["share_owned"])),
        ("of tokens", lambda model: as_percent(model["share_of_tokens"])),
        ("of time", lambda model: as_percent(model["share_of_time"])),
        ("KV guarantee", lambda model: as_bytes(model["guaranteed_bytes"])),
        ("KV peak used", lambda model: as_bytes(model["peak_used_bytes"])),
    ]
    kv_bytes = as_bytes(devices[0]["kv_bytes"] if devices else total["kv_bytes"])
    whole = f"{kv_bytes} of KV memory, {total['max_batched_tokens']:,} tokens a step"
    where = f"{len(devices)} devices" if devices else "one device"
    lines = [
        f"{len(models)} models on {where}, {split}: {whole}{' each' if devices else ''}",
        "",
        f"{'':<13}" + "".join(f"{_fit(name):>{WIDTH}}" for name in models),
    ]
    for title, value in rows:
        lines.append(f"{title:<13}" + "".join(f"{value(model):>{WIDTH}}" for model in models.values()))
    rate = number(total["output_throughput_tokens_per_s"])
    busy = f"{as_duration(total['duration_ms'])}, computing {as_percent(total['busy_pct'])} of it"
    lines += ["", *_promise(total), f"fairness     {_fairness(total)}", f"duration     {busy}; {rate} out tokens/s"]
    for place, device in enumerate(devices):
        counts = f"{device['num_requests']:,} requests, computing {as_percent(device['busy_pct'])} of the time"
        rate = number(device["output_throughput_tokens_per_s"])
        lines += [f"{f'device {place}':<13}{counts}; {rate} out tokens/s", *_loans(device)]
    if not devices:
        lines += _loans(total)
    return "\n".join(lines) + "\n"


def _fairness(device: dict[str, Any]) -> str:
    fairness = device["jain_index"]
    return "nothing was contested" if fairness is None else f"Jain's index {fairness:.3f} of contested time by share"


def _promise(total: dict[str, Any]) -> list[str]:
    """Return rows with the worst ratio of any model to each baseline."""
    names = {"split": "its static split", "slice": "its slice, alone"}
    lines: list[str] = []
    for baseline, found in (total["worst_ratio"] or {}).items():
        title = "worst ratio" if not lines else ""
        if found is None:
            lines.append(f"{title:<13}nothing to compare with {names[baseline]}")
        else:
            of = f"{found['model']}, {found['of']} TTFT"
            lines.append(f"{title:<13}{found['ratio']:.2f} of {names[baseline]} ({of})")
    return lines


def _loans(device: dict[str, Any]) -> list[str]:
    lines = []
    for loan in device["loans"]:
        sizes = f"peak {as_bytes(loan['peak_bytes'])}, mean {as_bytes(loan['mean_bytes'])}"
        pair = f"{loan['lender']} to {loan['borrower']}"
        lines.append(f"loans        {pair}: {sizes}, {as_percent(loan['share_of_time'])} of the time")
    return lines


def _fit(text: str) -> str:
    return text if len(text) < WIDTH else text[: WIDTH - 2] + "…"

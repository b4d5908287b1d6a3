"""The report of several models on one device as a table for people, at most 80 columns wide for up to four models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvarts.cli.table import as_bytes, as_number, as_percent

__all__ = ["render_shared_table"]

WIDTH = 14


def render_shared_table(summary: dict[str, Any]) -> str:
    """Return the lines of the table, with a line end."""
    device, models = summary["device"], summary["models"]
    split = "split, nothing is lent" if device["static_split"] else "shared"
    rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("trace", lambda model: _fit(model["trace"])),
        ("requests", lambda model: f"{model['num_completed']:,}"),
        ("rejected", lambda model: f"{model['num_rejected']:,}"),
        ("failed", lambda model: f"{model['num_failed']:,}"),
        ("TTFT mean ms", lambda model: as_number(model["ttft_ms"]["mean"])),
        ("TTFT p50 ms", lambda model: as_number(model["ttft_ms"]["p50"])),
        ("TTFT p99 ms", lambda model: as_number(model["ttft_ms"]["p99"])),
        ("ITL mean ms", lambda model: as_number(model["itl_ms"]["mean"])),
        ("ITL p99 ms", lambda model: as_number(model["itl_ms"]["p99"])),
        ("out tokens/s", lambda model: as_number(model["output_throughput_tokens_per_s"])),
        ("prefix hits", lambda model: as_percent(model["prefix_hit_ratio"])),
        ("preempted", lambda model: f"{model['num_preemptions_inside']:,}"),
        ("for others", lambda model: f"{model['num_preemptions_for_others']:,}"),
        ("share owned", lambda model: as_percent(model["share_owned"])),
        ("of tokens", lambda model: as_percent(model["share_of_tokens"])),
        ("of time", lambda model: as_percent(model["share_of_time"])),
        ("KV guarantee", lambda model: as_bytes(model["guaranteed_bytes"])),
        ("KV peak used", lambda model: as_bytes(model["peak_used_bytes"])),
    ]
    whole = f"{as_bytes(device['kv_bytes'])} of KV memory, {device['max_batched_tokens']:,} tokens a round"
    lines = [
        f"{len(models)} models on one device, {split}: {whole}",
        "",
        f"{'':<13}" + "".join(f"{_fit(name):>{WIDTH}}" for name in models),
    ]
    for title, value in rows:
        lines.append(f"{title:<13}" + "".join(f"{value(model):>{WIDTH}}" for model in models.values()))
    fairness = device["jain_index"]
    fair = "nothing was contested" if fairness is None else f"Jain's index {fairness:.3f} of contested tokens by weight"
    rate = as_number(device["output_throughput_tokens_per_s"])
    busy = f"{device['duration_ms'] / 1e3:,.1f} s, computing {as_percent(device['busy_pct'])} of it"
    lines += ["", f"duration     {busy}; {rate} out tokens/s", f"fairness     {fair}"]
    for loan in device["loans"]:
        sizes = f"peak {as_bytes(loan['peak_bytes'])}, mean {as_bytes(loan['mean_bytes'])}"
        pair = f"{loan['lender']} to {loan['borrower']}"
        lines.append(f"loans        {pair}: {sizes}, {as_percent(loan['share_of_time'])} of the time")
    return "\n".join(lines) + "\n"


def _fit(text: str) -> str:
    return text if len(text) < WIDTH else text[: WIDTH - 2] + "…"

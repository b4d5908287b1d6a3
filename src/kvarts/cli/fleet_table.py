"""The report of a fleet as a text table."""

from __future__ import annotations

from typing import Any

from kvarts.cli.table import as_bytes, render_table
from kvarts.units import as_duration, as_percent

__all__ = ["render_fleet"]

WAITS = {
    "prefill_queue_ms": "prefill queue",
    "prefill_ms": "prefill",
    "reservation_ms": "reservation",
    "transfer_ms": "transfer",
    "decode_queue_ms": "decode queue",
    "first_step_ms": "first step",
}


def render_fleet(summary: dict[str, Any]) -> str:
    """Return the table of a replay, followed by the fleet's rows: the parts of TTFT, each pool, links."""
    fleet = summary["fleet"]
    lines = [render_table(summary)]
    if fleet["waits"] and summary["num_completed"]:
        lines.append(f"{'of TTFT':<14}" + "".join(f"{name:>12}" for name in ("mean", "p50", "p90", "p99", "max")))
        for name, words in WAITS.items():
            values = fleet["waits"][name]
            cells = "".join(f"{as_duration(values[column]):>12}" for column in ("mean", "p50", "p90", "p99", "max"))
            lines.append(f"{words:<14}{cells}")
        lines.append("")
    lines += [
        f"{pool['role'] + ' pool':<14}{_workers(pool)}, {as_percent(pool['busy_pct'])} busy, "
        f"pages: peak {as_percent(pool['peak_used_pct'])}, {pool['gpu_hours']:.3g} GPU hours"
        for pool in fleet["pools"]
    ]
    if fleet["transferred_bytes"]:
        num_local = fleet.get("num_local_prefills", 0)
        local = f", {num_local:,} prompts computed where they are continued" if num_local else ""
        lines.append(f"{'links':<14}{as_bytes(fleet['transferred_bytes'])} sent{local}")
    if "store" in fleet:
        lines.append(f"{'store':<14}{_store(fleet['store'])}")
    if "faults" in fleet:
        faults = fleet["faults"]
        lines.append(
            f"{'faults':<14}{faults['num_faults']:,}, {faults['num_failed_transfers']:,} transfers failed, "
            f"{faults['num_restarted']:,} requests went on elsewhere, "
            f"{faults['recomputed_tokens']:,} of their tokens computed again"
        )
    if fleet["num_deadlocks"]:
        first = fleet["deadlocks"][0]
        lines.append(
            f"{'DEADLOCK':<14}{fleet['num_deadlocks']} times nothing could go on, first at "
            f"{as_duration(first['at_ms'])} on worker {first['replica']}: request {first['request_id']} was given up"
        )
    return "\n".join(lines) + "\n"


def _store(store: dict[str, Any]) -> str:
    unit = "pages" if "pages" in store else "blocks"
    text = f"{store[unit]:,} {unit} ({as_bytes(store[unit] * store[unit.removesuffix('s') + '_bytes'])}), "
    if store[f"num_loaded_{unit}"]:
        text += f"{store[f'num_loaded_{unit}']:,} loaded, {as_percent(store['of_others_pct'])} of other workers, "
    else:
        text += "none loaded, "
    text += f"{store[f'num_evicted_{unit}']:,} evicted"
    if num_refused := store.get("num_pages_without_room") or store.get("num_parts_without_room"):
        text += f", {num_refused:,} without room"
    return text + f"; busy: {as_percent(store['read_busy_pct'])} reading, {as_percent(store['write_busy_pct'])} writing"


def _workers(pool: dict[str, Any]) -> str:
    mean = pool["mean_workers"]
    count = len(pool["replicas"])
    if mean is not None and abs(mean - count) > 1e-6:
        return f"{mean:.1f} workers on average"
    return "1 worker" if count == 1 else f"{count} workers"

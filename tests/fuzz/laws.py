"""What the outputs of one replay must state of each other, whatever the options were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

__all__ = ["broken_laws"]

TIMES = ("arrival_ms", "first_admitted_ms", "first_token_ms", "last_token_ms")


def broken_laws(report: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield what is wrong: totals are sums of rows, times are in order, hits are of prompts, shares are shares."""
    counts = Counter(row["status"] for row in rows)
    of_status = {name: report.get(f"num_{name}", 0) for name in ("completed", "rejected", "failed", "cancelled")}
    if report["num_requests"] != len(rows) or any(counts[name] != count for name, count in of_status.items()):
        yield f"{len(rows)} rows, {dict(counts)}; the report has {report['num_requests']}, {of_status}"
    done = [row for row in rows if row["status"] == "completed"]
    sums = {
        "num_input_tokens": sum(row["input_tokens"] for row in done),
        "num_output_tokens": sum(row["output_tokens"] for row in done),
        "num_cached_tokens": sum(min(row["cached_tokens"], row["input_tokens"]) for row in done),
        "num_recomputed_tokens": sum(row["recomputed_tokens"] for row in done),
        "num_preemptions": sum(row["preemptions"] for row in rows),
    }
    for name, total in sums.items():
        if report[name] != total:
            yield f"{name} is {report[name]}, and that of its rows {total}"
    if sum(report["num_cached_tokens_by_tier"].values()) != report["num_cached_tokens"]:
        yield f"hits by tier are not all hits: {report['num_cached_tokens_by_tier']}"
    for name in ("num_completed", "num_preemptions", "num_steps"):
        if sum(replica[name] for replica in report["replicas"]) != report[name]:
            yield f"{name} is not that of its replicas"
    yield from _of_parts(report, rows)
    for name in ("prefix_hit_ratio", "peak_used_pct", "mean_used_pct", "busy_pct"):
        if not -1e-9 <= (report[name] or 0) <= 1 + 1e-9:
            yield f"{name} is {report[name]}"
    yield from _latencies(report, done)
    for earlier, row in pairwise(rows):
        if row["arrival_ms"] < earlier["arrival_ms"]:
            yield f"{row['request_id']} stands after {earlier['request_id']} and arrived before it"
    for row in rows:
        yield from _of_row(row, report["config"].get("profile"))


def _of_parts(report: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Cancelled requests and the counts of pools are sums, too."""
    gave_up = [row for row in rows if row["status"] == "cancelled"]
    sums = {
        "before_admission": sum(row["first_admitted_ms"] is None for row in gave_up),
        "before_first_token": sum(row["first_token_ms"] is None for row in gave_up),
        "output_tokens": sum(row["output_tokens"] for row in gave_up),
    }
    for name, total in sums.items():
        if (stated := report.get("cancelled", {}).get(name, 0)) != total:
            yield f"{name} of cancelled requests is {stated}, and that of their rows {total}"
    fleet = report.get("fleet")
    if fleet is None:
        return
    if sum(pool["num_preemptions"] for pool in fleet["pools"]) != report["num_preemptions"]:
        yield "num_preemptions is not that of its pools"
    if sorted(place for pool in fleet["pools"] for place in pool["replicas"]) != list(range(len(report["replicas"]))):
        yield "a worker is in no pool, or in two"
    if fleet["transferred_bytes"] != sum(row.get("transferred_bytes", 0) for row in rows):
        yield f"transferred_bytes is {fleet['transferred_bytes']}, and that of its rows another"


def _latencies(report: dict[str, Any], done: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Mean and percentiles, by the rule that the report states."""
    for name, end in (("ttft_ms", "first_token_ms"), ("e2e_ms", "last_token_ms")):
        values = sorted(row[end] - row["arrival_ms"] for row in done if row[end] is not None)
        if not values:
            continue
        expected = {"mean": sum(values) / len(values), "max": values[-1]}
        for percent in (50, 90, 95, 99):
            expected[f"p{percent}"] = values[(percent * (len(values) - 1) * 2 + 100) // 200]
        for statistic, value in expected.items():
            if abs(report[name][statistic] - value) > 1e-5 + 1e-9 * value:
                yield f"{name} {statistic} is {report[name][statistic]}, and that of its rows {value}"


def _of_row(row: dict[str, Any], profile: str | None) -> Iterator[str]:
    most = row["input_tokens"] + (row["output_tokens"] if profile == "mocker" else 0)
    if not 0 <= row["cached_tokens"] <= most:
        yield f"{row['request_id']} found {row['cached_tokens']} of {row['input_tokens']} prompt tokens"
    times = [row[name] for name in TIMES if row[name] is not None]
    if times != sorted(times):
        yield f"the times of {row['request_id']} are not in order: {times}"
    if row["status"] == "completed" and (len(times) < len(TIMES) or row["output_tokens"] < 1 or row["admissions"] < 1):
        yield f"{row['request_id']} has completed without a token, a time or an admission"
    if row["preemptions"] > row["admissions"]:
        yield f"{row['request_id']} was preempted {row['preemptions']} times and admitted {row['admissions']} times"
    below = sum(value for name, value in row.items() if name.endswith("_tokens") and name not in OWN)
    if below > row["cached_tokens"]:
        yield f"{row['request_id']} found {below} tokens below the device, and {row['cached_tokens']} in all"


OWN = ("input_tokens", "output_tokens", "cached_tokens", "recomputed_tokens")

"""What a run says of itself, in words and units for people: the same in a terminal and on the page."""

from __future__ import annotations

from kvarts.report.run_values import RunReport, Spread

__all__ = ["LATENCIES", "LIMITS", "count", "duration", "facts", "memory_unit", "percent"]

LATENCIES = {"TTFT": "ttft_ms", "ITL": "itl_ms", "TPOT": "tpot_ms", "E2E": "e2e_ms", "queue time": "queue_ms"}
LIMITS = {
    "nothing": "nothing: requests were admitted as they came",
    "compute": "compute: waiting requests found the step's token budget spent",
    "kv_pages": "KV pages: waiting requests did not fit beside those running",
    "sequence_cap": "sequence cap: as many requests ran as may run at once",
    "transfers": "transfers: waiting requests found loads under way, most of them on",
}


def facts(report: RunReport) -> list[tuple[str, str]]:
    """Return the names and values of a short table. What a report does not say is left out, or `-`."""
    ended = f"{count(report.num_completed)} completed, {count(report.num_rejected)} rejected"
    if report.num_failed:
        ended += f", {count(report.num_failed)} failed"
    out = [("requests", ended)]
    if report.duration_ms is not None:
        out.append(("duration", f"{duration(report.duration_ms)} in {count(report.num_steps)} steps"))
    if report.request_throughput_per_s is not None:
        tokens = (
            f"{number(report.input_throughput_tokens_per_s)} in and {number(report.output_throughput_tokens_per_s)}"
        )
        out.append(("throughput", f"{number(report.request_throughput_per_s)} requests/s, {tokens} out tokens/s"))
    if report.goodput is not None:
        good = f"{number(report.goodput.requests_per_s)} requests/s, {percent(report.goodput.ratio)} of all"
        out.append(("goodput", good))
    for name, field in LATENCIES.items():
        spread: Spread | None = getattr(report, field)
        if spread is not None and spread.p50 is not None:
            values = {"p50": spread.p50, "p90": spread.p90, "p99": spread.p99}
            out.append((name, ", ".join(f"{p} {duration(ms)}" for p, ms in values.items() if ms is not None)))
    evicted = "" if report.num_evicted_pages is None else f", {count(report.num_evicted_pages)} evicted"
    out += [
        (
            f"KV {memory_unit(report)}",
            f"peak {percent(report.peak_used_pct)} used, mean {percent(report.mean_used_pct)}{evicted}",
        ),
        ("prefix hits", f"{percent(report.prefix_hit_ratio)} of prompt tokens"),
    ]
    tiers = report.prefix_hit_ratio_by_tier
    if len(tiers) > 1:
        out.append(("hits by tier", ", ".join(f"{tier} {percent(ratio)}" for tier, ratio in tiers.items())))
    if report.transfers is not None:
        moved = (f"{way.replace('_', ' ')} {_bytes(num_bytes)}" for way, num_bytes in report.transfers.bytes.items())
        out.append(("transfers", ", ".join(moved)))
    lost = (
        "" if report.num_recomputed_tokens is None else f", {count(report.num_recomputed_tokens)} tokens computed again"
    )
    out.append(("preempted", f"{count(report.num_preemptions)} times{lost}"))
    limited = report.limited_by
    if limited is not None:
        share = limited.share_of_waiting.get(limited.cause)
        of_waiting = "" if share is None else f" ({percent(share)} of the time spent waiting)"
        lane = f" {limited.lane}" if limited.cause == "transfers" else ""
        out.append(("limited by", LIMITS.get(limited.cause, limited.cause.replace("_", " ")) + lane + of_waiting))
    return out


def memory_unit(report: RunReport) -> str:
    """Return what a run counts its KV memory in: pages, or blocks where KV groups are counted."""
    return "blocks" if report.config.get("kv_groups", "off") != "off" else "pages"


def duration(ms: float) -> str:
    """Return a time in the units in which people say it."""
    if ms < 999.95:
        return f"{ms:,.1f} ms" if ms >= 0.1 else f"{ms:,.4f} ms"
    seconds = ms / 1e3
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 2 * 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole / 86400:,.1f} days"


def number(value: float | None) -> str:
    """Return a rate with as many digits as say something."""
    if value is None:
        return "-"
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def count(value: int | None) -> str:
    """Return a whole number, or `-` for none."""
    return "-" if value is None else f"{value:,}"


def percent(value: float | None) -> str:
    """Return a share in per cent, or `-` for none."""
    return "-" if value is None else f"{value * 100:.1f} %"


def _bytes(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:,.0f} {unit}" if unit == "B" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.1f} TB"

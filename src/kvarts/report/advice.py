"""What to try next, in one sentence that follows from a report."""

from __future__ import annotations

from typing import Any

__all__ = ["advice", "unbounded_hit_ratio"]

WORTHWHILE = 0.1
"""Of the prompt tokens that were computed, the least that an unbounded pool must save before that is advised."""


def advice(summary: dict[str, Any], *, tier_flag: str | None = None) -> str | None:
    """Return what to try next and why, for a report's `summary`; None where nothing was completed or rejected.

    `tier_flag`: the option that adds pages below the device, where there is one.

    The first of these that holds: requests that can never fit; the sequence cap; waiting for pages; waiting for
    transfers; hits lost to routing or eviction; waiting for the token budget; nothing, so that there is room for more.
    Numbers are those of the report, but for the hit ratio of an unbounded pool, which is estimated from them.
    """
    if summary["num_rejected"]:
        return _rejected(summary)
    if not summary["num_completed"]:
        return None
    cause = summary["limited_by"]["cause"]
    if cause == "sequence_cap":
        return _sequence_cap(summary)
    if cause == "kv_pages":
        return _kv_pages(summary)
    if cause == "transfers":
        return _transfers(summary)
    if (lost := _lost_hits(summary, tier_flag)) is not None:
        return lost
    return _compute(summary) if cause == "compute" else _nothing(summary)


def _rejected(summary: dict[str, Any]) -> str:
    num_refused = summary.get("sessions", {}).get("num_refused_turns", 0)
    if num_refused:
        return (
            f"{num_refused:,} of {summary['num_requests']:,} turns found no room for their session; try a smaller "
            f"--session-window, --session-at-capacity evict, or {_more_memory(summary)}"
        )
    return (
        f"{summary['num_rejected']:,} of {summary['num_requests']:,} requests can never fit into "
        f"{summary['config']['pages']:,} pages; try {_more_memory(summary)}"
    )


def _sequence_cap(summary: dict[str, Any]) -> str:
    cap, peak = summary["config"]["max_seqs"], summary["peak_used_pct"]
    if peak < 0.9:
        return f"{cap:,} requests ran at once and used at most {_percent(peak)} of the pages; try --max-seqs {2 * cap}"
    return f"{cap:,} requests ran at once and used up to {_percent(peak)} of the pages; {_more_replicas(summary)}"


def _kv_pages(summary: dict[str, Any]) -> str:
    share = summary["limited_by"]["share_of_waiting"]["kv_pages"]
    preempted = summary["num_preemptions"]
    also = f", and requests were preempted {_times(preempted)}" if preempted else ""
    return (
        f"{_percent(share)} of the time spent waiting was for KV pages{also}; {_more_replicas(summary)}, or "
        f"{_more_memory(summary)}"
    )


def _transfers(summary: dict[str, Any]) -> str:
    limited_by = summary["limited_by"]
    share, lane = limited_by["share_of_waiting"]["transfers"], limited_by["lane"]
    return (
        f"{_percent(share)} of the time spent waiting was for loads, most of them on {lane}; try a faster "
        f"--{lane.replace('_', '-')}, or {_more_memory(summary)}"
    )


def _lost_hits(summary: dict[str, Any], tier_flag: str | None) -> str | None:
    """Return what would bring more hits, if many prompt tokens were computed that had been computed before."""
    unbounded, ratio = unbounded_hit_ratio(summary), summary["prefix_hit_ratio"]
    if unbounded is None or unbounded - ratio < WORTHWHILE * (1 - ratio):
        return None
    hits = f"{_percent(ratio)} of prompt tokens were hits, and about {_percent(unbounded)} would be"
    config = summary["config"]
    if config["replicas"] > 1 and config["router"] != "prefix":
        return (
            f"what was computed before lies in part on another replica: {hits} if all were on one and nothing were "
            "evicted; try --router prefix"
        )
    lowest = _lowest_tier(summary)
    if not _has_evicted(summary, lowest):
        return None
    if lowest is not None:
        more = f"more --{lowest}-pages"
    elif tier_flag is not None:
        more = f"{tier_flag} {summary['working_set_pages']}"
    else:
        more = _more_memory(summary)
    return (
        f"eviction costs compute: {hits} if nothing were evicted; the working set is "
        f"{summary['working_set_to_pool']:,.2f} times the pool; try {more}"
    )


def _lowest_tier(summary: dict[str, Any]) -> str | None:
    """Return the name of the last tier below the device; None without one."""
    transfers = summary["transfers"]
    return None if transfers is None else list(transfers["num_evicted_pages"])[-1]


def _has_evicted(summary: dict[str, Any], lowest: str | None) -> bool:
    """Return whether pages were lost for want of room: evicted from the last tier, or never stored in one."""
    if lowest is None:
        return bool(summary["num_evicted_pages"])
    transfers = summary["transfers"]
    return bool(transfers["num_evicted_pages"][lowest] or transfers["num_pages_without_room"])


def _compute(summary: dict[str, Any]) -> str:
    share = summary["limited_by"]["share_of_waiting"]["compute"]
    budget = summary["config"]["max_batched_tokens"]
    return (
        f"{_percent(share)} of the time spent waiting was for the budget of {budget:,} tokens a step; "
        f"{_more_replicas(summary)}, or a faster --device"
    )


def _nothing(summary: dict[str, Any]) -> str:
    config = summary["config"]
    if config["concurrency"] is not None:
        more = f"--concurrency {2 * config['concurrency']}"
    else:
        more = f"--speedup {2 * config['speedup']:g}"
    return (
        f"hardly any request waited, and at most {_percent(summary['peak_used_pct'])} of the pages were used; "
        f"try {more} to find the limit, or fewer pages"
    )


def unbounded_hit_ratio(summary: dict[str, Any]) -> float | None:
    """Return about how many prompt tokens would be hits if nothing were ever evicted; None where that is unknown.

    Each distinct full page of the prompts is computed once, and what each prompt has after its last full page, half a
    page as a rule, every time. The working set has the pages of outputs as well. Known outputs that later prompts
    repeat would be hits, too: there, it is an understatement.
    """
    pages = summary["working_set_pages"]
    tokens = summary["num_input_tokens"]
    if pages is None or summary["num_completed"] < summary["num_requests"]:
        return None
    page_size = summary["config"]["page_size"]
    computed = pages * page_size - summary["num_output_tokens"] + summary["num_requests"] * page_size / 2
    return float(min(1.0, max(0.0, 1 - computed / tokens)))


def _more_memory(summary: dict[str, Any]) -> str:
    """Return the flag for more KV memory; where a model says what a page weighs, that is a matter of its device."""
    cost = summary["config"]["cost"]
    if isinstance(cost, dict) and cost.get("llm") is not None:
        return f"--tensor-parallel {2 * cost['tensor_parallel']}, or more --kv-memory if the device has it"
    return f"--pages {2 * summary['config']['pages']}"


def _more_replicas(summary: dict[str, Any]) -> str:
    return f"try --replicas {summary['config']['replicas'] + 1}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _percent(ratio: float) -> str:
    return f"{ratio * 100:.1f} %"

"""Advice on the next option to try, in one sentence derived from a report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from kvarts.base.units import as_percent
from kvarts.sim.report.words import in_memory, page_bytes_of

__all__ = ["HostMemory", "Trials", "advice", "as_size", "unbounded_hit_ratio"]

WORTHWHILE = 0.1
"""Least share of the computed prompt tokens that an unbounded pool must save for it to be advised."""


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory of `num_bytes`, with which a replay has `hit_ratio`; `most_hit_ratio`: with all it could ever use."""

    num_bytes: int
    hit_ratio: float
    most_hit_ratio: float


class Trials(Protocol):
    """Replays that find the effect of more memory."""

    def least_pages(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Return the size in pages of the smallest pool for a request and its output."""

    @property
    def can_have_host_memory(self) -> bool:
        """Whether host memory can be added."""

    def is_too_long(self, summary: dict[str, Any]) -> bool:
        """Return whether the replay is too long to be repeated unasked."""

    def host_memory(self, summary: dict[str, Any]) -> HostMemory | None:
        """Return the least host memory that keeps the hits of a replay; None if host memory does not help."""


def advice(summary: dict[str, Any], *, trials: Callable[[], Trials] | None = None) -> str | None:
    """Return the next option to try, and why, for a report's `summary`.

    None if no request completed or was rejected. `trials` returns what finds memory sizes by replay, if there is a
    trace to replay.

    The first of these cases that holds decides: requests that can never fit; the sequence cap; waiting for pages;
    waiting for transfers; hits lost to routing or eviction; waiting for the token budget; none, which leaves room for
    more load. All numbers are those of the report and of further replays; an estimate decides only whether these run.
    """
    if summary["num_rejected"]:
        return _rejected(summary, trials)
    if not summary["num_completed"]:
        return None
    cause = summary["limited_by"]["cause"]
    if cause == "sequence_cap":
        return _sequence_cap(summary)
    if cause == "kv_pages":
        return _kv_pages(summary)
    if cause == "transfers":
        return _transfers(summary)
    if (lost := _lost_hits(summary, trials)) is not None:
        return lost
    return _compute(summary) if cause == "compute" else _nothing(summary)


def _rejected(summary: dict[str, Any], trials: Callable[[], Trials] | None) -> str:
    num_refused = summary.get("sessions", {}).get("num_refused_turns", 0)
    if num_refused:
        return (
            f"{num_refused:,} of {summary['num_requests']:,} turns found no room for their session; try a smaller "
            f"--set sessions.window, --set sessions.at_capacity=evict, or {_more_memory(summary)}"
        )
    config, rejected, requests = summary["config"], summary["num_rejected"], summary["num_requests"]
    which = "no request fits" if rejected == requests else f"{rejected:,} of {requests:,} requests can never fit"
    into = f"{which} into {config['pages']:,} pages{in_memory(config['pages'], config)}"
    longest = summary.get("longest_rejected")
    if trials is None or longest is None:
        return f"{into}; try {_more_memory(summary)}"
    pages = trials().least_pages(longest["input_tokens"], longest["output_tokens"])
    if pages <= config["pages"]:
        num_tokens = longest["input_tokens"] + longest["output_tokens"]
        return f"{which}: the longest has {num_tokens:,} tokens; try --set max_model_len={num_tokens} or more"
    needs = f"the longest needs {pages:,}{in_memory(pages, config)}"
    page_bytes = page_bytes_of(config)
    if page_bytes is None:
        return f"{into}: {needs}; try --pages {pages}"
    size = as_size(pages * page_bytes)
    return f"{into}: {needs}; try --kv-memory {size} if the device has it, or {_more_devices(summary)}"


def _sequence_cap(summary: dict[str, Any]) -> str:
    cap, peak = summary["config"]["max_seqs"], summary["peak_used_pct"]
    if peak < 0.9:
        return (
            f"{cap:,} requests ran at once and used at most {as_percent(peak)} of the pages; try --max-seqs {2 * cap}"
        )
    return f"{cap:,} requests ran at once and used up to {as_percent(peak)} of the pages; {_more_replicas(summary)}"


def _kv_pages(summary: dict[str, Any]) -> str:
    share = summary["limited_by"]["share_of_waiting"]["kv_pages"]
    preempted = summary["num_preemptions"]
    also = f", and requests were preempted {_times(preempted)}" if preempted else ""
    return (
        f"{as_percent(share)} of the time spent waiting was for KV pages{also}; {_more_replicas(summary)}, or "
        f"{_more_memory(summary)}"
    )


def _transfers(summary: dict[str, Any]) -> str:
    limited_by = summary["limited_by"]
    share, lane = limited_by["share_of_waiting"]["transfers"], limited_by["lane"]
    faster = f"--set offload.{lane}"
    for tier in (summary["config"].get("offload") or {}).get("tiers", []):
        if lane in (f"{tier['name']}_read", "h2d" if tier["name"] == "host" else ""):
            faster = f"--tier {tier['name']}:read"
    return (
        f"{as_percent(share)} of the time spent waiting was for loads, most of them on {lane}; try a faster "
        f"{faster}, or {_more_memory(summary)}"
    )


def _lost_hits(summary: dict[str, Any], trials: Callable[[], Trials] | None) -> str | None:
    """Return advice that brings more hits, if many prompt tokens were computed that had been computed before."""
    unbounded, ratio = unbounded_hit_ratio(summary), summary["prefix_hit_ratio"]
    if unbounded is None or ratio is None or unbounded - ratio < WORTHWHILE * (1 - ratio):
        return None
    hits = f"{as_percent(ratio)} of prompt tokens were hits"
    config = summary["config"]
    if config.get("no_prefix_caching"):
        return (
            "without a prefix cache nothing is found, though prompts repeat each other; leave out --set "
            "no_prefix_caching=true"
        )
    if config["replicas"] > 1 and config["router"] != "prefix":
        return f"what was computed before lies in part on another replica: {hits}; try --router prefix"
    lowest = _lowest_tier(summary)
    listed = (config.get("offload") or {}).get("tiers", [])
    if not _has_evicted(summary, lowest):
        return None
    why = f"eviction costs compute: {hits}"
    if lowest == "disk" and not listed:
        return f"{why}; try a larger --set offload.disk_memory"
    if lowest is not None and (len(listed) > 1 or (listed and listed[0]["kind"] == "files")):
        return f"{why}; try a larger --tier {lowest}"
    option = f"--tier {listed[0]['name']}:size=" if listed else "--host-memory "
    replays = None if trials is None else trials()
    if replays is None or not replays.can_have_host_memory:
        return f"{why}; try {_more_memory(summary)}"
    if replays.is_too_long(summary):
        return f"{why}; `kvarts plan` with the same options finds by replay what host memory would give"
    found = replays.host_memory(summary)
    if found is None:
        return f"{why}; host memory would not help, say replays; try {_more_memory(summary)}"
    size = as_size(found.num_bytes)
    if found.most_hit_ratio - found.hit_ratio < 0.0005:
        return f"{why}; try {option}{size}, the least with which a replay finds {as_percent(found.hit_ratio)}"
    return (
        f"{why}; try {option}{size}: a replay finds {as_percent(found.hit_ratio)} with it, and at most "
        f"{as_percent(found.most_hit_ratio)} with more"
    )


def _lowest_tier(summary: dict[str, Any]) -> str | None:
    """Return the name of the last tier below the device; None without one."""
    transfers = summary["transfers"]
    return None if transfers is None else list(transfers["num_evicted_pages"])[-1]


def _has_evicted(summary: dict[str, Any], lowest: str | None) -> bool:
    """Return whether pages were lost for lack of room: evicted from the last tier, or never stored in one."""
    if lowest is None:
        return bool(summary["num_evicted_pages"])
    transfers = summary["transfers"]
    return bool(transfers["num_evicted_pages"][lowest] or transfers["num_pages_without_room"])


def _compute(summary: dict[str, Any]) -> str:
    share = summary["limited_by"]["share_of_waiting"]["compute"]
    budget = summary["config"]["max_batched_tokens"]
    return (
        f"{as_percent(share)} of the time spent waiting was for the budget of {budget:,} tokens a step; "
        f"{_more_replicas(summary)}, or a faster --device"
    )


def _nothing(summary: dict[str, Any]) -> str:
    config = summary["config"]
    if config["concurrency"] is not None:
        more = f"--concurrency {2 * config['concurrency']}"
    else:
        more = f"--speedup {2 * config['speedup']:g}"
    return (
        f"hardly any request waited, and at most {as_percent(summary['peak_used_pct'])} of the pages were used; "
        f"try {more} to find the limit, or fewer pages"
    )


def unbounded_hit_ratio(summary: dict[str, Any]) -> float | None:
    """Return an estimate of the hit ratio of prompt tokens without any eviction; None if it is unknown.

    Each distinct full page of the prompts is computed once; the tokens of each prompt after its last full page, on
    average half a page, are computed every time. Distinct pages include those of outputs. Known outputs that later
    prompts repeat would also be hits; with them, the estimate is too low.
    """
    pages = summary["distinct_pages"]
    tokens = summary["num_input_tokens"]
    if pages is None or summary["num_completed"] < summary["num_requests"]:
        return None
    page_size = summary["config"]["page_size"]
    computed = pages * page_size - summary["num_output_tokens"] + summary["num_requests"] * page_size / 2
    return float(min(1.0, max(0.0, 1 - computed / tokens)))


def _more_memory(summary: dict[str, Any]) -> str:
    """Return the flag for more KV memory; with a model, page sizes are known and memory is that of the device."""
    cost = summary["config"]["cost"]
    if isinstance(cost, dict) and cost.get("llm") is not None:
        return f"{_more_devices(summary)}, or more --kv-memory if the device has it"
    return f"--pages {2 * summary['config']['pages']}"


def _more_devices(summary: dict[str, Any]) -> str:
    cost = summary["config"]["cost"]
    ways = cost.get("tensor_parallel", 1) if isinstance(cost, dict) else 1
    return f"--tensor-parallel {2 * ways}"


def _more_replicas(summary: dict[str, Any]) -> str:
    return f"try --replicas {summary['config']['replicas'] + 1}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def as_size(num_bytes: int) -> str:
    """Return an amount of memory in the form of an option, rounded up: `94GiB`, `9.4GiB`, `512MiB`."""
    if num_bytes >= 10 << 30:
        return f"{-(-num_bytes // (1 << 30))}GiB"
    if num_bytes >= 1 << 30:
        tenths = -(-num_bytes * 10 // (1 << 30))
        return f"{tenths / 10:g}GiB"
    return f"{-(-num_bytes // (1 << 20))}MiB"

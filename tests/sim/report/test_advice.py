"""What to try next: each rule on a report of a replay that it is for."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvarts.base.units import parse_bytes
from kvarts.cli.replaying import all_sections
from kvarts.sim.config import make_config
from kvarts.sim.replay import replay_one
from kvarts.sim.replaying import replay
from kvarts.sim.report.advice import HostMemory, advice, as_size, unbounded_hit_ratio
from kvarts.sim.report.report import Report
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.trace import Trace
from kvarts.sim.trials import MOST_STEPS, ReplayTrials, round_sizes

DATA = Path(str(files("kvarts") / "data"))
MODEL = {"model": "llama-3.1-8b", "device": "h100-80gb"}
LARGE = 2_000_000


@cache
def trace_of(name: str) -> Trace:
    return load_trace(DATA / name, trace_block_size=16 if name.startswith("vllm") else None)


def agents_report(**settings: Any) -> Report:
    return replay(trace_of("coding-agents"), make_config({**MODEL, **settings}, sections=all_sections()))


def agents(**settings: Any) -> dict[str, Any]:
    return agents_report(**settings).summary


def chat(**settings: Any) -> dict[str, Any]:
    return replay(trace_of("mooncake-conversation-1000.jsonl"), make_config(settings)).summary


def test_what_can_never_fit_comes_first() -> None:
    summary = chat(pages=500)
    said = advice(summary)
    assert said is not None
    assert said.startswith(f"{summary['num_rejected']} of 1,000 requests can never fit into 500 pages")
    assert said.endswith("try --pages 1000")  # nothing is known of the trace


def test_the_least_pages_that_admit_the_longest_request() -> None:
    for pages in (10, 500):
        report = replay(trace_of("mooncake-conversation-1000.jsonl"), make_config({"pages": pages}))
        said = report.advice
        assert said is not None and said.endswith("the longest needs 7,649; try --pages 7649")
    assert chat(pages=7649)["num_rejected"] == 0
    assert chat(pages=7648)["num_rejected"] == 1
    with_a_model = agents_report(kv_memory="8GiB").advice
    assert with_a_model is not None and with_a_model.endswith(
        "the longest needs 7,440 (14.5 GiB); try --kv-memory 15GiB if the device has it, or --tensor-parallel 2"
    )
    assert agents(kv_memory="15GiB")["num_rejected"] == 0


def test_where_nothing_fits_that_is_what_limits() -> None:
    summary = chat(pages=10)
    assert summary["num_completed"] == 0 and summary["limited_by"]["cause"] == "kv_pages"
    said = advice(summary)
    assert said is not None and said.startswith("no request fits into 10 pages")


def test_a_cap_on_requests_with_pages_to_spare_is_raised() -> None:
    summary = agents(max_seqs=2)
    used = f"{summary['peak_used_pct'] * 100:.1f} %"
    assert advice(summary) == f"2 requests ran at once and used at most {used} of the pages; try --max-seqs 4"


def test_a_cap_on_requests_that_fill_the_pages_is_no_help() -> None:
    summary = chat(max_seqs=14, pages=LARGE // 100)
    assert summary["limited_by"]["cause"] == "sequence_cap"
    said = advice(summary)
    assert said is not None and said.endswith("of the pages; try --replicas 2")


def test_waiting_for_pages_asks_for_more_of_them() -> None:
    summary = chat()
    share = f"{summary['limited_by']['share_of_waiting']['kv_pages'] * 100:.1f} %"
    assert advice(summary) == (
        f"{share} of the time spent waiting was for KV pages, and requests were preempted 11 times; "
        "try --replicas 2, or --pages 65536"
    )


@pytest.mark.long
def test_hits_lost_to_eviction_ask_for_a_tier_below() -> None:
    report = agents_report()
    summary = report.summary
    ratio = f"{summary['prefix_hit_ratio'] * 100:.1f} %"
    lost = f"eviction costs compute: {ratio} of prompt tokens were hits; try --"
    said, alone = report.advice, advice(summary)
    assert said is not None and said.startswith(lost) and alone is not None and alone.startswith(lost)
    assert alone.endswith("try --tensor-parallel 2, or more --kv-memory if the device has it")
    size = re.search(r"try --host-memory (\S+GiB): a replay finds (\S+) % with it, and at most (\S+) % with more", said)
    assert size is not None
    found = agents(offload={"host_memory": size[1]})
    assert f"{found['prefix_hit_ratio'] * 100:.1f}" == size[2]
    assert f"{agents(offload={'host_memory': '1TiB'})['prefix_hit_ratio'] * 100:.1f}" == size[3]


def test_without_a_prefix_cache_no_memory_is_advised() -> None:
    said = advice(agents(no_prefix_caching=True))
    assert said is not None and said.startswith("without a prefix cache nothing is found, though ")
    assert said.endswith("leave out --set no_prefix_caching=true")


def test_a_warning_of_snapshots_is_of_a_prefix_cache() -> None:
    hybrid = {"model": "granite-4.0-h-tiny", "device": "h100-80gb", "kv_groups": "all"}
    trace = trace_of("mooncake-conversation-1000.jsonl")
    warned, quiet = (
        any("snapshots" in line for line in replay(trace, make_config({**hybrid, **more})).summary.get("warnings", ()))
        for more in ({}, {"no_prefix_caching": True})
    )
    assert (warned, quiet) == (True, False)


@pytest.mark.long
def test_the_size_that_is_advised_is_the_least_on_the_grid_that_keeps_the_hits() -> None:
    trace, config = trace_of("coding-agents"), make_config(MODEL, sections=all_sections())
    summary = replay(trace, config).summary
    trials = ReplayTrials(replay_one, trace, config)
    found = trials.host_memory(summary)
    assert found is not None
    most = agents(offload={"host_memory": "1TiB"})["prefix_hit_ratio"]
    enough = summary["prefix_hit_ratio"] + 0.99 * (found.most_hit_ratio - summary["prefix_hit_ratio"])
    sizes = round_sizes(1 << 30, summary["distinct_pages"] * 16 * 131_072)
    smaller = sizes[sizes.index(found.num_bytes) - 1]
    assert found.most_hit_ratio == pytest.approx(most, abs=1e-4)
    assert agents(offload={"host_memory": found.num_bytes})["prefix_hit_ratio"] == found.hit_ratio >= enough
    assert agents(offload={"host_memory": smaller})["prefix_hit_ratio"] < enough


def test_long_replays_are_not_repeated_without_being_asked() -> None:
    trace, config = trace_of("coding-agents"), make_config(MODEL, sections=all_sections())
    summary = {**replay(trace, config).summary, "num_steps": MOST_STEPS + 1}
    trials = ReplayTrials(replay_one, trace, config)
    assert trials.is_too_long(summary)
    said = advice(summary, trials=lambda: trials)
    assert said is not None and "`kvarts plan` with the same options finds by replay" in said
    assert not ReplayTrials(replay_one, trace, config, is_asked=True).is_too_long(summary)


@pytest.mark.slow
def test_with_files_below_no_size_is_named() -> None:
    report = agents_report(offload={"host_memory": "4GiB", "disk_memory": "4GiB"})
    said = report.advice
    assert said is not None and said.endswith("try a larger --set offload.disk_memory")


@pytest.mark.parametrize(
    ("num_bytes", "size"),
    [
        (94 << 30, "94GiB"),
        ((94 << 30) + 1, "95GiB"),
        (3 << 29, "1.5GiB"),
        (5 << 20, "5MiB"),
        ((1 << 30) - 1, "1024MiB"),
    ],
)
def test_sizes_are_no_less_than_what_they_stand_for(num_bytes: int, size: str) -> None:
    assert as_size(num_bytes) == size
    assert HostMemory(num_bytes=num_bytes, hit_ratio=0.0, most_hit_ratio=0.0).num_bytes <= parse_bytes(size)


def test_sizes_on_the_grid_are_written_as_they_are() -> None:
    sizes = round_sizes(1 << 24, 200 << 30)
    assert sizes == sorted(set(sizes)) and sizes[-1] >= 200 << 30
    assert all(parse_bytes(as_size(size)) >= size for size in sizes)
    assert all(after / before < 1.25 for before, after in pairwise(sizes) if before >= 10 << 20)


def test_hits_lost_to_routing_ask_for_another_router() -> None:
    summary, followed = agents(replicas=2), agents(replicas=2, router="prefix")
    said = advice(summary)
    assert said is not None
    assert said.startswith("what was computed before lies in part on another replica") and said.endswith(
        "try --router prefix"
    )
    assert followed["prefix_hit_ratio"] > summary["prefix_hit_ratio"] + 0.03


def test_waiting_for_the_budget_asks_for_compute() -> None:
    summary = chat(pages=LARGE)
    assert summary["num_evicted_pages"] == 0
    said = advice(summary)
    assert said is not None
    assert "was for the budget of 8,192 tokens a step; try --replicas 2, or a faster --device" in said


@pytest.mark.parametrize(
    ("settings", "more"),
    [({"concurrency": 3}, "--concurrency 6"), ({"speedup": 1.5}, "--speedup 3")],
)
def test_where_nothing_waits_more_traffic_finds_the_limit(settings: dict[str, Any], more: str) -> None:
    config = make_config({**MODEL, "pages": LARGE, **settings})
    summary = replay(trace_of("coding-agents" if "concurrency" in settings else "azure-conv-1000.csv"), config).summary
    assert summary["limited_by"]["cause"] == "nothing"
    said = advice(summary)
    assert said is not None and said.startswith("hardly any request waited") and f"try {more} to find" in said


def test_a_replay_of_nothing_has_no_advice() -> None:
    assert advice(replay(Trace(iter(())), make_config({})).summary) is None


@pytest.mark.parametrize(
    ("name", "pages"),
    [
        ("coding-agents", 40_000),
        ("mooncake-conversation-1000.jsonl", 300_000),
        ("vllm-rtx4090/prompts.jsonl", 40_000),
    ],
)
def test_the_hit_ratio_of_an_unbounded_pool_is_estimated_within_a_hundredth(name: str, pages: int) -> None:
    trace = trace_of(name)
    estimate = unbounded_hit_ratio(replay(trace, make_config({"pages": pages})).summary)
    unbounded = replay(trace, make_config({"pages": LARGE})).summary
    assert unbounded["num_evicted_pages"] == 0
    assert estimate == pytest.approx(unbounded["prefix_hit_ratio"], abs=0.01)


def test_round_sizes_end_where_nothing_is_least() -> None:
    """A trace without a whole page has no distinct pages."""
    assert [size >> 20 for size in round_sizes(0, 3 << 20)] == [1, 2, 3]

"""What to try next: each rule on a report of a replay that it is for."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from kvarts.report.advice import advice, unbounded_hit_ratio
from kvarts.sim.config import make_config
from kvarts.sim.replay import replay
from kvarts.traffic.formats import load_trace
from kvarts.traffic.trace import Trace

DATA = Path(str(files("kvarts") / "data"))
MODEL = {"model": "llama-3.1-8b", "device": "h100-80gb"}
LARGE = 2_000_000


@cache
def trace_of(name: str) -> Trace:
    return load_trace(DATA / name, trace_block_size=16 if name.startswith("vllm") else None)


def agents(**settings: Any) -> dict[str, Any]:
    return replay(trace_of("coding-agents"), make_config({**MODEL, **settings})).summary


def chat(**settings: Any) -> dict[str, Any]:
    return replay(trace_of("mooncake-conversation-1000.jsonl"), make_config(settings)).summary


def test_what_can_never_fit_comes_first() -> None:
    summary = chat(pages=500)
    said = advice(summary)
    assert said is not None
    assert said.startswith(f"{summary['num_rejected']} of 1,000 requests can never fit into 500 pages")
    assert said.endswith("try --pages 1000")
    with_a_model = advice(agents(kv_memory="8GiB"))
    assert with_a_model is not None and with_a_model.endswith(
        "--tensor-parallel 2, or more --kv-memory if the device has it"
    )


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


def test_hits_lost_to_eviction_ask_for_a_tier_below() -> None:
    lost = (
        "eviction costs compute: 85.9 % of prompt tokens were hits, and about 95.0 % would be if nothing were evicted; "
        "the working set is 3.06 times the pool; try "
    )
    summary = agents()
    assert advice(summary, tier_flag="--below") == f"{lost}--below 86925"
    assert advice(summary) == f"{lost}--tensor-parallel 2, or more --kv-memory if the device has it"


def test_hits_lost_to_routing_ask_for_another_router() -> None:
    summary, followed = agents(replicas=2), agents(replicas=2, router="prefix")
    said = advice(summary)
    assert said is not None
    assert said.startswith("what was computed before lies in part on another replica") and said.endswith(
        "try --router prefix"
    )
    assert followed["prefix_hit_ratio"] > summary["prefix_hit_ratio"] + 0.05


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
        ("azure-code-1000.csv", 20_000),
        ("vllm-rtx4090/prompts.jsonl", 40_000),
    ],
)
def test_the_hit_ratio_of_an_unbounded_pool_is_estimated_within_a_hundredth(name: str, pages: int) -> None:
    trace = trace_of(name)
    estimate = unbounded_hit_ratio(replay(trace, make_config({"pages": pages})).summary)
    unbounded = replay(trace, make_config({"pages": LARGE})).summary
    assert unbounded["num_evicted_pages"] == 0
    assert estimate == pytest.approx(unbounded["prefix_hit_ratio"], abs=0.01)

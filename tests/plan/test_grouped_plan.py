"""Plans that count KV groups: the least memory is that of replays, and commands replay to what the plan says."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.config import StateMode
from kvarts.core.kv.groups import PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.cost.polynomial import LinearCost
from kvarts.plan.cache import CachePlan
from kvarts.plan.replays import Replays
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.trace import Trace

from builders.plan_traces import small_traces

SAMPLE = Path(str(files("kvarts") / "data" / "mooncake-conversation-1000.jsonl"))
MODEL = ("--model", "gemma-3-27b", "--device", "h100-80gb", "--set", "kv_groups=all")
LAYERS = st.sampled_from(
    [
        KvLayer(kind="window", span=5),
        KvLayer(kind="window", span=11),
        KvLayer(kind="chunk", span=6),
        KvLayer(kind="state", state_bytes=64),
    ]
)


@given(trace=small_traces(), layers=st.lists(LAYERS, max_size=2), budget=st.sampled_from([3, 8, 64]), data=st.data())
def test_the_least_memory_is_the_smallest_that_refuses_none(
    trace: Trace, layers: list[KvLayer], budget: int, data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=len(layers), max_size=len(layers)))
    parts = [PartGroup(layer, 64 * size) for layer, size in zip(layers, sizes, strict=True)]
    config = ReplayConfig(
        num_pages=100_000,
        page_size=4,
        max_num_batched_tokens=budget,
        max_num_seqs=2,
        cost=LinearCost(step_ms=1.0),
        kv_groups="all",
        groups=(PartGroup(KvLayer(kind="full"), 128), *parts),
    )
    if any(layer.kind == "state" for layer in layers):
        config = msgspec.structs.replace(config, mamba_cache_mode=data.draw(st.sampled_from(get_args(StateMode))))
    plan = CachePlan(trace, 4)
    least = Replays(plan, config, command=str, router="prefix").least_pages
    assert refused(trace, config, least) == 0
    assert least == 1 or refused(trace, config, least - 1) > 0
    whole = msgspec.structs.replace(config, kv_groups="off", groups=(), mamba_cache_mode="snapshots")
    assert Replays(plan, whole, command=str, router="prefix").least_pages == plan.least_pages


def refused(trace: Trace, config: ReplayConfig, num_pages: int) -> int:
    report = replay(trace, msgspec.structs.replace(config, num_pages=num_pages))
    rejected: int = report.summary["num_rejected"]
    return rejected


@pytest.mark.long
def test_commands_replay_to_what_the_plan_says(
    tmp_path: Path, asked: Callable[..., Any], run_command: Callable[..., int]
) -> None:
    trace = tmp_path / "trace.jsonl"
    assert run_command("trace", "slice", SAMPLE, "--set", "count=30", "-o", trace) == 0
    options = ("--page-size", 512, "--slo-ttft-ms", 10000, "--slo-share", 0.8)
    plan = asked("plan", trace, *MODEL, *options, "--json")
    assert [point["group_hit_ratio"] for point in plan["at"]] == sorted(
        point["group_hit_ratio"] for point in plan["at"]
    )
    latency = plan["latency"]
    assert {option["name"] for option in latency["options"]} <= {"cheapest", "devices"}
    sizes = {point["pages"]: point["group_hit_ratio"] for point in plan["at"]}
    for point in latency["points"]:
        assert point["predicted_hit_ratio"] == (
            sizes.get(point["pages"], point["predicted_hit_ratio"]) if point["replicas"] == 1 else None
        )
    for each in latency["options"]:
        assert "--kv-groups all" in each["command"]
        summary = asked(*shlex.split(each["command"])[1:], "--json")
        config = summary["config"]
        assert (config["replicas"], config["pages"], config["kv_groups"]) == (each["replicas"], each["pages"], "all")
        (point,) = (point for point in latency["points"] if point["command"] == each["command"])
        assert summary["prefix_hit_ratio"] == point["hit_ratio"]
        assert summary["ttft_ms"]["p99"] == point["ttft_ms"]["p99"]
    # A Gemma holds few pages of long requests at once if every layer keeps every token.
    by_default = asked("plan", trace, *MODEL[:4], *options, "--json")["latency"]["points"]
    assert [point["ttft_ms"] for point in by_default] == [point["ttft_ms"] for point in latency["points"]]
    whole = asked("plan", trace, *MODEL[:4], "--set", "kv_groups=off", *options, "--json")["latency"]["points"]
    assert as_given(latency["points"])["num_rejected"] < as_given(whole)["num_rejected"]


@pytest.mark.parametrize("below", [(), ("--host-memory", "8GiB", "--set", "kv_groups=tails")])
def test_a_plan_with_states_by_page_says_what_its_commands_replay_to(
    below: tuple[str, ...],
    tmp_path: Path,
    asked: Callable[..., Any],
    run_command: Callable[..., int],
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    trace = tmp_path / "trace.jsonl"
    assert run_command("trace", "slice", SAMPLE, "--set", "count=20", "-o", trace) == 0
    model = ("--model", "granite-4.0-h-tiny", "--device", "h100-80gb", "--page-size", 512, *below)
    options = ("--set", "mamba_cache_mode=align", "--at", "64,1024", "--slo-ttft-ms", 10000, "--slo-share", 0.8)
    plan = asked("plan", trace, *model, *options, "--json")
    assert {point["group_hit_ratio"] <= point["hit_ratio"] for point in plan["at"]} == {True}
    page_bytes = plan["config"]["page_bytes"]
    for each in plan["latency"]["options"]:
        assert "--set mamba_cache_mode=align" in each["command"]
        summary = asked(*shlex.split(each["command"])[1:], "--json")
        assert summary["config"]["page_bytes"] == page_bytes
        (point,) = (point for point in plan["latency"]["points"] if point["command"] == each["command"])
        assert summary["prefix_hit_ratio"] == point["hit_ratio"]
        assert summary["ttft_ms"]["p99"] == point["ttft_ms"]["p99"]
    capsysbinary.readouterr()
    assert run_command("plan", trace, *model, *options) == 0
    (option, *_) = plan["latency"]["options"]
    size = option["pages"] * page_bytes / (1 << 30)
    text = capsysbinary.readouterr().out.decode()
    assert any(f"{option['pages']:,}" in line and f" {size:,.1f} " in line for line in text.splitlines()), (
        "a state is part of each page"
    )


def as_given(points: list[Any]) -> Any:
    """The replay of one replica with all its memory, at the rate and the cost that were given."""
    most = max(point["pages"] for point in points)
    given_ = {"replicas": 1, "pages": most, "rate": 1.0, "cost_factor": 1.0}
    (found,) = (point for point in points if given_.items() <= point.items())
    return found

"""Hits with KV groups of requests that come one after the other, beside a closed loop of one."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.content import pack_units
from kvarts.core.kv.eviction import LruOrder
from kvarts.core.kv.groups import PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.cost.polynomial import LinearCost
from kvarts.plan.cache import CachePlan, GroupHits
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.trace import Trace, TraceRequest

from builders.grouped import FULL, part_groups
from builders.guide_policies import LeastHits
from builders.plan_traces import small_traces

SAMPLE = Path(str(files("kvarts") / "data" / "mooncake-conversation-1000.jsonl"))


def one_by_one(trace: Trace) -> Trace:
    """The same without sessions, whose turns would come before other requests of the trace."""
    requests = [msgspec.structs.replace(request, session_id=None) for request in trace]
    return Trace(requests, unit_tokens=trace.unit_tokens, has_output_tokens=trace.has_output_tokens)


@pytest.mark.laws
@given(
    trace=small_traces(most_requests=16),
    groups=part_groups(),
    keeps=st.sampled_from(["all", "tails"]),
    page_size=st.sampled_from([1, 2, 4]),
    num_pages=st.integers(1, 40),
    budget=st.sampled_from([1, 3, 8, 64]),
    states=st.sampled_from(["ends", "branches", "all", "align"]),
    eviction=st.sampled_from([LruOrder, LruOrder, LeastHits]),
)
def test_hits_are_those_of_a_closed_loop_of_one(
    trace: Trace,
    groups: tuple[PartGroup, ...],
    keeps: str,
    page_size: int,
    num_pages: int,
    budget: int,
    states: Any,
    eviction: Any,
) -> None:
    config = ReplayConfig(
        num_pages=num_pages,
        page_size=page_size,
        max_num_batched_tokens=budget,
        max_num_seqs=1,
        cost=LinearCost(step_ms=1.0),
        concurrency=1,
        kv_groups=keeps,  # type: ignore[arg-type]
        groups=groups,
        audit=True,
        eviction=eviction,
    )
    if any(group.is_state for group in groups):
        field = "snapshots" if states in ("ends", "branches") else "mamba_cache_mode"
        config = msgspec.structs.replace(config, **{field: states})
    trace = one_by_one(trace)
    report = replay(trace, config)
    assert report.summary["num_preemptions"] == 0
    hits = GroupHits(trace, config)
    found = report.request_columns["cached_tokens"][report.request_columns["status"] == 0].sum()
    assert hits.hit_pages(num_pages) * page_size == found
    if num_pages > 20:  # asked for again, and others in between
        hits.hit_pages(num_pages // 2)
        assert hits.hit_pages(num_pages) * page_size == found


def test_a_request_ends_with_the_parts_that_its_last_step_attended_to() -> None:
    """Its last step releases none, so the pages of the first prompt are the last that its request gives up."""
    prompts = [([1], 4), ([0], 2), ([1, 1, 1], 1)]
    rows = [TraceRequest(n, 0, pack_units(units), len(units), outputs) for n, (units, outputs) in enumerate(prompts)]
    window = PartGroup(KvLayer(kind="window", num_heads=1, head_numbers=2, span=4), 1)
    config = ReplayConfig(
        num_pages=5, page_size=1, max_num_seqs=1, cost=LinearCost(step_ms=1.0), concurrency=1, kv_groups="all",
        groups=(window,),
    )  # fmt: skip
    trace = Trace(rows, unit_tokens=1)
    assert replay(trace, config).request_columns["cached_tokens"].tolist() == [0, 0, 1]
    assert GroupHits(trace, config).by_request(5).tolist() == [0, 0, 1]


@pytest.mark.laws
@given(trace=small_traces(), page_size=st.sampled_from([1, 2, 4]), more=st.integers(0, 30))
def test_full_layers_find_what_the_curve_of_all_sizes_says_where_nothing_is_evicted(
    trace: Trace, page_size: int, more: int
) -> None:
    plan = CachePlan(trace, page_size)
    config = ReplayConfig(
        num_pages=1, page_size=page_size, cost=LinearCost(step_ms=1.0), kv_groups="all", groups=(PartGroup(FULL, 8),)
    )
    enough = sum(-(-(request.num_prompt_tokens + request.num_output_tokens) // page_size) for request in trace) + more
    assert GroupHits(trace, config).hit_ratio(enough) == plan.curve.most_hit_ratio


def test_a_plan_says_what_groups_find_at_each_size(
    tmp_path: Path,
    asked: Callable[..., Any],
    run_command: Callable[..., int],
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    trace = tmp_path / "trace.jsonl"
    assert run_command("trace", "slice", SAMPLE, "--set", "count=40", "-o", trace) == 0
    model = ("--model", "gemma-3-27b", "--device", "h100-80gb", "--page-size", 512, "--at", "100,2000")
    plain = asked("plan", trace, *model, "--set", "kv_groups=off", "--json")
    assert "group_hit_ratio" not in plain["at"][0]
    plan = asked("plan", trace, *model, "--set", "kv_groups=all", "--json")
    small, large = plan["at"]
    assert 0 < small["group_hit_ratio"] < large["group_hit_ratio"] == large["hit_ratio"]
    capsysbinary.readouterr()
    assert run_command("plan", trace, *model, "--set", "kv_groups=all") == 0
    table = capsysbinary.readouterr().out.decode().splitlines()
    heading = next(line for line in table if "optimum" in line)
    assert heading.endswith("    groups")
    assert max(map(len, table[: table.index(heading) + 3])) <= 80

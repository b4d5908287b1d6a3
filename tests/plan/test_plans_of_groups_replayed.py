"""Figures of plans of models with KV groups are those of replays of the same size, with states in every mode."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import kvarts
from kvarts.core.config import Slo, StateMode
from kvarts.core.kv.groups import PartGroup
from kvarts.cost.polynomial import LinearCost
from kvarts.plan.confidence import Goal
from kvarts.plan.users import UsersPlan
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.editing import repeated
from kvarts.sim.traffic.trace import Trace

from builders.grouped import part_groups
from builders.plan_traces import small_traces

pytestmark = pytest.mark.laws


@st.composite
def configs(draw: st.DrawFn) -> ReplayConfig:
    groups: tuple[PartGroup, ...] = draw(part_groups())
    has_states = any(group.is_state for group in groups)
    return ReplayConfig(
        num_pages=draw(st.integers(12, 40)),
        page_size=draw(st.sampled_from([1, 2, 4])),
        max_num_batched_tokens=draw(st.sampled_from([3, 8, 64])),
        max_num_seqs=draw(st.integers(1, 3)),
        cost=LinearCost(step_ms=1.0, chunk_token_ms=1.0, decode_ms=0.1),
        kv_groups=draw(st.sampled_from(["all", "tails"])),
        groups=groups,
        mamba_cache_mode=draw(st.sampled_from(get_args(StateMode))) if has_states else "snapshots",
        slo=Slo(ttft_ms=draw(st.sampled_from([20.0, 60.0, 400.0]))),
        audit=True,
    )


def assert_same(point: dict[str, Any], trace: Trace, config: ReplayConfig) -> None:
    summary = replay(trace, config).summary
    assert point["hit_ratio"] == summary["prefix_hit_ratio"]
    names = {"num_rejected", "num_preemptions", "num_completed", "ttft_ms", "tpot_ms", "e2e_ms"}
    for name in names & point.keys():
        assert point[name] == summary[name], name


@given(small_traces(), configs())
def test_points_of_latency(trace: Trace, config: ReplayConfig) -> None:
    plan = kvarts.plan(trace, config, at=[config.num_pages], slo_share=0.8)
    points = plan.values["latency"]["points"]
    unchanged = [point for point in points if point["share_of_agents"] is None and not point["host_bytes"]]
    alone = [point for point in unchanged if (point["replicas"], point["rate"], point["cost_factor"]) == (1, 1.0, 1.0)]
    assert alone
    for point in alone[:4]:
        assert_same(point, trace, replace(config, num_pages=point["pages"]))


@given(small_traces().filter(lambda trace: trace.has_sessions), configs(), st.integers(2, 5))
def test_points_of_users(trace: Trace, config: ReplayConfig, most_users: int) -> None:
    plan = UsersPlan(trace, config, (1, most_users), Goal(0.8)).to_builtins()
    assert plan["points"]
    for point in plan["points"]:
        copies = -(-point["users"] // plan["num_sessions"])
        of_users = trace if copies == 1 else repeated(trace, copies)
        assert_same(point, of_users, replace(config, concurrency=point["users"]))
    fits, fails = plan["fits"], plan["fails_at"]
    shares = {point["users"]: point["slo_ratio"] for point in plan["points"]}
    assert fits is None or shares[fits] >= 0.8
    assert fails is None or shares[fails] < 0.8

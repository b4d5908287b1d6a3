"""Ranks in lock step: their steps are at one time, as long as together; many at once leave what one by one leaves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts import ReplayConfig, replay
from kvarts.base.errors import ConfigError
from kvarts.core.kv.groups import PartGroup
from kvarts.core.sched.plan import Batch
from kvarts.cost.roofline import RooflineCost
from kvarts.sim.config import make_config
from kvarts.sim.sessions import SessionReplay
from kvarts.sim.traffic.trace import Trace, TraceRequest

from builders.case import ROUTERS, Case, cases
from builders.grouped import FULL, WINDOW
from builders.kept import Kept
from builders.live_groups import live_groups
from builders.pages import paged
from builders.session_traces import Talk, session_traces

RANKS = RooflineCost(llm="qwen3-30b-a3b", device="rtx-pro-6000", data_parallel=2, expert_parallel=2)


class Together:
    """A cost model of ranks that are as slow as the slowest and take longer the more tokens there are in all."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks

    def step_ns(self, batch: Batch) -> int:
        return self.together_ns([batch])

    def decode_ns(self, num_decodes: int, known_tokens: int, pool_tokens: int, num_steps: int) -> list[int]:
        return self.decodes_together_ns([(num_decodes, known_tokens)], num_steps)

    def together_ns(self, batches: Sequence[Batch]) -> int:
        slowest = max(1000 * batch.num_tokens + batch.decode_known_tokens for batch in batches)
        return 500_000 + slowest + 700 * sum(batch.num_tokens for batch in batches)

    def decodes_together_ns(self, decodes: Sequence[tuple[int, int]], num_steps: int) -> list[int]:
        return [
            self.together_ns([Batch((), num, known + step * num, 1) for num, known in decodes])
            for step in range(num_steps)
        ]


def outcome(case: Case, num_ranks: int, num_groups: int, **changes: Any) -> tuple[Any, list[Any]]:
    config = case.config(
        cost=Together(num_ranks), replicas=num_ranks * num_groups, audit=True, profile="default", **changes
    )
    kept = [Kept() for _ in range(config.replicas)]
    report = replay(case.trace(), config, observers_of=lambda index: [kept[index]])
    return report, [seen.events for seen in kept]


@pytest.mark.laws
@given(cases(max_requests=14, cancels=True), st.integers(2, 3), st.integers(1, 2), st.sampled_from(ROUTERS))
def test_fast_forward_equals_step_by_step(case: Case, num_ranks: int, groups: int, router: str) -> None:
    """L5, of ranks."""
    fast, fast_events = outcome(case, num_ranks, groups, router=router)
    slow, slow_events = outcome(case, num_ranks, groups, router=router, step_by_step=True)
    # How a cost model prints itself has its address.
    assert fast.requests_jsonl() == slow.requests_jsonl()
    for name, column in fast.steps.items():
        assert column.tobytes() == slow.steps[name].tobytes(), name
    for ours, theirs in zip(fast_events, slow_events, strict=True):
        assert paged(ours) == paged(theirs)


@pytest.mark.laws
@given(cases(max_requests=10), st.integers(2, 3), live_groups())
def test_ranks_with_kv_groups_are_fast_as_slow(case: Case, num_ranks: int, groups: tuple[PartGroup, ...]) -> None:
    """What decodes of one rank release may let a request in, so ranks with windows step together."""
    changes: dict[str, Any] = {"kv_groups": "all", "groups": groups}
    fast, _ = outcome(case, num_ranks, 1, **changes)
    slow, _ = outcome(case, num_ranks, 1, **changes, step_by_step=True)
    assert fast.requests_jsonl() == slow.requests_jsonl()
    for name, column in fast.steps.items():
        assert column.tobytes() == slow.steps[name].tobytes(), name


@pytest.mark.laws
@given(cases(max_requests=14), st.integers(2, 3), st.integers(1, 2), st.none() | st.integers(1, 4))
def test_steps_of_ranks_are_at_one_time(case: Case, num_ranks: int, groups: int, concurrency: int | None) -> None:
    """Two steps of one group begin and end together, or one is over before the other begins."""
    report, _ = outcome(case, num_ranks, groups, step_by_step=True, concurrency=concurrency)
    steps = report.steps
    for group in range(groups):
        spans = sorted(
            {
                (float(start), float(start + duration))
                for start, duration, replica in zip(
                    steps["start_ms"], steps["duration_ms"], steps["replica"], strict=True
                )
                if replica // num_ranks == group
            }
        )
        for (_, end), (start, _) in pairwise(spans):
            assert start >= end - 1e-6


@pytest.mark.laws
@given(cases(max_requests=10), st.none() | st.integers(1, 3), st.sampled_from([1.0, 1.3]))
def test_a_closed_loop_of_ranks_is_fast_as_slow(case: Case, concurrency: int | None, cost_factor: float) -> None:
    fast, _ = outcome(case, 2, 2, concurrency=concurrency, cost_factor=cost_factor)
    slow, _ = outcome(case, 2, 2, concurrency=concurrency, cost_factor=cost_factor, step_by_step=True)
    assert fast.requests_jsonl() == slow.requests_jsonl()


def traffic(num_requests: int = 6) -> Trace:
    """One request that decodes for long, then long prompts."""
    sizes = [(100, 400), *[(8000, 2)] * (num_requests - 1)]
    return Trace(
        [
            TraceRequest(row, row * 400_000_000, (range(row << 32, (row << 32) + num_prompt),), num_prompt, num_output)
            for row, (num_prompt, num_output) in enumerate(sizes)
        ]
    )


@pytest.mark.laws
@given(cases(max_requests=14, cancels=True), st.integers(2, 3))
def test_one_group_is_placed_as_by_vllms_front_end(case: Case, num_ranks: int) -> None:
    ours, _ = outcome(case, num_ranks, 1)
    theirs, _ = outcome(case, num_ranks, 1, router="vllm-ranks")
    assert ours.requests_jsonl() == theirs.requests_jsonl()


def test_a_prompt_on_one_rank_delays_the_other() -> None:
    """Ranks that are engines by themselves would not disturb each other: the first takes as long as alone."""
    config = make_config({"model": "qwen3-30b-a3b", "device": "rtx-pro-6000", "data_parallel": 2, "expert_parallel": 2})
    assert config.replicas == 2
    assert config.to_builtins()["cost"]["data_parallel"] == 2
    # A rank that decodes waits, so prompts that arrive meanwhile go to the other.
    alone, beside = replay(traffic(1), config).requests, replay(traffic(2), config).requests
    assert list(beside["replica"]) == [0, 1]
    delay_ms = float(beside["last_token_ms"][0] - alone["last_token_ms"][0])
    prompt_ms = float(beside["first_token_ms"][1] - beside["arrival_ms"][1])
    assert 0.5 * prompt_ms < delay_ms < 1.1 * prompt_ms


def test_dense_ranks_are_engines_by_themselves() -> None:
    settings = {"model": "llama-3.1-8b", "device": "rtx-pro-6000"}
    ranks = replay(traffic(), make_config({**settings, "data_parallel": 2}))
    apart = replay(traffic(), make_config({**settings, "replicas": 2}))
    assert ranks.requests_jsonl() == apart.requests_jsonl()


@pytest.mark.laws
@given(
    session_traces(),
    st.fixed_dictionaries(
        {
            "page_size": st.sampled_from([1, 3, 4]),
            "num_pages": st.sampled_from([70, 300]),
            "max_num_batched_tokens": st.sampled_from([8, 512]),
            "max_num_seqs": st.sampled_from([2, 8]),
            "concurrency": st.sampled_from([None, 1, 3]),
            "router": st.sampled_from(ROUTERS),
        }
    ),
    st.sampled_from([{"window": 7, "sink": 3}, {"window": 12, "at_capacity": "evict"}, {"retention": "pin"}]),
    st.sampled_from([(), (PartGroup(FULL, 1), WINDOW)]),
)
def test_sessions_of_ranks_fast_forward_equals_step_by_step(
    talk: Talk, settings: dict[str, Any], kept: dict[str, Any], groups: tuple[PartGroup, ...]
) -> None:
    """L5, and at rest only what sessions keep is in use."""
    if groups:
        settings |= {"kv_groups": "all", "groups": groups}
    fast, slow = (
        replay(
            talk.trace(),
            ReplayConfig(
                cost=Together(2),
                replicas=4,
                sessions=SessionReplay(chunk_tokens=16, **kept),
                step_by_step=slowly,
                audit=slowly,
                **settings,
            ),
        )
        for slowly in (False, True)
    )
    assert fast.requests_jsonl() == slow.requests_jsonl()
    assert fast.summary["sessions"] == slow.summary["sessions"]
    for name, column in fast.steps.items():
        assert column.tobytes() == slow.steps[name].tobytes(), name
    for log in fast.step_logs:
        assert (log.rests["used"] == log.rests["reserved"]).all()


def test_experts_divided_leave_more_memory() -> None:
    settings = {"model": "qwen3-30b-a3b", "device": "rtx-pro-6000"}
    whole = make_config(settings).num_pages
    divided = make_config({**settings, "data_parallel": 2}).num_pages
    assert divided == make_config({**settings, "data_parallel": 2, "expert_parallel": 2}).num_pages
    assert divided > 1.5 * whole
    stages = make_config({**settings, "pipeline_parallel": 2}).num_pages
    assert stages > 2 * divided


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"expert_parallel": 2}, "expert_parallel: must be 1 or 1, got 2"),
        ({"expert_parallel": 2, "data_parallel": 4}, "expert_parallel: must be 1 or 4, got 2"),
        ({"model": "llama-3.1-8b", "data_parallel": 2, "expert_parallel": 2}, "llama-3.1-8b has no experts"),
        ({"data_parallel": 2, "pipeline_parallel": 2}, "pipeline_parallel: does not go with ranks in lock step"),
        ({"pipeline_parallel": 49}, "pipeline_parallel: must be at most 48"),
        ({"device": "cpu:", "data_parallel": 2}, "data_parallel: cpu: has no link"),
        ({"data_parallel": 0}, "data_parallel"),
    ],
)
def test_what_cannot_be_divided_is_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({"model": "qwen3-30b-a3b", "device": "rtx-pro-6000", "pages": 100, **settings})
    assert says in str(caught.value)


def test_engines_are_whole_groups() -> None:
    with pytest.raises(ConfigError, match="replicas: must be a multiple of the 2 ranks in lock step, got 3"):
        ReplayConfig(cost=RANKS, replicas=3)

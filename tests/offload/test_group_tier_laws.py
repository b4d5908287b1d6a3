"""Whole random workloads of models with KV groups and host memory below the device."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.kv.group_memory import PartGroup
from kvarts.offload.config import OffloadConfig
from kvarts.report.requests import REJECTED
from kvarts.sim.config import make_config
from kvarts.sim.replay import replay
from kvarts.traffic.workload import FixedLength, Workload

from builders.case import Case
from builders.group_tiers import FAST, Grouped, grouped, returning
from builders.grouped import Told, assert_same_outcome, part_groups

pytestmark = pytest.mark.laws


@given(grouped())
def test_every_token_is_counted_once_and_nothing_is_held_at_rest(tiers: Grouped) -> None:
    """L1, L2, L7, L8, L10; laws of page accounting are asserted after every step."""
    report = tiers.replayed()
    columns = report.request_columns
    done = columns["status"] != REJECTED
    for replica, log in enumerate(report.step_logs):
        mine = {name: column[done & (columns["replica"] == replica)] for name, column in columns.items()}
        needed = mine["input_tokens"] + mine["output_tokens"] - 1  # the last token is never computed
        computed = needed - mine["cached_tokens"] + mine["recomputed_tokens"]
        assert log.columns["tokens"].sum() == computed.sum()
        for field in log.tier_fields:
            if field.endswith("_used"):
                assert not log.rests[field][-1:].any()  # there is none where nothing ran
    assert (columns["host_tokens"] <= columns["cached_tokens"]).all()
    assert tiers.replayed().to_json() == report.to_json()


@given(grouped())
def test_leaps_and_readers_of_every_event_change_nothing(tiers: Grouped) -> None:
    """L5: in leaps, step by step, and with every part named for those that read what happens to it."""
    fast = tiers.replayed(audit=False)
    assert_same_outcome(fast, tiers.replayed(audit=False, step_by_step=True))
    assert_same_outcome(fast, tiers.replayed(lambda _: [Told()]))


@given(returning(max_requests=12), part_groups(), st.sampled_from(["all", "tails"]))
def test_nothing_is_computed_again_that_could_be_hit(case: Case, groups: tuple[PartGroup, ...], keeps: str) -> None:
    """With room and bandwidth without end below, a small device finds what a device without end finds."""
    tiers = Grouped(case, groups, keeps, OffloadConfig(host_pages=5000, **FAST))
    ample = Grouped(case, groups, "tails", tiers.offload).replayed(concurrency=1, offload=None, num_pages=5000)
    found = tiers.replayed(concurrency=1)
    columns = found.request_columns
    done = columns["status"] != REJECTED
    expected = ample.request_columns["cached_tokens"]
    # Where what leaves a window stays cached, the device itself may have more.
    as_much = columns["cached_tokens"] >= expected if keeps == "all" else columns["cached_tokens"] == expected
    assert as_much[done].all()


STEADY = {
    "compute_efficiency": 0.7,
    "bandwidth_efficiency": 0.8,
    "attention_efficiency": 0.7,
    "step_us": 1000.0,
    "sequence_us": 10.0,
    "layer_us": 0.0,
    "graph_tokens": 0,
    "eager_layer_us": 0.0,
}
"""Constants that do not change with those that ship: where a pool holds a third of the sessions, other step times alone
move the mean TTFT by a third, with and without a tier."""


@pytest.mark.parametrize(
    ("policy", "rate"),
    [("eager", "50MB/s"), ("eager", "1GB/s"), ("eager", "50GB/s"), ("lazy", "50MB/s"), ("lazy", "50GB/s")],
)
def test_a_tier_does_not_hurt(policy: Any, rate: str) -> None:
    """L13, with lanes that carry a prompt in less time than it takes to compute, and in much more."""
    traffic = Workload(
        num_sessions=24,
        turns_per_session=4,
        new_tokens=FixedLength(700),
        output_tokens=FixedLength(30),
        prefix_tokens=900,
        sessions_per_s=2.0,
        think_time_s=5.0,
    )
    config = make_config({"model": "gemma-3-27b", "device": "h100-80gb", "kv_groups": "tails", "pages": 400})
    config = msgspec.structs.replace(config, cost=msgspec.structs.replace(config.cost, **STEADY))
    alone = replay(traffic, config).summary["ttft_ms"]
    tier = OffloadConfig(host_memory="60GiB", policy=policy, h2d=rate, d2h=rate)
    with_tier = replay(traffic, msgspec.structs.replace(config, offload=tier)).summary["ttft_ms"]
    assert with_tier["mean"] <= 1.02 * alone["mean"]
    assert with_tier["p99"] <= 1.02 * alone["p99"]

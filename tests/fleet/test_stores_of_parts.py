"""A store that workers share whose models have KV groups: leaps, laws, and what a naive model finds."""

from __future__ import annotations

from dataclasses import replace as with_arrival
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvarts.fleet.config import FleetConfig, FleetWorker, PoolConfig, StoreSettings
from kvarts.fleet.report import FleetReport
from kvarts.kv.group_memory import PartGroup
from kvarts.report.requests import REJECTED
from kvarts.sim.replay import replay

from builders.case import Case, cases
from builders.fleet import FleetCase, fleets
from builders.group_tiers import COST, returning
from builders.grouped import Told, part_groups
from builders.tiered import tiers_below

pytestmark = pytest.mark.laws

AT_ONCE = StoreSettings(pages=5000, rate="1000000000000000B/s", worker_rate="1000000000000000B/s", latency_us=0.0)


@st.composite
def stores(draw: st.DrawFn) -> StoreSettings:
    """A store that fills up, at rates at which a part takes from less than a step to many."""
    rates = st.sampled_from([50, 500, 5000, 10**15])
    return StoreSettings(
        pages=draw(st.sampled_from([1, 4, 20, 200, 2000])),
        rate=f"{draw(rates)}B/s",
        worker_rate=f"{draw(rates)}B/s",
        latency_us=draw(st.sampled_from([0.0, 100.0, 5000.0])),
    )


@st.composite
def above(draw: st.DrawFn) -> dict[str, Any]:
    """KV groups, and what is between devices and store."""
    settings = {"kv_groups": draw(st.sampled_from(["all", "tails"])), "groups": draw(part_groups())}
    if draw(st.booleans()):
        offload = draw(tiers_below(of_groups=True))
        swaps = draw(st.sampled_from(["swap", "recompute"]))
        alone = {"bus": None, "copy_slowdown": 0.0, "preemption_mode": swaps}
        settings["offload"] = structs.replace(offload, policy="eager", **alone)
    if draw(st.booleans()):
        settings["cost"] = COST
    return settings


@st.composite
def pools(draw: st.DrawFn) -> tuple[Case, FleetConfig]:
    """Replicas, or prefill and decode workers, which may fail."""
    memory, store = draw(above()), draw(stores())
    memory["router"] = draw(st.sampled_from(["round-robin", "prefix", "least-loaded"]))
    if draw(st.booleans()):
        fleet: FleetCase = draw(fleets(profile="default", cancels=True, faults=True))
        return fleet.case, structs.replace(fleet.config(**memory), store=store)
    case = draw(st.one_of(cases(max_requests=24, cancels=True), returning(max_requests=24)))
    case.profile, case.replicas = "default", draw(st.integers(1, 3))
    pool = PoolConfig(role="mixed", each=case.config(audit=True, **memory))
    return case, FleetConfig(pools=(pool,), store=store)


def with_changes(config: FleetConfig, **changes: Any) -> FleetConfig:
    each = [structs.replace(pool, each=structs.replace(pool.each, **changes)) for pool in config.pools]
    return structs.replace(config, pools=tuple(each))


@given(pools())
def test_leaps_laws_and_readers_of_every_event_change_nothing(drawn: tuple[Case, FleetConfig]) -> None:
    """L1, L2, L5, L8: in leaps, step by step, and with the laws of each worker and of the store asserted."""
    case, config = drawn
    told: dict[int, Told] = {}

    def readers_of(worker: FleetWorker) -> list[Told]:
        told[worker.index] = Told()
        return [told[worker.index]]

    fast: FleetReport = replay(case.trace(), with_changes(config, audit=False))
    others = [
        replay(case.trace(), with_changes(config, audit=False, step_by_step=True)),
        replay(case.trace(), config),
        replay(case.trace(), config, observers_of=readers_of),
    ]
    for other in others:
        assert other.to_json() == fast.to_json()
        assert other.requests_jsonl() == fast.requests_jsonl()
    summary = fast.summary
    ends = sum(summary.get(f"num_{end}", 0) for end in ("completed", "rejected", "failed", "cancelled"))
    assert ends == summary["num_requests"]


@given(returning(max_requests=12), part_groups(), st.sampled_from(["all", "tails"]), st.integers(1, 3))
def test_nothing_is_computed_again_that_any_worker_has_computed(
    case: Case, groups: tuple[PartGroup, ...], keeps: str, replicas: int
) -> None:
    """With room and bandwidth without end in the store, workers in turn find what one device without end finds.

    Requests come one by one: what one of them leaves idle is stored before the next one comes.
    """
    case.rows = [with_arrival(row, arrival_ms=index * 60_000) for index, row in enumerate(case.rows)]
    small = {"kv_groups": keeps, "groups": groups, "cost": COST}
    case.replicas = replicas

    def replayed() -> FleetReport:
        pool = PoolConfig(role="mixed", each=case.config(audit=True, **small))
        return replay(case.trace(), FleetConfig(pools=(pool,), store=AT_ONCE))

    is_done = replayed().request_columns["status"] != REJECTED
    case.rows = [row for row, done in zip(case.rows, is_done, strict=True) if done]
    if not case.rows:
        return
    found = replayed().request_columns["cached_tokens"]
    case.replicas = 1
    ample = replay(case.trace(), case.config(**{**small, "kv_groups": "tails"}, num_pages=5000))
    expected = ample.request_columns["cached_tokens"]
    as_much = found >= expected if keeps == "all" else found == expected
    assert as_much.all()

"""Routers that read events of parts of pages: without lag they choose as those that ask, and late as of whole pages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts import ReplayConfig, replay
from kvarts.core.kv.groups import PartGroup
from kvarts.policies import Routing
from kvarts.sim.arrivals import Arrivals
from kvarts.sim.driver import Driver
from kvarts.sim.replay import open_replica
from kvarts.sim.replica import Replica
from kvarts.sim.report.requests import RequestLog
from kvarts.sim.traffic.source import source_of
from kvarts.sim.traffic.trace import Trace

from builders.case import Case, cases
from builders.grouped import FULL, group_settings
from builders.tiered import tiers_below
from builders.told_routers import told_router

LAGS = st.sampled_from([0.000001, 3, "40ms", "1s"])
FIELDS = ("replica", "cached_tokens", "last_token_ns")
ROUTERS = st.sampled_from(["prefix", "dynamo-kv", "production-stack-kv", "llm-d:precise=2,kv=1"])


@st.composite
def memories(draw: st.DrawFn) -> dict[str, Any]:
    """Settings of KV groups, and often of tiers below the device."""
    settings: dict[str, Any] = draw(group_settings())
    if draw(st.booleans()):
        settings["offload"] = draw(tiers_below(of_groups=True))
    return settings


def told(trace: Trace, config: ReplayConfig) -> RequestLog:
    """The requests of a replay behind a router that reads events of parts, without lag."""
    replicas: list[Replica] = []
    router = told_router(config, replicas)
    for worker in range(config.replicas):
        reader = router.reader_of(worker)
        assert reader is not None
        replicas.append(open_replica(config, [reader]))
        router.follow(worker, replicas[-1].engine.log)
    requests = RequestLog(largest_hit_counts=False, tiers=config.tiers)
    source = source_of(trace, concurrency=config.concurrency, speedup=1.0)
    Driver([Arrivals(trace, source, router, replicas, requests)], replicas).run()
    return requests


@pytest.mark.laws
@given(cases(max_requests=30), memories(), st.sampled_from([None, None, 3]))
def test_events_without_lag_say_what_caches_say(case: Case, memory: dict[str, Any], concurrency: int | None) -> None:
    """The choices of `prefix`, which reads what a step computes once it is planned, are those of a router that asks."""
    case.profile = "default"
    config = case.config(replicas=3, router="prefix", concurrency=concurrency, **memory)
    asked = replay(case.trace(), config)
    by_events = told(case.trace(), config)
    for field in FIELDS:
        assert asked.request_columns[field].tolist() == list(by_events.columns[field])


@pytest.mark.laws
@given(cases(max_requests=24), ROUTERS, LAGS)
def test_late_events_of_one_full_group_are_those_of_whole_pages(case: Case, router: str, lag: float | str) -> None:
    case.profile = "default"
    settings: dict[str, Any] = {"replicas": 3, "router": router, "routing": Routing(event_lag=lag)}
    groups = (PartGroup(FULL, 1),)
    by_group, whole = (
        replay(case.trace(), case.config(**settings, **more)) for more in ({"kv_groups": "all", "groups": groups}, {})
    )
    for field in FIELDS:
        assert by_group.request_columns[field].tolist() == whole.request_columns[field].tolist()


@pytest.mark.laws
@given(cases(max_requests=24), memories(), ROUTERS, LAGS, st.sampled_from([None, None, 2, 5]))
def test_leaps_equal_steps(
    case: Case, memory: dict[str, Any], router: str, lag: float | str, concurrency: int | None
) -> None:
    """L5 and L8: what a router sees late of parts does not depend on how a replay is carried out."""
    case.profile = "default"
    changes = {"replicas": 3, "router": router, "concurrency": concurrency, "routing": Routing(event_lag=lag), **memory}
    fast, slow = (
        replay(case.trace(), case.config(step_by_step=slowly, audit=not slowly, **changes)) for slowly in (False, True)
    )
    assert fast.to_json() == slow.to_json()
    assert fast.requests_jsonl() == slow.requests_jsonl()
    assert fast.summary["num_completed"] + fast.summary["num_rejected"] == len(case.rows)

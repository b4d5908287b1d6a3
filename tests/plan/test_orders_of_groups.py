"""Policies with KV groups: an audit follows what they evict part by part, and they decide what goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.errors import ConfigError
from kvarts.core.config import EngineConfig
from kvarts.core.kv.eviction import EvictionOrder, LruOrder
from kvarts.core.kv.groups import GroupMemory, PartGroup
from kvarts.cost.polynomial import LinearCost
from kvarts.sim.eviction import ALL_POLICIES, order_maker
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.trace import Trace

from builders.case import Case, Row, cases
from builders.engines import make_replica, request_of, run
from builders.grouped import FULL, WINDOW, assert_same_outcome, part_groups, told_by
from builders.guide_policies import LeastHits
from builders.orders import plant_deaf

pytestmark = pytest.mark.laws


def maker(name: str, case: Case) -> Callable[[], EvictionOrder]:
    return LeastHits if name == "LeastHits" else order_maker(name, case.trace())


@given(
    case=cases(max_requests=10),
    groups=part_groups(),
    keeps=st.sampled_from(["all", "tails"]),
    name=st.sampled_from([*ALL_POLICIES, "LeastHits"]),
)
def test_an_audit_follows_every_policy(case: Case, groups: tuple[PartGroup, ...], keeps: str, name: str) -> None:
    case.profile = "default"
    audited, _ = told_by(case, groups, keeps, eviction=maker(name, case), audit=True)
    again, _ = told_by(case, groups, keeps, eviction=maker(name, case), step_by_step=True)
    assert_same_outcome(audited, again)


@pytest.mark.parametrize(("name", "num_hit"), [("lru", 0), ("LeastHits", 16), ("queue_orders:ArcOrder", 16)])
def test_a_policy_decides_what_goes(name: str, num_hit: int) -> None:
    """A prompt that came twice is gone after two others, unless the policy keeps it for that."""

    def row(second: int, first_unit: int) -> Row:
        return Row(1000 * second, list(range(first_unit, first_unit + 5)), 20, 1, None, 0, None)

    case = Case([row(second, unit) for second, unit in enumerate((0, 0, 100, 200, 0))], 4, 4, 13, 64, 4, "default", 1)
    report, _ = told_by(case, (PartGroup(FULL, 2), WINDOW), "all", eviction=maker(name, case), audit=True)
    assert report.request_columns["cached_tokens"].tolist()[-1] == num_hit


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("memory", [None, GroupMemory((PartGroup(FULL, 2), WINDOW))], ids=["whole pages", "KV groups"])
@pytest.mark.parametrize("name", [name for name in ALL_POLICIES if name != "lru"])
def test_an_audit_finds_an_eviction_of_another_run_than_the_one_that_a_policy_names(
    name: str, memory: GroupMemory | None, asks: bool
) -> None:
    engine = make_replica(
        EngineConfig(num_pages=13, page_size=1), audit=True, make_order=order_maker(name, Trace([])), memory=memory
    )
    plant_deaf(engine.scheduler.cache, asks=asks)
    requests = [request_of(index, range(10 * index, 10 * index + 5)) for index in range(6)]
    with pytest.raises(AssertionError, match=f"the order {'named pages' if asks else 'was not asked'}"):
        run(engine, *requests)


def test_an_order_of_whole_pages_only_is_named() -> None:
    class Mine(LruOrder):
        pass

    case = Case([Row(0, [1], 4, 1, None, 0, None)], 4, 4, 13, 64, 4, "default", 1)
    groups: dict[str, Any] = {"groups": (PartGroup(FULL, 2), WINDOW), "keeps": "all"}
    report, _ = told_by(case, **groups, eviction=LruOrder)
    assert report.summary["num_requests"] == 1
    with pytest.raises(ConfigError, match="makes Mine, which is derived from LruOrder"):
        told_by(case, **groups, eviction=Mine)


def test_an_audit_changes_nothing_where_one_group_keeps_every_token() -> None:
    """Orders that decide run by run see the same runs, whether anybody watches or not."""
    prompts = [([1, 0, 2, 2, 2], 20, 1), ([0], 3, 12), ([0, 0], 7, 12), ([1, 0, 2, 2, 2, 1, 2], 27, 5)]
    prompts += [([0, 0, 0, 1, 1, 1], 23, 1), ([0, 0, 0], 12, 1)]
    tenants = [None, None, None, None, "other", None]
    rows = [Row(0, *prompt, None, 0, tenant) for prompt, tenant in zip(prompts, tenants, strict=True)]
    rows[5].arrival_ms = 30
    case = Case(rows, 4, 1, 47, 64, 3, "default", 1)
    changes: dict[str, Any] = {
        "kv_groups": "all",
        "groups": (PartGroup(FULL, 1),),
        "eviction": maker("queue_orders:ArcOrder", case),
    }
    cost = LinearCost(step_ms=1.0, chunk_token_ms=1.0, decode_ms=0.1)
    plain, audited = (
        replay(case.trace(), case.config(cost=cost, audit=watched, **changes)) for watched in (False, True)
    )
    assert plain.requests_jsonl() == audited.requests_jsonl()

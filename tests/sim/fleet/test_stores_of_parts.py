"""A store that workers share whose models have KV groups: leaps, laws, and what a naive model finds."""

from __future__ import annotations

from dataclasses import replace as with_arrival
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvarts.base.settings import SettingError
from kvarts.core.kv.groups import PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.cost.polynomial import LinearCost
from kvarts.sim.fleet.config import FleetConfig, PoolConfig, StoreSettings
from kvarts.sim.fleet.report import FleetReport
from kvarts.sim.replaying import replay
from kvarts.sim.report.requests import REJECTED

from builders.case import Case, Row, cases
from builders.fleet import FleetCase, assert_of_own_requests, assert_same_however_replayed, fleets
from builders.group_tiers import COST, returning
from builders.grouped import FULL, group_settings, part_groups
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
    settings = draw(group_settings())
    if draw(st.booleans()):
        offload = draw(tiers_below(of_groups=True))
        swaps = draw(st.sampled_from(["swap", "recompute"]))
        alone = {"preemption_mode": swaps}
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


@given(pools())
def test_leaps_laws_and_readers_of_every_event_change_nothing(drawn: tuple[Case, FleetConfig]) -> None:
    """L1, L2, L5, L8: in leaps, step by step, and with the laws of each worker and of the store asserted."""
    assert_same_however_replayed(*drawn)


@given(pools())
def test_a_worker_tells_of_its_own_requests(drawn: tuple[Case, FleetConfig]) -> None:
    """Also of pages that another worker's requests have as well."""
    assert_of_own_requests(*drawn)


def test_a_worker_tells_of_its_own_requests_though_another_had_the_same_prompt() -> None:
    """The store has room for little of the prompt, so each worker stores parts that the other one's are gone from."""
    rows = [Row(at_ms, [1] * 401, 401, 2, None, 0, None) for at_ms in (0, 100, 5000, 5100)]
    case = Case(rows, 1, 10, 2000, 100, 8, "default", 2)
    cost = LinearCost(step_ms=0.0, chunk_token_ms=1.0, decode_ms=1.0)
    each = case.config(cost=cost, audit=True, kv_groups="tails", groups=FULL_AND_WINDOW)
    store = structs.replace(A_BLOCK_IN_A_MS, pages=5)
    num_emitted = assert_of_own_requests(case, FleetConfig(pools=(PoolConfig(role="mixed", each=each),), store=store))
    assert num_emitted > 4


@given(returning(max_requests=12), part_groups(by_page=True), st.sampled_from(["all", "tails"]), st.integers(1, 3))
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
        report: FleetReport = replay(case.trace(), FleetConfig(pools=(pool,), store=AT_ONCE))
        return report

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


FULL_AND_WINDOW = (PartGroup(FULL, 10), PartGroup(KvLayer(kind="window", num_heads=1, head_numbers=2, span=20), 10))
A_BLOCK_IN_A_MS = StoreSettings(pages=100, rate="10kB/s", worker_rate="10kB/s", latency_us=0)


def replayed(store: StoreSettings | None, times_ms: tuple[int, ...], **changes: Any) -> FleetReport:
    """Of the same prompt of 401 tokens on two workers in turn; a token is computed in 1 ms."""
    rows = [Row(at_ms, [1] * 401, 401, 2, None, 0, None) for at_ms in times_ms]
    case = Case(rows, 1, 10, 2000, 8192, 8, "default", 2)
    cost = LinearCost(step_ms=0.0, chunk_token_ms=1.0, decode_ms=1.0)
    each = case.config(cost=cost, audit=True, kv_groups="all", groups=FULL_AND_WINDOW, **changes)
    report: FleetReport = replay(case.trace(), FleetConfig(pools=(PoolConfig(role="mixed", each=each),), store=store))
    return report


def test_a_worker_loads_what_groups_need_that_another_has_stored() -> None:
    """40 pages of one group and 2 of the other, in 42 ms; then the last token is computed."""
    report = replayed(A_BLOCK_IN_A_MS, (0, 1000))
    assert list(report.requests["first_token_ms"]) == [401, 1043]
    assert list(report.requests["store_tokens"]) == [0, 400]
    store = report.summary["fleet"]["store"]
    assert store["loaded"] == [{"reader": 1, "writer": 0, "blocks": 42}]
    assert store["blocks"] == 200 and store["num_cached_blocks"] == 42
    assert list(replayed(None, (0, 1000)).requests["first_token_ms"]) == [401, 1401]


def test_a_request_waits_for_parts_that_another_worker_is_storing() -> None:
    """They are stored from 401 ms on until 443 or so; the second request needs 42 ms from there on."""
    report = replayed(A_BLOCK_IN_A_MS, (0, 405))
    first, second = report.requests["first_token_ms"]
    assert first == 401
    assert 484 < second < 492
    assert report.requests["store_tokens"][1] == 400


def test_a_request_does_not_wait_for_a_write_that_takes_longer_than_computing() -> None:
    slow = structs.replace(A_BLOCK_IN_A_MS, worker_rate="0.8kB/s")
    assert list(replayed(slow, (0, 405)).requests["first_token_ms"]) == [401, 806]


def test_pools_that_divide_pages_into_other_parts_share_no_store() -> None:
    case = Case([Row(0, [1], 1, 1, None, 0, None)], 1, 10, 20, 64, 8, "default", 1)
    pools = (
        PoolConfig(role="prefill", each=case.config(kv_groups="all", groups=FULL_AND_WINDOW)),
        PoolConfig(role="decode", each=case.config()),
    )
    with pytest.raises(SettingError, match="different parts"):
        FleetConfig(pools=pools, store=A_BLOCK_IN_A_MS)

"""Parts of pages that workers with KV groups read from each other: leaps, laws, and what a naive model finds."""

from __future__ import annotations

from dataclasses import replace as with_arrival
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvarts.base.settings import SettingError
from kvarts.core.kv.groups import PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.core.kv.transfer import Offer, PeersGain
from kvarts.core.tiers.config import OffloadConfig
from kvarts.cost.polynomial import LinearCost
from kvarts.sim.fleet.config import FleetConfig, PoolConfig
from kvarts.sim.fleet.faults import Fault
from kvarts.sim.fleet.report import FleetReport
from kvarts.sim.replaying import replay
from kvarts.sim.report.requests import REJECTED
from kvarts.sim.routers.config import Routing
from kvarts.sim.routers.policies import PrefixAware
from kvarts.sim.routers.view import Asked, View

from builders.case import Case, Row, cases
from builders.fleet import FleetCase, assert_same_however_replayed, fleets
from builders.group_tiers import COST, returning
from builders.grouped import FULL, group_settings, part_groups
from builders.tiered import tiers_below

MS = 1_000_000
AT_ONCE = OffloadConfig(host_pages=5000, kv_bytes_per_token=1000, h2d=10**15, d2h=10**15, latency_us=0.0)


@st.composite
def memories(draw: st.DrawFn) -> dict[str, Any]:
    """KV groups, and host memory that fills up."""
    settings = draw(group_settings())
    swaps = draw(st.sampled_from(["swap", "recompute"]))
    offload = draw(tiers_below(of_groups=True))
    settings["offload"] = structs.replace(offload, preemption_mode=swaps)
    if draw(st.booleans()):
        settings["cost"] = COST
    return settings


@st.composite
def pools(draw: st.DrawFn) -> tuple[Case, FleetConfig]:
    """Replicas, or prefill and decode workers, which may fail, and links of any speed."""
    memory = draw(memories())
    memory["router"] = draw(st.sampled_from(["round-robin", "round-robin", "prefix"]))
    links: dict[str, Any] = {
        "pulls": True,
        "bytes_per_s": draw(st.sampled_from([50.0, 5_000.0, 1e15, 1e15])),
        "latency_ms": draw(st.sampled_from([0.0, 0.0, 3.0, 30.0])),
        "sharing": draw(st.sampled_from(["none", "worker"])),
        "token_bytes": 1,
    }
    if draw(st.booleans()):
        fleet: FleetCase = draw(fleets(profile="default", cancels=True, faults=True))
        fleet.num_layers = 0
        return fleet.case, structs.replace(fleet.config(**memory), **links)
    case = draw(st.one_of(cases(max_requests=24, cancels=True), returning(max_requests=24)))
    case.profile, case.replicas = "default", draw(st.integers(2, 3))
    pool = PoolConfig(role="mixed", each=case.config(audit=True, **memory))
    return case, FleetConfig(pools=(pool,), **links)


@pytest.mark.laws
@given(pools())
def test_leaps_laws_and_readers_of_every_event_change_nothing(drawn: tuple[Case, FleetConfig]) -> None:
    """L1, L2, L5, L8, L14: in leaps, step by step, and with the laws of each worker asserted."""
    assert_same_however_replayed(*drawn)


@pytest.mark.laws
@given(returning(max_requests=12), part_groups(by_page=True), st.sampled_from(["all", "tails"]))
def test_two_workers_find_what_one_has_found_or_computed(case: Case, groups: tuple[PartGroup, ...], keeps: str) -> None:
    """With room and bandwidth without end, two workers in turn find what one device without end finds.

    Requests come one by one: what one of them leaves idle is in host memory before the next one comes.
    """
    case.rows = [with_arrival(row, arrival_ms=index * 60_000) for index, row in enumerate(case.rows)]
    small = {"kv_groups": keeps, "groups": groups, "cost": COST}
    case.replicas = 2

    def replayed() -> FleetReport:
        pool = PoolConfig(role="mixed", each=case.config(audit=True, offload=AT_ONCE, **small))
        links: dict[str, Any] = {"bytes_per_s": 1e15, "token_bytes": 1000, "pulls": True}
        report: FleetReport = replay(case.trace(), FleetConfig(pools=(pool,), **links))
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


def replayed(times_ms: tuple[int, ...], num_workers: int = 2, **settings: Any) -> FleetReport:
    """Of the same prompt of 401 tokens on workers in turn; a token is computed in 1 ms, and a part is read in one."""
    rows = [Row(at_ms, [1] * 401, 401, 2, None, 0, None) for at_ms in times_ms]
    case = Case(rows, 1, 10, 2000, 8192, 8, "default", num_workers)
    cost = LinearCost(step_ms=0.0, chunk_token_ms=1.0, decode_ms=1.0)
    each = case.config(cost=cost, audit=True, kv_groups="all", groups=FULL_AND_WINDOW, offload=AT_ONCE)
    links: dict[str, Any] = {"pulls": True, "bytes_per_s": 10_000.0, "token_bytes": 1}
    pools = (PoolConfig(role="mixed", each=each),)
    report: FleetReport = replay(case.trace(), FleetConfig(pools=pools, **{**links, **settings}))
    return report


def first_tokens(report: FleetReport) -> list[float]:
    return [float(value) for value in report.requests["first_token_ms"]]


def test_a_worker_reads_what_groups_need_that_another_has_in_host_memory() -> None:
    """40 pages of one group and 2 of the other, in 42 ms; then the last token is computed."""
    report = replayed((0, 1000))
    assert first_tokens(report) == [401, 1043]
    assert list(report.requests["peers_tokens"]) == [0, 400]
    assert report.summary["fleet"]["pulls"] == {
        "num_pulled_blocks": 42, "pulled": [{"reader": 1, "source": 0, "blocks": 42}]
    }  # fmt: skip
    assert first_tokens(replayed((0, 1000), pulls=False)) == [401, 1401]


def test_it_is_not_worth_it_if_computing_is_sooner() -> None:
    assert first_tokens(replayed((0, 1000), bytes_per_s=100.0)) == [401, 1401]


@pytest.mark.parametrize("fault", [Fault("down", 0, 1020 * MS), Fault("cut", 0, 1020 * MS), Fault("cut", 1, 1020 * MS)])
def test_a_request_computes_what_does_not_arrive(fault: Fault) -> None:
    """L14."""
    report = replayed((0, 1000), faults=(fault,))
    assert first_tokens(report) == [401, 1020 + 401]
    assert report.summary["fleet"]["faults"]["num_failed_transfers"] == 1
    assert report.summary["fleet"]["pulls"]["num_pulled_blocks"] == 0


def test_a_third_worker_reads_from_the_first_one_that_has_it() -> None:
    report = replayed((0, 1000, 2000), num_workers=3)
    assert first_tokens(report) == [401, 1043, 2043]
    assert [row["source"] for row in report.summary["fleet"]["pulls"]["pulled"]] == [0, 0]


def test_pools_that_divide_pages_into_other_parts_do_not_read_from_each_other() -> None:
    case = Case([Row(0, [1], 1, 1, None, 0, None)], 1, 10, 20, 64, 8, "default", 1)
    pools = (
        PoolConfig(role="prefill", each=case.config(kv_groups="all", groups=FULL_AND_WINDOW, offload=AT_ONCE)),
        PoolConfig(role="decode", each=case.config(offload=AT_ONCE)),
    )
    with pytest.raises(SettingError, match="different parts"):
        FleetConfig(pools=pools, pulls=True, bytes_per_s=1.0, token_bytes=1)


BUSY = [9] * 101
"""Its ten pages keep a worker busy."""


@pytest.mark.parametrize("lag", ["0", "10ms"])
@pytest.mark.parametrize(("settings", "chosen"), [({}, 1), ({"pulls": False}, 0), ({"bytes_per_s": 105.0}, 0)])
def test_a_router_counts_what_reading_saves(settings: dict[str, Any], chosen: int, lag: str) -> None:
    """Forty pages are on the first worker, which has more to compute. On the other one, reading saves almost 36.

    It asks the caches, or reads events that are late.
    """
    rows = [Row(at_ms, units, len(units), 2, None, 0, None) for at_ms, units in ((0, [1] * 401), (1000, BUSY))]
    rows.append(Row(1001, [1] * 401, 401, 2, None, 0, None))
    report = placed_by_prefix(rows, lag, **settings)
    assert report.requests["replica"].tolist() == [0, 0, chosen]
    if not settings:
        assert report.requests["peers_tokens"].tolist() == [0, 0, 400]


def placed_by_prefix(rows: list[Row], lag: str = "0", **settings: Any) -> FleetReport:
    case = Case(rows, 1, 10, 2000, 8192, 8, "default", 2)
    cost = LinearCost(step_ms=0.0, chunk_token_ms=1.0, decode_ms=1.0)
    each = case.config(
        cost=cost, audit=True, kv_groups="all", groups=FULL_AND_WINDOW, offload=AT_ONCE, router="prefix",
        routing=Routing(event_lag=lag),
    )  # fmt: skip
    links: dict[str, Any] = {"pulls": True, "bytes_per_s": 10_000.0, "token_bytes": 1}
    pools = (PoolConfig(role="mixed", each=each),)
    report: FleetReport = replay(case.trace(), FleetConfig(pools=pools, **{**links, **settings}))
    return report


class Looking:
    """The prefix router, which notes how many pages each worker has, and how many more it could read."""

    found: ClassVar[dict[int, list[tuple[int, int]]]] = {}
    needs = PrefixAware.needs

    def choose(self, asked: Asked, view: View) -> int:
        limit = (asked.num_tokens - 1) // view.page_size
        starts = [sum(view.pages(asked, limit).get(worker, ())) for worker in view.workers]
        more = view.directory.saved_elsewhere(
            asked.content, starts, limit, asked.num_tokens, PeersGain("host", all_of_parts)
        )
        self.found[asked.index] = [(start, int(each)) for start, each in zip(starts, more, strict=True)]
        return PrefixAware().choose(asked, view)


def all_of_parts(offer: Offer, start: int, num_tokens: int) -> float:
    """A gain of all pages."""
    assert offer.num_pages == sum(offer.by_tier) > 0
    assert all(begin < end for runs in offer.runs for _, begin, end, _ in runs)
    return offer.num_pages


@pytest.mark.laws
@given(
    returning(max_requests=14),
    part_groups(by_page=True),
    st.sampled_from(["all", "tails"]),
    st.integers(2, 3),
    st.sampled_from(["0", "50ms"]),
)
def test_a_router_knows_what_workers_could_read(
    case: Case, groups: tuple[PartGroup, ...], keeps: str, num_workers: int, lag: str
) -> None:
    """With bandwidth without end, a worker reads what the router knew of: requests come one by one."""
    case.rows = [with_arrival(row, arrival_ms=index * 60_000) for index, row in enumerate(case.rows)]
    case.replicas = num_workers
    memory: dict[str, Any] = {"offload": AT_ONCE, "kv_groups": keeps, "groups": groups}
    each = case.config(audit=True, **memory, cost=COST, router=Looking, routing=Routing(event_lag=lag))
    links: dict[str, Any] = {"bytes_per_s": 1e15, "token_bytes": 1000, "pulls": True}
    Looking.found.clear()
    report: FleetReport = replay(case.trace(), FleetConfig(pools=(PoolConfig(role="mixed", each=each),), **links))
    raw = report.request_columns
    for index, found in Looking.found.items():
        if raw["status"][index] == REJECTED:
            continue
        start, num_more = found[int(raw["replica"][index])]
        assert int(raw["cached_tokens"][index]) == (start + num_more) * case.page_size
        assert (int(raw["peers_tokens"][index]) > 0) is (num_more > 0)

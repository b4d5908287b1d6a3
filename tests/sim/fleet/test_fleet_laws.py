"""Whole random workloads on small fleets: kvarts against the naive fleet, and fast-forward against step by step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

from kvarts.core.kv.groups import PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.core.tiers.config import OffloadConfig
from kvarts.sim.fleet import replay as fleet_replay
from kvarts.sim.fleet.config import FleetConfig, PoolConfig, StoreSettings
from kvarts.sim.fleet.faults import Fault
from kvarts.sim.fleet.report import FleetReport
from kvarts.sim.replaying import replay
from kvarts.sim.routers.config import QueueOrder, Routing

from builders.case import Case, Row, cases
from builders.fleet import ENDS, SCALERS, FleetCase, assert_as_naive, fleets, replayed_with
from builders.grouped import FULL, group_settings
from builders.tiered import BYTES_PER_TOKEN, tiers_below
from builders.told_routers import told_router

pytestmark = pytest.mark.laws


@st.composite
def memories(draw: st.DrawFn) -> dict[str, Any]:
    """Settings of the memory of workers: KV groups, tiers below the device, both, or nothing."""
    settings: dict[str, Any] = draw(group_settings()) if draw(st.booleans()) else {}
    if draw(st.booleans()):
        settings["offload"] = draw(tiers_below(of_groups=bool(settings), sync_loads=not settings))
    return settings


@st.composite
def stores(draw: st.DrawFn) -> StoreSettings | None:
    """A store that fills up, at rates at which a page takes from less than a step to many."""
    if draw(st.booleans()):
        return None
    rates = st.sampled_from(["50kB/s", "1MB/s", "1GB/s"])
    num_pages, latency_us = draw(st.sampled_from([1, 4, 20, 200])), draw(st.sampled_from([0.0, 100.0, 5000.0]))
    return StoreSettings(pages=num_pages, rate=draw(rates), worker_rate=draw(rates), latency_us=latency_us)


def with_store(memory: dict[str, Any]) -> dict[str, Any]:
    """Settings with which a store can be: what is computed is stored at once, on channels of its own."""
    offload = memory.get("offload", OffloadConfig(kv_bytes_per_token=BYTES_PER_TOKEN))
    alone: dict[str, Any] = {"load_kv": "placed"}
    return {**memory, "offload": structs.replace(offload, policy="eager", **alone)}


@st.composite
def queues(draw: st.DrawFn) -> dict[str, Any]:
    """Settings of routers in which requests wait, or to which events come late, or nothing."""
    threshold = draw(st.sampled_from([None, 0.0, 0.1, 0.5, 2.0]))
    if threshold is None:
        lag: str = draw(st.sampled_from(["0", "0", "3ms", "40ms", "1s"]))
        if lag == "0":
            return {}
        return {"router": draw(st.sampled_from(["prefix", "dynamo-kv"])), "routing": Routing(event_lag=lag)}
    order: QueueOrder = draw(st.sampled_from(["fcfs", "lcfs", "wspt"]))
    router = draw(st.sampled_from(["round-robin", "least-loaded", "prefix", "dynamo-kv", "llm-d"]))
    return {"router": router, "routing": Routing(queue_threshold=threshold, queue=order)}


@st.composite
def plans(draw: st.DrawFn) -> dict[str, Any]:
    """Settings with which the next step may be planned while one runs, and tokens end requests."""
    return {"async_scheduling": draw(st.booleans()), "stop_tokens": draw(st.booleans())}


def replayed(case: FleetCase, **changes: Any) -> FleetReport:
    report: FleetReport = replay(case.case.trace(), case.config(**changes))
    return report


PRIORITY_BEHIND_A_FAULT = FleetCase(
    Case(
        [
            Row(arrival_ms, units, num_prompt, num_outputs, None, priority, None)
            for arrival_ms, units, num_prompt, num_outputs, priority in (
                (40, [0, 0, 2, 0, 1], 10, 2, 0),
                (47, [0, 2, 0, 2, 1], 9, 3, 0),
                (87, [0, 2, 0, 2, 1, 2, 2, 0], 15, 1, 0),
                (127, [2, 0, 2, 2, 1, 2, 1, 2, 0, 0, 1, 0], 24, 2, 0),
                (142, [0, 2, 0, 2, 1, 0, 0], 14, 2, 1),
            )
        ],
        2, 2, 66, 64, 8, "default", 1,
    ),
    1, 1, 15, 2, 1000.0, 0.0, only_missing=False, faults=(Fault("down", 1, 143_000_000, 144_000_000),),
    least_remote=20, num_layers=2,
)  # fmt: skip
"""A worker fails while a request of a larger priority keeps another from the pages that it needs there."""


LOST_BEFORE_IT_IS_SENT = FleetCase(
    Case([Row(0, [0], 1, 1, None, 0, None)] * 2, 1, 1, 2, 4, 2, "mocker", 1),
    1, 1, 1, 1, None, 3.0, only_missing=False, faults=(Fault("down", 0, 5_000_000), Fault("cut", 0, 17_000_000)),
)  # fmt: skip
"""A worker fails, and the first prompt that it loses makes room for the next, whose KV it loses as well."""


@example(LOST_BEFORE_IT_IS_SENT)
@example(PRIORITY_BEHIND_A_FAULT)
@given(st.tuples(st.booleans(), st.booleans()).flatmap(lambda each: fleets(cancels=each[0], faults=each[1])))
def test_every_time_of_every_request_is_as_in_the_naive_fleet(case: FleetCase) -> None:
    """L4, L7, L8; laws L1 to L3 of each worker are checked after each of its steps."""
    naive = case.naive()
    report = replayed(case)
    assert_as_naive(case, naive, report, list(range(len(naive.handoffs))))
    fleet = report.summary["fleet"]
    assert fleet["num_deadlocks"] == naive.num_deadlocks
    if case.faults:
        assert fleet["faults"]["num_failed_transfers"] == naive.num_failed_transfers


@given(fleets(cancels=True, faults=True, profile="default"))
def test_without_a_prefix_cache_workers_are_as_the_naive_ones(case: FleetCase) -> None:
    """Nothing is found, neither where prompts are computed nor where their KV arrives."""
    naive = case.naive(finds_prefixes=False)
    report = replayed(case, no_prefix_caching=True)
    assert_as_naive(case, naive, report, list(range(len(naive.handoffs))))
    assert not report.request_columns["cached_tokens"].any()
    slow = replayed(case, no_prefix_caching=True, step_by_step=True)
    assert slow.to_json() == report.to_json()


@given(
    fleets(max_requests=40, cancels=True, faults=True),
    st.sampled_from(SCALERS),
    st.booleans(),
    memories(),
    stores(),
    queues(),
    plans(),
)
def test_fast_forward_equals_step_by_step(
    case: FleetCase,
    policy: str | None,
    is_shared: bool,
    memory: dict[str, Any],
    store: StoreSettings | None,
    queue: dict[str, Any],
    plan: dict[str, Any],
) -> None:
    """L5, with workers that come, go and fail, links that they share, and queues in routers; their events, too."""
    if "groups" in memory:
        case.case.profile = "default"
    if store is not None:
        memory = with_store(memory)
    memory = {**memory, **queue, **plan}
    is_told = bool(case.case.rows[0].num_output_tokens % 2)
    fast, told = replayed_with(case, policy, is_shared, memory, store, is_told=is_told, step_by_step=False)
    slow, told_slowly = replayed_with(case, policy, is_shared, memory, store, is_told=is_told, step_by_step=True)
    assert told == told_slowly
    assert fast.requests_jsonl() == slow.requests_jsonl()
    assert fast.to_json() == slow.to_json()
    assert sum(fast.summary[f"num_{end}"] for end in ENDS if f"num_{end}" in fast.summary) == len(case.case.rows)


@given(
    fleets(max_requests=40, cancels=True, faults=True, profile="default"),
    st.sampled_from(SCALERS),
    group_settings(),
    tiers_below(of_groups=True),
    st.booleans(),
)
def test_routers_that_read_events_of_parts_choose_as_those_that_ask(
    case: FleetCase, policy: str | None, groups: dict[str, Any], offload: OffloadConfig, has_store: bool
) -> None:
    """Without lag, with tiers and a store; workers come, go and fail."""
    memory = {**groups, "offload": offload, "router": "prefix"}
    if has_store:
        memory = with_store(memory)
    store = StoreSettings(pages=20, rate="1MB/s", worker_rate="1MB/s") if has_store else None
    of_case = case, policy, False, memory, store

    def replayed_once() -> FleetReport:
        report, _ = replayed_with(*of_case, is_told=False, step_by_step=False)
        return report

    asked = replayed_once()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_replay, "make_router", told_router)
        told = replayed_once()
    assert asked.requests_jsonl() == told.requests_jsonl()


def test_leaps_tell_removals_from_a_store_in_their_place() -> None:
    """A worker in a leap is told that another worker took its pages out of the store after what happened before."""
    rows = [(0, [0], 13), (0, [0] * 4, 36), (0, [0], 1), (0, [0], 1), (0, [0], 1), (200, [0] * 4, 11), (200, [0], 1)]
    rows += [(200, [0], 17), (200, [0], 1), (200, [0], 1), (200, [1, 0, 0], 1), (200, [0] * 5, 1)]
    traffic = [
        Row(arrival_ms, units, 4 * len(units), num_outputs, None, 0, "a" if index == 11 else None,
            cancel_after_ms=0 if index in (1, 4, 9) else None)
        for index, (arrival_ms, units, num_outputs) in enumerate(rows)
    ]  # fmt: skip
    case = FleetCase(
        Case(traffic, 4, 2, 25, 4, 1, "default", 1), 2, 1, 25, 1, None, 0.0, only_missing=False,
        faults=(Fault("down", 1, 0), Fault("down", 2, 0), Fault("down", 0, 40_000_000)),
    )  # fmt: skip
    offload = OffloadConfig(
        host_pages=8, policy="eager", h2d="50kB/s", d2h="50kB/s", latency_us=0.0, kv_bytes_per_token=1000,
        full_prompt_hits=True, store_within_ms=0.0,
    )  # fmt: skip
    store = StoreSettings(pages=20, rate="1MB/s", worker_rate="1MB/s", latency_us=0.0)
    both = [
        replayed_with(
            case, SCALERS[2], is_shared=False, memory={"offload": offload}, store=store, is_told=True,
            step_by_step=step_by_step,
        )[1]
        for step_by_step in (False, True)
    ]  # fmt: skip
    assert both[0] == both[1]


@pytest.mark.parametrize("step_by_step", [False, True])
def test_pages_that_a_store_releases_can_be_reserved_in_a_mocker(step_by_step: bool) -> None:
    """L8: a prompt waits for pages that only a store to host memory holds."""
    rows = [
        Row(290, [3, 2, 2, 0], 15, 6, None, -1, None, cancel_after_ms=200), Row(330, [3], 4, 4, None, -1, None),
        Row(545, [2, 0, 3, 0], 16, 1, None, 1, None), Row(825, [3, 3, 0, 0], 15, 4, None, 0, None),
        Row(825, [0, 1, 2, 2], 15, 7, None, 0, None, cancel_after_ms=1000),
    ]  # fmt: skip
    case = FleetCase(Case(rows, 4, 8, 3, 16, 4, "mocker", 1), 1, 1, 3, 8, 1000.0, 0.0, only_missing=True)
    offload = OffloadConfig(
        host_pages=8, policy="lazy", h2d="1GB/s", d2h="50kB/s", kv_bytes_per_token=1000, disk_pages=10,
        disk_read="50kB/s", disk_write="1MB/s",
    )  # fmt: skip
    report, _ = replayed_with(
        case, None, is_shared=False, memory={"offload": offload}, store=None, is_told=False, step_by_step=step_by_step
    )
    assert report.summary["num_completed"] + report.summary["num_cancelled"] == len(rows)


def test_a_worker_that_fails_has_nothing_left_to_store() -> None:
    """L8: its device has lost what was to go to the store."""
    case = FleetCase(
        Case([Row(0, [2, 1, 1, 2, 3, 1, 1], 26, 1, None, 0, None)], 4, 8, 9, 16, 2, "default", 2),
        2, 2, 18, 8, None, 0.0, only_missing=False, faults=(Fault("down", 0, 200_000_000, 300_000_000),),
    )  # fmt: skip
    store = StoreSettings(pages=200, rate="50kB/s", worker_rate="50kB/s", latency_us=5000.0)
    report, _ = replayed_with(
        case, None, is_shared=False, memory=with_store({}), store=store, is_told=False, step_by_step=False
    )
    assert report.summary["num_completed"] == 1


@given(fleets(profile="default", cancels=True), memories(), stores(), queues(), plans())
def test_nothing_starves_and_nothing_deadlocks_by_default(
    case: FleetCase,
    memory: dict[str, Any],
    store: StoreSettings | None,
    queue: dict[str, Any],
    plan: dict[str, Any],
) -> None:
    """L8: every request that can ever run ends."""
    if store is not None:
        memory = with_store(memory)
    memory = {**memory, **queue, **plan}
    summary = replay(case.case.trace(), structs.replace(case.config(**memory), store=store)).summary
    assert summary["num_failed"] == 0
    assert summary["fleet"]["num_deadlocks"] == 0
    num_cancelled = summary.get("num_cancelled", 0)
    assert summary["num_completed"] + summary["num_rejected"] + num_cancelled == summary["num_requests"]


@given(
    cases(max_requests=40, cancels=True),
    st.sampled_from([None, 0.01, 0.2]),
    st.integers(0, 2),
    memories(),
    queues(),
    st.integers(1, 3),
    plans(),
    st.booleans(),
)
def test_a_pool_of_mixed_workers_is_replicas(
    case: Case,
    timeout_s: float | None,
    retries: int,
    memory: dict[str, Any],
    queue: dict[str, Any],
    replicas: int,
    plan: dict[str, Any],
    finds_nothing: bool,
) -> None:
    """A fleet without handoffs is the replay of as many replicas, to the byte."""
    if "groups" in memory:
        case.profile = "default"
    can_find = "offload" in memory or "mamba_cache_mode" in memory or queue.get("router") in ("prefix", "dynamo-kv")
    if finds_nothing and not can_find:
        case.profile, memory = "default", {**memory, "no_prefix_caching": True}
    retries = 0 if timeout_s is None else retries
    config = case.config(
        replicas=replicas, client_timeout_s=timeout_s, retries=retries, retry_after_s=0.01, **memory, **queue, **plan
    )
    fleet = FleetConfig(pools=(PoolConfig(role="mixed", each=config),))
    mine, plain = replay(case.trace(), fleet), replay(case.trace(), config)
    for name in ("first_admitted_ms", "first_token_ms", "last_token_ms", "cached_tokens", "replica", "preemptions"):
        assert list(map(str, mine.requests[name])) == list(map(str, plain.requests[name]))
    for name in ("transfers", "num_cached_tokens_by_tier", "num_evicted_pages", "duration_ms"):
        assert mine.summary[name] == plain.summary[name], name
    assert {name: list(column) for name, column in mine.steps.items()} == {
        name: list(column) for name, column in plain.steps.items()
    }


def test_a_router_sees_who_waits_at_an_idle_worker_that_plans_ahead() -> None:
    """A worker with nothing left to do but to store something is idle: who arrives there waits, as in replicas."""
    lengths = [(1411, [1, 0], 1), (1451, [0], 1), (1451, [2], 1)]
    rows = [Row(at_ms, units, len(units), num_tokens, None, 0, None) for at_ms, units, num_tokens in lengths]
    case = Case(rows, 1, 8, 2, 16, 2, "default", 2)
    config = case.config(offload=OffloadConfig(host_pages=8), router="prefix", async_scheduling=True)
    fleet = FleetConfig(pools=(PoolConfig(role="mixed", each=config),))
    mine, plain = replay(case.trace(), fleet), replay(case.trace(), config)
    assert list(mine.requests["replica"]) == list(plain.requests["replica"]) == [0, 0, 1]


def test_requests_end_before_others_are_dropped_at_the_same_time() -> None:
    """In a fleet and in replicas: a router, and clients that try again, hear of them in this order."""
    lengths = [(400, [1, 1, 2, 1], 26), (400, [1, 1, 2, 0], 26), (407, [2, 2, 2, 1, 0, 2, 0, 0, 2, 2, 1, 1], 96)]
    lengths += [(407, [2, 2, 2, 1, 0, 2, 0, 0, 2, 2, 1, 1, 2, 3], 105), (408, [2], 8)]
    rows = [
        Row(at_ms, units, num_prompt, 1, None, 0, None, cancel_after_ms=7 if index == 2 else None)
        for index, (at_ms, units, num_prompt) in enumerate(lengths)
    ]
    case = Case(rows, 8, 4, 77, 4, 4, "mocker", 1)
    assert_pool_is_replicas(
        case, replicas=3, client_timeout_s=0.01, retries=2, retry_after_s=0.01, router="prefix",
        routing=Routing(queue_threshold=0.0),
    )  # fmt: skip


def test_the_router_before_one_replica_knows_its_pages() -> None:
    """It does not hold a request behind one whose prompt is cached; the last one is dropped in the engine."""
    prompt = [1, 2, 0, 2, 1, 2, 2, 0]
    rows = [Row(240, [*prompt, 3], 18, 1, None, 0, None), Row(440, [*prompt, 3, 1, 1, 0], 23, 1, None, 0, None)]
    rows.append(Row(441, [*prompt, 1], 17, 1, None, 0, None, cancel_after_ms=5))
    case = Case(rows, 2, 3, 8, 64, 2, "default", 1)
    assert_pool_is_replicas(case, router="dynamo-kv", routing=Routing(queue_threshold=0.1))


def test_a_router_knows_that_the_first_prompt_of_a_worker_is_computed() -> None:
    """In a fleet and in replicas: when the second request arrives, nothing of the first is left to compute."""
    rows = [Row(0, [0] * 3, 6, 2, None, 0, None), Row(20, [0] * 8, 15, 1, None, 0, None)]
    case = Case(rows, 2, 1, 33, 64, 8, "default", 1)
    assert_pool_is_replicas(case, replicas=2, router="dynamo-kv", routing=Routing(event_lag="40ms"))


def assert_pool_is_replicas(case: Case, **settings: Any) -> None:
    config = case.config(**settings)
    fleet = FleetConfig(pools=(PoolConfig(role="mixed", each=config),))
    mine, plain = replay(case.trace(), fleet), replay(case.trace(), config)
    for name in ("first_admitted_ms", "last_token_ms", "replica"):
        assert list(map(str, mine.requests[name])) == list(map(str, plain.requests[name])), name


def test_a_store_ends_before_a_request_that_was_given_up_leaves() -> None:
    """In a fleet and in replicas, if both happened during one step: they find the same parts in the order of use."""
    lengths = [(0, [0, 1, 0], 22, 1), (200, [0, 1, 0, 2], 27, 2), (200, [0, 1, 0], 18, 2), (207, [0] * 4, 28, 1)]
    lengths += [(447, [0] * 6, 41, 1), (688, [0, 2], 16, 1), (702, [0] * 8, 59, 1)]
    rows = [
        Row(arrival_ms, units, num_prompt, num_output, None, 0, "a" if index in (3, 6) else None)
        for index, (arrival_ms, units, num_prompt, num_output) in enumerate(lengths)
    ]
    case = Case(rows, 8, 2, 43, 16, 2, "default", 1)
    offload = OffloadConfig(
        host_pages=200, policy="lazy", target_free=1, h2d="1GB/s", d2h="50kB/s", kv_bytes_per_token=1000,
        store_within_ms=500.0, preemption_mode="recompute", fail_every=1,
    )  # fmt: skip
    layer = KvLayer(kind="window", num_heads=1, head_numbers=2, span=6, sink=3)
    config = case.config(
        client_timeout_s=0.01, retries=1, retry_after_s=0.01, offload=offload,
        kv_groups="all", groups=(PartGroup(layer, 1),),
    )  # fmt: skip
    fleet = FleetConfig(pools=(PoolConfig(role="mixed", each=config),))
    mine, plain = replay(case.trace(), fleet), replay(case.trace(), config)
    assert mine.summary["num_cancelled"] == plain.summary["num_cancelled"] > 0
    assert mine.summary["transfers"] == plain.summary["transfers"]


@pytest.mark.parametrize(
    ("router", "threshold", "order", "num_tokens", "lengths"),
    [
        ("round-robin", 0.0, "fcfs", 4, [(40, 1)] * 3),  # none fits, and all are refused as they arrive
        ("round-robin", 0.0, "lcfs", 16, [(8, 2), (8, 12), (8, 7), (8, 1), *[(4, 1)] * 12, (20, 6), *[(4, 1)] * 6]),
        (
            "prefix", 0.5, "fcfs", 4,
            [
                *((8, 2), (8, 12), (8, 7), (8, 3), (12, 5), (20, 4), (16, 7), (8, 10), (16, 4), (4, 9), (16, 2)),
                *((4, 8), (4, 10), (12, 3), (4, 4), (20, 12), (20, 6), (20, 12), (4, 3), (20, 3), (4, 9), (20, 6)),
                (20, 10),
            ],
        ),
    ],
)  # fmt: skip
def test_a_queue_goes_on_after_a_refusal_and_workers_after_a_look_at_them(
    router: str, threshold: float, order: QueueOrder, num_tokens: int, lengths: list[tuple[int, int]]
) -> None:
    rows = [
        Row(0, [0] * (num_prompt // 4), num_prompt, num_output, None, 0, None) for num_prompt, num_output in lengths
    ]
    case = Case(rows, 4, 8, 3, num_tokens, 1, "default", 1)
    config = case.config(replicas=2, router=router, routing=Routing(queue_threshold=threshold, queue=order))
    fleet = FleetConfig(pools=(PoolConfig(role="mixed", each=config),))
    mine, plain = replay(case.trace(), fleet), replay(case.trace(), config)
    for name in ("first_admitted_ms", "last_token_ms", "replica"):
        assert list(map(str, mine.requests[name])) == list(map(str, plain.requests[name]))


@given(fleets(profile="default", cancels=True))
def test_one_group_that_keeps_every_token_is_whole_pages(case: FleetCase) -> None:
    """Pages are sent, not tokens, and a last page that is full is not shared: its last token is computed again."""
    case.only_missing, case.num_layers = True, 0
    for index, row in enumerate(case.case.rows):
        row.units[-1] = 100 + index
    whole, grouped = replayed(case), replayed(case, kv_groups="all", groups=(PartGroup(FULL, 1),))
    for name in whole.requests.keys() - {"reason"}:  # it names blocks
        assert list(map(str, grouped.requests[name])) == list(map(str, whole.requests[name])), name


def test_a_preempted_prompt_that_is_sent_by_layer_does_not_block_those_that_hold_its_pages() -> None:
    """The first prompt has pages where it is sent to, loses its own, and lacks those that the second one holds."""
    rows = [Row(0, list(range(10)), 20, 2, None, 0, None), Row(0, list(range(10, 16)), 12, 2, None, 0, None)]
    case = FleetCase(
        Case(rows, 2, 2, 12, 8, 8, "default", 1), 1, 1, 12, 8, 1000.0, 0.0, only_missing=False, num_layers=2
    )
    summary = replayed(case, long_prefill_token_threshold=4).summary
    assert summary["num_completed"] == 2
    assert summary["fleet"]["num_deadlocks"] == 0
    assert summary["num_preemptions"] == 1

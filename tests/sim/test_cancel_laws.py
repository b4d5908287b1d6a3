"""Requests that their clients give up: against the naive engine, fast as slow, in every state, and their numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.errors import ConfigError
from kvarts.core.events import Arrived, Cancelled, Event, Finished, Rejected
from kvarts.core.kv.groups import PartGroup, Retention
from kvarts.core.kv.layers import KvLayer
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.request import Request, RequestState
from kvarts.core.tiers.config import OffloadConfig
from kvarts.sim.config import ReplayConfig, make_config
from kvarts.sim.replay import open_replica
from kvarts.sim.replaying import replay
from kvarts.sim.replica import Replica
from kvarts.sim.report.requests import CANCELLED, COMPLETED, NO_REPLICA
from kvarts.sim.routers.config import Routing
from kvarts.sim.traffic.trace import Trace, TraceRequest
from kvarts.sim.traffic.workload import FixedLength, Workload

from builders.case import Case, cases
from builders.laws import assert_as_in_naive, assert_fast_as_slow, replayed_as_slowly
from builders.outcome import run_kvarts

NS_PER_MS, NS_PER_S = 1_000_000, 1_000_000_000


@pytest.mark.laws
@given(cases(cancels=True))
def test_cancellations_are_as_in_the_naive_engine(case: Case) -> None:
    """L1, L2, L4, L7, L8: every request, step and eviction, and what was computed for nothing."""
    requests, naive_engines = case.naive()
    outcome = run_kvarts(case)
    assert_as_in_naive(case, outcome, requests, naive_engines)
    wasted = sum(request.cancelled_prompt_tokens for request in requests if request.cancelled)
    assert outcome.requests.cancelled_prompt_tokens == wasted
    for engine in outcome.engines:
        assert engine.scheduler.cache.num_used == 0 and not engine.has_work


@pytest.mark.laws
@given(cases(max_requests=30, cancels=True))
def test_with_cancellations_fast_forward_equals_step_by_step(case: Case) -> None:
    """L5: a leap ends where a client gives up."""
    assert_fast_as_slow(case)


@pytest.mark.laws
@given(
    cases(max_requests=24, cancels=True),
    st.sampled_from([0.001, 0.02, 0.3]),
    st.integers(0, 2),
    st.sampled_from([0.0, 0.005]),
    st.none() | st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([0.0, 3.0]),
    st.none() | st.sampled_from([0.0, 0.1, 0.5]),
)
def test_timeouts_and_retries_are_the_same_step_by_step(
    case: Case,
    timeout_s: float,
    retries: int,
    retry_after_s: float,
    concurrency: int | None,
    replicas: int,
    is_async: bool,
    frontend_ms: float,
    queue_threshold: float | None,
) -> None:
    """L5, L8: in both loops, behind a front end and a router with a queue. A retry is an arrival.

    Whoever completes was in time.
    """
    changes: dict[str, Any] = {
        "client_timeout_s": timeout_s,
        "retries": retries,
        "retry_after_s": retry_after_s,
        "concurrency": concurrency,
        "replicas": replicas,
        "router": "least-loaded",
        "async_scheduling": is_async,
        "frontend_ms": frontend_ms,
        "audit": True,
        "routing": None if queue_threshold is None else Routing(queue_threshold=queue_threshold),
    }
    fast = replayed_as_slowly(case, **changes)
    rows = fast.request_columns
    done = rows["status"] == COMPLETED
    took_ns = rows["last_token_ns"][done] - rows["arrival_ns"][done]
    assert not len(took_ns) or took_ns.max() <= timeout_s * NS_PER_S
    for row in set(rows["row"].tolist()):
        statuses = rows["status"][rows["row"] == row].tolist()
        assert len(statuses) <= 1 + retries
        assert all(status == CANCELLED for status in statuses[:-1])


def test_a_timeout_that_nothing_reaches_changes_nothing() -> None:
    workload = Workload(num_sessions=12, new_tokens=FixedLength(300), output_tokens=FixedLength(40), sessions_per_s=30)
    plain, timed = (replay(workload, ReplayConfig(num_pages=200, client_timeout_s=each)) for each in (None, 1000.0))
    assert plain.requests_jsonl() == timed.requests_jsonl()
    assert plain.summary["num_steps"] == timed.summary["num_steps"]


def test_a_turn_whose_client_stops_is_followed_by_the_next() -> None:
    """A user who stops after 1 s: the next turn comes its delay later, and the reason is told."""
    turns = [
        TraceRequest(0, 0, bytes(8), 10, 10_000, session_id="a", cancel_after_ns=NS_PER_S),
        TraceRequest(1, 0, bytes(8), 10, 5, session_id="a", delay_ns=2 * NS_PER_S),
    ]
    config = make_config({"cost": "linear:step_ms=300", "pages": 1000})
    report = replay(Trace(turns, unit_tokens=16), config)
    first, second = report.request_columns["arrival_ns"].tolist()
    assert (first, second) == (0, 3_200_000_000), "the step under way ends at 1.2 s, and the delay counts from there"
    assert report.requests["status"] == ["cancelled", "completed"]
    assert report.requests["reason"] == ["its client gave up 1200 ms after sending it", None]
    summary = report.summary
    assert (summary["num_requests"], summary["num_completed"], summary["num_cancelled"]) == (2, 1, 1)
    assert summary["cancelled"] == {
        "before_admission": 0,
        "before_first_token": 0,
        "num_retries": 0,
        "prompt_tokens": 10,
        "output_tokens": 4,
    }


def test_retries_without_a_timeout_are_refused() -> None:
    with pytest.raises(ConfigError, match="retries: has no effect without client_timeout_s"):
        make_config({"retries": 1})


# Every state ---------------------------------------------------------------------------------------------------

BUSY: dict[str, Any] = {
    "num_pages": 40,
    "page_size": 4,
    "max_num_batched_tokens": 6,
    "max_num_seqs": 4,
    "cost": lambda batch: 1.0 + 3 * sum(chunk.num_tokens for chunk in batch.chunks),
    "audit": True,
}
BELOW: dict[str, Any] = {"host_pages": 200, "d2h": "1MB/s", "h2d": "1kB/s", "kv_bytes_per_token": 1, "policy": "eager"}


def _requests() -> Trace:
    rows = []
    for row in range(80):
        units = bytes([row // 3 % 5, *([0] * 7)]) * (6 + row % 4)
        rows.append(TraceRequest(row, 0, units, 4 * (6 + row % 4) - 1, 30))
    return Trace(rows, unit_tokens=4)


def _is_in(state: RequestState) -> Callable[[Replica], Request | None]:
    def find(replica: Replica) -> Request | None:
        scheduler = replica.scheduler
        loads = scheduler.loads
        known = [*scheduler.waiting, *scheduler.running, *(loads or ())]
        return next((request for request in known if request.state is state), None)

    return find


def _follows(replica: Replica) -> Request | None:
    loads = replica.scheduler.loads
    return None if loads is None else next(iter(loads.following()), None)


STATES = {state.name: _is_in(state) for state in RequestState if state.name in (
    "WAITING", "PREEMPTED", "LOADING", "LOADED", "PREFILLING", "DECODING"
)} | {"FOLLOWING": _follows}  # fmt: skip


@pytest.mark.parametrize("state", STATES)
def test_a_request_can_be_cancelled_in_every_state(state: str) -> None:
    """L1, L2, L8: its pages are free at once, or when the transfer that fills them ends; all others end."""
    config = ReplayConfig(**BUSY)
    if state in ("LOADING", "LOADED", "FOLLOWING"):
        config = ReplayConfig(**BUSY, offload=OffloadConfig(**BELOW))
    trace = _requests()
    replica = open_replica(config, [])
    waiting = [
        Request(
            index,
            trace.content(row, page_size=4, owner=index),
            num_prompt_tokens=row.num_prompt_tokens,
            max_tokens=row.num_output_tokens,
        )
        for index, row in enumerate(trace)
    ]
    requests = list(waiting)
    cancelled: list[Request] = []
    for _ in range(20_000):
        while waiting and replica.scheduler.waiting.num_waiting < 3:
            replica.submit(waiting.pop(0), replica.now_ns)
        if not replica.has_work:
            break
        request = STATES[state](replica)
        if request is not None and len(cancelled) < 5:
            cache = replica.scheduler.cache
            table = request.table
            num_used, num_alone = cache.num_used, 0
            if table is not None and isinstance(cache, PageCache):
                num_alone = len([1 for node in table.path if node.refs == 1 and not node.holds])
            replica.cancel(request, replica.now_ns)
            replica.scheduler.check()
            assert request.is_over and request not in replica.scheduler.running
            if state == "LOADING":
                assert request.state is RequestState.ABANDONED and cache.num_used == num_used
            else:
                assert request.state is RequestState.CANCELLED and request.table is None
                assert cache.num_used <= num_used - num_alone
            cancelled.append(request)
        replica.start(replica.now_ns)
        replica.finish()
    assert cancelled, f"no request was ever {state}"
    assert {request.state for request in requests} == {RequestState.FINISHED, RequestState.CANCELLED}
    assert replica.scheduler.cache.num_used == 0


def test_a_request_that_waits_in_the_router_can_be_given_up() -> None:
    workload = Workload(num_sessions=40, new_tokens=FixedLength(900), output_tokens=FixedLength(40))
    config = ReplayConfig(
        num_pages=200,
        max_num_batched_tokens=512,
        replicas=2,
        router="least-loaded",
        client_timeout_s=0.2,
        routing=Routing(queue_threshold=0.5),
    )
    columns = replay(workload, config).request_columns
    in_router = columns["replica"] == NO_REPLICA
    assert 0 < in_router.sum() < 40 and (columns["status"][in_router] == CANCELLED).all()
    assert (columns["first_admitted_ns"][in_router] == -1).all()


def test_one_replica_may_have_a_queue_in_its_router() -> None:
    workload = Workload(num_sessions=12, new_tokens=FixedLength(300), output_tokens=FixedLength(40), sessions_per_s=30)
    config = ReplayConfig(num_pages=60, router="least-loaded", routing=Routing(queue_threshold=0.1))
    summary = replay(workload, config).summary
    assert summary["num_completed"] == summary["num_requests"]


@pytest.mark.parametrize("keeps", ["all", "tails"])
@pytest.mark.parametrize("cancel_after_ms", range(0, 90, 10))
def test_the_tail_of_a_request_that_a_plan_still_computes_is_that_of_its_findable_pages(
    keeps: Retention, cancel_after_ms: int
) -> None:
    """Its last page is full, and cannot be found: its token is not known when the request leaves."""
    window = PartGroup(KvLayer(kind="window", num_heads=1, head_numbers=2, span=2), part_bytes=1)
    rows = [
        TraceRequest(index, 0, bytes(8), 8, num_output, cancel_after_ns=cancel)
        for index, num_output, cancel in ((0, 9, cancel_after_ms * NS_PER_MS), (1, 1, None))
    ]
    config = ReplayConfig(
        num_pages=10,
        page_size=1,
        max_num_batched_tokens=4,
        max_num_seqs=1,
        async_scheduling=True,
        kv_groups=keeps,
        groups=(window,),
        audit=True,
    )
    report = replay(Trace(rows, unit_tokens=8), config)
    assert report.requests["status"][1] == "completed"


class Told:
    """An EventReader that notes which requests arrive, are refused, are given up, and end."""

    wants_details = True

    def __init__(self) -> None:
        self.known: set[int] = set()
        self.given_up: set[int] = set()
        self.ended: set[int] = set()

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Arrived | Rejected):
                assert event.request not in self.known
                self.known.add(event.request)
            elif isinstance(event, Cancelled):
                assert event.request in self.known
                self.given_up.add(event.request)
            elif isinstance(event, Finished):
                self.ended.add(event.request)


@pytest.mark.laws
@given(cases(cancels=True), st.booleans())
def test_readers_are_told_of_every_request(case: Case, is_async: bool) -> None:
    """Also of one that comes and is given up while a step runs."""
    case.replicas, case.profile = 1, "default"
    told = Told()
    report = replay(case.trace(), case.config(async_scheduling=is_async), observers_of=lambda _: [told])
    statuses = report.request_columns["status"].tolist()
    assert told.known == set(range(len(statuses)))
    cancelled = {index for index, status in enumerate(statuses) if status == CANCELLED}
    assert told.given_up <= cancelled <= told.given_up | told.ended

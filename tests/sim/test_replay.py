"""Replays as a user sees them: loops, sessions, routers, workloads, the report and its columns."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts import ConfigError, LinearCost, ReplayConfig, Slo, Trace, TraceRequest, Workload, replay
from kvarts.base.errors import InputError
from kvarts.sim.report.report import Report
from kvarts.sim.traffic.workload import FixedLength, LogNormalLength, UniformLength

from builders.case import ROUTERS, Case, cases

STEP_10_MS = LinearCost(step_ms=10.0)
MS = 1_000_000


def make_row(
    index: int, *, at_ms: float = 0, units: list[int] | None = None, output: int = 2, **more: Any
) -> TraceRequest:
    units = [100 + index] if units is None else units
    return TraceRequest(index, round(at_ms * MS), array("Q", units).tobytes(), len(units) * 16, output, **more)


def run(rows: list[TraceRequest], **settings: Any) -> Report:
    return replay(Trace(rows, unit_tokens=16), ReplayConfig(cost=STEP_10_MS, **settings))


def column(report: Report, name: str) -> list[Any]:
    values = report.requests[name]
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def test_an_open_loop_can_be_sped_up() -> None:
    rows = [make_row(i, at_ms=100 * i) for i in range(3)]
    assert column(run(rows), "arrival_ms") == [0, 100, 200]
    assert column(run(rows, speedup=4.0), "arrival_ms") == [0, 25, 50]


def test_a_closed_loop_keeps_so_many_in_flight() -> None:
    report = run([make_row(i, at_ms=9999) for i in range(5)], concurrency=2)
    assert column(report, "arrival_ms") == [0, 0, 20, 20, 40]
    assert report.summary["peak_running"] == 2


@pytest.mark.parametrize("settings", [{}, {"concurrency": 8}, {"replicas": 2, "router": ROUTERS[-1]}])
def test_a_turn_waits_for_the_turn_before_it(settings: dict[str, Any]) -> None:
    rows = [
        make_row(0, session_id="s"),
        make_row(1, session_id="s", delay_ns=7 * MS),
        make_row(2, session_id="t"),
        make_row(3, session_id="s", at_ms=500 if not settings.get("concurrency") else 0),
    ]
    rows.sort(key=lambda row: row.arrival_ns)
    report = run(rows, **settings)
    arrivals = dict(zip(column(report, "request_id"), column(report, "arrival_ms"), strict=True))
    assert arrivals["1"] == 27
    assert arrivals["3"] == (47 if settings.get("concurrency") else 500)


def test_in_a_closed_loop_a_session_keeps_its_place_while_it_thinks() -> None:
    rows = [make_row(0, session_id="s"), make_row(1), make_row(2, session_id="s", delay_ns=50 * MS)]
    assert column(run(rows, concurrency=1), "request_id") == ["0", "2", "1"]
    assert column(run(rows, concurrency=1), "arrival_ms") == [0, 70, 90]


def test_turns_due_at_one_time_come_in_the_order_of_their_sessions() -> None:
    rows = [
        make_row(0, session_id="s", output=3),
        make_row(1, session_id="t", output=3),
        make_row(2, session_id="t", delay_ns=0),
        make_row(3, session_id="s", delay_ns=0),
        make_row(4, at_ms=30),
    ]
    assert column(run(rows), "request_id") == ["0", "1", "3", "2", "4"]


@pytest.mark.parametrize("concurrency", [None, 3])
def test_a_turn_is_not_late_because_its_row_is(concurrency: int | None) -> None:
    rows = [
        make_row(0, session_id="s"),
        make_row(1, at_ms=5000),
        make_row(2, at_ms=5000),
        make_row(3, session_id="s", delay_ns=7 * MS),
    ]
    report = run(rows, concurrency=concurrency)
    arrivals = dict(zip(column(report, "request_id"), column(report, "arrival_ms"), strict=True))
    assert arrivals["3"] == 27


@pytest.mark.parametrize("broken", [{"num_prompt_tokens": 0}, {"num_output_tokens": 0}, {"units": b""}])
def test_a_request_made_by_hand_is_checked_too(broken: dict[str, Any]) -> None:
    row = msgspec.structs.replace(make_row(0), **broken)
    with pytest.raises(ConfigError):
        run([row])


def test_speeding_up_shortens_delays_too() -> None:
    rows = [make_row(0, session_id="s"), make_row(1, session_id="s", delay_ns=8 * MS)]
    assert column(run(rows, speedup=2.0), "arrival_ms") == [0, 24]


def test_round_robin_takes_turns_and_least_loaded_takes_the_emptiest() -> None:
    rows = [make_row(0, output=50), make_row(1), make_row(2, at_ms=100), make_row(3, at_ms=101)]
    assert column(run(rows, replicas=2), "replica") == [0, 1, 0, 1]
    assert column(run(rows, replicas=2, router="least-loaded"), "replica") == [0, 1, 1, 0]


def test_the_prefix_router_follows_the_prefix_until_the_load_outweighs_it() -> None:
    prefix = list(range(20))
    rows = [
        make_row(0, units=[*prefix, 50]),
        make_row(1, at_ms=100, units=[70, 71]),
        make_row(2, at_ms=200, units=[*prefix, 51]),
        make_row(3, at_ms=300, units=[70, 71, 72], output=400),
        make_row(4, at_ms=400, units=[70, 71, 73]),
    ]
    assert column(run(rows, replicas=2, router="prefix"), "replica")[:4] == [0, 0, 0, 0]
    crowded = [make_row(i, units=[*prefix, 60 + i], output=300) for i in range(4)]
    assert set(column(run(crowded, replicas=2, router="prefix"), "replica")) == {0, 1}


@given(
    cases(max_requests=30),
    st.sampled_from(ROUTERS),
    st.sampled_from([None, None, 2, 3, 6]),
)
@pytest.mark.laws
def test_replicas_in_any_loop_are_the_same_step_by_step(case: Case, router: Any, concurrency: int | None) -> None:
    """L5 where engines move together, and the event loop against the arrival loop."""
    changes: dict[str, Any] = {"replicas": 3, "router": router, "concurrency": concurrency}
    reports = [
        replay(case.trace(), case.config(step_by_step=slowly, audit=not slowly, **changes)) for slowly in (False, True)
    ]
    assert reports[0].to_json() == reports[1].to_json()
    assert reports[0].requests_jsonl() == reports[1].requests_jsonl()
    if concurrency is None:
        trace = case.trace()
        trace.has_sessions = True  # as if one request could wait for another
        assert replay(trace, case.config(**changes)).requests_jsonl() == reports[0].requests_jsonl()


@given(cases(max_requests=24), st.data(), st.sampled_from([1, 3]), st.sampled_from([None, 3]))
@pytest.mark.laws
def test_sessions_are_the_same_step_by_step(
    case: Case, data: st.DataObject, replicas: int, concurrency: int | None
) -> None:
    """L5 and L8 where turns wait for turns."""
    rows = []
    seen = set()
    for row in case.trace():
        session = data.draw(st.sampled_from([None, "a", "b", "c"]))
        delay_ns = data.draw(st.sampled_from([0, 5 * MS, 400 * MS, None])) if session in seen else None
        seen.add(session)
        rows.append(msgspec.structs.replace(row, session_id=session, delay_ns=delay_ns))
    trace = Trace(rows, unit_tokens=case.unit_tokens, has_output_tokens=case.trace().has_output_tokens)
    changes: dict[str, Any] = {"replicas": replicas, "router": ROUTERS[-1], "concurrency": concurrency}
    reports = [replay(trace, case.config(step_by_step=slowly, **changes)) for slowly in (False, True)]
    assert reports[0].to_json() == reports[1].to_json()
    assert reports[0].requests_jsonl() == reports[1].requests_jsonl()
    assert reports[0].summary["num_requests"] == len(rows)
    requests = reports[0].requests
    done = dict(zip(column(reports[0], "request_id"), column(reports[0], "last_token_ms"), strict=True))
    before: dict[str, str] = {}
    arrivals = dict(zip(requests["request_id"], requests["arrival_ms"], strict=True))
    for turn in rows:
        request_id, arrival_ms = str(turn.row), arrivals[str(turn.row)]
        if turn.session_id in before and not np.isnan(done[before[turn.session_id]]):
            assert arrival_ms >= done[before[turn.session_id]] + (turn.delay_ns or 0) / MS - 1e-9
        if turn.session_id is not None:
            before[turn.session_id] = request_id


def test_a_request_that_reaches_a_busy_replica_may_end_before_all_others_there() -> None:
    """The replica that leaps while it is admitted elsewhere must not leap past its end."""
    outputs = [30, 40, 5, 1, 1, 1]
    trace = Trace([make_row(index, output=output) for index, output in enumerate(outputs)], unit_tokens=16)
    config: dict[str, Any] = {"replicas": 2, "concurrency": 3, "cost": lambda batch: 10.0 + batch.num_decodes}
    reports = [replay(trace, ReplayConfig(**config, step_by_step=slowly)) for slowly in (False, True)]
    assert column(reports[0], "replica") == [0, 1, 0, 1, 0, 1]
    assert column(reports[0], "first_admitted_ms")[4] < 100
    assert reports[0].requests_jsonl() == reports[1].requests_jsonl()


def test_a_stream_is_read_as_it_is_needed_and_must_be_in_order() -> None:
    def stream() -> Any:
        for index in range(3):
            yield make_row(index, at_ms=10 * index)
        yield make_row(3, at_ms=5)

    with pytest.raises(InputError, match="row 4 arrives before"):
        replay(Trace(stream(), unit_tokens=16), ReplayConfig(cost=STEP_10_MS))
    report = replay(Trace(iter([make_row(0), make_row(1)]), unit_tokens=16), ReplayConfig(cost=STEP_10_MS))
    assert report.summary["distinct_pages"] is None
    with pytest.raises(InputError, match="has_sessions=True"):
        replay(Trace(iter([make_row(0, session_id="s")]), unit_tokens=16))


def test_what_can_never_fit_is_rejected_and_the_rest_goes_on() -> None:
    report = run([make_row(0), make_row(1, output=500), make_row(2, at_ms=1)], num_pages=4)
    assert column(report, "status") == ["completed", "rejected", "completed"]
    assert "the pool has 4" in column(report, "reason")[1]
    assert np.isnan(column(report, "first_token_ms")[1])
    assert report.summary["num_rejected"] == 1
    assert b'"first_token_ms":null' in report.requests_jsonl().splitlines()[1]


def test_a_replay_in_which_everything_is_rejected_still_reports() -> None:
    summary = run([make_row(0, output=500)], num_pages=4).summary
    assert summary["num_completed"] == 0
    assert summary["ttft_ms"]["mean"] is None
    assert summary["limited_by"]["cause"] == "kv_pages"


def test_latencies_of_a_replay_worked_out_by_hand() -> None:
    # One step makes a token of each; the second request arrives during the first step and waits for its end.
    report = run([make_row(0, output=3), make_row(1, at_ms=4, output=2)])
    assert column(report, "first_admitted_ms") == [0, 10]
    assert column(report, "first_token_ms") == [10, 20]
    assert column(report, "last_token_ms") == [30, 30]
    summary = report.summary
    assert summary["ttft_ms"]["mean"] == 13
    assert summary["itl_ms"] == dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"), 10)
    assert summary["queue_ms"]["max"] == 6
    assert summary["duration_ms"] == 30
    assert summary["peak_used_pages"] == 4
    assert summary["distinct_pages"] == 2


def test_a_gap_over_a_preemption_counts_whole_in_itl() -> None:
    rows = [make_row(0, output=40), make_row(1, output=40)]
    report = run(rows, num_pages=5)
    assert report.summary["num_preemptions"] > 0
    times = report.summary["itl_ms"]
    assert times["max"] > 100
    tokens = 2 * 39
    first, last = (np.asarray(report.requests[name]) for name in ("first_token_ms", "last_token_ms"))
    assert times["mean"] * tokens == pytest.approx((last - first).sum())


def test_goodput_counts_requests_that_keep_every_bound() -> None:
    rows = [make_row(0, output=3), make_row(1, at_ms=4, output=2)]
    assert run(rows).summary["goodput"] is None
    assert run(rows, slo=Slo(ttft_ms=12)).summary["goodput"]["ratio"] == 0.5
    assert run(rows, slo=Slo(ttft_ms=20, e2e_ms=30, tpot_ms=10)).summary["goodput"]["ratio"] == 1.0
    assert run(rows, slo=Slo(tpot_ms=9)).summary["goodput"]["ratio"] == 0.0


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"num_pages": 8}, "kv_pages"),
        ({"max_num_seqs": 1}, "sequence_cap"),
        ({"max_num_batched_tokens": 20, "max_num_seqs": 20}, "compute"),
        ({}, "nothing"),
    ],
)
def test_the_report_says_what_limited_the_run(settings: dict[str, Any], cause: str) -> None:
    rows = [make_row(i, units=[i, i, i], output=20 if cause != "compute" else 1) for i in range(10)]
    assert run(rows, **settings).summary["limited_by"]["cause"] == cause


def test_columns_are_what_dataframes_take() -> None:
    report = run([make_row(i) for i in range(3)])
    for columns, length in ((report.requests, 3), (report.steps, report.summary["num_steps"])):
        assert {len(values) for values in columns.values()} == {length}
    assert report.steps["used_pages"].max() == report.summary["peak_used_pages"]


def test_any_callable_can_be_the_cost() -> None:
    config = ReplayConfig(cost=lambda batch: 1.0 + batch.num_decodes)
    report = replay(Trace([make_row(0, output=3)], unit_tokens=16), config)
    assert column(report, "last_token_ms") == [5]
    assert "<lambda>" in report.summary["config"]["cost"]


@pytest.mark.parametrize(
    "settings",
    [
        {"replicas": 0},
        {"router": "best"},
        {"concurrency": 0},
        {"speedup": 0.0},
        {"speedup": 2.0, "concurrency": 3},
        {"cost": 5},
    ],
)
def test_a_bad_replay_setting_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ReplayConfig(**settings)


@given(cases(max_requests=10))
def test_distinct_pages_are_those_of_prompts_and_outputs_once(case: Case) -> None:
    case.page_size, case.num_pages = 2, 10_000
    seen = set()
    num_private = 0
    for request in case.naive_requests():
        num_full = len(request.tokens) // 2
        seen |= {(request.tenant, request.tokens[: 2 * (page + 1)]) for page in range(num_full)}
        num_private += (len(request.tokens) + request.num_output - 1) // 2 - num_full
    assert replay(case.trace(), case.config()).summary["distinct_pages"] == len(seen) + num_private


def workload(**changes: Any) -> Workload:
    settings: dict[str, Any] = {
        "num_sessions": 50,
        "new_tokens": UniformLength(20, 60),
        "output_tokens": LogNormalLength(median=10, sigma=0.5, high=64),
        "sessions_per_s": 20.0,
        **changes,
    }
    return Workload(**settings)


def test_the_same_seed_gives_the_same_workload_and_another_seed_another() -> None:
    first, again, other = (list(workload(seed=seed).trace()) for seed in (1, 1, 2))
    assert first == again != other


def test_a_workload_has_the_numbers_it_was_asked_for() -> None:
    rows = list(workload(num_sessions=400, turns_per_session=2, think_time_s=1.0).trace())
    assert len(rows) == 800
    assert all(20 <= row.num_prompt_tokens <= 60 for row in rows[::2])
    starts = [row.arrival_ns / 1e9 for row in rows[::2]]
    assert starts[-1] == pytest.approx(400 / 20, rel=0.2)
    assert np.mean([row.delay_ns or 0 for row in rows[1::2]]) == pytest.approx(1e9, rel=0.2)
    fixed = list(workload(arrivals="fixed", new_tokens=FixedLength(7)).trace())
    assert [row.arrival_ns for row in fixed[:3]] == [0, 50 * MS, 100 * MS]
    assert {row.num_prompt_tokens for row in fixed} == {7}


def test_turns_hit_what_their_session_left_and_groups_share_their_prefix() -> None:
    turns = replay(workload(turns_per_session=3, think_time_s=0.1), ReplayConfig(page_size=1))
    requests = turns.requests
    inputs, cached = (np.asarray(requests[name]) for name in ("input_tokens", "cached_tokens"))
    later = cached > 0
    assert later.sum() == 100, "every turn but the first"
    assert turns.summary["prefix_hit_ratio"] > 0.3
    grouped = replay(workload(prefix_tokens=100, num_prefix_groups=2, sessions_per_s=1.0), ReplayConfig(page_size=1))
    cached = np.asarray(grouped.requests["cached_tokens"])
    assert sorted(set(cached.tolist())) == [0, 100]
    assert (cached == 0).sum() == 2
    assert (inputs > 0).all()


@pytest.mark.parametrize(
    "changes",
    [{"num_sessions": 0}, {"arrivals": "burst"}, {"think_time_s": -1.0}, {"sessions_per_s": float("inf")}],
)
def test_a_bad_workload_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="workload"):
        workload(**changes)

"""Several models on several devices: a device is what it is alone, and routers decide what it gets."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_sharing_laws import Sharing, everything, sharings
from test_sharing_tiers import offloads

from kvarts import ModelShare, ReplayConfig, SharingConfig, Trace, TraceRequest, replay
from kvarts.core.events import Cancelled, Event, Rejected
from kvarts.core.tiers.config import OffloadConfig
from kvarts.sim.report.report import Report
from kvarts.sim.report.steps import StepLog
from kvarts.sim.routers.config import Routing
from kvarts.sim.sharing.config import ObserversOf
from kvarts.sim.sharing.report import SharedReport

from builders.case import ROUTERS, Case, Row
from builders.guide_policies import LeastHits
from builders.kept import Kept
from builders.orders import FewestHits

pytestmark = pytest.mark.laws

DATA = Path(__file__).parents[3] / "src" / "kvarts" / "data"


@st.composite
def loads(draw: st.DrawFn) -> dict[str, Any]:
    """Replicas behind a router that events may reach late, in an open or a closed loop."""
    lags: list[float | str] = [0, 0.000001, 3, "40ms"]
    load: dict[str, Any] = {
        "replicas": draw(st.integers(2, 3)),
        "router": draw(st.sampled_from(ROUTERS)),
        "concurrency": draw(st.sampled_from([None, None, 1, 4])),
    }
    if load["router"] == "prefix" and (lag := draw(st.sampled_from(lags))):
        load["routing"] = Routing(event_lag=lag)
    return load


def in_sessions(trace: Trace, draws: st.DataObject) -> Trace:
    """Some requests are turns that wait for others, after a while or until their own time."""
    rows = []
    for row in trace:
        session = draws.draw(st.sampled_from([None, "s", "t"]))
        delay_ns = None if session is None else draws.draw(st.sampled_from([None, 0, 3_000_000]))
        rows.append(msgspec.structs.replace(row, session_id=session, delay_ns=delay_ns))
    return Trace(rows, unit_tokens=trace.unit_tokens, has_output_tokens=trace.has_output_tokens)


def alone(case: Sharing) -> Sharing:
    """The first model of `case`, with all of the memory and all of the time."""
    return replace(case, cases=case.cases[:1], page_bytes=case.page_bytes[:1], guarantees=[0], weights=[1], floors=[0],
                   ceilings=[None])  # fmt: skip


def assert_same_run(one: Report, other: Report) -> None:
    assert one.requests_jsonl() == other.requests_jsonl()
    assert one.summary == other.summary
    for name, column in one.steps.items():
        assert other.steps[name].tolist() == column.tolist(), name


# A model alone --------------------------------------------------------------------------------------------


@given(sharings(max_models=1, max_requests=24), loads(), st.sampled_from(["default", "mocker"]), st.data())
def test_a_model_alone_on_devices_is_a_replay_of_one_model_with_replicas(
    case: Sharing, load: dict[str, Any], profile: str, draws: st.DataObject
) -> None:
    """In open and closed loops, with sessions and without, behind any router."""
    case = alone(case)
    trace = case.cases[0].trace()
    if draws.draw(st.booleans()):
        trace = in_sessions(trace, draws)
    config = case.config(profile=profile, **load)
    shared = replay({"m0": trace}, config)
    assert_same_run(replay(trace, config.configs["m0"]), shared.reports["m0"])


@given(sharings(max_models=1), loads(), offloads())
def test_with_tiers_too(case: Sharing, load: dict[str, Any], tiers: OffloadConfig) -> None:
    case = alone(case)
    shared = case.run(offload=tiers, **load)
    assert_same_run(replay(case.cases[0].trace(), shared.config.configs["m0"]), shared.reports["m0"])


# Several models -------------------------------------------------------------------------------------------


def times(report: Report, rows: list[int]) -> list[tuple[Any, ...]]:
    names = ("arrival_ms", "first_token_ms", "last_token_ms", "cached_tokens", "preemptions", "status")
    return [tuple(str(report.requests[name][row]) for name in names) for row in rows]


@given(sharings(max_requests=20), st.integers(2, 3), st.booleans(), st.booleans())
def test_in_turn_every_device_replays_its_own_part_of_the_traffic(
    case: Sharing, num_devices: int, is_static: bool, with_tiers: bool
) -> None:
    """Devices share nothing: each is a replay on one device of every n-th request of each model."""
    is_static = is_static and min(case.guarantees) >= max(case.page_bytes)
    changes: dict[str, Any] = {"static_split": is_static}
    if with_tiers:
        changes["offload"] = OffloadConfig(host_pages=8, h2d="1kB/s", d2h="1kB/s")
    together = case.run(replicas=num_devices, **changes)
    traces = {f"m{place}": of_model.trace() for place, of_model in enumerate(case.cases)}
    for number in range(num_devices):
        parts = {name: every_nth(trace, number, num_devices) for name, trace in traces.items()}
        apart = replay(parts, case.config(**changes))
        for name, report in together.reports.items():
            rows = np.flatnonzero(report.requests["replica"] == number).tolist()
            assert times(report, rows) == times(apart.reports[name], list(range(len(rows))))
            mine, (theirs,) = report.step_logs[number], apart.reports[name].step_logs
            assert columns_of(mine) == columns_of(theirs)
        of_device = together.devices[number]
        assert of_device.num_tokens == apart.devices[0].num_tokens
        assert of_device.contested == apart.devices[0].contested
        assert [msgspec.structs.replace(loan, replica=None) for loan in of_device.loans] == apart.loans


def columns_of(log: StepLog) -> list[list[int]]:
    """Return all that a log says, in numbers; requests of others have other numbers where there are fewer."""
    return [column.tolist() for column in (*log.columns.values(), *log.rests.values())]


def every_nth(trace: Trace, first: int, num: int) -> Trace:
    rows = list(trace)[first::num]
    return Trace(rows, unit_tokens=trace.unit_tokens, has_output_tokens=trace.has_output_tokens)


@given(sharings(max_requests=24), loads(), st.booleans(), st.data())
def test_fast_forward_equals_turn_by_turn(
    case: Sharing, load: dict[str, Any], is_static: bool, draws: st.DataObject
) -> None:
    """L5: the same bytes, whatever is looked at; and observed."""
    is_static = is_static and min(case.guarantees) >= max(case.page_bytes)
    traces = {f"m{place}": of_model.trace() for place, of_model in enumerate(case.cases)}
    if draws.draw(st.booleans()):
        traces["m0"] = in_sessions(traces["m0"], draws)
    eviction = draws.draw(st.sampled_from([None, LeastHits, FewestHits]))
    if eviction is not None:
        load["eviction"] = eviction
    fast, slow = (
        replay(traces, case.config(step_by_step=slowly, audit=slowly, static_split=is_static, **load))
        for slowly in (False, True)
    )
    assert everything(fast) == everything(slow)
    kept = {(name, number): Kept() for name in traces for number in range(load["replicas"])}
    observed = replay(traces, case.config(static_split=is_static, **load), observers_of=lambda which: [kept[which]])
    assert everything(fast) == everything(observed)
    for (name, number), of_engine in kept.items():
        assert bool(of_engine.events) == (number in list(fast.reports[name].requests["replica"]))


@given(sharings(max_requests=16), loads(), offloads())
def test_with_tiers_fast_forward_equals_turn_by_turn(case: Sharing, load: dict[str, Any], tiers: OffloadConfig) -> None:
    fast, slow = (case.run(offload=tiers, step_by_step=slowly, **load) for slowly in (False, True))
    assert everything(fast) == everything(slow)


@given(sharings(max_requests=24), st.integers(1, 3), st.sampled_from(ROUTERS), st.booleans())
def test_known_arrivals_are_those_of_a_loop_in_which_requests_could_wait(
    case: Sharing, replicas: int, router: str, with_tiers: bool
) -> None:
    """Devices that run by themselves from arrival to arrival, against devices that move from event to event."""
    load: dict[str, Any] = {"replicas": replicas, "router": router}
    if with_tiers:
        load["offload"] = OffloadConfig(host_pages=8, h2d="1kB/s", d2h="1kB/s")
    traces = {f"m{place}": of_model.trace() for place, of_model in enumerate(case.cases)}
    known = replay(traces, case.config(**load))
    for trace in traces.values():
        trace.has_sessions = True
    assert everything(known) == everything(replay(traces, case.config(**load)))


def test_a_model_that_gets_work_after_the_device_was_idle_is_due_then() -> None:
    """It was due at the start of the turn before the idle time, where requests could have waited for others."""
    of_a = Case([Row(0, [0] * 4, 4, 1, None, 0, None)], 1, 1, 3, 4, 1, "default", 1)
    of_b = Case([Row(360, [0] * 4, 8, 3, None, 0, None)], 2, 1, 17, 4, 1, "default", 1)
    of_c = Case([Row(400, [0] * 6, 12, 1, None, 0, None)], 2, 1, 18, 8192, 2, "default", 1)
    case = Sharing([of_a, of_b, of_c], 1, [2, 3, 2], [0, 0, 30], [1, 2, 1], [0] * 3, [600, 1000, None], 61, 64, 1)
    traces = {f"m{place}": of_model.trace() for place, of_model in enumerate(case.cases)}
    known = replay(traces, case.config())
    for trace in traces.values():
        trace.has_sessions = True
    assert everything(known) == everything(replay(traces, case.config()))


def test_turns_after_one_without_a_step_end_before_the_next_arrival() -> None:
    """A turn in which only the head was found not to fit was followed by turns past requests that arrived."""
    of_a = [Row(200, [0] * 6, 12, 8, None, 0, None), Row(200, [0] * 9, 18, 7, None, 0, None),
            Row(335, [0] * 10, 20, 1, None, 0, None)]  # fmt: skip
    a = Case(of_a, 2, 4, 5, 16, 2, "default", 1)
    b = Case([Row(296, [0] * 9, 35, 1, None, 0, None)], 4, 4, 7, 64, 2, "default", 1)
    case = Sharing([a, b], 4, [12, 8], [24, 0], [19, 19], [0, 0], [1000, 1000], 97, 16, 1)
    traces = {"m0": a.trace(), "m1": b.trace()}
    for trace in traces.values():
        trace.has_sessions = True
    fast, slow = (
        replay(traces, case.config(replicas=2, router=ROUTERS[-1], step_by_step=slowly)) for slowly in (False, True)
    )
    assert everything(fast) == everything(slow)


def test_a_model_that_waits_for_pages_of_others_has_no_second_turn_at_the_same_time() -> None:
    """L8: a stalled model took every turn, because the pages of the request to preempt were shared and stayed used."""
    of_a = [
        (0, 44, 2, 0), (0, 60, 2, 0), (0, 44, 7, 0), (0, 57, 2, 0), (7, 24, 16, 0), (47, 44, 2, 0), (47, 31, 19, -1),
        (47, 52, 2, 0), (87, 24, 18, 0), (87, 44, 2, 0), (87, 40, 26, 0),
    ]  # fmt: skip
    of_b = [
        (0, 26, 2, 0), (0, 20, 2, 0), (200, 26, 1, 0), (240, 18, 2, 0), (440, 26, 2, -1), (440, 26, 2, 0),
        (440, 20, 2, 0),
    ]  # fmt: skip
    a, b = (
        Case([Row(ms, [0] * 15, prompt, output, None, priority, None) for ms, prompt, output, priority in rows], *sizes)
        for rows, sizes in ((of_a, (4, 4, 79, 4, 1, "default", 1)), (of_b, (2, 4, 32, 8192, 1, "default", 1)))
    )
    case = Sharing([a, b], 4, [4, 4], [27, 20], [1, 19], [0, 100], [None, None], 110, 64, 4, inf)
    report = case.run(replicas=2, router="round-robin")
    assert [each.summary["num_completed"] for each in report.reports.values()] == [len(of_a), len(of_b)]


@given(sharings(max_requests=20), loads(), st.booleans(), st.data())
def test_health_is_that_of_a_model_on_all_devices(
    case: Sharing, load: dict[str, Any], with_tiers: bool, draws: st.DataObject
) -> None:
    """L2, L8: every request ends, one way or another; and L5."""
    names = [f"m{place}" for place in range(len(case.cases))]
    states = st.sampled_from(["dead", "dead", "degraded", "healthy"])
    changes = draws.draw(
        st.lists(st.tuples(st.sampled_from(names), states, st.integers(0, 400)), min_size=1, max_size=4)
    )
    health = tuple(f"{name}={state}@{ms / 1000:.3f}" for name, state, ms in changes)
    if with_tiers:
        load["offload"] = OffloadConfig(host_pages=8, h2d="1kB/s", d2h="1kB/s")
    if (queue_threshold := draws.draw(st.sampled_from([None, None, 0, 0.2]))) is not None:
        load["routing"] = msgspec.structs.replace(load.get("routing", Routing()), queue_threshold=queue_threshold)
    traces = {name: of_model.trace() for name, of_model in zip(names, case.cases, strict=True)}
    reports: list[SharedReport] = [
        replay(traces, msgspec.structs.replace(case.config(step_by_step=slowly, audit=slowly, **load), health=health))
        for slowly in (False, True)
    ]
    assert everything(reports[0]) == everything(reports[1])
    for name, report in reports[0].reports.items():
        summary = report.summary
        ended = summary["num_completed"] + summary["num_rejected"] + summary["num_failed"]
        assert ended == len(case.cases[names.index(name)].rows)
        for log in report.step_logs:
            assert not len(log) or log.rests["used"].max() == 0


@pytest.mark.parametrize("health", ["dead", "degraded"])
def test_requests_that_a_router_holds_end_with_their_model(health: str) -> None:
    """The router hears of those that fail, and lets the next go."""
    report = steady(("a=" + health + "@0.003",), routing=Routing(queue_threshold=0))
    of_a = report.reports["a"].summary
    assert of_a["num_completed"] + of_a["num_rejected"] + of_a["num_failed"] == 9
    assert report.reports["b"].summary["num_completed"] == 9


@pytest.mark.parametrize("health", ["dead", "degraded"])
def test_a_model_that_falls_ill_does_so_on_every_device(health: str) -> None:
    report = steady(("a=" + health + "@0.005",), replicas=3)
    of_a = report.reports["a"].requests
    assert set(of_a["status"]) == ({"failed", "rejected"} if health == "dead" else {"completed", "failed"})
    assert set(of_a["replica"].tolist()) == {0, 1, 2}  # type: ignore[union-attr]
    assert set(report.reports["b"].requests["status"]) == {"completed"}


@pytest.mark.parametrize("replicas", [1, 2])
def test_readers_are_told_of_every_request_of_a_model_that_dies(replicas: int) -> None:
    """Also of those that come after its death, and at the time at which they failed."""
    told: list[Told] = []

    def observers_of(name: str | tuple[str, int]) -> list[Told]:
        if name not in ("a", ("a", 0), ("a", 1)):
            return []
        told.append(Told())
        return [told[-1]]

    report = steady(("a=dead@0.0075",), observers_of, replicas=replicas)
    statuses = list(report.reports["a"].requests["status"])
    assert set(statuses) == {"failed", "rejected"}
    of_status = {name: {index for index, status in enumerate(statuses) if status == name} for name in set(statuses)}
    assert {index for each in told for index in each.cancelled} == of_status["failed"]
    assert {index for each in told for index in each.rejected} == of_status["rejected"]
    assert {reason for each in told for reason in each.rejected.values()} == {"its model is dead"}
    assert all(time_ns >= 7_500_000 for each in told for time_ns in each.cancelled.values())


class Told:
    """An EventReader that notes how requests end."""

    wants_details = True

    def __init__(self) -> None:
        self.cancelled: dict[int, int] = {}
        self.rejected: dict[int, str] = {}

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Cancelled):
                self.cancelled[event.request] = event.time_ns
            elif isinstance(event, Rejected):
                self.rejected[event.request] = event.reason


def steady(health: tuple[str, ...] = (), observers_of: ObserversOf | None = None, **each: Any) -> SharedReport:
    """Two models, a request each every 2 ms."""
    rows = [TraceRequest(index, index * 2_000_000, array("Q", [index % 3]).tobytes(), 16, 20) for index in range(9)]
    model = ModelShare(cost="linear:step_ms=1", kv_bytes_per_token=1)
    config = SharingConfig(
        models={"a": model, "b": model}, kv_memory=640, health=health, each=ReplayConfig(page_size=4, **each)
    )
    traces = {"a": Trace(rows, unit_tokens=16), "b": Trace(rows, unit_tokens=16)}
    report: SharedReport = replay(traces, config, observers_of=observers_of)
    return report


def test_the_report_has_each_device_and_all_together() -> None:
    report = steady(replicas=2, router=ROUTERS[-1])
    summary = report.summary
    assert list(summary) == ["version", "total", "devices", "models"]
    total, devices = summary["total"], summary["devices"]
    assert len(devices) == 2
    for name in ("kv_bytes", "num_requests", "num_completed", "num_tokens", "num_rejected", "num_failed"):
        assert sum(device[name] for device in devices) == total[name], name
    assert total["num_completed"] == total["num_requests"] == 18
    assert total["busy_pct"] == pytest.approx(sum(device["busy_pct"] for device in devices) / 2)
    rate = "output_throughput_tokens_per_s"
    assert total[rate] == pytest.approx(sum(device[rate] for device in devices))
    for of_model in summary["models"].values():
        assert of_model["config"]["replicas"] == len(of_model["replicas"]) == 2
    assert list(steady().summary) == ["version", "device", "models"]


# The command line -----------------------------------------------------------------------------------------

COMMAND = [
    "replay", "--model", "chat=llama-3.1-8b:weight=2", "--model", "code=qwen3-8b:weight=1",
    "--device", "h100-80gb", "--kv-memory", "2GiB", "--replicas", "2",
]  # fmt: skip


@pytest.mark.slow
def test_the_command_says_the_same_observed(
    tmp_path: Path, run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes], short_traces: list[str]
) -> None:
    command = [*COMMAND, *short_traces, "--router", ROUTERS[-1], "--json"]
    assert run_command(*command, "--run-dir", tmp_path / "run", "--set", f"loans={tmp_path / 'loans.jsonl'}") == 0
    printed = capsysbinary.readouterr().out
    assert run_command(*command) == 0
    assert capsysbinary.readouterr().out == printed == (tmp_path / "run" / "report.json").read_bytes()
    loans = msgspec.json.Decoder(dict[str, Any]).decode_lines((tmp_path / "loans.jsonl").read_bytes())
    assert {loan["replica"] for loan in loans} == {0, 1}


def test_a_file_says_the_same_and_the_table_names_the_devices(
    tmp_path: Path, run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes], short_traces: list[str]
) -> None:
    chat, code = (option.partition("=")[2] for option in short_traces[1::2])
    config = tmp_path / "share.toml"
    config.write_text(
        f'device = "h100-80gb"\nkv_memory = "2GiB"\nreplicas = 2\nrouter = "{ROUTERS[-1]}"\n'
        f'[models.chat]\nmodel = "llama-3.1-8b"\nweight = 2\ntrace = "{chat}"\n'
        f'[models.code]\nmodel = "qwen3-8b"\ntrace = "{code}"\n'
    )
    assert run_command("replay", "--config", config) == 0
    from_file = capsysbinary.readouterr().out
    assert run_command(*COMMAND, *short_traces, "--router", ROUTERS[-1]) == 0
    assert capsysbinary.readouterr().out == from_file
    table = from_file.decode()
    assert table.startswith("2 models on 2 devices, shared: 2.1 GB of KV memory, 8,192 tokens a step each\n")
    assert "\ndevice 0     " in table and "\ndevice 1     " in table
    assert max(map(len, table.splitlines())) <= 80

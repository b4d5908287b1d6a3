"""L11 for several models on one device: what arrived at their mocks, replayed, makes the same decisions in the same
turns, event for event.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarts.base.clock import VirtualClock
from kvarts.core.content import Content
from kvarts.core.event_log import EventLog
from kvarts.core.events import Cancelled, Event, StepEnded
from kvarts.core.request import Request
from kvarts.cost.polynomial import LinearCost
from kvarts.cost.simulated import SimExecutor
from kvarts.doors.openai.opening import Door, MockSettings
from kvarts.doors.openai.running import open_mock
from kvarts.doors.openai.served import Limits
from kvarts.doors.openai.sharing.device import Assignments, PacedDevice, TurnCost
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.sharing.config import ModelShare, SharingConfig
from kvarts.sim.sharing.device import SharedDevice
from kvarts.sim.sharing.outcome import Contention
from kvarts.sim.sharing.replay import open_tenant
from kvarts.sim.sharing.tenant import TurnOrder
from kvarts.sim.sharing.turns import TurnLoop
from kvarts.sim.traffic.logs import RecordedRow, recorded_trace

from builders.grouped import group_settings
from builders.parity import Heard, HeardBy, Sent, run_live, shifted

NAMES = ("chat", "code")
TOKEN_BYTES = {"chat": 8, "code": 12}


def shared(
    pages: int,
    budget: int,
    seqs: int,
    *,
    has_host: bool,
    step_ms: float = 0.05,
    kept: dict[str, Any] | None = None,
) -> SharingConfig:
    """Two models. `kept`: settings of what layers of the first keep, if not every token."""
    offload = None
    if has_host:
        from kvarts.core.tiers.config import OffloadConfig

        offload = OffloadConfig(host_memory=f"{pages * 16 * 8}B", policy="eager")
    cost = LinearCost(step_ms=step_ms, chunk_token_ms=0.01, decode_ms=0.01)
    each = ReplayConfig(
        page_size=2,
        max_num_batched_tokens=max(budget, 2 * seqs),
        max_num_seqs=seqs,
        audit=True,
        offload=offload,
        step_by_step=True,
    )
    models = {
        name: ModelShare(cost=cost, kv_bytes_per_token=TOKEN_BYTES[name], weight=weight)
        for name, weight in zip(NAMES, (2.0, 1.0), strict=True)
    }
    if kept:
        models["chat"] = ModelShare(cost=cost, weight=2.0, **kept)
    return SharingConfig(models=models, kv_memory=pages * 16, each=each)


def served_live(
    config: SharingConfig, sent: list[tuple[str, Sent]]
) -> tuple[dict[str, list[RecordedRow]], dict[str, Heard]]:
    """Send requests to mocks on the wall clock; return what each recorded, and what happened in it."""
    heard = {name: Heard() for name in config.models}
    door = Door(is_recording=True, limits=Limits(max_queued=100_000))
    opened = open_mock(config, door, MockSettings(readers=HeardBy(heard)))
    run_live(opened, sent)
    rows = {served.names[0]: served.recorder.rows() for served in opened.models if served.recorder is not None}
    return rows, heard


def assert_same(config: SharingConfig, rows: dict[str, list[RecordedRow]], live: dict[str, Heard]) -> None:
    began_ns = min(row.arrival_ns for of_model in rows.values() for row in of_model)
    again = {name: Heard() for name in config.models}
    traces = {name: recorded_trace(of_model, began_ns=began_ns) for name, of_model in rows.items()}
    replay(traces, config, observers_of=lambda name: [again[name]])
    for name in config.models:
        expected = without_index(shifted(live[name].events, began_ns))
        found = without_index(again[name].events)
        for number, (mine, other) in enumerate(zip(expected, found, strict=False)):
            assert mine == other, f"event {number} of {name}"
        assert len(expected) == len(found)


def without_index(events: list[Any]) -> list[Any]:
    """The same, with requests numbered within the model: a server numbers them over all models."""
    numbers: dict[int, int] = {}
    told = []
    for kind, fields in events:
        if kind in ("Arrived", "Rejected"):
            numbers.setdefault(dict(fields)["request"], len(numbers))
        is_for_another = kind == "Preemption" and dict(fields)["model"]
        kept = [(name, value) for name, value in fields if not (is_for_another and name == "asker")]
        told.append((kind, tuple((name, renumbered(name, value, numbers)) for name, value in kept)))
    return told


def renumbered(name: str, value: Any, numbers: dict[int, int]) -> Any:
    """A value without indices of requests that are of no account: owners of contents, and requests of others."""
    if name in ("request", "victim", "asker"):
        return numbers.get(value, value)
    if name in ("content", "parent") and value is not None:
        return value[1:]
    if name == "runs":
        return [run[1:] for run in value]
    if name == "preemptions":
        return [
            msgspec.structs.replace(each, victim=numbers[each.victim], asker=-1 if each.model else numbers[each.asker])
            for each in value
        ]
    return value


prompts = st.one_of(
    st.lists(st.integers(0, 3), min_size=1, max_size=24),
    st.tuples(st.integers(0, 1), st.lists(st.integers(0, 3), max_size=4)).map(lambda pair: [pair[0]] * 11 + pair[1]),
)
requests = st.tuples(
    st.sampled_from(NAMES),
    st.builds(
        Sent,
        delay_ms=st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.5]),
        prompt=prompts,
        num_tokens=st.integers(1, 16),
        priority=st.integers(0, 1),
        salt=st.sampled_from([None, None, "a"]),
    ),
)


@pytest.mark.laws
@settings(deadline=None, max_examples=settings().max_examples // 2)
@given(
    sent=st.lists(requests, min_size=1, max_size=12),
    pages=st.integers(20, 60),
    budget=st.sampled_from([4, 16, 64]),
    seqs=st.integers(1, 4),
    has_host=st.booleans(),
    kept=st.one_of(st.just({}), group_settings()),
)
def test_a_recorded_run_of_several_models_replays_to_the_same_events(
    sent: list[tuple[str, Sent]],
    pages: int,
    budget: int,
    seqs: int,
    has_host: bool,
    kept: dict[str, Any],
) -> None:
    config = shared(pages, budget, seqs, has_host=has_host, kept=kept)
    rows, live = served_live(config, sent)
    assert sum(map(len, rows.values())) == len(sent)
    if all(row.num_output_tokens for of_model in rows.values() for row in of_model) and all(rows.values()):
        assert_same(config, rows, live)


def test_a_run_in_which_models_preempt_each_other_replays_to_the_same_events() -> None:
    # Steps are so long that the borrowing model still runs when the other asks, also where this process is held up.
    config = shared(100, 64, 6, has_host=False, step_ms=10.0)
    borrowing = [("code", Sent(0.0, [index] * 12, 30)) for index in range(6)]
    reclaiming = [("chat", Sent(30.0 + 0.2 * index, [index] * 13, 20, priority=1)) for index in range(12)]
    sent = [*borrowing, *reclaiming]
    rows, live = served_live(config, sent)
    preempted = [
        preemption
        for heard in live.values()
        for kind, fields in heard.events
        if kind == "StepDone"
        for preemption in dict(fields)["preemptions"]
    ]
    assert any(preemption.model for preemption in preempted)
    assert_same(config, rows, live)


def test_a_request_is_dropped_at_the_time_of_the_device() -> None:
    """The model of the request was idle, or waited, while another had its turns: its own last step is long over."""
    config = shared(40, 8, 2, has_host=False, step_ms=1.0)
    config = msgspec.structs.replace(config, each=msgspec.structs.replace(config.each, max_num_seqs=1))
    heard = {name: Told() for name in NAMES}
    device = SharedDevice(config.kv_bytes)
    clock = VirtualClock()
    models: Assignments = {}
    tenants = []
    for name in NAMES:
        times = SimExecutor(TurnCost(config.configs[name].cost_model))
        log = EventLog([heard[name]], num_waiting=1)
        tenants.append(open_tenant(config, name, device, times, log=log, times=times))
    turns = TurnLoop(device, tenants, TurnOrder(device, tenants), Contention(tenants), step_by_step=True)
    paced = PacedDevice(device, turns, {tenant.name: tenant for tenant in tenants}, models, clock)
    requests = []
    for index, name in enumerate(["chat", "chat", "code"]):
        models[index] = name
        content = Content.from_tokens([index] * 4, page_size=2, owner=index)
        requests.append(Request(index, content, num_prompt_tokens=4, max_tokens=8, arrival_ns=0))
        assert paced.submit(requests[-1], 0) is None
    while heard["code"].ended_ns <= heard["chat"].ended_ns or not heard["chat"].ended_ns:
        paced.step(clock.now_ns())
        clock.wait_until_ns(turns.now_ns)
    assert clock.now_ns() == heard["code"].ended_ns > heard["chat"].ended_ns
    paced.cancel(requests[1])
    (cancelled,) = [event for event in heard["chat"].events if isinstance(event, Cancelled)]
    assert cancelled.time_ns == requests[1].cancelled_ns == clock.now_ns()
    device.check()


class Told:
    """Keeps the events of one model, and when its last step ended."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ended_ns = 0

    def observe(self, events: Sequence[Event]) -> None:
        self.events += events
        for event in events:
            if isinstance(event, StepEnded):
                self.ended_ns = event.end_ns

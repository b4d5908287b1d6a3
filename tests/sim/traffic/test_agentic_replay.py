"""Agentic load as AIPerf runs it, against a naive simulator and a published log of AIPerf."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.errors import ConfigError
from kvarts.sim.config import make_config
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.agentic_replay import AgenticLoop, AgenticReplay
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.trace import Trace, TraceRequest, spell
from kvarts.sim.traffic.trace_request import After

from oracles.naive_agentic_replay import Sent, naive_agentic_replay

S = 1_000_000_000
SESSIONS = Path(__file__).parents[3] / "src/kvarts/data/coding-agents"

PUBLISHED = (
    "002001296e8a8c38ad9d7cc436d691afc602",
    "006c98de37d819e95b0840e25426bb7ca99d",
    "00ca01c4aaeccee751ae6285beb54dea262f",
    "0196085d85d2075a50b74cd8795ffbdcea9a",
    "02bc0afb13f7a2d9efa86c28511261d85c0e",
    "03e110ac6921c2fe9ac7772a9654314a2beb",
    "0470d446a4514dfe0c6ad0be92853bd13287",
    "04dba6fe621301a1d01fd63b8d02c9645c48",
    "05c249572509162371b7b82339674db64b5d",
    "05f72f78a037cfa5cd4e4541960a574701d9",
    "063179eb93f4337a662e859c5a2c5638e03f",
    "069d7bf5f1efb4e76e3c84510367e6af78a5",
    "077ea9e6554f45bbad9c24a8462bae9a8512",
    "07dd40536557a1d6440a923557c3129dc929",
    "085411a4cc4b15108dd9b50007261a2efb65",
)
"""Sessions of the data set cc-traces-weka-062126, in order of their lanes."""


def load_of(**changes: Any) -> AgenticReplay:
    return AgenticReplay(**{"concurrency": 2, "benchmark_duration": 900.0, **changes})


@st.composite
def plays(draw: st.DrawFn) -> list[list[TraceRequest]]:
    """Sessions whose turns follow each other, with sub-agents that begin after a turn, or while it runs."""
    found: list[list[TraceRequest]] = []
    row = 0
    gaps = st.sampled_from([0, S, 7 * S, 40 * S, 400 * S])
    for number in range(draw(st.integers(1, 4))):
        name, play = f"play{number}", list[TraceRequest]()
        time_ns = 0
        for turn in range(draw(st.integers(1, 5))):
            time_ns += draw(gaps) if turn else 0
            delay_ns = draw(gaps) if turn else None
            play.append(TraceRequest(row, time_ns, _ids(number, turn), 4, 3, session_id=name, delay_ns=delay_ns))
            row += 1
            if draw(st.booleans()):
                before, agent = play[-1], f"{name}/{turn}"
                after = (After(before.row, draw(gaps), draw(st.booleans())),)
                for _ in range(draw(st.integers(1, 2))):
                    time_ns += draw(gaps)
                    units = _ids(number, turn)
                    play.append(TraceRequest(row, time_ns, units, 4, 3, session_id=agent, delay_ns=0, after=after))
                    after = (After(row, draw(gaps)),)
                    row += 1
        found.append(play)
    return found


def _ids(number: int, turn: int) -> bytes:
    return bytes([number, 0, 0, 0, 0, 0, 0, 0]) + bytes([turn, 1, 0, 0, 0, 0, 0, 0])


def trace_of(sessions: list[list[TraceRequest]]) -> Trace:
    requests = [request for play in sessions for request in play]
    return Trace(sorted(requests, key=lambda request: request.arrival_ns), unit_tokens=2)


def duration_of(number: int, place: int) -> int:
    return (number * 7_919 + place * 104_729 + 1) * 100_003 % (9 * S) + 1


def simulated(trace: Trace, load: AgenticReplay, sessions: list[list[TraceRequest]]) -> list[Sent]:
    source = AgenticLoop(trace, scenario=load)
    sent: list[Sent] = []
    flying: list[tuple[int, TraceRequest]] = []
    while True:
        next_ns = source.next_ns()
        flying.sort(key=lambda each: each[0])
        if flying and (next_ns is None or flying[0][0] <= next_ns):
            now_ns, request = flying.pop(0)
            source.done(request, now_ns)
        elif next_ns is not None:
            request = source.pop()
            number, _, session = (request.session_id or "").partition(":")
            play = sessions[int(number) % len(sessions)]
            place = next(place for place, each in enumerate(play) if _is_same(request, each, session))
            sent.append((next_ns, session, place, int(number), request.is_measured))
            flying.append((next_ns + duration_of(int(number), place), request))
        else:
            return sent


def _is_same(request: TraceRequest, each: TraceRequest, session: str) -> bool:
    return each.session_id == session and each.hints is request.hints


LOADS = st.builds(
    load_of,
    concurrency=st.integers(1, 3),
    trajectory_start_min_ratio=st.sampled_from([0.0, 0.25]),
    trajectory_start_max_ratio=st.sampled_from([0.25, 0.75, 1.0]),
    warmup_requests_per_lane=st.integers(0, 3),
    trace_idle_gap_cap_seconds=st.sampled_from([None, 30.0, 300.0]),
    system_idle_gap_cap_seconds=st.sampled_from([None, 10.0]),
    random_seed=st.integers(0, 9),
)


@pytest.mark.laws
@given(plays(), LOADS)
def test_requests_are_sent_as_the_rules_state(sessions: list[list[TraceRequest]], load: AgenticReplay) -> None:
    from kvarts.core.hints import Hints

    named = [
        [msgspec.structs.replace(each, hints=Hints(tool=f"{number}.{place}")) for place, each in enumerate(play)]
        for number, play in enumerate(sessions)
    ]
    # Plays are taken in the order of the trace, where all of them begin at 0.
    expected = naive_agentic_replay(named, load, duration_of)
    assert sorted(simulated(trace_of(named), load, named)) == sorted(expected)


def test_plays_start_where_a_published_run_of_aiperf_did() -> None:
    """The log of ai-dynamo/aisimulate, job 4244685: sessions of cc-traces-weka-062126, `--random-seed 42`."""
    load = load_of(trajectory_start_min_ratio=0.25, trajectory_start_max_ratio=0.75, random_seed=42)
    percent = [round(100 * load.start_ms(name, lane, 0.0, 1.0)) for lane, name in enumerate(PUBLISHED)]
    assert percent == [53, 49, 67, 56, 47, 47, 74, 35, 75, 42, 66, 49, 43, 68, 62]


def test_a_play_that_is_replayed_again_shares_no_prefix_with_itself() -> None:
    trace = trace_of([[TraceRequest(0, 0, _ids(0, 0), 4, 3, session_id="only")]])
    for cache_bust, is_same in (("first_turn_prefix", False), ("none", True)):
        source = AgenticLoop(trace, scenario=load_of(cache_bust=cache_bust))
        first, second = (source.pop() for _ in range(2))
        assert (spell(first.units) == spell(second.units)) is is_same
        assert not set(_split(first)) & set(_split(second)) or is_same


def _split(request: TraceRequest) -> list[bytes]:
    units = spell(request.units)
    return [units[place : place + 8] for place in range(0, len(units), 8)]


def test_reports_count_what_is_measured() -> None:
    trace = load_trace(SESSIONS)
    load = load_of(concurrency=3, warmup_requests_per_lane=2, random_seed=1).of(trace)
    report = replay(load, make_config({"pages": 200_000, "page_size": 64}))
    columns = report.request_columns
    assert report.summary["num_completed"] == len(columns["row"])
    first_ns = min(columns["arrival_ns"])
    assert first_ns > 0
    assert max(columns["arrival_ns"]) < first_ns + 900 * S
    assert min(columns["row"]) >= 2 * 3


def test_other_processes_replay_the_same() -> None:
    load = load_of(random_seed=3).of(load_trace(SESSIONS))
    again = pickle.loads(pickle.dumps(load))
    config = make_config({"pages": 100_000, "page_size": 64})
    assert replay(again, config).summary == replay(load, config).summary


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"benchmark_duration": 600.0}, "benchmark_duration"),
        ({"concurrency": 0}, "concurrency"),
        ({"trajectory_start_min_ratio": 0.5, "trajectory_start_max_ratio": 0.25}, "trajectory_start_min_ratio"),
        ({"trajectory_start_max_ratio": 1.5}, "trajectory_start_max_ratio"),
        ({"system_idle_gap_cap_seconds": -1.0}, "system_idle_gap_cap_seconds"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_of(**changes)
    assert refused.value.field == field

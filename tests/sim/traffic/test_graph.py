"""Requests that wait for each other: sources against a naive simulator, and plays of agents as they were recorded."""

from __future__ import annotations

import heapq
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.errors import InputError
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.editing import anonymized, merged, repeated, scaled, sliced, trace_lines
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.graph import components
from kvarts.sim.traffic.source import ClosedLoop, OpenLoop, Source
from kvarts.sim.traffic.trace import Trace, TraceRequest, spell
from kvarts.sim.traffic.trace_request import After

from oracles.naive_graph import naive_closed_loop, naive_edges, naive_open_loop, naive_plays, ready_ns

MS = 1_000_000


@st.composite
def graphs(draw: st.DrawFn, most: int = 14) -> list[TraceRequest]:
    """Requests of which some wait for earlier ones, from their ends or arrivals, and some are turns of sessions."""
    requests: list[TraceRequest] = []
    time_ns = 0
    for row in range(draw(st.integers(1, most))):
        time_ns += draw(st.sampled_from([0, 1, 7])) * MS if row else 0
        after: list[After] = []
        if row and draw(st.booleans()):
            rows = draw(st.sets(st.integers(0, row - 1), min_size=1, max_size=3))
            delays = st.sampled_from([0, MS, 5 * MS, 40 * MS])
            after = [After(each, draw(delays), draw(st.booleans())) for each in sorted(rows)]
        units = bytes(draw(st.integers(0, 2)) for _ in range(1)) + bytes(7)
        requests.append(
            TraceRequest(
                row,
                time_ns,
                units,
                draw(st.integers(1, 16)),
                draw(st.integers(1, 12)),
                session_id=draw(st.sampled_from([None, None, "a", "b"])),
                delay_ns=draw(st.sampled_from([None, 0])) if after else None,
                after=tuple(after),
            )
        )
    return requests


def simulated(source: Source, durations: dict[int, int]) -> dict[int, int]:
    """When the requests of a source arrive if each takes its duration."""
    running: list[tuple[int, int, TraceRequest]] = []
    arrivals: dict[int, int] = {}
    while True:
        next_ns = source.next_ns()
        if running and (next_ns is None or running[0][0] <= next_ns):
            now_ns, _, request = heapq.heappop(running)
            source.done(request, now_ns)
        elif next_ns is None:
            return arrivals
        else:
            request = source.pop()
            arrivals[request.row] = next_ns
            heapq.heappush(running, (next_ns + durations[request.row], request.row, request))


@given(graphs(), st.data())
@pytest.mark.laws
def test_an_open_loop_is_that_of_the_naive_simulator(requests: list[TraceRequest], data: st.DataObject) -> None:
    durations = {request.row: data.draw(st.integers(0, 9)) * MS for request in requests}
    assert simulated(OpenLoop(Trace(requests)), durations) == naive_open_loop(requests, durations)


@given(graphs(), st.integers(1, 3), st.data())
@pytest.mark.laws
def test_a_closed_loop_is_that_of_the_naive_simulator(
    requests: list[TraceRequest], concurrency: int, data: st.DataObject
) -> None:
    durations = {request.row: data.draw(st.integers(1, 9)) * MS for request in requests}
    source = ClosedLoop(Trace(requests), concurrency=concurrency)
    assert simulated(source, durations) == naive_closed_loop(requests, durations, concurrency)


@given(graphs(), st.sampled_from([1, 2]), st.sampled_from([None, 2]))
@pytest.mark.laws
def test_joins_are_exact_in_a_replay(requests: list[TraceRequest], replicas: int, concurrency: int | None) -> None:
    """Each request arrives just when what it waits for says so, and a replay step by step is the same."""
    changes: dict[str, Any] = {"replicas": replicas, "concurrency": concurrency, "audit": True}
    config = ReplayConfig(num_pages=40, page_size=4, max_num_seqs=3, max_num_batched_tokens=24, **changes)
    trace = Trace(requests, unit_tokens=16)
    report = replay(trace, config)
    slow = replay(trace, msgspec.structs.replace(config, step_by_step=True))
    assert report.requests_jsonl() == slow.requests_jsonl()
    columns = {name: column.tolist() for name, column in report.request_columns.items()}
    arrivals = dict(zip(columns["row"], columns["arrival_ns"], strict=True))
    ends = dict(zip(columns["row"], columns["last_token_ns"], strict=True))
    assert len(arrivals) == len(requests)
    edges = naive_edges(requests)
    for request in requests:
        ready = ready_ns(request, edges, arrivals, ends)
        assert ready is not None
        if concurrency is None:
            own_ns = request.arrival_ns if not edges[request.row] or request.delay_ns is None else 0
            assert arrivals[request.row] == max(ready, own_ns)
        else:
            assert arrivals[request.row] >= ready


@given(graphs())
def test_plays_are_what_hangs_together(requests: list[TraceRequest]) -> None:
    numbers = components(requests)
    groups: dict[int, list[int]] = {}
    for request, number in zip(requests, numbers, strict=True):
        groups.setdefault(number, []).append(request.row)
    naive = [[request.row for request in play] for play in naive_plays(requests, naive_edges(requests))]
    assert sorted(groups.values()) == sorted(naive)


@given(graphs(8), st.integers(0, 3), st.integers(2, 3))
def test_what_waits_is_kept_in_traces_made_from_traces(requests: list[TraceRequest], first: int, copies: int) -> None:
    trace = Trace(requests, unit_tokens=16)
    durations = dict.fromkeys(range(copies * len(requests)), 3 * MS)
    plain = sorted(naive_open_loop(requests, durations).values())
    assert sorted(simulated(OpenLoop(anonymized(trace)), durations).values()) == plain
    many = repeated(trace, copies)
    assert sorted(simulated(OpenLoop(many), durations).values()) == sorted(plain * copies)
    both = merged([trace] * copies)
    assert sorted(simulated(OpenLoop(both), durations).values()) == sorted(plain * copies)
    half = simulated(OpenLoop(scaled(trace, 0.5)), dict.fromkeys(durations, 6 * MS))
    assert sorted(half.values()) == [2 * time_ns for time_ns in plain]
    if first < len(requests):
        part = sliced(trace, first=first)
        assert len(simulated(OpenLoop(part), durations)) == len(requests) - first


@pytest.mark.parametrize(
    ("waits", "says"),
    [
        ({0: 1, 1: 0}, "row 1 waits for a request that waits for it"),
        ({1: 1}, "row 2 waits for a request that waits for it"),
        ({0: 7}, "row 1 waits for row 8, which is not there"),
    ],
)
def test_requests_that_could_never_arrive_are_refused(waits: dict[int, int], says: str) -> None:
    requests = [
        TraceRequest(row, 0, bytes(8), 4, 1, after=(After(waits[row]),) if row in waits else ()) for row in range(3)
    ]
    with pytest.raises(InputError, match=says):
        OpenLoop(Trace(requests))
    with pytest.raises(InputError, match="two requests of one row"):
        OpenLoop(Trace([*requests[2:], requests[2], TraceRequest(5, 0, bytes(8), 4, 1, session_id="s")]))


# Dynamo's agentic traces ----------------------------------------------------------------------------------

FORMS = Path(__file__).parent / "forms"
AGENTIC = FORMS / "agentic-mooncake.jsonl"


def test_an_agentic_trace_says_what_its_requests_wait_for() -> None:
    trace = load_trace(AGENTIC)
    assert (trace.unit_tokens, trace.knows_prefixes) == (64, True)
    requests = {request.request_id: request for request in trace}
    assert requests["p:1"].after == (After(0, 20 * MS, of_arrival=True),)
    assert requests["p:3"].after == (After(0, 30 * MS), After(1, 0), After(2, 5 * MS))
    assert [request.arrival_ns // MS for request in trace] == [0, 10, 20, 40, 60]
    units = {name: np.frombuffer(spell(request.units), np.uint64).tolist() for name, request in requests.items()}
    assert units["p:0"][0] == units["p:3"][0] != units["q:0"][0]  # ids are local to their plays
    report = replay(trace, ReplayConfig(num_pages=100, page_size=64, cost=lambda batch: 4.0))
    row = report.request_columns
    arrivals = dict(zip(row["row"].tolist(), row["arrival_ns"].tolist(), strict=True))
    ends = dict(zip(row["row"].tolist(), row["last_token_ns"].tolist(), strict=True))
    # Not before its time, and not before what it waits for: 0 takes two steps, 2 four and 3 waits for all of them.
    assert arrivals[1] == 20 * MS
    assert arrivals[2] == max(40 * MS, ends[0] + 3 * MS // 2)
    assert arrivals[3] == max(60 * MS, ends[0] + 30 * MS, ends[1], ends[2] + 5 * MS)
    assert report.summary["num_input_tokens"] == 128 + 100 + 128 + 192 + 64
    assert report.summary["num_cached_tokens"] == 64 + 64 + 128


def test_rows_of_the_first_version_wait_for_names() -> None:
    trace = load_trace(FORMS / "agentic-mooncake-v1.jsonl")
    requests = {request.request_id: request for request in trace}
    assert requests["left"].after == (After(0, 5 * MS),)
    assert requests["right"].after == (After(0, 2 * MS),)
    assert requests["end"].after == (After(1, 0), After(2, 0))
    report = replay(trace, ReplayConfig(num_pages=1000, page_size=512, cost=lambda batch: 4.0))
    assert report.summary["num_input_tokens"] == 1000 + 600 + 700 + 1100
    assert report.summary["num_cached_tokens"] == 512 + 512 + 512
    assert report.requests["arrival_ms"][3] == max(report.requests["last_token_ms"][1:3])


@pytest.mark.parametrize(
    ("old", "new", "line", "field"),
    [
        ('"version": 2', '"version": 3', 1, "version"),
        ('"block_size": 64', '"block_size": 0', 1, "block_size"),
        ('"hash_ids": [101, 303]', '"hash_ids": [101]', 3, "hash_ids"),
        ('"request_id": "p:2", "play_id"', '"request_id": "p:1", "play_id"', 4, "request_id"),
        ('"request_id": "p:1", "relation"', '"request_id": "p:9", "relation"', 5, "dependencies[1].request_id"),
        ('"trigger": "dispatch"', '"trigger": "start"', 3, "dependencies[0].trigger"),
        ('"not_before_ms": 10.0', '"not_before_ms": -1', 6, "not_before_ms"),
        ('"input_length": 192', '"input_length": 0', 5, "input_length"),
    ],
)
def test_a_malformed_agentic_row_is_named(tmp_path: Path, old: str, new: str, line: int, field: str) -> None:
    text = AGENTIC.read_text()
    assert old in text
    path = tmp_path / "trace"
    path.write_text(text.replace(old, new))
    with pytest.raises(InputError) as caught:
        load_trace(path)
    assert (caught.value.line, caught.value.field) == (line, field)


def test_names_that_no_row_has_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text((FORMS / "agentic-mooncake-v1.jsonl").read_text().replace('["root"]', '["rot"]'))
    with pytest.raises(InputError, match="waits for 'rot'"):
        load_trace(path)


@given(graphs(), st.data())
def test_what_waits_is_written_and_read_again(requests: list[TraceRequest], data: st.DataObject) -> None:
    trace = Trace(requests, unit_tokens=16)
    durations = {request.row: data.draw(st.integers(0, 9)) * MS for request in requests}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        path.write_bytes(b"".join(trace_lines(trace)))
        again = load_trace(path, session_turns=None if any(request.after for request in requests) else "whole",
                           trace_block_size=None if any(request.after for request in requests) else 16)  # fmt: skip
    arrivals = sorted(simulated(OpenLoop(again), durations).items())
    assert arrivals == sorted(simulated(OpenLoop(trace), durations).items())
    shared = [[a.units == b.units for b in requests] for a in requests]
    by_row = sorted(again, key=lambda request: request.row)
    assert [[a.units == b.units for b in by_row] for a in by_row] == shared


def test_agents_are_written_and_read_again(tmp_path: Path) -> None:
    trace = load_trace(FORMS / "agentx.jsonl")
    path = tmp_path / "trace"
    path.write_bytes(b"".join(trace_lines(trace)))
    config = ReplayConfig(num_pages=1000, page_size=16)
    one, two = (replay(each, config).summary for each in (trace, load_trace(path)))
    assert {**one, "trace": ""} == {**two, "trace": ""}

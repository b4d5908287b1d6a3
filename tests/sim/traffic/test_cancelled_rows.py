"""Requests that clients gave up, in files and in workloads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvarts.base.errors import ConfigError, InputError
from kvarts.sim.traffic.editing import trace_lines
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.trace import Trace, TraceRequest
from kvarts.sim.traffic.trace_request import After
from kvarts.sim.traffic.workload import FixedLength, Workload

NS_PER_MS = 1_000_000
NS_PER_S = 1_000 * NS_PER_MS


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tokens(value: int) -> dict[str, Any]:
    return {"value": value, "unit": "tokens"}


def record(start_ns: int, metrics: dict[str, Any], cancelled_ns: int | None = None) -> dict[str, Any]:
    metadata = {
        "request_start_ns": start_ns,
        "benchmark_phase": "profiling",
        "was_cancelled": cancelled_ns is not None,
        "cancellation_time_ns": cancelled_ns,
    }
    error = {"code": 499, "type": "RequestCancellationError"} if cancelled_ns is not None else None
    return {"metadata": metadata, "metrics": metrics, "error": error}


def test_cancelled_rows_of_aiperf_are_cancelled_as_they_were(tmp_path: Path) -> None:
    done = {"input_sequence_length": tokens(550), "output_sequence_length": tokens(193)}
    start_ns = 1_759_813_207 * NS_PER_S
    rows = [
        record(start_ns, done),
        record(start_ns + 5 * NS_PER_S, {"error_isl": tokens(800)}, start_ns + 7 * NS_PER_S),
        record(start_ns + 6 * NS_PER_S, {"error_request_count": tokens(1)}, start_ns + 7 * NS_PER_S),
    ]
    trace = load_trace(written(tmp_path / "profile_export.jsonl", rows))
    read = [(r.arrival_ns, r.num_prompt_tokens, r.num_output_tokens, r.cancel_after_ns) for r in trace]
    assert read == [(0, 550, 193, None), (5 * NS_PER_S, 800, 193, 2 * NS_PER_S)]
    assert trace.left_out == {"cancelled": 1}


@pytest.mark.parametrize("has_graph", [False, True])
def test_a_cancellation_is_written_and_read_again(tmp_path: Path, has_graph: bool) -> None:
    requests = [
        TraceRequest(0, 0, bytes(8), 16, 4, session_id="a", cancel_after_ns=1500 * NS_PER_MS),
        TraceRequest(1, 0, bytes(8), 16, 4, session_id="a", delay_ns=0, after=(After(0),) if has_graph else ()),
    ]
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(trace_lines(Trace(requests, unit_tokens=16))))
    reading: dict[str, Any] = {} if has_graph else {"trace_block_size": 16, "session_turns": "whole"}
    read = load_trace(path, **reading)
    assert [request.cancel_after_ns for request in read] == [1500 * NS_PER_MS, None]


def test_a_time_that_is_none_is_named(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 16, "output_length": 2, "hash_ids": [1], "cancel_after_ms": -1}
    with pytest.raises(InputError, match=r"trace.jsonl:1: cancel_after_ms: Expected `float` >= 0.0"):
        load_trace(written(tmp_path / "trace.jsonl", [row]))


def test_a_workload_has_users_who_stop() -> None:
    described: dict[str, Any] = {
        "num_sessions": 400,
        "new_tokens": FixedLength(10),
        "output_tokens": FixedLength(10),
        "sessions_per_s": 2.0,
    }
    stops: dict[str, Any] = {"stops": 0.25, "stop_after_s": 3.0}
    plain, with_stops = list(Workload(**described).trace()), list(Workload(**described, **stops).trace())
    assert [r.arrival_ns for r in plain] == [r.arrival_ns for r in with_stops]
    after_ns = [r.cancel_after_ns for r in with_stops if r.cancel_after_ns is not None]
    assert 70 <= len(after_ns) <= 130
    assert 2 * NS_PER_S < sum(after_ns) / len(after_ns) < 4 * NS_PER_S
    with pytest.raises(ConfigError, match=r"workload\.stops"):
        Workload(**described, stops=1.5)

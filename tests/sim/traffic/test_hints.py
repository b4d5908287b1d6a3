"""Hints in rows of traces: read, kept when a trace is written, and refused by line and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvarts.base.errors import InputError
from kvarts.core.hints import Hints, RetainedRange
from kvarts.sim.traffic.editing import trace_lines
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.trace import Trace
from kvarts.sim.traffic.trace_request import After, TraceRequest

GIVEN = {"priority": 3, "ttl_ms": 5, "pause_ms": 1500.5, "tool": "bash"}
RANGES = [{"end": 256, "priority": 9}, {"start": 256, "ttl_ms": 10, "covers_output": False}]


def mooncake(path: Path, *hints: Any) -> Path:
    row = {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}
    path.write_text("".join(json.dumps(row | ({} if each is None else {"hints": each})) + "\n" for each in hints))
    return path


def test_rows_have_hints(tmp_path: Path) -> None:
    trace = load_trace(mooncake(tmp_path / "trace.jsonl", None, GIVEN, {}))
    hints = [None, Hints(priority=3, ttl_ms=5, pause_ms=1500.5, tool="bash"), Hints()]
    assert [request.hints for request in trace] == hints
    assert [trace.content(request, page_size=16, owner=0).hints for request in trace] == hints
    assert hints[1] is not None and (hints[1].ttl_ns, hints[1].pause_ns) == (5_000_000, 1_500_500_000)


def test_rows_have_ranges(tmp_path: Path) -> None:
    (request,) = load_trace(mooncake(tmp_path / "trace.jsonl", {"pause_ms": 7, "retain": RANGES}))
    assert request.hints == Hints(
        pause_ms=7,
        retain=(RetainedRange(end=256, priority=9), RetainedRange(start=256, ttl_ms=10, covers_output=False)),
    )
    trace = Trace([request], unit_tokens=512)
    hints = trace.content(request, page_size=16, owner=0).hints
    assert hints == Hints(
        pause_ms=7, retain=(RetainedRange(end=256, priority=9), RetainedRange(start=256, end=512, ttl_ms=10))
    )


@pytest.mark.parametrize("after", [(), (After(0),)])
def test_a_written_trace_has_the_same_hints(tmp_path: Path, after: tuple[After, ...]) -> None:
    given = Hints(ttl_ms=60_000, tool="bash", retain=(RetainedRange(start=4, end=8, priority=2),))
    rows = [
        TraceRequest(0, 0, (range(16),), 16, 1, hints=given, request_id="0"),
        TraceRequest(1, 10**9, (range(16),), 16, 1, request_id="1", after=after),
    ]
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(trace_lines(Trace(rows))))
    assert [request.hints for request in load_trace(path, trace_block_size=None if after else 1)] == [given, None]


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"priority": 2**31}, "hints.priority"),
        ({"ttl_ms": -1}, "hints.ttl_ms"),
        ({"pause_ms": "soon"}, "hints.pause_ms"),
        ({"tool": 5}, "hints.tool"),
        ({"ttl": 5}, "hints"),
        ({"retain": [{"start": 0}, {"start": 8, "end": 8}]}, "hints.retain[1]"),
        ({"retain": [{"start": -1}]}, "hints.retain[0].start"),
        ({"retain": [{"token_start": 1}]}, "hints.retain[0]"),
        ({"retain": [{}] * 17}, "hints.retain"),
        (5, "hints"),
    ],
)
def test_a_bad_hint_is_named_by_line_and_field(tmp_path: Path, bad: Any, field: str) -> None:
    with pytest.raises(InputError) as caught:
        load_trace(mooncake(tmp_path / "trace.jsonl", None, bad))
    assert (caught.value.line, caught.value.field) == (2, field)

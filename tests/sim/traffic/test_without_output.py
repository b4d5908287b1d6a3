"""Requests without output tokens are left out and counted, in every form; those that wait for them go on."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.errors import InputError
from kvarts.sim.traffic.formats import FORMS, TraceForm, load_trace
from kvarts.sim.traffic.graph import with_output
from kvarts.sim.traffic.trace_request import After, TraceRequest

OUTPUTS = (
    r'("num_output_tokens":)2(,"output":)\[8,9\]',
    r'("output_tokens":)\d+()',
    r'("output_sequence_length":\{"value":)9()',
    r'("output_lens":\[)128()',
    r'("out":)5()',
    r'("output_length":)\d+()',
    r'("completion_tokens":)\d+()',
    r'("output":)\d+()',
    r'("gen_ai.usage.output_tokens","value":\{"intValue":")80()',
)
REASONS = {"recorded": "cancelled before a token"}


def without_output(form: TraceForm) -> str:
    """The example of a form with no output tokens."""
    text = form.example
    if form.is_table:
        header, row = text.split("\n")
        names = ("GeneratedTokens", "Response tokens", "completion_tokens")
        place = next(at for at, name in enumerate(header.split(",")) if name in names)
        cells = row.split(",")
        cells[place] = "0"
        return f"{header}\n{','.join(cells)}"
    for pattern in OUTPUTS:
        text = re.sub(pattern, lambda match: f"{match[1]}0{match[2]}{'[]' if match[2] else ''}", text)
    text = text.replace('"thoughts":64', '"thoughts":0')
    assert text != form.example
    return text


@pytest.mark.parametrize("form", [form for form in FORMS if form.name != "dag"], ids=lambda form: form.name)
def test_every_form_leaves_them_out_and_counts_them(form: TraceForm, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(without_output(form))
    reason = REASONS.get(form.name, "without output tokens")
    with pytest.raises(InputError, match=f"has no requests: 1 {reason}"):
        load_trace(path)


@pytest.mark.parametrize("name", ["mooncake", "bailian", "dynamo", "openai", "litellm", "claude-code", "azure"])
def test_others_of_the_file_are_read(name: str, tmp_path: Path) -> None:
    form = next(form for form in FORMS if form.name == name)
    header, *rest = form.example.split("\n") if form.is_table else ["", form.example]
    gone = without_output(form).split("\n")[-1].replace("req_1", "req_0").replace("msg_1", "msg_0")
    gone = gone.replace('"uuid":"u"', '"uuid":"v"').replace("chatcmpl-1", "chatcmpl-0")
    path = tmp_path / "trace"
    path.write_text("\n".join([*([header] if form.is_table else []), gone, *rest]) + "\n")
    trace = load_trace(path)
    assert [(request.arrival_ns, request.num_output_tokens > 0) for request in trace] == [(0, True)]
    assert trace.left_out == {"without output tokens": 1}


def turn(row: int, **more: Any) -> TraceRequest:
    fields = {"arrival_ns": 0, "num_output_tokens": 1, "session_id": "s", **more}
    return TraceRequest(row=row, units=b"", num_prompt_tokens=1, **fields)


def test_a_turn_after_one_without_output_waits_for_the_turn_before_and_both_delays() -> None:
    turns = [turn(0), turn(1, delay_ns=3, num_output_tokens=0), turn(2, delay_ns=4), turn(3, delay_ns=5)]
    left_out: Counter[str] = Counter()
    assert with_output(turns, left_out) == [turn(0), turn(2, delay_ns=7), turn(3, delay_ns=5)]
    assert left_out == {"without output tokens": 1}


def test_turns_of_deltas_keep_the_prompt_of_a_turn_without_output(tmp_path: Path) -> None:
    row = '{"session_id":"s","input_length":4,"hash_ids":[%d],"output_length":%d,"timestamp":%d}\n'
    path = tmp_path / "trace.jsonl"
    path.write_text(row % (1, 2, 0) + row % (2, 0, 5) + row % (3, 2, 9))
    trace = load_trace(path, trace_block_size=4, session_turns="deltas")
    assert [request.num_prompt_tokens for request in trace] == [4, 4 + 2 + 4 + 4]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[TraceRequest], list[int]]:
    """Requests in order of arrival, and how long each runs."""
    requests: list[TraceRequest] = []
    arrival = 0
    for row in range(draw(st.integers(1, 9))):
        arrival += draw(st.integers(0, 3))
        after: tuple[After, ...] = ()
        if row and draw(st.booleans()):
            rows = draw(st.lists(st.integers(0, row - 1), min_size=1, max_size=2, unique=True))
            after = tuple(After(each, draw(st.integers(0, 4)), draw(st.booleans())) for each in rows)
        session = draw(st.sampled_from([None, "a", "b"]))
        turns = [each.row for each in requests if session is not None and each.session_id == session]
        if after and turns and turns[-1] not in [each.row for each in after]:
            after = (*after, After(turns[-1], 1))
        is_later = after or turns
        delay = draw(st.sampled_from([None, 0] if after else [None, 0, 2])) if is_later else None
        requests.append(
            turn(
                row,
                arrival_ns=arrival,
                num_output_tokens=draw(st.sampled_from([0, 1, 1])),
                session_id=session,
                delay_ns=delay,
                after=after,
            )
        )
    return requests, draw(st.lists(st.integers(1, 9), min_size=len(requests), max_size=len(requests)))


def starts(requests: list[TraceRequest], runs: list[int], order: list[int]) -> dict[int, int]:
    """When each request of an idle engine starts: a naive reading of what TraceRequest documents."""
    start: dict[int, int] = {}
    end: dict[int, int] = {}
    turns: dict[str, int] = {}
    for request in sorted(requests, key=lambda each: order.index(each.row)):
        after = request.after
        if not after and request.session_id in turns:
            after = (After(turns[request.session_id], request.delay_ns or 0),)
        times = [(start if each.of_arrival else end)[each.row] + each.delay_ns for each in after]
        if not after or request.delay_ns is None:
            times.append(request.arrival_ns)
        start[request.row] = max(times)
        end[request.row] = start[request.row] + (runs[request.row] if request.num_output_tokens else 0)
        if request.session_id is not None:
            turns[request.session_id] = request.row
    return start


@given(graphs())
def test_the_others_start_as_if_those_had_ended_at_once(drawn: tuple[list[TraceRequest], list[int]]) -> None:
    requests, runs = drawn
    order = [request.row for request in requests]
    expected = starts(requests, runs, order)
    kept = with_output(requests, Counter())
    assert sorted(request.row for request in kept) == [each.row for each in requests if each.num_output_tokens]
    if kept:
        assert kept[0].arrival_ns == 0 or len(kept) == len(requests)
        found = starts(kept, runs, order)
        moved = {row: expected[row] - found[row] for row in found}
        assert len(set(moved.values())) == 1

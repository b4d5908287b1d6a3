"""`kvarts trace convert --to TOOL`: what tools read in the rows, by a naive model of each and by what they really sent.

`tool_rows.json` has rows, and for AIPerf 0.13.0 and GuideLLM 0.8.1 the length of each prompt that they sent for them,
and the tokens in common with the best earlier prompt, as trace_readers.py of ae1fbfaf prints them; up to 15 more are
chance.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.content import pack_units
from kvarts.sim.traffic.editing import TOOLS, tool_lines
from kvarts.sim.traffic.trace import Trace, TraceRequest, spell

RECORDED = json.loads((Path(__file__).parent / "tool_rows.json").read_text())


def sent(rows: list[dict[str, Any]], size: int) -> list[list[tuple[int, int]]]:
    """The prompts that AIPerf and GuideLLM make: an id has the tokens of its first use, and as many."""
    length_of: dict[int, int] = {}
    prompts = []
    for row in rows:
        tokens: list[tuple[int, int]] = []
        for place, each in enumerate(row["hash_ids"]):
            rest = row["input_length"] - place * size
            length = length_of.setdefault(each, min(size, rest))
            tokens += [(each, token) for token in range(length)]
        prompts.append(tokens)
    return prompts


def common(one: list[Any], other: list[Any]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def shared(prompts: list[list[Any]]) -> list[int]:
    return [max((common(prompt, other) for other in prompts[:at]), default=0) for at, prompt in enumerate(prompts)]


def tokens_of(request: TraceRequest, size: int) -> list[tuple[bytes, int]]:
    units = spell(request.units)
    ids = [units[at : at + 8] for at in range(0, len(units), 8)]
    return [(each, token) for each in ids for token in range(size)][: request.num_prompt_tokens]


@pytest.mark.parametrize("tool", ["aiperf", "guidellm"])
def test_the_tools_sent_what_the_naive_model_makes(tool: str) -> None:
    trace = Trace(
        [
            TraceRequest(row, each["timestamp"] * 10**6, pack_units(each["hash_ids"]), each["input_length"], 1)
            for row, each in enumerate(RECORDED["rows"])
        ],
        unit_tokens=512,
    )
    lines, said = tool_lines(trace, tool)
    prompts = sent([json.loads(line) for line in lines], 512)
    assert [len(prompt) for prompt in prompts] == [length for length, _ in RECORDED[tool]]
    assert all(0 <= theirs - own < 16 for own, (_, theirs) in zip(shared(prompts), RECORDED[tool], strict=True))
    assert said[1:] == ["prompts end within 1 hash ids that others use whole: they do not share their last tokens"]


@given(st.data(), st.sampled_from(sorted(TOOLS)))
def test_rows_have_the_lengths_and_shared_prefixes_of_the_trace(data: st.DataObject, tool: str) -> None:
    size = data.draw(st.integers(1, 4))
    requests, at_ns = [], 0
    for row in range(data.draw(st.integers(1, 8))):
        num_tokens = data.draw(st.integers(1, 4 * size))
        ids = data.draw(st.lists(st.integers(0, 3), min_size=-(-num_tokens // size), max_size=-(-num_tokens // size)))
        at_ns += data.draw(st.sampled_from([0, 1_500_000, 10**9]))
        requests.append(TraceRequest(row, at_ns, pack_units([2**63 + each for each in ids]), num_tokens, 1 + row))
    trace = Trace(requests, unit_tokens=size)
    lines, said = tool_lines(trace, tool)
    rows = [json.loads(line) for line in lines]
    assert [row["output_length"] for row in rows] == [1 + row for row in range(len(rows))]
    unit = 1.0 if tool == "guidellm" else 1e3
    assert [round(row["timestamp"] / unit * 1e9) for row in rows] == [request.arrival_ns for request in requests]
    assert all(row["input_length"] == request.num_prompt_tokens for row, request in zip(rows, requests, strict=True))
    own = [tokens_of(request, size) for request in requests]
    if tool == "dynamo":
        read: list[list[Any]] = [
            [(each, token) for each in row["hash_ids"] for token in range(size)][: row["input_length"]] for row in rows
        ]
    else:
        read = sent(rows, size)
    assert [len(prompt) for prompt in read] == [request.num_prompt_tokens for request in requests]
    for at, (mine, theirs) in enumerate(zip(own, read, strict=True)):
        for before in range(at):
            expected, found = common(mine, own[before]), common(theirs, read[before])
            is_split = any("prompts end within" in text for text in said)
            assert found == expected or (is_split and found == expected // size * size)


@pytest.mark.parametrize(("tool", "keeps"), [("aiperf", False), ("guidellm", False), ("dynamo", True)])
def test_turns_wait_where_the_tool_lets_them(tool: str, *, keeps: bool) -> None:
    turns = [
        TraceRequest(row, 0, pack_units(range(row + 1)), row + 1, 1, session_id="s", delay_ns=row * 10**9 or None)
        for row in range(3)
    ]
    lines, said = tool_lines(Trace(turns), tool)
    rows = [json.loads(line) for line in lines]
    assert ["session_id" in row for row in rows] == [keeps] * 3
    if keeps:
        assert [row.get("delay") for row in rows] == [None, 1000, 2000]
        assert ["timestamp" in row for row in rows] == [True, False, False]
        assert len(said) == 1
    else:
        times = [row["timestamp"] for row in rows]
        assert [after - before for before, after in pairwise(times)] == ([1, 2] if tool == "guidellm" else [1000, 2000])
        assert said[1].startswith("2 requests wait for none")


def test_fields_that_a_tool_does_not_read_are_named() -> None:
    request = TraceRequest(0, 5 * 10**6, pack_units([1]), 1, 1, tenant="t", priority=2)
    lines, said = tool_lines(Trace([request]), "guidellm")
    assert json.loads(lines[0]).keys() == {"timestamp", "input_length", "output_length", "hash_ids"}
    assert said[1:] == ["guidellm does not read priority, tenant: left out", "time counts from the first request"]


def test_a_client_that_gives_up_at_once_is_named_as_in_the_trace() -> None:
    request = TraceRequest(0, 0, pack_units([1]), 1, 1, cancel_after_ns=0)
    for tool in ("aiperf", "guidellm", "dynamo"):
        assert f"{tool} does not read cancel_after_ms: left out" in tool_lines(Trace([request]), tool)[1]


def test_the_command_writes_rows_and_says_how_they_are_read(
    tmp_path: Path, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in RECORDED["rows"]))
    assert run_command("trace", "convert", trace, "--to", "guidellm", "-o", out) == 0
    assert "guidellm reads these lines with --profile kind=replay" in capsys.readouterr().err
    assert json.loads(out.read_text().splitlines()[1])["timestamp"] == RECORDED["rows"][1]["timestamp"] / 1e3

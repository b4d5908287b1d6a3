"""AIPerf's dag_jsonl: who waits for whom, and prompts that begin with what the conversation had."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest

from kvarts.base.errors import InputError
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.formats import load_trace

from oracles.naive_forms import NaiveRequest, naive_hits

PATH = Path(__file__).parent / "forms" / "dag.jsonl"
MS = 1_000_000


def words(message: dict[str, Any]) -> list[Hashable]:
    return ["<", message["role"], ">", *re.findall(r"\w+|[^\w\s]", message["content"])]


def naive() -> dict[str, list[NaiveRequest]]:
    """The turns of each conversation, by hand: `write` continues the root, `test` is whole, others begin anew."""
    read = {row["session_id"]: row["turns"] for row in map(json.loads, PATH.read_text().splitlines())}
    found: dict[str, list[NaiveRequest]] = {}
    for name, turns in read.items():
        history: list[Hashable] = []
        if name == "write":
            history = found["root"][-1].prompt + found["root"][-1].output
        for place, turn in enumerate(turns):
            prompt = history + [word for message in turn["messages"] for word in words(message)]
            output: list[Hashable] = [(name, place, number) for number in range(turn["max_tokens"])]
            found.setdefault(name, []).append(NaiveRequest(prompt, len(output), output))
            history = prompt + output
    return found


def test_turns_begin_with_what_was_said_and_wait_for_what_was_begun() -> None:
    trace = load_trace(PATH)
    known: dict[str, list[Any]] = {}
    for request in trace:
        known.setdefault(request.session_id or "", []).append(request)
    expected = naive()
    for name, turns in expected.items():
        assert [(r.num_prompt_tokens, r.num_output_tokens) for r in known[name]] == [
            (len(turn.prompt), turn.num_output) for turn in turns
        ]
    names = {request.row: (name, place) for name, turns in known.items() for place, request in enumerate(turns)}
    waits = {
        names[request.row]: {(*names[each.row], each.delay_ns // MS) for each in request.after} for request in trace
    }
    assert waits == {
        ("root", 0): set(),
        ("root", 1): {("root", 0, 20), ("search", 1, 20)},
        ("root", 2): {("root", 1, 0), ("check", 0, 0)},
        ("search", 0): {("root", 0, 0)},
        ("search", 1): {("search", 0, 0)},
        ("check", 0): {("root", 0, 0)},
        ("write", 0): {("root", 2, 5)},
        ("test", 0): {("root", 2, 0)},
    }
    report = replay(trace, ReplayConfig(num_pages=10_000, page_size=4))
    by_row = [names[row] for row in report.request_columns["row"].tolist()]
    in_order = [expected[name][place] for name, place in by_row]
    assert report.summary["num_cached_tokens"] == naive_hits(in_order, 4) > 60
    assert any("tokens are words" in said for said in trace.said())


def edited(tmp_path: Path, *edits: tuple[str, str]) -> Path:
    text = PATH.read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "dag.jsonl"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("old", "new", "line", "what"),
    [
        ('"forks": ["write"', '"forks": ["gone"', 1, "begins 'gone', and no line has this session_id"),
        ('"max_tokens": 7', '"max_tokens": 7, "forks": ["check"]', 3, "is begun by a conversation that it begins"),
        ('"session_id": "check"', '"session_id": "search"', 3, "is that of another conversation"),
        ('"max_tokens": 12', '"max_tokens": 1073741824', 4, "an answer of more than 1,048,576 tokens"),
        ('"max_tokens": 7', '"max_tokens": "7"', 3, "Expected `int | null`, got `str`"),
        ('"max_tokens": 7', '"temperature": 1', 3, "Object contains unknown field `temperature`"),
        ('"max_tokens": 7', '"delay": 1.0', 3, "is missing"),
    ],
)
def test_a_malformed_conversation_is_named(tmp_path: Path, old: str, new: str, line: int, what: str) -> None:
    with pytest.raises(InputError) as caught:
        load_trace(edited(tmp_path, (old, new)))
    assert (caught.value.line, what in caught.value.what) == (line, True), str(caught.value)


def test_a_conversation_that_is_begun_twice_is_two_sessions(tmp_path: Path) -> None:
    path = edited(
        tmp_path, ('"forks": ["write", "test"]', '"forks": ["write", {"child": "write", "background": true}]')
    )
    sessions = [request.session_id for request in load_trace(path) if "write" in (request.session_id or "")]
    assert sessions == ["write", "write#2"]


def test_answers_without_a_length_have_that_which_is_given(tmp_path: Path) -> None:
    path = tmp_path / "dag"
    path.write_text('{"session_id":"a","turns":[{"messages":[{"role":"user","content":"Hi there"}]}]}')
    with pytest.raises(InputError, match="has no output length in any row"):
        load_trace(path)
    assert [request.num_output_tokens for request in load_trace(path, output_tokens=3)] == [3]

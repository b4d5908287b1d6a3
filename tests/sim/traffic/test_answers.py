"""Answers that the next turn's prompt tells: hits of them against a naive count, and whether hit ratios are exact."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.implied import with_implied_answers
from kvarts.sim.traffic.mooncake import load_mooncake
from kvarts.sim.traffic.trace import Trace

from oracles.naive_forms import NaiveRequest, naive_hits, own

AGENTS = Path(str(files("kvarts") / "data" / "coding-agents"))
FORMS = Path(__file__).parent / "forms"


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Trace, list[NaiveRequest]]:
    """Turns token by token, each the one before, its answer and something new, or not; told in whole blocks of 8."""
    from kvarts.core.content import pack_units
    from kvarts.sim.traffic.trace import TraceRequest

    unit = 8
    rows: list[TraceRequest] = []
    naive: list[NaiveRequest] = []
    blocks: dict[tuple[Hashable, ...], int] = {}
    for session in range(draw(st.integers(1, 3))):
        history: list[Hashable] = [("system", place) for place in range(draw(st.integers(1, 20)))]
        for _ in range(draw(st.integers(1, 4))):
            row = len(rows)
            if draw(st.booleans()):
                history = history + own(("user", row), draw(st.integers(1, 20)))
            else:
                history = history[: draw(st.integers(1, len(history)))]
            num_output = draw(st.integers(1, 20))
            ids = [blocks.setdefault(tuple(history[:end]), len(blocks)) for end in range(unit, len(history) + 1, unit)]
            if len(history) % unit:
                ids.append((1 << 63) + row)
            rows.append(
                TraceRequest(row, 0, pack_units(ids), len(history), num_output, session_id=str(session), delay_ns=0)
            )
            naive.append(NaiveRequest(list(history), num_output))
            history = history + own(("answer", row), num_output)
    told: list[NaiveRequest] = []
    for row in reversed(range(len(rows))):
        prompt, num_output = naive[row].prompt, naive[row].num_output
        whole = len(prompt) // unit * unit
        # What a trace tells of a token is its block and its place in that.
        known: list[Hashable] = [(tuple(prompt[: place // unit * unit + unit]), place) for place in range(whole)]
        view = NaiveRequest(known + own(("rest", row), len(prompt) - whole), num_output)
        if told and rows[row + 1].session_id == rows[row].session_id:
            after = naive[row + 1].prompt
            begins_so = after[:whole] == prompt[:whole] and len(after) // unit * unit >= whole
            if begins_so and len(after) >= len(prompt) + num_output:
                both = (told[-1].prompt + told[-1].output)[: len(prompt) + num_output]
                view = NaiveRequest(both[: len(prompt)], num_output, both[len(prompt) :])
        told.append(view)
    naive = told[::-1]
    return Trace(rows, unit_tokens=unit), naive


@given(conversations(), st.sampled_from([1, 2, 4, 8, 16]))
@pytest.mark.laws
def test_hits_of_implied_answers_are_those_of_a_naive_count(
    case: tuple[Trace, list[NaiveRequest]], page_size: int
) -> None:
    trace, naive = case
    report = replay(with_implied_answers(trace), ReplayConfig(num_pages=10_000, page_size=page_size, concurrency=1))
    in_order = [naive[row] for row in report.request_columns["row"].tolist()]
    assert report.summary["num_cached_tokens"] == naive_hits(in_order, page_size)


def test_the_bundled_sessions_hit_their_answers() -> None:
    trace = load_trace(AGENTS)
    answered = with_implied_answers(trace)
    count = sum(request.answered_units is not None for request in answered)
    assert count == naive_count(AGENTS)
    config = ReplayConfig(num_pages=1_000_000, concurrency=1)
    plain, more = (replay(each, config).summary for each in (trace, answered))
    assert plain["num_cached_tokens"] < more["num_cached_tokens"]
    assert more["num_cached_tokens"] - plain["num_cached_tokens"] <= sum(r.num_output_tokens for r in trace) + 80 * 406


def naive_count(folder: Path) -> int:
    import gzip

    count = 0
    for path in folder.glob("*.json.gz"):
        file: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
        turns = [each for each in file["requests"] if each["type"] != "subagent"]
        for before, turn in pairwise(turns):
            is_longer = turn["in"] >= before["in"] + max(1, before["out"])
            count += is_longer and turn["hash_ids"][: len(before["hash_ids"])] == before["hash_ids"]
    return count


def test_a_report_says_whether_hits_are_exact(
    tmp_path: Path, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    def turn(length: int, ids: list[int]) -> dict[str, Any]:
        return {"timestamp": 0, "input_length": length, "output_length": 12, "hash_ids": ids, "session_id": "s"}

    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(turn(*each)) + "\n" for each in ((1000, [1, 2]), (1100, [1, 3, 4]))))
    trace = load_mooncake(path)
    assert not trace.tells_hits
    assert with_implied_answers(trace).tells_hits
    assert load_trace(FORMS / "mooncake-deltas.jsonl", session_turns="deltas").tells_hits
    assert not load_trace(FORMS / "azure.csv").tells_hits
    assert run_command("replay", path) == 0
    assert "at least 24.4 % of prompt tokens (512 of 2,100)" in capsys.readouterr().out
    assert run_command("replay", path, "--set", "answers=implied") == 0
    assert "  48.0 % of prompt tokens (1,008 of 2,100)" in capsys.readouterr().out
    assert run_command("replay", path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["prefix_hit_ratio_is_lower_bound"] is True

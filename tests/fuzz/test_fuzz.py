"""The fuzzer of command lines: what it draws, and what it would notice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fuzz.__main__ import Fuzzer
from fuzz.laws import broken_laws
from fuzz.lines import ELSEWHERE, RUN_FILES, candidates

from builders.calls import commands

ROWS = [
    {"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]},
    {"timestamp": 5, "input_length": 700, "output_length": 9, "hash_ids": [1, 3]},
    {"timestamp": 400, "input_length": 800, "output_length": 9, "hash_ids": [1, 4]},
]


def test_every_option_of_a_replay_is_drawn_or_given_but_those_that_reach_beyond_its_files() -> None:
    drawn = {param.opts[0] for param in candidates("replay")}
    every = {param.opts[0] for param in commands()["replay"].every if param.param_type_name == "option"}
    left_out = {name for name in every if name.startswith(ELSEWHERE)}
    assert every == drawn | left_out | set(RUN_FILES) | {"--set", "--config"}


@pytest.fixture
def outputs(tmp_path: Path, kvarts: Callable[..., tuple[int, str, str]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A report and its rows."""
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    code, out, err = kvarts("replay", tmp_path / "trace.jsonl", "--json", "--requests", tmp_path / "rows.jsonl")
    assert code == 0, err
    return json.loads(out), [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]


def fleet(**changes: Any) -> dict[str, Any]:
    """The report of a fleet with one pool."""
    return {"pools": [{"num_preemptions": 0, "replicas": [0], **changes}], "transferred_bytes": 0}


DAMAGES: dict[str, Callable[[dict[str, Any], list[dict[str, Any]]], object]] = {
    "num_preemptions is": lambda report, rows: rows[0].update(preemptions=1, admissions=2),
    "num_output_tokens is": lambda report, rows: report.update(num_output_tokens=1),
    "rows, ": lambda report, rows: rows.pop(),
    "found 9999 of": lambda report, rows: rows[1].update(cached_tokens=9999),
    "are not in order": lambda report, rows: rows[1].update(first_token_ms=0.0),
    "stands after": lambda report, rows: rows.reverse(),
    "ttft_ms p50 is": lambda report, rows: report["ttft_ms"].update(p50=1.0),
    "hits by tier": lambda report, rows: report["num_cached_tokens_by_tier"].update(device=1),
    "not that of its replicas": lambda report, rows: report["replicas"][0].update(num_steps=0),
    "busy_pct is": lambda report, rows: report.update(busy_pct=1.5),
    "of cancelled requests is": lambda report, rows: report.update(cancelled={"before_first_token": 1}),
    "not that of its pools": lambda report, rows: report.update(fleet=fleet(num_preemptions=5)),
    "in no pool, or in two": lambda report, rows: report.update(fleet=fleet(replicas=[])),
    "transferred_bytes is": lambda report, rows: report.update(fleet={**fleet(), "transferred_bytes": 7}),
    "without a token, a time": lambda report, rows: rows[0].update(last_token_ms=None),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_output_breaks_a_law(what: str, outputs: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    report, rows = outputs
    assert list(broken_laws(report, rows)) == []
    DAMAGES[what](report, rows)
    assert any(what in law for law in broken_laws(report, rows))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_no_random_line_fails(seed: int) -> None:
    fuzzer = Fuzzer(seed, processes=0.02)
    for number in range(150):
        fuzzer.step(number)
    fuzzer.close()
    assert fuzzer.failures == []
    assert fuzzer.counts["accepted"] >= 100

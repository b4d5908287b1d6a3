"""Where the time of a request went: sums that add up, the slowest first, with the cause of the wait."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvarts.proof.explain.reading import load_journal
from kvarts.proof.explain.sums import RequestTimes, slowest, sum_of, times_in

UNITS = {"ms": 1.0, "s": 1e3}
TERM = re.compile(r"([\d.]+) (ms|s) (queue|load|prefill)")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the bundled sessions, with host memory so that there are loads."""
    from kvarts.cli.main import main

    path = tmp_path_factory.mktemp("sums") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["kvarts", "replay", "--run-dir", str(path), "--host-memory", "64GiB"])
        assert main() == 0
    return path


def rows_in(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "requests.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_the_slowest_are_listed_with_sums_that_add_up(
    run: Path, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("story", run) == 0
    heading, empty, *lines, gap, why = capsys.readouterr().out.splitlines()
    assert heading == "the slowest 10 of 406 requests, by time to first token" and (empty, gap) == ("", "")
    rows = {row["request_id"]: row for row in rows_in(run)}
    by_ttft = sorted(rows.values(), key=lambda row: row["arrival_ms"] - row["first_token_ms"])
    assert [line.split()[0] for line in lines] == [row["request_id"] for row in by_ttft[:10]]
    for line in lines:
        row = rows[line.split()[0]]
        whole = row["first_token_ms"] - row["arrival_ms"]
        parts = sum(float(value) * UNITS[unit] for value, unit, _ in TERM.findall(line))
        assert parts == pytest.approx(whole, rel=0.02)
        assert f"then {row['output_tokens'] - 1:,} tokens at " in line
    assert why == f"why: kvarts story {run} --request {lines[0].split()[0]}"


@pytest.mark.slow
def test_a_story_begins_with_the_sum(
    run: Path, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("story", run) == 0
    slow = capsys.readouterr().out.splitlines()[2]
    name, text = slow.split(maxsplit=1)
    assert run_command("story", run, "--request", name) == 0
    first, empty, second, *_ = capsys.readouterr().out.splitlines()
    assert (first, empty) == (text, "") and "arrived" in second


@pytest.mark.slow
def test_loads_are_a_term_of_their_own(
    run: Path, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    journal = load_journal(run / "events.jsonl.gz")
    loaded = next(line.request for line in journal.lines if type(line).__name__ == "LoadingLine")
    assert run_command("story", run, "--request", journal.names[loaded]) == 0
    assert " load + " in capsys.readouterr().out.splitlines()[0]


@pytest.mark.slow
def test_a_journal_alone_times_last_tokens(
    run: Path, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("story", run / "events.jsonl.gz") == 0
    out = capsys.readouterr().out
    assert out.startswith("the slowest 10 of 406 requests, by time to last token: first tokens are timed in a run")
    assert out.count("E2E ") == 10
    known = {each.name: each for each in times_in(load_journal(run / "events.jsonl.gz"))}
    assert all(known[row["request_id"]].last_token_ms == row["last_token_ms"] for row in rows_in(run))


def times(name: str, **values: float) -> RequestTimes:
    return RequestTimes(name=name, arrival_ms=0.0, **values)  # type: ignore[arg-type]


def test_ties_go_to_the_earlier_and_what_made_no_token_is_left_out() -> None:
    requests = [
        times("a", first_token_ms=5.0),
        times("b"),
        times("c", first_token_ms=9.0),
        times("d", first_token_ms=5.0),
    ]
    assert [each.name for each in slowest(requests, 3)] == ["c", "a", "d"]


@pytest.mark.parametrize(
    ("request_times", "text"),
    [
        (times("a"), "never admitted"),
        (times("a", first_admitted_ms=3.0), "3.0 ms queue, then no token"),
        (
            times("a", first_admitted_ms=486.0, first_token_ms=680.0, last_token_ms=9276.8, num_output_tokens=399),
            "TTFT 680.0 ms = 486.0 ms queue + 194.0 ms prefill; then 398 tokens at 21.6 ms",
        ),
        (
            times(
                "a",
                first_admitted_ms=1.0,
                first_token_ms=2.0,
                last_token_ms=2.0,
                num_output_tokens=1,
                num_preemptions=2,
            ),
            "TTFT 2.0 ms = 1.0 ms queue + 1.0 ms prefill; preempted 2 times",
        ),
    ],
)
def test_sums_in_words(request_times: RequestTimes, text: str) -> None:
    assert sum_of(request_times, None) == text

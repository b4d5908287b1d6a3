"""What is recorded: rows against the naive engine, thinning, forms, and files written while the engine runs."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts import ReplayConfig, replay
from kvarts.base.errors import ConfigError
from kvarts.core.config import EngineConfig
from kvarts.core.content import Content
from kvarts.core.events import StepDone
from kvarts.core.request import Request
from kvarts.cost.simulated import SimExecutor
from kvarts.proof.record.live import LiveTimeline
from kvarts.proof.record.timeline import Timeline, columns_of, timelines_of
from kvarts.proof.verify.verifier import verify, verify_file
from kvarts.sim.arrivals import Arrivals
from kvarts.sim.driver import Driver
from kvarts.sim.report.report import Report
from kvarts.sim.report.requests import RequestLog
from kvarts.sim.report.steps import StepLog
from kvarts.sim.router import RoundRobin
from kvarts.sim.traffic.mooncake import load_mooncake
from kvarts.sim.traffic.source import OpenLoop

from builders.case import Case, cases
from builders.engines import make_replica
from builders.guesser import Guesser, guessers
from builders.serving import Arrival, serve, served
from builders.toy_model import ToyExecutor

SUFFIXES = (".json", ".jsonl", ".parquet", ".json.gz", ".jsonl.gz", ".parquet.gz")


def rows_of(timeline: Timeline) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(timeline.to_json())["timeline"]
    return rows


@pytest.fixture(scope="module")
def report() -> Report:
    """The sample on a pool far too small: preemptions, waiting, and rests at the end."""
    sample = Path(__file__).parents[3] / "src" / "kvarts" / "data" / "mooncake-conversation-1000.jsonl"
    return replay(load_mooncake(sample), ReplayConfig(num_pages=700, page_size=512))


@pytest.mark.laws
@given(cases())
def test_rows_are_what_the_naive_engine_counts(case: Case) -> None:
    requests, engines = case.naive()
    report = replay(case.trace(), case.config())
    for replica, (engine, timeline) in enumerate(zip(engines, timelines_of(report), strict=True)):
        steps = [row for row in rows_of(timeline) if row["active_seqs"]]
        assert len(steps) == len(engine.steps)
        asked = iter(engine.preempted)
        for number, (row, step) in enumerate(zip(steps, engine.steps, strict=True)):
            assert (row["step"], row["t_ms"]) == (number, step.start_ns / 1e6)
            assert (row["used_blocks"], row["cached_blocks"]) == (step.used, step.cached)
            assert row["free_blocks"] == case.num_pages - step.used
            assert (row["active_seqs"], row["waiting"]) == (step.running, step.waiting)
            assert row["preempted_seqs"] == step.preempted == len(row.get("asked", []))
            for ask in row.get("asked", []):
                victim, asker, lost = next(asked)
                assert (ask["victim"], ask["request"], ask["lost_tokens"]) == (str(victim), str(asker), lost)
        rests = [row for row in rows_of(timeline) if not row["active_seqs"]]
        assert all(row["used_blocks"] == 0 for row in rests)
        arrivals = [r.arrival_ns for r in requests if r.replica == replica and not r.rejected]
        ends = [(step, step.start_ns + step.duration_ns) for step in engine.steps if step.leaves_nobody]
        idle = [end for step, end in ends if not any(step.start_ns < arrival < end for arrival in arrivals)]
        assert [row["t_ms"] for row in rests] == [end / 1e6 for end in idle]
        rows = rows_of(timeline)
        assert sum(row["freed"] for row in rows) == sum(row["allocated"] for row in rows) == engine.num_released


@pytest.mark.laws
@given(cases(), st.integers(1, 9))
def test_every_recording_is_in_order_and_the_same_however_it_was_made(case: Case, every: int) -> None:
    """L1 seen from outside, L5 for the bytes of a timeline, and thinning that keeps what matters."""
    fast, slow = (replay(case.trace(), case.config(step_by_step=slowly)) for slowly in (False, True))
    for timeline, other in zip(timelines_of(fast), timelines_of(slow), strict=True):
        assert timeline.to_json() == other.to_json()
        verdict = verify(timeline.to_json())
        assert verdict.verdict == ("ok" if len(timeline) else "inconclusive"), verdict.to_text()
        thin = timeline.thinned(every)
        verdict = verify(thin.to_json())
        assert verdict.verdict == ("ok" if len(timeline) else "inconclusive"), verdict.to_text()
        assert (thin.peak_used_pct, thin.preemption_count) == (timeline.peak_used_pct, timeline.preemption_count)
        for name in ("allocated", "freed"):
            assert thin.columns[name].sum() == timeline.columns[name].sum()
        kept = rows_of(thin)
        rows = rows_of(timeline)
        assert [row["asked"] for row in kept if "asked" in row] == [row["asked"] for row in rows if "asked" in row]
        if rows:
            last_step = [row["step"] for row in rows if row["active_seqs"]][-1]
            assert kept[0]["step"] == 0 and last_step in [row["step"] for row in kept if row["active_seqs"]]
            assert len(kept) <= len(rows) // every + 4 + timeline.preemption_count


@pytest.mark.long
def test_all_forms_hold_the_same(report: Report, tmp_path: Path) -> None:
    timeline = timelines_of(report)[0]
    assert timeline.preemption_count > 0
    for suffix in SUFFIXES:
        path = tmp_path / f"timeline{suffix}"
        timeline.write(path)
        verdict = verify_file(path)
        assert (verdict.verdict, verdict.num_rows) == ("ok", len(timeline)), verdict.to_text()
        assert {rule.status for rule in verdict.rules} == {"ok"}
        first = path.read_bytes()
        timeline.write(path)
        assert path.read_bytes() == first
    body = json.loads((tmp_path / "timeline.json").read_text())
    assert [row["step"] for row in body["timeline"]] == timeline.columns["step"].tolist()
    lines = gzip.decompress((tmp_path / "timeline.jsonl.gz").read_bytes()).splitlines()
    assert [json.loads(line) for line in lines[1:-1]] == body["timeline"]
    import pyarrow.parquet as pq

    table = pq.read_table(tmp_path / "timeline.parquet")
    for name in columns_of([]):
        assert table[name].to_pylist() == timeline.columns[name].tolist()
    assert [row for row in table["asked"].to_pylist() if row] == [r["asked"] for r in body["timeline"] if "asked" in r]


def test_what_was_asked_for_goes_by_the_names_of_the_trace(report: Report) -> None:
    names = set(report.requests["request_id"])
    asks = [ask for row in rows_of(timelines_of(report)[0]) for ask in row.get("asked", [])]
    assert asks
    assert all({ask["request"], ask["victim"]} <= names and ask["blocks"] > ask["free_blocks"] for ask in asks)


@pytest.mark.parametrize("name", ["timeline.csv", "timeline", "timeline.gz"])
def test_another_suffix_is_refused(report: Report, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"End it in \.json"):
        timelines_of(report)[0].write(tmp_path / name)
    assert not list(tmp_path.iterdir())


# Live -----------------------------------------------------------------------------------------------------


def run_live(path: Path, config: ReplayConfig, *, step_by_step: bool) -> Timeline:
    """The sample with a live writer; and, for comparison, the timeline of the same run."""
    sample = Path(__file__).parents[3] / "src" / "kvarts" / "data" / "mooncake-conversation-1000.jsonl"
    trace = load_mooncake(sample)
    with LiveTimeline(path, total_blocks=config.num_pages, block_size_tokens=config.page_size) as live:
        engine = make_replica(config, SimExecutor(config.cost_model), readers=[live], step_by_step=step_by_step)
        Driver(
            [Arrivals(trace, OpenLoop(trace), RoundRobin(1), [engine], RequestLog(largest_hit_counts=False))], [engine]
        ).run()
    return timelines_of(replay(trace, config))[0]


@pytest.mark.parametrize(
    "suffix",
    [pytest.param(".json", marks=pytest.mark.slow), pytest.param(".jsonl", marks=pytest.mark.slow), ".jsonl.gz"],
)
def test_a_live_file_ends_as_one_written_at_the_end(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"live{suffix}"
    timeline = run_live(path, ReplayConfig(num_pages=700, page_size=512), step_by_step=False)
    assert verify_file(path).verdict == "ok"
    text = gzip.decompress(path.read_bytes()) if suffix.endswith(".gz") else path.read_bytes()
    rows = json.loads(text)["timeline"] if suffix == ".json" else [json.loads(line) for line in text.splitlines()][1:-1]
    assert rows == rows_of(timeline)


def test_who_is_cancelled_leaves_nothing_and_the_timeline_says_so() -> None:
    log = StepLog(8)
    config = EngineConfig(num_pages=8, page_size=4)
    engine = make_replica(config, readers=[log], step_by_step=True)
    content = Content.from_tokens(range(10), page_size=4, owner=0)
    request = Request(0, content, num_prompt_tokens=10, max_tokens=9)
    assert engine.submit(request, 0) is None
    for _ in range(2):
        engine.start(engine.now_ns)
        engine.finish()
    engine.cancel(request)
    rows = rows_of(Timeline.of(log, page_size=4))
    assert [(row["step"], row["active_seqs"], row["used_blocks"], row["freed"]) for row in rows] == [
        (0, 1, 3, 0),
        (1, 1, 3, 0),
        (1, 0, 0, 3),
    ]
    assert verify(Timeline.of(log, page_size=4).to_json()).verdict == "ok"


def test_a_timeline_that_would_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    log = StepLog(8)
    log.observe([StepDone(step, 10 * step, 10, 4, 0, 0, 1, 0, 0, 1, 1, 0, ()) for step in range(3)])
    monkeypatch.setattr("kvarts.proof.record.timeline.MOST_ROWS", 2)
    with pytest.raises(ConfigError, match="more than 2 rows"):
        Timeline.of(log, page_size=16)


@pytest.mark.laws
@given(served(), guessers())
def test_pages_of_guesses_come_and_go_and_the_timeline_says_so(
    case: tuple[list[Arrival], EngineConfig], guesser: Guesser
) -> None:
    arrivals, config = case
    log = StepLog(config.num_pages)
    executor = ToyExecutor(config.num_pages, config.page_size, config.max_num_seqs)
    serve(arrivals, config, executor, [log], drafter=guesser)
    timeline = Timeline.of(log, page_size=config.page_size)
    said = verify(timeline.to_json())
    # `serve` counts steps where times should be.
    assert not [violation for violation in said.violations if violation.rule != "step_order"]
    assert timeline.columns["allocated"].sum() == timeline.columns["freed"].sum()


@pytest.mark.parametrize("suffix", [".parquet", ".json.gz"])
def test_what_cannot_be_written_live_is_refused(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(ConfigError, match=r"Use \.jsonl"):
        LiveTimeline(tmp_path / f"live{suffix}", total_blocks=1, block_size_tokens=1)
    assert not list(tmp_path.iterdir())


KILLED = """
import sys, time
from pathlib import Path
from test_timeline import run_live
from kvarts import ReplayConfig
from kvarts.proof.record.live import LiveTimeline
write = LiveTimeline._write
def slowly(self, rows):
    for row in rows:
        write(self, [row])
        time.sleep(0.0005)
LiveTimeline._write = slowly
print("go", flush=True)
run_live(Path(sys.argv[1]), ReplayConfig(num_pages=700, page_size=512), step_by_step=True)
"""


@pytest.mark.parametrize(
    "suffix",
    [pytest.param(".json", marks=pytest.mark.slow), pytest.param(".jsonl", marks=pytest.mark.slow), ".jsonl.gz"],
)
def test_a_killed_run_leaves_every_complete_step(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"live{suffix}"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}",
    }
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None and process.stdout.readline() == b"go\n"
    while not path.exists() or path.stat().st_size < 20_000:
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    verdict = verify_file(path)
    assert verdict.verdict == "ok" and verdict.num_rows > 100, verdict.to_text()
    if suffix == ".json":
        assert len(json.loads(path.read_text())["timeline"]) == verdict.num_rows
    else:
        assert any("breaks off" in note for note in verdict.notes)


def test_a_file_that_breaks_off_in_a_line_is_read_up_to_there(report: Report, tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    timelines_of(report)[0].write(whole)
    text = whole.read_bytes()
    cut = len(text) // 2
    num_lines = text[:cut].count(b"\n")
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    packed = packer.compress(text[:cut]) + packer.flush(zlib.Z_SYNC_FLUSH)
    for name, data in (("cut.jsonl", text[:cut]), ("cut.jsonl.gz", packed)):
        path = tmp_path / name
        path.write_bytes(data)
        verdict = verify_file(path)
        assert (verdict.verdict, verdict.num_rows) == ("ok", num_lines - 1), verdict.to_text()
        assert f"line {num_lines + 1} breaks off and was left out" in verdict.notes

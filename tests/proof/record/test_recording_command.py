"""What `kvarts replay` records."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvarts import __version__
from kvarts.base.errors import OutputError
from kvarts.proof.evidence import JournalWriter, verify_file

Kvarts = Callable[..., tuple[int, str, str]]


@pytest.mark.long
def test_a_run_directory_holds_everything(recorded_run: Path) -> None:
    assert sorted(path.name for path in recorded_run.iterdir()) == [
        "distributions.json",
        "events.jsonl.gz",
        "report.json",
        "requests.jsonl",
        "run.json",
        "timeline.json.gz",
    ]
    about = json.loads((recorded_run / "run.json").read_text())
    assert about["command"][:2] == ["kvarts", "replay"] and about["kvarts"] == __version__
    report = json.loads((recorded_run / "report.json").read_text())
    verdict = verify_file(recorded_run / "timeline.json.gz")
    assert verdict.verdict == "ok"
    assert verdict.num_rows >= report["num_steps"]
    histogram = json.loads((recorded_run / "distributions.json").read_text())["itl_ms"]
    made = sum(
        json.loads(line)["output_tokens"] - 1 for line in (recorded_run / "requests.jsonl").read_text().splitlines()
    )
    assert sum(histogram["counts"]) == made
    assert histogram["upper_ms"] == sorted(histogram["upper_ms"])


def test_a_run_directory_is_never_two_runs(kvarts: Kvarts, recorded_run: Path) -> None:
    before = {path: path.read_bytes() for path in recorded_run.iterdir()}
    code, _, err = kvarts("replay", "--run-dir", recorded_run)
    assert code == 7 and "is not empty" in err
    assert {path: path.read_bytes() for path in recorded_run.iterdir()} == before


def test_each_replica_has_files_of_its_own(kvarts: Kvarts, tmp_path: Path) -> None:
    files = ("--timeline", tmp_path / "t.jsonl.gz", "--events", tmp_path / "e.jsonl", "--set", "timeline_every=100")
    code, _, _ = kvarts("replay", "--replicas", 2, "--run-dir", tmp_path / "run", *files)
    assert code == 0
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_file())
    assert names == ["e-r0.jsonl", "e-r1.jsonl", "t-r0.jsonl.gz", "t-r1.jsonl.gz"]
    code, out, _ = kvarts("verify", tmp_path / "t-r0.jsonl.gz", tmp_path / "run" / "timeline-r1.json.gz")
    assert code == 0 and out.count(": ok, ") == 2


@pytest.mark.parametrize("place", [("--timeline", "t.json"), ("--run-dir", "run")])
def test_a_timeline_that_would_not_fit_is_refused_before_anything_is_written(
    kvarts: Kvarts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: tuple[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvarts.proof.record.timeline.MOST_ROWS", 1000)
    code, out, err = kvarts("replay", *place, "--report", "report.json")
    assert (code, out) == (2, "")
    assert "would have more than 1,000 rows, one for each step" in err and "replay less of the trace" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (("replay", "--timeline", "t.csv"), 2, "End it in .json"),
        (("replay", "--timeline", "nowhere/t.json"), 7, "there is no directory"),
    ],
)
def test_mistakes_are_named(
    kvarts: Kvarts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    actual, out, err = kvarts(*arguments)
    assert (actual, out) == (code, "")
    assert what in err and "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_parquet_without_pyarrow_is_refused_before_any_work(
    kvarts: Kvarts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, out, err = kvarts("replay", "--timeline", tmp_path / "t.parquet")
    assert (code, out) == (2, "")
    assert "kvarts[parquet]" in err and "replaying" not in err


def test_a_failed_replay_leaves_no_files(kvarts: Kvarts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(self: JournalWriter, events: object) -> None:
        raise OutputError("the disk is full")

    monkeypatch.setattr(JournalWriter, "observe", fail)
    code, _, _ = kvarts("replay", "--events", tmp_path / "e.jsonl", "--timeline", tmp_path / "t.json")
    assert code == 7 and not list(tmp_path.iterdir())

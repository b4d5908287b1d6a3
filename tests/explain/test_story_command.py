"""`kvarts story`, and the stories on the page of a run."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest

pytest.importorskip("kvarts.record.journal", reason="writes the journals")

Kvarts = Callable[..., tuple[int, str, str]]


def test_each_replica_tells_its_own(kvarts: Kvarts, tmp_path: Path) -> None:
    sample = files("kvarts") / "data" / "mooncake-conversation-1000.jsonl"
    assert kvarts("replay", sample, "--replicas", 2, "--run-dir", tmp_path / "run")[0] == 0
    code, out, _ = kvarts("story", tmp_path / "run", "--request", "3")
    assert code == 0 and out.startswith("events-r1.jsonl.gz:\n") and "finished" in out
    code, out, _ = kvarts("story", tmp_path / "run", "--hits")
    assert code == 0 and out.count("device hit") == 2
    code, _, err = kvarts("story", tmp_path / "run", "--request", "no one")
    assert code == 4 and "no request 'no one'" in err


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (("story", "nowhere.jsonl", "--request", "1"), 3, "no such file"),
        (("story", "nowhere.jsonl"), 2, "say what to tell of"),
        (("story", "nowhere.jsonl", "--request", "1", "--hits"), 2, "say what to tell of"),
        (("story", ".", "--hits"), 3, "report.json: no such file"),
    ],
)
def test_mistakes_are_named(
    kvarts: Kvarts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    actual, out, err = kvarts(*arguments)
    assert (actual, out) == (code, "")
    assert what in err and "Traceback" not in err


def test_the_page_tells_why(kvarts: Kvarts, recorded_run: Path, tmp_path: Path) -> None:
    """What the command hands to the page: the ledger by its kinds, and the stories of the longest waits."""
    assert kvarts("report", recorded_run, "--html", tmp_path / "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text()
    for said in ("never seen before", "seen, but evicted", "gone for", "first in the queue and not admitted"):
        assert said in page
    assert page.count('"waited":') == 10

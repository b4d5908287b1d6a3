"""`kvarts story`, and the stories on the page of a run."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest

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


def test_a_request_that_was_given_up_in_the_router_has_no_replica(kvarts: Kvarts, tmp_path: Path) -> None:
    trace, run = tmp_path / "trace.jsonl", tmp_path / "run"
    row = {"input_length": 4096, "output_length": 9, "hash_ids": list(range(8))}
    waits = {"timestamp": 10, "cancel_after_ms": 40}
    trace.write_text(
        "".join(json.dumps({**row, **more}) + "\n" for more in ({"timestamp": 0}, {"timestamp": 0}, waits))
    )
    queue = ("--replicas", 2, "--router", "least-loaded", "--set", "routing.queue_threshold=0.1")
    assert kvarts("replay", trace, *queue, "--run-dir", run, "--html", tmp_path / "page.html")[0] == 0
    rows = [json.loads(line) for line in (run / "requests.jsonl").read_text().splitlines()]
    assert [(row["replica"], row["status"]) for row in rows[2:]] == [(-1, "cancelled")]
    assert kvarts("report", run, "--html", tmp_path / "again.html")[0] == 0
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "page.html").read_bytes()
    assert kvarts("verify", run)[0] == 0
    code, out, _ = kvarts("story", run)
    assert code == 0 and out.startswith("the slowest 2 of 3 requests")
    code, out, _ = kvarts("story", run, "--request", "2")
    assert (code, out) == (0, "0.010 s  arrived at the router, and was given up there: no replica got it\n")
    assert kvarts("story", run, "--request", "3")[0] == 4


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (("story", "nowhere.jsonl", "--request", "1"), 3, "no such file"),
        (("story", "nowhere.jsonl"), 3, "no such file"),
        (("story", "nowhere.jsonl", "--request", "1", "--hits"), 2, "--request: is one of three"),
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


@pytest.mark.long
def test_the_page_tells_why(kvarts: Kvarts, recorded_run: Path, tmp_path: Path) -> None:
    """What the command hands to the page: the ledger by its kinds, and the stories of the longest waits."""
    assert kvarts("report", recorded_run, "--html", tmp_path / "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text()
    for said in ("never seen before", "seen, but evicted", "gone for", "first in the queue and not admitted"):
        assert said in page
    waits = re.findall(r'"waited":"waited (.*?)"', page)
    assert 1 < len(waits) <= 10 and len(set(waits)) == len(waits)
    assert any("too few free KV pages" in wait and "more waited with it" in wait for wait in waits)


def test_a_cut_journal_says_so(kvarts: Kvarts, recorded_run: Path, tmp_path: Path) -> None:
    text = gzip.decompress((recorded_run / "events.jsonl.gz").read_bytes())
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    whole.write_bytes(text)
    assert "note:" not in kvarts("story", whole, "--hits")[1]
    for part in (text[: len(text) // 2], text[: text.rindex(b"\n", 0, len(text) // 2) + 1]):
        cut.write_bytes(part)
        for what in (("--hits",), ("--request", "0")):
            code, out, _ = kvarts("story", cut, *what)
            assert code == 0 and re.search(
                r"note: the journal breaks off after step \d+: \d+ requests had not ended", out
            )
    cut.write_bytes((recorded_run / "events.jsonl.gz").read_bytes()[:-5000])
    assert "note: the journal breaks off" in kvarts("story", cut, "--hits")[1]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"units": [2**64] * 999}, "events.jsonl: has units that are no tokens"),
        ({"units": [-1] * 999}, "has units that are no tokens"),
        ({"unit_tokens": 2**40}, "events.jsonl:2: unit_tokens: is too large"),
        ({"t_ms": 1e300}, "events.jsonl:2: is no event of a journal"),
        ({"prompt_tokens": 10**400}, "events.jsonl:2: is no event of a journal"),
        ({"request": -1}, "events.jsonl:2: is no event of a journal"),
    ],
)
def test_what_no_journal_can_say_is_named(
    kvarts: Kvarts, recorded_run: Path, tmp_path: Path, changes: dict[str, object], what: str
) -> None:
    lines = gzip.decompress((recorded_run / "events.jsonl.gz").read_bytes()).splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), **changes}).encode()
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    code, _, err = kvarts("story", path, "--hits")
    assert code == 4 and what in err

"""`kvarts replay --audit`."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from kvarts.proof.audit.auditor import AuditError, Auditor, Finding

Kvarts = Callable[..., tuple[int, str, str]]

DATA = Path(str(files("kvarts") / "data"))


def test_what_the_audit_finds_is_said_and_ends_with_5(kvarts: Kvarts, monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(self: Auditor, account: Any) -> None:
        raise AuditError([Finding(7, "was hit and is not resident", 3, 2)])

    monkeypatch.setattr(Auditor, "compare", compare)
    code, out, err = kvarts("replay", "--audit")
    assert (code, out) == (5, "")
    assert "step 7, page 2 of request 3: was hit and is not resident" in err


def test_a_failed_audit_leaves_no_files(kvarts: Kvarts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    test_what_the_audit_finds_is_said_and_ends_with_5(kvarts, monkeypatch)
    code, _, _ = kvarts("replay", "--audit", "--requests", tmp_path / "q.jsonl", "--report", tmp_path / "r.json")
    assert code == 5 and not list(tmp_path.iterdir())


def test_replays_for_advice_are_not_audited(kvarts: Kvarts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The audit is of the replay that was asked for; other sizes are tried at the usual cost."""
    trace = tmp_path / "trace.jsonl"
    rows = [
        {
            "timestamp": 1000 * turn,
            "input_length": 5120,
            "output_length": 2,
            "hash_ids": [*range(10 * user, 10 * user + 10)],
        }
        for turn, user in enumerate([*range(20), *range(20)])
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    command = ["replay", trace, "--pages", 60, "--page-size", 512, "--json"]
    code, out, _ = kvarts(*command)
    assert code == 0 and "--host-memory" in json.loads(out)["advice"]
    audited: list[int] = []
    rest = Auditor._rest

    def counted(self: Auditor) -> None:
        if id(self) not in audited:
            audited.append(id(self))
        rest(self)

    monkeypatch.setattr(Auditor, "_rest", counted)
    assert kvarts(*command, "--audit")[:2] == (0, out)
    assert len(audited) == 1


def test_an_audited_replay_says_the_same(kvarts: Kvarts, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with (DATA / "mooncake-conversation-1000.jsonl").open() as rows:
        trace.write_text("".join(islice(rows, 200)))
    command = ["replay", trace, "--pages", 200, "--page-size", 512, "--replicas", 2, "--json"]
    code, out, _ = kvarts(*command)
    assert code == 0 and json.loads(out)["num_evicted_pages"] > 0
    assert kvarts(*command, "--audit")[:2] == (0, out)

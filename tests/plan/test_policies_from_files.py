"""A file may name a policy that kvarts has, and no code: opening it runs nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROW = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]}
CODE = "from pathlib import Path\nPath('ran').touch()\nfrom kvarts.core.kv.eviction import LruOrder as C\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "evilpol_of_test.py").write_text(CODE)
    return tmp_path


@pytest.mark.parametrize("setting", ["eviction", "router"])
@pytest.mark.parametrize("command", [["replay"], ["sweep"]])
def test_a_file_that_names_code_is_refused_and_runs_nothing(
    command: list[str], setting: str, folder: Path, run_command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    if command == ["sweep"]:
        (folder / "run.toml").write_text(
            f'trace = "trace.jsonl"\npages = 100\nreplicas = 2\n[grid]\n{setting} = ["evilpol_of_test:C"]\n'
        )
        arguments = ["run.toml", "-o", "out", "--workers", "1"]
    else:
        text = f'trace = "trace.jsonl"\npages = 100\nreplicas = 2\n{setting} = "evilpol_of_test:C"\n'
        (folder / "run.toml").write_text(text)
        arguments = ["--config", "run.toml"]
    assert run_command(*command, *arguments) == 2
    error = capsys.readouterr().err
    assert f"{setting}: names code, which no file may" in error, error
    assert not (folder / "ran").exists()


def test_the_command_line_may_name_code(folder: Path, run_command: Any) -> None:
    assert run_command("replay", "trace.jsonl", "--pages", "100", "--eviction", "evilpol_of_test:C") == 0
    assert (folder / "ran").exists()


def test_a_router_of_ones_own_is_named_as_a_policy_is(
    folder: Path, asked: Any, run_command: Any, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    (folder / "router_of_test.py").write_text("from kvarts.sim.routers.policies import LeastLoaded as Mine\n")
    two = ("replay", "trace.jsonl", "--pages", "100", "--replicas", "2")
    assert asked(*two, "--router", "router_of_test:Mine", "--json")["config"]["router"] == "LeastLoaded"
    refused = {
        "prefx": "Did you mean prefix?",
        "nowhere:C": "cannot be imported",
        "json:x": "no attribute",
        "json:__doc__": "is not callable",
        "json:loads": "makes no router",
        "json:JSONDecoder": "has no choose",
    }
    for wrong, says in refused.items():
        assert run_command(*two, "--router", wrong) == 2, wrong
        assert says in capsysbinary.readouterr().err.decode()

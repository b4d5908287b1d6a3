"""Where PyTorch is missing, the commands that need it say so, and nothing else notices."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvarts.cli.main import main


@pytest.mark.parametrize(
    "command", [["generate", "--model", "m", "--prompt", "x"], ["model", "tiny", "m"], ["profile", "--model", "m"]]
)
def test_it_is_named(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    if command[0] == "profile":
        command = [*command, "--prompts", str(prompts)]
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("sys.argv", ["kvarts", *command])
    assert main() == 2
    assert "pip install 'kvarts[torch]'" in capsys.readouterr().err

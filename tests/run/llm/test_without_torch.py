"""Where PyTorch is missing, the commands that need it say so, and nothing else notices."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "command", [["generate", "--model", "m", "--prompt", "x"], ["model", "tiny", "m"], ["profile", "--model", "m"]]
)
def test_it_is_named(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    run_command: Callable[..., int],
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    if command[0] == "profile":
        command = [*command, "--prompts", str(prompts)]
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run_command(*command) == 2
    assert "pip install 'kvarts[torch]'" in capsys.readouterr().err

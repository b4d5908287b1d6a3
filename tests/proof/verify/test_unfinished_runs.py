"""A run directory that a killed process left is not judged by what it holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


def test_a_run_directory_that_was_not_finished_has_no_verdict(
    run_command: Callable[..., int], tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run_command("replay", "sample:mooncake", "--pages", 600, "--page-size", 512, "--run-dir", whole) == 0
    assert run_command("verify", whole) == 0
    killed.mkdir()
    whole.rename(killed / ".kvarts-unfinished")
    capsysbinary.readouterr()
    assert run_command("verify", killed) == 4
    assert (
        b"killed: holds .kvarts-unfinished: the run was killed while this was written" in capsysbinary.readouterr().err
    )

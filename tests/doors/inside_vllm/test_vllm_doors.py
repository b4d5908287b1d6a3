"""kvarts' order of eviction for vLLM's own host memory, and kvarts' files below it, in vLLM's own managers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from builders.vllm_python import VERSIONS, vllm_environment, vllm_python

SCRIPT = Path(__file__).parents[2] / "builders" / "vllm_doors.py"


@pytest.mark.long
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("what", ["policy", "files", "worker"])
def test_what_is_behind_vllms_doors(what: str, version: str, tmp_path: Path) -> None:
    command = [vllm_python(), str(SCRIPT), what, str(tmp_path), "0"]
    done = subprocess.run(command, capture_output=True, text=True, env=vllm_environment(version), check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [version, "held"]

"""Law L15: kvarts' default scheduler decides as vLLM's own, step by step. `benchmarks/equal_to_vllm.py` runs both."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from builders.vllm_python import vllm_environment, vllm_python

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "equal_to_vllm.py"
EQUAL_ROWS = [
    *("full", "priority", "window", "chunk", "groups", "long-prefill", "watermark", "limited"),
    *("aborts", "groups-aborts", "uncached"),
    *("states-all", "states-align", "states-all-async", "states-align-async"),
    *("loads", "async-loads", "failed-loads", "group-loads-aborts"),
    *("states-all-loads", "states-align-loads", "states-all-async-loads", "states-align-async-loads"),
    *("async", "async-stop", "async-priority", "async-window", "async-chunk", "async-groups", "async-aborts"),
]


@pytest.mark.long
@pytest.mark.parametrize("row", EQUAL_ROWS)
def test_every_step_is_as_in_vllm(row: str) -> None:
    command = [vllm_python(), str(SCRIPT), "--row", row, "--workloads", "150"]
    done = subprocess.run(command, capture_output=True, text=True, env=vllm_environment(), check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "150 workloads, 0 differ" in done.stdout


@pytest.mark.long
def test_every_step_of_a_trace_is_as_in_vllm() -> None:
    sample = Path(__file__).parents[2] / "src" / "kvarts" / "data" / "mooncake-conversation-1000.jsonl"
    command = [vllm_python(), str(SCRIPT), "--trace", str(sample), "--pages", "12000"]
    done = subprocess.run(command, capture_output=True, text=True, env=vllm_environment(), check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "equal in every step" in done.stdout

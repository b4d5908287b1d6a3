"""A request that computes its first pages while the others are loaded: what its story and the ledger of hits say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


def test_what_is_computed_while_the_rest_is_loaded_is_no_hit(
    tmp_path: Path, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    first, other = list(range(64)), list(range(1000, 1064))
    rows = [
        {"timestamp": 60_000 * index, "input_length": 32_768, "output_length": 2, "hash_ids": units}
        for index, units in enumerate([first, other, first])
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    device = ("--model", "qwen3-8b", "--device", "h100-80gb", "--pages", 2100)
    tier = ("--host-memory", "64GiB", "--set", "offload.h2d=5GB/s")
    assert run_command("replay", trace, *device, *tier, "--audit", "--run-dir", tmp_path / "run") == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    hits = report["num_cached_tokens_by_tier"]
    capsys.readouterr()
    assert run_command("story", tmp_path / "run", "--hits") == 0
    told = dict(line.rsplit("%", 1)[0].rsplit(maxsplit=2)[:2] for line in capsys.readouterr().out.splitlines()[1:5])
    assert int(told["device hit"].replace(",", "")) == hits["device"]
    assert int(told["host hit"].replace(",", "")) == hits["host"] > 10_000
    assert run_command("story", tmp_path / "run", "--request", "2") == 0
    story = capsys.readouterr().out
    num_pages = hits["host"] // 16
    assert f"waits for {num_pages:,} pages from host" in story and "pages before them" in story
    assert f"hit {hits['device'] + hits['host']:,} tokens" in story

"""Advice about tiers below the device: following it helps, and one that is too small is enlarged."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from kvarts.cli.replaying import all_sections
from kvarts.sim.config import make_config
from kvarts.sim.replaying import replay
from kvarts.sim.report.report import Report
from kvarts.sim.traffic.formats import load_trace

AGENTS = Path(str(files("kvarts") / "data" / "coding-agents"))
SECTIONS = all_sections()


def report_of(**settings: Any) -> Report:
    config = make_config({"model": "llama-3.1-8b", "device": "h100-80gb", **settings}, sections=SECTIONS)
    return replay(load_trace(AGENTS), config)


@pytest.mark.slow
def test_host_memory_of_the_advised_size_brings_the_hits_that_were_lost() -> None:
    report = report_of()
    before, said = report.summary, report.advice
    size = re.search(r"try --host-memory (\S+):", said or "")
    assert size is not None
    after = report_of(offload={"host_memory": size[1]})
    most = report_of(offload={"host_pages": before["distinct_pages"]}).summary["prefix_hit_ratio"]
    gained = after.summary["prefix_hit_ratio"] - before["prefix_hit_ratio"]
    assert gained >= 0.985 * (most - before["prefix_hit_ratio"]) > 0.05
    assert after.summary["ttft_ms"]["p90"] * 4 < before["ttft_ms"]["p90"]
    assert "--host-memory" not in (after.advice or "")


@pytest.mark.long
def test_a_tier_that_is_too_small_is_enlarged() -> None:
    host = report_of(offload={"host_pages": 4_000}).advice
    assert host is not None and "try --host-memory " in host
    disk = report_of(offload={"host_pages": 4_000, "disk_pages": 8_000}).advice
    assert disk is not None and disk.endswith("try a larger --set offload.disk_memory")

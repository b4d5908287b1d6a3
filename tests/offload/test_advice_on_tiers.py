"""Advice about tiers below the device: following it helps, and one that is too small is enlarged."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from kvarts.cli.replay import all_sections
from kvarts.report.advice import advice
from kvarts.sim.config import make_config
from kvarts.sim.replay import replay
from kvarts.traffic.formats import load_trace

AGENTS = Path(str(files("kvarts") / "data" / "coding-agents"))
SECTIONS = all_sections()


def summary_of(**settings: Any) -> dict[str, Any]:
    config = make_config({"model": "llama-3.1-8b", "device": "h100-80gb", **settings}, sections=SECTIONS)
    return replay(load_trace(AGENTS), config).summary


def test_host_memory_of_the_advised_size_brings_the_hits_that_were_lost() -> None:
    before = summary_of()
    said = advice(before, tier_flag="--host-pages")
    assert said is not None and said.endswith(f"try --host-pages {before['working_set_pages']}")
    after = summary_of(offload={"host_pages": before["working_set_pages"]})
    assert after["prefix_hit_ratio"] > 0.945 > 0.86 > before["prefix_hit_ratio"]
    assert after["ttft_ms"]["p90"] * 4 < before["ttft_ms"]["p90"]
    assert "-pages" not in (advice(after) or "")


def test_a_tier_that_is_too_small_is_enlarged() -> None:
    host = advice(summary_of(offload={"host_pages": 4_000}))
    assert host is not None and host.endswith("try more --host-pages")
    disk = advice(summary_of(offload={"host_pages": 4_000, "disk_pages": 8_000}))
    assert disk is not None and disk.endswith("try more --disk-pages")

"""Options of a plan: replaying the command of one gives what the plan says of it, and one step less does not do."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

SAMPLE = Path(str(files("kvarts") / "data" / "mooncake-conversation-1000.jsonl"))
COST = "linear:step_ms=5,chunk_token_ms=0.02,decode_ms=0.1,context_token_ms=0"


def replayed(asked: Callable[..., Any], command: str) -> Any:
    words = shlex.split(command)
    assert words[:2] == ["kvarts", "replay"]
    return asked(*words[1:], "--json")


def test_the_cheapest_option_keeps_the_slo_and_one_step_less_does_not(
    tmp_path: Path, asked: Callable[..., Any], run_command: Callable[..., int]
) -> None:
    trace = tmp_path / "trace.jsonl"
    assert run_command("trace", "slice", SAMPLE, "--count", 200, "-o", trace) == 0
    setting = ["--cost", COST, "--pages", 20_000, "--slo-ttft-ms", 4000, "--slo-share", 0.95, "--at", 20_000]
    latency = asked("plan", trace, *setting, "--json")["latency"]
    cheapest = next(option for option in latency["options"] if option["name"] == "cheapest")
    assert cheapest["keeps_slo"]
    summary = replayed(asked, cheapest["command"])
    assert summary["goodput"]["ratio"] >= 0.95
    assert summary["config"]["pages"] == cheapest["pages"]
    below = cheapest["step_below"]
    assert below["slo_ratio"] < 0.95
    found = next(
        point
        for point in latency["points"]
        if (point["replicas"], point["pages"], point["rate"]) == (below["replicas"], below["pages"], 1.0)
    )
    assert replayed(asked, found["command"])["goodput"]["ratio"] == found["slo_ratio"] < 0.95
    for point in latency["points"]:
        assert point["slo_ratio"] is not None
    largest = latency["largest_rate"]
    if largest["rate"] is not None:
        assert replayed(asked, largest["command"])["goodput"]["ratio"] >= 0.95
        assert largest["fails_at"] is None or largest["fails_at"] <= largest["rate"] * 1.05 * (1 + 1e-9)


def test_without_an_slo_there_are_latencies_and_no_cheapest_option(asked: Callable[..., Any], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(SAMPLE.read_text().splitlines(keepends=True)[:60]))
    latency = asked("plan", trace, "--cost", COST, "--pages", 20_000, "--json")["latency"]
    assert [option["name"] for option in latency["options"]] == ["knee", "best"]
    assert latency["largest_rate"] is None
    assert all(point["slo_ratio"] is None for point in latency["points"])


def test_curves_alone_replay_nothing(asked: Callable[..., Any]) -> None:
    assert "latency" not in asked("plan", SAMPLE, "--cost", COST, "--curves-only", "--page-size", 512, "--json")
    assert "latency" not in asked("plan", SAMPLE, "--page-size", 512, "--json")

"""`kvarts plan fleet --gpus` with mixed workers alone, which needs no room of fleets."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import pytest

from kvarts.plan.fleet_search import BATCH

MODEL = ("--model", "llama-3.1-8b", "--device", "h100-80gb")


@pytest.mark.long
def test_mixed_workers_are_replicas(asked: Callable[..., Any]) -> None:
    options = ("--slo-ttft-ms", 200, "--slo-tpot-ms", 20, "--set", "speedup=10", "--slo-share", 1)
    plan = asked(
        "plan", "fleet", "sample:azure-chat", *MODEL, *options, "--gpus", 3, "--set", "router=least-loaded", "--json"
    )
    mixed = [point for point in plan["fleets"]["points"] if not point["is_apart"]]
    assert {(point["pools"][0]["replicas"], point["pools"][0]["tensor_parallel"]) for point in mixed} <= {
        (1, 1),
        (1, 2),
        (2, 1),
        (3, 1),
    }
    for point in mixed:
        report = asked(*shlex.split(point["command"])[1:], "--json")
        assert report["goodput"]["requests_per_s"] == point["goodput_per_s"]
        assert report["config"].get("replicas", 1) == point["pools"][0]["replicas"]


@pytest.mark.slow
def test_the_answer_changes_where_the_sensitivity_says(asked: Callable[..., Any]) -> None:
    cost = ("--cost", "linear:step_ms=5,chunk_token_ms=0.02", "--set", "pages=4000")
    slo = ("--slo-ttft-ms", 300, "--slo-share", 0.9)
    fleets = asked("plan", "fleet", "sample:azure-chat", *cost, *slo, "--gpus", 2, "--json")["fleets"]
    found, command = fleets["sensitivity"], shlex.split(fleets["options"][0]["command"])[1:]

    def keeps(*changes: Any) -> bool:
        report = asked(*command, *changes, "--json")
        return bool(report["goodput"]["ratio"] * report["num_completed"] >= 0.9 * report["num_requests"])

    rate, times = found["rate"], found["step_times"]
    assert keeps("--speedup", rate["up_to"]) and not keeps("--speedup", rate["fails_at"])
    assert rate["fails_at"] <= rate["up_to"] * (1 + rate["tolerance"])
    assert keeps("--set", f"cost_factor={times['up_to']}")
    assert times["fails_at"] is None or not keeps("--set", f"cost_factor={times['fails_at']}")
    assert 1 <= found["prompt_length"]["up_to"] <= 2
    assert f"rate: it lasts to {rate['up_to']:.3g} times" in " ".join(fleets["options"][0]["would_change"])


@pytest.mark.slow
def test_a_cost_without_a_model_has_one_device_per_worker(asked: Callable[..., Any]) -> None:
    cost = ("--cost", "linear:step_ms=5,chunk_token_ms=0.02", "--set", "pages=4000")
    plan = asked("plan", "fleet", "sample:azure-chat", *cost, "--slo-ttft-ms", 300, "--gpus", 2, "--json")["fleets"]
    assert plan["num_replayed"] <= BATCH + 2
    assert {pool["tensor_parallel"] for point in plan["points"] for pool in point["pools"]} == {1}


def test_what_is_no_number_of_devices_is_refused(run_command: Any, capsys: Any) -> None:
    assert run_command("plan", "fleet", "sample:azure-chat", *MODEL, "--slo-ttft-ms", 5, "--gpus", 0) == 2
    assert "--gpus" in capsys.readouterr().err

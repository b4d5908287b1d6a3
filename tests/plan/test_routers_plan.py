"""`kvarts plan routers --routers`: one row per router and age, each the replay that its command says."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvarts import ReplayConfig, load_trace, replay
from kvarts.plan.routers import RoutersPlan
from kvarts.plan.tables import render_routers
from kvarts.sim.routers.policies import split_names

DEVICE = ["--model", "llama-3.1-8b", "--device", "h100-80gb", "--replicas", "3"]


@pytest.mark.long
def test_each_row_is_the_replay_of_its_command(run_command: Any, capsys: Any) -> None:
    routers = "round-robin,prefix,llm-d:queue=1,kv=2"
    options = ["--routers", routers, "--set", "router_ages=0,200ms", "--set", "slo.ttft_ms=60", "--json"]
    assert run_command("plan", "routers", "sample:azure-chat", *DEVICE, *options) == 0
    points = json.loads(capsys.readouterr().out)["routers"]["points"]
    assert [(point["router"], point["age"]) for point in points] == [
        ("round-robin", None),
        ("prefix", "0"),
        ("prefix", "200ms"),
        ("llm-d:queue=1,kv=2", "0"),
        ("llm-d:queue=1,kv=2", "200ms"),
    ]
    for point in points:
        assert run_command(*shlex.split(point["command"])[1:], "--json") == 0
        summary = json.loads(capsys.readouterr().out)
        assert point["ttft_ms"] == summary["ttft_ms"] and point["hit_ratio"] == summary["prefix_hit_ratio"]
        assert point["slo_ratio"] == pytest.approx(summary["goodput"]["ratio"])
        assert point["most_to_mean_tokens"] >= 1


def test_late_events_of_kv_groups_are_those_of_the_command(tmp_path: Path, run_command: Any, capsys: Any) -> None:
    """Layers that keep less are counted at every age, in the plan and by the commands that it prints."""
    rows = [
        {"timestamp": 300 * n, "input_length": 1024, "output_length": 20, "hash_ids": [n % 5, 9]} for n in range(40)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--model", "gemma-3-12b", "--device", "h100-80gb", "--replicas", "3", "--routers", "prefix"]
    assert run_command("plan", "routers", trace, *options, "--set", "router_ages=0,5s", "--json") == 0
    points = json.loads(capsys.readouterr().out)["routers"]["points"]
    assert points[0]["hit_ratio"] > points[1]["hit_ratio"]
    for point in points:
        assert run_command(*shlex.split(point["command"])[1:], "--json") == 0
        summary = json.loads(capsys.readouterr().out)
        assert [group["kind"] for group in summary["kv_groups"]] == ["full", "window"]
        assert point["ttft_ms"] == summary["ttft_ms"] and point["hit_ratio"] == summary["prefix_hit_ratio"]


@pytest.mark.slow
def test_the_table_fits_a_terminal(run_command: Any, capsys: Any) -> None:
    assert run_command("plan", "routers", "sample:azure-chat", *DEVICE, "--routers", "least-loaded,prefix,session") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("azure-conv-1000.csv on 3 replicas")
    commands = ("  kvarts ", "  vllm ", "  python ")
    assert max(len(line) for line in lines if not line.startswith(commands)) <= 80
    assert [line.split()[0] for line in lines if line.startswith(("least-loaded ", "prefix ", "session "))]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--routers", "nearest"], "--routers: must be one of round-robin"),
        (["--routers", "llm-d", "--set", "router_ages=5x"], "--set router_ages: '5x' is not a delay"),
        (["--set", "router_ages=5"], "Missing option '--routers'"),
        (["--routers", "prefix", "--replicas", "1"], "--routers: needs replicas to choose from"),
        (
            ["--routers", "prefix", "--set", f"router_ages={','.join(map(str, range(101)))}"],
            "--routers: are more than 100",
        ),
        (["--routers", "prefix", "--html", "x.html"], "No such option '--html'"),
    ],
)
def test_what_cannot_be_compared_is_refused(options: list[str], says: str, run_command: Any, capsys: Any) -> None:
    assert run_command("plan", "routers", "sample:azure-chat", *DEVICE, *options) == 2
    assert says in capsys.readouterr().err


def test_a_list_keeps_options_together() -> None:
    assert split_names("prefix,llm-d:prefix=3,queue=2, session,my.router:Mine") == [
        "prefix",
        "llm-d:prefix=3,queue=2",
        "session",
        "my.router:Mine",
    ]


def test_the_function_is_the_command() -> None:
    config = ReplayConfig.for_device("llama-3.1-8b", "h100-80gb", replicas=2)
    plan = RoutersPlan(load_trace("sample:azure-chat"), config, ["least-loaded"]).to_builtins()
    alone = replay(load_trace("sample:azure-chat"), ReplayConfig.for_device(
        "llama-3.1-8b", "h100-80gb", replicas=2, router="least-loaded"
    ))  # fmt: skip
    assert plan["points"][0]["ttft_ms"] == alone.summary["ttft_ms"]


def test_the_columns_of_routers_are_apart() -> None:
    """A duration of minutes is ten characters long."""
    point = {
        "router": "prefix", "age": None, "hit_ratio": 0.5, "most_to_mean_tokens": 1.0, "slo_ratio": None,
        "command": "kvarts replay",
        "ttft_ms": {"mean": 192_000.0, "p99": 454_000.0}, "tpot_ms": {"p99": 454_000.0},
    }  # fmt: skip
    routers = {"slo": {}, "replicas": 2, "points": [point], "best": {**point, "would_change": [], "serve": {}}}
    routers |= {"is_complete": True, "prices": {"text": "relative"}}
    config = {"pages": 100, "page_size": 16, "cost": {"model": "linear"}}
    table = render_routers({"trace": "t", "setting": "s", "config": config, "advice": "a", "routers": routers})
    assert " 3 min 12 s 7 min 34 s 7 min 34 s " in table

"""`kvarts plan fleet --gpus`: the front of devices and goodput, each point the replay of its command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvarts import load_trace
from kvarts.base.errors import ConfigError
from kvarts.base.settings import Given, given_by_keywords
from kvarts.cli.replaying import all_sections
from kvarts.plan.confidence import Goal
from kvarts.plan.fleet_search import FleetKinds, FleetSearch
from kvarts.plan.fleets import FleetsPlan, plan_fleets
from kvarts.sim.fleet.config import FleetConfig
from kvarts.sim.replaying import replay

SAMPLE = files("kvarts") / "data" / "mooncake-conversation-1000.jsonl"
MODEL = ("--model", "llama-3.1-8b", "--device", "h100-80gb")
TIGHT = ("--slo-ttft-ms", "10000", "--slo-tpot-ms", "30", "--transfer", "rate=50GB/s")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "slice.jsonl"
    path.write_text("".join(SAMPLE.read_text().splitlines(keepends=True)[:150]))
    return path


@pytest.fixture(scope="module")
def settings() -> Given:
    return given_by_keywords(
        {
            "model": "llama-3.1-8b",
            "device": "h100-80gb",
            "slo_ttft_ms": 5000,
            "slo_tpot_ms": 30,
            "transfer_rate": "50GB/s",
        },
        all_sections(),
    )


@pytest.mark.long
def test_each_figure_is_that_of_the_replay_of_its_command(asked: Callable[..., Any], trace: Path) -> None:
    plan = asked("plan", "fleet", trace, *MODEL, *TIGHT, "--gpus", 4, "--routers", "prefix,least-loaded",
                 "--set", "store_sizes=64GiB", "--tensor-parallel", 1, "--json")["fleets"]  # fmt: skip
    assert {point["is_apart"] for point in plan["points"]} == {False, True}
    assert {point["store"] for point in plan["points"]} == {None, "64GiB"}
    options = plan["options"]
    assert len(options) == 3
    for point in [*plan["front"], *options, *plan["points"][::5]]:
        report = asked(*shlex.split(point["command"])[1:], "--json")
        assert report["goodput"]["requests_per_s"] == point["goodput_per_s"]
        assert report["goodput"]["ratio"] == pytest.approx(point["slo_ratio"])
        pools = report.get("fleet", {}).get("pools")
        hours = report["duration_ms"] / 3.6e6 * point["devices"]
        assert point["device_hours"] == pytest.approx(sum(pool["gpu_hours"] for pool in pools) if pools else hours)
        assert point["goodput_per_s_per_device"] == pytest.approx(point["goodput_per_s"] / point["devices"])


@pytest.mark.long
def test_no_point_of_the_front_is_dominated_and_all_other_points_are(asked: Callable[..., Any], trace: Path) -> None:
    whole = asked(
        "plan", "fleet", trace, *MODEL, *TIGHT, "--gpus", 6, "--slo-share", 0.95, "--routers", "prefix", "--json"
    )
    assert asked(*shlex.split(whole["command"])[1:], "--json") == whole
    plan = whole["fleets"]
    assert plan["compared_by"] == "slo_ratio"
    for smaller, larger in pairwise(plan["front"]):
        assert smaller["devices"] < larger["devices"] and smaller["slo_ratio"] < larger["slo_ratio"]
    limit = plan["front"][-1]["devices"]
    without = [point for point in plan["points"] if not point["host_bytes"]]
    for point in without:
        if point["devices"] <= limit and not point["on_front"]:
            assert any(
                other["devices"] <= point["devices"] and other["slo_ratio"] >= point["slo_ratio"]
                for other in plan["front"]
            )
    assert plan["num_replayed"] == len(without) < plan["num_fleets"]
    most = plan["options"][0]["devices"]
    assert all(each["devices"] <= most for each in plan["options"] if each["name"] in {"mixed", "apart"})


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.9, pytest.param(1.0, marks=pytest.mark.long)])
def test_the_front_is_that_of_replaying_every_fleet(trace: Path, settings: Given, share: float) -> None:
    """More workers never lower the goodput here, so the search loses nothing."""
    traffic = load_trace(trace)
    kinds = FleetKinds(settings, all_sections(), 4, routers=["least-loaded"])
    found = FleetsPlan(traffic, kinds, Goal(share), command=str).to_builtins()
    assert not found["assumption"]["num_broken"] and found["assumption"]["num_pairs"]
    best: dict[int, float] = {}
    for fleet in (search := FleetSearch(kinds.families, 4, lambda fleets: [])).fleets:
        goodput = replay(traffic, kinds.config(kinds.kinds[fleet.family], fleet.counts)).summary["goodput"]
        devices = search.devices(fleet)
        best[devices] = max(best.get(devices, 0.0), goodput["ratio"])
    fewest = min((devices for devices, ratio in best.items() if ratio >= share), default=4)
    front: list[tuple[int, float]] = []
    for devices in sorted(best):
        if devices <= fewest and (not front or best[devices] > front[-1][1]):
            front.append((devices, best[devices]))
    assert [(point["devices"], point["slo_ratio"]) for point in found["front"]] == front


@pytest.mark.long
def test_one_device_is_what_the_plan_of_one_engine_says(asked: Callable[..., Any], trace: Path) -> None:
    options = (trace, *MODEL, "--slo-ttft-ms", "10000", "--slo-tpot-ms", "30", "--json")
    found = asked("plan", "fleet", *options, "--gpus", 1)["fleets"]["points"]
    plan = asked("plan", "slo", *options)
    num_pages = plan["config"]["pages"]
    alone = {
        (each["host_bytes"], each["policy"]): each
        for each in plan["latency"]["points"]
        if (each["replicas"], each["pages"], each["rate"], each["cost_factor"]) == (1, num_pages, 1.0, 1.0)
    }
    points = {(each["host_bytes"], each["policy"]): each for each in found}
    assert (0, None) in points.keys() & alone.keys()
    for memory in points.keys() & alone.keys():
        for field in ("devices", "goodput_per_s", "slo_ratio", "ttft_ms", "tpot_ms", "hit_ratio", "limited_by"):
            assert points[memory][field] == alone[memory][field]


@pytest.mark.long
def test_processes_do_not_change_a_byte(
    run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes], trace: Path
) -> None:
    printed = []
    for workers in (1, 2):
        command = ("plan", "fleet", trace, *MODEL, *TIGHT, "--gpus", 3, "--set", f"workers={workers}", "--json")
        assert run_command(*command) == 0
        printed.append(capsysbinary.readouterr().out)
    assert printed[0] == printed[1]


@pytest.mark.slow
def test_what_is_given_for_a_pool_is_kept(asked: Callable[..., Any], trace: Path) -> None:
    of_pools = ("--decode", "device=h200-141gb", "--prefill", "tensor_parallel=2", "--set", "router=least-loaded")
    plan = asked("plan", "fleet", trace, *MODEL, *TIGHT, "--gpus", 4, *of_pools, "--json")["fleets"]
    apart = [point for point in plan["points"] if point["is_apart"]]
    assert apart and {point["pools"][0]["tensor_parallel"] for point in apart} == {2}
    assert all("device=h200-141gb" in point["command"] for point in apart)
    mixed = [point for point in plan["points"] if not point["is_apart"]]
    assert not any("--decode" in point["command"] or "--transfer" in point["command"] for point in mixed)
    assert {point["router"] for point in plan["points"]} <= {None, "least-loaded"}


@pytest.mark.slow
def test_a_closed_loop_is_compared_by_goodput_per_second(asked: Callable[..., Any], trace: Path) -> None:
    plan = asked("plan", "fleet", trace, *MODEL, "--set", "slo.e2e_ms=60000", "--set", "concurrency=16", "--gpus", 3,
                 "--tensor-parallel", 1, "--transfer", "rate=50GB/s", "--json")["fleets"]  # fmt: skip
    assert plan["compared_by"] == "goodput_per_s"
    for smaller, larger in pairwise(plan["front"]):
        assert smaller["goodput_per_s"] < larger["goodput_per_s"]
    assert plan["front"][-1]["devices"] == 3


@pytest.mark.long
def test_the_text_has_the_answer_and_three_commands(
    run_command: Callable[..., int], capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    assert run_command("plan", "fleet", trace, *MODEL, *TIGHT, "--gpus", 4) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert sum(line.startswith("  kvarts replay ") for line in lines) == 3
    commands = ("  kvarts replay ", "  vllm serve ", "  python -m sglang.launch_server ")
    assert max(len(line) for line in lines if not line.startswith(commands) and "TP" not in line) <= 90
    assert run_command("plan", "fleet", trace, *MODEL, *TIGHT, "--gpus", 4, "--html", page) == 0
    assert "Fleets for slice.jsonl" in page.read_text()


def test_settings_of_a_file_stay_there(asked: Callable[..., Any], trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(FILE + "pages = 20000\n[slo]\nttft_ms = 3000\n")
    plan = asked("plan", "fleet", trace, "--config", path, "--gpus", 2, "--slo-tpot-ms", 50, "--json")["fleets"]
    assert {pool["pages"] for point in plan["points"] for pool in point["pools"]} == {20000}
    for option in plan["options"]:
        report = asked(*shlex.split(option["command"])[1:], "--json")
        assert report["goodput"]["requests_per_s"] == option["goodput_per_s"]


def test_free_links_are_said(run_command: Callable[..., int], capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    assert run_command("plan", "fleet", trace, *MODEL, "--slo-ttft-ms", 5000, "--gpus", 2, "--tensor-parallel", 1) == 0
    assert "Transfers of KV take no time here" in capsys.readouterr().out


def test_kinds_that_cannot_run_are_left_out_with_the_reason(asked: Callable[..., Any]) -> None:
    large = ("--model", "llama-3.1-70b", "--device", "h100-80gb")
    plan = asked("plan", "fleet", "sample:azure-chat", *large, "--slo-ttft-ms", 5000, "--routers", "least-loaded",
                 "--gpus", 4,
                 "--json")["fleets"]  # fmt: skip
    assert all(pool["tensor_parallel"] > 1 for point in plan["points"] for pool in point["pools"])
    assert any(each["kind"] == "mixed TP1 least-loaded" and "weights" in each["why"] for each in plan["left_out"])


@pytest.mark.long
@pytest.mark.parametrize("layout", [(), ("--prefill", "tensor_parallel=2")])
def test_a_scaler_is_compared_with_the_best_fixed_fleet(
    asked: Callable[..., Any], run_command: Any, capsysbinary: Any, trace: Path, layout: tuple[object, ...]
) -> None:
    options = ("plan", "fleet", trace, *MODEL, *TIGHT, *layout, "--gpus", 4)
    scaled = (*options, "--set", "scaling.policy=queue,target=2,stable=60s", "--set", "scaling.startup_s=5")
    fixed, plan = asked(*options, "--json")["fleets"], asked(*scaled, "--json")["fleets"]
    scaler = plan.pop("scaler")
    assert plan == fixed, "the search has no scaler"
    best = plan["options"][0]
    assert scaler["fixed"]["command"] == best["command"] and scaler["begins_as"] == best["fleet"]
    report = asked(*shlex.split(scaler["command"])[1:], "--json")
    assert report["config"]["scaler"] == scaler["policy"] == "queue,target=2,stable=60s"
    assert report["goodput"]["requests_per_s"] == scaler["goodput_per_s"]
    hours = sum(pool["gpu_hours"] for pool in report["fleet"]["pools"])
    assert scaler["device_hours"] == pytest.approx(hours)
    assert scaler["hours_to_fixed"] == pytest.approx(hours / best["device_hours"])
    assert run_command(*scaled) == 0
    assert f"instead of {best['device_hours']:.3f}" in " ".join(capsysbinary.readouterr().out.decode().split())


def test_a_router_that_takes_no_notice_of_an_option_is_left_out(asked: Callable[..., Any], trace: Path) -> None:
    options = ("--routers", "least-loaded,llm-d", "--set", "routing.staleness=50ms", "--tensor-parallel", 1)
    plan = asked("plan", "fleet", trace, *MODEL, *TIGHT, "--gpus", 3, *options, "--json")["fleets"]
    assert {point["router"] for point in plan["points"]} == {None, "llm-d"}
    assert {each["kind"] for each in plan["left_out"]} == {"mixed least-loaded", "apart least-loaded"}
    for point in plan["points"]:
        assert ("--set routing.staleness=50ms" in point["command"]) is (point["router"] is not None)


@pytest.mark.long
def test_a_store_beside_kv_groups(asked: Callable[..., Any], trace: Path) -> None:
    of_groups = ("--model", "gpt-oss-20b", "--device", "h100-80gb", "--set", "kv_memory=4GiB", "--tensor-parallel", 1)
    plan = asked("plan", "fleet", trace, *of_groups, *TIGHT, "--gpus", 2, "--routers", "prefix",
                 "--set", "store_sizes=64GiB",
                 "--json")["fleets"]  # fmt: skip
    for point in plan["points"]:
        report = asked(*shlex.split(point["command"])[1:], "--json")
        assert report["goodput"]["requests_per_s"] == point["goodput_per_s"]
        assert report["config"]["kv_groups"] == "all"


@pytest.mark.long
def test_a_script_is_compared_with_a_fleet_that_has_its_pools(asked: Callable[..., Any], trace: Path) -> None:
    options = (
        "plan",
        "fleet",
        trace,
        *MODEL,
        *TIGHT,
        "--gpus",
        4,
        "--tensor-parallel",
        1,
        "--routers",
        "prefix",
        "--json",
    )
    for script, is_apart in (("script,20s=2", False), ("script,20s=2:1", True)):
        plan = asked(*options, "--set", f"scaling.policy={script}")["fleets"]
        scaler = plan["scaler"]
        (fixed,) = (point for point in plan["points"] if point["name"] == scaler["begins_as"])
        assert fixed["is_apart"] is is_apart and fixed["command"] == scaler["fixed"]["command"]
        keep = [point["devices"] for point in plan["points"] if point["slo_ratio"] >= plan["slo_share"]]
        within = [point for point in plan["points"] if point["devices"] <= min(keep, default=4)]  # more is not needed
        assert fixed["slo_ratio"] == max(point["slo_ratio"] for point in within if point["is_apart"] is is_apart)


@pytest.mark.long
def test_a_script_for_pools_that_no_small_fleet_has(asked: Callable[..., Any], run_command: Any) -> None:
    options = ("plan", "fleet", "sample:azure-chat", *MODEL, "--slo-ttft-ms", 60000, "--gpus", 2,
               "--tensor-parallel", 1,
               "--set", "scaling.policy=script,30s=1:2")  # fmt: skip
    plan = asked(*options, "--json")["fleets"]
    assert [point["devices"] for point in plan["front"]] == [1]
    assert plan["scaler"] == {"policy": "script,30s=1:2", "begins_as": None}
    assert run_command(*options) == 0


@pytest.mark.slow
def test_the_function_is_the_command(asked: Callable[..., Any], trace: Path) -> None:
    settings: dict[str, Any] = {"slo_ttft_ms": 3000, "slo_tpot_ms": 25, "transfer_rate": "50GB/s", "tensor_parallel": 1}
    plan = plan_fleets(trace, 3, model="llama-3.1-8b", device="h100-80gb", routers=["prefix"], **settings)
    options = ("--slo-ttft-ms", 3000, "--slo-tpot-ms", 25, "--transfer", "rate=50GB/s", "--tensor-parallel", 1)
    values = asked("plan", "fleet", trace, *MODEL, *options, "--gpus", 3, "--routers", "prefix", "--json")
    del values["command"]
    assert json.loads(plan.to_json()) == values
    assert plan.advice == values["fleets"]["answer"] and len(plan.options) == len(values["fleets"]["options"])
    assert plan.advice.split()[0] in plan.to_text() and "devices" in repr(plan)
    assert b"Fleets for" in plan.to_html() and "device hours" in plan._repr_html_()


def test_the_function_names_its_arguments(trace: Path) -> None:
    with pytest.raises(ConfigError, match=r"^replicas: does not go with a search for fleets"):
        plan_fleets(trace, 2, model="llama-3.1-8b", device="h100-80gb", slo_ttft_ms=5, replicas=2)
    with pytest.raises(ConfigError, match=r"^gpus: needs an SLO"):
        plan_fleets(trace, 2, model="llama-3.1-8b", device="h100-80gb")
    without = plan_fleets(load_trace(trace), 1, model="llama-3.1-8b", device="h100-80gb", slo_ttft_ms=3000)
    assert [option["command"] for option in without.options] == [""]


FILE = 'model = "llama-3.1-8b"\ndevice = "h100-80gb"\n'


@pytest.mark.parametrize(
    ("options", "text", "says"),
    [
        (["--gpus", "2", "--set", "replicas=2"], "", "--set replicas: does not go with a search for fleets"),
        (["--gpus", "2", "--prefill", "replicas=2"], "", "--prefill replicas: does not go with a search for fleets"),
        (
            ["--gpus", "2", "--set", "faults.script=down:1=5s"],
            "",
            "--set faults.script: does not go with a search for fleets",
        ),
        (["--gpus", "2", "--set", "data_parallel=2"], "", "--set data_parallel: does not go with a plan"),
        (["--gpus", "2"], "replicas = 2\n", "replicas: does not go with a search for fleets"),
        (["--gpus", "2"], '[transfer]\nrate = "5GB/s"\n', "transfer.rate: does not go with a search for fleets"),
        (["--gpus", "2"], '[[pool]]\nrole = "mixed"\n', "does not go with a search for fleets"),
        (["--gpus", "2", "--routers", "nearest"], "", "--routers: must be one of round-robin"),
        (["--gpus", "2", "--set", "store_sizes=5x"], "", "--set store_sizes: '5x' is not a size"),
        (
            ["--gpus", "2", "--set", "store_sizes=5GiB", "--store", "memory=6GiB"],
            "",
            "--set store_sizes: is one size already",
        ),
        pytest.param(
            ["--gpus", "2", "--set", "store_sizes=5GiB", "--tier", "store:scope=all,pages=9"],
            "",
            "--set store_sizes: is one size already",
        ),
        (["--gpus", "2", "--tensor-parallel", "4"], "", "--gpus: is less than one worker takes"),
        (["--gpus", "2000"], "", "--gpus: must be at most 256"),
        (
            ["--gpus", "1", "--set", "scaling.policy=script,30s=3:1"],
            "",
            "--set scaling.policy: has numbers for a pool decode",
        ),
    ],
)
def test_what_a_search_cannot_have_is_refused(
    options: list[str], text: str, says: str, run_command: Any, capsys: Any, tmp_path: Path
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(FILE + text)
    assert run_command("plan", "fleet", "sample:azure-chat", "--config", path, "--slo-ttft-ms", 900, *options) == 2
    assert says in capsys.readouterr().err


def test_an_slo_and_a_model_are_needed(run_command: Any, capsys: Any) -> None:
    assert run_command("plan", "fleet", "sample:azure-chat", *MODEL, "--gpus", 2) == 2
    assert "--gpus: has no effect without --slo-ttft-ms" in capsys.readouterr().err
    assert run_command("plan", "fleet", "sample:azure-chat", "--slo-ttft-ms", 5, "--gpus", 2) == 2
    assert "--gpus: needs a model and a device" in capsys.readouterr().err


def test_kinds_of_unlike_workers_are_fleets(settings: Given) -> None:
    kinds = FleetKinds(settings, all_sections(), 4)
    for kind in kinds.kinds:
        config = kinds.config(kind, (2, 1) if kind.is_apart else (2,))
        assert isinstance(config, FleetConfig) is kind.is_apart
    assert json.dumps(kinds.left_out) == "[]"

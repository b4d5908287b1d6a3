"""`kvarts.plan`, the function: what it returns, and that the command is the same."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvarts
from kvarts import ConfigError, ReplayConfig, Trace, load_trace
from kvarts.base.units import as_duration
from kvarts.plan import Plan
from kvarts.plan.fleets import plan_fleets
from kvarts.plan.page import render_page
from kvarts.plan.purchases import Prices
from kvarts.plan.routers import plan_routers
from kvarts.plan.series import charts_of
from kvarts.plan.users import plan_users
from kvarts.sim.routers.policies import RoundRobinPolicy
from kvarts.sim.traffic.editing import sliced

SAMPLE = Path(str(files("kvarts") / "data" / "mooncake-conversation-1000.jsonl"))
needs_pandas = pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="needs pandas")
needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")


@pytest.fixture(scope="module")
def few() -> Trace:
    requests = load_trace("sample:mooncake").requests
    assert requests is not None
    return Trace(requests[:60], unit_tokens=512, name="<few>")


@pytest.fixture(scope="module")
def plan(few: Trace) -> Plan:
    return kvarts.plan(few, ReplayConfig.for_device("llama-3.1-8b", "h100-80gb", slo_ttft_ms=5_000), slo_share=0.5)


def test_a_plan_prints_plots_and_serialises(plan: Plan) -> None:
    assert json.loads(plan.to_json()) == json.loads(json.dumps(plan.values))
    assert plan.to_text().startswith("<few>: 60 requests")
    assert plan.to_html() == render_page(plan.values)
    assert plan.options[0]["name"] == "cheapest"
    curve = plan.values["curve"]
    assert plan.hit_ratio(curve["pages"][-1]) == curve["hit_ratio"][-1]
    assert plan.hit_ratio(0) <= plan.hit_ratio(1_000) <= plan.hit_ratio(10**9)


def test_the_command_is_the_function(few: Trace, run_command: Any, capsys: Any) -> None:
    assert run_command("plan", "policies", "sample:azure-chat", "--page-size", 64, "--policy", "auto", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    values = json.loads(kvarts.plan("sample:azure-chat", page_size=64, policies=["auto"]).to_json())
    assert bare(printed) == bare(values)


def test_the_command_of_curves_is_the_function(path_of_few: Path, run_command: Any, capsys: Any) -> None:
    assert run_command("plan", "curve", path_of_few, "--page-size", 64, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    plan = kvarts.plan(path_of_few, page_size=64)
    assert bare(printed) == bare(json.loads(plan.to_json()))


def test_policies_with_a_model_are_compared_in_worlds(few_agents: tuple[Path, Path]) -> None:
    config = ReplayConfig.for_device("llama-3.1-8b", "h100-80gb", pages=1_500)
    plan = kvarts.plan(few_agents[0], config, at=[1_000], policies=["session-aware"])
    lead = plan.values["league_lead"]
    assert lead["policy"] == "session-aware" and lead["confidence"]["of"] == 10
    ours, of_lru = (lead["ttft_ms_mean"][name] for name in ("policy", "lru"))
    assert lead["is_ahead"] == (ours < of_lru)
    assert f"{lead['confidence']['kept']} of 10 worlds" in plan.advice
    assert plan.advice in " ".join(plan.to_text().split())


def bare(value: Any) -> Any:
    """Return values without command lines, which only commands have."""
    if isinstance(value, dict):
        return {name: bare(each) for name, each in value.items() if name != "command"}
    return [bare(each) for each in value] if isinstance(value, list) else value


OF_DEVICE = ("--model", "llama-3.1-8b", "--device", "h100-80gb", "--slo-ttft-ms", 2_000, "--slo-share", 0.5, "--json")


@pytest.fixture
def path_of_few(tmp_path: Path) -> Path:
    path = tmp_path / "few.jsonl"
    path.write_text("".join(SAMPLE.read_text().splitlines(keepends=True)[:20]))
    return path


def test_the_command_with_an_slo_is_the_function(path_of_few: Path, run_command: Any, capsys: Any) -> None:
    assert run_command("plan", path_of_few, *OF_DEVICE, "--quick") == 0
    printed = json.loads(capsys.readouterr().out)
    config = ReplayConfig.for_device("llama-3.1-8b", "h100-80gb", slo_ttft_ms=2_000)
    values = json.loads(kvarts.plan(path_of_few, config, slo_share=0.5, quick=True).to_json())
    assert bare(printed) == bare(values) and values["latency"]["options"]


def test_the_command_of_fleets_is_the_function(path_of_few: Path, run_command: Any, capsys: Any) -> None:
    assert run_command("plan", "fleet", path_of_few, *OF_DEVICE, "--gpus", 2) == 0
    printed = json.loads(capsys.readouterr().out)
    settings: dict[str, Any] = {"model": "llama-3.1-8b", "device": "h100-80gb", "slo_ttft_ms": 2_000}
    values = json.loads(plan_fleets(path_of_few, 2, slo_share=0.5, **settings).to_json())
    assert bare(printed) == bare(values) and values["fleets"]["confidence"]["of"] == 10


OF_SERVER = ("--model", "llama-3.1-8b", "--device", "H100", "--json")
PRICES = 'date = "2026-11-01"\ncurrency = "EUR"\n[per_hour]\nh100-80gb = 2.5\nhost_gib = 0.004\n'


@pytest.fixture
def few_agents(tmp_path: Path) -> tuple[Path, Path]:
    """Return a trace of sessions, and prices."""
    trace, prices = tmp_path / "few-agents.jsonl", tmp_path / "prices.toml"
    prices.write_text(PRICES)
    rows: list[dict[str, Any]] = [
        {
            "timestamp": 100 * session + 10 * turn,
            "input_length": 2000 * (turn + 1),
            "output_length": 20,
            "hash_ids": [*range(10 * session, 10 * session + 4 * (turn + 1))],
            "session_id": f"s{session}",
            **({"delay": 50} if turn else {}),
        }
        for session in range(5)
        for turn in range(3)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in sorted(rows, key=lambda row: row["timestamp"])))
    return trace, prices


def test_the_command_of_users_is_the_function(few_agents: tuple[Path, Path], run_command: Any, capsys: Any) -> None:
    trace, prices = few_agents
    line = ("plan", "users", trace, *OF_SERVER, "--users", "1..8", "--slo-ttft-ms", 150, "--slo-share", 0.7)
    assert run_command(*line, "--prices", prices) == 0
    printed = json.loads(capsys.readouterr().out)
    config = ReplayConfig.for_device("llama-3.1-8b", "H100", slo_ttft_ms=150)
    plan = plan_users(trace, config, (1, 8), slo_share=0.7, prices=prices)
    assert bare(printed) == bare(json.loads(plan.to_json()))
    users = plan.values["users"]
    answer = plan.options[0]
    assert answer["users"] == users["fits"] and users["confidence"]["of"] == 10
    assert f"{users['fits']} users fit on 1 GPU, in {users['confidence']['kept']} of 10 worlds" in plan.advice
    assert f"EUR {2.5 / users['fits']:.2f} per user" in plan.advice and "per million tokens" in plan.advice
    assert {"step_times", "prompt_length", "agents", "memory", "hit_ratio"} == users["sensitivity"].keys()
    assert answer["would_change"] and answer["serve"].keys() == {"vllm", "sglang"}
    assert plan.advice in " ".join(plan.to_text().split()) and plan.to_html() and plan._repr_html_()


def test_the_command_of_routers_is_the_function(few_agents: tuple[Path, Path], run_command: Any, capsys: Any) -> None:
    trace, prices = few_agents
    line = ("plan", "routers", trace, *OF_SERVER, "--replicas", 2, "--routers", "session,round-robin")
    assert run_command(*line, "--prices", prices) == 0
    printed = json.loads(capsys.readouterr().out)
    config = ReplayConfig.for_device("llama-3.1-8b", "H100", replicas=2)
    plan = plan_routers(trace, config, ["session", "round-robin"], prices=prices)
    assert bare(printed) == bare(json.loads(plan.to_json()))
    routers = plan.values["routers"]
    means = {point["router"]: point["ttft_ms"]["mean"] for point in routers["points"]}
    assert routers["best"]["router"] == min(means, key=lambda name: means[name])
    assert " on 2 GPUs" in plan.advice and f"in {routers['confidence']['kept']} of 10 worlds" in plan.advice
    assert "It costs EUR 5.00 an hour" in plan.advice
    assert {"step_times", "rate", "prompt_length", "agents"} == routers["sensitivity"].keys()
    assert plan.advice in " ".join(plan.to_text().split()) and plan.to_html() and plan._repr_html_()


def test_pools_apart_get_host_memory_too() -> None:
    """The best split without it gets some in each of its workers."""
    agents = sliced(load_trace("sample:agents"), count=40)
    settings: dict[str, Any] = {"model": "qwen3-32b", "device": "h100-80gb", "slo_ttft_ms": 2_500}
    points = plan_fleets(agents, 4, slo_share=1.0, routers=["prefix"], **settings).values["fleets"]["points"]
    apart = [point for point in points if point["is_apart"]]
    bought = [point for point in apart if point["host_bytes"]]
    assert bought
    for point in bought:
        assert point["price_per_hour"] == pytest.approx(point["devices"] * (1 + point["host_bytes"] / 2**40))
        without = next(each for each in apart if point["name"].startswith(each["name"]))
        assert not without["host_bytes"] and point["hit_ratio"] > without["hit_ratio"]


def test_a_plan_refuses_what_does_not_go_together(few: Trace) -> None:
    with pytest.raises(ConfigError, match="Give model and device") as caught:
        kvarts.plan(few, prices=Prices(host_gib=1.0))
    assert caught.value.field == "prices"
    with pytest.raises(ConfigError) as caught:
        kvarts.plan(few, policies=["none-such"])
    assert caught.value.field == "policy"
    for cost_error in (0.0, 1.0, float("nan")):
        with pytest.raises(ConfigError, match="between 0 and 1") as caught:
            kvarts.plan(few, ReplayConfig(), cost_error=cost_error)
        assert caught.value.field == "cost_error"
    with pytest.raises(ConfigError, match="must be one of") as caught:
        kvarts.plan(few, ReplayConfig(), router="prefxi")
    assert caught.value.field == "router"


class InTurn(RoundRobinPolicy):
    """A router of one's own that chooses as round-robin does."""


@pytest.mark.parametrize("is_in_config", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_plan_looks_at_a_router_of_ones_own(few: Trace, is_in_config: bool) -> None:
    config = ReplayConfig.for_device("llama-3.1-8b", "h100-80gb", pages=9_000, slo_ttft_ms=2_500)
    config = msgspec.structs.replace(config, router=InTurn) if is_in_config else config
    plan = kvarts.plan(few, config, at=[9_000], slo_share=0.9, router=None if is_in_config else InTurn)
    by_name = kvarts.plan(few, config, at=[9_000], slo_share=0.9, router="round-robin")
    own, named = (each.options[-1] for each in (plan, by_name))
    assert own["replicas"] > 1 and own["ttft_ms_p99"] == named["ttft_ms_p99"]
    assert {point["router"] for point in plan.values["latency"]["points"] if point["replicas"] > 1} == {"InTurn"}


def test_a_plan_says_what_it_is(plan: Plan) -> None:
    assert repr(plan) == f"<Plan for <few>: {plan.advice}>" and " the SLO for 50.0 % of requests, in " in plan.advice
    shown = plan._repr_html_()
    assert "<table>" in shown and "<few>" not in shown
    uncertain = plan.options[0]["uncertainty"]["ttft_ms"]["p99"]
    assert f"± {as_duration(uncertain)}" in shown


@needs_pandas
def test_a_plan_is_a_table(plan: Plan) -> None:
    frame = plan.to_pandas()
    assert frame["pages"].tolist() == [point["pages"] for point in plan.values["at"]]
    assert frame["evicted_tokens"].tolist() == [point["computed_tokens"]["evicted"] for point in plan.values["at"]]


@needs_matplotlib
def test_a_plan_is_a_figure(plan: Plan) -> None:
    first = plan.plot().axes[0]
    assert "2 GPUs" in {each.get_text() for each in first.texts} and first.collections
    titles = {each.get_title() for each in plan.plot().axes}
    assert {"Hits by memory", "Latency by memory", "SLO kept, by memory"} <= titles


def test_the_first_chart_is_cost_and_goodput_with_the_answer_marked(plan: Plan) -> None:
    chart = charts_of(plan.values)[0]
    assert (chart["name"], chart["kind"]) == ("Goodput by cost", "scatter")
    (answer,) = (point for point in chart["points"] if point["is_on_front"])
    assert " of 10 worlds" in answer["text"]
    assert answer["x"] == plan.options[0]["price_per_hour"]
    least, most = answer["error"]
    assert least <= answer["y"] <= most and answer["label"] == "2 GPUs"
    assert len({point["x"] for point in chart["points"]}) > 1


def test_a_plan_for_states_in_slots_is_refused(
    run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes of memory would not change the slots."""
    options = "--model", "qwen3.5-35b-a3b", "--device", "h200", "--set", "engine=sglang", "--slo-ttft-ms", 3000
    assert run_command("plan", *options) == 2
    assert "slots stay the same in all sizes of memory" in capsys.readouterr().err


def test_hits_are_counted_in_the_pages_of_the_engine(
    run_command: Callable[..., int], capsys: pytest.CaptureFixture[str], path_of_few: str
) -> None:
    options = path_of_few, "--model", "qwen3-8b", "--device", "h200", "--set", "engine=sglang", "--slo-ttft-ms", 3000
    assert run_command("plan", *options, "--quick", "--json") == 0
    assert json.loads(capsys.readouterr().out)["page_size"] == 1

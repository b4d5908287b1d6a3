"""`kvarts.plan`, the function: what it returns, and that the command is the same."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import msgspec
import pytest

import kvarts
from kvarts import ConfigError, Plan, ReplayConfig, Trace, load_trace
from kvarts.base.units import as_duration
from kvarts.plan.page import render_page
from kvarts.sim.routers.policies import RoundRobinPolicy

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

    def bare(value: Any) -> Any:
        """Without command lines, which only the command has."""
        if isinstance(value, dict):
            return {name: bare(each) for name, each in value.items() if name != "command"}
        return [bare(each) for each in value] if isinstance(value, list) else value

    assert bare(printed) == bare(values)


def test_a_plan_refuses_what_does_not_go_together(few: Trace) -> None:
    with pytest.raises(ConfigError, match="Give model and device") as caught:
        kvarts.plan(few, prices={"host": 1.0})
    assert caught.value.field == "price"
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
    own, by_name = plan.values["latency"]["replicas"]["by_router"][:2]
    assert (own.pop("router"), by_name.pop("router")) == ("InTurn", "round-robin")
    assert own == by_name and own["replicas"] > 1


def test_a_plan_says_what_it_is(plan: Plan) -> None:
    assert repr(plan) == f"<Plan for <few>: {plan.advice}>" and "is the least that keeps the SLO" in plan.advice
    shown = plan._repr_html_()
    assert "<table>" in shown and "<few>" not in shown
    uncertain = plan.options[0]["uncertainty"]["ttft_ms"]["p99"]
    assert f"+- {as_duration(uncertain)}" in shown


@needs_pandas
def test_a_plan_is_a_table(plan: Plan) -> None:
    frame = plan.to_pandas()
    assert frame["pages"].tolist() == [point["pages"] for point in plan.values["at"]]
    assert frame["evicted_tokens"].tolist() == [point["computed_tokens"]["evicted"] for point in plan.values["at"]]


@needs_matplotlib
def test_a_plan_is_a_figure(plan: Plan) -> None:
    titles = {each.get_title() for each in plan.plot().axes}
    assert {"Hits by memory", "Latency by memory", "SLO kept, by memory"} <= titles

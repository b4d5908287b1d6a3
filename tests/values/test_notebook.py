"""What a notebook sees: configurations by the names of options, and values that print, plot and become tables."""

from __future__ import annotations

import importlib.util
import inspect
import json
import pydoc
from typing import Any

import numpy as np
import pytest

import kvarts
from kvarts import ConfigError, LruOrder, Plan, ReplayConfig, Report, Slo, Trace, load_trace, replay
from kvarts.plan.page import render_page

needs_pandas = pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="needs pandas")
needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")


def test_a_configuration_takes_the_names_of_options() -> None:
    config = ReplayConfig.for_device(
        "llama-3.1-8b",
        "h100-80gb",
        replicas=2,
        max_seqs=64,
        host_memory="96GiB",
        slo_ttft_ms=3000,
        tensor_parallel=2,
    )
    assert (config.replicas, config.max_num_seqs, config.slo.ttft_ms) == (2, 64, 3000.0)
    assert config.num_pages > 28_392  # two devices hold more
    assert config.placement is not None
    assert config.tiers == {"host": 96 * 2**30 // (config.page_size * config.placement.kv_bytes_per_token)}
    assert ReplayConfig.for_device("llama-3.1-8b", "h100-80gb", num_pages=100).num_pages == 100


def test_a_configuration_by_names_is_that_of_the_command_line(run_command: Any, capsys: Any) -> None:
    options = ("--max-seqs", 32, "--host-memory", "4GiB", "--slo-tpot-ms", 50, "--speedup", 2.0)
    assert run_command("replay", "sample:mooncake", "--model", "llama-3.1-8b", "--device", "h100-80gb", *options,
                       "--json") == 0  # fmt: skip
    printed = json.loads(capsys.readouterr().out)["config"]
    settings = {"max_seqs": 32, "host_memory": "4GiB", "slo_tpot_ms": 50, "speedup": 2.0}
    assert ReplayConfig.for_device("llama-3.1-8b", "h100-80gb", **settings).to_builtins() == printed


def test_objects_go_where_the_command_line_has_names() -> None:
    slo = Slo(e2e_ms=9.0)
    config = ReplayConfig.for_device("llama-3.1-8b", "h100-80gb", slo=slo, eviction=LruOrder)
    assert config.slo == slo and config.eviction is LruOrder


@pytest.mark.parametrize(
    ("settings", "field", "said"),
    [
        ({"host_mem": "1GiB"}, "host_mem", "host_memory"),
        ({"max_seqs": 0}, "max_seqs", "at least 1"),
        ({"slo_ttft_ms": "soon"}, "slo_ttft_ms", "float"),
        ({"pages": 10, "kv_memory": "1GiB"}, None, "kv_memory"),
        ({"concurrency": 2, "speedup": 2.0}, "speedup", "concurrency"),
    ],
)
def test_mistakes_name_the_argument(settings: dict[str, Any], field: str | None, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ReplayConfig.for_device("llama-3.1-8b", "h100-80gb", **settings)
    assert said in str(caught.value) and "--" not in str(caught.value)
    if field is not None:
        assert caught.value.field == field


def test_help_on_a_configuration_can_be_read() -> None:
    text = pydoc.render_doc(ReplayConfig, renderer=pydoc.plaintext)
    assert "msgspec.Meta" not in text and "extra=" not in text
    assert "for_device(model: 'str', device: 'str'" in text
    assert len(str(inspect.signature(ReplayConfig))) < 4_000


def test_no_field_of_a_configuration_is_of_any_type() -> None:
    kinds = {name: str(parameter.annotation) for name, parameter in inspect.signature(ReplayConfig).parameters.items()}
    assert [name for name, kind in kinds.items() if "Any" in kind] == []


@pytest.fixture(scope="module")
def report() -> Report:
    config = ReplayConfig.for_device("llama-3.1-8b", "h100-80gb", pages=12_000, slo_ttft_ms=500)
    return replay(load_trace("sample:azure-chat"), config)


@pytest.fixture(scope="module")
def few() -> Trace:
    requests = load_trace("sample:mooncake").requests
    assert requests is not None
    return Trace(requests[:60], unit_tokens=512, name="<few>")


@pytest.fixture(scope="module")
def plan(few: Trace) -> Plan:
    return kvarts.plan(few, ReplayConfig.for_device("llama-3.1-8b", "h100-80gb", slo_ttft_ms=5_000), slo_share=0.5)


def test_values_say_what_they_are(report: Report, few: Trace, plan: Plan) -> None:
    assert repr(report).startswith("<Report on azure-conv-1000.csv: 1,000 of 1,000 requests completed; TTFT p50 ")
    assert repr(few) == (
        "<Trace <few>: 60 requests, arrivals over 15.0 s, "
        f"{sum(request.num_prompt_tokens for request in few):,} tokens of prompts, "
        f"the longest {max(request.num_prompt_tokens for request in few):,}, "
        f"{sum(request.num_output_tokens for request in few):,} tokens of outputs, "
        f"the longest {max(request.num_output_tokens for request in few):,}>"
    )
    assert repr(plan) == f"<Plan for <few>: {plan.advice}>" and "is the least that keeps the SLO" in plan.advice
    assert "read as they are needed" in repr(Trace(iter([]), name="stream"))
    for value in (report, few, plan):
        shown = value._repr_html_()
        assert "<table>" in shown and "<few>" not in shown


def test_a_plan_prints_plots_and_serialises(plan: Plan) -> None:
    assert json.loads(plan.to_json()) == json.loads(json.dumps(plan.values))
    assert plan.to_text().startswith("<few>: 60 requests")
    assert plan.to_html() == render_page(plan.values)
    assert plan.options[0]["name"] == "cheapest"
    curve = plan.values["curve"]
    assert plan.hit_ratio(curve["pages"][-1]) == curve["hit_ratio"][-1]
    assert plan.hit_ratio(0) <= plan.hit_ratio(1_000) <= plan.hit_ratio(10**9)


def test_the_command_is_the_function(few: Trace, run_command: Any, capsys: Any) -> None:
    assert run_command("plan", "sample:azure-chat", "--page-size", 64, "--policy", "fifo", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    values = json.loads(kvarts.plan("sample:azure-chat", page_size=64, policies=["fifo"]).to_json())

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


@needs_pandas
def test_tables_have_the_rows(report: Report, few: Trace, plan: Plan) -> None:
    rows, steps = report.to_pandas(), report.to_pandas("steps")
    assert len(rows) == 1_000 and list(rows) == list(report.requests)
    assert np.array_equal(steps["used_pages"], report.steps["used_pages"])
    assert few.to_pandas()["input_tokens"].tolist() == [request.num_prompt_tokens for request in few]
    assert plan.to_pandas()["pages"].tolist() == [point["pages"] for point in plan.values["at"]]
    with pytest.raises(ConfigError):
        report.to_pandas("tokens")  # type: ignore[arg-type]


@needs_matplotlib
def test_figures_show_what_was_asked_for(report: Report, plan: Plan) -> None:
    axes = report.plot().axes
    assert [each.get_ylabel() for each in axes] == ["KV pages", "requests", "prefix hits, %", "% of requests within"]
    assert "SLO 500.0 ms" in axes[-1].get_legend_handles_labels()[1]
    used = axes[0].get_lines()[1].get_ydata()
    assert used.max() == report.summary["peak_used_pages"] and used[-1] == 0
    titles = {each.get_title() for each in plan.plot().axes}
    assert {"Hits by memory", "Latency by memory", "SLO kept, by memory"} <= titles

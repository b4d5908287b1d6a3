"""What a notebook sees: configurations by the names of options, and values that print, plot and become tables."""

from __future__ import annotations

import importlib.util
import inspect
import json
import pydoc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvarts import ConfigError, ReplayConfig, Report, Slo, Trace, load_trace, replay, trace_info
from kvarts.base import columns
from kvarts.plan.planning import Plan, make_plan
from kvarts.plan.purchases import Prices
from kvarts.policies import LruOrder

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
    assert run_command("replay", "sample:azure-chat", "--model", "llama-3.1-8b", "--device", "h100-80gb", *options,
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
        ({"max_seq": 64}, "max_seq", "max_seqs"),
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
    text = pydoc.plain(pydoc.render_doc(ReplayConfig))
    assert "msgspec.Meta" not in text and "extra=" not in text
    assert "for_device(model: 'str', device: 'str'" in text
    assert len(str(inspect.signature(ReplayConfig))) < 9_150  # 3,700 of them are of SGLang's settings


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


def test_values_say_what_they_are(report: Report, few: Trace) -> None:
    assert repr(report).startswith("<Report on azure-conv-1000.csv: 1,000 of 1,000 requests completed; TTFT p50 ")
    assert repr(report).count(" ± ") == 2 and "one standard deviation" in report._repr_html_()
    assert repr(few) == (
        "<Trace <few>: 60 requests, arrivals over 15.0 s, "
        f"{sum(request.num_prompt_tokens for request in few):,} tokens of prompts, "
        f"the longest {max(request.num_prompt_tokens for request in few):,}, "
        f"{sum(request.num_output_tokens for request in few):,} tokens of outputs, "
        f"the longest {max(request.num_output_tokens for request in few):,}>"
    )
    assert "read as they are needed" in repr(Trace(iter([]), name="stream"))
    for value in (report, few):
        shown = value._repr_html_()
        assert "<table>" in shown and "<few>" not in shown


@needs_pandas
def test_tables_have_the_rows(report: Report, few: Trace) -> None:
    rows, steps = report.to_pandas(), report.to_pandas("steps")
    assert len(rows) == 1_000 and list(rows) == list(report.requests)
    assert np.array_equal(steps["used_pages"], report.steps["used_pages"])
    assert few.to_pandas()["input_tokens"].tolist() == [request.num_prompt_tokens for request in few]
    with pytest.raises(ConfigError):
        report.to_pandas("tokens")  # type: ignore[arg-type]


@needs_matplotlib
def test_figures_show_what_was_asked_for(report: Report) -> None:
    axes = report.plot().axes
    assert [each.get_ylabel() for each in axes] == ["KV pages", "requests", "prefix hits, %", "% of requests within"]
    assert "SLO 500.0 ms" in axes[-1].get_legend_handles_labels()[1]
    used = axes[0].get_lines()[1].get_ydata()
    assert used.max() == report.summary["peak_used_pages"] and used[-1] == 0


def test_a_trace_says_what_is_in_it(few: Trace, run_command: Any, capsys: Any) -> None:
    info = trace_info(few)
    assert info.values["num_requests"] == 60 and info.warnings == []
    assert repr(info).startswith("<TraceInfo trace <few>, num_requests 60, ")
    assert "<table>" in info._repr_html_() and "<few>" not in info._repr_html_()
    assert run_command("trace", "info", "sample:azure-chat", "--json") == 0
    printed = capsys.readouterr()
    info = trace_info("sample:azure-chat")
    assert info.to_json().decode() == printed.out and json.loads(printed.out) == info.values
    assert [f"kvarts: {warning}" for warning in info.warnings] == printed.err.splitlines()
    for unknown in (Trace([]), Trace(iter([]), name="stream")):
        with pytest.raises(ConfigError, match="no requests that are known beforehand"):
            trace_info(unknown)


@pytest.fixture(scope="module")
def priced() -> Plan:
    config = ReplayConfig.for_device("llama-3.1-8b", "h100-80gb", page_size=512, pages=900, slo_ttft_ms=5_000)
    return make_plan("sample:mooncake", config, policies=["auto"], prices=Prices(device=3.0, host_gib=0.1))


def test_every_part_of_a_plan_is_a_table(priced: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "to_frame", lambda found: found)
    assert priced.parts[:4] == ["sizes", "curve", "league", "options"] and "replays" in priced.parts
    league = priced.to_pandas("league")
    assert league["policy"] == [row["policy"] for row in priced.values["league"]]
    assert "ttft_ms_p99" in league and league["ttft_ms_p99"][0] is None, "rows one at a time have no latencies"
    assert len(priced.to_pandas("curve")["pages"]) == len(priced.values["curve"]["pages"])
    assert len(priced.to_pandas("options")["name"]) == len(priced.options) > 0
    for part in priced.parts:
        found = priced.to_pandas(part)
        assert len({len(values) for values in found.values()}) == 1
        assert "command" in found or part in ("sizes", "curve")
        assert not any(isinstance(value, dict) for values in found.values() for value in values)
    with pytest.raises(ConfigError, match=r"'leage' is not in this plan\. It has sizes, curve, league"):
        priced.to_pandas("leage")


@needs_matplotlib
def test_figures_show_themselves(report: Report, priced: Plan) -> None:
    """IPython asks an object for `_repr_png_`; without that, a Figure made without pyplot is shown as text."""
    for value in (report, priced):
        figure = value.plot()
        png = figure._repr_png_()
        assert png.startswith(b"\x89PNG") and len(png) > 20_000 and png == value.plot()._repr_png_()
        assert type(figure).__mro__[1].__name__ == "Figure"


CELLS = (
    "import kvarts as k\nreport = k.replay('sample:mooncake', k.ReplayConfig(num_pages=2000, page_size=512))\nreport",
    "report.plot()",
    "k.plan('sample:mooncake', page_size=512).plot()",
)


@needs_matplotlib
def test_a_notebook_shows_tables_and_figures(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
    pytest.importorskip("ipykernel", reason="needs ipykernel")
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [cell.outputs[-1].data for cell in book.cells]
    assert "<table>" in shown[0]["text/html"]
    assert all(len(each["image/png"]) > 20_000 for each in shown[1:])

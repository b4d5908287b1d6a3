"""Every form of traces: recognised by its content, read as a naive reader does, and never wrong in silence."""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvarts.base.errors import ConfigError, InputError
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.formats import FORMS, TraceForm, load_trace
from kvarts.sim.traffic.mooncake import MooncakeReader
from kvarts.sim.traffic.trace import Trace, spell

from oracles.naive_forms import naive_hits, naive_requests

HERE = Path(__file__).parent / "forms"
OPTIONS: dict[str, dict[str, Any]] = {
    "mooncake-deltas.jsonl": {"session_turns": "deltas"},
    "sglang-runs.jsonl": {"run": 2},
}
NAIVE = [
    "aiperf-2025.jsonl", "aiperf.jsonl", "azure-2024.csv", "azure.csv", "bailian.jsonl", "burstgpt-sessions.csv",
    "burstgpt.csv", "dynamo.jsonl", "guidellm-v2.json", "guidellm.json", "litellm.jsonl", "mooncake-deltas.jsonl",
    "mooncake-no-ids.jsonl", "mooncake.jsonl", "openai.jsonl", "sglang.jsonl", "vllm-bench.json",
    "claude-stream.jsonl", "codex.jsonl", "columns.csv", "columns.jsonl", "gemini.json", "helicone.json",
    "inference-perf.json", "langfuse.jsonl", "litellm-page.json", "litellm.csv", "otlp.jsonl", "sglang-runs.jsonl",
]  # fmt: skip
"""Files that naive_forms reads; those of agents have oracles of their own."""
LEFT_OUT = {
    "aiperf.jsonl": {"of a warm-up": 1},
    "aiperf-2025.jsonl": {"cancelled": 1, "of a warm-up": 1},
    "azure-2024.csv": {"without output tokens": 1},
    "burstgpt-sessions.csv": {"without output tokens": 1},
    "burstgpt.csv": {"without output tokens": 1},
    "guidellm-v2.json": {"incomplete": 1},
    "codex.jsonl": {"repeated lines": 1},
    "columns.csv": {"without output tokens": 1},
    "helicone.json": {"answered by a proxy cache": 1, "embeddings": 1, "failed": 1},
    "inference-perf.json": {"failed": 1},
    "langfuse.jsonl": {"embeddings": 1, "failed": 1},
    "litellm-page.json": {"answered by a proxy cache": 1, "repeated lines": 1},
    "litellm.csv": {"answered by a proxy cache": 1, "embeddings": 1, "failed": 1},
    "litellm.jsonl": {"failed": 1},
    "otlp.jsonl": {"embeddings": 1, "failed": 1},
    "openai.jsonl": {"without output tokens": 1},
    "sglang.jsonl": {"failed": 1},
    "vllm-bench.json": {"failed": 1},
}


def loaded(name: str) -> Trace:
    return load_trace(HERE / name, **OPTIONS.get(name, {}))


def requests_of(trace: Trace) -> list[tuple[int, int, int]]:
    return [(r.arrival_ns, r.num_prompt_tokens, r.num_output_tokens) for r in trace]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_form_is_recognised_by_its_content(form: TraceForm, tmp_path: Path) -> None:
    """The example is read whatever the file is called, packed or not, from a pipe, with a byte order mark."""
    expected = None
    for name, data in (
        ("trace", form.example.encode()),
        ("trace.csv", form.example.encode() + b"\n\n"),
        ("trace.txt", b"\xef\xbb\xbf" + form.example.encode() + b"\n"),
        ("packed", gzip.compress(form.example.encode())),
    ):
        path = tmp_path / name
        path.write_bytes(data)
        trace = load_trace(path)
        assert trace.knows_prefixes == form.tells_prefixes
        assert len(list(trace)) >= 1
        expected = expected or requests_of(trace)
        assert requests_of(trace) == expected
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(form.example.encode(),))
    writer.start()
    assert requests_of(load_trace(pipe)) == expected
    writer.join()


@pytest.mark.parametrize("form", [form for form in FORMS if not form.is_table], ids=lambda form: form.name)
def test_records_may_be_an_array_or_many_lines_each(form: TraceForm, tmp_path: Path) -> None:
    if form.name == "agentic-mooncake":
        pytest.skip("its first line is a header")
    path = tmp_path / "trace"
    path.write_text(form.example)
    expected = requests_of(load_trace(path))
    value = json.loads(form.example)
    for text in (json.dumps([value], indent=1), json.dumps([value]), json.dumps(value, indent=1), json.dumps(value)):
        path.write_text(text)
        assert requests_of(load_trace(path)) == expected


def test_an_array_of_mooncakes_rows_is_read_as_its_lines_are(tmp_path: Path) -> None:
    rows = [{"timestamp": row, "input_length": 600, "output_length": 2, "hash_ids": [0, row]} for row in range(50)]
    lines, array = tmp_path / "lines", tmp_path / "array"
    lines.write_text("\n".join(map(json.dumps, rows)))
    array.write_text(json.dumps(rows, indent=2))
    assert requests_of(load_trace(array)) == requests_of(load_trace(lines))
    rows[6]["input_length"] = -1
    array.write_text(json.dumps(rows))
    with pytest.raises(InputError, match="array:7: input_length: must be at least 1"):
        load_trace(array)
    assert load_trace(array, skip_bad_lines=True).num_skipped_lines == 1
    assert len(list(MooncakeReader(array, skip_bad_lines=True))) == 49


@pytest.mark.parametrize("name", NAIVE)
def test_sums_and_hits_are_those_of_a_naive_reader(name: str) -> None:
    trace, naive = loaded(name), naive_requests(HERE / name)
    requests = sorted(trace, key=lambda request: request.row)
    assert [request.num_prompt_tokens for request in requests] == [len(request.prompt) for request in naive]
    assert [request.num_output_tokens for request in requests] == [request.num_output for request in naive]
    assert trace.left_out == LEFT_OUT.get(name, {})
    report = replay(trace, ReplayConfig(num_pages=100_000, page_size=4, concurrency=1))
    summary = report.summary
    assert summary["num_input_tokens"] == sum(len(request.prompt) for request in naive)
    assert summary["num_output_tokens"] == sum(request.num_output for request in naive)
    in_order = [naive[row] for row in report.request_columns["row"].tolist()]
    assert summary["num_cached_tokens"] == naive_hits(in_order, 4)
    assert summary.get("left_out", {}) == trace.left_out
    assert ("hits are unknown" in " ".join(summary.get("warnings", []))) == (not trace.knows_prefixes)
    assert (summary["prefix_hit_ratio"] is None) == (not trace.knows_prefixes)


def test_every_file_is_tested() -> None:
    others = {"README.md", "converted", "exported", "dag.jsonl"}
    of_agents = {"agentx.jsonl", "agentic-mooncake.jsonl", "agentic-mooncake-v1.jsonl", "claude-code"}
    assert {path.name for path in HERE.iterdir()} - others <= {*NAIVE, *of_agents}


def test_times_are_those_of_the_files() -> None:
    """Of forms that were not read before: what the columns say, in their units."""
    ns = {name: [request.arrival_ns for request in loaded(name)] for name in NAIVE}
    assert ns["azure-2024.csv"] == [0, 12_384_000, 507_405_000]  # one is written with another offset
    assert ns["burstgpt-sessions.csv"] == [0, 40 * 10**9, 113 * 10**9, 115 * 10**9]
    assert ns["litellm.jsonl"] == [0, 2_500_000_000]
    assert ns["aiperf-2025.jsonl"] == [0, 10 * 10**9]
    assert ns["sglang.jsonl"] == [0, 250_000_000, 500_000_000]
    seconds = {name: [time / 1e9 for time in times] for name, times in ns.items()}
    assert seconds["otlp.jsonl"] == [0, 2.5, 6] and seconds["langfuse.jsonl"] == [0, 1.25]
    assert seconds["helicone.json"] == [0, 5] and seconds["litellm-page.json"] == [0, 8]
    assert seconds["litellm.csv"] == [0, 9] and seconds["inference-perf.json"] == [0, 1.5, 3.25]
    assert seconds["columns.csv"] == [0, 1] and seconds["columns.jsonl"] == [0, 0.5]
    # A turn of an agent was sent when its user or its tool had answered, or else when its usage was written.
    assert seconds["codex.jsonl"] == [0, 8, 59] and seconds["gemini.json"] == [0, 19, 59]


def test_turns_of_burstgpt_and_aiperf_wait_for_each_other() -> None:
    def sessions(name: str) -> list[str | None]:
        return [request.session_id for request in loaded(name)]

    assert sessions("burstgpt-sessions.csv") == ["7", "7", "8", None]
    assert sessions("aiperf-2025.jsonl") == ["c2", "c2"]


# Unknown forms --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "near", "missing"),
    [
        ('{"timestamp": 1, "output_length": 2, "hash_ids": [1]}\n', None, None),
        ('{"chat_id": 1, "input_len": 5}', "bailian", "hash_ids"),
        ("TIMESTAMP,ContextTokens,Output\n1,2,3\n", "azure", "GeneratedTokens"),
        ("a;b;c\n1;2;3\n", None, None),
    ],
)
def test_an_unknown_form_is_refused_with_what_is_known(
    tmp_path: Path, text: str, near: str | None, missing: str | None
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_trace(path)
    message = str(caught.value)
    assert "is not of a known form" in message and "kvarts trace forms" in message
    assert all(form.name in message for form in FORMS)
    if near is not None:
        assert f"Nearest is {near}, which has {missing} as well" in message


def test_forms_are_in_the_reference() -> None:
    text = (Path(__file__).parents[3] / "docs" / "reference.md").read_text()
    assert [form.name for form in FORMS if f"`{form.name}`" not in text] == []


def test_forms_are_listed(run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("trace", "forms") == 0
    listed = capsys.readouterr().out
    assert all(form.name in listed and form.example in listed for form in FORMS)
    assert run_command("trace", "forms", "--json") == 0
    assert [form["name"] for form in json.loads(capsys.readouterr().out)] == [form.name for form in FORMS]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_an_option_that_a_form_does_not_take_is_refused(form: TraceForm, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(form.example)
    options: dict[str, Any] = {"trace_block_size": 16, "skip_bad_lines": True, "session_turns": "whole"}
    for name in options.keys() - form.takes:
        with pytest.raises(ConfigError) as caught:
            load_trace(path, **{name: options[name]})
        assert caught.value.field == name


# Never wrong in silence -----------------------------------------------------------------------------------


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def turn(session: str, length: int, ids: list[int], **more: Any) -> dict[str, Any]:
    return {"session_id": session, "input_length": length, "output_length": 4, "hash_ids": ids, "timestamp": 0, **more}


def test_deltas_are_refused_unless_it_is_said_what_they_are(tmp_path: Path) -> None:
    path = HERE / "mooncake-deltas.jsonl"
    with pytest.raises(InputError) as caught:
        load_trace(path)
    assert caught.value.field == "hash_ids"
    assert "--set session_turns=deltas" in str(caught.value) and "all of 2 sessions" in str(caught.value)
    whole = load_trace(path, session_turns="whole")
    assert sum(request.num_prompt_tokens for request in whole) == 2048 + 300 + 1536 + 700 + 64
    assert any("--set session_turns says" in warning for warning in whole.said())
    deltas = load_trace(path, session_turns="deltas")
    lengths = {request.row: request.num_prompt_tokens for request in deltas}
    assert lengths == {0: 2048, 1: 2048 + 40 + 300, 2: 1536, 3: 2388 + 30 + 700, 4: 1536 + 8 + 64}
    assert not deltas.said()
    report = replay(deltas, ReplayConfig(num_pages=10_000))
    hits = dict(
        zip(report.request_columns["row"].tolist(), report.request_columns["cached_tokens"].tolist(), strict=True)
    )
    assert hits[3] == (2388 + 29) // 16 * 16  # all that the turn before has computed, in whole pages


def test_sessions_that_share_nothing_are_a_warning(tmp_path: Path) -> None:
    """Longer prompts that begin with another id: a changed system prompt, or deltas that happen to grow."""
    path = write(
        tmp_path / "t", turn("a", 600, [1, 2]), turn("a", 700, [3, 4]), turn("b", 600, [1, 2]), turn("b", 900, [1, 5])
    )
    (warning,) = load_trace(path).said()
    assert "in 1 of 2 sessions no turn shares its first id" in warning


def test_ids_of_another_size_are_refused_with_the_size_that_fits(tmp_path: Path) -> None:
    rows = [{"timestamp": 0, "input_length": 896, "output_length": 1, "hash_ids": list(range(14))}] * 2
    path = write(tmp_path / "t", *rows)
    with pytest.raises(InputError) as caught:
        load_trace(path)
    assert (caught.value.line, caught.value.field) == (1, "hash_ids")
    assert "--trace-block-size 64" in str(caught.value)
    fitting = load_trace(path, trace_block_size=64)
    assert fitting.said() == []
    assert replay(fitting, ReplayConfig(num_pages=1000, concurrency=1)).summary["num_cached_tokens"] == 880
    (warning,) = load_trace(path, trace_block_size=512).said()
    assert "2 of 2 rows have more hash_ids than their prompts have room for" in warning


def test_rows_without_ids_share_nothing_and_are_counted(tmp_path: Path) -> None:
    rows = [turn("a", 600, [1, 2]), {"timestamp": 1, "input_length": 600, "output_length": 1}]
    trace = load_trace(write(tmp_path / "t", *rows))
    assert trace.said() == ["1 of 2 rows have no hash_ids: their prompts share nothing"]
    units = [np.frombuffer(spell(request.units), np.uint64).tolist() for request in trace]
    assert not set(units[0]) & set(units[1])


def test_rows_that_are_left_out_are_in_the_report(
    run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("replay", HERE / "aiperf-2025.jsonl") == 0
    table = " ".join(capsys.readouterr().out.split())
    assert "left out: 1 cancelled, 1 of a warm-up" in table
    assert "prefix hits unknown" in table and "hits are unknown: the trace does not identify prefixes" in table


def test_a_report_without_details_says_so(tmp_path: Path) -> None:
    value = json.loads((HERE / "guidellm-v2.json").read_text())
    assert "2 of 3 successful requests" in " ".join(load_trace(HERE / "guidellm-v2.json").said())
    value["benchmarks"][0]["requests"]["successful"] = []
    path = tmp_path / "report.json"
    path.write_text(json.dumps(value))
    with pytest.raises(InputError) as caught:
        load_trace(path)
    assert caught.value.field == "benchmarks[0].requests.successful"
    assert "without their details" in str(caught.value) and "sample_size" in str(caught.value)


def test_numbers_that_json_does_not_have_are_read_in_results(tmp_path: Path) -> None:
    """Python's writers make Infinity of a rate without limit."""
    text = (HERE / "sglang.jsonl").read_text().replace('"request_rate": 4.0', '"request_rate": Infinity')
    path = tmp_path / "bench"
    path.write_text(text)
    trace = load_trace(path)
    assert {request.arrival_ns for request in trace} == {0}
    assert any("all at once" in warning for warning in trace.said())


@pytest.mark.parametrize(
    ("name", "old", "new", "line", "field"),
    [
        ("azure-2024.csv", "2024-05-10 00:00:00.517335+00:00", "noon", 3, "TIMESTAMP"),
        ("burstgpt-sessions.csv", "1087,230", "x,230", 3, "Request tokens"),
        ("litellm.jsonl", "2025-01-01T10:00:02.500000+00:00", "later", 3, "startTime"),
        ("aiperf-2025.jsonl", '"value": 800', '"value": -800', 3, "metrics.input_sequence_length.value"),
        ("mooncake-no-ids.jsonl", '"input_length": 256', '"input_length": 0', 2, "input_length"),
        ("codex.jsonl", '"input_tokens": 1050', '"input_tokens": -1', 9, "payload.info.last_token_usage.input_tokens"),
        ("claude-stream.jsonl", '"output_tokens": 40', '"output_tokens": "x"', 5, "message.usage.output_tokens"),
        ("otlp.jsonl", '{"intValue": "8"}', '{"stringValue": "many"}', 4, "attributes.gen_ai.usage.output_tokens"),
        ("langfuse.jsonl", '"input": 90, "output": 12', '"input": 90.5, "output": 12', 3, "usage_details.input"),
        ("litellm.csv", "2026-01-01 10:00:09.123", "soon", 5, "startTime"),
        ("litellm.csv", "acompletion,300,12", "acompletion,300,", 5, "completion_tokens"),
        ("helicone.json", '"prompt_tokens": 600', '"prompt_tokens": null', 1, "prompt_tokens"),
        ("inference-perf.json", '"start_time": 1001.5', '"start_time": "1001.5s"', 2, "start_time"),
        ("columns.csv", "1767261601500", "17672616015000000000000", 4, "request_ts"),
        ("columns.jsonl", '"prompt_tokens": 70', '"prompt_tokens": true', 2, "usage.prompt_tokens"),
    ],
)
def test_a_malformed_row_is_named_by_line_and_field(
    tmp_path: Path, name: str, old: str, new: str, line: int, field: str
) -> None:
    text = (HERE / name).read_text()
    assert old in text
    path = tmp_path / name
    path.write_text(text.replace(old, new))
    with pytest.raises(InputError) as caught:
        load_trace(path)
    assert (caught.value.path, caught.value.line, caught.value.field) == (path, line, field)
    assert caught.value.hint is not None
    assert load_trace(path, skip_bad_lines=True).num_skipped_lines == 1

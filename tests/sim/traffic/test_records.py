"""Dynamo's request traces, and results of AIPerf, GuideLLM and vLLM, made from what is published of these forms."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvarts.base.errors import InputError
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.trace import spell


def dynamo(received_ms: int, length: int, hashes: list[int], **more: Any) -> dict[str, Any]:
    replay = {"trace_block_size": 64, "input_length": length, "input_sequence_hashes": hashes}
    request = {
        "request_id": f"r{received_ms}",
        "request_received_ms": received_ms,
        "output_tokens": 8,
        "replay": replay,
    }
    return {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": received_ms + 900,
        "request": request,
        **more,
    }


DYNAMO = [
    dynamo(1_700_000_000_500, 150, [2**63 + 1, 22, 33], agent_context={"session_id": "a"}),
    {"schema": "dynamo.request.trace.v1", "event_type": "tool", "event_time_unix_ms": 1, "tool": {}},
    dynamo(1_700_000_000_000, 128, [2**63 + 1, 22]),
]


def aiperf(start_ns: int, num_prompt: int, num_output: int, **more: Any) -> dict[str, Any]:
    metrics = {
        "input_sequence_length": {"value": num_prompt, "unit": "tokens"},
        "output_sequence_length": {"value": num_output, "unit": "tokens"},
    }
    metadata = {"session_num": 0, "request_start_ns": start_ns, "benchmark_phase": "profiling"}
    return {"metadata": metadata, "metrics": metrics, "error": None, **more}


AIPERF = [
    aiperf(1_759_813_207_532_900_363, 550, 9),
    aiperf(1_759_813_207_532_900_000, 20, 3),
    aiperf(1, 5, 5, error={"code": 499}, metrics={"error_isl": {"value": 550, "unit": "tokens"}}),
    aiperf(1, 5, 5, metadata={"request_start_ns": 1, "benchmark_phase": "warmup"}),
]
BENCH = {
    "backend": "vllm",
    "input_lens": [30, 40, 50],
    "output_lens": [5, 0, 7],
    "start_times": [101.5, 100.0, 100.25],
    "errors": ["", "ServerDisconnectedError", ""],
}
GUIDELLM = {
    "metadata": {"version": 1},
    "benchmarks": [
        {"requests": {"successful": [{"prompt_tokens": 256, "output_tokens": 128, "request_start_time": 50.5}]}},
        {"requests": {"successful": [{"prompt_tokens": 10, "output_tokens": None, "start_time": 40.0}], "errored": []}},
    ],
}


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def whole(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value, indent=1))
    return path


def numbers(path: Path) -> list[tuple[int, int, int]]:
    return [(r.arrival_ns, r.num_prompt_tokens, r.num_output_tokens) for r in load_trace(path)]


def test_dynamo_tells_what_prompts_have_in_common(tmp_path: Path) -> None:
    path = lines(tmp_path / "trace.jsonl", DYNAMO)
    trace = load_trace(path)
    assert trace.unit_tokens == 64
    assert trace.knows_prefixes
    first, second = trace
    assert (first.arrival_ns, first.num_prompt_tokens, first.session_id) == (0, 128, None)
    assert (second.arrival_ns, second.num_prompt_tokens, second.session_id) == (500_000_000, 150, "a")
    assert np.frombuffer(spell(first.units), np.uint64).tolist() == [2**63 + 1, 22]
    assert spell(second.units)[:16] == spell(first.units)
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert numbers(packed) == numbers(path)


def test_results_of_load_generators_have_times_and_lengths(
    tmp_path: Path, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    profile = lines(tmp_path / "profile_export.jsonl", AIPERF)
    assert numbers(profile) == [(0, 20, 3), (363, 550, 9)]
    bench = whole(tmp_path / "bench.json", BENCH)
    assert numbers(bench) == [(0, 50, 7), (1_250_000_000, 30, 5)]
    guidellm = whole(tmp_path / "guidellm.json", GUIDELLM)
    assert numbers(guidellm) == [(0, 10, 1), (10_500_000_000, 256, 128)]
    for path in (profile, bench, guidellm):
        assert not load_trace(path).knows_prefixes
        assert run_command("trace", "convert", path, "-o", tmp_path / "out.jsonl") == 0
        assert "does not identify prefixes that prompts share" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "line", "field"),
    [
        ([*DYNAMO, dynamo(1, 128, [1])], 4, "request.replay.input_sequence_hashes"),
        ([*DYNAMO, dynamo(1, 128, [1, 2**64])], 4, "request.replay.input_sequence_hashes"),
        ([*DYNAMO, dynamo(1, -1, [])], 4, "request.replay.input_length"),
        ([*DYNAMO, {"event_type": "request_end"}], 4, "request"),
        ([*DYNAMO, {"schema": "x"}], 4, "event_type"),
        ([AIPERF[0], {"metadata": {}, "metrics": {}}], 2, "metadata"),
        ([AIPERF[0], {"metadata": {"request_start_ns": -1}}], 2, "metadata.request_start_ns"),
        ([AIPERF[0], aiperf(1, 0, 2)], 2, "metrics.input_sequence_length.value"),
        ([AIPERF[0], aiperf(1, 1, 1, metrics={})], 2, "metrics.input_sequence_length"),
    ],
)
def test_a_malformed_row_is_named_by_line_and_field(
    tmp_path: Path, rows: list[dict[str, Any]], line: int, field: str
) -> None:
    path = lines(tmp_path / "trace.jsonl", rows)
    with pytest.raises(InputError) as caught:
        load_trace(path)
    assert caught.value.line == line
    assert field in (caught.value.field or "") or field in caught.value.what
    skipped = load_trace(path, skip_bad_lines=True)
    assert skipped.num_skipped_lines == 1
    assert len(skipped.requests or []) == (2 if "event_type" in rows[0] else 1)


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({**BENCH, "start_times": [1.0]}, "start_times"),
        ({**BENCH, "output_lens": [1]}, "output_lens"),
        ({**BENCH, "input_lens": [0, 1, 1]}, "input_lens[0]"),
        ({**BENCH, "input_lens": [-1, 1, 1]}, "input_lens[0]"),
        ({**BENCH, "errors": ["x", "x", "x"]}, None),
        (
            {"benchmarks": [{"requests": {"successful": [{"prompt_tokens": 1}]}}]},
            "benchmarks[0].requests.successful[0].r",
        ),
        ({"benchmarks": [{"requests": {}}]}, "benchmarks[0].requests"),
        ({"benchmarks": []}, None),
    ],
)
def test_a_malformed_result_is_named_by_its_field(tmp_path: Path, value: Any, field: str | None) -> None:
    with pytest.raises(InputError) as caught:
        load_trace(whole(tmp_path / "result.json", value))
    if field is None:
        assert "has no requests" in caught.value.what
    else:
        assert field in (caught.value.field or "")

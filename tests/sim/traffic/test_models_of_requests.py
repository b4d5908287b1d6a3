"""The model that a request asks for: read, written, and kept by every edit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from kvarts.base.errors import InputError
from kvarts.sim.traffic.editing import anonymized, merged, mooncake_lines, repeated, scaled, sliced, trace_lines
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.logs import RecordedRow, recorded_trace
from kvarts.sim.traffic.trace import Trace
from kvarts.sim.traffic.workload import FixedLength, Workload

ROWS = [
    {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2], "model": "llama"},
    {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1, 2], "model": "qwen"},
    {"timestamp": 9, "input_length": 600, "output_length": 3, "hash_ids": [1, 3]},
    {"timestamp": 9, "input_length": 600, "output_length": 3, "hash_ids": [1, 3], "model": 7},
]


def written(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def models(trace: Trace) -> list[str | None]:
    return [request.model for request in trace]


def test_a_row_may_name_its_model(tmp_path: Path) -> None:
    trace = load_trace(written(tmp_path / "trace.jsonl", ROWS))
    assert models(trace) == ["llama", "qwen", None, "7"]
    assert trace.names_models
    plain = load_trace(written(tmp_path / "plain.jsonl", ROWS[2:3]))
    assert not plain.names_models
    assert models(plain) == [None]


def test_an_empty_name_is_none(tmp_path: Path) -> None:
    trace = load_trace(
        written(tmp_path / "trace.jsonl", [{**ROWS[0], "model": ""}, {**ROWS[1], "session_id": "s", "model": ""}])
    )
    assert models(trace) == [None, None]
    assert not trace.names_models


def test_a_model_is_a_name(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load_trace(written(tmp_path / "trace.jsonl", [*ROWS, {**ROWS[0], "model": ["llama"]}]))
    assert (caught.value.field, caught.value.line) == ("model", 5)


def test_edits_keep_models_and_lines_have_them(tmp_path: Path) -> None:
    trace = load_trace(written(tmp_path / "trace.jsonl", ROWS))
    for edited in (scaled(trace, 2.0), sliced(trace), merged([trace])):
        assert models(edited) == models(trace)
    assert models(repeated(trace, 2)) == ["llama", "llama", "qwen", "qwen", None, "7", None, "7"]
    assert models(anonymized(trace)) == ["model-0", "model-1", None, "model-2"]
    (tmp_path / "again.jsonl").write_bytes(b"".join(mooncake_lines(trace)))
    assert models(load_trace(tmp_path / "again.jsonl")) == models(trace)


def test_lines_of_a_trace_with_waits_have_models(tmp_path: Path) -> None:
    rows = [{**ROWS[0], "request_id": "a"}, {**ROWS[1], "request_id": "b", "wait_for": ["a"]}, ROWS[2]]
    trace = load_trace(written(tmp_path / "trace.jsonl", rows))
    (tmp_path / "again.jsonl").write_bytes(b"".join(trace_lines(trace)))
    assert models(load_trace(tmp_path / "again.jsonl")) == ["llama", "qwen", None]


def test_recorded_rows_have_models() -> None:
    row = RecordedRow(arrival_ns=0, prompt=[1], num_output_tokens=1, output=[2])
    rows = [structs.replace(row, model="llama"), row]
    assert models(recorded_trace(rows)) == ["llama", None]


def test_the_sessions_of_a_workload_ask_for_its_models_in_rotation() -> None:
    workload = Workload(
        num_sessions=6, turns_per_session=2, num_prefix_groups=2, prefix_tokens=10, models=("a", "b"),
        new_tokens=FixedLength(5), output_tokens=FixedLength(2),
    )  # fmt: skip
    trace = workload.trace()
    by_session = {request.session_id: request.model for request in trace}
    assert by_session == {"0": "a", "1": "a", "2": "b", "3": "b", "4": "a", "5": "a"}
    assert all(by_session[request.session_id] == request.model for request in trace)


def test_the_requests_of_a_merged_trace_ask_for_its_model(tmp_path: Path, run_command: Callable[..., int]) -> None:
    trace, out = written(tmp_path / "trace.jsonl", ROWS), tmp_path / "two.jsonl"
    assert run_command("trace", "merge", trace, trace, "--models", "chat, code", "-o", out) == 0
    assert models(load_trace(out)) == ["chat", "code"] * 2 + ["chat", "chat", "code", "code"]
    assert run_command("trace", "merge", trace, trace, "--models", "chat", "-o", out) == 2

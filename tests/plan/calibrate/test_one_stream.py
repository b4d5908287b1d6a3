"""Result files of five load generators, recorded by many_clocks.py of ae1fbfaf on one scripted stream.

The first token is at 300 ms, the last at 750, usage at 850 and the end at 1,000; a chunk with the role is at 100.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvarts.base.errors import InputError
from kvarts.plan.calibrate import load_measured
from kvarts.sim.traffic.formats import load_trace

RECORDED = json.loads((Path(__file__).parent / "recorded" / "one-stream.json").read_text())


def file_of(name: str, folder: Path, change: Any = None) -> Path:
    """The recorded file of a generator, after `change` of its value."""
    value = json.loads(json.dumps(RECORDED[name]))
    if change is not None:
        change(value)
    path = folder / f"{name}.out"
    if name == "evalscope":
        database = sqlite3.connect(path)
        database.execute(value["schema"])
        for row in value["rows"]:
            marks = ", ".join("?" * len(row))
            database.execute(f"INSERT INTO result ({', '.join(row)}) VALUES ({marks})", [*row.values()])
        database.commit()
        database.close()
    elif name == "aiperf":
        path.write_text("".join(json.dumps(row) + "\n" for row in value))
    else:
        path.write_text(json.dumps(value))
    return path


@pytest.mark.parametrize(
    ("name", "ttft_ms", "tpot_ms", "num_output", "said"),
    [
        ("vllm-bench", 105, 72, 10, "not converted"),
        ("guidellm", 305, 50, 10, "converted to (last - first token) / (tokens - 1)"),
        ("aiperf", 305, 450 / 29, 30, "read as they are"),
        ("evalscope", 305, 50, 10, "converted"),
        ("inference-perf", 555, 200 / 9, 10, "of 2 requests cannot be trusted"),
    ],
)
def test_times_of_the_scripted_stream(
    name: str, ttft_ms: float, tpot_ms: float, num_output: int, said: str, tmp_path: Path
) -> None:
    path = file_of(name, tmp_path)
    found = load_measured(path)
    assert found.output_tokens.tolist() == [num_output] * 2
    assert found.prompt_tokens.tolist() == [20] * 2
    ttft = (found.first_token_ns - found.arrival_ns) / 1e6
    tpot = (found.last_token_ns - found.first_token_ns) / (found.output_tokens - 1) / 1e6
    assert min(abs(ttft - ttft_ms)) < 20  # the first request opens a connection, on a busy machine
    assert min(abs(tpot - tpot_ms)) < 3
    assert any(said in note for note in found.notes)
    assert [request.num_output_tokens for request in load_trace(path)] == [num_output] * 2


def test_aiperfs_own_counts_stand_where_usage_has_none(tmp_path: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[0]["metrics"]["usage_completion_tokens"]["value"] = 0
        rows[0]["metrics"]["output_sequence_length"]["value"] = 31
        rows[1]["metrics"]["output_sequence_length"]["value"] = 31

    assert load_measured(file_of("aiperf", tmp_path, change)).output_tokens.tolist() == [31, 30]


def test_a_chat_measured_by_vllm_names_how_much_later_its_second_chunk_came(tmp_path: Path) -> None:
    assert "the second chunk came 204.8 ms later (median)" in load_measured(file_of("vllm-bench", tmp_path)).notes[0]


def cut(rows: list[dict[str, Any]]) -> None:
    rows[0]["response"] = rows[0]["response"].replace("data: [DONE]", "")


def with_error(rows: list[dict[str, Any]]) -> None:
    rows[0]["response"] = rows[0]["response"].replace("data: [DONE]", 'data: {"error": {"code": 500}}\n\ndata: [DONE]')


def without_token(name: str) -> Any:
    def change(value: Any) -> None:
        if name == "vllm-bench":
            value["ttfts"][0] = 0.0
        elif name == "evalscope":
            value["rows"][0]["first_chunk_latency"] = 0.0
        else:
            value[0]["info"]["response_metrics"]["output_token_times"] = []

    return change


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("inference-perf", cut, "counted as successes by the generator, cut before the end of the stream"),
        ("inference-perf", with_error, "counted as successes by the generator, with an error in the stream"),
        *((name, without_token(name), "counted as successes by the generator, without the time of a token")
          for name in ("vllm-bench", "evalscope", "inference-perf")),
    ],
)  # fmt: skip
def test_failed_streams_that_count_as_successes_are_left_out(name: str, change: Any, why: str, tmp_path: Path) -> None:
    found = load_measured(file_of(name, tmp_path, change))
    assert len(found) == 1
    assert f"1 requests are left out: {why}" in found.notes


def test_statistics_that_cannot_be_are_named(tmp_path: Path) -> None:
    def above(value: Any) -> None:
        value["median_ttft_ms"] = 300.0

    def empty(value: Any) -> None:
        metrics = value["benchmarks"][0]["metrics"]
        metrics["time_to_first_token_ms"] = {"successful": {"count": 0, "median": 0.0, "min": 0.0, "max": 0.0}}
        metrics["time_per_output_token_ms"]["successful"]["median"] = 1e6

    notes = load_measured(file_of("vllm-bench", tmp_path, above)).notes
    assert "statistics with a median outside of their range cannot be trusted: median_ttft_ms" in notes
    notes = load_measured(file_of("guidellm", tmp_path, empty)).notes
    place = "benchmarks[0].metrics"
    assert f"statistics without samples cannot be trusted: {place}.time_to_first_token_ms.successful" in notes
    assert (
        "statistics with a median outside of their range cannot be trusted: "
        f"{place}.time_per_output_token_ms.successful" in notes
    )


def test_commands_name_the_definition(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run_command: Callable[..., int]
) -> None:
    path = file_of("guidellm", tmp_path)
    replayed = tmp_path / "run.jsonl"
    assert run_command("replay", path, "--pages", "100", "--requests", replayed) == 0
    capsys.readouterr()
    assert run_command("compare", replayed, path, "--json") == 0
    out, err = capsys.readouterr()
    assert "kvarts: guidellm.out: TPOT of GuideLLM is (last token - start) / tokens" in err
    assert "TPOT of GuideLLM" in json.loads(out)["notes"][0]


@pytest.mark.parametrize("data", [b"SQLite format 3\0" + b"\0" * 100, b"SQLite format 3\0" + b"\xff" * 4096])
def test_a_database_of_something_else_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.write_bytes(data)
    with pytest.raises(InputError, match="is not a database of evalscope"):
        load_trace(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("start_time", "soon"), ("prompt_tokens", 1.5), ("inter_token_latencies", "[1"), ("inter_token_latencies", 7)],
)
def test_a_wrong_value_of_a_database_is_named(field: str, value: Any, tmp_path: Path) -> None:
    def change(found: Any) -> None:
        found["rows"][1][field] = value

    with pytest.raises(InputError, match=f"2: result.{field}"):
        load_measured(file_of("evalscope", tmp_path, change))

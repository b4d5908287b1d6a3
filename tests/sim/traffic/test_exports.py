"""Logs as people have them: columns by name, runs of a file, rows that are no load, hits that cannot be known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.errors import ConfigError, InputError
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.rows import columns_in
from kvarts.sim.traffic.trace import NO_PREFIXES, Trace

from oracles.naive_forms import NaiveRequest as Naive
from oracles.naive_forms import blocks, naive_hits

HERE = Path(__file__).parent / "forms"
S = 1_000_000_000


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def lengths(trace: Trace) -> list[tuple[int, int]]:
    return [(request.num_prompt_tokens, request.num_output_tokens) for request in trace]


# Columns --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_columns_are_named_wherever_a_trace_is_read(kind: str, tmp_path: Path) -> None:
    rows = [{"when": 5000, "in": 30, "out": 4}, {"when": 5250, "in": 40, "out": 5}]
    path = tmp_path / f"log.{kind}"
    if kind == "csv":
        lines(path, "when,in,out", *(",".join(map(str, row.values())) for row in rows))
    elif kind == "jsonl":
        lines(path, *rows)
    else:
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.Table.from_pylist(rows), path)
    for column in ("input_tokens=in,output_tokens=out,time=when:ms", {"input_tokens": "in", "output_tokens": "out",
                                                                      "time": "when:ms"}):  # fmt: skip
        trace = load_trace(path, column=column)
        assert lengths(trace) == [(30, 4), (40, 5)]
        assert [request.arrival_ns for request in trace] == [0, S // 4]
    with pytest.raises(InputError, match=r"there is no 'tokens'\. There are when, in, out"):
        load_trace(path, column="input_tokens=tokens")


def test_a_column_replaces_what_a_form_declares(tmp_path: Path) -> None:
    row = {"startTime": "2026-01-01T10:00:00Z", "prompt_tokens": 30, "completion_tokens": 4, "real": {"input": 31}}
    trace = load_trace(lines(tmp_path / "t", row), column={"input_tokens": "real.input"})
    assert lengths(trace) == [(31, 4)] and "columns: input_tokens is real.input" in trace.said()
    mooncake = lines(tmp_path / "m", {"input_length": 9, "output_length": 1, "timestamp": 0, "tokens": 7})
    assert lengths(load_trace(mooncake, column="input_tokens=tokens")) == [(7, 1)]


@pytest.mark.parametrize("column", ["", "input_tokens", "input_tokens=", "tokens=a"])
def test_a_column_that_is_none_is_refused(column: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_trace(lines(tmp_path / "t", {"a": 1}), column=column)
    assert caught.value.field == "column" and caught.value.hint


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("ts promptTokens completionTokens", "time input_tokens output_tokens"),
        ("request_ts prompt_tokens completion_tokens cached_tokens", "time input_tokens output_tokens cached_tokens"),
        ("created_at num_input_tokens num_output_tokens sessionId", "time input_tokens output_tokens session_id"),
        ("start_time_ms prompt_len output_len x_request_id", "time input_tokens output_tokens request_id"),
        ("Timestamp usage.input_tokens usage.output_tokens input.tokens", "time input_tokens output_tokens"),
        ("duration model", ""),
    ],
)
def test_names_that_people_use_are_recognised(names: str, found: str) -> None:
    assert set(columns_in(names.split())) == set(found.split())


@given(st.sampled_from(["ns", "us", "ms", "s"]), st.integers(1_000_000_000, 4_000_000_000), st.booleans())
def test_the_unit_of_a_time_is_told_by_its_size_or_its_name(unit: str, second: int, is_named: bool) -> None:
    from kvarts.sim.traffic.rows import UNITS_NS, _time_ns

    scale = S // UNITS_NS[unit]
    assert _time_ns(second * scale, f"ts_{unit}" if is_named else "ts", "") == second * S
    assert _time_ns(str(second * scale), "ts", "") == second * S


def test_failures_and_embeddings_of_any_log_are_left_out(tmp_path: Path) -> None:
    row = {"ts": 1, "prompt_tokens": 9, "completion_tokens": 2, "status": 200, "endpoint": "/v1/chat/completions"}
    rows = [row, row | {"status": 503}, row | {"status": "failed"}, row | {"endpoint": "/v1/embeddings"}]
    trace = load_trace(lines(tmp_path / "t", *rows))
    assert lengths(trace) == [(9, 2)] and trace.left_out == {"failed": 2, "embeddings": 1}


def test_what_is_no_request_is_no_table_of_requests(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Name the columns of a table of requests: --column"):
        load_trace(lines(tmp_path / "t", {"prompt_tokens": 3, "model": "m"}))


# Forms with a container of their own ----------------------------------------------------------------------


def test_hashes_of_a_parquet_file_are_prefixes(tmp_path: Path) -> None:
    """Baseten's: hashes of whole blocks, or of all of them; rows without are like no other."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [
        (1000, "a", 150, 8, [11, 22]),
        (1500, "a", 200, 0, [11, 22, 33]),
        (2000, "a", 230, 9, [11, 22, 33, 44]),
        (2250, None, 150, 3, None),
    ]
    names = ("timestamp_start_unix_ms", "provided_session_id", "input_tokens", "output_tokens", "total_hashes")
    table = [{**dict(zip(names, row, strict=True)), "prompt": "x", "block_size": 64} for row in rows]
    path = tmp_path / "trace.parquet"
    parquet.write_table(pa.Table.from_pylist(table), path)
    trace = load_trace(path)
    assert trace.knows_prefixes and trace.left_out == {"without output tokens": 1}
    assert [request.session_id for request in trace] == ["a", "a", None]
    assert [request.arrival_ns for request in trace] == [0, S, S + S // 4]
    naive = [Naive(blocks(ids or [], 64, length, place), out) for place, (_, _, length, out, ids) in enumerate(rows)]
    kept = [request for request in naive if request.num_output]
    summary = replay(trace, ReplayConfig(num_pages=10_000, page_size=16, concurrency=1)).summary
    assert summary["num_cached_tokens"] == naive_hits(kept, 16) == 128
    table[2]["total_hashes"] = [11]
    parquet.write_table(pa.Table.from_pylist(table), path)
    with pytest.raises(InputError, match=r"parquet:3: total_hashes: 1 ids of 64 tokens cover 64 of the 230"):
        load_trace(path)


def test_times_of_parquet_may_have_any_resolution_and_columns_may_be_inside_of_others(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "t.parquet"
    for unit in ("s", "ms", "us", "ns"):
        step = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
        times = pa.array([1767261600 * step, 1767261602 * step], pa.timestamp(unit, "UTC"))
        usage = pa.array([{"prompt_tokens": 9, "completion_tokens": 2}] * 2)
        parquet.write_table(pa.table({"created_at": times, "usage": usage}), path)
        trace = load_trace(path)
        assert lengths(trace) == [(9, 2), (9, 2)] and [request.arrival_ns for request in trace] == [0, 2 * S]


def test_of_a_batch_only_the_rows_that_cannot_be_read_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "t"
    text = (HERE / "otlp.jsonl").read_text().replace('{"intValue": "1200"}', '{"stringValue": "x"}', 1)
    first, rest = text.split("\n", 1)
    batch, other = json.loads(first), json.loads(rest.split("\n")[0])
    spans = batch["resourceSpans"][0]["scopeSpans"][0]["spans"]
    spans += other["resourceSpans"][0]["scopeSpans"][0]["spans"]
    trace = load_trace(lines(path, batch), skip_bad_lines=True)
    assert (lengths(trace), trace.num_skipped_lines) == ([(1300, 60)], 1)
    with pytest.raises(InputError, match=r"t:1: attributes\.gen_ai\.usage\.input_tokens: must be a whole number"):
        load_trace(path)


def test_a_folder_of_agents_sessions_is_one_trace(tmp_path: Path) -> None:
    (tmp_path / "2026" / "06").mkdir(parents=True)
    text = (HERE / "codex.jsonl").read_text()
    for name in ("rollout-a.jsonl", "rollout-b.jsonl"):
        (tmp_path / "2026" / "06" / name).write_text(text)
    trace = load_trace(tmp_path)
    assert sorted({str(request.session_id) for request in trace}) == ["rollout-a", "rollout-b"]
    assert len(list(trace)) == 6 and trace.left_out == {"repeated lines": 2}


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", "version https://git-lfs.github.com/spec/v1", "oid sha256:4d7a", "size 26461234")
    with pytest.raises(InputError, match="is a pointer of Git LFS, not the file itself, which has 26,461,234 bytes"):
        load_trace(path)


COUNTED: dict[str, Callable[[str], list[tuple[int, int]]]] = {
    "aiperf-0.13.jsonl": lambda text: [
        (int(row["metrics"]["usage_prompt_tokens"]["value"]), int(row["metrics"]["usage_completion_tokens"]["value"]))
        for row in map(json.loads, text.splitlines())
    ],
    "guidellm-0.8.json": lambda text: [
        (row["prompt_tokens"], row["output_tokens"])
        for row in json.loads(text)["benchmarks"][0]["requests"]["successful"]
    ],
    "inference-perf-0.7.json": lambda text: [
        (usage["prompt_tokens"], usage["completion_tokens"])
        for usage in (row["info"]["response_metrics"]["server_usage"] for row in json.loads(text))
    ],
    "litellm-1.110.jsonl": lambda text: [
        (row["prompt_tokens"], row["completion_tokens"])
        for row in map(json.loads, text.splitlines())
        if not row["cache_hit"]
    ],
}


@pytest.mark.parametrize("name", COUNTED)
def test_what_load_generators_and_gateways_exported_is_what_the_server_counted(name: str) -> None:
    """Rows of real runs against `kvarts mock`, by `benchmarks/serve_clients.py`, without texts."""
    path = HERE / "exported" / name
    trace, expected = load_trace(path), COUNTED[name](path.read_text())
    assert sorted(lengths(trace)) == sorted(expected) and len(expected) >= 2
    assert trace.left_out == ({"answered by a proxy cache": 2} if name.startswith("litellm") else {})
    assert ("448 of 722 prompt tokens as read" in " ".join(trace.said())) == name.startswith("inference-perf")


# Runs -----------------------------------------------------------------------------------------------------


def test_a_run_of_several_is_chosen_and_keeps_its_rate_and_its_concurrency() -> None:
    path = HERE / "sglang-runs.jsonl"
    with pytest.raises(InputError) as caught:
        load_trace(path)
    assert caught.value.field == "run" and "--run N" in str(caught.value)
    assert "1: 2 requests, 2 per second; 2: 5 requests, no rate, at most 3 at once" in str(caught.value)
    with pytest.raises(InputError, match="has no run 3"):
        load_trace(path, run=3)
    first, second = load_trace(path, run=1), load_trace(path, run=2)
    assert [request.arrival_ns for request in first] == [0, S // 2] and first.concurrency is None
    assert second.concurrency == 3 and "as others end, 3 at once" in second.said()[0]
    summary = replay(second, ReplayConfig(num_pages=10_000)).summary
    assert summary["peak_running"] == 3 and summary["num_completed"] == 5
    assert replay(second, ReplayConfig(num_pages=10_000, concurrency=2)).summary["peak_running"] == 2
    assert replay(second, ReplayConfig(num_pages=10_000, speedup=2.0)).summary["peak_running"] == 5
    with pytest.raises(ConfigError, match="run: is given, and this is Mooncake's traces"):
        load_trace(HERE / "mooncake.jsonl", run=1)


# Rows that are no load ------------------------------------------------------------------------------------


def test_a_file_without_lengths_of_answers_says_so_once_and_takes_one(tmp_path: Path) -> None:
    paths = [
        lines(tmp_path / "m", *({"timestamp": t, "input_length": 9, "hash_ids": [t]} for t in range(3))),
        lines(tmp_path / "c", "ts,prompt_tokens", "1,9", "2,9", "3,9"),
        lines(tmp_path / "u", *({"created": t, "usage": {"prompt_tokens": 9}} for t in range(3))),
    ]
    for path in paths:
        if path.name == "c":
            with pytest.raises(InputError, match="has no output length in any row"):
                load_trace(path)
        with pytest.raises(InputError, match=r"has no output length in any row\. Give --output-tokens N"):
            load_trace(path, skip_bad_lines=True)
        assert lengths(load_trace(path, output_tokens=7)) == [(9, 7)] * 3
    some = lines(tmp_path / "s", {"timestamp": 0, "input_length": 9, "output_length": 3},
                 {"timestamp": 0, "input_length": 9})  # fmt: skip
    with pytest.raises(InputError, match="s:2: output_length: is missing"):
        load_trace(some)
    assert lengths(load_trace(some, output_tokens=7)) == [(9, 3), (9, 7)]


def claude(name: str, second: int, *, prompt: int, output: int = 1, stop: str | None = None, uuid: str = "") -> Any:
    usage = {"input_tokens": prompt, "output_tokens": output}
    message = {"id": name, "model": "m", "role": "assistant", "stop_reason": stop, "usage": usage}
    return {"type": "assistant", "sessionId": "s", "requestId": name, "uuid": uuid or f"{name}-{second}",
            "timestamp": f"2026-02-03T10:00:{second:02}.000Z", "message": message}  # fmt: skip


def test_a_placeholder_of_a_stream_is_bounded_by_the_next_prompt(tmp_path: Path) -> None:
    rows = [
        claude("a", 1, prompt=100),
        claude("b", 5, prompt=160, output=3),
        claude("b", 6, prompt=160, output=40, stop="end_turn"),
        claude("c", 9, prompt=210),
    ]
    trace = load_trace(lines(tmp_path / "t", *rows))
    assert lengths(trace) == [(100, 60), (160, 40), (210, 1)]
    assert "1 taken to be what the next prompt adds" in trace.said()[1] and "1 that no next prompt" in trace.said()[1]


def test_repeated_lines_of_a_request_do_not_move_its_end(tmp_path: Path) -> None:
    """A line that comes again, and one of a request after the next began."""
    a, b = claude("a", 1, prompt=100, output=20, stop="x"), claude("b", 5, prompt=160, output=20, stop="x")
    again = [{**a, "timestamp": "2026-02-03T10:00:30.000Z"}, claude("a", 40, prompt=100, output=20, stop="x")]
    plain = load_trace(lines(tmp_path / "p", a, b))
    for place in (1, 2):
        rows = [a, b]
        rows[place:place] = again[:place]
        trace = load_trace(lines(tmp_path / "t", *rows))
        assert [request.after for request in trace] == [request.after for request in plain]
        assert lengths(trace) == lengths(plain)


# Hits that cannot be known --------------------------------------------------------------------------------


def test_hits_that_cannot_be_known_are_unknown_everywhere(
    tmp_path: Path, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    trace, engine = HERE / "litellm.csv", ["--model", "llama-3.1-8b", "--device", "h100-80gb"]
    page, plan = tmp_path / "page.html", tmp_path / "plan.html"
    assert run_command("replay", trace, *engine, "--html", page, "--run-dir", tmp_path / "run") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "prefix hits unknown" in text and NO_PREFIXES in text and " 0.0 % of prompt" not in text
    assert run_command("replay", trace, *engine, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["prefix_hit_ratio"] is None and set(summary["prefix_hit_ratio_by_tier"].values()) == {None}
    assert {each["prefix_hit_ratio"] for each in summary["replicas"]} == {None}
    html = page.read_text()
    assert (
        f'["prefix hits","{NO_PREFIXES.removeprefix("hits are ")}"]' in html
        and "Unknown: the trace does not identify prefixes" in html
    )
    assert run_command("plan", "slo", trace, *engine, "--slo-ttft-ms", "2000", "--html", plan) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Hits are unknown" in text and "unknown hits, TTFT" in text
    assert " 0.0 %" not in text and " 0.0 %" not in plan.read_text() and NO_PREFIXES in plan.read_text()
    assert run_command("plan", "curve", trace, "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["unknown_hits"] == NO_PREFIXES and values["most_hit_ratio"] is None and values["at"] == []


def test_what_a_file_says_of_its_own_cache_is_said(
    run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("trace", "info", HERE / "columns.csv", "--column", "cached_tokens=cached_tokens") == 0
    said = capsys.readouterr().err
    assert "256 of 630 prompt tokens as read from a cache (40.6 %)" in said
    assert "time is request_ts (ms)" in said and "hits are unknown" in said

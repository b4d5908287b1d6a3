"""`kvarts replay` with several models, Azure's traces, and what these commands say of bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fuzz.__main__ import problems
from fuzz.running import run_here
from kvarts.base.errors import ConfigError, InputError
from kvarts.cli.sharing import parse_share
from kvarts.sim.sharing.config import parse_health
from kvarts.sim.sharing.report import jain_index
from kvarts.sim.traffic.formats import load_trace

DATA = Path(__file__).parents[3] / "src" / "kvarts" / "data"
CHAT, CODE = DATA / "azure-conv-1000.csv", DATA / "azure-code-1000.csv"
MODELS = ["--model", "chat=llama-3.1-8b:weight=2", "--model", "code=qwen3-8b:weight=1"]
TRACES = ["--trace", f"chat={CHAT}", "--trace", f"code={CODE}"]
DEVICE = ["--device", "h100-80gb", "--kv-memory", "4GiB"]


@pytest.mark.slow
def test_the_command_writes_everything_and_says_the_same_twice(
    tmp_path: Path, run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes], short_traces: list[str]
) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    command = ["replay", *MODELS, *short_traces, *DEVICE, "--json"]
    assert run_command(*command, "--run-dir", first, "--set", f"loans={tmp_path / 'loans.jsonl'}") == 0
    printed = capsysbinary.readouterr().out
    # Observed, it goes step by step; unobserved, many turns at once.
    assert run_command(*command) == 0
    assert capsysbinary.readouterr().out == printed
    assert run_command(*command, "--run-dir", again) == 0
    for path in sorted(first.rglob("*")):
        if path.is_file() and path.name != "run.json":
            assert path.read_bytes() == (again / path.relative_to(first)).read_bytes(), path
    assert (first / "report.json").read_bytes() == printed
    assert (first / "loans.jsonl").read_bytes() == (tmp_path / "loans.jsonl").read_bytes()
    summary = msgspec.json.decode(printed)
    device, models = summary["device"], summary["models"]
    assert device["num_completed"] + device["num_rejected"] == device["num_requests"] == 600
    assert abs(models["chat"]["guaranteed_bytes"] - 2 * models["code"]["guaranteed_bytes"]) <= 1
    assert sum(model["num_tokens"] for model in models.values()) == device["num_tokens"]
    assert device["loans"] and models["code"]["peak_borrowed_bytes"] > 0
    assert {loan["borrower"] for loan in device["loans"]} <= {"chat", "code"}
    for name in ("chat", "code"):
        assert run_command("report", first / name, "--html", tmp_path / f"{name}.html") == 0


def test_a_split_lends_nothing(run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("replay", *MODELS, *TRACES, *DEVICE, "--set", "static_split=true") == 0
    printed = capsys.readouterr().out
    assert "split, nothing is lent" in printed
    assert "loans" not in printed


def test_baselines_are_reported_worst_first(
    run_command: Callable[..., int], capsys: pytest.CaptureFixture[str], short_traces: list[str]
) -> None:
    command = ["replay", *MODELS, *short_traces, *DEVICE, "--set", "baselines=true"]
    assert run_command(*command, "--json") == 0
    summary = msgspec.json.decode(capsys.readouterr().out)
    ratios = {
        baseline: max(
            value for model in summary["models"].values() for value in model["beside"][baseline]["ratio"].values()
        )
        for baseline in ("split", "slice")
    }
    assert {name: found["ratio"] for name, found in summary["device"]["worst_ratio"].items()} == ratios
    for model in summary["models"].values():
        assert model["beside"]["slice"]["num_compared"] == model["num_completed"]
        assert model["beside"]["slice"]["ratio"]["mean"] == pytest.approx(
            model["ttft_ms"]["mean"] / model["beside"]["slice"]["ttft_ms"]["mean"]
        )
    assert run_command(*command, "--set", "reclaim_after_s=inf") == 0
    printed = capsys.readouterr().out
    assert printed.index("worst ratio") < printed.index("of its slice, alone (") < printed.index("Jain's index")
    assert "of contested time by share" in printed


def test_a_split_is_what_the_baseline_says(
    run_command: Callable[..., int], capsys: pytest.CaptureFixture[str], short_traces: list[str]
) -> None:
    """The TTFT beside it is that of a replay with --static-split."""
    assert run_command("replay", *MODELS, *short_traces, *DEVICE, "--set", "static_split=true", "--json") == 0
    split = msgspec.json.decode(capsys.readouterr().out)["models"]
    assert run_command("replay", *MODELS, *short_traces, *DEVICE, "--set", "baselines=true", "--json") == 0
    shared = msgspec.json.decode(capsys.readouterr().out)
    for name, model in shared["models"].items():
        for figure in ("mean", "p99"):
            assert model["beside"]["split"]["ttft_ms"][figure] == pytest.approx(split[name]["ttft_ms"][figure])
    lent = shared["device"]["lent"]
    assert lent["peak_bytes"] <= shared["device"]["kv_bytes"]
    assert lent["mean_bytes"] == pytest.approx(sum(loan["mean_bytes"] for loan in shared["device"]["loans"]), rel=1e-6)


def test_a_configuration_file_says_the_same(
    tmp_path: Path, run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes], short_traces: list[str]
) -> None:
    config = tmp_path / "share.toml"
    chat, code = (option.partition("=")[2] for option in short_traces[1::2])
    config.write_text(
        'device = "h100-80gb"\nkv_memory = "4GiB"\n'
        f'[models.chat]\nmodel = "llama-3.1-8b"\nweight = 2\ntrace = "{chat}"\n'
        f'[models.code]\nmodel = "qwen3-8b"\ntrace = "{code}"\n'
    )
    assert run_command("replay", "--config", config, "--json") == 0
    from_file = capsysbinary.readouterr().out
    assert run_command("replay", *MODELS, *short_traces, *DEVICE, "--json") == 0
    assert capsysbinary.readouterr().out == from_file
    assert run_command("replay", "--config", config, "--model", "chat=:weight=1", "--json") == 0
    models = msgspec.json.decode(capsysbinary.readouterr().out)["models"]
    assert models["chat"]["share_owned"] == 0.5


def test_a_model_that_dies_fails_its_requests_and_frees_its_memory(
    tmp_path: Path, run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    places = ["--json", "--requests", tmp_path / "requests.jsonl"]
    health = ["--set", "health=code=dead@200", "--set", "health=chat=degraded@30", "--set", "health=chat=healthy@50"]
    assert run_command("replay", *MODELS, *TRACES, *DEVICE, *places, *health) == 0
    models = msgspec.json.decode(capsysbinary.readouterr().out)["models"]
    assert models["chat"]["num_completed"] == 1000
    assert models["code"]["num_failed"] > 0
    assert sum(models["code"][name] for name in ("num_completed", "num_failed", "num_rejected")) == 1000
    rows = msgspec.json.Decoder(dict[str, object]).decode_lines((tmp_path / "requests-code.jsonl").read_bytes())
    reasons = {row["status"]: row["reason"] for row in rows}
    assert reasons == {"completed": None, "failed": "its model died at 200 s", "rejected": "its model is dead"}
    assert run_command("replay", *MODELS, *TRACES, *DEVICE, "--json", "--set", "health=code=degraded@200") == 0
    models = msgspec.json.decode(capsysbinary.readouterr().out)["models"]
    assert models["code"]["num_failed"] > 0 == models["code"]["num_rejected"]
    assert models["chat"]["num_completed"] == 1000


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--model", "a=llama-3.1-8b", "--device", "h100-80gb"], "--model a: has no trace. Give --trace a=FILE."),
        (
            [*MODELS, *TRACES, "--trace", "x=y", *DEVICE],
            "--trace x: is for 'x', which is no model. There are: chat, code.",
        ),
        ([*MODELS, "--trace", "chat"], "--trace: 'chat' is not NAME=FILE. Name the model it is for."),
        (
            [*MODELS, *TRACES],
            "--model chat: model: says nothing without a device. Model and device go together: --device NAME.",
        ),
        ([CHAT, *MODELS, *DEVICE], "TRACE: each model has its own. Give --trace NAME=FILE for each."),
        ([*MODELS, *TRACES, *DEVICE, "--replicas", "0"], "--replicas: must be at least 1, got 0"),
        (
            [*MODELS, *TRACES, *DEVICE, "--set", "health=x=dead@1"],
            "--set health: is of 'x', which is no model. There are: chat, code.",
        ),
        (["--model", "llama-3.1-8b", "--model", "qwen3-8b"], "--model: several models need names."),
        (["--set", "static_split=true"], "--set static_split: is for several models on one device."),
        (
            ["--model", "a=llama-3.1-8b:wieght=2"],
            "--model a: 'wieght=2' is not known. Known: weight_dtype, kv_dtype, speculative_tokens, ",
        ),
        (["--model", "a=llama-3.1-8b:weight=two"], "--model a: weight: 'two' is not a number"),
        (
            ["--model", "a=llama-3.1-8b:weight=0", *DEVICE],
            "--model a: weight: must be at least 1e-12, got 0.0",
        ),
        (
            ["--model", "a=llama-3.1-8b:guarantee=5GiB", *DEVICE],
            "--model a: guarantee: all guarantees are 5,368,709,120 bytes;",
        ),
        (
            ["--model", "a=llama-3.1-8b:guarantee=5", *DEVICE],
            "--model a: guarantee: must be a size as 20GiB, or a part from 0",
        ),
        (
            ["--model", "a=llama-3.1-8b:guarantee=-1", *DEVICE],
            "--model a: guarantee: '-1' is not a size in bytes. Write 20GiB, or",
        ),
        (["--model", "a=llama-3.1-70b", "--device", "h100-80gb"], "--device: llama-3.1-70b does not fit h100-80gb"),
        (
            ["--model", "a=llama-3.1-8b", "--model", "b=qwen3-32b", "--device", "h100-80gb"],
            "--device: the models do not fit h100-80gb together: 0.9 x 80.0 memory - 76.0 weights",
        ),
        (["--model", "a=:cost=polynomial", "--kv-memory", "1GiB"], "--model a: names no model. Name one, or give both"),
    ],
)
def test_what_cannot_be_is_named(
    args: list[str], says: str, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("replay", *args) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"kvarts: {says}")
    assert not captured.out


def test_texts_of_the_command_line() -> None:
    assert parse_share("a=m:weight=2,guarantee=1GiB,priority=-1") == (
        "a",
        {"model": "m", "weight": 2.0, "guarantee": "1GiB", "priority": -1},
    )
    assert parse_health("a-b=degraded@1.5").time_ns == 1_500_000_000
    for text in ("a=ill@1", "a=dead", "dead@1", "a=dead@x"):
        with pytest.raises(ConfigError, match="is not NAME=STATE@SECONDS"):
            parse_health(text)
    with pytest.raises(ConfigError, match="is not NAME=MODEL"):
        parse_share("=m")


def test_jains_index() -> None:
    assert jain_index([1.0, 1.0, 1.0]) == 1.0
    assert jain_index([1.0, 0.0]) == 0.5
    assert jain_index([]) is None


# Azure's traces -------------------------------------------------------------------------------------------


def test_an_azure_trace_is_read() -> None:
    trace = load_trace(CODE)
    requests = trace.requests
    assert requests is not None and len(requests) == 1000
    first = requests[0]
    assert (first.arrival_ns, first.num_prompt_tokens, first.num_output_tokens) == (0, 4808, 10)
    assert requests[1].arrival_ns == 52_000_000
    contents = {request.units for request in requests}
    assert len(contents) == 1000, "every prompt is unlike any other"
    assert load_trace(CHAT).requests[-1].num_output_tokens == 18  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no requests"),
        ("time,in,out\n", "is not of a known form"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,1\n", ":2: has 2 columns instead of 3"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n", ":2: TIMESTAMP: 'noon' is not a time"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.x,1,1\n", ":2: TIMESTAMP: "),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1,1\n2023-11-16 18:17:03,-1,1\n",
            ":3: ContextTokens: must be a whole number from 0 to 2,147,483,647, got '-1'",
        ),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1,x\n",
            ":2: GeneratedTokens: must be a whole number from 0 to 2,147,483,647, got 'x'",
        ),
    ],
)
def test_a_bad_azure_line_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_trace(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


def test_bad_azure_lines_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n\n2023-11-16 18:17:05,7,1\nx\n2023-11-16 18:17:03.5,9,2\n"
    )
    trace = load_trace(path, skip_bad_lines=True)
    assert trace.num_skipped_lines == 1
    assert [(row.row, row.arrival_ns, row.num_prompt_tokens) for row in trace] == [(1, 0, 9), (0, 1_500_000_000, 7)]
    with pytest.raises(ConfigError, match="is given, and the trace has no hash ids"):
        load_trace(path, trace_block_size=16)


ALIKE = (
    "--model", "chat=llama-3.1-8b", "--trace", "chat=trace.jsonl", "--model", "code=qwen3-8b", "--trace",
    "code=trace.jsonl", "--device", "h100-80gb", "--kv-memory", "200MiB", "--set", "health=chat=degraded@0.01", "--set",
    "health=code=degraded@0.3", "--set", "session_turns=whole", "--json", "--requests", "rows.jsonl",
)  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "more"),
    [
        # code is preempted for chat, and never plans another step.
        ([{"timestamp": 0, "input_length": 9}, {"timestamp": 10, "input_length": 188}], ["--concurrency", "3"]),
        # The first turns fail at the end, and the third turn of s arrives before the second of t.
        (
            [
                {"timestamp": 20, "input_length": 9, "session_id": name, "delay": delay_ms}
                for name, delay_ms in (("s", 0), ("t", 0), ("s", 5), ("s", 5), ("t", 300))
            ],
            [],
        ),
    ],
)
def test_rows_of_models_that_are_degraded_at_the_end_are_in_order_and_add_up(
    rows: list[dict[str, Any]], more: list[str], tmp_path: Path
) -> None:
    written = [{**row, "output_length": 400, "hash_ids": [number]} for number, row in enumerate(rows)]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    ended = run_here(["replay", *ALIKE, *more], tmp_path)
    assert ended.code == 0, ended.err
    assert problems(ended) == []

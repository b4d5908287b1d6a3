"""The command line, from arguments to exit code, in the same process; one run of the installed script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from builders.case import ROUTERS

GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]}\n'


@dataclass
class Ran:
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def kvarts(capsysbinary: pytest.CaptureFixture[bytes], run_command: Callable[..., int]) -> Run:
    def run(*arguments: object) -> Ran:
        code = run_command(*arguments)
        captured = capsysbinary.readouterr()
        return Ran(code, captured.out.decode(), captured.err.decode())

    return run


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(GOOD * 5)
    return path


def test_without_arguments_the_sample_is_replayed(kvarts: Run) -> None:
    ran = kvarts("replay")
    assert ran.code == 0
    heading, on, memory, empty, *_ = ran.out.splitlines()
    assert (heading, empty) == ("coding-agents: 406 requests", "")
    assert on == "llama-3.1-8b on h100-80gb; rules of vLLM; step times: roofline"
    assert memory == "28,392 pages of 16 tokens (55.5 GiB)"
    advised = "try --host-memory "
    assert advised in " ".join(ran.out.split())
    assert "Apache-2.0" in ran.err
    assert max(len(line) for line in ran.out.splitlines()) <= 80


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--device a100-40gb", {"llm": "llama-3.1-8b", "device": "a100-40gb"}),
        pytest.param("--model qwen3-8b", {"llm": "qwen3-8b", "device": "h100-80gb"}, marks=pytest.mark.slow),
        pytest.param("--pages 40000", {"llm": "llama-3.1-8b", "pages": 40_000}, marks=pytest.mark.slow),
        ("--cost linear:step_ms=5 --pages 40000", {"model": "linear", "pages": 40_000}),
        ("--cost linear:step_ms=5", {"model": "linear", "pages": 32_768}),
    ],
)
def test_options_change_what_the_sample_is_replayed_on(
    kvarts: Run, arguments: str, expected: dict[str, object]
) -> None:
    ran = kvarts("replay", "--json", *arguments.split())
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    config = {**report["config"], **report["config"]["cost"]}
    assert report["trace"] == "coding-agents"
    assert {name: config[name] for name in expected} == expected


def test_with_a_trace_or_a_file_nothing_of_the_sample_is_left(kvarts: Run, trace: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("max_seqs = 7\n")
    for arguments in ((trace,), ("--config", config)):
        config_of = json.loads(kvarts("replay", *arguments, "--json").out)["config"]
        assert (config_of["pages"], config_of["cost"]["model"]) == (32_768, "polynomial")


def test_json_goes_to_stdout_and_has_the_promised_fields(kvarts: Run, trace: Path) -> None:
    ran = kvarts("replay", trace, "--json")
    assert (ran.code, ran.err) == (0, "")
    report = json.loads(ran.out)
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "queue_ms"):
        assert list(report[name]) == ["mean", "p50", "p90", "p95", "p99", "max"]
    fields = "duration_ms num_requests num_completed num_rejected prefix_hit_ratio num_preemptions num_steps"
    assert {*fields.split(), "peak_used_pct"} <= set(report)
    assert report["num_completed"] == 5


def test_report_and_requests_are_written(kvarts: Run, trace: Path, tmp_path: Path) -> None:
    ran = kvarts("replay", trace, "--report", tmp_path / "r.json", "--requests", tmp_path / "q.jsonl", "--json")
    assert (tmp_path / "r.json").read_text() == ran.out
    rows = [json.loads(line) for line in (tmp_path / "q.jsonl").read_text().splitlines()]
    assert [row["request_id"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert list(rows[0]) == [
        "request_id",
        "arrival_ms",
        "input_tokens",
        "output_tokens",
        "first_admitted_ms",
        "first_token_ms",
        "last_token_ms",
        "cached_tokens",
        "admissions",
        "preemptions",
        "recomputed_tokens",
        "replica",
        "status",
        "reason",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q.jsonl", "r.json", "trace.jsonl"]


def test_every_flag_reaches_the_replay(kvarts: Run, trace: Path) -> None:
    flags = (
        "--pages 99 --page-size 8 --profile mocker --cost linear:step_ms=5 --max-batched-tokens 64 --max-seqs 3 "
        "--set long_prefill_token_threshold=9 --set watermark=0.25 "
        f"--replicas 2 --router {ROUTERS[-1]} --concurrency 4 --slo-ttft-ms 9 --slo-tpot-ms 8 --set slo.e2e_ms=7"
        f" --audit"
    )
    ran = kvarts("replay", trace, *flags.split(), "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["config"] == {
        "pages": 99,
        "page_size": 8,
        "max_batched_tokens": 64,
        "max_seqs": 3,
        "profile": "mocker",
        "long_prefill_token_threshold": 9,
        "watermark": 0.25,
        "cost": {
            "model": "linear",
            "step_ms": 5.0,
            "chunk_token_ms": 0.0,
            "decode_ms": 0.0,
            "context_token_ms": 0.0,
        },
        "replicas": 2,
        "router": ROUTERS[-1],
        "concurrency": 4,
        "speedup": 1.0,
        "slo": {"ttft_ms": 9.0, "tpot_ms": 8.0, "e2e_ms": 7.0},
        "offload": None,
    }


def test_step_by_step_prints_the_same_bytes(kvarts: Run, trace: Path) -> None:
    assert kvarts("replay", trace, "--json").out == kvarts("replay", trace, "--json", "--step-by-step").out


def test_a_file_sets_what_the_command_line_leaves_open(kvarts: Run, trace: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('pages = 500\nmax_seqs = 7\ntrace = "trace.jsonl"\n[cost]\nmodel = "linear"\nstep_ms = 3\n')
    ran = kvarts("replay", "--config", config, "--max-seqs", 9, "--json")
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    assert (report["config"]["pages"], report["config"]["max_seqs"]) == (500, 9)
    assert report["config"]["cost"]["step_ms"] == 3.0
    assert report["num_completed"] == 5


def test_a_file_can_describe_an_agentic_load(kvarts: Run, tmp_path: Path) -> None:
    config = tmp_path / "agentx.toml"
    config.write_text("[agentic_replay]\nconcurrency = 3\nbenchmark_duration = 900\nwarmup_requests_per_lane = 2\n")
    ran = kvarts("replay", "sample:agents", "--config", config, "--pages", 100_000, "--page-size", 64, "--json")
    assert ran.code == 0, ran.err
    assert 0 < json.loads(ran.out)["num_completed"] < 400
    refused = kvarts("plan", "sample:agents", "--config", config, "--model", "llama-3.1-8b", "--device", "h100-80gb")
    assert refused.code == 2
    assert "agentic_replay: is a load that is replayed, not planned for" in refused.err


def test_a_file_can_describe_a_workload(kvarts: Run, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        "[workload]\nnum_sessions = 20\nturns_per_session = 2\nsessions_per_s = 5\nthink_time_s = 1\n"
        'new_tokens = {kind = "uniform", low = 10, high = 20}\noutput_tokens = {kind = "fixed", tokens = 5}\n'
    )
    ran = kvarts("replay", "--config", config, "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["num_completed"] == 40


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ("--pages 0", 2, "--pages: must be at least 1, got 0"),
        ("--page-size 0", 2, "--page-size: must be at least 1, got 0"),
        ("--pages many", 2, "not a valid integer"),
        ("--speling 3", 2, "No such option"),
        ("--cost quadratic", 2, "cost"),
        (
            "--speedup 2 --concurrency 3",
            2,
            "kvarts: --speedup: a closed loop has no arrival times to speed up. Give --concurrency or --speedup",
        ),
        (
            "--max-batched-tokens 8",
            2,
            "--max-batched-tokens: 256 sequences cannot each get a token from a budget of 8 tokens a step. Raise",
        ),
        ("--trace-block-size 0", 2, "0 is not in the range"),
        ("--trace-block-size 16", 4, "hash_ids: 2 ids of 16 tokens cover 32 of the 600"),
        ("--report /nowhere/r.json", 7, "there is no directory /nowhere"),
        ("--requests /", 7, "is a directory"),
    ],
)
def test_bad_usage_says_what_and_why(kvarts: Run, trace: Path, arguments: str, code: int, says: str) -> None:
    ran = kvarts("replay", trace, *arguments.split())
    assert (ran.code, ran.out) == (code, "")
    assert says in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("speed = 3", 2, "speed: unknown key"),
        ("pages = 0", 2, "pages: must be at least 1"),
        ('pages = "many"', 2, "pages: Expected `int`"),
        ("pages = [", 4, "is no readable TOML"),
        ('cost = "cubic"', 2, "cost"),
        ('[workload]\nnum_sessions = 0\nnew_tokens = {kind = "fixed", tokens = 1}', 2, "workload"),
        ("[slo]\nttft_ms = -1", 2, "slo.ttft_ms: must be above 0"),
        ("slo = 3", 2, "slo: must be a table, got 3"),
    ],
)
def test_a_bad_file_is_named_with_its_key(kvarts: Run, tmp_path: Path, text: str, code: int, says: str) -> None:
    config = tmp_path / "c.toml"
    config.write_text(text)
    ran = kvarts("replay", "--config", config)
    assert (ran.code, ran.out) == (code, "")
    assert says in ran.err
    assert str(config) in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("", 4, "has no requests"),
        (GOOD + "{oops\n", 4, "trace.jsonl:2: "),
        (GOOD + GOOD.replace("600", "-600"), 4, "trace.jsonl:2: input_length: must be at least 1, got -600"),
        (GOOD + GOOD.replace("0,", '"noon",', 1), 4, "trace.jsonl:2: timestamp: "),
    ],
)
def test_a_bad_trace_writes_nothing(kvarts: Run, tmp_path: Path, text: str, code: int, says: str) -> None:
    trace, report = tmp_path / "trace.jsonl", tmp_path / "r.json"
    trace.write_text(text)
    report.write_text("what was there")
    ran = kvarts("replay", trace, "--report", report)
    assert (ran.code, ran.out) == (code, "")
    assert says in ran.err
    assert report.read_text() == "what was there"
    assert len(list(tmp_path.iterdir())) == 2


def test_missing_files_have_their_own_code(kvarts: Run, tmp_path: Path) -> None:
    assert kvarts("replay", tmp_path / "nowhere.jsonl").code == 3
    assert kvarts("replay", "--config", tmp_path / "nowhere.toml").code == 3


def test_skipped_lines_are_reported(kvarts: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(GOOD + "oops\n" + GOOD)
    assert "2 completed, 0 rejected, 1 bad lines skipped" in kvarts("replay", trace, "--set", "skip_bad_lines=true").out


def test_every_option_is_explained(kvarts: Run) -> None:
    ran = kvarts("replay", "--help")
    lines = ran.out.split("Options:")[1].splitlines()
    starts = [index for index, line in enumerate(lines) if line.startswith("  -")]
    assert len(starts) > 20
    for index in starts:
        text = lines[index].strip() + " " + (lines[index + 1].strip() if index + 1 < len(lines) else "")
        assert len(text.split()) > 3, lines[index]


def test_the_same_bytes_in_any_process(tmp_path: Path) -> None:
    """L10: whatever the hash seed."""
    outs = set()
    for seed in ("0", "1", "random"):
        command = [sys.executable, "-m", "kvarts", "replay", "--json", "--pages", "9000"]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, check=True)
        outs.add(done.stdout)
    assert len(outs) == 1


def test_an_error_is_one_printable_line_whatever_a_file_is_named_or_has(kvarts: Run, tmp_path: Path) -> None:
    path = tmp_path / "a\n\x1b[31mred"
    path.write_bytes("requests\0\x1b]0;title\x07\n".encode("utf-16"))
    ran = kvarts("replay", path)
    told, end = ran.err[:-1], ran.err[-1]
    assert ran.code == 4 and told.isprintable() and end == "\n"
    assert "a\\n\\x1b[31mred" in told and "\\x00" in told


def test_a_thread_may_run_a_command(trace: Path) -> None:
    script = (
        "import threading\n"
        "from kvarts.cli.main import main\n"
        "codes = []\n"
        "thread = threading.Thread(target=lambda: codes.append(main()))\n"
        "thread.start()\n"
        "thread.join()\n"
        "assert codes == [0], codes\n"
    )
    command = [sys.executable, "-c", script, "replay", str(trace), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout)["num_requests"]

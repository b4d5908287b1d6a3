"""`kvarts mock` with several models: what it serves, what it writes, and what it refuses."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from builders import preforked
from builders.http_client import call

Run = Callable[..., int]
MODELS = ("--model", "chat=llama-3.1-8b:weight=2", "--model", "code=qwen3-8b", "--device", "h100-80gb")


def test_two_models_are_served_and_their_records_are_replayed(tmp_path: Path, run_command: Run) -> None:
    with preforked.start("mock", *MODELS, "--port", "0", "--record", tmp_path / "run.jsonl") as process:
        assert process.stderr is not None
        url = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())
        assert url is not None
        for model, num_tokens in (("code", 5), ("chat", 3), ("code", 4)):
            reply = call(url[0], "/v1/completions", {"model": model, "prompt": "hello there", "max_tokens": num_tokens})
            assert reply.status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    rows = {
        name: [json.loads(line) for line in (tmp_path / f"run-{name}.jsonl").read_text().splitlines()]
        for name in ("chat", "code")
    }
    assert [row["num_output_tokens"] for row in rows["code"]] == [5, 4]
    began = {row["began_ns"] for of_model in rows.values() for row in of_model}
    assert began == {rows["code"][0]["arrival_ns"]}
    traces = [word for name in rows for word in ("--trace", f"{name}={tmp_path / f'run-{name}.jsonl'}")]
    assert run_command("replay", *MODELS, *traces, "--report", tmp_path / "report.json") == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert [report["models"][name]["num_completed"] for name in ("chat", "code")] == [1, 2]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--pages", "10"), "--pages: is for one model"),
        (("--cost", "linear:step_ms=1"), "--cost: is for one model"),
        (("--served-model-name", "x"), "--served-model-name: is for one model"),
        (("--set", "lora=code"), "'code' is the name of two models"),
        (("--model", "chat=qwen3-8b"), "is given twice"),
        (("--set", "eviction=session-aware"), "--set eviction: 'session-aware' needs a trace"),
        (("--model", "more=qwen3-8b:eviction=session-aware"), "--model more: eviction: 'session-aware' needs a trace"),
        (("--model", "more=qwen3-8b:eviction=nothing"), "--model more: eviction: 'nothing' is not a policy"),
        (("--set", "max_itl_ms=5"), "--set max_itl_ms: does not go with several models on a device"),
    ],
)
def test_what_several_models_do_not_combine_with_is_refused(
    run_command: Run, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], said: str
) -> None:
    assert run_command("mock", *MODELS, *more, "--port", "0") == 2
    assert said in capsys.readouterr().err


def test_what_is_of_several_models_is_refused_for_one(run_command: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("mock", "--set", "static_split=true", "--port", "0") == 2
    assert "--set static_split: is for several models" in capsys.readouterr().err

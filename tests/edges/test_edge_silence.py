"""No command is silent for longer than two seconds: while it reads, replays or fits, it says so on standard error."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvarts.cli import process
from kvarts.cli.process import Progress

from builders.calls import CALLS

Call = Callable[..., tuple[int, bytes, str]]

AT_ONCE = {
    "completion", "engine", "mock", "model get", "model list", "model show", "model tiny", "serve model",
    "serve sessions", "trace forms", "trace list", "watch",
}  # fmt: skip
"""Commands that serve, talk, or print what is in memory."""
OF_THEIR_OWN = {"generate", "model check", "profile", "soak"}
"""Commands that narrate each prompt, or each sample."""
MORE = {
    "calibrate": ("--design", "--model", "llama-3.1-8b", "--device", "h100-80gb"),
    "replay": ("--model", "a=qwen3-8b", "--trace", "a=trace.jsonl", "--device", "h100-80gb"),
}
LONG = {"calibrate --design"}
"""It takes some seconds; other calls of the same command do not."""


CASES = [
    *((name, each.arguments) for name, each in CALLS.items() if name not in AT_ONCE | OF_THEIR_OWN),
    *MORE.items(),
]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param(name, words, id=label, marks=[pytest.mark.long] if label in LONG else [])
        for name, words in CASES
        for label in [f"{name} {words[0]}"]
    ],
)
def test_a_command_says_what_it_is_at(
    name: str, arguments: tuple[str, ...], here: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not CALLS[name].needs:
        pytest.skip("needs what is not installed")
    monkeypatch.setattr(process, "ANSWER_AFTER_S", 0.0)
    monkeypatch.setattr(process, "SILENT_S", 0.0)
    code, _, said = call(*name.split(), *arguments)
    assert code == CALLS[name].code
    assert any(line.startswith("kvarts: ") and (": 0 " in line or ": 1 " in line) for line in said.splitlines()), said


def test_a_unit_may_take_as_long_as_it_takes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process, "ANSWER_AFTER_S", 0.0)
    monkeypatch.setattr(process, "SILENT_S", 0.01)
    monkeypatch.setattr(process, "EVERY_S", 0.01)
    said = ""
    with Progress("sweeping", 3, "points") as bar:
        while said.count("\n") < 2:
            time.sleep(0.01)
            said += capfd.readouterr().err
        bar.reach(2, 4)
        said = ""
        while "kvarts: sweeping: 2 of 4 points\n" not in said:
            time.sleep(0.01)
            said += capfd.readouterr().err
    capfd.readouterr()
    time.sleep(0.05)
    assert capfd.readouterr().err == ""


def test_an_answer_waits_until_work_has_taken_a_while(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process, "ANSWER_AFTER_S", 0.05)
    with Progress("planning", None, "replays") as progress:
        progress.firm_up("the curve", 3)
        progress.firm_up("the curve", 2)
        assert capfd.readouterr().err == ""
        said = ""
        while not said:
            time.sleep(0.01)
            said = capfd.readouterr().err
        assert said == "kvarts: so far: the curve\n"
        progress.firm_up("2 GPUs", 1)
        assert capfd.readouterr().err == "kvarts: so far: 2 GPUs\n"


def test_what_ends_soon_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with Progress("reading trace.jsonl"):
        pass
    assert capfd.readouterr().err == ""


def test_progress_ends_whichever_of_its_threads_is_first() -> None:
    """A process of its own: if one thread waited for the other for good, it would not end."""
    code = (
        "import sys; sys.setswitchinterval(1e-6)\n"
        "from kvarts.cli.process import Progress\n"
        "for _ in range(3000):\n"
        "    with Progress('replaying', 3, 'requests'): pass\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

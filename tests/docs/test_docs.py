"""Every example in the README and in docs/ runs, and prints what the page says it prints.

`pycon` blocks are sessions; a `python` block prints what the `output` block after it says, where there is one, and
knows what earlier blocks of its page define that do nothing but import and define; in a `console` block each
`$ kvarts` command prints what follows it, `...` standing for anything; `toml` blocks are configurations, and files for
these commands if their first line is a comment with the name of one; `json` blocks are rows of a trace.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import re
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvarts.cli.main import main
from kvarts.cli.replaying import OneRun, all_sections, read_settings
from kvarts.sim.traffic.mooncake import load_mooncake

from builders.chat_logs import write_chat_logs
from builders.claude_sessions import write_claude_sessions
from builders.files_of_pages import write_files_of_pages

ROOT = Path(__file__).parents[2]
IN_ORDER = {"first-ten-minutes.md", "transcript-log-to-gpus.md", "transcript-small-model.md"}
"""Pages whose examples run in one folder or with one server: separate tests run them."""
PAGES = sorted(path for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")] if path.name not in IN_ORDER)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CHECKER = doctest.OutputChecker()
NEEDS = {
    "guide-kv-events.md": pytest.mark.skipif(find_spec("zmq") is None, reason="KV events need kvarts[serve]"),
    "guide-models.md": pytest.mark.skipif(find_spec("torch") is None, reason="real models need kvarts[torch]"),
    "guide-sessions.md": pytest.mark.skipif(find_spec("grpc") is None, reason="sessions need kvarts[grpc]"),
    "how-own-order.md-3": pytest.mark.skipif(
        find_spec("matplotlib") is None or find_spec("pandas") is None, reason="figures need kvarts[notebook]"
    ),
    "how-mock-in-ci.md": pytest.mark.skipif(find_spec("openai") is None, reason="its client is OpenAI's"),
    "start.md": pytest.mark.skipif(find_spec("openai") is None, reason="its client is OpenAI's"),
    "guide-serving.md": pytest.mark.skipif(find_spec("openai") is None, reason="its client is OpenAI's"),
}
"""What the examples of a page need, by its name, or that of one of them."""

LONG = {
    "README.md-1",
    "guide-agents.md-2",
    "guide-agents.md-4",
    "guide-fleet.md-11",
    "guide-fleet.md-12",
    "guide-fleet.md-13",
    "guide-fleet.md-14",
    "guide-fleet.md-15",
    "guide-fleet.md-16",
    "guide-fleet.md-8",
    "guide-fleet.md-9",
    "guide-kv-events.md-3",
    "guide-models.md-11",
    "guide-models.md-13",
    "guide-models.md-16",
    "guide-notebook.md-6",
    "guide-offload.md-1",
    "guide-plan.md-12",
    "guide-plan.md-3",
    "guide-plan.md-7",
    "guide-plan.md-8",
    "guide-policies.md-2",
    "guide-replay.md-4",
    "guide-replay.md-9",
    "guide-routers.md-0",
    "guide-routers.md-1",
    "guide-routers.md-2",
    "guide-routers.md-3",
    "guide-sessions.md-5",
    "guide-sessions.md-7",
    "guide-sharing.md-2",
    "guide-sharing.md-3",
    "guide-timelines.md-8",
    "how-hit-ratio.md-0",
    "how-much-memory.md-0",
    "how-own-order.md-1",
    "start.md-1",
    "start.md-2",
}
"""Examples that take seconds, by their page and their place in it."""

SLOW = {
    "README.md-2",
    "guide-agents.md-0",
    "guide-agents.md-1",
    "guide-fleet.md-1",
    "guide-fleet.md-17",
    "guide-fleet.md-18",
    "guide-fleet.md-19",
    "guide-fleet.md-2",
    "guide-fleet.md-20",
    "guide-fleet.md-21",
    "guide-fleet.md-22",
    "guide-fleet.md-3",
    "guide-fleet.md-4",
    "guide-fleet.md-5",
    "guide-fleet.md-6",
    "guide-notebook.md-4",
    "guide-offload.md-3",
    "guide-offload.md-4",
    "guide-policies.md-4",
    "guide-replay.md-2",
    "guide-sharing.md-0",
    "guide-sharing.md-1",
    "guide-sharing.md-4",
    "guide-sharing.md-5",
    "guide-sharing.md-7",
    "guide-timelines.md-6",
    "guide-timelines.md-7",
    "how-own-policy.md-0",
    "how-prefill-decode.md-0",
    "how-prefill-decode.md-1",
    "how-vllm-or-sglang.md-0",
    "how-vllm-or-sglang.md-1",
}
"""Examples that take a third of a second or more."""


def defines_only(code: str) -> bool:
    """Whether `code` does nothing but import and define classes and functions."""
    kinds = ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef
    return all(isinstance(statement, kinds) for statement in ast.parse(code).body)


def blocks(kind: str) -> list[Any]:
    """Every block of one kind, with what the block after it says if that is its output."""
    found = []
    for page in PAGES:
        all_blocks = BLOCK.findall(page.read_text())
        defined = ""
        for index, (name, text) in enumerate(all_blocks):
            after = all_blocks[index + 1] if index + 1 < len(all_blocks) else ("", "")
            if name == kind:
                output = after[1] if after[0] == "output" else None
                place = f"{page.name}-{index}"
                marks = [NEEDS[name] for name in (page.name, place) if name in NEEDS]
                marks += [pytest.mark.long] * (place in LONG) + [pytest.mark.slow] * (place in SLOW)
                found.append(pytest.param(defined + text, output, id=f"{page.relative_to(ROOT)}-{index}", marks=marks))
                if kind == "python" and defines_only(text):
                    defined += text
    return found


def assert_printed(printed: str, expected: str) -> None:
    assert CHECKER.check_output(expected, printed, doctest.ELLIPSIS), f"expected:\n{expected}\nprinted:\n{printed}"


@pytest.fixture(scope="session")
def claude_sessions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("claude") / "projects"
    write_claude_sessions(folder)
    return folder


@pytest.fixture(scope="session")
def chat_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats") / "logs"
    write_chat_logs(folder)
    return folder


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claude_sessions: Path, chat_logs: Path
) -> None:
    """Examples find no bundled file there: to who installs with pip they are `sample:NAME` only."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "once upon a time"}\n{"prompt": "once upon a hill"}\n')
    shutil.copytree(claude_sessions, tmp_path / ".claude" / "projects")
    (tmp_path / "logs").symlink_to(chat_logs)
    write_files_of_pages(tmp_path)
    monkeypatch.chdir(tmp_path)


def test_slow_examples_are_there() -> None:
    found = {f"{page.name}-{index}" for page in PAGES for index, _ in enumerate(BLOCK.findall(page.read_text()))}
    assert found >= LONG | SLOW


@pytest.mark.parametrize(("text", "output"), blocks("python"))
def test_python_examples(text: str, output: str | None) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(text, {"__name__": "example"})
    if output is not None:
        assert_printed(printed.getvalue(), output)


@pytest.mark.parametrize(("text", "output"), blocks("console"))
def test_commands(
    text: str, output: None, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
    assert commands
    for command in commands:
        line, expected = command.split("\n", 1)
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        assert main() == 0
        assert_printed(capsysbinary.readouterr().out.decode(), expected)


@pytest.mark.parametrize("page", [page for page in PAGES if "```pycon" in page.read_text()], ids=lambda page: page.name)
def test_sessions(page: Path) -> None:
    results = doctest.testfile(str(page), module_relative=False, optionflags=doctest.FAIL_FAST)
    assert results.attempted
    assert not results.failed


@pytest.mark.parametrize(("text", "output"), blocks("toml"))
def test_configurations(
    text: str, output: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = tmp_path / "example.toml"
    path.write_text(text)
    if "[models." in text:
        monkeypatch.setattr(sys, "argv", ["kvarts", "replay", "--config", str(path)])
        assert main() == 0
    else:
        OneRun(read_settings(path, all_sections()), None, all_sections())


@pytest.mark.parametrize(("text", "output"), blocks("json"))
def test_trace_rows(text: str, output: None, tmp_path: Path) -> None:
    path = tmp_path / "example.jsonl"
    path.write_text(text)
    assert len(list(load_mooncake(path))) == len(text.splitlines())


def test_the_readme_has_two_complete_commands() -> None:
    commands = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(commands) == 2
    assert all(command.startswith("python3.11 -m venv .venv && .venv/bin/pip install") for command in commands)


@pytest.mark.slow
def test_the_command_for_several_models_among_the_features_runs(
    capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "index.md").read_text()
    command = re.search(r"`(kvarts replay --model chat=[^`]*)`", text)
    assert command is not None
    monkeypatch.setattr(sys, "argv", shlex.split(command[1]))
    assert main() == 0
    assert b"2 models on one device" in capsysbinary.readouterr().out

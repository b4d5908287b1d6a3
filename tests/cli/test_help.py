"""Help: every command has a line that is not cut, examples that are understood, and all of its options somewhere."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable

import click
import pytest

from kvarts.cli.commands import COMMANDS, cli
from kvarts.cli.helps import COMMON, EXAMPLES, GROUPS, SUMMARIES

from builders import preforked
from builders.calls import commands

EVERY = commands()
EXAMPLE_LINES = [
    pytest.param(name, line, id=line) for name, lines in EXAMPLES.items() if name in EVERY for line in lines
]


def helped(name: str, option: str = "-h") -> str:
    """What a command prints when it is asked for help."""
    with cli.make_context("kvarts", [], resilient_parsing=True) as context, context.scope():
        result = preforked.run(*name.split(), option)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_each_command_is_in_a_group_with_a_line() -> None:
    grouped = [name for members in GROUPS.values() for name in members]
    assert sorted(grouped) == sorted(set(grouped))
    assert set(COMMANDS) <= set(grouped)
    assert {*EVERY, *COMMANDS} <= set(SUMMARIES)
    assert set(EVERY) <= set(EXAMPLES)


def test_no_line_is_cut_or_wrapped() -> None:
    lines = helped("").splitlines()
    for name in COMMANDS:
        assert any(line.split() == [name, *SUMMARIES[name].split()] for line in lines), name
    assert max(map(len, lines)) <= 80
    assert [title for title in GROUPS if f"{title}:" in lines] == list(GROUPS)


@pytest.mark.parametrize(("name", "line"), EXAMPLE_LINES)
def test_examples_are_understood(name: str, line: str) -> None:
    words = shlex.split(line)[1:]
    depth = len(name.split())
    assert " ".join(words[:depth]) == name
    command = EVERY[name]
    with click.Context(cli, info_name="kvarts") as parent:
        context = command.make_context(name, words[depth:], parent=parent)
    assert context.args == []


@pytest.mark.parametrize("name", COMMON)
def test_short_help_lists_the_options_that_are_asked_for_most(name: str) -> None:
    if name not in EVERY:
        pytest.skip(f"there is no kvarts {name}")
    flags = {option for param in EVERY[name].params for option in param.opts if option.startswith("--")}
    assert set(COMMON[name]) <= flags
    short, whole = helped(name), helped(name, "--help-all")
    for flag in flags:
        assert flag in whole.replace("\n", " ").split() or f"{flag}," in whole or f" {flag}" in whole, flag
    assert len(short.splitlines()) < len(whole.splitlines())
    assert f"more options: python -m kvarts {name} --help-all" in short
    assert EXAMPLES[name][0] in short and EXAMPLES[name][0] in whole


def test_a_misspelled_command_is_answered(run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("rplay") == 2
    assert "No such command 'rplay'. Did you mean replay?" in capsys.readouterr().err
    assert run_command("trace", "inof") == 2
    assert "Did you mean info?" in capsys.readouterr().err
    assert run_command("zzzz") == 2
    assert "Commands: " in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_for_shells(shell: str) -> None:
    environment = {**os.environ, "_KVARTS_COMPLETE": f"{shell}_source"}
    script = "import sys; sys.argv = ['kvarts']; from kvarts.cli.main import run_main; run_main()"
    printed = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert "_KVARTS_COMPLETE" in printed.stdout

"""What commands import: a budget, so that a short command does not wait for what it does not use."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

OTHERS = {"click", "msgspec", "mypy_extensions", "numpy", "org", "typing_extensions"}
"""Packages outside the standard library that every command may load; pickle looks for `org`, of Jython."""
HEAVY = {"doors", "plan.calibrate", "run.engine_loop", "run.llm_engine", "run.text", "run.torch"}
"""Rooms of servers, clients and models, and of fits, which neither help nor a replay loads."""


def imported(*arguments: str, folder: Path) -> list[str]:
    """The modules that a command imports."""
    return modules_of("-m", "kvarts", *arguments, folder=folder)


def modules_of(*arguments: str, folder: Path | None = None) -> list[str]:
    """The modules that an interpreter with these arguments imports."""
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return re.findall(r"^import time: .*\| +(\S+)$", done.stderr, re.MULTILINE)


@cache
def at_start() -> frozenset[str]:
    """Packages that an installation of Python starts of its own accord."""
    return frozenset(name.split(".")[0] for name in modules_of("-c", "pass"))


def others(modules: list[str]) -> set[str]:
    """Packages that are neither kvarts, of the standard library, nor started by an installation of its own accord."""
    packages = {name.split(".")[0] for name in modules if name.isascii()}
    return packages - sys.stdlib_module_names - at_start() - {"kvarts", "kvarts__mypyc", "coverage"}


def rooms(modules: list[str]) -> set[str]:
    """The wings, and the rooms in them."""
    return {".".join(name.split(".")[1:end]) for name in modules if name.startswith("kvarts.") for end in (2, 3)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "one.jsonl").write_text(
        '{"timestamp": 0, "input_length": 1000, "output_length": 200, "hash_ids": [1, 2]}\n'
    )
    return tmp_path


@pytest.mark.parametrize("arguments", ["--version", "--help", "replay --help", "model --help", "verify --help"])
def test_help_loads_nothing_heavy(folder: Path, arguments: str) -> None:
    modules = imported(*arguments.split(), folder=folder)
    assert others(modules) <= OTHERS
    assert not rooms(modules) & HEAVY


def test_a_replay_loads_no_optional_package(folder: Path) -> None:
    modules = imported("replay", "one.jsonl", "--json", folder=folder)
    assert others(modules) <= OTHERS
    assert not rooms(modules) & HEAVY

"""What commands import: a budget, so that a short command does not wait for what it does not use."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

OTHERS = {"click", "msgspec", "mypy_extensions", "typing_extensions"}
"""Packages outside the standard library that every command may load."""
UNUSED = {
    "argparse", "ast", "concurrent.futures", "csv", "ctypes", "dataclasses", "datetime", "fractions", "gzip", "hashlib",
    "inspect", "ipaddress", "json", "locale", "logging", "msgspec.inspect", "multiprocessing", "pathlib", "platform",
    "random", "shutil", "signal", "socket", "statistics", "subprocess", "tempfile", "textwrap", "threading", "tomllib",
    "traceback", "urllib.parse", "zlib",
}  # fmt: skip
"""Modules that neither a short replay nor what it needs loads."""

REPLAY = {"build", "engine", "event_log", "executor", "kv", "report", "sched", "sim", "traffic"}
"""Rooms that a command without a replay does not load."""
HEAVY = {"calibrate", "client", "connect", "llm", "openai_api", "plan", "proto", "serve", "verify"}
"""Rooms that a replay does not load."""


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
    return {name.split(".")[1] for name in modules if name.startswith("kvarts.")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "one.jsonl").write_text(
        '{"timestamp": 0, "input_length": 1000, "output_length": 200, "hash_ids": [1, 2]}\n'
    )
    return tmp_path


@pytest.mark.parametrize("arguments", ["--version", "--help", "replay --help", "model --help", "verify --help"])
def test_help_loads_no_engine(folder: Path, arguments: str) -> None:
    modules = imported(*arguments.split(), folder=folder)
    assert others(modules) <= OTHERS
    assert not rooms(modules) & HEAVY - {"verify", "plan"}
    if arguments == "--version":
        assert rooms(modules) <= {"cli", "errors", "files"}
        assert others(modules) == set()
        assert not UNUSED & set(modules)


@pytest.mark.parametrize(
    "options",
    ["", "--json", "--report report.json", "--model qwen3-8b --device h100-80gb", "--slo-ttft-ms 100"],
)
def test_a_short_replay_loads_neither_numpy_nor_what_it_does_not_use(folder: Path, options: str) -> None:
    modules = imported("replay", "one.jsonl", *options.split(), folder=folder)
    assert others(modules) <= OTHERS - {"click"}
    assert not rooms(modules) & (HEAVY | {"audit", "explain", "record", "offload", "routers", "fleet", "sharing"})
    num_own = len([name for name in modules if name.startswith("kvarts")])
    if options in ("", "--json"):
        assert not UNUSED & set(modules)
        assert num_own <= 76
    assert num_own <= (88 if "--model" in options else 77)
    assert not {"importlib.resources", "shutil", "tempfile", "zipfile"} & set(modules)
    assert "pathlib" not in modules or "--report" in options


def test_tiers_of_whole_pages_do_not_load_those_of_kv_groups(folder: Path) -> None:
    modules = imported("replay", "one.jsonl", "--host-pages", "100", folder=folder)
    assert "kvarts.offload.page_layout" in modules  # where a compiled module imports another, only the first is seen
    assert not {"kvarts.offload.part_policy", "kvarts.kv.run_cache", "kvarts.kv.span_tree"} & set(modules)


def test_a_replay_of_thousands_of_requests_loads_no_numpy(folder: Path) -> None:
    row = '{"timestamp": 0, "input_length": 1000, "output_length": 20, "hash_ids": [1, 2]}\n'
    (folder / "many.jsonl").write_text(row * 4000)
    assert "numpy" not in others(imported("replay", "many.jsonl", "--profile", "mocker", folder=folder))


def test_what_needs_arrays_loads_numpy(folder: Path) -> None:
    """The budget is able to notice."""
    assert "numpy" in others(imported("replay", "one.jsonl", "--run-dir", "run", folder=folder))


AFTER_MSGSPEC = """
from kvarts.cli.process import load_msgspec
load_msgspec()
import sys, typing, msgspec
assert not {"datetime", "platform", "textwrap", "msgspec.inspect", "msgspec.toml", "msgspec.yaml"} & set(sys.modules)
assert not hasattr(typing, "compile")
import datetime, platform, textwrap, uuid
moment = datetime.datetime(2024, 5, 10, tzinfo=datetime.timezone.utc)
assert msgspec.json.decode(msgspec.json.encode(moment), type=datetime.datetime) == moment
assert msgspec.convert(str(uuid.UUID(int=1)), uuid.UUID).int == 1
assert msgspec.json.schema(int) == {"type": "integer"}
assert msgspec.inspect.type_info(int) == msgspec.inspect.IntType()
assert msgspec.toml.decode(b"a = 1") == {"a": 1}
assert platform.system() and textwrap.dedent(" a") == "a"
import msgspec.inspect
for name in ("datetime", "platform", "textwrap", "msgspec.inspect", "msgspec.toml"):
    assert sys.modules[name].__spec__.name == name
assert isinstance(msgspec.convert({"a": 1}, msgspec.defstruct("Row", [("a", "int | None")])).a, int)
"""


def test_modules_that_msgspec_did_not_get_are_there_afterwards() -> None:
    assert "platform" in modules_of("-c", AFTER_MSGSPEC)

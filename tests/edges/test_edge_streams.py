"""Every command with standard streams that are full, closed, not read, or of another encoding."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from builders.calls import CALLS, Call, commands
from builders.forked import opened, run_forked

FAST = [name for name, call in CALLS.items() if not call.is_slow]
RUNS = {name: [*name.split(), *CALLS[name].arguments] for name in FAST}
HELPS = {f"{name} --help": [*name.split(), "--help"] for name in FAST}
ENDS = {name: CALLS[name] for name in FAST} | {name: Call(()) for name in HELPS}
RUNS |= HELPS


def full() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def closed() -> None:
    os.close(1)
    sys.stdout = None  # as the interpreter has it then


def not_read() -> None:
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)


def all_closed() -> None:
    for number in (0, 1, 2):
        os.close(number)
    sys.stdin = sys.stdout = sys.stderr = None


def err_full() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)


def err_closed() -> None:
    os.close(2)
    sys.stderr = None


def latin() -> None:
    sys.stdout, sys.stderr = opened(1, "latin-1"), opened(2, "ascii")


DATA: dict[str, Callable[[], None]] = {"full": full, "closed": closed, "not read": not_read, "all closed": all_closed}
NARRATION: dict[str, Callable[[], None]] = {"full": err_full, "closed": err_closed, "latin": latin}


def each_with(streams: Iterable[str]) -> list[Any]:
    """Every command with every stream: the fast suite tries one of the streams with each command, in turn."""
    kinds = list(streams)
    pairs = [
        pytest.param(kind, name, marks=[] if kind == kinds[place % len(kinds)] else pytest.mark.slow)
        for place, name in enumerate(FAST)
        for kind in kinds
    ]
    return pairs + [pytest.param(kind, name, marks=pytest.mark.long) for name in HELPS for kind in kinds]


@pytest.mark.parametrize(("stream", "name"), each_with(DATA))
def test_output_that_cannot_be_written_ends_with_7_and_one_line_and_a_reader_that_has_gone_is_no_error(
    name: str, stream: str, here: Path, tmp_path: Path
) -> None:
    call = ENDS[name]
    if not call.needs:
        pytest.skip("what the command needs is not installed")
    ended = run_forked(RUNS[name], tmp_path / "err", DATA[stream])
    assert ended.code == (7 if call.prints and stream != "not read" else call.code), ended.err
    assert "Traceback" not in ended.err
    if call.prints:
        expected = {"full": "No space left on device", "closed": "is closed"}.get(stream)
        if expected is None:
            assert "standard output" not in ended.err
        else:
            assert ended.err.splitlines()[-1].startswith("kvarts: standard output: ")
            assert expected in ended.err


@pytest.mark.parametrize(("stream", "name"), each_with(NARRATION))
def test_narration_that_cannot_be_written_changes_nothing(name: str, stream: str, here: Path, tmp_path: Path) -> None:
    call = ENDS[name]
    if not call.needs:
        pytest.skip("what the command needs is not installed")
    ended = run_forked(RUNS[name], tmp_path / "err", NARRATION[stream])
    assert (ended.code, "Traceback" in ended.err) == (call.code, False), ended.err


def test_a_file_is_not_opened_in_the_place_of_a_closed_stream(here: Path, tmp_path: Path) -> None:
    ended = run_forked(["replay", "trace.jsonl", "--report", "x.json"], tmp_path / "err", all_closed)
    assert ended.code == 7
    assert Path("x.json").read_bytes().startswith(b"{")


def test_a_chart_gets_to_a_terminal_of_another_encoding(here: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def prepare() -> None:
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT, 0o644), 1)
        latin()

    assert run_forked(["report", "run"], tmp_path / "err", prepare).code == 0
    assert b"KV use        ???" in out.read_bytes()


def test_dev_stdout_is_standard_output_also_of_a_regular_file(here: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def prepare() -> None:
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT, 0o644), 1)
        os.write(1, b"before\n")

    assert run_forked(["replay", "trace.jsonl", "--report", "/dev/stdout"], tmp_path / "err", prepare).code == 0
    lines = out.read_text().splitlines()
    assert (lines[0], lines[1], lines[-1]) == ("before", "{", "}")


def test_the_table_has_every_command() -> None:
    assert set(commands()) == set(CALLS)

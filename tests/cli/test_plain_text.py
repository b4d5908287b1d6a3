"""Texts of others reach a terminal without escape sequences: each command that prints any, run as a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvarts.base.terminal import plain

EVIL = "a\x1b]0;owned\x07\x1b[2J\rb\x7f\x9bc"
SHOWN = "a\\x1b]0;owned\\x07\\x1b[2J\\x0db\\x7f\\x9bc"


def run(*words: object) -> tuple[int, bytes]:
    """The exit code, and everything that was printed, of a command."""
    done = subprocess.run([sys.executable, "-m", "kvarts", *map(str, words)], capture_output=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_control_characters_are_spelled_but_for_newlines_and_tabs() -> None:
    assert plain(EVIL) == SHOWN
    assert plain("a\tb\nc é ♞") == "a\tb\nc é ♞"
    every = "".join(map(chr, range(256)))
    assert not set(plain(every)) & ({chr(code) for code in (*range(32), *range(127, 160))} - {"\n", "\t"})


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evil") / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 20, "output_length": 5, "hash_ids": [index], "request_id": f"{EVIL}{index}",
         "session_id": EVIL, "tenant": EVIL, "model": EVIL}
        for index in range(3)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def assert_plain(printed: bytes) -> None:
    text = printed.decode()
    assert text == plain(text)


def test_names_of_files_and_ids_of_requests_are_spelled(trace: Path, tmp_path: Path) -> None:
    folder = tmp_path / f"run{EVIL}"
    _, printed = run("replay", trace, "--pages", 100, "--run-dir", folder, "--events", tmp_path / f"events{EVIL}")
    assert_plain(printed)
    _, printed = run("trace", "info", trace)
    assert_plain(printed)
    missing = tmp_path / f"no{EVIL}.jsonl"
    code, printed = run("replay", missing, "--pages", 100)
    assert code == 3
    assert SHOWN.encode() in printed
    assert_plain(printed)
    _, printed = run("replay", trace.with_name("trace.jsonl"), "--pages", 100, "--replicas", 2, "--router", EVIL)
    assert b"owned" in printed
    assert_plain(printed)


def test_a_story_and_a_report_spell_what_strangers_wrote(trace: Path, tmp_path: Path) -> None:
    text = trace.read_text().replace(f', "model": {json.dumps(EVIL)}', "")
    traffic = tmp_path / "trace.jsonl"
    traffic.write_text(text)
    journal, folder = tmp_path / "journal", tmp_path / "run"
    code, printed = run("replay", traffic, "--pages", 100, "--run-dir", folder, "--events", journal)
    assert code == 0, printed
    code, printed = run("story", folder)
    assert code == 0
    assert b"owned" in printed
    assert_plain(printed)
    summary = next(folder.rglob("report.json"))
    values = json.loads(summary.read_bytes())
    summary.write_text(json.dumps({**values, "trace": EVIL}))
    code, printed = run("report", folder)
    assert_plain(printed)
    assert b"owned" in printed, printed

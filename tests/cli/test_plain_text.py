"""Texts of others reach a terminal without escape sequences: each command that prints any, run as a process."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvarts.base.terminal import in_line, plain

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


def test_marks_of_direction_and_line_separators_are_spelled() -> None:
    assert plain("a\u202eb\u2066c\u2028d") == "a\\u202eb\\u2066c\\u2028d"
    assert in_line("a\n\tb\x1b") == "a\\n\\tb\\x1b"
    assert in_line(in_line(f"{EVIL}\n")) == in_line(f"{EVIL}\n")


def test_an_id_writes_no_line_of_its_own_and_a_suggested_command_is_quoted(tmp_path: Path) -> None:
    name = "x; touch owned\nkvarts: forged"
    row = {"timestamp": 0, "input_length": 20, "output_length": 5, "hash_ids": [1], "request_id": name}
    traffic, folder = tmp_path / "trace.jsonl", tmp_path / "a run"
    traffic.write_text(json.dumps(row) + "\n")
    code, printed = run("replay", traffic, "--pages", 100, "--run-dir", folder)
    assert code == 0, printed
    code, printed = run("story", folder)
    lines = printed.decode().splitlines()
    assert code == 0
    assert not [line for line in lines if line.startswith("kvarts: forged")]
    [why] = [line for line in lines if line.startswith("why: ")]
    words = shlex.split(why.removeprefix("why: "))
    assert words[:4] == ["kvarts", "story", str(folder), "--request"]
    told = [run("story", folder, "--request", each) for each in (words[4], name)]
    assert told[0] == told[1]
    assert told[0][0] == 0


def test_the_name_of_a_tool_writes_no_line_of_its_own(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "You help. " * 60}, {"role": "user", "content": "hello " * 60}]
    rows = []
    for number, what in enumerate("abcd"):
        tool = {"name": "f\n\nmend: run this", "description": what * 9, "parameters": {}}
        row = {"created": number, "session_id": "s", "tools": [{"type": "function", "function": tool}]}
        row |= {"messages": messages, "response": {"usage": {"completion_tokens": 2}}}
        rows.append(json.dumps(row) + "\n")
    log = tmp_path / "log.jsonl"
    log.write_text("".join(rows))
    code, printed = run("why", log)
    text = printed.decode()
    assert code == 0, text
    assert "in tools[0] (f\\n\\nmend: run this" in text
    assert "\nmend: run this" not in text


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


@pytest.mark.parametrize("value", ["9" * 5000, "x y " * 2000, "\x1b" * 5000])
def test_an_error_repeats_little_of_a_long_value(value: str) -> None:
    for words in (["replay", "--set", value], ["replay", "--pages", value], ["replay", value], [value]):
        code, printed = run(*words)
        assert code in (2, 3, 4), printed
        assert len(printed) < 2000 and b"characters)..." in printed, printed

"""Transcripts of first ten minutes: each command, in order, in one folder, prints the recorded output."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from kvarts.cli.main import main

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "first-ten-minutes.md"
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.long
@pytest.mark.parametrize(("name", "least"), [("first-ten-minutes.md", 8), ("transcript-log-to-gpus.md", 4)])
def test_the_transcript_is_what_is_printed(
    name: str, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / name).read_text()
    num_commands = 0
    for kind, block in BLOCK.findall(text):
        if kind == "python":
            exec(block, {"__name__": "example"})
            continue
        for command in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, expected = command.split("\n", 1)
            monkeypatch.setattr(sys, "argv", shlex.split(line))
            code = main()
            printed = capsysbinary.readouterr()
            assert printed.out.decode() + (printed.err.decode() if code else "") == expected, line
            num_commands += 1
    assert num_commands == text.count("\n$ ") >= least
    assert "..." not in "".join(block for kind, block in BLOCK.findall(text) if kind == "console")


def test_the_page_answers_what_a_newcomer_asks() -> None:
    text = PAGE.read_text()
    answers = ("try --host-memory", "kvarts story run --request 17", "Did you mean", "--help-all", "kvarts completion")
    assert [answer for answer in answers if answer not in text] == []

"""Each finding has a line in the index, the guess before it, pinned packages, and leaves nothing behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "findings"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
BUILT_ON = {"uv", "-q"}
"""What installs the packages; it is no part of what is shown."""


def test_the_index_has_a_line_for_each_script() -> None:
    rows = re.findall(r"^\| \[([\w.-]+)\]\(\1\) \| \S.* \| \S.* \|$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert rows == [path.name for path in SCRIPTS]


def test_the_page_names_scripts_that_exist() -> None:
    page = (ROOT / "docs" / "where-guesses-are-wrong.md").read_text()
    named = re.findall(r"`findings/([\w.-]+)`", page)
    assert named
    assert {*named} <= {path.name for path in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_states_guess_and_sight_and_cleans_up(script: Path) -> None:
    text = script.read_text()
    head = text.partition("set -euo pipefail")[0]
    assert script.stat().st_mode & 0o111
    assert re.search(r"^# Guess(, worded afterwards)?: .*^# Seen: ", head, re.MULTILINE | re.DOTALL)
    assert "trap 'rm -rf \"$folder\"' EXIT" in text
    assert "assert " in text
    assert "kvarts" not in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_pins_what_it_installs(script: Path) -> None:
    text = script.read_text().replace("\\\n", " ")
    installs = re.findall(r"^\S+/(?:pip|uv)\"(?: pip)? install (.*)$", text, re.MULTILINE)
    packages = [word.strip('"') for line in installs for word in line.split() if not word.startswith("-")]
    named = [word for word in packages if word not in BUILT_ON and not word.startswith("$folder")]
    assert named
    assert [word for word in named if "==" not in word] == []

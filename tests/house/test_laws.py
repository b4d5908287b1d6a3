"""The table of laws has every law, and names files that exist and test it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|\n ").split(" | ")]
    for line in (ROOT / "tests" / "laws.md").read_text().splitlines()
    if line.startswith("| L")
]
LAWS = [f"L{number}" for number in range(1, 18)]


def files_in(cell: str) -> list[Path]:
    """Return the files that a cell names."""
    return [ROOT / path for path in re.findall(r"`(tests/[^`]+)`", cell)]


def test_each_law_has_a_row() -> None:
    assert [row[0] for row in ROWS] == LAWS


@pytest.mark.parametrize(("law", "tests", "oracle"), [(row[0], row[2], row[3]) for row in ROWS], ids=LAWS)
def test_a_law_is_tested_in_the_files_of_its_row(law: str, tests: str, oracle: str) -> None:
    assert files_in(tests)
    assert oracle
    missing = [path for path in files_in(tests) + files_in(oracle) if not path.exists()]
    assert not missing, f"tests/laws.md, {law}: there is no {missing[0].relative_to(ROOT)}"
    for path in files_in(tests):
        assert re.search(rf"\b{law}\b", path.read_text()), f"{path.relative_to(ROOT)} does not name {law}"

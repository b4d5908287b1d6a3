"""The index of benchmarks lists each script, and the docs name only scripts that exist or their commit."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
INDEX = (FOLDER / "README.md").read_text()


def test_each_script_has_a_row_with_what_it_guards() -> None:
    rows = {}
    for line in INDEX.splitlines():
        if (row := re.fullmatch(r"\| \[([\w.]+)\]\(\1\) \|(.*)\|(.+)\|", line)) is not None:
            rows[row[1]] = row[3].strip()
    assert {path.name for path in FOLDER.iterdir() if path.is_file()} - {"README.md"} == set(rows)
    assert all(rows.values()), rows


def test_the_pages_that_it_names_exist() -> None:
    for link in re.findall(r"\]\(\.\./([^)#]+)", INDEX):
        assert (ROOT / link).exists(), link


def test_docs_name_scripts_that_exist_or_their_commit() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for page in pages:
        text = " ".join(page.read_text().split())
        for found in re.finditer(r"benchmarks/(\w+\.(?:py|mjs|toml))(`? at [0-9a-f]{8})?", text):
            if found[2] is None:
                assert (FOLDER / found[1]).exists(), f"{page.relative_to(ROOT)} names {found[0]}"

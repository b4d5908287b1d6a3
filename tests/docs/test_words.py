"""Text in the source and in the docs is plain technical English: laws that a program can check."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = sorted((ROOT / "src" / "kvarts").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

FOR_PEOPLE = re.compile(r"\b(who|whom|whoever|nobody|somebody|anybody|everybody)\b", re.IGNORECASE)
"""Words for people. Pages, requests, models and code are things; "whose" is for things as well."""

MAX_WIDTH = 120


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The docstrings, those of attributes included, and the comments of a file, each with its line."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def long_lines(page: str) -> Iterator[int]:
    """The lines that are too long, code, tables and lines with a link excepted."""
    is_code = False
    for number, line in enumerate(page.splitlines(), 1):
        if line.startswith("```"):
            is_code = not is_code
        elif len(line) > MAX_WIDTH and not is_code and not line.startswith("|") and "](" not in line:
            yield number


def test_what_the_laws_forbid_is_found(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text('x = 1  # who reads it\n"""Pages nobody has."""\n"""See Rule."""\ny = "nobody"\n')
    assert [line for line, text in texts(path) if FOR_PEOPLE.search(text)] == [2, 1]
    assert [line for line, text in texts(path) if only_refers(text)] == [3]
    assert [line for _, line, _ in breaches(path)] == [2, 3, 1]
    long = "word " * 30
    assert list(long_lines(f"{long}\n| {long}|\n```sh\n{long}\n```\n[{long}](link)\n- {long}\n")) == [1, 7]


def only_refers(text: str) -> bool:
    """Whether a docstring names another place and says nothing else."""
    return re.fullmatch(r"\s*See [\w.`]+\s*", text) is not None


def breaches(path: Path) -> list[tuple[str, int, str]]:
    """The texts of a file that a law forbids. A file without the words of the laws is not parsed."""
    source = path.read_text()
    if not FOR_PEOPLE.search(source) and "See " not in source:
        return []
    return [(path.name, line, text) for line, text in texts(path) if FOR_PEOPLE.search(text) or only_refers(text)]


@pytest.mark.parametrize("folder", sorted({path.parent for path in SOURCE}), ids=lambda folder: folder.name)
def test_docstrings_and_comments(folder: Path) -> None:
    assert [found for path in sorted(folder.glob("*.py")) for found in breaches(path)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_lines_of_pages(path: Path) -> None:
    assert list(long_lines(path.read_text())) == []

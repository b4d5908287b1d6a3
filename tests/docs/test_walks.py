"""docs/walks.md names files and functions that exist, each function in the file next to it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "kvarts"
PAGE = (ROOT / "docs" / "walks.md").read_text()
ROWS = re.findall(r"^\|[^|]*\| `([\w/]+\.py)` \| `([\w.]+)` \|", PAGE, re.MULTILINE)


def definitions(path: Path) -> set[str]:
    """The classes and functions of a file, methods with their class."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


def test_there_are_three_walks_down_and_up() -> None:
    walks = PAGE.split("\n## ")[1:]
    assert len(walks) == 3
    for walk in walks:
        places = re.findall(r"^\| (down|bottom|up) \|", walk, re.MULTILINE)
        assert places == ["down", "bottom", "up"]
    table_rows = [line for line in PAGE.splitlines() if line.startswith("|") and ".py`" in line]
    assert len(ROWS) == len(table_rows) > 35


@pytest.mark.parametrize(("path", "name"), ROWS)
def test_the_function_is_in_the_file(path: str, name: str) -> None:
    assert name in definitions(SOURCE / path)


def test_files_and_classes_named_in_sentences_exist() -> None:
    sentences = re.sub(r"^\|.*$", "", PAGE, flags=re.MULTILINE)
    for path in re.findall(r"`([\w/]+\.py)`", PAGE):
        assert (SOURCE / path).is_file(), path
    everything = set().union(*(definitions(path) for path in SOURCE.rglob("*.py")))
    named = set(re.findall(r"`([A-Z]\w+(?:\.\w+)?)`", sentences))
    assert named and named <= everything, named - everything

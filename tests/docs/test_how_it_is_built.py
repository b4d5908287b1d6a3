"""docs/how-it-is-built.md names files, classes and methods that exist, and wings in the order of their imports."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "kvarts"
PAGE = (ROOT / "docs" / "how-it-is-built.md").read_text()
CODE = re.findall(r"^```text\n(.*?)^```$|`([^`\n]+)`", PAGE, re.MULTILINE | re.DOTALL)
TEXT = "\n".join(block or span for block, span in CODE)


def wings_of_the_page() -> list[list[str]]:
    """The wings of each row of the table of wings, from the ground up."""
    table = PAGE.split("| wing | what it owns | what it must not know |\n")[1].split("\n\n")[0]
    return [re.findall(r"`(\w+)`", row.split("|")[1]) for row in table.splitlines()[1:]]


def wings_of_the_contract() -> list[list[str]]:
    """The layers that import-linter checks, from the ground up."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [[room.strip() for room in layer.split("|")] for layer in reversed(layers)]


IS_WHOLE = {room for row in wings_of_the_page() for room in row} <= {path.stem for path in SOURCE.iterdir()}
NEEDS_ALL_ROOMS = pytest.mark.skipif(not IS_WHOLE, reason="a room that the page describes is not installed")


@cache
def members() -> dict[str, set[str]]:
    """The names that each class of the source defines or sets, those of its bases included."""
    found: dict[str, set[str]] = defaultdict(set)
    bases: dict[str, set[str]] = defaultdict(set)
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name] |= {
                    part.name if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) else part.attr
                    for part in ast.walk(node)
                    if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
                    or (isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store))
                }
                bases[node.name] |= {base.id for base in node.bases if isinstance(base, ast.Name)}
    for name in list(found):
        for base in bases[name]:
            found[name] |= found.get(base, set())
    return found


@NEEDS_ALL_ROOMS
@pytest.mark.parametrize("path", sorted(set(re.findall(r"[\w/]+\.py\b", TEXT))))
def test_files_exist(path: str) -> None:
    assert (ROOT if path.startswith("tests/") else SOURCE).joinpath(path).is_file()


@NEEDS_ALL_ROOMS
def test_methods_exist() -> None:
    named = sorted(set(re.findall(r"\b([A-Z]\w*)\.([a-z]\w*)\b", TEXT)))
    assert len(named) > 50
    assert [f"{name}.{member}" for name, member in named if member not in members().get(name, set())] == []


@NEEDS_ALL_ROOMS
def test_classes_exist() -> None:
    spans = {span for _, span in CODE}
    named = {span for span in spans if re.fullmatch(r"[A-Z]\w*[a-z]\w*", span)}
    assert len(named) > 50
    assert sorted(named - set(members())) == []


@NEEDS_ALL_ROOMS
def test_protocols_are_in_their_files() -> None:
    table = PAGE.split("| Protocol | file |")[1].split("\n\n")[0]
    rows = [row.split("|") for row in table.splitlines()[2:]]
    assert len(rows) > 10
    for row in rows:
        [path] = re.findall(r"`([^`]+)`", row[2])
        for name in re.findall(r"`(\w+)`", row[1]):
            pattern = rf"^class {name}(:|\(.*(Protocol|Generic|ABC|Memory))"
            assert re.search(pattern, (SOURCE / path).read_text(), re.MULTILINE), name


@NEEDS_ALL_ROOMS
def test_wings_are_in_the_order_in_which_they_may_import() -> None:
    assert [sorted(row) for row in wings_of_the_page()] == [sorted(row) for row in wings_of_the_contract()]

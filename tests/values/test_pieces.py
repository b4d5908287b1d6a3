"""Budgets of pieces, which only fall, and no circles of imports."""

from __future__ import annotations

import ast
from importlib.resources import files
from pathlib import Path

SRC = Path(str(files("kvarts")))
MOST_FILES = 420
MOST_PROTOCOLS = 65


def trees() -> dict[str, ast.Module]:
    found = {}
    for path in sorted(SRC.rglob("*.py")):
        name = ".".join(("kvarts", *path.relative_to(SRC).with_suffix("").parts)).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text())
    return found


def test_files_and_protocols_do_not_become_more() -> None:
    modules = trees()
    protocols = [
        node.name
        for tree in modules.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "Protocol" in {ast.unparse(base).partition("[")[0] for base in node.bases}
    ]
    assert len(modules) <= MOST_FILES
    assert len(protocols) <= MOST_PROTOCOLS


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions, and for types only, count as well."""
    modules = trees()
    imports: dict[str, set[str]] = {name: set() for name in modules}
    for name, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in modules:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    imports[name].add(whole if whole in modules else node.module)
        imports[name].discard(name)
    while leaves := [name for name, others in imports.items() if not others & imports.keys()]:
        for name in leaves:
            del imports[name]
    while roots := [name for name in imports if not any(name in others for others in imports.values())]:
        for name in roots:
            del imports[name]
    assert not imports, f"in circles: {sorted(imports)}"

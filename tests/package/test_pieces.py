"""Budgets of pieces, which only fall, and no circles of imports."""

from __future__ import annotations

import ast
from functools import cache
from importlib.resources import files
from pathlib import Path

SRC = Path(str(files("kvarts")))
MOST_FILES = 513
# 7 more: SGLang's batches and radix cache, prompts every few steps, growing files, what a plan buys, its confidence,
# and its command lines of other servers. 6 more: SGLang's priorities, orders of a queue and settings, and its mock:
# routes, metrics, and answers that are known from the beginning. 1 more: blocks of several sizes. 3 more, for SGLang:
# host memory below its tree: the tree, the gate, and copies. 1 more: agentic load as AIPerf runs it. 1 more:
# states of drafts, in models that keep states by page. 1 more: windows in SGLang's tree, the tree and the gate; another
# file went. 3 more: states in SGLang's tree, the tree and the gate, and what windows and states share.
MOST_PROTOCOLS = 66


@cache
def pieces() -> tuple[dict[str, list[tuple[str, str]]], list[str]]:
    """Return each module's imports of names from modules, and all Protocols."""
    imports: dict[str, list[tuple[str, str]]] = {}
    protocols = []
    for path in sorted(SRC.rglob("*.py")):
        module = ".".join(("kvarts", *path.relative_to(SRC).with_suffix("").parts)).removesuffix(".__init__")
        found = imports[module] = []
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                found += [(node.module, alias.name) for alias in node.names]
            if isinstance(node, ast.ClassDef) and "Protocol" in {
                ast.unparse(base).partition("[")[0] for base in node.bases
            }:
                protocols.append(node.name)
    return imports, protocols


def test_files_and_protocols_do_not_become_more() -> None:
    modules, protocols = pieces()
    assert len(modules) <= MOST_FILES
    assert len(protocols) <= MOST_PROTOCOLS


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions, and for types only, count as well."""
    modules, _ = pieces()
    imports: dict[str, set[str]] = {name: set() for name in modules}
    for name, found in modules.items():
        for module, imported in found:
            if module in modules:
                whole = f"{module}.{imported}"
                imports[name].add(whole if whole in modules else module)
        imports[name].discard(name)
    while leaves := [name for name, others in imports.items() if not others & imports.keys()]:
        for name in leaves:
            del imports[name]
    while roots := [name for name in imports if not any(name in others for others in imports.values())]:
        for name in roots:
            del imports[name]
    assert not imports, f"in circles: {sorted(imports)}"

"""No code asks for the type of what it was handed: what a room asks of another is a Protocol."""

from __future__ import annotations

import ast
from functools import cache
from importlib.resources import files
from pathlib import Path

import pytest

SRC = Path(str(files("kvarts")))

# Classes that answer a seam: see docs/how-it-is-built.md.
COLLABORATORS = {
    "AgedOrder",
    "Auditor",
    "BaseOrder",
    "CountPool",
    "DevicePart",
    "EagerPolicy",
    "Engine",
    "EventLog",
    "FileTier",
    "IdPool",
    "JournalWriter",
    "LLM",
    "LazyPolicy",
    "LiveTimeline",
    "LruOrder",
    "MemoryTier",
    "Offloader",
    "OnePool",
    "PageCache",
    "PrefixTree",
    "PriorityPolicy",
    "RecordingExecutor",
    "Replica",
    "SafeFirst",
    "Scheduler",
    "SharedPool",
    "SimExecutor",
    "StepLog",
    "Tenant",
    "TorchExecutor",
    "TurnLoop",
    "WallClock",
}


def asked_types(tree: ast.Module) -> set[str]:
    """The names of all classes that `isinstance` and `type(...) is` are asked about."""
    asked: set[str] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
        ):
            asked |= {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Call):
            call = node.left
            if isinstance(call.func, ast.Name) and call.func.id == "type":
                asked |= {name.id for side in node.comparators for name in ast.walk(side) if isinstance(name, ast.Name)}
    return asked


@cache
def asked_and_defined() -> tuple[dict[Path, set[str]], set[str]]:
    """Return the types that each file asks for, and the classes of all files."""
    asked: dict[Path, set[str]] = {}
    defined: set[str] = set()
    for path in sorted(SRC.rglob("*.py")):
        tree = ast.parse(path.read_text())
        asked[path] = asked_types(tree)
        defined |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return asked, defined


def test_the_question_is_found() -> None:
    assert asked_types(ast.parse("if isinstance(executor, SimExecutor | Other): pass")) == {"SimExecutor", "Other"}
    assert asked_types(ast.parse("type(cache) is PageCache")) == {"PageCache"}
    assert asked_types(ast.parse("cache.take(1)")) == set()


@pytest.mark.slow
def test_no_collaborator_is_asked_for_its_type() -> None:
    asked, _ = asked_and_defined()
    found = {f"{path.relative_to(SRC)}: {name}" for path, names in asked.items() for name in names & COLLABORATORS}
    assert not found


@pytest.mark.slow
def test_every_collaborator_is_a_class_there_is() -> None:
    """Or a class that was renamed would slip through."""
    _, defined = asked_and_defined()
    assert defined >= COLLABORATORS

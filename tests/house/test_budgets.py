"""Budgets that only fall: lines and parameters of functions, members of Protocols and unimplemented ones, options."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from kvarts.cli.commands import cli

from builders.calls import commands

ROOT = Path(__file__).parents[2]
BUDGETS = tomllib.loads(Path(__file__).with_name("budgets.toml").read_text())
COMMAND_LINE = BUDGETS.pop("command_line")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def counts() -> dict[str, dict[str, int]]:
    """Return, by the name of a budget, the number of each function or class of the product; the largest of a name."""
    found: dict[str, dict[str, int]] = {name: {} for name in BUDGETS}
    for path in (ROOT / "src" / "kvarts").rglob("*.py"):
        if "proto" in path.parts:  # generated
            continue
        for budget, name, number in counted(ast.parse(path.read_text()), ""):
            found[budget][name] = max(number, found[budget].get(name, 0))
    return found


def counted(tree: ast.AST, prefix: str) -> Iterator[tuple[str, str, int]]:
    """Yield a budget, a qualified name and a number for each function and class below `tree`."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield from counted(node, prefix)
            continue
        name = prefix + node.name
        if isinstance(node, FUNCTIONS):
            assert node.end_lineno is not None
            yield "function_lines", name, node.end_lineno - node.lineno + 1
            args = node.args
            yield "parameters", name, len(args.posonlyargs + args.args + args.kwonlyargs)
        else:
            yield "not_implemented", name, ast.unparse(node).count("raise NotImplementedError")
            if any(ast.unparse(base).split("[")[0] in ("Protocol", "typing.Protocol") for base in node.bases):
                members = [each for each in node.body if isinstance(each, (*FUNCTIONS, ast.AnnAssign))]
                yield "protocol_members", name, len(members)
        yield from counted(node, name + ".")


@pytest.mark.parametrize("budget", BUDGETS)
def test_nothing_grows_beyond_its_budget(budget: str) -> None:
    limit, allowed = BUDGETS[budget]["limit"], BUDGETS[budget]["allowed"]
    over = {name: number for name, number in counts()[budget].items() if number > allowed.get(name, limit)}
    assert not over, f"{budget}: split these, which are above {limit} or above their number in budgets.toml: {over}"


@pytest.mark.parametrize("budget", BUDGETS)
def test_no_budget_is_larger_than_needed(budget: str) -> None:
    limit, allowed = BUDGETS[budget]["limit"], BUDGETS[budget]["allowed"]
    now = {name: counts()[budget].get(name, 0) for name in allowed}
    stale = {name: number for name, number in now.items() if number < allowed[name]}
    assert not stale, f"{budget}: lower these in budgets.toml; those of at most {limit} leave it: {stale}"


def test_long_functions_become_fewer() -> None:
    num = sum(number > 60 for number in counts()["function_lines"].values())
    assert num <= BUDGETS["function_lines"]["num_above_60"]


def test_options_become_fewer() -> None:
    """Keys of `--set` are no options: `-h` lists none of them."""
    num = sum(param.param_type_name == "option" for command in commands().values() for param in command.params)
    assert num == COMMAND_LINE["num_options"], "write a smaller number in budgets.toml; a larger one needs a reason"


def test_the_help_of_a_replay_fits_one_screen() -> None:
    with cli.make_context("kvarts", [], resilient_parsing=True) as context:
        replay = cli.get_command(context, "replay")
        assert replay is not None
        with click.Context(replay, info_name="replay", parent=context) as inner:
            assert len(inner.get_help().splitlines()) <= COMMAND_LINE["lines_of_replay_help"]


def test_what_is_counted() -> None:
    text = (
        "class A(Protocol):\n    x: int\n    def f(self):\n        raise NotImplementedError\n\n\ndef g():\n    pass\n"
    )
    assert sorted(counted(ast.parse(text), "")) == [
        ("function_lines", "A.f", 2),
        ("function_lines", "g", 2),
        ("not_implemented", "A", 1),
        ("parameters", "A.f", 1),
        ("parameters", "g", 0),
        ("protocol_members", "A", 2),
    ]

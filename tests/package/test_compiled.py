"""What holds of both builds, and which one is tested. `scripts/compiled_build.py` runs these on the compiled build."""

from __future__ import annotations

import ast
import ctypes
import inspect
import os
import pickle
import sys
import tomllib
import traceback
from collections.abc import Callable
from copy import copy, deepcopy
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from kvarts import ConfigError, __version__
from kvarts.base.user_code import CopiesOf
from kvarts.core.content import NOTHING
from kvarts.core.kv.eviction import BaseOrder, LruOrder, Node
from kvarts.core.kv.pool import CountPool, PageError
from kvarts.core.sched.policy import ArrivalPolicy, PriorityPolicy

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MODULES: list[str] = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["modules"]
BUILD = os.environ.get("KVARTS_BUILD", "interpreted")


def test_every_module_on_the_list_is_of_the_build_that_is_tested() -> None:
    files = {name: Path(str(import_module(name).__file__)) for name in MODULES}
    if BUILD == "compiled":
        assert {name: path for name, path in files.items() if path.suffix != ".so"} == {}
    else:
        assert {name: path for name, path in files.items() if path.suffix != ".py"} == {}


@pytest.mark.skipif(BUILD != "compiled" or sys.platform == "win32", reason="the functions of a library of mypyc")
def test_the_library_shows_only_what_python_calls() -> None:
    library = ctypes.CDLL(str(import_module("kvarts__mypyc").__file__))
    assert hasattr(library, "PyInit_kvarts__mypyc")
    assert not hasattr(library, "CPyDef_engine___Engine___step")


def test_the_list_is_in_order_and_names_each_module_once() -> None:
    assert sorted(set(MODULES)) == MODULES


def test_the_version_says_which_build_it_is(kvarts: Callable[..., tuple[int, str, str]]) -> None:
    assert kvarts("--version") == (0, f"kvarts, version {__version__} ({BUILD})\n", "")


def test_a_traceback_names_file_and_line() -> None:
    pool = CountPool(2)
    with pytest.raises(PageError) as raised:
        pool.take(3)
    frame = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert frame.filename.endswith("kvarts/core/kv/pool.py")
    assert frame.name.endswith("take")
    assert frame.lineno is not None
    lines = Path(str(files("kvarts") / "core" / "kv" / "pool.py")).read_text().splitlines()
    assert "pages asked for" in lines[frame.lineno - 1]


class OwnOrder(BaseOrder):
    def __init__(self, depth: int) -> None:
        self.depth = depth


class OwnLru(LruOrder):
    __slots__ = ("depth",)

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth


class OwnPriority(PriorityPolicy):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth


class OwnArrival(ArrivalPolicy):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth


@pytest.mark.parametrize("own", [OwnOrder, OwnLru, OwnPriority, OwnArrival])
@pytest.mark.parametrize("copied", [deepcopy, copy, lambda made: pickle.loads(pickle.dumps(made))])
def test_orders_and_policies_can_be_subclassed_and_copied(own: type[Any], copied: Callable[[Any], Any]) -> None:
    made = own(3)
    found = copied(made)
    assert type(found) is own and found is not made and found.depth == 3
    assert own is OwnOrder or list(found) == []


def test_a_copy_of_an_order_lists_no_runs() -> None:
    order = LruOrder()
    order.released([Node(NOTHING, b"", 0, 1, 0, None)])
    found = deepcopy(order)
    assert (len(list(order)), len(list(found))) == (1, 0)
    found.released([Node(NOTHING, b"", 1, 2, 0, None)])
    assert [node.start for each in (order, found) for node in each] == [0, 1]


def test_an_object_that_cannot_be_copied_is_an_error() -> None:
    made = OwnOrder(3)
    made.depth = Lock()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="an object of OwnOrder cannot be copied: cannot pickle"):
        CopiesOf(made)()


@pytest.mark.parametrize("name", MODULES)
def test_classes_have_their_docstrings(name: str) -> None:
    module = import_module(name)
    tree = ast.parse(Path(str(files("kvarts"))).joinpath(*name.split(".")[1:]).with_suffix(".py").read_text())
    classes = [each for each in tree.body if isinstance(each, ast.ClassDef)]
    found = {each.name: inspect.getdoc(getattr(module, each.name)) for each in classes}
    assert found == {each.name: ast.get_docstring(each) for each in classes}

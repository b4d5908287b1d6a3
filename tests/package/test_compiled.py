"""What holds of both builds, and which one is tested. `scripts/compiled_build.py` runs these on the compiled build."""

from __future__ import annotations

import ctypes
import os
import sys
import tomllib
import traceback
from collections.abc import Callable
from importlib import import_module
from importlib.resources import files
from pathlib import Path

import pytest

from kvarts import __version__
from kvarts.core.kv.eviction import BaseOrder, LruOrder
from kvarts.core.kv.pool import CountPool, PageError
from kvarts.core.sched.policy import PriorityPolicy

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


@pytest.mark.parametrize("base", [BaseOrder, LruOrder, PriorityPolicy])
def test_orders_and_policies_can_be_subclassed(base: type) -> None:
    class Own(base):  # type: ignore[misc]
        pass

    assert isinstance(Own(), base)

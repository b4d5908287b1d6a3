"""What `import kvarts` offers, and what it loads."""

from __future__ import annotations

import doctest
import inspect
import re
import subprocess
import sys
from importlib import import_module
from itertools import permutations
from pathlib import Path

import pytest

import kvarts

NAMES = (
    "ConfigError",
    "FleetConfig",
    "KvartsError",
    "LLM",
    "LinearCost",
    "ModelShare",
    "OffloadConfig",
    "PoolConfig",
    "ReplayConfig",
    "Report",
    "SamplingParams",
    "SharingConfig",
    "Slo",
    "StructuredOutputs",
    "Trace",
    "TraceRequest",
    "Workload",
    "calibrate",
    "load_trace",
    "mock",
    "plan",
    "replay",
    "sweep",
    "trace_info",
    "verify",
)
"""What is public."""


FACADES = ("proof.evidence", "policies", "testing")
"""Modules of further public names."""


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return done.stdout


def test_the_list_of_names() -> None:
    assert set(dir(kvarts)) == {*NAMES, "__version__"}
    assert set(kvarts.__all__) == {*NAMES} - {"LLM", "mock"}
    assert list(kvarts.__all__) == sorted(kvarts.__all__)


def test_tab_shows_the_same_names_before_and_after_they_are_loaded() -> None:
    code = (
        "import kvarts; names = dir(kvarts); kvarts.replay\n"
        "print(names == dir(kvarts), 'replay' in names, 'Any' in names)"
    )
    assert run(code) == "True True False\n"


WITHOUT_TORCH = "import sys; sys.modules.update(torch=None, transformers=None)\n"


def test_a_star_import_needs_no_extra() -> None:
    assert run(f"{WITHOUT_TORCH}from kvarts import *\nprint(replay.__name__)") == "replay\n"


def test_a_name_that_needs_an_extra_names_it() -> None:
    code = f"{WITHOUT_TORCH}import kvarts\ntry:\n    kvarts.LLM\nexcept ModuleNotFoundError as error:\n    print(error)"
    said = run(code)
    assert said.startswith("kvarts.LLM needs kvarts[torch] (") and said.endswith("pip install 'kvarts[torch]'.\n")


@pytest.mark.parametrize("name", [name for name in dir(kvarts) if name != "__version__"])
def test_each_name_resolves(name: str) -> None:
    if name == "LLM":
        pytest.importorskip("torch", reason="real models need kvarts[torch]")
    value = getattr(kvarts, name)
    assert callable(value)
    assert getattr(kvarts, name) is value


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kvarts.nothing  # type: ignore[attr-defined]


def test_the_import_loads_neither_numpy_nor_any_room() -> None:
    loaded = run("import sys, kvarts; print(*(name for name in sys.modules))").split()
    assert "numpy" not in loaded
    assert {name for name in loaded if name.startswith("kvarts")} == {"kvarts"}


def test_traffic_loads_no_engine() -> None:
    code = (
        "import sys, pkgutil, importlib, kvarts.sim.traffic as t\n"
        "for m in pkgutil.iter_modules(t.__path__): importlib.import_module(f'kvarts.sim.traffic.{m.name}')\n"
        "print(*(name for name in sys.modules if name.startswith('kvarts.')))"
    )
    rooms = {".".join(name.split(".")[1:3]) for name in run(code).split()}
    assert not rooms & {"core.engine", "core.sched", "core.executor", "core.tiers", "sim.driver", "sim.replica"}
    assert not {room.split(".")[0] for room in rooms} - {"base", "core", "sim"}


USES = (
    "from kvarts import verify",
    "from kvarts.proof.evidence import verify_file",
    "import kvarts.proof.verify",
    "import kvarts.proof.verify.verifier",
    "from kvarts.proof.verify import reader",
)


CHECK = """
import kvarts
from kvarts.proof.evidence import Verdict, verify_file
assert kvarts.verify({"timeline": []}).verdict == "violated"
from kvarts import verify
assert verify is kvarts.verify and verify("{}").verdict == "violated"
assert verify.verify_file is verify_file and verify.Verdict is Verdict
from kvarts.proof.verify import verify as same
assert same is verify
"""


@pytest.mark.long
def test_verify_is_a_room_and_a_function_in_whatever_order() -> None:
    orders = ["\n".join(order) + CHECK for order in permutations(USES, 3)]
    # A process for each, begun by copying one that has loaded what takes long.
    code = (
        "import os, msgspec, numpy\n"
        f"for order in {orders!r}:\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        exec(order)\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0, order\n"
        "print('done')"
    )
    assert run(code) == "done\n"


def test_the_public_names_are_few() -> None:
    assert len(NAMES) <= 25


def examples_of(name: str) -> list[doctest.DocTest]:
    """The examples in the docstring of a public name, or of a public module."""
    value = getattr(kvarts, name, None) or import_module(f"kvarts.{name}")
    return [
        test
        for test in doctest.DocTestFinder(recurse=False).find(value, name, globs={})
        if test.examples and inspect.getdoc(value)
    ]


@pytest.mark.parametrize("name", [*NAMES, *FACADES])
def test_each_name_has_an_example_that_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in {"LLM": ["torch", "transformers"], "calibrate": ["scipy"]}.get(name, []):
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    examples = examples_of(name)
    assert examples, f"kvarts.{name} has no example"
    for example in examples:
        result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(example)
        assert not result.failed


@pytest.mark.parametrize("name", FACADES)
def test_names_of_a_public_module_are_its_list(name: str) -> None:
    module = import_module(f"kvarts.{name}")
    assert sorted(module.__all__) == sorted(set(module.__all__))
    assert all(inspect.getdoc(getattr(module, each)) for each in module.__all__ if each != "NEVER_NS")
    assert not set(module.__all__) & set(NAMES), "a name has one home"


def test_the_citation_is_of_this_version() -> None:
    text = (Path(__file__).parents[2] / "CITATION.cff").read_text()
    fields = dict(re.findall(r'^([\w-]+): "?([^"\n]+)"?$', text, re.MULTILINE))
    assert fields["cff-version"] == "1.2.0" and fields["title"] == "kvarts"
    assert fields["version"] == kvarts.__version__ and fields["license"] == "Apache-2.0"
    assert "authors:\n  - name:" in text and "message" in fields and fields["type"] == "software"

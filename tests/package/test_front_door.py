"""What `import kvarts` offers, and what it loads."""

from __future__ import annotations

import subprocess
import sys
from itertools import permutations

import pytest

import kvarts

NAMES = (
    "AuditError",
    "Auditor",
    "Calibration",
    "ConfigError",
    "Content",
    "CountPool",
    "EngineConfig",
    "Finding",
    "HitLedger",
    "IdPool",
    "InputError",
    "Journal",
    "JournalWriter",
    "KvartsError",
    "LLM",
    "Ledger",
    "LinearCost",
    "LiveTimeline",
    "LruOrder",
    "MissingFileError",
    "ModelShare",
    "Needs",
    "OffloadConfig",
    "OutputError",
    "PageCache",
    "PageError",
    "Plan",
    "PolynomialCost",
    "PrefixTree",
    "ReplayConfig",
    "Report",
    "RooflineCost",
    "Routing",
    "SamplingParams",
    "SharedReport",
    "SharingConfig",
    "Slo",
    "StructuredOutputs",
    "Sweep",
    "TierConfig",
    "Timeline",
    "Trace",
    "TraceInfo",
    "TraceRequest",
    "Verdict",
    "Workload",
    "calibrate",
    "hit_ledger",
    "load_journal",
    "load_mooncake",
    "load_trace",
    "mock",
    "plan",
    "replay",
    "story_of_block",
    "story_of_request",
    "sweep",
    "timelines_of",
    "trace_info",
    "verify",
    "verify_file",
)
"""What is public."""


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
    "from kvarts import verify_file",
    "import kvarts.proof.verify",
    "import kvarts.proof.verify.verifier",
    "from kvarts.proof.verify import reader",
)


CHECK = """
import kvarts
assert kvarts.verify({"timeline": []}).verdict == "violated"
from kvarts import verify
assert verify is kvarts.verify and verify("{}").verdict == "violated"
assert verify.verify_file is kvarts.verify_file and verify.Verdict is kvarts.Verdict
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

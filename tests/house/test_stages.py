"""The stages of CI: all run even if one fails, those that need it do not, and the summary names what failed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / ".ci" / "stages.py"


@pytest.fixture(scope="module")
def ci() -> Any:
    spec = importlib.util.spec_from_file_location("ci_stages", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["ci_stages"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_stages_run_and_all_commands_of_a_stage(ci: Any, capfd: pytest.CaptureFixture[str]) -> None:
    stages = [
        ci.Stage("one", "", ("echo FAILED a.py::b - why; exit 3", "echo '2 failed, 7 passed in 0.10s'"), needs=()),
        ci.Stage("next", "", ("echo next to others",), needs=(), beside=True),
        ci.Stage("stops", "", ("false", "echo not printed"), needs=(), stops=True),
        ci.Stage("needs", "", ("echo not printed",), needs=("one",)),
        ci.Stage("after", "", ("echo '5 passed, 1 skipped in 1.00s (0:00:01)'",), needs=(), after=("next", "one")),
        ci.Stage("skips", "", ("echo 'SKIP: no wheel'", "echo not printed"), needs=()),
    ]
    outcomes = ci.run_stages(stages)
    printed = capfd.readouterr().out
    assert "not printed" not in printed
    assert "next to others" in printed
    assert {name for name, outcome in outcomes.items() if outcome.failed} == {"one", "stops", "needs"}
    lines = ci.summary(outcomes, 60.0).splitlines()
    assert lines[-1] == "2 failed, 12 passed, 1 skipped in all runs of pytest"
    assert lines[-2] == "1.0 minutes; stages that failed: one, stops, needs"
    assert "          ! echo FAILED a.py::b - why; exit 3 (exit code 3)" in lines
    assert "          ! FAILED a.py::b - why" in lines
    assert "          ! not run: it needs one" in lines
    assert "          ! no wheel" in lines


def test_a_command_that_takes_too_long_is_killed_and_so_is_what_one_leaves(
    ci: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ci, "LIMIT_S", 2.0)
    outcomes = ci.run_stages(
        [ci.Stage("late", "", ("sleep 60",), needs=()), ci.Stage("left", "", ("sleep 60 &",), needs=())]
    )
    assert outcomes["late"].failed == ["sleep 60 (killed after 2.0 s)"]
    assert not outcomes["left"].failed
    assert outcomes["left"].seconds < 30


def test_each_stage_needs_earlier_ones(ci: Any) -> None:
    names = [stage.name for stage in ci.STAGES]
    assert len(names) == len(set(names))
    for place, stage in enumerate(ci.STAGES):
        assert {*stage.needs, *stage.after} <= set(names[:place])


def test_the_paths_that_stages_name_exist(ci: Any) -> None:
    root = PATH.parents[1]
    words = {word for stage in ci.STAGES for command in stage.commands for word in command.split()}
    paths = [word for word in words if word.startswith(("tests/", "scripts/", "benchmarks/", "src/", ".ci/"))]
    assert paths
    assert [path for path in paths if not (root / path).exists()] == []

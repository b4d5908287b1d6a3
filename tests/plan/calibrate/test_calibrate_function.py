"""`kvarts.calibrate`, the function: files and values, what it returns, and that the command is the same."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import kvarts
from kvarts import ConfigError, ReplayConfig
from kvarts.cost.roofline import parse_cost
from kvarts.plan.calibrate import Calibration, CalibrationRun, StepFit, fitting, load_measured

LOG = Path(__file__).parent / "recorded" / "vllm-cpu-0.32-a.log"
RUN = Path(str(files("kvarts") / "data" / "vllm-rtx4090"))
ON = ("--model", "llama-3.1-8b", "--device", "rtx-4090", "--pages", "2587")
CONFIG = ReplayConfig.for_device("llama-3.1-8b", "rtx-4090", pages=2587)


@pytest.fixture
def few_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scipy", reason="needs kvarts[calibrate]")
    for name, few in {"NUM_SPREAD": 2, "ROUNDS": 1, "EVALUATIONS": 2, "POINTS": 2}.items():
        monkeypatch.setattr(fitting, name, few)


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """The first requests of the bundled run."""
    path = tmp_path / "requests.jsonl"
    path.write_text("".join((RUN / "requests.jsonl").read_text().splitlines(keepends=True)[:12]))
    return path


@pytest.mark.long
def test_a_file_a_value_and_the_command_are_fitted_alike(
    few_replays: None, first: Path, tmp_path: Path, asked: Any
) -> None:
    told: list[int] = []
    found = kvarts.calibrate(first, CONFIG, on_progress=told.append)
    assert isinstance(found, Calibration) and sum(told) == found.num_replays
    measured = load_measured(first)
    run = CalibrationRun(measured=measured, config=CONFIG, name=measured.name)
    for same in (kvarts.calibrate(measured, CONFIG), kvarts.calibrate(run), kvarts.calibrate([run])):
        assert same.to_builtins() == found.to_builtins()
    assert asked("calibrate", first, *ON, "--out", tmp_path / "cost.toml", "--json") == json.loads(
        json.dumps(found.to_builtins())
    )
    assert (tmp_path / "cost.toml").read_text() == found.to_toml()
    assert getattr(parse_cost(str(tmp_path / "cost.toml")), "link_us", None) == found.cost.link_us
    assert repr(found).startswith("<Calibration of llama-3.1-8b on rtx-4090; requests.jsonl: ")
    assert found.to_text().startswith("llama-3.1-8b on rtx-4090\n")


def test_steps_are_fitted_without_replays(asked: Any) -> None:
    pytest.importorskip("scipy", reason="needs kvarts[calibrate]")
    found = kvarts.calibrate(LOG, CONFIG)
    assert isinstance(found, StepFit) and found.num_steps > 0
    assert asked("calibrate", LOG, *ON, "--json") == json.loads(json.dumps(found.to_builtins()))
    assert f"{found.num_steps:,} steps" in repr(found) and f"{found.num_steps:,} steps" in found.to_text()


@pytest.mark.parametrize(
    ("arguments", "settings", "says"),
    [
        ([RUN / "requests.jsonl"], {}, "config: is missing: the device on which the run was measured"),
        ([RUN / "requests.jsonl", ReplayConfig()], {}, "cost: only the roofline can be fitted"),
        ([LOG, ReplayConfig()], {}, "config: model and device are missing"),
        ([LOG, CONFIG], {"fit_on": 3}, "fit_on: is for a run of requests"),
        (["dense.toml", CONFIG], {}, "config: is in dense.toml already"),
        ([[RUN / "requests.jsonl"] * 2, CONFIG], {"fit_on": 3}, "fit_on: is of one run, and there are 2"),
        ([RUN / "requests.jsonl", CONFIG], {"seed": -1}, "seed"),
    ],
)
def test_what_does_not_go_together_is_named(arguments: list[Any], settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kvarts.calibrate(*arguments, **settings)
    assert says in str(caught.value)

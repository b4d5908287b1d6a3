"""Timelines and journals of several models on several devices: a file for each model on each."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest

from kvarts.core.tiers.config import OffloadConfig
from kvarts.proof.record.timeline import timelines_of
from kvarts.proof.verify.verifier import verify_file
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.sharing.config import ModelShare, SharingConfig

from builders.case import ROUTERS

DATA = Path(str(files("kvarts") / "data"))
TRACES = {"chat": DATA / "azure-conv-1000.csv", "code": DATA / "azure-code-1000.csv"}


@pytest.fixture
def traces(tmp_path: Path) -> dict[str, Path]:
    """The first requests of each trace."""
    short = {name: tmp_path / path.name for name, path in TRACES.items()}
    for name, path in TRACES.items():
        short[name].write_text("".join(path.read_text().splitlines(keepends=True)[:300]))
    return short


@pytest.mark.long
def test_the_command_writes_a_file_for_each_model_on_each_device(
    tmp_path: Path, run_command: Callable[..., int], traces: dict[str, Path]
) -> None:
    models = ["--model", "chat=llama-3.1-8b:weight=2", "--model", "code=qwen3-8b:weight=1", "--device", "h100-80gb"]
    given = [argument for name, path in traces.items() for argument in ("--trace", f"{name}={path}")]
    run = tmp_path / "run"
    places = ["--run-dir", run, "--timeline", tmp_path / "t.json"]
    settings = ["--kv-memory", "2GiB", "--replicas", "2", "--router", ROUTERS[-1]]
    assert run_command("replay", *models, *given, *settings, *places) == 0
    for name in TRACES:
        for number in range(2):
            for path in (run / name / f"timeline-r{number}.json.gz", tmp_path / f"t-{name}-r{number}.json"):
                assert run_command("verify", path) == 0
            assert (run / name / f"events-r{number}.jsonl.gz").exists()
        assert run_command("report", run / name, "--html", tmp_path / f"{name}.html") == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_every_timeline_is_true_with_tiers(policy: str, tmp_path: Path, traces: dict[str, Path]) -> None:
    offload = OffloadConfig(host_memory="1GiB", policy=policy)  # type: ignore[arg-type]
    config = SharingConfig(
        models={"chat": ModelShare(model="llama-3.1-8b"), "code": ModelShare(model="qwen3-8b", priority=1)},
        device="h100-80gb",
        kv_memory="2GiB",
        each=ReplayConfig(replicas=3, router=ROUTERS[-1], offload=offload),
    )
    report = replay(traces, config)
    for name in TRACES:
        timelines = timelines_of(report.reports[name])
        assert len(timelines) == 3
        for number, timeline in enumerate(timelines):
            timeline.write(tmp_path / f"{name}-{number}.json")
            assert verify_file(tmp_path / f"{name}-{number}.json").verdict == "ok"

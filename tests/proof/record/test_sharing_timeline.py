"""Timelines of several models on one device."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import msgspec
import pytest

from kvarts.proof.record.timeline import timelines_of
from kvarts.proof.verify.verifier import verify_file
from kvarts.sim.replaying import replay
from kvarts.sim.sharing.config import ModelShare, SharingConfig
from kvarts.sim.traffic.formats import load_trace

DATA = Path(str(files("kvarts") / "data"))
CHAT, CODE = DATA / "azure-conv-1000.csv", DATA / "azure-code-1000.csv"


def test_each_model_has_a_timeline_of_its_own(
    tmp_path: Path, run_command: Callable[..., int], short_traces: list[str]
) -> None:
    models = ["--model", "chat=llama-3.1-8b:weight=2", "--model", "code=qwen3-8b:weight=1", "--device", "h100-80gb"]
    traces = [*short_traces, "--kv-memory", "4GiB"]
    run = tmp_path / "run"
    assert run_command("replay", *models, *traces, "--run-dir", run, "--timeline", tmp_path / "t.json") == 0
    for name in ("chat", "code"):
        for path in (run / name / "timeline.json.gz", tmp_path / f"t-{name}.json"):
            assert verify_file(path).verdict == "ok"


@pytest.mark.slow
def test_memory_that_others_have_is_withheld_in_a_timeline(tmp_path: Path) -> None:
    config = SharingConfig(
        models={"chat": ModelShare(model="llama-3.1-8b"), "code": ModelShare(model="qwen3-8b", priority=1)},
        device="h100-80gb",
        kv_memory="3GiB",
    )
    traces = {"chat": load_trace(CHAT), "code": load_trace(CODE)}
    report = replay(traces, config)
    timeline = timelines_of(report.reports["chat"])[0]
    columns = timeline.columns
    assert (columns["used_blocks"] + columns["withheld_blocks"] <= timeline.total_blocks).all()
    assert columns["withheld_blocks"].max() > 0
    asked = [ask for asks in timeline.asked.values() for ask in asks]
    across = [ask for ask in asked if ask.model == "code"]
    assert len(across) == report.summary["models"]["chat"]["num_preemptions_for_others"] > 0
    assert timeline.preemption_count == len(asked)
    timeline.write(tmp_path / "timeline.json")
    assert verify_file(tmp_path / "timeline.json").verdict == "ok"
    # Without what is withheld, no request would have had to give way.
    rows = msgspec.json.decode((tmp_path / "timeline.json").read_bytes())
    for row in rows["timeline"]:
        row.pop("withheld_blocks", None)
    (tmp_path / "tampered.json").write_bytes(msgspec.json.encode(rows))
    if len(across) < len(asked):
        assert verify_file(tmp_path / "tampered.json").verdict == "violated"

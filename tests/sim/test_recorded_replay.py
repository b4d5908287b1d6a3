"""A replay with a recorder around the cost model is the same replay."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest

from kvarts.core.event_log import EventReader
from kvarts.cost.simulated import SimExecutor
from kvarts.run.wrappers import RecordingExecutor
from kvarts.sim import replay as replays
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.replica import Replica

from builders.case import Case, Row
from builders.engines import engine_with


def crowded() -> Case:
    """Shared prefixes on a pool that is too small for all."""
    rows = [Row(7 * index, [1, 2, 3, 4, index % 3], 5, 30 + index, None, index % 2, None) for index in range(12)]
    return Case(rows, 1, 2, 45, 16, 4, "default", 1)


@pytest.mark.parametrize("step_by_step", [True, False])
def test_a_recorder_around_the_cost_model_changes_no_byte(step_by_step: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = crowded()
    config = case.config(step_by_step=step_by_step)
    plain = replay(case.trace(), config)
    file = io.BytesIO()

    def open_recorded(config: ReplayConfig, readers: list[EventReader]) -> Replica:
        executor = SimExecutor(config.cost_model)
        engine = engine_with(config, RecordingExecutor(executor, file), readers=readers)
        return Replica(engine, executor, step_by_step=config.step_by_step)

    monkeypatch.setattr(replays, "open_replica", open_recorded)
    recorded = replay(case.trace(), config)
    assert recorded.to_json() == plain.to_json()
    assert recorded.requests_jsonl() == plain.requests_jsonl()
    for name, column in plain.steps.items():
        assert column.tobytes() == recorded.steps[name].tobytes(), name
    assert plain.summary["num_preemptions"] > 0
    lines: list[dict[str, Any]] = [msgspec.json.decode(line) for line in file.getvalue().splitlines()]
    durations_ns = [line["duration_ns"] for line in lines]
    if step_by_step:
        assert len(lines) == len(plain.steps["duration_ms"])
        assert [duration / 1e6 for duration in durations_ns] == plain.steps["duration_ms"].tolist()
    else:
        assert 0 < len(lines) < len(plain.steps["duration_ms"]), "steps that are alike are not executed one by one"

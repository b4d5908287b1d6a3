"""Equality with NVIDIA Dynamo 1.6.1 with prefill and decode apart: its own answers for slices of a real trace.

`benchmarks/compare_fleet.py` runs the peer itself, on whole traces, and makes these tables. Profile `mocker`.
"""

from __future__ import annotations

import csv
import gzip
import json
from importlib.resources import files
from pathlib import Path

import pytest

from kvarts.sim.replaying import replay
from kvarts.sim.traffic.mooncake import load_mooncake

from builders.dynamo_fleet import COLUMNS, config_of, num_equal, rows_of

DATA = Path(__file__).parent / "data"
CASES = json.loads((DATA / "cases.json").read_text())
NUM_ROWS = 400


@pytest.fixture(scope="module")
def slice_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sample = files("kvarts") / "data" / "mooncake-conversation-1000.jsonl"
    path = tmp_path_factory.mktemp("trace") / "slice.jsonl"
    path.write_text("".join(sample.read_text().splitlines(keepends=True)[:NUM_ROWS]))
    return path


@pytest.mark.parametrize("name", CASES)
def test_requests_agree_with_dynamo(slice_path: Path, name: str) -> None:
    text = gzip.decompress((DATA / f"dynamo-1.6.1-{name}.csv.gz").read_bytes()).decode()
    theirs = sorted(tuple(float(row[column]) for column in COLUMNS) for row in csv.DictReader(text.splitlines()))
    report = replay(load_mooncake(slice_path), config_of(CASES[name]))
    ours = rows_of(report)
    assert len(ours) == len(theirs) == NUM_ROWS
    assert num_equal(ours, theirs) == NUM_ROWS
    seconds = json.loads((DATA / f"dynamo-1.6.1-{name}.json").read_text())
    assert {pool["role"]: pool["worker_seconds"] for pool in report.summary["fleet"]["pools"]} == pytest.approx(
        seconds, abs=1e-6
    )


def test_the_goldens_have_preemptions() -> None:
    """Small pools are what is hard to agree on."""
    preempted = 0
    for name in CASES:
        text = gzip.decompress((DATA / f"dynamo-1.6.1-{name}.csv.gz").read_bytes()).decode()
        preempted += sum(row["preemptions"] != "0" for row in csv.DictReader(text.splitlines()))
    assert preempted > 20

"""Equality with NVIDIA Dynamo 1.6.1: its own answers for slices of a real trace, kept in tests/data.

`benchmarks/compare_dynamo.py` runs the peer itself, on whole traces. Profile `mocker`; a time agrees within 1e-3 ms.
"""

from __future__ import annotations

import csv
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.report.report import Report
from kvarts.sim.traffic.mooncake import load_mooncake

DATA = Path(__file__).parent / "data"
COLUMNS = (
    "arrival_ms",
    "input_tokens",
    "output_tokens",
    "first_admitted_ms",
    "first_token_ms",
    "last_token_ms",
    "cached_tokens",
    "admissions",
)


@pytest.fixture(scope="module")
def slice_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sample = files("kvarts") / "data" / "mooncake-conversation-1000.jsonl"
    path = tmp_path_factory.mktemp("trace") / "slice.jsonl"
    path.write_text("".join(sample.read_text().splitlines(keepends=True)[:400]))
    return path


def rows_of(report: Report) -> list[tuple[float, ...]]:
    columns: Any = report.requests
    return sorted(zip(*(columns[name].tolist() for name in COLUMNS), strict=True))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("pages16384x512", {"num_pages": 16384, "page_size": 512}),
        ("pages524288x16-4workers", {"num_pages": 524288, "page_size": 16, "replicas": 4}),
        ("pages400x512", {"num_pages": 400, "page_size": 512}),
        ("pages2400x128-concurrency48", {"num_pages": 2400, "page_size": 128, "concurrency": 48}),
    ],
)
def test_requests_agree_with_dynamo(slice_path: Path, name: str, settings: dict[str, Any]) -> None:
    with (DATA / f"dynamo-1.6.1-{name}.csv").open() as file:
        theirs = sorted(tuple(float(row[column]) for column in COLUMNS) for row in csv.DictReader(file))
    ours = rows_of(replay(load_mooncake(slice_path), ReplayConfig(profile="mocker", **settings)))
    assert len(ours) == len(theirs) == 400
    for mine, peers in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(peers, abs=1e-3)


SESSIONS = json.loads((DATA / "dynamo-1.6.1-sessions.json").read_text())


@pytest.mark.parametrize("case", SESSIONS["cases"], ids=lambda case: f"{case['concurrency']}-{case['speedup']}")
def test_turns_with_times_of_their_own_wait_as_in_dynamo(tmp_path: Path, case: dict[str, Any]) -> None:
    """Dynamo takes the time between two stamps as a pause after the end of the turn before."""
    path = tmp_path / "sessions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in SESSIONS["rows"]))
    assert tuple(SESSIONS["columns"]) == COLUMNS
    config = ReplayConfig(
        profile="mocker", num_pages=4000, concurrency=case["concurrency"], speedup=case["speedup"], page_size=16
    )
    for mine, peers in zip(rows_of(replay(load_mooncake(path), config)), sorted(case["requests"]), strict=True):
        assert mine == pytest.approx(peers, abs=1e-3)


GOLDEN = [
    # settings, simulated ms, mean TTFT, p99 TTFT, mean ITL, mean E2E, reuse ratio
    ({}, 3546494.55976, 1524.78614, 5837.285, 25.11769, 10105.463, 0.272450),
    pytest.param(
        *({"replicas": 4}, 3540966.93720, 453.81011, 2438.024, 7.08130, 2872.916, 0.183101), marks=pytest.mark.slow
    ),
    pytest.param(
        *({"num_pages": 600}, 9123512.97690, 2942246.973, None, 48.33522, None, 0.066531), marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("settings", "duration", "ttft", "ttft_p99", "itl", "e2e", "reuse"), GOLDEN)
def test_the_whole_conversation_trace_gives_the_published_figures(
    conversation_trace: Path,
    settings: dict[str, Any],
    duration: float,
    ttft: float,
    ttft_p99: float | None,
    itl: float,
    e2e: float | None,
    reuse: float,
) -> None:
    config = ReplayConfig(**{"num_pages": 16384, "page_size": 512, "profile": "mocker", **settings})
    summary = replay(conversation_trace, config).summary
    assert summary["num_completed"] == 12031
    assert summary["duration_ms"] == pytest.approx(duration, abs=1e-3)
    assert summary["ttft_ms"]["mean"] == pytest.approx(ttft, abs=1e-3)
    assert summary["itl_ms"]["mean"] == pytest.approx(itl, abs=1e-4)
    assert summary["prefix_hit_ratio"] == pytest.approx(reuse, abs=1e-6)
    if ttft_p99 is not None and e2e is not None:
        assert summary["ttft_ms"]["p99"] == pytest.approx(ttft_p99, abs=1e-2)
        assert summary["e2e_ms"]["mean"] == pytest.approx(e2e, abs=1e-2)

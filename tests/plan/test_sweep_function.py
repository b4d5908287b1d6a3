"""`kvarts.sweep`, the function: what it returns, and that the command is the same."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvarts
from kvarts import ConfigError, Trace
from kvarts.base.errors import InputError
from kvarts.plan.page import render_page
from kvarts.plan.sweep import JOURNAL, Sweep

needs_pandas = pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="needs pandas")
needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")

FILE = """
trace = "trace.jsonl"
page_size = 512
slo = {ttft_ms = 1000}

[grid]
pages = [30, 60]
eviction = ["lru", "auto"]
"""
GRID = {
    "trace": Path("trace.jsonl"),
    "page_size": 512,
    "slo": {"ttft_ms": 1000},
    "grid": {"pages": [30, 60], "eviction": ["lru", "auto"]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    rows = [
        {"timestamp": 900 * place, "input_length": 5_000, "output_length": 20,
         "hash_ids": [place % 3 * 100 + block for block in range(10)]}
        for place in range(12)
    ]  # fmt: skip
    (folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sweep.toml").write_text(FILE)
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def test_a_mapping_a_file_and_the_command_replay_the_same(here: Path, tmp_path: Path, run_command: Any) -> None:
    told: list[tuple[int, int]] = []
    made = kvarts.sweep(GRID, on_done=lambda *done: told.append(done))
    assert told == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert kvarts.sweep("sweep.toml").rows == made.rows
    assert run_command("sweep", "sweep.toml", "-o", tmp_path / "out", "--workers", 1) == 0
    assert (tmp_path / "out" / "points.json").read_bytes() == made.to_json()
    assert sorted(file.name for file in here.iterdir()) == ["sweep.toml", "trace.jsonl"]


def test_a_directory_keeps_what_is_done(here: Path, tmp_path: Path) -> None:
    first = kvarts.sweep(GRID, tmp_path / "out")
    told: list[tuple[int, int]] = []
    assert kvarts.sweep(GRID, tmp_path / "out", on_done=lambda *done: told.append(done)).rows == first.rows
    assert told == [(4, 4)]
    assert (tmp_path / "out" / "points.html").read_bytes() == first.to_html()
    assert len((tmp_path / "out" / JOURNAL).read_bytes().splitlines()) == 4


def test_files_of_a_directory_that_are_not_read_change_no_point(here: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    trace = tmp_path / "runs" / "requests.jsonl"
    row = b'{"timestamp": 0, "model": "m", "messages": [{"role": "user", "content": "Hello there"}]}\n'
    trace.write_bytes(row)
    grid = {"trace": str(tmp_path / "runs"), "output_tokens": 2, "grid": {"pages": [100]}}
    told: list[tuple[int, int]] = []
    for data in (b"", b"notes"):
        (tmp_path / "runs" / "notes.bin").write_bytes(data)
        kvarts.sweep(grid, tmp_path / "out", on_done=lambda *done: told.append(done))
    trace.write_bytes(row * 2)
    kvarts.sweep(grid, tmp_path / "out", on_done=lambda *done: told.append(done))
    assert told == [(0, 1), (1, 1), (1, 1), (0, 1), (1, 1)]


@pytest.fixture(scope="module")
def sweep(folder: Path) -> Sweep:
    return kvarts.sweep({**GRID, "trace": str(folder / "trace.jsonl")})


def test_a_sweep_says_what_it_is(sweep: Sweep) -> None:
    assert repr(sweep) == f"<Sweep grid: 4 points over eviction, pages; {len(sweep.front)} on a front>"
    assert sweep.front and all(row in sweep.rows for row in sweep.front)
    assert sweep.to_text().startswith("4 points; those of each load that no other beats")
    assert sweep.to_text().count("eviction=") == len(sweep.front) == sweep._repr_html_().count("eviction=")
    assert json.loads(sweep.to_json()) == sweep.rows
    assert all(row["command"].startswith("kvarts replay ") for row in sweep.rows)


@needs_pandas
def test_a_sweep_is_a_table(sweep: Sweep) -> None:
    assert sweep.to_pandas()["hit_ratio"].tolist() == [row["hit_ratio"] for row in sweep.rows]


@needs_matplotlib
def test_a_sweep_is_a_figure_and_a_page(sweep: Sweep) -> None:
    assert len(sweep.plot().axes) == 3
    assert sweep.to_html() == render_page(sweep._drawn)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({**GRID, "trace": Trace([])}, "Trace is not a value that a file can hold. Name a trace by its path"),
        ({**GRID, "grid": {}}, "has no points"),
        ({**GRID, "grid": {"pages": 3}}, "must be a list"),
        ({**GRID, "grid": {"pagse": [3]}}, "unknown key"),
        ({**GRID, "grid": {"pages": [0]}}, "This is the point pages = 0"),
        ({"grid": {"pages": [30]}}, "trace: is missing"),
        ({**GRID, "models": {"a": {}}}, "a sweep replays one"),
        ({**GRID, "grid": {"eviction": ["none-such"]}}, "is not a policy"),
    ],
)
def test_what_cannot_be_swept_is_named(values: dict[str, Any], says: str, here: Path) -> None:
    with pytest.raises((ConfigError, InputError)) as caught:
        kvarts.sweep(values)
    assert says in str(caught.value)


def test_the_text_of_the_slo_stands_beside_the_points(
    sweep: Sweep, tmp_path: Path, browser: Callable[[bool], Any]
) -> None:
    points = [(1, 1_100), (2, 900), (9, 1_008)]  # the last one where the text stands else
    rows = [
        {**row, "kv_tokens": 1_000_000 * x, "ttft_ms_p99": ms, "same_as": None}
        for row, (x, ms) in zip(sweep.rows, points, strict=False)
    ]
    (tmp_path / "sweep.html").write_bytes(Sweep("grid", rows, sweep.keys, {"ttft_ms": 1_000}, "").to_html())
    driver = browser(False)
    driver.get((tmp_path / "sweep.html").as_uri())
    assert driver.get_log("browser") == []
    text = next(each.rect for each in driver.find_elements("css selector", ".scatter text") if "SLO" in each.text)
    chart = driver.find_elements("css selector", ".scatter svg")[0]
    for dot in (each.rect for each in chart.find_elements("css selector", "circle")):
        is_beside = dot["x"] > text["x"] + text["width"] or dot["x"] + dot["width"] < text["x"]
        assert is_beside or dot["y"] > text["y"] + text["height"] or dot["y"] + dot["height"] < text["y"]


@pytest.mark.slow
def test_a_sample_that_is_a_directory_is_swept_as_others(tmp_path: Path) -> None:
    grid = {"trace": "sample:agents", "grid": {"pages": [20_000]}}
    (row,) = kvarts.sweep(grid, tmp_path / "out").rows
    assert row["hit_ratio"] > 0.5
    assert kvarts.sweep(grid, tmp_path / "out").rows == [row], "it resumes from its journal"

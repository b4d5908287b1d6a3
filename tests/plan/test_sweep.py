"""A sweep gives the same table on any number of processes, however often it was killed, and runs no point twice."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.errors import InputError
from kvarts.base.files import own_directory
from kvarts.plan.grid import fronts, load_of, pareto, points_of, run_sweep
from kvarts.plan.series import distinct_points

from builders.browser import as_phone, commands, scrolls_sideways

SAMPLE = Path(str(files("kvarts") / "data" / "mooncake-conversation-1000.jsonl"))
CONFIG = """
trace = "trace.jsonl"
page_size = 512
cost = "linear:step_ms=5,chunk_token_ms=0.02,decode_ms=0.1,context_token_ms=0"

[grid]
pages = [400, 800, 1600]
speedup = [1.0, 4.0]

[[points]]
pages = 3200
slo.ttft_ms = 1000
"""


WORKLOAD = """
pages = 500

[workload]
num_sessions = 3
new_tokens = {kind = "fixed", tokens = 20}
output_tokens = {kind = "fixed", tokens = 3}

[grid]
speedup = [1.0, 2.0]
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "trace.jsonl").write_text("".join(SAMPLE.read_text().splitlines(keepends=True)[:150]))
    path = tmp_path / "sweep.toml"
    path.write_text(CONFIG)
    return path


def tables(directory: Path) -> tuple[bytes, bytes]:
    parquet = directory / "points.parquet"
    return (directory / "points.json").read_bytes(), parquet.read_bytes() if parquet.exists() else b""


def test_one_row_a_point_and_the_same_bytes_on_any_number_of_workers(
    config: Path, tmp_path: Path, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("sweep", config, "-o", tmp_path / "one", "--workers", 1) == 0
    assert "7 points" in capsys.readouterr().out
    assert run_command("sweep", config, "-o", tmp_path / "two", "--workers", 2) == 0
    assert tables(tmp_path / "one") == tables(tmp_path / "two")
    rows = json.loads((tmp_path / "one" / "points.json").read_bytes())
    assert [(row["pages"], row.get("speedup")) for row in rows] == [
        (400, 1.0), (400, 4.0), (800, 1.0), (800, 4.0), (1600, 1.0), (1600, 4.0), (3200, None),
    ]  # fmt: skip
    assert rows[-1]["slo_ratio"] is not None
    assert any(row["pareto"] for row in rows)


def test_no_point_runs_twice(tmp_path: Path) -> None:
    ran: list[int] = []

    def run(point: dict[str, Any]) -> dict[str, Any]:
        ran.append(point["x"])
        return {"y": point["x"] ** 2}

    points = [{"x": x} for x in (3, 1, 2, 3)]
    journal = tmp_path / "journal.jsonl"
    assert run_sweep(points[:2], run, journal, workers=1) == [{"y": 9}, {"y": 1}]
    assert run_sweep(points, run, journal, workers=1) == [{"y": 9}, {"y": 1}, {"y": 4}, {"y": 9}]
    assert ran == [3, 1, 2]


def test_a_directory_is_of_one_sweep_at_a_time(
    config: Path, tmp_path: Path, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    with own_directory(tmp_path / "out"):
        assert run_command("sweep", config, "-o", tmp_path / "out", "--workers", "1") == 7
    assert "is being written by another process" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def test_another_trace_of_the_same_name_is_another_point(
    config: Path, tmp_path: Path, run_command: Callable[..., int]
) -> None:
    assert run_command("sweep", config, "-o", tmp_path / "out", "--workers", 1) == 0
    before = tables(tmp_path / "out")
    trace = config.parent / "trace.jsonl"
    trace.write_text("".join(trace.read_text().splitlines(keepends=True)[:100]))
    assert run_command("sweep", config, "-o", tmp_path / "out", "--workers", 1) == 0
    assert tables(tmp_path / "out") != before


def test_the_page_has_every_point_and_its_command(
    config: Path,
    tmp_path: Path,
    asked: Callable[..., Any],
    run_command: Callable[..., int],
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    assert run_command("sweep", config, "-o", tmp_path / "out", "--workers", 1) == 0
    capsysbinary.readouterr()
    page = (tmp_path / "out" / "points.html").read_bytes()
    rows = json.loads((tmp_path / "out" / "points.json").read_bytes())
    assert b"http://" not in page.replace(b"http://www.w3.org", b"")
    for row in rows:
        assert row["command"].encode() in page
    words = shlex.split(rows[-1]["command"])
    assert words[:2] == ["kvarts", "replay"]
    summary = asked(*words[1:], "--json")
    assert summary["ttft_ms"]["p99"] == rows[-1]["ttft_ms_p99"]
    assert summary["goodput"]["ratio"] == rows[-1]["slo_ratio"]


def test_a_point_without_a_command_of_its_own_has_that_of_the_sweep(
    tmp_path: Path, run_command: Callable[..., int]
) -> None:
    config = tmp_path / "sweep.toml"
    config.write_text(WORKLOAD)
    out = tmp_path / "out"
    assert run_command("sweep", config, "-o", out, "--workers", 1) == 0
    assert all(row["command"] is None for row in json.loads((out / "points.json").read_bytes()))
    assert f"kvarts sweep {config} -o {out}".encode() in (out / "points.html").read_bytes()


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
def test_pictures_have_the_same_bytes_each_time(config: Path, tmp_path: Path, run_command: Callable[..., int]) -> None:
    found = []
    for _ in range(2):
        assert run_command("sweep", config, "-o", tmp_path / "out", "--workers", 1, "--plot") == 0
        found.append([(tmp_path / "out" / f"points.{form}").read_bytes() for form in ("png", "svg")])
    assert found[0] == found[1]
    assert found[0][0].startswith(b"\x89PNG") and b"<svg" in found[0][1]


def test_the_page_in_a_browser(
    config: Path, tmp_path: Path, browser: Callable[[bool], Any], run_command: Callable[..., int]
) -> None:
    assert run_command("sweep", config, "-o", tmp_path / "out", "--workers", 1) == 0
    driver = browser(True)
    as_phone(driver)
    driver.get((tmp_path / "out" / "points.html").as_uri())
    assert driver.get_log("browser") == []
    assert driver.title == "Sweep of sweep.toml · kvarts"
    assert not scrolls_sideways(driver)
    rows = json.loads((tmp_path / "out" / "points.json").read_text())
    places = [
        len({(row[x], row[y]) for row in rows})
        for x, y in (
            ("kv_tokens", "ttft_ms_p99"),
            ("ttft_ms_p99", "request_throughput_per_s"),
            ("kv_tokens", "hit_ratio"),
        )
    ]
    dots = driver.find_elements("css selector", "circle")
    assert len(dots) == sum(places) < 3 * len(rows)
    # A click brings up the command of every point at its place; a row of the table that of its own.
    for dot in dots:
        driver.execute_script("arguments[0].dispatchEvent(new Event('click'))", dot)
    shown = commands(driver)
    assert all(command.startswith("kvarts replay") for command in shown)
    assert len(shown) >= 3
    table = driver.find_elements("css selector", "#points tbody tr")
    assert len(table) == len(rows)
    heads = [cell.text for cell in driver.find_elements("css selector", "#points thead th")]
    assert len(heads) == len(table[0].find_elements("css selector", "td"))
    of_first = dict(zip(heads, [cell.text for cell in table[0].find_elements("css selector", "td")], strict=True))
    assert of_first["KV tokens"] == f"{rows[0]['kv_tokens']:,}"
    assert of_first["hits"] == f"{100 * rows[0]['hit_ratio']:.1f} %"
    driver.execute_script("arguments[0].click()", table[-1])
    assert table[-1].get_attribute("class") == "picks picked"
    assert len(commands(driver)) == len(shown) + 1
    # Colours are those of the setting that is chosen.
    fills = {dot.get_attribute("stroke") for dot in driver.find_elements("css selector", "circle")}
    assert len(fills) > 1
    driver.execute_script(
        "const s = document.querySelector('select'); s.value = 'pages'; s.dispatchEvent(new Event('change'))"
    )
    assert {dot.get_attribute("stroke") for dot in driver.find_elements("css selector", "circle")} != fills


def test_points_that_measure_the_same_are_one() -> None:
    rows: list[dict[str, Any]] = [
        {"eviction": "lru", "pages": 1, "same_as": None, "pareto": True},
        {"eviction": "lru", "pages": 2, "same_as": None, "pareto": False},
        {"eviction": "auto", "pages": 1, "same_as": 0, "pareto": False},
        {"eviction": "auto", "pages": 2, "same_as": 1, "pareto": False},
    ]
    points = distinct_points(rows, ["eviction", "pages"])
    assert [(point["settings"], point["pareto"]) for point in points] == [
        ({"eviction": ["lru", "auto"], "pages": ["1"]}, True),
        ({"eviction": ["lru", "auto"], "pages": ["2"]}, False),
    ]
    # Of two settings that both differ, no combination is named that was not replayed.
    apart = [rows[0], {**rows[3], "same_as": 0}]
    assert [(point["settings"], point["pareto"]) for point in distinct_points(apart, ["eviction", "pages"])] == [
        ({"eviction": ["lru"], "pages": ["1"]}, True),
        ({"eviction": ["auto"], "pages": ["2"]}, True),
    ]


def test_a_front_has_what_no_other_row_beats() -> None:
    rows: list[dict[str, Any]] = [
        {"a": 1, "b": 5},
        {"a": 2, "b": 5},
        {"a": 2, "b": 9},
        {"a": 3, "b": 1},
        {"a": None, "b": 99},
        {"a": 1, "b": 5},
    ]
    assert pareto(rows, ["a"], ["b"]) == [True, False, True, False, False, True]
    assert pareto(rows, ["a", "b"]) == [True, False, False, True, False, True]


@pytest.mark.parametrize(
    ("values", "field"), [({}, None), ({"grid": {"pages": []}}, "grid.pages"), ({"grid": {"pages": 3}}, "grid.pages"),
                          ({"grid": 3}, None), ({"points": [3]}, None)]
)  # fmt: skip
def test_what_is_no_grid_is_named(values: dict[str, Any], field: str | None) -> None:
    with pytest.raises(InputError) as caught:
        points_of(values, Path("sweep.toml"))
    assert caught.value.field == field


def test_a_point_that_cannot_run_is_named_before_any_runs(
    config: Path, tmp_path: Path, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(CONFIG.replace("1600", "0"))
    assert run_command("sweep", config, "-o", tmp_path / "out") == 2
    assert "pages = 0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run_command("sweep", tmp_path / "nowhere.toml", "-o", tmp_path / "out") == 3


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12))
def test_each_load_has_a_front_of_its_own_and_equal_points_stand_on_it_once(
    points: list[tuple[int, int, int]],
) -> None:
    changes = [{"speedup": load, "name": place} for place, (load, _, _) in enumerate(points)]
    rows = [{**changed, "kv": kv, "ttft": ttft} for changed, (_, kv, ttft) in zip(changes, points, strict=True)]
    found = fronts(rows, changes, ("kv", "ttft"))
    for place, (load, kv, ttft) in enumerate(points):
        others = [other for other in points if other[0] == load]
        is_beaten = any(o[1:] != (kv, ttft) and o[1] <= kv and o[2] <= ttft for o in others)
        first = points.index((load, kv, ttft))
        assert found[place]["same_as"] == (None if first == place else first)
        assert found[place]["pareto"] == (not is_beaten and first == place)


def test_what_arrives_and_when_is_the_load() -> None:
    changed = ("speedup", "concurrency", "workload.num_sessions", "trace", "num_pages", "eviction")
    assert load_of(changed) == ["speedup", "concurrency", "workload.num_sessions", "trace"]

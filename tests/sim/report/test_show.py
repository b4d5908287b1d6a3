"""The command `report`, and the page: in a real browser where there is one."""

from __future__ import annotations

import json
import re
import shutil
import time
import zlib
from base64 import b64decode
from collections.abc import Callable
from importlib.resources import files
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvarts import ReplayConfig, Report, Slo, Trace, replay
from kvarts.sim.report.run_directory import RunDirectory
from kvarts.sim.report.run_page import SPARKS, ShownOverview, ShownTokens, ShownWait, page_data, render_html, sparkline
from kvarts.sim.traffic.mooncake import load_mooncake

from builders.browser import as_phone, inks, ready, scrolls_sideways
from builders.run_directory import timeline_rows, write_run_directory, write_timeline

Kvarts = Callable[..., tuple[int, str, str]]
TRACE = str(files("kvarts") / "data" / "mooncake-conversation-1000.jsonl")


TOLD = ShownOverview(
    100,
    [
        ShownTokens("device_hit", 60),
        ShownTokens("never_seen", 30),
        ShownTokens("evicted", 10, "gone for 1.0 s (median), 2.0 s (p90)"),
    ],
    [ShownWait("7", 283_234.5, "too few free KV pages", 12, ["step 1  arrived", "step 3  admitted after 1.2 s"])],
    [(1000.0 * (index + 1), index % 3) for index in range(50)],
    ["the journal breaks off"],
)


@pytest.fixture(scope="module")
def report() -> Report:
    """The sample on a small pool."""
    sample = files("kvarts") / "data" / "mooncake-conversation-1000.jsonl"
    return replay(load_mooncake(Path(str(sample))), ReplayConfig(num_pages=700, page_size=512, slo=Slo(ttft_ms=500.0)))


@pytest.fixture(scope="module")
def run_dir(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run_directory(tmp_path_factory.mktemp("runs") / "run", report)


# Commands -------------------------------------------------------------------------------------------------


def test_the_text_has_a_line_for_each_replica(kvarts: Kvarts, report: Report, run_dir: Path, tmp_path: Path) -> None:
    code, out, _ = kvarts("report", run_dir)
    assert code == 0 and "KV use  " in out and "prefix hits" in out
    code, out, _ = kvarts("report", write_run_directory(tmp_path / "run", report, replicas=2))
    assert code == 0 and "KV use r0" in out and "KV use r1" in out


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (("report", "nowhere"), 3, "no such directory"),
        (("report", "."), 3, "report.json: no such file"),
    ],
)
def test_mistakes_are_named(
    kvarts: Kvarts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    actual, out, err = kvarts(*arguments)
    assert (actual, out) == (code, "")
    assert what in err and "Traceback" not in err
    assert not list(tmp_path.iterdir())


# Sparkline ------------------------------------------------------------------------------------------------


def test_a_sparkline_shows_the_highest_of_each_stretch() -> None:
    times = np.array([0.0, 1.0, 2.0, 7.0, 8.0])
    assert sparkline(times, np.array([0.0, 1.0, 0.5, 0.25, 0.0]), 4) == "█▅▅▃"
    assert sparkline(times[:1], np.array([1.0]), 3) == "███"
    assert sparkline(times[:0], times[:0], 3) == ""
    assert len(SPARKS) == 8


# The page -------------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_else_and_is_the_same_every_time(run_dir: Path) -> None:
    page = render_html(RunDirectory(run_dir))
    assert page == render_html(RunDirectory(run_dir))
    text = page.decode()
    assert not re.search(r"""(?:src|href)\s*=|@import|url\(""", text)
    assert "/*{" not in text


def test_names_are_data_not_markup(run_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    report = json.loads((copy / "report.json").read_text())
    report["trace"] = "</script><script>alert(1)</script>"
    (copy / "report.json").write_text(json.dumps(report))
    assert b"<script>alert" not in render_html(RunDirectory(copy))


def test_a_run_without_a_journal_says_so(run_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    for name in ("requests.jsonl", "distributions.json"):
        (copy / name).unlink()
    assert b"the run has no journal of events" in render_html(RunDirectory(copy))
    (copy / "events.jsonl").write_text("")
    assert b"the journal of events was not read" in render_html(RunDirectory(copy))


@pytest.mark.parametrize(
    "dark", [pytest.param(False, id="light"), pytest.param(True, id="dark", marks=pytest.mark.long)]
)
def test_the_page_in_a_browser(run_dir: Path, tmp_path: Path, browser: Callable[[bool], Any], dark: bool) -> None:
    page = tmp_path / "report.html"
    page.write_bytes(render_html(RunDirectory(run_dir), {run_dir: TOLD}))
    driver = browser(dark)
    ready(driver, page)
    assert driver.get_log("browser") == []
    assert driver.title == "Replay of mooncake-conversation-1000.jsonl · kvarts"
    ground = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(20, 23, 26)" if dark else "rgb(255, 255, 255)")
    text = driver.find_element("tag name", "body").text
    for said in (
        "KV pages in use",
        "Running and waiting",
        *("TTFT: share", "ITL: share", "TPOT: share", "E2E: share", "queue time: share"),
        *(
            "Prefix hits of requests admitted",
            "KV pages evicted",
            "throughput",
            "goodput",
            "limited by",
            "Configuration",
        ),
        *("within the SLO of 500 ms", "never seen before", "steps that preempted", "Note: the journal breaks off."),
        "request 7: waited 4 min 43 s for too few free KV pages; 12 more waited with it for the same",
        "command kvarts replay 'a trace' --pages 700",
    ):
        assert said in text
    charts = driver.find_elements("css selector", ".uplot canvas")
    assert len(charts) == 9
    # Legends say something before the mouse is there, and no label of an axis is cut off or stands alone.
    values = [cell.text for cell in driver.find_elements("css selector", ".u-value")]
    assert len(values) == 3 + 3 + 2 * 7 and all(value and "-" not in value for value in values), values
    driver.find_element("css selector", ".facts summary").click()
    assert "max_seqs" in driver.find_element("css selector", ".facts details").text
    assert inks(driver, ".uplot canvas") >= 3
    for chart in driver.find_elements("css selector", ".chart"):
        assert chart.size["width"] <= 1180
    assert "KV blocks" not in text  # one word for them on one page
    assert not scrolls_sideways(driver)
    # A story opens with a click.
    wait = driver.find_element("css selector", ".waits details")
    assert not wait.find_element("tag name", "pre").is_displayed()
    wait.find_element("tag name", "summary").click()
    assert "admitted after" in wait.find_element("tag name", "pre").text
    as_phone(driver)
    assert not scrolls_sideways(driver)


def test_a_page_of_a_run_in_which_everything_fits_has_no_empty_charts(
    tmp_path: Path, browser: Callable[[bool], Any]
) -> None:
    trace = load_mooncake(Path(TRACE))
    assert trace.requests is not None
    few = Trace(trace.requests[:5], unit_tokens=trace.unit_tokens, name="few")
    run_dir = write_run_directory(tmp_path / "run", replay(few, ReplayConfig(num_pages=20_000)))
    told = ShownOverview(
        100,
        [ShownTokens("never_seen", 100), ShownTokens("evicted", 0)],
        [ShownWait("0", 0.0, "nothing", 0, [])],
        [(9.0, 0)],
        [],
    )
    page = tmp_path / "report.html"
    page.write_bytes(render_html(RunDirectory(run_dir), {run_dir: told}))
    driver = browser(False)
    ready(driver, page)
    text = driver.find_element("tag name", "body").text
    for said in (
        "Nothing was evicted: everything fits.",
        "Everything fits: all that is ever used",
        "No request waited",
    ):
        assert said in text
    assert "seen, but evicted" not in text


def decoded(column: str) -> list[float]:
    """A column, as the page reads it."""
    values: list[float] = np.cumsum(np.frombuffer(zlib.decompress(b64decode(column)), "<f8")).tolist()
    return values


def test_a_page_has_every_change_of_a_run_and_no_other_row(report: Report, run_dir: Path) -> None:
    (part,) = page_data(RunDirectory(run_dir), {})["parts"]
    (replica,) = part["replicas"]
    rows = timeline_rows(report)
    names = {"used": "used_blocks", "cached": "cached_blocks", "running": "active_seqs", "waiting": "waiting"}
    shown = {name: decoded(replica[name]) for name in names}
    times_us = decoded(replica["t_us"])
    at = -1
    for row in rows:  # the value of the last row that is shown holds until the next one
        if at + 1 < len(times_us) and round(row["t_ms"] * 1e3) >= times_us[at + 1]:
            at += 1
        assert {name: shown[name][at] for name in names} == {name: row[field] for name, field in names.items()}
    assert at == len(times_us) - 1 < len(rows) - 1
    assert [times_us[int(index)] for index in decoded(replica["preempting"])] == [
        round(row["t_ms"] * 1e3) for row in rows if row["preempted_seqs"]
    ]
    assert replica["left_out"] == 0


@pytest.mark.parametrize(
    ("num_rows", "most_rows"), [(30_000, 20_000), pytest.param(300_000, 200_000, marks=pytest.mark.long)]
)
def test_a_run_with_millions_of_changes_keeps_its_highs(
    report: Report, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_rows: int, most_rows: int
) -> None:
    monkeypatch.setattr("kvarts.sim.report.run_page.MOST_ROWS", most_rows)
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    rng = np.random.default_rng(0)
    used, waiting = rng.integers(0, 700, num_rows), rng.integers(0, 90, num_rows)
    row = timeline_rows(report)[0]
    rows = [
        {**row, "step": step, "t_ms": step * 25.0 + 1e6, "used_blocks": a, "free_blocks": 700 - a, "waiting": b}
        for step, (a, b) in enumerate(zip(used.tolist(), waiting.tolist(), strict=True))
    ]
    write_timeline(copy / "timeline.jsonl", report, rows)
    (part,) = page_data(RunDirectory(copy), {})["parts"]
    (replica,) = part["replicas"]
    shown = decoded(replica["used"])
    assert len(shown) <= most_rows and len(shown) + replica["left_out"] <= num_rows
    assert max(shown) == used.max() and max(decoded(replica["waiting"])) == waiting.max()
    assert decoded(replica["t_us"])[-1] == rows[-1]["t_ms"] * 1e3
    assert len(render_html(RunDirectory(copy))) < 2_000_000


@pytest.mark.long
def test_two_hundred_thousand_steps_stay_usable(
    report: Report, run_dir: Path, tmp_path: Path, browser: Callable[[bool], Any]
) -> None:
    """Opens, zooms on a drag and back out, at once."""
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    rows = timeline_rows(report)
    long = ({**row, "step": step, "t_ms": step * 25.0} for step, row in zip(range(200_000), cycle(rows), strict=False))
    write_timeline(copy / "timeline.jsonl", report, list(long))
    page = tmp_path / "report.html"
    page.write_bytes(render_html(RunDirectory(copy)))
    driver = browser(False)
    assert ready(driver, page) < 20
    from selenium.webdriver import ActionChains

    def first_label() -> str:
        """The scale of the first chart, as drawn."""
        shot: str = driver.find_element("css selector", ".uplot").screenshot_as_base64
        return shot

    over = driver.find_element("css selector", ".u-over")
    whole = first_label()
    start = time.monotonic()
    ActionChains(driver).move_to_element_with_offset(over, -200, 0).click_and_hold().move_by_offset(
        100, 0
    ).release().perform()
    assert first_label() != whole
    ActionChains(driver).double_click(over).perform()
    assert time.monotonic() - start < 10
    assert driver.get_log("browser") == []

"""Run directories, the commands around timelines, and the page: in a real browser where there is one."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvarts import ReplayConfig, load_mooncake, replay
from kvarts.audit.auditor import AuditError, Finding
from kvarts.calibrate import compare, load_measured, load_series
from kvarts.calibrate.page import render_page
from kvarts.calibrate.replayed import replayed_of
from kvarts.cli.main import main
from kvarts.errors import ConfigError
from kvarts.executor.cost import parse_cost
from kvarts.record.timeline import Timeline
from kvarts.report.render import SPARKS, render_html, sparkline
from kvarts.report.rundir import RunDir
from kvarts.units import parse_bytes
from kvarts.verify.verifier import verify_file

Kvarts = Callable[..., tuple[int, str, str]]
TRACE = str(files("kvarts") / "data" / "mooncake-conversation-1000.jsonl")


@pytest.fixture
def kvarts(capsysbinary: pytest.CaptureFixture[bytes], run_command: Callable[..., int]) -> Kvarts:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = run_command(*arguments)
        captured = capsysbinary.readouterr()
        return code, captured.out.decode(), captured.err.decode()

    return run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mooncake's first 1,000 requests on a small pool, by the command itself."""
    path = tmp_path_factory.mktemp("runs") / "run"
    before = sys.argv
    sys.argv = ["kvarts", "replay", TRACE, "--pages", "700", "--page-size", "512", "--run-dir", str(path)]
    try:
        assert main() == 0
    finally:
        sys.argv = before
    return path


# Commands -------------------------------------------------------------------------------------------------


def test_a_run_directory_holds_everything(run_dir: Path) -> None:
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "distributions.json",
        "events.jsonl.gz",
        "report.json",
        "requests.jsonl",
        "timeline.json.gz",
    ]
    report = json.loads((run_dir / "report.json").read_text())
    verdict = verify_file(run_dir / "timeline.json.gz")
    assert verdict.verdict == "ok"
    assert verdict.num_rows >= report["num_steps"]
    histogram = json.loads((run_dir / "distributions.json").read_text())["itl_ms"]
    made = sum(json.loads(line)["output_tokens"] - 1 for line in (run_dir / "requests.jsonl").read_text().splitlines())
    assert sum(histogram["counts"]) == made
    assert histogram["upper_ms"] == sorted(histogram["upper_ms"])


def test_a_run_directory_is_never_two_runs(kvarts: Kvarts, run_dir: Path) -> None:
    before = {path: path.read_bytes() for path in run_dir.iterdir()}
    code, _, err = kvarts("replay", TRACE, "--run-dir", run_dir)
    assert code == 7 and "is not empty" in err
    assert {path: path.read_bytes() for path in run_dir.iterdir()} == before


def test_each_replica_has_files_of_its_own(kvarts: Kvarts, tmp_path: Path) -> None:
    files = ("--timeline", tmp_path / "t.jsonl.gz", "--events", tmp_path / "e.jsonl", "--timeline-every", 100)
    code, _, _ = kvarts("replay", TRACE, "--replicas", 2, "--run-dir", tmp_path / "run", *files)
    assert code == 0
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_file())
    assert names == ["e-r0.jsonl", "e-r1.jsonl", "t-r0.jsonl.gz", "t-r1.jsonl.gz"]
    code, out, _ = kvarts("verify", tmp_path / "t-r0.jsonl.gz", tmp_path / "run" / "timeline-r1.json.gz")
    assert code == 0 and out.count(": ok, ") == 2
    code, out, _ = kvarts("story", tmp_path / "run", "--request", "3")
    assert code == 0 and out.startswith("events-r1.jsonl.gz:\n") and "finished" in out
    code, out, _ = kvarts("story", tmp_path / "run", "--hits")
    assert code == 0 and out.count("device hit") == 2
    code, out, _ = kvarts("report", tmp_path / "run")
    assert code == 0 and "KV use r0" in out and "KV use r1" in out
    code, _, err = kvarts("story", tmp_path / "run", "--request", "no one")
    assert code == 4 and "no request 'no one'" in err


def test_text_json_and_exit_code_agree(kvarts: Kvarts, run_dir: Path, tmp_path: Path) -> None:
    timeline = json.loads(msgspec.json.encode(replay_timeline()))
    broken = {**timeline, "peak_used_pct": 0.5}
    empty = {**timeline, "timeline": [], "peak_used_pct": 0, "preemption_count": 0}
    for name, body in (("ok", timeline), ("violated", broken), ("inconclusive", empty)):
        (tmp_path / f"{name}.json").write_text(json.dumps(body))
    (tmp_path / "unreadable.json").write_text("{")
    codes = {"ok": 0, "violated": 5, "inconclusive": 6, "unreadable": 4, "missing": 3}
    for name, expected in codes.items():
        path = tmp_path / f"{name}.json"
        code, out, err = kvarts("verify", path)
        assert code == expected
        as_json_code, as_json, _ = kvarts("verify", path, "--json")
        assert as_json_code == expected
        answer = json.loads(as_json)
        if expected in (3, 4):
            assert (out, answer["verdict"]) == ("", None) and name in err and name in answer["error"]
        else:
            assert out.startswith(f"{path}: {name}") and answer["verdict"] == name
            assert {rule["rule"] for rule in answer["rules"]} >= {"schema", "flux", "leak", "preemption_needed"}
    for together, expected in (
        (("ok", "inconclusive"), 6),
        (("inconclusive", "unreadable"), 4),
        (("missing", "violated", "ok"), 5),
    ):
        assert kvarts("verify", *(tmp_path / f"{name}.json" for name in together))[0] == expected


def replay_timeline() -> Any:
    sample = Path(__file__).parents[2] / "src" / "kvarts" / "data" / "mooncake-conversation-1000.jsonl"
    return json.loads(replay(load_mooncake(sample), ReplayConfig(page_size=512)).timelines[0].thinned(50).to_json())


@pytest.mark.parametrize("threshold", ["nan", "1.5", "-1", "x"])
def test_a_bad_threshold_is_bad_usage(kvarts: Kvarts, run_dir: Path, threshold: str) -> None:
    code, out, err = kvarts("verify", run_dir / "timeline.json.gz", "--preempt-threshold", threshold)
    assert (code, out) == (2, "") and "threshold" in err


def test_boundedness_can_be_asked_for(kvarts: Kvarts, run_dir: Path) -> None:
    path = run_dir / "timeline.json.gz"
    code, out, _ = kvarts("verify", path, "--max-bytes", "1MiB", "--block-bytes", "64KiB")
    assert code == 5 and "blocks are" in out and "more than 1048576" in out
    assert kvarts("verify", path, "--max-bytes", "1GiB")[0] == 6


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4096", 4096), ("64GiB", 64 << 30), ("50GB", 50_000_000_000), ("1.5 MiB", 3 << 19), ("2k", 2000), ("1Ki", 1024)],
)
def test_sizes_in_bytes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1iB", "1XB", "1 2"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no size in bytes"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (("story", "nowhere.jsonl", "--request", "1"), 3, "no such file"),
        (("story", "nowhere.jsonl"), 2, "say what to tell of"),
        (("story", "nowhere.jsonl", "--request", "1", "--hits"), 2, "say what to tell of"),
        (("story", ".", "--hits"), 3, "report.json: no such file"),
        (("report", "nowhere"), 3, "no such directory"),
        (("report", "."), 3, "report.json: no such file"),
        (("verify",), 2, "FILE"),
        (("replay", "--timeline", "t.csv"), 2, "End it in .json"),
        (("replay", "--timeline", "nowhere/t.json"), 7, "there is no directory"),
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


def test_what_the_audit_finds_is_said_and_ends_with_5(kvarts: Kvarts, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvarts.audit.auditor import Auditor

    def compare(self: Auditor, account: Any) -> None:
        raise AuditError([Finding(7, "was hit and is not resident", 3, 2)])

    monkeypatch.setattr(Auditor, "compare", compare)
    code, out, err = kvarts("replay", TRACE, "--audit")
    assert (code, out) == (5, "")
    assert "step 7, page 2 of request 3: was hit and is not resident" in err


def test_parquet_without_pyarrow_is_refused_before_any_work(
    kvarts: Kvarts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, out, err = kvarts("replay", "--timeline", tmp_path / "t.parquet")
    assert (code, out) == (2, "")
    assert "kvarts[parquet]" in err and "replaying" not in err


def test_a_failed_replay_leaves_no_files(kvarts: Kvarts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    test_what_the_audit_finds_is_said_and_ends_with_5(kvarts, monkeypatch)
    code, _, _ = kvarts("replay", TRACE, "--audit", "--events", tmp_path / "e.jsonl", "--timeline", tmp_path / "t.json")
    assert code == 5 and not list(tmp_path.iterdir())


# Sparkline ------------------------------------------------------------------------------------------------


def test_a_sparkline_shows_the_highest_of_each_stretch() -> None:
    times = np.array([0.0, 1.0, 2.0, 7.0, 8.0])
    assert sparkline(times, np.array([0.0, 1.0, 0.5, 0.25, 0.0]), 4) == "█▅▅▃"
    assert sparkline(times[:1], np.array([1.0]), 3) == "███"
    assert sparkline(times[:0], times[:0], 3) == ""
    assert len(SPARKS) == 8


# The page -------------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_else_and_is_the_same_every_time(run_dir: Path) -> None:
    page = render_html(RunDir(run_dir))
    assert page == render_html(RunDir(run_dir))
    text = page.decode()
    assert not re.search(r"""(?:src|href)\s*=|@import|url\(""", text)
    assert "/*{" not in text


def test_names_are_data_not_markup(run_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    report = json.loads((copy / "report.json").read_text())
    report["trace"] = "</script><script>alert(1)</script>"
    (copy / "report.json").write_text(json.dumps(report))
    assert b"<script>alert" not in render_html(RunDir(copy))


def test_a_run_without_a_journal_says_so(run_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    for name in ("events.jsonl.gz", "requests.jsonl", "distributions.json"):
        (copy / name).unlink()
    assert b"the run has no journal of events" in render_html(RunDir(copy))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bool], Any]]:
    """Opens Chromium, in light or in dark."""
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        if os.environ.get("KVARTS_BROWSER") == "required":
            pytest.fail("KVARTS_BROWSER asks for chromium and chromedriver, which are not installed")
        pytest.skip("needs Debian's chromium and chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    opened = []

    def open_browser(dark: bool) -> Any:
        options = Options()
        options.binary_location = chromium
        profile = tmp_path_factory.mktemp("profile")
        for argument in (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--window-size=1280,2400",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--user-data-dir={profile}",
        ):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(chromedriver))
        opened.append(driver)
        return driver

    yield open_browser
    for driver in opened:
        driver.quit()


def ready(driver: Any, page: Path) -> float:
    """Opens the page, and answers how long it took until all was drawn, in seconds."""
    start = time.monotonic()
    driver.get(page.as_uri())
    while not driver.execute_script("return document.documentElement.dataset.ready"):
        assert time.monotonic() - start < 60
        time.sleep(0.02)
    driver.execute_script("return document.body.offsetHeight")
    return time.monotonic() - start


def inks(driver: Any, selector: str) -> int:
    """How many different colours a canvas shows."""
    count: int = driver.execute_script(
        """const canvas = document.querySelector(arguments[0]);
        const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const seen = new Set();
        for (let i = 0; i < data.length; i += 4)
          if (data[i + 3] > 200) seen.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
        return seen.size;""",
        selector,
    )
    return count


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_in_a_browser(run_dir: Path, tmp_path: Path, browser: Callable[[bool], Any], dark: bool) -> None:
    page = tmp_path / "report.html"
    page.write_bytes(render_html(RunDir(run_dir)))
    driver = browser(dark)
    ready(driver, page)
    assert driver.get_log("browser") == []
    assert "mooncake-conversation-1000.jsonl" in driver.title
    ground = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(20, 23, 26)" if dark else "rgb(255, 255, 255)")
    text = driver.find_element("tag name", "body").text
    for said in ("KV blocks in use", "Running and waiting", "TTFT", "ITL", "never seen before", "steps that preempted"):
        assert said in text
    charts = driver.find_elements("css selector", ".uplot canvas")
    assert len(charts) == 4
    assert inks(driver, ".uplot canvas") >= 3
    for chart in driver.find_elements("css selector", ".chart"):
        assert chart.size["width"] <= 1180
    assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    # A story opens with a click.
    wait = driver.find_element("css selector", "#waits details")
    assert not wait.find_element("tag name", "pre").is_displayed()
    wait.find_element("tag name", "summary").click()
    assert "admitted after" in wait.find_element("tag name", "pre").text


def test_the_page_of_a_comparison_in_a_browser(tmp_path: Path, browser: Callable[[bool], Any]) -> None:
    folder = Path(str(files("kvarts") / "data" / "vllm-rtx4090"))
    measured, series = load_measured(folder / "requests.jsonl"), load_series(folder / "timeseries.csv")
    prompts = load_mooncake(folder / "prompts.jsonl", trace_block_size=16)
    config = ReplayConfig(num_pages=2587, max_num_batched_tokens=2048, cost=parse_cost(str(folder / "cost.toml")))
    replayed = replayed_of(replay(measured.trace(prompts), config))
    page = tmp_path / "compare.html"
    page.write_bytes(render_page(measured, replayed, series, compare(measured, replayed, series)))
    driver = browser(False)
    ready(driver, page)
    assert driver.get_log("browser") == []
    text = driver.find_element("tag name", "body").text
    for said in ("TTFT p99", "65,456.6 ms", "KV use off by", "234 measured, 235 replayed", "Waiting requests"):
        assert said in text
    assert len(driver.find_elements("css selector", ".uplot canvas")) == 5
    assert inks(driver, ".uplot canvas") >= 3
    assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")


def test_two_hundred_thousand_steps_stay_usable(run_dir: Path, tmp_path: Path, browser: Callable[[bool], Any]) -> None:
    """Opens, zooms on a drag and back out, at once."""
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    (copy / "timeline.json.gz").unlink()
    small = replay_timeline()["timeline"]
    count = 200_000
    columns = {
        name: np.resize(np.array([row[name] for row in small]), count)
        for name in small[0]
        if name not in ("step", "t_ms", "asked")
    }
    columns.update(step=np.arange(count), t_ms=np.arange(count) * 25.0)
    Timeline(columns, {}, block_size_tokens=512, total_blocks=32768).write(copy / "timeline.jsonl")
    page = tmp_path / "report.html"
    page.write_bytes(render_html(RunDir(copy)))
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

"""Tiers, users, shares and the page: what is said beside the curve."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.plan.cache import CachePlan, PricedTier, TiersPlan, best_buy
from kvarts.plan.page import render_page
from kvarts.plan.series import charts_of
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.trace import Trace

from builders.browser import as_phone, click_at, commands, scrolls_sideways
from builders.plan_traces import small_traces

DATA = Path(str(files("kvarts") / "data"))
SAMPLE = DATA / "mooncake-conversation-1000.jsonl"
COST = "linear:step_ms=5,chunk_token_ms=0.02,decode_ms=0.1,context_token_ms=0"


@given(small_traces(most_requests=20), st.integers(1, 4), st.integers(1, 20), st.integers(0, 20), st.integers(0, 20))
def test_hits_of_all_tiers_are_those_of_one_pool_as_large(
    trace: Trace, page_size: int, device: int, host: int, disk: int
) -> None:
    plan = CachePlan(trace, page_size)
    tiers = [
        PricedTier(name="device", pages=device),
        PricedTier(name="host", pages=host, bytes_per_s=10**12),
        PricedTier(name="disk", pages=disk, bytes_per_s=10**3),
    ]
    found = TiersPlan(plan, tiers, page_bytes=1000 * page_size, s_per_token=0.5).to_builtins()["now"]
    assert sum(found["hit_ratio"].values()) == pytest.approx(plan.curve.hit_ratio(device + host + disk))
    # Loading from disk is slower than computing, and a load from the host takes a nanosecond a token.
    tokens = plan.curve.hit_pages(device + host) * page_size
    assert found["saved_s"] == pytest.approx(0.5 * tokens, abs=1e-6)


def test_the_next_gib_is_worth_what_it_adds_for_its_price() -> None:
    plan = CachePlan(load_trace(SAMPLE), 512)
    tiers = [
        PricedTier(name="device", pages=2000, price=10.0),
        PricedTier(name="host", pages=6000, bytes_per_s=50 * 10**9, price=1.0),
        PricedTier(name="disk", pages=0, bytes_per_s=5 * 10**9),
    ]
    values = TiersPlan(plan, tiers, page_bytes=512 * 131_072, s_per_token=1e-4).to_builtins()
    device, host, disk = values["next_gib"]
    assert host["saved_s_per_price"] == host["saved_s"] > 0
    assert device["saved_s_per_price"] == pytest.approx(device["saved_s"] / 10)
    assert disk["price"] is None
    assert best_buy(values) == "host"
    saved = [point["saved_s"] for point in values["curve"]]
    assert saved == sorted(saved)
    assert values["curve"][0]["gib"]["host"] == 0


@pytest.mark.long
def test_how_many_users_fit(asked: Callable[..., Any]) -> None:
    """The last that keeps the SLO and the first that does not stand next to each other, and commands say the same."""
    setting = ("--cost", COST, "--pages", 4_000, "--set", "page_size=64", "--slo-ttft-ms", 1500, "--slo-share", 0.9)
    users = asked("plan", "users", DATA / "coding-agents", "--users", "1..12", *setting, "--json")["users"]
    assert users["num_sessions"] == 12
    fits, fails = users["fits"], users["fails_at"]
    assert fails == fits + 1
    by_users = {point["users"]: point for point in users["points"]}
    assert by_users[fits]["slo_ratio"] >= 0.9 > by_users[fails]["slo_ratio"]
    words = shlex.split(by_users[fits]["command"])
    assert words[:2] == ["kvarts", "replay"]
    assert asked(*words[1:], "--json")["goodput"]["ratio"] == by_users[fits]["slo_ratio"]


@pytest.mark.long
def test_options_for_users_are_what_replays_say(
    asked: Callable[..., Any], run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Each option is replayed with the number of users that failed, and the answer names those that help."""
    setting = ("--cost", COST, "--pages", 2_500, "--set", "page_size=64", "--slo-ttft-ms", 1000, "--slo-share", 0.9)
    plan = ("plan", "users", DATA / "coding-agents", "--users", "2..12", "--replicas", 2, *setting)
    users = asked(*plan, "--json")["users"]
    names = [point["option"] for point in users["options"]]
    assert names == ["--eviction auto", "--router prefix", "--router session", "--set sessions.retention=pin"]
    assert run_command(*plan) == 0
    answer = " ".join(capsysbinary.readouterr().out.decode().split())
    kept = next(point["slo_ratio"] for point in users["points"] if point["users"] == users["fails_at"])
    for point in users["options"]:
        assert point["users"] == users["fails_at"]
        assert (f"% with {point['option']}" in answer) == (point["slo_ratio"] > kept)
        summary = asked(*shlex.split(point["command"])[1:], "--json")
        assert (summary["goodput"]["ratio"], summary["ttft_ms"]) == (point["slo_ratio"], point["ttft_ms"])


@pytest.mark.long
def test_host_memory_for_users_is_what_replays_say(asked: Callable[..., Any]) -> None:
    """What fits with the memory that is named, and what it costs, is what its command replays."""
    setting = ("--model", "llama-3.1-8b", "--device", "h100-80gb", "--slo-ttft-ms", 1000, "--slo-share", 0.95)
    users = asked("plan", "users", DATA / "coding-agents", "--users", "1..24", *setting, "--json")["users"]
    host = users["host"]
    assert users["fits"] < host["fits"] == host["fails_at"] - 1
    assert host["hit_ratio_without"] < host["hit_ratio"] <= host["most_hit_ratio"]
    point = next(point for point in host["points"] if point["users"] == host["fits"])
    summary = asked(*shlex.split(point["command"])[1:], "--json")
    assert summary["config"]["offload"]["host_memory"] and summary["prefix_hit_ratio"] == point["hit_ratio"]
    assert summary["goodput"]["ratio"] == point["slo_ratio"] >= 0.95
    assert point["device_hours"] == users["num_devices"] * summary["duration_ms"] / 3.6e6


def test_more_users_than_sessions_are_copies(
    asked: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Callable[..., int]
) -> None:
    trace = tmp_path / "one.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2], "session_id": "a"},
        {"timestamp": 1, "input_length": 900, "output_length": 5, "hash_ids": [1, 3], "session_id": "a", "delay": 50},
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    setting = ("--cost", COST, "--pages", 5000)
    users = asked("plan", "users", trace, "--users", 4, *setting, "--json")["users"]
    (point,) = users["points"]
    assert users["fits"] is None
    scale, _, replay = point["command"].partition(" && ")
    monkeypatch.chdir(tmp_path)
    assert run_command(*shlex.split(scale)[1:]) == 0
    assert asked(*shlex.split(replay)[1:], "--json")["ttft_ms"] == point["ttft_ms"]


@pytest.fixture
def planned(asked: Callable[..., Any], tmp_path: Path) -> Callable[[], tuple[Any, Path]]:
    def plan() -> tuple[Any, Path]:
        trace, page = tmp_path / "<script>alert(1).jsonl", tmp_path / "plan.html"
        trace.write_text("".join(SAMPLE.read_text().splitlines(keepends=True)[:150]))
        setting = ("--page-size", 512, "--pages", 2000, "--cost", COST, "--set", "slo.ttft_ms=5000")
        return asked("plan", "policies", trace, *setting, "--policy", "auto", "--html", page, "--json"), page

    return plan


@pytest.mark.slow
def test_the_page_has_everything_and_needs_nothing(planned: Callable[[], tuple[Any, Path]]) -> None:
    values, page = planned()
    data = page.read_bytes()
    assert data == render_page(values)
    assert b"<script>alert" not in data
    assert b"http://" not in data.replace(b"http://www.w3.org", b"")
    assert b"<link" not in data
    assert all(point["command"].encode().split(b" ")[0] == b"kvarts" for point in values["at"])


@pytest.mark.parametrize(
    "dark", [pytest.param(False, id="light"), pytest.param(True, id="dark", marks=pytest.mark.long)]
)
def test_the_page_in_a_browser(
    planned: Callable[[], tuple[Any, Path]], browser: Callable[[bool], Any], dark: bool
) -> None:
    values, page = planned()
    driver = browser(dark)
    driver.set_window_size(1280, 800)
    driver.get(page.as_uri())
    assert driver.get_log("browser") == []
    ground = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(20, 23, 26)" if dark else "rgb(255, 255, 255)")
    assert driver.title == "Plan for <script>alert(1).jsonl · kvarts"
    text = driver.find_element("tag name", "body").text
    for said in (
        "Hits by memory",
        "Policies, ",
        "Latency by memory",
        "cheapest",
        "SLO kept, by memory",
    ):
        assert said in text
    assert not scrolls_sideways(driver)
    # The recommendations are a table with a row each, and what a legend says is there before the mouse is.
    heads = [cell.text for cell in driver.find_elements("css selector", "#options thead th")]
    assert {"replicas", "pages of each", "TTFT p99", "keep the SLO"} <= set(heads)
    assert len(driver.find_elements("css selector", "#options tbody tr")) == len(values["latency"]["options"])
    legends = [cell.text for cell in driver.find_elements("css selector", ".u-value")]
    assert legends and all(legends) and "-" not in legends and "--" not in legends, legends
    # A point and a name each show their command: the point that is nearest to the click.
    driver.find_element("css selector", ".bars button").click()
    assert [command.split(" ")[:2] for command in commands(driver)] == [["kvarts", "plan"]]
    click_at(driver, 0, 0.99, 0.05)
    right = re.search(r"--at (\d+)", commands(driver)[0])
    click_at(driver, 0, 0.01, 0.99)
    left = re.search(r"--at (\d+)", commands(driver)[0])
    assert left and right and int(left[1]) < values["curve"]["pages"][-1] // 2 < int(right[1])
    as_phone(driver)
    assert not scrolls_sideways(driver)


@pytest.mark.slow
def test_hits_are_on_a_linear_axis_and_the_slo_is_drawn(planned: Callable[[], tuple[Any, Path]]) -> None:
    values, _ = planned()
    charts = {chart["name"]: chart for chart in charts_of(values)}
    shares = [chart for chart in charts.values() if chart.get("y_unit") == "%" and chart["kind"] == "lines"]
    assert shares and not any(chart["log_y"] for chart in shares)
    limits = {
        name: series["y"]
        for name, chart in charts.items()
        for series in chart.get("series", ())
        if series["style"] == "limit"
    }
    assert limits["Latency by memory"] == [5000.0, 5000.0]
    assert limits["SLO kept, by memory"] == [99.0, 99.0]
    # Every point that can be clicked has a command.
    points = [point for chart in charts.values() for series in chart.get("series", ()) for point in series["points"]]
    assert points and all(point["command"].startswith("kvarts ") for point in points)


def test_tiers_that_save_nothing_have_a_sentence_and_no_chart(asked: Callable[..., Any], tmp_path: Path) -> None:
    trace = tmp_path / "few.jsonl"
    trace.write_text("".join(SAMPLE.read_text().splitlines(keepends=True)[:8]))
    values = asked("plan", trace, "--page-size", 512, "--pages", 2000, "--cost", COST, "--json")
    charts = {chart["name"]: chart for chart in charts_of(values)}
    for name in ("Host memory", "The next GiB"):
        assert charts[name]["kind"] == "note" and "fits" in charts[name]["note"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([SAMPLE, "--users", "2..1"], "--users"),
        ([SAMPLE, "--set", "workers=2"], "--set workers"),
        ([SAMPLE, "--users", "0..1"], "--users"),
        ([SAMPLE, "--users", "2", "--cost", COST], "--users"),
        ([SAMPLE, "--users", "2"], "--users"),
        ([SAMPLE, "--prices", "none-such.toml"], "--prices"),
        ([SAMPLE, "--quick"], "--quick"),
        ([SAMPLE, "--policy", "no"], "--policy"),
    ],
)
def test_what_is_wrong_is_named(
    run_command: Callable[..., int], capsys: pytest.CaptureFixture[str], arguments: list[object], said: str
) -> None:
    assert run_command("plan", *arguments) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert "Traceback" not in printed.err
    assert not printed.out

"""The page of a comparison, in a real browser where there is one."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvarts import ReplayConfig, replay
from kvarts.cost.roofline import parse_cost
from kvarts.plan.calibrate import Comparison, compare, load_measured, load_series
from kvarts.plan.calibrate.comparison import render_page, replayed_of
from kvarts.sim.traffic.mooncake import load_mooncake

from builders.browser import as_phone, inks, ready, scrolls_sideways


def test_the_page_of_a_comparison_in_a_browser(tmp_path: Path, browser: Callable[[bool], Any]) -> None:
    folder = Path(str(files("kvarts") / "data" / "vllm-rtx4090"))
    measured, series = load_measured(folder / "requests.jsonl"), load_series(folder / "timeseries.csv")
    prompts = load_mooncake(folder / "prompts.jsonl", trace_block_size=16)
    config = ReplayConfig(num_pages=2587, max_num_batched_tokens=2048, cost=parse_cost(str(folder / "cost.toml")))
    replayed = replayed_of(replay(measured.trace(prompts), config))
    page = tmp_path / "compare.html"
    page.write_bytes(render_page(measured, replayed, series, compare(measured, replayed, series), name="fitted"))
    driver = browser(False)
    ready(driver, page)
    assert driver.get_log("browser") == []
    text = driver.find_element("tag name", "body").text
    for said in ("TTFT p99", "65,456.6 ms", "234 measured, 235 replayed", "Waiting requests"):
        assert said in text
    assert driver.title == "fitted compared with requests.jsonl · kvarts"
    heads = [cell.text for cell in driver.find_elements("css selector", "#errors thead th")]
    assert heads == ["", "measured", "replayed", "error"]
    assert "Latencies of the replay are within" in driver.find_element("css selector", ".verdict").text
    values = [cell.text for cell in driver.find_elements("css selector", ".u-value")]
    assert values and all(values) and "--" not in values, values
    assert len(driver.find_elements("css selector", ".uplot canvas")) == 5
    assert inks(driver, ".uplot canvas") >= 3
    assert not scrolls_sideways(driver)
    as_phone(driver)
    assert not scrolls_sideways(driver)


def test_a_verdict_gives_the_way_and_the_size_of_errors() -> None:
    def verdict(**errors: float) -> str:
        pairs = {name: (100.0, 100.0 * (1 + error)) for name, error in errors.items()}
        return Comparison(1, {"ttft": pairs, "tpot": {"mean": (float("nan"), float("nan"))}}).verdict

    assert verdict(mean=0.2, p99=0.1) == "Latencies of the replay are 10.0 to 20.0 % too long; worst: TTFT mean."
    assert verdict(mean=-0.2, p99=-0.1) == "Latencies of the replay are 10.0 to 20.0 % too short; worst: TTFT mean."
    within = "Latencies of the replay are within 20.00 % of those measured; worst: TTFT p99."
    assert verdict(mean=0.1, p99=-0.2) == verdict(mean=0.001, p99=-0.2) == within
    assert Comparison(1, {"tpot": {"mean": (float("nan"), 1.0)}}).verdict == "No request has a latency to compare."

"""The page of a comparison, in a real browser where there is one."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvarts import ReplayConfig, load_mooncake, replay
from kvarts.calibrate import compare, load_measured, load_series
from kvarts.calibrate.page import render_page
from kvarts.calibrate.replayed import replayed_of
from kvarts.executor.cost import parse_cost

from builders.browser import inks, ready


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

"""Shares have one whole, and totals are the sums of rows, for every report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.sim.replaying import replay
from kvarts.sim.report.requests import COMPLETED

from builders.case import Case, Row, cases
from builders.fleet import FleetCase, fleets
from builders.tiered import tiers_below

pytestmark = pytest.mark.laws


def assert_whole(report: Any) -> None:
    """The summary restated from the rows of requests and steps."""
    summary, raw = report.summary, report.request_columns
    done = raw["status"] == COMPLETED
    totals = {name: int(raw[f"{name}_tokens"][done].sum()) for name in ("input", "output", "cached", "recomputed")}
    assert summary["num_input_tokens"] == totals["input"]
    assert summary["num_output_tokens"] == totals["output"]
    assert summary["num_recomputed_tokens"] == totals["recomputed"]
    assert summary["num_cached_tokens"] + summary.get("num_cached_output_tokens", 0) == totals["cached"]
    assert summary["num_cached_tokens"] == sum(summary["num_cached_tokens_by_tier"].values())
    assert all(value >= 0 for value in summary["num_cached_tokens_by_tier"].values())
    if totals["input"]:
        shares = summary["prefix_hit_ratio_by_tier"]
        assert 0 <= summary["prefix_hit_ratio"] <= 1
        assert abs(sum(shares.values()) - summary["prefix_hit_ratio"]) < 1e-9
    rows = [json.loads(line) for line in report.requests_jsonl().splitlines()]
    ended = [row for row in rows if row["status"] == "completed"]
    assert summary["num_completed"] == len(ended)
    assert len(rows) == summary["num_requests"]
    assert summary["num_preemptions"] == int(report.steps["preempted"].sum()) == int(raw["preemptions"].sum())
    for each in summary.get("replicas", []):
        assert each["prefix_hit_ratio"] is None or 0 <= each["prefix_hit_ratio"] <= 1


@given(cases(cancels=True), st.booleans(), st.booleans(), st.data())
def test_a_replays_totals_are_sums_of_its_rows(
    case: Case, is_ahead: bool, has_tiers: bool, data: st.DataObject
) -> None:
    changes: dict[str, Any] = {"async_scheduling": is_ahead}
    if has_tiers:
        changes["offload"] = data.draw(tiers_below(of_groups=False, sync_loads=True))
    assert_whole(replay(case.trace(), case.config(**changes)))


@given(fleets(cancels=True, faults=True), st.booleans())
def test_a_fleets_totals_are_sums_of_its_rows(case: FleetCase, is_ahead: bool) -> None:
    assert_whole(replay(case.case.trace(), case.config(async_scheduling=is_ahead)))


def test_a_request_whose_pages_are_taken_while_its_last_token_is_sampled_was_preempted() -> None:
    """The step after was planned, ahead, before that token was known."""
    rows = [Row(0, [0] * 5, 5, num_output, None, 0, tenant) for num_output, tenant in ((1, None), (4, None), (1, "a"))]
    case = Case(rows, 1, 1, 12, 16, 2, "default", 1)
    report = replay(case.trace(), case.config(async_scheduling=True))
    assert report.summary["num_preemptions"] == 1
    assert report.request_columns["preemptions"].tolist() == [0, 0, 1]


AHEAD = """
400 s5 1223 300 2 3 1000|501 s3 702 900 3 1002|501 s2 2880 1 5 0 1 5 5 1003|1312 s4 425 1 1014|
1412 s0 764 100 5 1017|1417 s4 782 30 3 1019|1874 s4 600 30 3 1032|1874 s0 2421 30 5 3 2 3 1033|1874 s4 848 300 3 1034
"""
"""Rows: time, session, prompt and output tokens, hash ids. The pages of one that has ended are taken for another."""


def test_a_preemption_after_the_last_token_is_that_of_its_row(tmp_path: Path, kvarts: Callable[..., Any]) -> None:
    rows = [row.split() for row in AHEAD.split("|")]
    names = ("timestamp", "session_id", "input_length", "output_length", "hash_ids")
    values = [[int(time), name, int(size), int(most), list(map(int, ids))] for time, name, size, most, *ids in rows]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in values))
    scaled = ("--set", "scaling.policy=queue,target=1,every=0.05s,stable=0.1s", "--router", "sglang-cache-aware")
    out = ("--json", "--requests", tmp_path / "rows.jsonl")
    code, text, err = kvarts("replay", trace, "--pages", 250, "--replicas", 2, "--engine", "vllm", *scaled, *out)
    assert code == 0, err
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert json.loads(text)["num_preemptions"] == sum(row["preemptions"] for row in written) == 1


def test_a_mockers_share_is_of_its_prompts() -> None:
    """One prompt token and 60 generated ones, preempted by others: what it finds again is not of its prompt."""
    rows = [Row(0, [index], 1, 60, None, 0, None) for index in range(4)]
    case = Case(rows, 1, 4, 40, 64, 4, "mocker", 1)
    summary = replay(case.trace(), case.config()).summary
    assert summary["num_preemptions"]
    assert summary["num_cached_output_tokens"] > 0
    assert 0 <= summary["prefix_hit_ratio"] <= 1

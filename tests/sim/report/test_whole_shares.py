"""Shares have one whole, and totals are the sums of rows, for every report."""

from __future__ import annotations

import json
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


def test_a_mockers_share_is_of_its_prompts() -> None:
    """One prompt token and 60 generated ones, preempted by others: what it finds again is not of its prompt."""
    rows = [Row(0, [index], 1, 60, None, 0, None) for index in range(4)]
    case = Case(rows, 1, 4, 40, 64, 4, "mocker", 1)
    summary = replay(case.trace(), case.config()).summary
    assert summary["num_preemptions"]
    assert summary["num_cached_output_tokens"] > 0
    assert 0 <= summary["prefix_hit_ratio"] <= 1

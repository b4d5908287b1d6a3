"""Replays of requests with hints: fast and step by step alike, audited, with tiers, KV groups and several models."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.hints import Hints, RetainedRange
from kvarts.core.kv.groups import PartGroup
from kvarts.sim.orders import HintedOrder, SoonestReturnOrder

from builders.case import Case, Row, cases
from builders.grouped import FULL, WINDOW, assert_same_outcome, part_groups, told_by
from builders.laws import assert_fast_as_slow
from builders.outcome import run_kvarts
from builders.policies import assert_closed_loop_fast_as_slow, closed_loops
from builders.tiered import Tiered, tiered
from published_orders import ToolTtlOrder

pytestmark = pytest.mark.laws

orders = st.sampled_from([HintedOrder, SoonestReturnOrder, ToolTtlOrder])
times_ms = st.none() | st.sampled_from([0.0, 1.0, 7.0, 40.0, 1000.0])
hints = st.none() | st.builds(
    Hints,
    priority=st.none() | st.integers(-1, 2),
    ttl_ms=times_ms,
    pause_ms=times_ms,
    tool=st.sampled_from([None, "a"]),
    retain=st.just(())
    | st.lists(
        st.builds(
            lambda start, length, **claim: RetainedRange(start=start, end=length and start + length, **claim),
            start=st.integers(0, 20),
            length=st.none() | st.integers(1, 12),
            priority=st.none() | st.integers(-1, 2),
            ttl_ms=times_ms,
            covers_output=st.booleans(),
        ),
        max_size=3,
    ).map(tuple),
)


def hinted(case: Case, data: st.DataObject) -> Case:
    for row in case.rows:
        row.hints = data.draw(hints)
    return case


@given(cases(max_requests=20, cancels=True), orders, st.data())
def test_fast_forward_equals_step_by_step(case: Case, order: Any, data: st.DataObject) -> None:
    """L5, L8, and the audit agrees page by page."""
    assert_fast_as_slow(hinted(case, data), eviction=order)


@given(cases(max_requests=20), orders, closed_loops, st.data())
def test_a_closed_loop_over_replicas_is_the_same_step_by_step(
    case: Case, order: Any, loop: dict[str, Any], data: st.DataObject
) -> None:
    assert_closed_loop_fast_as_slow(hinted(case, data), eviction=order, **loop)


@given(tiered(max_requests=16), orders, st.data())
def test_with_tiers_fast_forward_equals_step_by_step(tiers: Tiered, order: Any, data: st.DataObject) -> None:
    assert_fast_as_slow(hinted(tiers.case, data), offload=tiers.offload, eviction=order)


@given(cases(max_requests=10), part_groups(), st.sampled_from(["all", "tails"]), orders, st.data())
def test_an_audit_follows_them_with_kv_groups(
    case: Case, groups: tuple[PartGroup, ...], keeps: str, order: Any, data: st.DataObject
) -> None:
    case.profile = "default"
    hinted(case, data)
    audited, _ = told_by(case, groups, keeps, eviction=order, audit=True)
    again, _ = told_by(case, groups, keeps, eviction=order, step_by_step=True)
    assert_same_outcome(audited, again)


@given(cases(max_requests=20), st.data())
def test_hints_are_nothing_to_lru(case: Case, data: st.DataObject) -> None:
    without = run_kvarts(case)
    assert run_kvarts(hinted(case, data)).requests.columns.keys() == without.requests.columns.keys()
    for name, column in run_kvarts(case).requests.columns.items():
        assert column.tobytes() == without.requests.columns[name].tobytes(), name


def row(second: int, first_unit: int, given: Hints | None = None) -> Row:
    return Row(1000 * second, list(range(first_unit, first_unit + 5)), 20, 1, None, 0, None, hints=given)


@pytest.mark.parametrize(
    ("order", "given", "num_hit"),
    [
        (HintedOrder, None, 0),
        (HintedOrder, Hints(ttl_ms=1500), 0),
        (HintedOrder, Hints(ttl_ms=3500), 16),
        (HintedOrder, Hints(pause_ms=1750), 16),
        (HintedOrder, Hints(priority=1), 16),
        (HintedOrder, Hints(retain=(RetainedRange(end=8, priority=1),)), 8),
        (HintedOrder, Hints(retain=(RetainedRange(end=7, ttl_ms=3500),)), 8),
        (HintedOrder, Hints(retain=(RetainedRange(start=8, priority=1),)), 16),
        (HintedOrder, Hints(priority=1, retain=(RetainedRange(start=8, priority=0),)), 8),
        (SoonestReturnOrder, Hints(pause_ms=3000, retain=(RetainedRange(end=8),)), 16),
        (HintedOrder, Hints(priority=1, ttl_ms=1500), 0),
        (SoonestReturnOrder, Hints(ttl_ms=3500), 0),
        (SoonestReturnOrder, Hints(pause_ms=3000), 16),
    ],
)
@pytest.mark.parametrize("groups", [None, (PartGroup(FULL, 2), WINDOW)])
def test_a_hint_keeps_a_prompt(groups: Any, order: Any, given: Hints | None, num_hit: int) -> None:
    """A prompt that returns after three seconds and two other prompts, in a pool for two."""
    rows = [row(0, 0, given), row(1, 100), row(2, 200), row(3, 0)]
    case = Case(rows, 4, 4, 10, 64, 4, "default", 1)
    if groups is None:
        columns = run_kvarts(case, eviction=order).requests.columns
    else:
        columns = told_by(case, groups, "all", eviction=order, audit=True)[0].request_columns
    assert columns["cached_tokens"].tolist()[-1] == num_hit

"""Replays with tiers below the device, under a researcher's own eviction order and admission policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts import OffloadConfig
from kvarts.core.kv.eviction import EvictionOrder
from kvarts.core.kv.tree import PrefixTree
from kvarts.core.tiers.safe_first import SafeFirst

from builders.case import Case, Row
from builders.eviction_contract import EvictionOrderContract
from builders.group_tiers import Grouped, grouped
from builders.guide_policies import LeastHits, shortest_first
from builders.laws import assert_fast_as_slow, assert_tokens_counted_once
from builders.orders import FewestHits
from builders.outcome import run_kvarts
from builders.policies import assert_closed_loop_fast_as_slow, closed_loops, policies
from builders.tiered import Tiered, tiered

pytestmark = pytest.mark.laws


class TestSafeFirstOfTheOrderOfTheGuide(EvictionOrderContract):
    def make_tree(self) -> PrefixTree:
        order = SafeFirst(LeastHits)
        return PrefixTree(order, watcher=order)


@given(tiered(max_requests=20), policies())
def test_fast_forward_equals_step_by_step(tiers: Tiered, chosen: dict[str, Any]) -> None:
    """L5, with tiers, and the audit agrees page by page."""
    assert_fast_as_slow(tiers.case, offload=tiers.offload, **chosen)


@given(tiered(max_requests=20), policies(), closed_loops)
def test_a_closed_loop_over_replicas_is_the_same_step_by_step(
    tiers: Tiered, chosen: dict[str, Any], loop: dict[str, Any]
) -> None:
    """L5, L8: where engines wait for each other, and some of them for transfers."""
    assert_closed_loop_fast_as_slow(tiers.case, offload=tiers.offload, **chosen, **loop)


@given(tiered(), policies())
def test_every_token_is_counted_once(tiers: Tiered, chosen: dict[str, Any]) -> None:
    """L7: whatever is evicted and admitted when."""
    tiers.case.profile = "default"
    assert_tokens_counted_once(run_kvarts(tiers.case, offload=tiers.offload, **chosen))


@given(grouped(max_requests=12), st.sampled_from([LeastHits, FewestHits]))
def test_tiers_below_kv_groups_are_audited_under_an_order_of_ones_own(
    case: Grouped, make_order: Callable[[], EvictionOrder]
) -> None:
    """Of parts, what a lazy tier has stored goes before all that the order lists."""
    report = case.replayed(eviction=make_order)
    assert case.replayed(eviction=make_order, step_by_step=True).to_json() == report.to_json()


def test_runs_that_become_safe_together_go_in_a_fixed_order() -> None:
    """They are of different paths: an order is told of them one by one, so that no two have the same place."""

    def row(units: list[int], tenant: str | None = None) -> Row:
        return Row(0, units, 2 * len(units), 1, None, 0, tenant)

    long = [0] * 4
    rows = [row(long), row(long), row([0] * 6), row([0]), row(long, "a"), *(row(long) for _ in range(13)), row([0] * 8)]
    case = Case(rows, 2, 4, 7, 16, 1, "default", 1)
    offload = OffloadConfig(
        host_pages=8, policy="lazy", target_free=4, h2d=50_000, d2h=50_000, latency_us=0.0, kv_bytes_per_token=1000
    )
    assert_fast_as_slow(case, offload=offload, eviction=LeastHits, admission=shortest_first(0))

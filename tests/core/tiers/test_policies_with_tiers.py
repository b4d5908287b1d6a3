"""Replays with tiers below the device, under a researcher's own eviction order and admission policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvarts import OffloadConfig
from kvarts.core.kv.eviction import EvictionOrder, LruOrder
from kvarts.core.kv.groups import PartGroup
from kvarts.core.kv.tree import PrefixTree
from kvarts.core.tiers.safe_first import SafeFirst
from kvarts.testing import EvictionOrderContract

from builders.case import Case, Row
from builders.group_tiers import Grouped, grouped
from builders.grouped import FULL
from builders.guide_policies import LeastHits, shortest_first
from builders.laws import assert_fast_as_slow, assert_tokens_counted_once
from builders.orders import FewestHits
from builders.outcome import run_kvarts
from builders.pages import paged
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


def test_of_exclusive_tiers_the_first_says_what_is_safe() -> None:
    """A copy of page 1 is on the device and in files, and has left host memory: it may be stored there again."""
    rows = [Row(0, [unit], 2, 1, None, 0, None) for unit in (0, 0, 0, 0, 1, 0, 0)]
    case = Case(rows, 2, 1, 5, 4, 1, "default", 1)
    offload = OffloadConfig(
        host_pages=1,
        disk_pages=2,
        policy="exclusive",
        target_free=4,
        h2d=50_000,
        d2h=50_000,
        disk_read=50_000,
        disk_write=50_000,
        latency_us=0.0,
        kv_bytes_per_token=1000,
        store_within_ms=0.0,
    )
    assert_fast_as_slow(case, offload=offload, eviction=LeastHits)


@given(tiered(max_requests=20), policies(), closed_loops)
def test_a_closed_loop_over_replicas_is_the_same_step_by_step(
    tiers: Tiered, chosen: dict[str, Any], loop: dict[str, Any]
) -> None:
    """L5, L8: where engines wait for each other, and some of them for transfers."""
    assert_closed_loop_fast_as_slow(tiers.case, offload=tiers.offload, **chosen, **loop)


class ScannedLru(LruOrder):
    """LRU as a user would derive it: each scan for what to store begins at its first run."""

    sees_pages = True


@pytest.mark.parametrize("policy", ["lazy", "exclusive"])
@given(tiered(cancels=True))
def test_a_scan_that_goes_on_stores_what_a_whole_one_does(policy: str, tiers: Tiered) -> None:
    disk_pages = tiers.offload.disk_pages if policy == "lazy" else None
    offload = msgspec.structs.replace(tiers.offload, policy=policy, disk_pages=disk_pages)
    kept, whole = (run_kvarts(tiers.case, offload=offload, eviction=order) for order in (LruOrder, ScannedLru))
    assert list(map(paged, kept.events)) == list(map(paged, whole.events))
    for name, column in kept.requests.columns.items():
        assert column.tolist() == whole.requests.columns[name].tolist()


@given(tiered(), policies())
def test_every_token_is_counted_once(tiers: Tiered, chosen: dict[str, Any]) -> None:
    """L7: whatever is evicted and admitted when."""
    tiers.case.profile = "default"
    assert_tokens_counted_once(run_kvarts(tiers.case, offload=tiers.offload, **chosen))


STORED_AGAIN = Grouped(
    Case(
        [
            Row(0, [0] * 9, 18, 34, None, -1, None),
            Row(40, [0, 0, 1, 2, 0, 1, 0, 3, 0], 18, 31, None, -1, None),
        ],
        2, 8, 8, 64, 2, "default", 1,
    ),
    (PartGroup(FULL, 2), PartGroup(FULL, 5), PartGroup(FULL, 1)),
    "all",
    OffloadConfig(
        host_pages=1, policy="exclusive", target_free=1, h2d=1000, d2h=100, latency_us=0.0, store_within_ms=1.0
    ),
)  # fmt: skip
"""What is evicted next was stored, left the tier, and is being stored again."""


@example(STORED_AGAIN, LeastHits)
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

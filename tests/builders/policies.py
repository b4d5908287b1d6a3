"""Cases of replays under another eviction order and another admission policy than the defaults."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kvarts.core.kv.eviction import LruOrder
from kvarts.core.sched.policy import PriorityPolicy
from kvarts.sim.report.report import STATUS_NAMES
from kvarts.sim.report.requests import COMPLETED, REJECTED

from builders.case import ROUTERS, Case
from builders.guide_policies import LeastHits, shortest_first
from builders.laws import replayed_as_slowly
from builders.orders import FewestHits

__all__ = ["assert_closed_loop_fast_as_slow", "closed_loops", "patiences_ms", "policies"]

patiences_ms = st.sampled_from([0, 5, 40, 300, 100_000])


@st.composite
def policies(draw: st.DrawFn) -> dict[str, Any]:
    """Settings of a replay, at least one of them not the default."""
    admission = draw(st.just(PriorityPolicy) | patiences_ms.map(shortest_first))
    orders = [LeastHits, FewestHits] if admission is PriorityPolicy else [LruOrder, LeastHits, FewestHits]
    return {"eviction": draw(st.sampled_from(orders)), "admission": admission}


closed_loops = st.fixed_dictionaries(
    {
        "concurrency": st.integers(1, 6),
        "replicas": st.sampled_from([1, 2, 3]),
        "router": st.sampled_from(ROUTERS),
    }
)


def assert_closed_loop_fast_as_slow(case: Case, **changes: Any) -> None:
    """Engines that wait for each other leave the same bytes fast and step by step; every request ends."""
    fast = replayed_as_slowly(case, **changes)
    assert len(fast.requests["status"]) == len(case.rows)
    assert set(fast.requests["status"]) <= {STATUS_NAMES[COMPLETED], STATUS_NAMES[REJECTED]}

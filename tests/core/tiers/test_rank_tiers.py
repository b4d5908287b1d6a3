"""Ranks in lock step with tiers: each has its own, and a common step waits for the slowest copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts import ReplayConfig, replay
from kvarts.core.sched.plan import Batch
from kvarts.core.tiers.config import OffloadConfig
from kvarts.cost.polynomial import PolynomialCost
from kvarts.sim.sessions import SessionReplay

from builders.case import ROUTERS, Case
from builders.group_tiers import Grouped, grouped, overlapping
from builders.grouped import Told, assert_same_outcome
from builders.laws import assert_as_in_naive
from builders.outcome import run_kvarts
from builders.session_traces import Talk, session_traces
from builders.tiered import BYTES_PER_TOKEN, Tiered, naive_settings, tiered, tiers_below
from builders.tiers import offloader_of
from oracles.naive_ranks import NaiveRank, run_naive_ranks

pytestmark = pytest.mark.laws


def together_ns(alone_ns: list[int]) -> int:
    """As slow as the slowest, and slower the more ranks compute."""
    return max(alone_ns) + 100_000 * (len(alone_ns) - 1)


class Together:
    """A cost model of ranks: `together_ns` of the polynomial cost of each, which has a pool of `pool_tokens`."""

    def __init__(self, num_ranks: int, pool_tokens: int) -> None:
        self.num_ranks = num_ranks
        self._pool_tokens = pool_tokens
        self._alone = PolynomialCost()
        self.step_ns = self._alone.step_ns
        self.decode_ns = self._alone.decode_ns

    def __repr__(self) -> str:
        return f"{self.num_ranks} ranks"

    def together_ns(self, batches: Sequence[Batch]) -> int:
        return together_ns([self.step_ns(batch) for batch in batches])

    def decodes_together_ns(self, decodes: Sequence[tuple[int, int]], num_steps: int) -> list[int]:
        alone_ns = [self.decode_ns(*each, self._pool_tokens, num_steps) for each in decodes]
        return [together_ns(list(step)) for step in zip(*alone_ns, strict=True)]


def ranks(case: Case, num_ranks: int) -> dict[str, Any]:
    """The changes that make a case one of a group of ranks."""
    return {"cost": Together(num_ranks, case.num_pages * case.page_size), "replicas": num_ranks, "profile": "default"}


@given(
    st.booleans().flatmap(
        lambda limits: tiered(max_requests=12, limits=limits, cancels=True, all_loads=True, lists=True)
    ),
    st.integers(2, 3),
)
def test_everything_is_as_in_naive_ranks(tiers: Tiered, num_ranks: int) -> None:
    """L1 to L4, L7, L8: requests, steps, evictions and transfers of every rank."""
    tiers.case.profile = "default"
    case = tiers.case
    requests = case.naive_requests()
    naive_engines = [NaiveRank(**naive_settings(tiers)) for _ in range(num_ranks)]
    run_naive_ranks(requests, naive_engines, together_ns)
    outcome = run_kvarts(case, ranks=num_ranks, **ranks(case, num_ranks), offload=tiers.offload)
    assert_as_in_naive(case, outcome, requests, naive_engines)
    for index, naive in enumerate(naive_engines):
        offloader = offloader_of(outcome.engines[index])
        for channel in offloader.channels:
            num_bytes = BYTES_PER_TOKEN * case.page_size * naive.lane_pages[channel.name]
            assert channel.num_bytes == num_bytes, channel.name


@given(tiered(cancels=True, limits=True, all_loads=True, lists=True), st.integers(2, 3), st.sampled_from(ROUTERS))
def test_ranks_with_tiers_are_fast_as_slow(tiers: Tiered, num_ranks: int, router: str) -> None:
    """L5, audited."""
    case = tiers.case
    changes = {**ranks(case, num_ranks), "offload": tiers.offload, "router": router, "audit": True}
    fast, slow = (replay(case.trace(), case.config(step_by_step=slowly, **changes)) for slowly in (False, True))
    assert_same_outcome(fast, slow)


@given(st.one_of(grouped(max_requests=14), overlapping(max_requests=14, cancels=True)), st.integers(2, 3))
def test_ranks_with_tiers_of_kv_groups_are_fast_as_slow(tiers: Grouped, num_ranks: int) -> None:
    changes = ranks(tiers.case, num_ranks)
    fast = tiers.replayed(**changes)
    assert_same_outcome(fast, tiers.replayed(step_by_step=True, **changes))
    assert_same_outcome(fast, tiers.replayed(lambda _: [Told()], audit=False, **changes))


@given(
    session_traces(),
    st.integers(1, 4),
    tiers_below(of_groups=True, all_loads=True),
    st.sampled_from([{"window": 7, "sink": 3}, {"window": 12, "at_capacity": "evict"}, {"retention": "pin"}]),
)
def test_sessions_of_ranks_with_tiers_are_fast_as_slow(
    talk: Talk, page_size: int, offload: OffloadConfig, kept: dict[str, Any]
) -> None:
    """L5, and at rest only what sessions keep is in use."""
    fast, slow = (
        replay(
            talk.trace(),
            ReplayConfig(
                cost=Together(2, 300 * page_size),
                num_pages=300,
                page_size=page_size,
                replicas=4,
                sessions=SessionReplay(chunk_tokens=16, **kept),
                offload=offload,
                step_by_step=slowly,
                audit=slowly,
            ),
        )
        for slowly in (False, True)
    )
    assert_same_outcome(fast, slow)
    for log in fast.step_logs:
        assert (log.rests["used"] == log.rests["reserved"]).all()

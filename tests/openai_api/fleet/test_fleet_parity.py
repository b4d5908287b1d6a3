"""L11 for a fleet: what arrived at its doors, replayed, is placed on the same workers, which do the same, event by event."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarts.fleet.config import FleetConfig, PoolConfig

from builders.live_fleet import Sent, replayed, served_live, small_pool
from builders.parity import shifted
from builders.rooms import HAS_AUDIT

MIXED, APART, BOTH = "mixed", "apart", "both"


def small_fleet(
    shape: str, router: str = "round-robin", *, pages: int = 40, seqs: int = 4, budget: int = 32, **settings: Any
) -> FleetConfig:
    each = {"num_pages": pages, "max_num_seqs": seqs, "max_num_batched_tokens": max(budget, seqs), "router": router,
            "audit": HAS_AUDIT}  # fmt: skip
    pools: list[PoolConfig] = []
    if shape in (MIXED, BOTH):
        pools.append(small_pool("mixed", 2, **each))
    if shape in (APART, BOTH):
        pools += [small_pool("prefill", 2, **each), small_pool("decode", 2, **each)]
    return FleetConfig(pools=tuple(pools), token_bytes=10, **settings)


def assert_same(config: FleetConfig, sent: list[Sent], *, speedup: float = 1.0) -> None:
    run = served_live(config, sent, speedup=speedup)
    first_ns = min(row.arrival_ns for row in run.rows)
    _, again = replayed(config, run.rows)
    for worker, heard in run.heard.items():
        mine, other = shifted(heard.events, first_ns), again[worker].events
        for number, (one, two) in enumerate(zip(mine, other, strict=False)):
            assert one == two, f"worker {worker}, event {number}"
        assert len(mine) == len(other), f"worker {worker}"


tokens = st.integers(0, 3)
prompts = st.one_of(
    st.lists(tokens, min_size=1, max_size=30),
    st.tuples(st.integers(0, 2), st.lists(tokens, max_size=6)).map(lambda pair: [pair[0]] * 17 + pair[1]),
)
requests = st.builds(
    Sent,
    delay_ms=st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.5]),
    prompt=prompts,
    num_tokens=st.integers(1, 24),
    worker=st.sampled_from([None, None, None, 0, 1]),
    left_at=st.sampled_from([None, None, 0, 1]),
    gives_up_ms=st.sampled_from([None, None, None, 0.5, 2.0]),
    num_stops=st.sampled_from([0, 0, 60, 450]),
    priority=st.integers(0, 1),
    salt=st.sampled_from([None, None, "a"]),
)


@pytest.mark.laws
@settings(deadline=None, max_examples=max(1, settings().max_examples // 2))
@given(
    sent=st.lists(requests, min_size=1, max_size=12),
    shape=st.sampled_from([MIXED, APART, BOTH]),
    router=st.sampled_from(["round-robin", "least-loaded", "dynamo-kv"]),
    pages=st.integers(16, 40),
    seqs=st.integers(1, 4),
    budget=st.sampled_from([4, 16, 64]),
    rate=st.sampled_from([None, 1e5, 1e6]),
    sharing=st.booleans(),
    only_missing=st.booleans(),
    least_remote=st.sampled_from([None, None, 8]),
    hold_s=st.sampled_from([0.0, 0.002, 30.0]),
    late=st.booleans(),
)
def test_a_recorded_fleet_replays_to_the_same_events(
    sent: list[Sent],
    shape: str,
    router: str,
    pages: int,
    seqs: int,
    budget: int,
    rate: float | None,
    sharing: bool,
    only_missing: bool,
    least_remote: int | None,
    hold_s: float,
    late: bool,
) -> None:
    config = small_fleet(
        shape,
        router,
        pages=pages,
        seqs=seqs,
        budget=budget,
        bytes_per_s=rate,
        sharing="worker" if sharing and rate else "none",
        transfer="missing" if only_missing else "full-prompt",
        latency_ms=0.3 if late else 0.0,
        least_remote=least_remote if shape != MIXED else None,
        hold_s=hold_s,
    )
    assert_same(config, sent)

"""Random workloads with tiers below the device: against the naive engine, and fast-forward against step by step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvarts.core.tiers.config import OffloadConfig, TierConfig
from kvarts.sim.replaying import replay

from builders.case import ROUTERS, Case, Row
from builders.grouped import assert_same_outcome
from builders.laws import assert_as_in_naive, assert_fast_as_slow, assert_tokens_counted_once
from builders.outcome import run_kvarts
from builders.tiered import BYTES_PER_TOKEN, Tiered, exchanges, naive_settings, tiered
from builders.tiers import offloader_of
from oracles.naive import NaiveRequest, run_naive
from oracles.naive_offload import NaiveOffloadEngine

pytestmark = pytest.mark.laws


def run_naive_offload(tiers: Tiered) -> tuple[list[NaiveRequest], list[NaiveOffloadEngine]]:
    case = tiers.case
    requests = case.naive_requests()
    engines = [NaiveOffloadEngine(**naive_settings(tiers)) for _ in range(case.replicas)]
    run_naive(requests, engines)
    return requests, engines


FAST: dict[str, Any] = {"read": 1_000_000_000, "write": 1_000_000_000, "latency_us": 0.0}
SPILL_THAT_EVICTS = Tiered(
    Case(
        [
            Row(0, units, num_prompt, num_output, None, priority, tenant)
            for units, num_prompt, num_output, priority, tenant in (
                ([0, 2, 0, 2, 3, 0, 3, 3], 15, 39, 1, "a"),
                ([0, 0, 0, 0, 0, 3, 1, 2, 2], 18, 24, 0, None),
                ([0, 2, 0, 2, 3], 10, 33, 0, None),
                ([0, 2, 1, 2, 1, 0, 2, 1, 1, 0, 1, 2], 23, 15, 0, None),
                ([0, 2, 1, 2, 1, 0, 2, 1, 1, 0, 1, 2], 24, 16, 1, None),
                ([0, 2, 0, 2, 2, 2, 3, 2], 16, 38, -1, None),
            )
        ],
        2, 3, 19, 64, 8, "default", 1, watermark=0.1,
    ),
    OffloadConfig(
        tiers=(
            TierConfig(name="host", pages=1, **FAST), TierConfig(name="cxl", pages=4, **FAST),
            TierConfig(name="disk", kind="files", pages=5, **FAST),
        ),
        policy="eager", target_free=0, kv_bytes_per_token=BYTES_PER_TOKEN, store_within_ms=20.0, fail_every=5,
    ),
)  # fmt: skip
"""What spills from host memory evicts a page between the tiers, and the files lose at once what follows it."""


@example(SPILL_THAT_EVICTS)
@given(st.booleans().flatmap(lambda limits: tiered(max_requests=12, limits=limits, all_loads=True, lists=True)))
def test_everything_is_as_in_the_naive_engine(tiers: Tiered) -> None:
    """L1 to L4, L7, L8: requests, steps, evictions and transfers, in every tier."""
    assert_offload_as_in_naive(tiers)


@given(exchanges())
def test_what_loads_evict_is_stored_as_in_the_naive_engine(tiers: Tiered) -> None:
    assert_offload_as_in_naive(tiers)


def assert_offload_as_in_naive(tiers: Tiered) -> None:
    requests, naive_engines = run_naive_offload(tiers)
    case = tiers.case
    outcome = run_kvarts(case, offload=tiers.offload)
    assert_as_in_naive(case, outcome, requests, naive_engines)
    columns = outcome.requests.columns
    names = list(tiers.offload.sizes(case.page_size))
    num_tiers = len(names)
    for index, request in enumerate(requests):
        if request.rejected:
            continue
        assert request.replica is not None
        below = naive_engines[request.replica].below_tokens.get(request.seq, [])
        told = [columns[f"{name}_tokens"][index] for name in names]
        assert told == (below or [0] * num_tiers), "tokens hit below"
    for index, naive in enumerate(naive_engines):
        steps = outcome.steps[index].columns
        for place, tier in enumerate(names):
            assert steps[f"{tier}_used"].tolist() == [count[place][0] for count in naive.counts]
            assert steps[f"{tier}_cached"].tolist() == [count[place][1] for count in naive.counts]
        offloader = offloader_of(outcome.engines[index])
        page_bytes = BYTES_PER_TOKEN * case.page_size
        for channel in offloader.channels:
            assert channel.num_bytes // page_bytes == naive.lane_pages[channel.name], channel.name
        for tier_index, naive_tier in enumerate(naive.tiers):
            assert offloader.tiers[tier_index].num_evicted_blocks == len(naive_tier.evicted)
            assert offloader.tiers[tier_index].num_used_blocks == 0, "L2: at rest nothing is held"


@given(st.one_of(exchanges(), tiered(max_requests=24, all_loads=True, lists=True)))
def test_fast_forward_equals_step_by_step(tiers: Tiered) -> None:
    """L5, with tiers: the same bytes, whatever is looked at."""
    assert_fast_as_slow(tiers.case, offload=tiers.offload)


@given(tiered(cancels=True, limits=True, all_loads=True, lists=True), st.sampled_from([None, 3.0, 10.0]))
def test_fast_forward_equals_step_by_step_with_every_limit_of_a_step(tiers: Tiered, max_itl_ms: float | None) -> None:
    """L5, audited, with tiers; a bound of latency is of the default profile."""
    tiers.case.profile = "default"
    assert_fast_as_slow(tiers.case, offload=tiers.offload, max_itl_ms=max_itl_ms, audit=True)


@given(tiered(cancels=True, limits=True, all_loads=True, lists=True))
def test_a_run_that_nobody_watches_is_the_same(tiers: Tiered) -> None:
    """Without events, what a store reads is held only when its request lets go of it."""
    case = tiers.case
    watched, alone = (
        replay(case.trace(), case.config(offload=tiers.offload, audit=is_watched)) for is_watched in (True, False)
    )
    assert watched.requests_jsonl() == alone.requests_jsonl()
    for name, column in watched.steps.items():
        assert column.tobytes() == alone.steps[name].tobytes(), name


@given(tiered(all_loads=True, lists=True))
def test_every_token_is_counted_once(tiers: Tiered) -> None:
    """L7: computed, hit on the device, hit below, or computed again."""
    tiers.case.profile = "default"
    outcome = run_kvarts(tiers.case, offload=tiers.offload)
    assert_tokens_counted_once(outcome)
    rows = outcome.requests.columns
    below = sum(rows[f"{name}_tokens"] for name in tiers.offload.sizes(tiers.case.page_size))
    assert (below <= rows["cached_tokens"]).all()


@given(tiered(max_requests=30), st.integers(1, 6), st.sampled_from([1, 2, 3]), st.sampled_from(ROUTERS))
def test_a_closed_loop_over_replicas_is_the_same_step_by_step(
    tiers: Tiered, concurrency: int, replicas: int, router: str
) -> None:
    """L5, where engines wait for each other, and some of them for transfers."""
    changes: dict[str, Any] = {
        "offload": tiers.offload,
        "concurrency": concurrency,
        "replicas": replicas,
        "router": router,
    }
    fast, slow = (
        replay(tiers.case.trace(), tiers.case.config(step_by_step=slowly, **changes)) for slowly in (False, True)
    )
    assert_same_outcome(fast, slow)


@given(tiered(max_requests=24, cancels=True), st.sampled_from([None, 0.02]), st.integers(0, 1))
def test_with_cancellations_fast_forward_equals_step_by_step(
    tiers: Tiered, timeout_s: float | None, retries: int
) -> None:
    """L1, L2, L5, L8, with tiers: nothing is held at rest, whatever was under way when a client gave up."""
    changes: dict[str, Any] = {
        "offload": tiers.offload,
        "client_timeout_s": timeout_s,
        "retries": 0 if timeout_s is None else retries,
    }
    assert_fast_as_slow(tiers.case, **changes)
    for engine in run_kvarts(tiers.case, **changes).engines:
        assert engine.scheduler.cache.num_used == 0
        assert all(tier.num_used_blocks == 0 for tier in offloader_of(engine).tiers)

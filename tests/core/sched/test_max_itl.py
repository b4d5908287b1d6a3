"""A bound on inter-token latency: chunks of prompts are cut so that steps with decodes keep it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.errors import ConfigError
from kvarts.core.config import EngineConfig
from kvarts.core.executor import CostModel
from kvarts.core.sched.plan import Batch, Chunk
from kvarts.core.tiers.config import OffloadConfig
from kvarts.cost.polynomial import CallableCost, LinearCost
from kvarts.cost.simulated import SimExecutor
from kvarts.sim.arrivals import Arrivals
from kvarts.sim.config import ReplayConfig
from kvarts.sim.driver import Driver
from kvarts.sim.replaying import replay
from kvarts.sim.replica import Replica
from kvarts.sim.report.requests import RequestLog
from kvarts.sim.router import RoundRobin
from kvarts.sim.traffic.workload import FixedLength, Workload

from builders.case import Case, cases
from builders.engines import make_replica
from builders.outcome import Outcome, run_kvarts

pytestmark = pytest.mark.laws

LINEAR = LinearCost(step_ms=1.0, chunk_token_ms=1.0, decode_ms=0.25, context_token_ms=0.01)


def attended_ms(batch: Batch) -> float:
    """A cost for which late tokens of a prompt cost more than early ones."""
    chunks = sum(chunk.num_tokens * (2.0 + chunk.start + chunk.num_tokens / 2.0) for chunk in batch.chunks)
    return 1.0 + 0.05 * chunks + 0.3 * len(batch.chunks) + 0.2 * batch.num_decodes


COSTS: dict[str, CostModel] = {"linear": LINEAR, "attention": CallableCost(attended_ms)}


class Seen(SimExecutor):
    """Keeps what every step computed."""

    def __init__(self, cost: CostModel) -> None:
        super().__init__(cost)
        self.batches: list[Batch] = []
        self.batch_ns = self._seen_ns
        self._cost = cost

    def _seen_ns(self, batch: Batch) -> int:
        self.batches.append(batch)
        return self._cost.step_ns(batch)


def batches_of(case: Case, cost: CostModel, most_ms: float | None, offload: Any = None) -> tuple[list[Batch], Any]:
    """Every step of a case, one by one, and the log of its requests."""
    config = case.config(max_itl_ms=most_ms)
    executors = [Seen(cost) for _ in range(config.replicas)]
    engines: list[Replica] = [
        make_replica(config, one, step_by_step=True, audit=True, step_ns=cost.step_ns, offload=offload)
        for one in executors
    ]
    trace = case.trace()
    tiers = {} if offload is None else offload.sizes(config.page_size)
    requests = RequestLog(largest_hit_counts=False, tiers=tiers)
    Driver([Arrivals(trace, config.source(trace), RoundRobin(len(engines)), engines, requests)], engines).run()
    return [batch for one in executors for batch in one.batches], requests


def longer_by_one(batch: Batch) -> Batch:
    *others, last = batch.chunks
    more = Chunk(last.start, last.num_tokens + 1, last.num_prompt_tokens, last.num_known_tokens)
    return Batch((*others, more), batch.num_decodes, batch.decode_known_tokens, batch.pool_tokens)


@pytest.mark.parametrize("of", COSTS)
@pytest.mark.parametrize("has_tier", [False, True])
@given(case=cases(cancels=True), most_ms=st.sampled_from([1.5, 3.0, 6.0, 20.0]))
def test_steps_with_decodes_keep_the_bound_and_use_it(of: str, has_tier: bool, case: Case, most_ms: float) -> None:
    """A step keeps the bound, or computes one chunk of a page at most; and a chunk is cut no shorter than needed."""
    case.profile, cost = "default", COSTS[of]
    batches, requests = batches_of(case, cost, most_ms, OffloadConfig(host_pages=8) if has_tier else None)
    for batch in batches:
        if not batch.num_decodes or not batch.chunks:
            continue
        is_least = len(batch.chunks) == 1 and batch.chunks[0].num_tokens <= case.page_size
        assert cost.step_ns(batch) <= most_ms * 1e6 or is_least
        if not batch.chunks[-1].is_last and batch.num_tokens < case.max_num_batched_tokens:
            assert cost.step_ns(longer_by_one(batch)) > most_ms * 1e6
    for name in ("status", "output_tokens"):
        if all(row.cancel_after_ms is None for row in case.rows):
            assert list(requests.columns[name]) == list(batches_of(case, cost, None)[1].columns[name])


def told(outcome: Outcome) -> Any:
    """All steps and requests."""
    every = [*(log.columns for log in outcome.steps), outcome.requests.columns]
    return [{name: list(column) for name, column in columns.items()} for columns in every]


@given(cases(cancels=True), st.sampled_from([2.0, 20.0, 60.0]))
def test_leaps_change_nothing(case: Case, most_ms: float) -> None:
    case.profile = "default"
    fast, slow = (
        run_kvarts(case, cost=LINEAR, max_itl_ms=most_ms, step_by_step=step_by_step) for step_by_step in (False, True)
    )
    assert told(fast) == told(slow)


@given(cases())
def test_a_bound_that_nothing_reaches_changes_nothing(case: Case) -> None:
    case.profile = "default"
    assert told(run_kvarts(case, cost=LINEAR, max_itl_ms=1e6)) == told(run_kvarts(case, cost=LINEAR))


def test_a_replay_with_a_bound() -> None:
    """Tokens come evenly at the price of a later first one."""
    traffic = Workload(
        num_sessions=60, sessions_per_s=4.0, new_tokens=FixedLength(4000), output_tokens=FixedLength(100)
    )
    cost = LinearCost(step_ms=5.0, chunk_token_ms=0.02, decode_ms=0.1)
    plain, bound = (replay(traffic, ReplayConfig(cost=cost, max_itl_ms=most)) for most in (None, 20.0))
    assert plain.summary["itl_ms"]["p99"] > 30 > 20 >= bound.summary["itl_ms"]["p99"]
    assert bound.summary["ttft_ms"]["mean"] > plain.summary["ttft_ms"]["mean"]


def test_what_has_no_cost_model_refuses_a_bound() -> None:
    with pytest.raises(ConfigError, match="max_itl_ms"):
        make_replica(EngineConfig(max_itl_ms=5.0))
    with pytest.raises(ConfigError, match="max_itl_ms"):
        EngineConfig(max_itl_ms=0.0)

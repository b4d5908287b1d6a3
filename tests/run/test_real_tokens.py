"""L6: with a model that really reads its pages, the output is that of an undisturbed run, whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.config import EngineConfig
from kvarts.core.sched.plan import StepPlan, StepResult

from builders.serving import Arrival, assert_undisturbed, output_of, serve, served
from builders.toy_model import NUM_TOKEN_IDS, ToyExecutor, generate

pytestmark = pytest.mark.laws


@given(served())
def test_outputs_equal_an_undisturbed_run(case: tuple[list[Arrival], EngineConfig]) -> None:
    """L6, L1 to L3 and L8, under prefix hits, chunking, eviction, preemption and cancellation."""
    arrivals, config = case
    executor = ToyExecutor(config.num_pages, config.page_size, config.max_num_seqs)
    _, requests, cancelled = serve(arrivals, config, executor)
    assert_undisturbed(arrivals, requests, cancelled)


@given(served(), st.integers(0, NUM_TOKEN_IDS - 1))
def test_a_sampled_stop_token_ends_a_sequence(case: tuple[list[Arrival], EngineConfig], stop_token: int) -> None:
    arrivals, config = case
    executor = ToyExecutor(config.num_pages, config.page_size, config.max_num_seqs, stop_token=stop_token)
    _, requests, cancelled = serve(arrivals, config, executor)
    for request, arrival in zip(requests, arrivals, strict=True):
        if request.index not in cancelled:
            whole = generate(arrival.prompt, arrival.num_output)
            end = whole.index(stop_token) + 1 if stop_token in whole else len(whole)
            assert output_of(request) == whole[:end]


def crowded() -> tuple[list[Arrival], EngineConfig]:
    """Shared prefixes, chunks, a pool for two of six requests: hits, evictions and preemptions all happen."""
    shared = [1, 2, 3, 4, 5, 6, 0, 1, 2]
    arrivals = [Arrival(2 * i, [*shared, i % 3], 20, 0, None) for i in range(6)]
    return arrivals, EngineConfig(num_pages=18, page_size=2, max_num_batched_tokens=8, max_num_seqs=4)


def test_the_crowded_run_meets_everything() -> None:
    arrivals, config = crowded()
    executor = ToyExecutor(config.num_pages, config.page_size, config.max_num_seqs)
    engine, requests, _ = serve(arrivals, config, executor)
    assert any(request.num_preemptions for request in requests)
    assert any(request.cached_tokens for request in requests)
    assert any(request.recomputed_tokens for request in requests)
    assert engine.scheduler.cache.num_evicted
    assert [output_of(request) for request in requests] == [generate(a.prompt, 20) for a in arrivals]


class Damaged(ToyExecutor):
    """Reads one page id wrongly, once."""

    damage_step = 9

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.step == self.damage_step and plan.decodes is not None:
            row = int(plan.decodes.rows[0])
            self.tables[row][0] = (self.tables[row][0] + 1) % (self.kv.shape[1] // self.page_size)
        return super().execute(plan)


def test_one_wrong_page_id_changes_the_output() -> None:
    """The negative control of L6."""
    arrivals, config = crowded()
    executor = Damaged(config.num_pages, config.page_size, config.max_num_seqs)
    _, requests, _ = serve(arrivals, config, executor)
    assert [output_of(request) for request in requests] != [generate(a.prompt, 20) for a in arrivals]


@pytest.mark.parametrize("num_requests", [1, 5])
def test_cancelling_everything_leaves_no_page_in_use(num_requests: int) -> None:
    config = EngineConfig(num_pages=64, page_size=2, max_num_batched_tokens=8, max_num_seqs=4)
    arrivals = [Arrival(0, [1, 2, 3, 4, 5], 30, 0, 3) for _ in range(num_requests)]
    engine, _, cancelled = serve(arrivals, config, ToyExecutor(64, 2, 4))
    assert len(cancelled) == num_requests
    assert engine.scheduler.cache.num_used == 0

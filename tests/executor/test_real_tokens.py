"""L6: with a model that really reads its pages, the output is that of an undisturbed run, whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.build import build_engine
from kvarts.config import EngineConfig
from kvarts.content import Content
from kvarts.engine import Engine
from kvarts.event_log import EventReader
from kvarts.request import Request
from kvarts.sched.plan import StepPlan, StepResult

from builders.toy_model import NUM_TOKEN_IDS, ToyExecutor, generate

pytestmark = pytest.mark.laws


@dataclass
class Arrival:
    step: int
    prompt: list[int]
    num_output: int
    priority: int
    cancel_at: int | None


def make_request(index: int, arrival: Arrival, page_size: int) -> Request:
    return Request(
        index,
        Content.from_tokens(arrival.prompt, page_size=page_size, owner=index),
        num_prompt_tokens=len(arrival.prompt),
        max_tokens=arrival.num_output,
        priority=arrival.priority,
    )


def serve(
    arrivals: list[Arrival],
    config: EngineConfig,
    executor: Any,
    observers: Sequence[EventReader] = (),
    *,
    between_steps: Callable[[Engine, int], object] = lambda _engine, _step: None,
    **below: Any,
) -> tuple[Engine, list[Request], set[int]]:
    """Runs all arrivals, one step at a time; the laws of page accounting are checked after each."""
    engine = build_engine(config, executor, audit=True, readers=observers, **below)
    requests = [make_request(index, arrival, config.page_size) for index, arrival in enumerate(arrivals)]
    unfinished = set()
    cancelled = set()
    for step in range(10_000):
        for request, arrival in zip(requests, arrivals, strict=True):
            if arrival.step == step and engine.submit(request, step) is None:
                unfinished.add(request.index)
            if arrival.cancel_at == step and request.index in unfinished:
                engine.cancel(request)
                engine.scheduler.check()
                unfinished.remove(request.index)
                cancelled.add(request.index)
        between_steps(engine, step)
        if engine.has_work:
            unfinished -= {request.index for request in engine.step(step)}
        elif all(arrival.step <= step for arrival in arrivals):
            break
    assert not unfinished, "L8: a request never ended"
    assert engine.scheduler.cache.num_used == 0
    return engine, requests, cancelled


def output_of(request: Request) -> list[int]:
    content = request.content
    return content.tokens(request.num_prompt_tokens, content.num_known_tokens).tolist()


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=3)


@st.composite
def served(draw: st.DrawFn) -> tuple[list[Arrival], EngineConfig]:
    page_size = draw(st.sampled_from([1, 2, 3, 4]))
    shared = draw(st.lists(st.integers(0, NUM_TOKEN_IDS - 1), max_size=16))
    arrivals = []
    for _ in range(draw(st.integers(1, 14))):
        step = draw(st.integers(0, 40))
        arrivals.append(
            Arrival(
                step,
                shared[: draw(st.integers(0, len(shared)))] + draw(prompts),
                draw(st.integers(1, 24)),
                draw(st.sampled_from([0, 0, 0, 1])),
                draw(st.none() | st.integers(step, step + 30)),
            )
        )
    most = max(-(-(len(a.prompt) + a.num_output - 1) // page_size) for a in arrivals)
    budget = draw(st.sampled_from([3, 8, 64]))
    return arrivals, EngineConfig(
        num_pages=most + draw(st.integers(0, 12)),
        page_size=page_size,
        max_num_batched_tokens=budget,
        max_num_seqs=min(budget, draw(st.integers(1, 6))),
    )


@given(served())
def test_outputs_equal_an_undisturbed_run(case: tuple[list[Arrival], EngineConfig]) -> None:
    """L6, L1 to L3 and L8, under prefix hits, chunking, eviction, preemption and cancellation."""
    arrivals, config = case
    executor = ToyExecutor(config.num_pages, config.page_size, config.max_num_seqs)
    _, requests, cancelled = serve(arrivals, config, executor)
    assert_undisturbed(arrivals, requests, cancelled)


def assert_undisturbed(arrivals: list[Arrival], requests: list[Request], cancelled: set[int]) -> None:
    """The output of each is that of a run of its own, as far as it was not cancelled."""
    for request, arrival in zip(requests, arrivals, strict=True):
        undisturbed = generate(arrival.prompt, arrival.num_output)
        output = output_of(request)
        if request.index in cancelled:
            assert output == undisturbed[: len(output)]
        else:
            assert output == undisturbed


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

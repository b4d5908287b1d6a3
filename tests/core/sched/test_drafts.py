"""Drafts: whatever is guessed, tokens are those of a run without guesses, and pages are conserved."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.config import EngineConfig
from kvarts.core.engine import Engine
from kvarts.core.events import DraftJudged, DraftTaken, Event, StepDone
from kvarts.core.request import RequestState
from kvarts.core.sched.plan import StepPlan, StepResult

from builders.guesser import Guesser, guessers
from builders.serving import Arrival, assert_undisturbed, output_of, serve, served
from builders.toy_model import NUM_TOKEN_IDS, ToyExecutor, generate

pytestmark = pytest.mark.laws


class Steps:
    """Keeps the events of steps and drafts."""

    wants_details = True

    def __init__(self) -> None:
        self.steps: list[StepDone] = []
        self.taken: list[DraftTaken] = []
        self.judged: list[DraftJudged] = []

    def observe(self, events: Any) -> None:
        for event in events:
            self._add(event)

    def _add(self, event: Event) -> None:
        for kept, kind in ((self.steps, StepDone), (self.taken, DraftTaken), (self.judged, DraftJudged)):
            if isinstance(event, kind):
                kept.append(event)  # type: ignore[arg-type]


def no_more_pages_than_tokens(engine: Engine, _step: int) -> None:
    """Between steps a decode has the pages of its computed tokens: those of rejected ones have gone back."""
    running, size = engine.scheduler.running, engine.config.page_size
    for request in running:
        if request.state is RequestState.DECODING:
            assert request.table is not None
            assert request.table.num_pages == -(-running.num_computed(request) // size)


@given(served(), guessers())
def test_drafts_change_no_token_and_lose_no_page(case: tuple[list[Arrival], EngineConfig], guesser: Guesser) -> None:
    """L1 to L3, L6 and L8 with drafts, under prefix hits, chunks, eviction, preemption and cancels."""
    arrivals, config = case
    executor = ToyExecutor(config.num_pages, config.page_size, config.max_num_seqs)
    steps = Steps()
    _, requests, cancelled = serve(
        arrivals, config, executor, [steps], between_steps=no_more_pages_than_tokens, drafter=guesser
    )
    assert_undisturbed(arrivals, requests, cancelled)
    assert [(e.request, e.num_drafted, e.num_accepted) for e in steps.judged] == guesser.judged
    assert [e.end - e.start for e in steps.taken] == [e.num_drafted for e in steps.judged]
    assert sum(step.num_drafted for step in steps.steps) == sum(e.num_drafted for e in steps.judged)
    assert sum(step.num_accepted for step in steps.steps) == sum(e.num_accepted for e in steps.judged)
    for step in steps.steps:
        assert step.num_tokens <= config.max_num_batched_tokens
        assert step.num_accepted <= step.num_drafted <= step.num_tokens
        assert step.num_used <= config.num_pages
    for request in requests:
        if request.state is RequestState.FINISHED:
            assert request.num_computed == request.num_known - 1


@given(served(), guessers(), st.integers(0, NUM_TOKEN_IDS - 1))
def test_a_stop_token_inside_a_draft_ends_the_sequence_there(
    case: tuple[list[Arrival], EngineConfig], guesser: Guesser, stop_token: int
) -> None:
    arrivals, config = case
    executor = ToyExecutor(config.num_pages, config.page_size, config.max_num_seqs, stop_token=stop_token)
    _, requests, cancelled = serve(arrivals, config, executor, between_steps=no_more_pages_than_tokens, drafter=guesser)
    for request, arrival in zip(requests, arrivals, strict=True):
        if request.index not in cancelled:
            whole = generate(arrival.prompt, arrival.num_output)
            end = whole.index(stop_token) + 1 if stop_token in whole else len(whole)
            assert output_of(request) == whole[:end]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_right_guesses_make_fewer_steps_and_are_all_counted(page_size: int) -> None:
    config = EngineConfig(num_pages=400 // page_size, page_size=page_size, max_num_batched_tokens=64, max_num_seqs=4)
    arrivals = [Arrival(0, [1, 2, 3, index], 60, 0, None) for index in range(3)]
    num_steps = []
    for guesser in (None, Guesser(0, wrong=0.0, most=5)):
        steps = Steps()
        executor = ToyExecutor(config.num_pages, page_size, 4)
        _, requests, _ = serve(arrivals, config, executor, [steps], drafter=guesser)
        assert [output_of(request) for request in requests] == [generate(a.prompt, 60) for a in arrivals]
        num_steps.append(len(steps.steps))
    assert num_steps[1] < num_steps[0] / 2


def test_nothing_is_preempted_for_a_draft() -> None:
    """Two requests that just fit: with drafts they still do."""
    config = EngineConfig(num_pages=12, page_size=2, max_num_batched_tokens=8, max_num_seqs=2)
    arrivals = [Arrival(0, [index, 1], 11, 0, None) for index in range(2)]
    guesser = Guesser(1, wrong=0.7, most=8)
    _, requests, _ = serve(arrivals, config, ToyExecutor(12, 2, 2), drafter=guesser)
    assert guesser.judged
    assert not any(request.num_preemptions for request in requests)
    assert_undisturbed(arrivals, requests, set())


class Hasty(ToyExecutor):
    """Takes one guess more for right than is."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        if plan.drafts is None:
            return result
        row = int(plan.drafts.rows[0])
        count = dict(result.accepted).get(row, 0)
        if count == (plan.drafts.rows == row).sum():
            return result
        accepted = {**dict(result.accepted), row: count + 1}
        return StepResult(result.duration_ns, result.tokens, (), accepted=tuple(accepted.items()))


def test_a_wrong_guess_that_is_accepted_changes_what_is_said() -> None:
    """The control: if this did not matter, the tests above would prove nothing."""
    config = EngineConfig(num_pages=64, page_size=2, max_num_batched_tokens=32, max_num_seqs=2)
    arrivals = [Arrival(0, [1, 2, 3], 20, 0, None)]
    _, requests, _ = serve(arrivals, config, Hasty(64, 2, 2), drafter=Guesser(3, wrong=1.0, most=4, checks=False))
    assert output_of(requests[0]) != generate([1, 2, 3], 20)

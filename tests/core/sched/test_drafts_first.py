"""Drafts that come first, as in vLLM: against a naive engine, and with a toy model whose tokens they may not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvarts.base.errors import ConfigError
from kvarts.core.config import EngineConfig
from kvarts.core.content import Content
from kvarts.core.events import Event, Preemption, StepDone
from kvarts.core.request import Request
from kvarts.core.sched.plan import Batch, StepPlan, StepResult

from builders.engines import engine_with
from builders.guesser import Guesser, guessers
from builders.pages import evicted_names
from builders.serving import Arrival, assert_undisturbed, serve, served
from builders.toy_model import ToyExecutor, Words
from oracles.naive import NaiveRequest
from oracles.naive_drafts import NaiveDraftEngine

pytestmark = pytest.mark.laws

STEP_NS = 1_000
WRONG = 99


@dataclass
class Drafted:
    """Requests, what they generate, and what is drafted after each of their tokens."""

    config: EngineConfig
    num_slots: int
    asks: list[tuple[int, list[int], list[int]]]
    """The step before which each arrives, its prompt, and its output."""
    drafts: list[list[tuple[int, int]]]


@st.composite
def drafted(draw: st.DrawFn) -> Drafted:
    rng = Random(draw(st.integers(0, 1 << 32)))
    page_size = rng.choice([1, 2, 4, 7])
    num_slots = rng.choice([1, 2, 5])
    max_num_seqs = rng.choice([1, 2, 5])
    stem = [rng.randrange(2) for _ in range(20)]
    asks, drafts, step = [], [], 0
    for _ in range(draw(st.integers(1, 10))):
        step += rng.choice([0, 0, 1, 5])
        prompt = stem[: rng.randrange(21)] + [rng.randrange(3) for _ in range(rng.randint(1, 4))]
        output = [rng.randrange(3) for _ in range(rng.randint(1, 25))]
        asks.append((step, prompt, output))
        most = [min(num_slots, len(output) - place - 2) for place in range(len(output))]
        counts = [rng.choice([0, rng.randint(0, max(0, count)), max(0, count)]) for count in most]
        drafts.append([(count, rng.choice([0, rng.randint(0, count), count])) for count in counts])
    most_pages = max(-(-(len(prompt) + len(output)) // page_size) for _, prompt, output in asks)
    config = EngineConfig(
        num_pages=most_pages + rng.choice([0, 1, 4, 20]),
        page_size=page_size,
        max_num_batched_tokens=max_num_seqs * (1 + num_slots) + rng.choice([0, 1, 8, 60]),
        max_num_seqs=max_num_seqs,
    )
    return Drafted(config, num_slots, asks, drafts)


class Sampler:
    """An executor and a drafter of known tokens."""

    needs_page_ids = True

    def __init__(self, case: Drafted) -> None:
        self.case = case
        self.request_of: dict[int, int] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        tokens = np.zeros(self.case.config.max_num_seqs, np.uint64)
        accepted = []
        for chunk in plan.batch.chunks:
            self.request_of[chunk.row] = chunk.request_index
            if chunk.is_last:
                output = self.case.asks[chunk.request_index][2]
                tokens[chunk.row] = output[chunk.num_known_tokens - chunk.num_prompt_tokens]
        if plan.decodes is not None:
            rows = set() if plan.drafts is None else set(plan.drafts.rows.tolist())
            for row, position in zip(plan.decodes.rows.tolist(), plan.decodes.positions.tolist(), strict=True):
                index = self.request_of[row]
                _, prompt, output = self.case.asks[index]
                place = position + 1 - len(prompt)
                num_right = self.case.drafts[index][place - 1][1] if row in rows else 0
                if num_right:
                    accepted.append((row, num_right))
                tokens[row] = output[place + num_right]
        return StepResult(STEP_NS, tokens, accepted=tuple(accepted))

    def draft(self, request: Request, num_most: int, batch: Batch) -> Words:
        _, prompt, output = self.case.asks[request.index]
        place = request.content.num_known_tokens - len(prompt)
        num_drafted, num_right = self.case.drafts[request.index][place - 1]
        assert num_drafted <= num_most
        return np.array(output[place : place + num_right] + [WRONG] * (num_drafted - num_right), np.uint64)

    def judge(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        pass


class Kept:
    wants_details = True

    def __init__(self) -> None:
        self.events: list[Event] = []

    def observe(self, events: Sequence[Event]) -> None:
        self.events += events


def played(case: Drafted) -> tuple[list[Event], list[Request], NaiveDraftEngine, list[NaiveRequest]]:
    """Events and requests of both engines: ours, then the naive one."""
    config, sampler, kept = case.config, Sampler(case), Kept()
    engine = engine_with(config, sampler, audit="laws", readers=[kept], drafter=sampler, num_draft_slots=case.num_slots)
    naive = NaiveDraftEngine(
        num_slots=case.num_slots,
        drafts=lambda seq, made: case.drafts[seq][made - 1],
        num_pages=config.num_pages,
        page_size=config.page_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        profile="default",
        cost=lambda batch, engine: STEP_NS,
    )
    theirs = [
        NaiveRequest(index, 0, tuple(prompt), len(output), tuple(output))
        for index, (_, prompt, output) in enumerate(case.asks)
    ]
    ours: list[Request] = []
    step = 0
    while len(ours) < len(case.asks) or engine.has_work or naive.has_work():
        while len(ours) < len(case.asks) and case.asks[len(ours)][0] <= step:
            index = len(ours)
            _, prompt, output = case.asks[index]
            content = Content.from_tokens(prompt, page_size=config.page_size, owner=index)
            ours.append(Request(index, content, len(prompt), len(output)))
            assert engine.submit(ours[-1], step * STEP_NS) is None
            naive.submit(theirs[index])
        if engine.has_work:
            engine.step(step * STEP_NS)
        if naive.has_work():
            naive.step(step * STEP_NS)
        step += 1
        assert step < 10_000, "L8: a request never ended"
    return kept.events, ours, naive, theirs


FILLED_AGAIN = Drafted(
    EngineConfig(num_pages=5, page_size=1, max_num_batched_tokens=4, max_num_seqs=2),
    num_slots=1,
    asks=[(0, [0, 5], [7]), (1, [0], [5, 0]), (1, [1], [2, 2])],
    drafts=[[(0, 0)], [(0, 0)] * 2, [(0, 0)] * 2],
)
"""A decode fills a page whose content is cached, at its turn; the next one evicts the older copy, and not the last."""


@example(FILLED_AGAIN)
@given(drafted())
def test_every_step_is_as_in_the_naive_engine(case: Drafted) -> None:
    events, ours, naive, theirs = played(case)
    done = [event for event in events if isinstance(event, StepDone)]
    assert [(e.num_used, e.num_cached, e.num_running, e.num_waiting) for e in done] == [
        (e.used, e.cached, e.running, e.waiting) for e in naive.steps
    ]
    preempted = [(e.victim, e.asker) for e in events if isinstance(e, Preemption)]
    assert preempted == [(victim, asker) for victim, asker, _ in naive.preempted]
    assert evicted_names(events) == naive.evicted
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.cached_tokens, mine.num_admissions) == (other.others_hit_tokens, other.admissions)
        assert mine.recomputed_tokens == other.recomputed_tokens
        assert mine.content.num_known_tokens >= mine.num_known - 1


def test_accepted_tokens_that_are_found_again_after_a_preemption_are_no_hits() -> None:
    """The second request finds 3 tokens and computes 7, of which 5 were drafted; then it is preempted, and finds all 10
    in the pages of the first. Only the first 3 are hits of the workload."""
    case = Drafted(
        EngineConfig(num_pages=22, page_size=1, max_num_batched_tokens=12, max_num_seqs=2),
        num_slots=5,
        asks=[(0, list(range(14)), [20, 21, 22]), (0, list(range(4)), list(range(4, 12)))],
        drafts=[[(0, 0)] * 3, [(5, 5), *[(0, 0)] * 7]],
    )
    events, ours, _, theirs = played(case)
    assert [(e.victim, e.asker, e.num_computed_tokens) for e in events if isinstance(e, Preemption)] == [(1, 0, 10)]
    assert [request.num_admissions for request in ours] == [1, 2]
    assert [request.cached_tokens for request in ours] == [0, 3]
    assert [request.others_hit_tokens for request in theirs] == [0, 3]


@given(served(), guessers())
def test_drafts_that_come_first_change_no_token(case: tuple[list[Arrival], EngineConfig], guesser: Guesser) -> None:
    """L1 to L3 and L6: under prefix hits, chunks, eviction, preemption, priorities and cancels."""
    arrivals, config = case
    num_slots = 1 + config.max_num_batched_tokens // config.max_num_seqs // 2
    config = EngineConfig(
        num_pages=config.num_pages,
        page_size=config.page_size,
        max_num_batched_tokens=config.max_num_seqs * (1 + num_slots),
        max_num_seqs=config.max_num_seqs,
    )
    executor = ToyExecutor(config.num_pages, config.page_size, config.max_num_seqs)
    _, requests, cancelled = serve(arrivals, config, executor, drafter=guesser, num_draft_slots=num_slots)
    assert_undisturbed(arrivals, requests, cancelled)


def test_requests_are_preempted_for_drafts() -> None:
    """Two requests that just fit: with drafts that come first, they do not."""
    config = EngineConfig(num_pages=12, page_size=2, max_num_batched_tokens=18, max_num_seqs=2)
    arrivals = [Arrival(0, [index, 1], 11, 0, None) for index in range(2)]
    guesser = Guesser(1, wrong=0.7, most=8)
    _, requests, _ = serve(arrivals, config, ToyExecutor(12, 2, 2), drafter=guesser, num_draft_slots=8)
    assert_undisturbed(arrivals, requests, set())
    assert guesser.judged


def test_a_budget_that_lacks_room_for_drafts_is_refused() -> None:
    config = EngineConfig(num_pages=12, page_size=2, max_num_batched_tokens=8, max_num_seqs=2)
    guesser = Guesser(1, wrong=0.7, most=8)
    with pytest.raises(ConfigError, match="2 sequences with 8 drafted tokens each need up to 18 tokens a step"):
        engine_with(config, ToyExecutor(12, 2, 2), drafter=guesser, num_draft_slots=8)

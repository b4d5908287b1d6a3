"""Drafts with KV groups: whatever is guessed, no token misses a part, and guesses that were wrong give theirs back."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvarts.core.config import EngineConfig
from kvarts.core.kv.group_pages import GroupTable
from kvarts.core.kv.groups import GroupMemory, PartGroup
from kvarts.core.request import Request, RequestState
from kvarts.core.sched.drafts import Drafts
from kvarts.core.sched.plan import Batch, StepPlan, StepResult
from kvarts.core.sched.running import Running

from builders.case import Case, Row, cases
from builders.grouped import naive_settings
from builders.guesser import KNOWING, Knowing
from builders.live_groups import FULL, STATE, STEP_NS, LiveRun, assert_as_naive, live_groups, window, with_outputs
from oracles.naive import run_naive
from oracles.naive_drafts import DraftFn
from oracles.naive_group_drafts import NaiveGroupDraftEngine
from oracles.naive_kv_groups import seen_by

pytestmark = pytest.mark.laws


def run(case: Case, groups: tuple[PartGroup, ...], keeps: Any, drafter: Knowing) -> LiveRun:
    """A case with guesses, and a look at what every decode holds after every step."""
    memory = GroupMemory(groups, keeps)
    config = EngineConfig(**case.sizes)
    num_blocks = memory.num_blocks(case.num_pages)
    live = LiveRun(with_outputs(case.naive_requests()), memory, config, num_blocks, drafter=drafter)
    drafter.tokens = live.tokens

    def look() -> None:
        scheduler = live.engine.scheduler
        scheduler.settle()  # decodes release when the next step begins
        cache = scheduler.cache
        waits = scheduler.wheel.pages_due() * cache.page_blocks > cache.num_free
        for request in live.requests:
            if request.state is not RequestState.DECODING:
                continue
            assert isinstance(request.table, GroupTable)
            num_computed = scheduler.wheel.num_computed(request)
            of_parts = request.table.parts
            for index, group in enumerate(groups):
                parts = {page for run in of_parts.held[index] for page in range(run.start, run.end)}
                parts.update(range(of_parts.first_open[index], of_parts.num_taken))
                # Of its own page it has the part if a token before it is in it.
                before = [*seen_by(group.layer, num_computed), num_computed - num_computed % case.page_size]
                needed = {other // case.page_size for other in before if other < num_computed}
                what = "a decode holds what its next token sees; and what the token before it saw, if memory is short"
                assert needed <= parts if waits else needed == parts, what

    live.run(look)
    return live


@given(case=cases(), groups=live_groups(), keeps=st.sampled_from(["all", "tails"]), drafter=KNOWING)
def test_guesses_take_parts_and_those_that_were_wrong_give_them_back(
    case: Case, groups: tuple[PartGroup, ...], keeps: Any, drafter: Knowing
) -> None:
    """L1 to L3, L6 and L8: under prefix hits, chunks, eviction and preemption; the executor looks at all that is read,
    and a second bookkeeping follows the events."""
    live = run(case, groups, keeps, drafter)
    for request in live.requests:
        if request.state is RequestState.FINISHED:
            assert request.num_computed == request.num_known - 1
            known = request.content.tokens(0, request.num_known).tolist()
            assert known == live.tokens[request.index][1][: request.num_known]
    assert live.engine.scheduler.cache.num_used == 0


def run_first(
    case: Case, groups: tuple[PartGroup, ...], keeps: Any, drafter: Knowing, num_slots: int, threshold: int = 0
) -> LiveRun:
    """A case with guesses that come first, and a look at what every decode holds in every step."""
    memory = GroupMemory(groups, keeps)
    config = EngineConfig(
        num_pages=case.num_pages,
        page_size=case.page_size,
        max_num_batched_tokens=max(case.max_num_batched_tokens, case.max_num_seqs * (1 + num_slots)),
        max_num_seqs=case.max_num_seqs,
        long_prefill_token_threshold=threshold,
    )
    num_blocks = memory.num_blocks(case.num_pages)
    live = LiveRun(
        with_outputs(case.naive_requests()), memory, config, num_blocks, drafter=drafter, num_draft_slots=num_slots
    )
    drafter.tokens = live.tokens
    execute = live.executor.execute

    def look_and_execute(plan: StepPlan) -> StepResult:
        scheduler = live.engine.scheduler
        for request in live.requests:
            if request.state is not RequestState.DECODING or not scheduler.wheel.has(request):
                continue
            assert isinstance(request.table, GroupTable)
            start, of_parts = scheduler.wheel.num_computed(request), request.table.parts
            for index, group in enumerate(groups):
                if group.is_state:
                    continue
                parts = {page for run in of_parts.held[index] for page in range(run.start, run.end)}
                parts.update(range(of_parts.first_open[index], of_parts.num_taken))
                needed = {other // case.page_size for other in seen_by(group.layer, start)}
                assert needed <= parts, "a decode holds what its next token sees"
                if not group.layer.sink:  # else what was passed may be released a turn later
                    passed = {page for page in parts if page < start // case.page_size}
                    assert passed <= needed, "and no page before that"
        return execute(plan)

    live.executor.execute = look_and_execute  # type: ignore[method-assign]
    live.run(live.engine.scheduler.check)
    return live


@given(
    case=cases(),
    groups=live_groups(),
    state=st.sampled_from([0, 0, 1, 3]),
    keeps=st.sampled_from(["all", "tails"]),
    drafter=KNOWING,
    num_slots=st.sampled_from([1, 2, 5]),
    threshold=st.sampled_from([0, 0, 0, 3]),
    sink=st.sampled_from([0, 0, 1, 5]),
)
def test_guesses_that_come_first_take_parts_at_their_turns(
    case: Case,
    groups: tuple[PartGroup, ...],
    state: int,
    keeps: Any,
    drafter: Knowing,
    num_slots: int,
    threshold: int,
    sink: int,
) -> None:
    """L1 to L3, L6 and L8: on memory that is short now and then, with sinks and states."""
    case.num_pages = max(1, case.num_pages * 2 // 3)
    if sink:
        windows = [PartGroup(replace(group.layer, sink=sink), group.part_bytes) for group in groups if group.layer.span]
        groups = (*[group for group in groups if not group.layer.span], *windows)
    groups = (*groups, PartGroup(STATE, state)) if state else groups
    live = run_first(case, groups, keeps, drafter, num_slots, threshold)
    for request in live.requests:
        if request.state is RequestState.FINISHED:
            assert request.num_computed == request.num_known - 1
            known = request.content.tokens(0, request.content.num_known_tokens).tolist()
            assert known == live.tokens[request.index][1][: len(known)]
    assert live.engine.scheduler.cache.num_used == 0


class Planned(Knowing):
    """Guesses so many tokens after each, of which the first so many are right, as `drafts` says of it."""

    def __init__(self, drafts: DraftFn) -> None:
        super().__init__(0, 0.0, 1)
        self.drafts = drafts

    def draft(self, request: Request, num_most: int, batch: Batch) -> npt.NDArray[np.uint64]:
        known = request.content.num_known_tokens
        num_drafted, num_right = self.drafts(request.index, known - request.num_prompt_tokens)
        assert num_drafted <= num_most
        said = self.tokens[request.index][1][known:][:num_drafted]
        return np.array([token + (place >= num_right) for place, token in enumerate(said)], np.uint64)


@given(
    case=cases(max_requests=16),
    groups=live_groups(),
    state=st.sampled_from([0, 0, 1, 3]),
    keeps=st.sampled_from(["all", "tails"]),
    seed=st.integers(0, 1 << 16),
    num_slots=st.sampled_from([1, 2, 5]),
)
def test_every_step_with_guesses_that_come_first_is_as_in_the_naive_engine(
    case: Case, groups: tuple[PartGroup, ...], state: int, keeps: Any, seed: int, num_slots: int
) -> None:
    """L1, L2, L4, L8: used and cached parts of every group at every step, and what requests find."""
    case.num_pages, case.profile = max(1, case.num_pages * 2 // 3), "default"
    for row in case.rows:
        row.priority = 0
    case.max_num_batched_tokens = max(case.max_num_batched_tokens, case.max_num_seqs * (1 + num_slots))
    groups = (*groups, PartGroup(STATE, state)) if state else groups
    requests = list(with_outputs(case.naive_requests()))

    def drafts(seq: int, made: int) -> tuple[int, int]:
        rng = Random(f"{seed} {seq} {made}")
        num_most = max(0, min(num_slots, requests[seq].num_output - made - 1))
        num_drafted = rng.choice([0, rng.randint(0, num_most), num_most])
        return num_drafted, rng.choice([0, rng.randint(0, num_drafted), num_drafted])

    live = run_first(case, groups, keeps, Planned(drafts), num_slots)
    naive = NaiveGroupDraftEngine(
        **naive_settings(case, groups, keeps), num_slots=num_slots, drafts=drafts, cost=lambda batch, engine: STEP_NS
    )
    run_naive(requests, [naive])
    assert_as_naive(live, requests, naive, GroupMemory(groups).block_bytes)


CASE = Case([Row(0, [1, 2, 3, 4, 5], 5, 40, None, 0, None)], 1, 2, 60, 16, 4, "default", 1)


def test_guesses_that_are_right_save_steps() -> None:
    groups = (PartGroup(FULL, 1), PartGroup(window(5), 2))
    steps = {}
    for most in (0, 5):
        drafter = Knowing(1, 0.0, most)
        steps[most] = len(run(CASE, groups, "all", drafter).steps.done)
    assert drafter.num_accepted == drafter.num_drafted > 20
    assert steps[5] < steps[0] / 2


@pytest.mark.parametrize("groups", [(PartGroup(FULL, 1),), (PartGroup(FULL, 1), PartGroup(window(2), 1))])
def test_a_request_beside_which_nothing_runs_takes_no_room_for_a_draft_that_memory_lacks(
    groups: tuple[PartGroup, ...],
) -> None:
    """L8: the second finds all but the last token of the first, and would wait for ever."""
    prompt = [1, 2, 3, 4, 5]
    case = Case([Row(at_ms, prompt, 5, 1, None, 0, None) for at_ms in (0, 100)], 1, 1, 5, 16, 1, "default", 1)
    live = run_first(case, groups, "all", Knowing(1, 0.0, 3), 3)
    assert [request.state for request in live.requests] == [RequestState.FINISHED] * 2
    assert live.requests[1].cached_tokens == 4


def test_a_window_that_believes_a_guess_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what a guess would no longer see goes back before it is known to be right."""
    take = Drafts._take_pages

    def take_and_believe(self: Drafts, request: Request, table: Any, start: int, end: int) -> None:
        take(self, request, table, start, end)
        self._cache.free_skipped(table, end)
        self._cache.count()

    monkeypatch.setattr(Drafts, "_take_pages", take_and_believe)
    with pytest.raises(Exception, match=r"(next|later) token sees"):
        run(CASE, (PartGroup(FULL, 1), PartGroup(window(5), 2)), "tails", Knowing(1, 0.7, 5))


def test_a_window_that_believes_a_guess_that_comes_first_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: at its turn a decode gives back what its draft, and not its next token, no longer sees."""
    settle = Running.settle

    def settle_and_believe(self: Running, request: Request, start: int) -> None:
        settle(self, request, start + (request.state is RequestState.DECODING))

    monkeypatch.setattr(Running, "settle", settle_and_believe)
    with pytest.raises(Exception, match=r"(next|later) token sees"):
        run_first(CASE, (PartGroup(FULL, 1), PartGroup(window(5), 2)), "tails", Knowing(1, 0.7, 5), 5)

"""The wheel, the queues, and what a plan says."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, count
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.errors import ConfigError
from kvarts.core.config import EngineConfig
from kvarts.core.content import Content
from kvarts.core.events import Blocked
from kvarts.core.kv.group_pages import GroupPages
from kvarts.core.kv.groups import GroupMemory, PartGroup
from kvarts.core.request import Request, RequestState
from kvarts.core.sched.policy import PriorityPolicy, WaitingQueue
from kvarts.core.sched.running import RunningOrder
from kvarts.core.sched.scheduler import Scheduler
from kvarts.core.sched.wheel import DecodeWheel
from kvarts.cost.polynomial import PolynomialCost
from kvarts.cost.simulated import SimExecutor

from builders.engines import engine_with, make_replica, make_scheduler, request_of
from builders.engines import run as run_engine
from builders.grouped import FULL, WINDOW


def request(index: int, num_prompt: int = 4, num_output: int = 4, *, priority: int = 0, page_size: int = 4) -> Request:
    content = Content.from_tokens([index] * num_prompt, page_size=page_size, owner=index)
    return Request(index, content, num_prompt_tokens=num_prompt, max_tokens=num_output, priority=priority)


def decoding(index: int, num_computed: int, num_left: int) -> Request:
    made = request(index, num_computed, num_left + 1)
    made.num_computed, made.num_output_tokens, made.admission = num_computed, 1, index
    return made


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 5)), min_size=1, max_size=8),
    st.lists(st.integers(1, 7), max_size=6),
)
def test_the_wheel_knows_pages_and_ends(page_size: int, joins: list[tuple[int, int, int]], turns: list[int]) -> None:
    """Against requests counted one by one."""
    wheel = DecodeWheel(page_size)
    left: dict[int, tuple[Request, int, int]] = {}
    for index, (num_computed, num_left, _) in enumerate(joins):
        made = decoding(index, num_computed, num_left)
        wheel.join(made)
        left[index] = (made, num_computed, num_left)
    for turn in turns:
        if not left:
            break
        num_steps = min(turn, wheel.steps_to_finish())
        assert wheel.steps_to_finish() == min(num_left for _, _, num_left in left.values())
        due = [sum((computed + step) % page_size == 0 for _, computed, _ in left.values()) for step in range(num_steps)]
        assert wheel.pages_due_by_step(num_steps) == due
        for num_pages in range(sum(due) + 2):
            assert wheel.steps_within(num_pages, num_steps) == bisect_right(list(accumulate(due)), num_pages)
        by_slot = wheel.pages_due_in(num_steps)
        assert (len(by_slot), list(by_slot), by_slot.total) == (num_steps, due, sum(due))
        assert wheel.pages_due() == due[0]
        assert wheel.known_tokens == sum(computed + 1 for _, computed, _ in left.values())
        stops = [wheel.step + num_left - 1 for _, _, num_left in left.values()]
        assert wheel.stop_sum == sum(stops) and wheel.last_stop >= max(stops)
        needing = [index for index, (_, computed, _) in left.items() if computed % page_size == 0]
        assert [made.index for made in wheel.needing_page()] == needing
        finished = wheel.turn(num_steps)
        left = {
            index: (made, computed + num_steps, num_left - num_steps)
            for index, (made, computed, num_left) in left.items()
        }
        ended = [index for index, (_, _, num_left) in left.items() if num_left == 0]
        assert [made.index for made in finished] == ended
        for index in ended:
            made, computed, _ = left.pop(index)
            assert made.num_computed == computed
            assert made.num_output_tokens == made.max_tokens


def test_a_request_that_left_early_never_finishes() -> None:
    wheel = DecodeWheel(4)
    first, second = decoding(0, 5, 2), decoding(1, 5, 3)
    wheel.join(first)
    wheel.join(second)
    assert wheel.turn(1) == []
    wheel.leave(first)
    assert (first.num_computed, first.num_output_tokens) == (6, 2)
    assert wheel.steps_to_finish() == 2
    assert wheel.turn(2) == [second]


def test_waiting_is_by_priority_then_preempted_then_arrival() -> None:
    queue = WaitingQueue(PriorityPolicy())
    low, first, second, high = (request(i, priority=p) for i, p in enumerate([-1, 0, 0, 5]))
    order = []
    for each in (low, first, second, high):
        queue.push(each)
    preempted = request(9)
    for state in (RequestState.WAITING, RequestState.PREFILLING, RequestState.PREEMPTED):
        preempted.become(state)
    queue.push(preempted)
    assert list(queue) == [high, preempted, first, second, low]
    queue.remove(first)
    while queue.num_waiting:
        order.append(queue.head(0))
        queue.remove(order[-1])
    assert order == [high, preempted, second, low]
    assert queue.num_waiting == queue.num_waiting_tokens == 0


def test_the_victim_is_the_last_admitted_of_the_lowest_priority() -> None:
    running = RunningOrder()
    requests = [request(i, priority=p) for i, p in enumerate([0, -1, -1, 3])]
    for admission, each in enumerate(requests):
        each.admission = each.seniority = admission
        running.add(each)
    assert victims_of(running) == [2, 1, 0, 3]


def test_a_request_that_was_loaded_is_senior_to_those_admitted_meanwhile() -> None:
    running = RunningOrder()
    for index, seniority in enumerate([0, 2, 3, 1]):
        each = request(index)
        each.admission, each.seniority = index, seniority
        running.add(each)
        assert running.is_in_order == (index < 3 and seniority >= index)
    assert victims_of(running) == [2, 1, 3, 0]


def victims_of(running: RunningOrder) -> list[int]:
    victims = []
    while running.num_running:
        victims.append(running.victim())
        running.remove(victims[-1])
    return [victim.index for victim in victims]


def run(scheduler: Scheduler, steps: int) -> None:
    for step in range(steps):
        scheduler.schedule(step)
        scheduler.commit(step + 1)
        scheduler.check()


def test_what_can_never_fit_is_rejected_with_the_numbers() -> None:
    scheduler = make_scheduler(EngineConfig(num_pages=3, page_size=4))
    reason = scheduler.add(request(0, 10, 4))
    assert reason == "needs 4 pages of 4 tokens for 10 prompt and 4 output tokens; the pool has 3"
    assert scheduler.add(request(1, 9, 4)) is None, "the last token is never computed"


def test_a_shortage_preempts_and_says_who_asked_and_what_was_lost() -> None:
    scheduler = make_scheduler(EngineConfig(num_pages=4, page_size=4))
    first, second = request(0, 6, 9), request(1, 6, 9)
    scheduler.add(first)
    scheduler.add(second)
    run(scheduler, 3)
    plan = scheduler.schedule(3)
    (preemption,) = plan.preemptions
    assert (preemption.victim, preemption.asker) == (1, 0)
    assert preemption.num_computed_tokens == 8
    assert (preemption.num_pages_short, preemption.num_used_pages) == (1, 4)
    assert plan.admitted == ()
    scheduler.commit(4)
    assert second.num_preemptions == 1
    assert scheduler.waiting.head(4) is second


def test_a_more_important_request_preempts_a_less_important_one_and_never_the_reverse() -> None:
    scheduler = make_scheduler(EngineConfig(num_pages=4, page_size=4))
    low, high = request(0, 6, 9, priority=0), request(1, 6, 9, priority=1)
    scheduler.add(low)
    run(scheduler, 1)
    scheduler.add(high)
    run(scheduler, 25)
    assert low.num_preemptions > 0
    assert high.num_preemptions == 0
    assert low.last_token_ns > high.last_token_ns


def test_the_horizon_ends_before_a_page_is_missing() -> None:
    scheduler = make_scheduler(EngineConfig(num_pages=4, page_size=4))
    for index in range(2):
        scheduler.add(request(index, 6, 9))
    run(scheduler, 1)
    assert scheduler.horizon(3) == 2
    assert list(scheduler.advance(2).taken) == [0, 0]
    assert scheduler.commit_many(2, 3) == []
    assert scheduler.horizon(3) == 0


@pytest.mark.parametrize(
    ("config", "blocked"),
    [
        (EngineConfig(num_pages=4, page_size=4), Blocked.PAGES),
        (EngineConfig(num_pages=64, page_size=4, max_num_seqs=1), Blocked.SEQS),
        (EngineConfig(num_pages=64, page_size=4, max_num_batched_tokens=8, max_num_seqs=8), Blocked.BUDGET),
    ],
)
def test_the_scheduler_says_why_the_head_waits(config: EngineConfig, blocked: Blocked) -> None:
    scheduler = make_scheduler(config)
    for index in range(2):
        scheduler.add(request(index, 9, 2))
    scheduler.schedule(0)
    assert scheduler.blocked is blocked


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_pages", 0),
        ("page_size", 0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", -1),
        ("profile", "best"),
        ("long_prefill_token_threshold", -1),
        ("prefill_schedule_interval", 0),
        ("watermark", 1.5),
    ],
)
def test_a_bad_setting_is_refused_where_it_is_built(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match="must be"):
        EngineConfig(**{field: value})  # type: ignore[arg-type]


def test_more_sequences_than_tokens_are_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(max_num_batched_tokens=64)
    assert "set max_num_seqs to 64 or less" in str(caught.value)


def test_an_engine_at_rest_is_examined_whole_also_with_windows() -> None:
    """Its last decode has left what the end of its last step would release: nothing is left to wait for."""
    memory = GroupMemory((PartGroup(FULL, 2), WINDOW), "all")
    replica = make_replica(EngineConfig(num_pages=20, page_size=4), memory=memory)
    run_engine(replica, request_of(0, range(40), max_tokens=10))
    scheduler = replica.scheduler
    assert scheduler.cache.decodes is not None and not scheduler.has_work
    scheduler.check()
    cast(GroupPages, scheduler.cache).num_promised += 1
    with pytest.raises(AssertionError, match="L1"):
        scheduler.check()


def test_a_head_that_lacks_memory_needs_less_once_a_reservation_shares_what_it_hits() -> None:
    config = EngineConfig(num_pages=20, page_size=1, max_num_seqs=8, max_num_batched_tokens=64)
    engine = engine_with(config, SimExecutor(PolynomialCost()), hands_over=True)
    scheduler = engine.scheduler
    steps = count()

    def asking(index: int, tokens: Sequence[int], max_tokens: int) -> Request:
        content = Content.from_tokens(list(tokens), page_size=1, owner=index)
        return Request(index, content, num_prompt_tokens=len(tokens), max_tokens=max_tokens, arrival_ns=0)

    def step() -> None:
        scheduler.schedule(next(steps))
        scheduler.commit(next(steps))

    prompt = range(100, 108)
    assert scheduler.add(asking(0, prompt, 1)) is None
    step()  # its pages are cached
    assert scheduler.add(asking(1, range(1, 10), 4)) is None
    step()
    head = asking(2, [*prompt, *range(200, 208)], 1)
    assert scheduler.add(head) is None
    step()
    assert scheduler.handoffs is not None and head.state.name == "WAITING"
    assert scheduler.handoffs.reserve(asking(3, prompt, 4), next(steps))
    for _ in range(4):
        step()
    assert head.state is RequestState.FINISHED

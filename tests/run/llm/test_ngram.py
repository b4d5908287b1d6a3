"""Guesses by n-grams: where they come from, and how many are worth it. Needs no PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.content import Content
from kvarts.core.request import Request
from kvarts.core.sched.plan import Batch
from kvarts.run.speculation import (
    NgramDrafter,
    SpeculativeConfig,
    TimesByTokens,
    find_ngram,
    num_to_try,
    num_worthwhile,
)

pytestmark = pytest.mark.laws


def naive(tokens: list[int], least: int, most: int) -> tuple[int, int] | None:
    """Every n-gram, the longest first, looked for from the back."""
    for count in range(min(most, len(tokens)), least - 1, -1):
        last = tokens[len(tokens) - count :]
        for start in range(len(tokens) - count - 1, -1, -1):
            if tokens[start : start + count] == last:
                return start + count, count
    return None


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=30) | st.lists(st.integers(0, 1), min_size=1, max_size=30),
    least=st.integers(1, 4),
    more=st.integers(0, 5),
)
def test_the_longest_n_gram_is_found_where_it_was_last(tokens: list[int], least: int, more: int) -> None:
    assert find_ngram(np.array(tokens, np.uint64), least, least + more) == naive(tokens, least, least + more)


@given(
    rate=st.floats(0.0, 1.0),
    gain=st.floats(0.01, 1.0),
    steps=st.lists(st.floats(0.0, 0.5), min_size=1, max_size=20),
)
def test_as_many_are_worth_it_as_bring_the_most(rate: float, gain: float, steps: list[float]) -> None:
    costs = np.cumsum(steps)
    worth = [0.0] + [
        gain * sum(rate**place for place in range(1, count + 1)) - costs[count - 1]
        for count in range(1, len(steps) + 1)
    ]
    assert worth[num_worthwhile(rate, gain, costs)] == pytest.approx(max(worth), abs=1e-9)
    tried = num_to_try(gain, costs)
    assert not tried or gain * tried > costs[tried - 1]


def test_a_step_of_more_tokens_takes_as_long_as_was_measured() -> None:
    times = TimesByTokens([(1, 0.1), (2, 0.2), (8, 0.2), (16, 0.36)])
    assert times.beyond(1, 3).tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert times.beyond(8, 16)[[7, 15]].tolist() == pytest.approx([0.8, 1.6])
    assert times.beyond(16, 16)[-1] == pytest.approx(0.32 / 0.36)
    assert (
        TimesByTokens([(1, 0.0), (2, 0.0)]).beyond(0, 1).tolist() == TimesByTokens().beyond(0, 1).tolist() == [1 / 16]
    )


def request_of(tokens: list[int], index: int = 0, row: int = 0) -> Request:
    content = Content.from_tokens(tokens, page_size=16, owner=index)
    request = Request(index, content, num_prompt_tokens=len(tokens), max_tokens=100)
    request.row = row
    return request


def batch_of(num_decodes: int, num_drafted: int = 0) -> Batch:
    return Batch((), num_decodes, 10 * num_decodes, 1000, num_drafted)


def test_a_loop_goes_on_as_it_began() -> None:
    drafter = NgramDrafter(SpeculativeConfig(num_speculative_tokens=9), 1)
    request = request_of([9, 1, 2, 3, 1, 2, 3, 1, 2])
    assert drafter.draft(request, 99, batch_of(1)).tolist() == [3, 1, 2, 3, 1, 2, 3, 1, 2]
    assert drafter.draft(request, 4, batch_of(1)).tolist() == [3, 1, 2, 3]
    assert drafter.draft(request_of([1, 2, 3, 4], 1), 9, batch_of(1)).tolist() == []


def guessed(num_decodes: int, num_steps: int, *, is_right: bool) -> int:
    """Tokens that are guessed for a request in so many steps."""
    drafter = NgramDrafter(SpeculativeConfig(num_speculative_tokens=8), 1)
    request = request_of([1, 2, 3, 1, 2, 3, 1, 2])
    total = 0
    for _ in range(num_steps):
        count = len(drafter.draft(request, 99, batch_of(num_decodes)))
        total += count
        if count:
            drafter.judge(request, count, count if is_right else 0)
    return total


@pytest.mark.parametrize("slope", [0.01, 0.06, 1.0])
@pytest.mark.parametrize("num_decodes", [1, 8, 32, 256])
def test_guesses_that_are_never_right_cost_a_hundredth(num_decodes: int, slope: float) -> None:
    """And eight steps at first, whatever a token costs."""
    times = TimesByTokens([(1, 1.0), (2, 1.0 + slope)])
    drafter = NgramDrafter(SpeculativeConfig(num_speculative_tokens=8), 256, times)
    requests = [request_of([1, 2, 3, 1, 2, 3, 1, 2], index, index) for index in range(num_decodes)]
    cost, num_steps = 0.0, 3000 // num_decodes
    for _ in range(num_steps):
        drafted: list[tuple[Request, int]] = []
        for request in requests:
            num_before = sum(count for _, count in drafted)
            count = len(drafter.draft(request, 99, batch_of(num_decodes, num_before)))
            if count:
                drafted.append((request, count))
                cost += times.beyond(num_decodes + num_before, count)[-1]
        for request, count in drafted:
            drafter.judge(request, count, 0)
    assert cost <= 8 + 0.01 * num_steps + 8


def test_guesses_that_are_right_grow_to_what_is_allowed() -> None:
    for num_decodes in (1, 8, 32):
        assert guessed(num_decodes, 100, is_right=True) > 600


def test_what_is_known_of_guesses_is_passed_on_to_the_next_request() -> None:
    drafter = NgramDrafter(SpeculativeConfig(), 1)
    first = len(drafter.draft(request_of([1, 2, 1, 2]), 99, batch_of(8)))
    for index in range(1, 60):
        request = request_of([1, 2, 1, 2], index)
        if count := len(drafter.draft(request, 99, batch_of(8))):
            drafter.judge(request, count, 0)
    assert len(drafter.draft(request_of([1, 2, 1, 2], 99), 99, batch_of(8))) < first


def test_more_decodes_in_a_step_leave_less_room_for_guesses() -> None:
    counts = []
    for num_decodes in (1, 4, 16, 64):
        drafter = NgramDrafter(SpeculativeConfig(), 1)
        counts.append(len(drafter.draft(request_of([1, 2, 1, 2]), 99, batch_of(num_decodes))))
    assert counts == sorted(counts, reverse=True) and counts[0] > 8 and counts[-1] <= 1

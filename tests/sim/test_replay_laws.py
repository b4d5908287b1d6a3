"""Whole random workloads: kvarts against the naive engine, and fast-forward against step by step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.events import CopiesRemoved

from builders.case import Case, Row, cases
from builders.laws import assert_as_in_naive, assert_fast_as_slow, assert_tokens_counted_once
from builders.outcome import run_kvarts
from builders.pages import evicted_names

pytestmark = pytest.mark.laws


@given(cases() | cases(limits=True))
def test_every_request_and_every_eviction_is_as_in_the_naive_engine(case: Case) -> None:
    """L4, L7, L8: against a page-by-page, step-by-step engine that shares no code."""
    requests, naive_engines = case.naive()
    outcome = run_kvarts(case)
    assert len(outcome.requests.columns["index"]) == len(requests)
    assert_as_in_naive(case, outcome, requests, naive_engines)


@given(cases(max_requests=40, limits=True))
def test_fast_forward_equals_step_by_step(case: Case) -> None:
    """L5: the same bytes, whatever is looked at."""
    assert_fast_as_slow(case)


@given(cases(max_requests=40), st.integers(2, 9))
def test_prompts_every_few_steps_are_as_step_by_step(case: Case, interval: int) -> None:
    """L5 with `prefill_schedule_interval`. The steps themselves are compared with vLLM (tests/equal, row cadence)."""
    case.profile, case.prefill_schedule_interval = "default", interval
    assert_fast_as_slow(case)


@given(cases())
def test_every_token_is_counted_once(case: Case) -> None:
    """L7: what steps computed is what was neither left by others nor already computed, plus what was recomputed."""
    case.profile = "default"
    outcome = run_kvarts(case)
    assert_tokens_counted_once(outcome)
    for request in case.naive()[0]:
        if not request.rejected:
            total = len(request.tokens) + request.num_output - 1
            assert request.others_hit_tokens + request.computed_first == total


def prompts(*rows: tuple[int, int, int, int]) -> list[Row]:
    """Prompts that share nothing: arrival in ms, tokens, tokens to generate, priority."""
    return [
        Row(at, [9 - place] * size, size, out, None, which, None) for place, (at, size, out, which) in enumerate(rows)
    ]


def assert_is_as_in_naive(case: Case) -> None:
    requests, naive_engines = case.naive()
    assert naive_engines[0].preempted or len(case.rows) == 3
    assert_as_in_naive(case, run_kvarts(case), requests, naive_engines)


def test_a_chunk_that_is_withdrawn_has_evicted_pages() -> None:
    """It took its pages at its turn, and a more important request with a later turn preempted its request."""
    rows = prompts((0, 2, 1, 0), (101, 3, 4, -1), (102, 3, 3, 0), (103, 5, 2, 1))
    assert_is_as_in_naive(Case(rows, 1, 2, 6, 64, 8, "default", 1, 2))
    rows = prompts((0, 5, 1, 0), (101, 5, 4, -1), (102, 14, 1, 1), (103, 10, 1, 1))
    assert_is_as_in_naive(Case(rows, 1, 1, 21, 64, 8, "default", 1, 4))


def test_the_token_of_a_preempted_decode_is_for_chunks_after_it() -> None:
    """It was taken from the budget of the step; as in vLLM, later requests can compute it."""
    rows = prompts((0, 6, 1, 0), (101, 5, 4, -1), (102, 7, 3, 1), (103, 4, 3, 0))
    assert_is_as_in_naive(Case(rows, 1, 2, 7, 5, 4, "default", 1, 3))


def test_of_equal_pages_that_of_the_request_admitted_first_is_found() -> None:
    """A chunk and a decode, which was admitted later and ends sooner, fill them in the same step."""
    for at_ms in (80, 100, 200):
        rows = [Row(0, [1] * 24, 24, 2, [7, 7], 0, None), Row(0, [1] * 3, 3, 7, [1] * 7, 0, None)]
        assert_is_as_in_naive(Case([*rows, Row(at_ms, [1] * 9, 9, 1, [5], 0, None)], 1, 4, 40, 64, 8, "default", 1, 1))


def test_a_page_that_is_filled_again_before_its_copy_is_evicted_is_not_lost() -> None:
    """A chunk has its turn before a decode, whose page evicts the copy. Memory is short, or full of cached pages."""
    rows = [
        Row(0, [0] * 18, 18, 1, None, 0, None),
        Row(0, [0], 1, 3, None, 0, None),
        Row(0, [0] * 18, 18, 1, None, 0, None),
        Row(0, [0] * 18, 18, 1, None, 0, "a"),
    ]
    for case in (
        Case(rows, 1, 2, 23, 64, 5, "default", 1, 8),
        Case([*rows, Row(0, [1] * 16, 16, 1, None, 0, None)], 1, 2, 31, 64, 5, "default", 1, 8),
    ):
        outcome = run_kvarts(case)
        assert any(isinstance(event, CopiesRemoved) for event in outcome.events[0])
        assert evicted_names(outcome.events[0]) == []
        assert_as_in_naive(case, outcome, *case.naive())


def test_requests_out_of_order_take_their_pages_before_any_of_these_is_found() -> None:
    """The last could still have preempted the first, whose page would be of tokens that nobody computes."""
    rows = [Row(0, [0] * 7, 7, 1, None, 0, None), Row(0, [0] * 7, 7, 1, None, 0, None)]
    rows.append(Row(1, [1] * 5, 5, 1, None, 1, None))
    case = Case(rows, 1, 1, 16, 8, 3, "default", 1, 2)
    assert_as_in_naive(case, run_kvarts(case), *case.naive())

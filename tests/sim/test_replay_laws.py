"""Whole random workloads: kvarts against the naive engine, and fast-forward against step by step."""

from __future__ import annotations

import pytest
from hypothesis import given

from builders.case import Case, cases
from builders.laws import assert_as_in_naive, assert_fast_as_slow, assert_tokens_counted_once
from builders.outcome import run_kvarts

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

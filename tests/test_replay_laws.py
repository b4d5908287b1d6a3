"""Whole random workloads: kvarts against the naive engine, and fast-forward against step by step."""

from __future__ import annotations

import pytest
from hypothesis import given

from kvarts.replayer import replay
from kvarts.replayer.columns import REJECTED

from models import Case, cases, evicted_names, paged, run_kvarts

pytestmark = pytest.mark.laws


@given(cases())
def test_every_request_and_every_eviction_is_as_in_the_naive_engine(case: Case) -> None:
    """L4, L7, L8: against a page-by-page, step-by-step engine that shares no code."""
    requests, naive_engines = case.naive()
    outcome = run_kvarts(case)
    columns = outcome.requests.columns
    assert len(columns["index"]) == len(requests)
    for index, request in enumerate(requests):
        row = {name: int(column[index]) for name, column in columns.items()}
        assert row["replica"] == request.replica
        if request.rejected:
            assert row["status"] == REJECTED
            continue
        hit = request.largest_hit_tokens if case.profile == "mocker" else request.others_hit_tokens
        assert row["first_admitted_ns"] == request.first_admitted_ns
        assert row["first_token_ns"] == request.first_token_ns
        assert row["last_token_ns"] == request.last_token_ns
        assert row["cached_tokens"] == hit
        assert row["admissions"] == request.admissions
        assert row["preemptions"] == request.preemptions
        assert row["recomputed_tokens"] == request.recomputed_tokens
    for index, naive in enumerate(naive_engines):
        assert evicted_names(outcome.events[index]) == naive.evicted
        preemptions = outcome.steps[index].preemptions
        assert [(p.victim, p.asker, p.num_computed_tokens) for _, p in preemptions] == naive.preempted
        log = outcome.steps[index]
        steps = {**log.columns, "released": log.released()}
        for name in (
            "start_ns",
            "duration_ns",
            "used",
            "cached",
            "running",
            "waiting",
            "preempted",
            "tokens",
            "released",
        ):
            assert steps[name].tolist() == [getattr(step, name) for step in naive.steps], name


@given(cases(max_requests=40))
def test_fast_forward_equals_step_by_step(case: Case) -> None:
    """L5: the same bytes, whatever is looked at."""
    fast, slow = (replay(case.trace(), case.config(step_by_step=slowly)) for slowly in (False, True))
    assert fast.to_json() == slow.to_json()
    assert fast.requests_jsonl() == slow.requests_jsonl()
    for name, column in fast.steps.items():
        assert column.tobytes() == slow.steps[name].tobytes(), name
    seen = [run_kvarts(case, step_by_step=slowly).events for slowly in (False, True)]
    for fast_events, slow_events in zip(*seen, strict=True):
        assert paged(fast_events) == paged(slow_events)


@given(cases())
def test_every_token_is_counted_once(case: Case) -> None:
    """L7: what steps computed is what was neither left by others nor already computed, plus what was recomputed."""
    case.profile = "default"
    outcome = run_kvarts(case)
    rows = outcome.requests.columns
    done = rows["status"] != REJECTED
    for replica, steps in enumerate(outcome.steps):
        mine = {name: column[done & (rows["replica"] == replica)] for name, column in rows.items()}
        needed = mine["input_tokens"] + mine["output_tokens"] - 1  # the last token is never computed
        computed = needed - mine["cached_tokens"] + mine["recomputed_tokens"]
        assert steps.columns["tokens"].sum() == computed.sum()
    for request in case.naive()[0]:
        if not request.rejected:
            total = len(request.tokens) + request.num_output - 1
            assert request.others_hit_tokens + request.computed_first == total

"""Laws of a whole run, as assertions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvarts.sim.replaying import replay
from kvarts.sim.report.report import Report
from kvarts.sim.report.requests import CANCELLED, REJECTED
from kvarts.sim.report.steps import StepLog

from builders.case import Case
from builders.outcome import Outcome, run_kvarts
from builders.pages import evicted_names, paged
from oracles.naive import NaiveEngine, NaiveRequest


def assert_as_in_naive(
    case: Case, outcome: Outcome, requests: list[NaiveRequest], naive_engines: Sequence[NaiveEngine]
) -> None:
    """Requests, steps, evictions and preemptions."""
    columns = outcome.requests.columns
    for index, request in enumerate(requests):
        row = {name: int(column[index]) for name, column in columns.items()}
        assert row["replica"] == request.replica
        if request.rejected:
            assert row["status"] == REJECTED
            continue
        assert (row["status"] == CANCELLED) == request.cancelled
        if request.cancelled:
            assert row["output_tokens"] == request.made
        hit = request.largest_hit_tokens if case.profile == "mocker" else request.others_hit_tokens
        assert row["first_admitted_ns"] == _or_never(request.first_admitted_ns)
        assert row["first_token_ns"] == _or_never(request.first_token_ns)
        assert row["last_token_ns"] == (-1 if request.cancelled else request.last_token_ns)
        assert row["cached_tokens"] == hit
        assert row["admissions"] == request.admissions
        assert row["preemptions"] == request.preemptions
        assert row["recomputed_tokens"] == request.recomputed_tokens
    for index, naive in enumerate(naive_engines):
        assert evicted_names(outcome.events[index]) == naive.evicted
        log = outcome.steps[index]
        assert [(p.victim, p.asker, p.num_computed_tokens) for _, p in log.preemptions] == naive.preempted
        assert_steps_as_in_naive(log, naive)


def _or_never(time_ns: int | None) -> int:
    return -1 if time_ns is None else time_ns


def assert_steps_as_in_naive(log: StepLog, naive: NaiveEngine) -> None:
    """Every step, by what its row says."""
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


def replayed_as_slowly(case: Case, **changes: Any) -> Report:
    """A replay of a case, which leaves the same bytes step by step."""
    fast, slow = (replay(case.trace(), case.config(step_by_step=slowly, **changes)) for slowly in (False, True))
    assert fast.to_json() == slow.to_json()
    assert fast.requests_jsonl() == slow.requests_jsonl()
    for name, column in fast.steps.items():
        assert column.tobytes() == slow.steps[name].tobytes(), name
    return fast


def assert_fast_as_slow(case: Case, **changes: Any) -> None:
    """Fast-forward leaves the same bytes as step by step, whatever is looked at."""
    replayed_as_slowly(case, **changes)
    seen = [run_kvarts(case, step_by_step=slowly, **changes).events for slowly in (False, True)]
    for fast_events, slow_events in zip(*seen, strict=True):
        assert paged(fast_events) == paged(slow_events)


def assert_tokens_counted_once(outcome: Outcome) -> None:
    """What steps computed is what was neither left by others nor already computed, plus what was recomputed."""
    rows = outcome.requests.columns
    done = rows["status"] != REJECTED
    for replica, steps in enumerate(outcome.steps):
        mine = {name: column[done & (rows["replica"] == replica)] for name, column in rows.items()}
        needed = mine["input_tokens"] + mine["output_tokens"] - 1  # the last token is never computed
        computed = needed - mine["cached_tokens"] + mine["recomputed_tokens"]
        assert steps.columns["tokens"].sum() == computed.sum()

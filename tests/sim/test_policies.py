"""Replays under a researcher's own eviction order and admission policy: those of docs/guide-policies.md."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given

from kvarts.base.errors import ConfigError
from kvarts.core.kv.eviction import LruOrder
from kvarts.core.sched.policy import PriorityPolicy
from kvarts.sim.config import SECTIONS, ReplayConfig, make_config
from kvarts.sim.replaying import replay

from builders.case import Case, cases
from builders.guide_policies import LeastHits, ShortestFirst, shortest_first
from builders.laws import assert_as_in_naive, assert_fast_as_slow
from builders.outcome import run_kvarts
from builders.pages import paged
from builders.policies import assert_closed_loop_fast_as_slow, closed_loops, patiences_ms, policies
from oracles import naive

pytestmark = pytest.mark.laws

MS = 1_000_000


@given(cases(max_requests=30), patiences_ms)
def test_a_policy_that_depends_on_time_does_as_in_the_naive_engine(case: Case, patience_ms: int) -> None:
    """L4, L7, L8: against an engine that asks at every step which request is next."""
    requests, naive_engines = case.naive(naive.shortest_first(patience_ms * MS))
    outcome = run_kvarts(case, admission=shortest_first(patience_ms))
    assert_as_in_naive(case, outcome, requests, naive_engines)


@given(cases(max_requests=30), policies())
def test_fast_forward_equals_step_by_step(case: Case, chosen: dict[str, Any]) -> None:
    """L5, and the audit agrees page by page."""
    assert_fast_as_slow(case, **chosen)


@given(cases(max_requests=30), policies(), closed_loops)
def test_a_closed_loop_over_replicas_is_the_same_step_by_step(
    case: Case, chosen: dict[str, Any], loop: dict[str, Any]
) -> None:
    """L5, L8: where engines wait for each other."""
    assert_closed_loop_fast_as_slow(case, **chosen, **loop)


@given(cases())
def test_an_order_that_is_lru_by_another_name_changes_nothing(case: Case) -> None:
    """The audit follows what is told, and the outcome is that of the default."""
    outcomes = [run_kvarts(case), run_kvarts(case, eviction=partial(LruOrder))]
    for default, renamed in zip(outcomes[0].events, outcomes[1].events, strict=True):
        assert paged(default) == paged(renamed)


def test_policies_are_no_settings_of_a_file_or_the_command_line() -> None:
    fields = {setting.field for section in SECTIONS for setting in section.settings}
    assert not fields & {"eviction", "admission"}
    with pytest.raises(ConfigError, match="eviction: unknown key"):
        make_config({"eviction": "lru"})


def test_a_report_names_what_is_not_the_default() -> None:
    given_both = ReplayConfig(eviction=LeastHits, admission=partial(ShortestFirst, 3)).to_builtins()
    assert (given_both["eviction"], given_both["admission"]) == ("LeastHits", "ShortestFirst")
    defaults = ReplayConfig(eviction=LruOrder, admission=PriorityPolicy)
    assert defaults.to_builtins() == ReplayConfig().to_builtins()
    assert not {"eviction", "admission"} & set(ReplayConfig().to_builtins())


def test_each_replica_gets_its_own() -> None:
    made: list[str] = []

    def order() -> LruOrder:
        made.append("order")
        return LruOrder()

    def policy() -> PriorityPolicy:
        made.append("policy")
        return PriorityPolicy()

    case = Case([], 1, 1, 8, 8, 2, "default", 3)
    replay(case.trace(), case.config(eviction=order, admission=policy))
    assert sorted(made)[:3] == ["order"] * 3
    assert sorted(made)[3:6] == ["policy"] * 3

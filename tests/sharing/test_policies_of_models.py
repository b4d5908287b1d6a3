"""Several models on one device under a researcher's own admission policy, and under an eviction order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.kv.eviction import EvictionOrder
from kvarts.sharing.config import ModelShare, SharingConfig
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replay import replay

from builders.case import Case, cases
from builders.guide_policies import LeastHits, shortest_first
from builders.orders import FewestHits
from builders.policies import patiences_ms

pytestmark = pytest.mark.laws


def sharing(names: tuple[str, ...] = ("a", "b"), **each: object) -> SharingConfig:
    models = {name: ModelShare(cost="polynomial", kv_bytes_per_token=2) for name in names}
    config = ReplayConfig(page_size=2, max_num_batched_tokens=16, max_num_seqs=4, **each)  # type: ignore[arg-type]
    return SharingConfig(models=models, kv_memory=400, each=config)


@given(cases(max_requests=16), cases(max_requests=16), patiences_ms)
def test_fast_forward_equals_step_by_step(one: Case, other: Case, patience_ms: int) -> None:
    """L5, L8: with a head that changes with time in each model."""
    traces = {"a": one.trace(), "b": other.trace()}
    admission = shortest_first(patience_ms)
    fast, slow = (replay(traces, sharing(admission=admission, step_by_step=slowly)) for slowly in (False, True))
    assert fast.to_json() == slow.to_json()
    for name, report in fast.reports.items():
        assert report.requests_jsonl() == slow.reports[name].requests_jsonl()


@given(cases(max_requests=16), cases(max_requests=16), st.sampled_from([LeastHits, FewestHits]))
def test_each_model_evicts_by_an_order_of_its_own(
    one: Case, other: Case, eviction: Callable[[], EvictionOrder]
) -> None:
    """L1 to L3 after every turn, L5, L8: the order says which run of a model goes, and its age which model's."""
    traces = {"a": one.trace(), "b": other.trace()}
    fast, slow = (replay(traces, sharing(eviction=eviction, step_by_step=slowly, audit=slowly))
                  for slowly in (False, True))  # fmt: skip
    assert fast.to_json() == slow.to_json()
    for name, report in fast.reports.items():
        assert report.requests_jsonl() == slow.reports[name].requests_jsonl()
        assert report.summary["config"]["eviction"] == type(eviction()).__name__


@given(cases(max_requests=16))
def test_a_model_alone_evicts_as_in_a_replay_of_one(case: Case) -> None:
    config = sharing(("a",), eviction=LeastHits)
    shared = replay({"a": case.trace()}, config).reports["a"]
    alone = replay(case.trace(), config.configs["a"])
    assert shared.requests_jsonl() == alone.requests_jsonl()
    assert shared.summary == alone.summary

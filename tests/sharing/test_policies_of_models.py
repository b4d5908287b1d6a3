"""Several models on one device under a researcher's own admission policy; an eviction order is refused."""

from __future__ import annotations

import pytest
from hypothesis import given

from kvarts.errors import ConfigError
from kvarts.sharing.config import ModelShare, SharingConfig
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replay import replay

from builders.case import Case, cases
from builders.guide_policies import LeastHits, shortest_first
from builders.policies import patiences_ms

pytestmark = pytest.mark.laws


def sharing(**each: object) -> SharingConfig:
    models = {name: ModelShare(cost="polynomial", kv_bytes_per_token=2) for name in ("a", "b")}
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


def test_an_eviction_order_is_refused() -> None:
    with pytest.raises(ConfigError, match="evicted by age") as caught:
        sharing(eviction=LeastHits)
    assert caught.value.field == "eviction"

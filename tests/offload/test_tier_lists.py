"""Tiers as a list: host memory and files in that form, and lists of more tiers."""

from __future__ import annotations

from hypothesis import given

from kvarts import replay
from kvarts.offload.config import TierConfig

from builders.group_tiers import Grouped, grouped
from builders.tiered import Tiered, as_list, tiered, tiers_between


@given(tiered(all_loads=True, cancels=True))
def test_a_list_of_host_memory_and_files_is_what_their_options_are(tiers: Tiered) -> None:
    short, listed = (
        replay(tiers.case.trace(), tiers.case.config(offload=offload))
        for offload in (tiers.offload, as_list(tiers.offload))
    )
    assert short.requests_jsonl() == listed.requests_jsonl()
    assert {**short.summary, "config": None} == {**listed.summary, "config": None}


@given(grouped(), tiers_between())
def test_three_tiers_below_groups_fast_as_step_by_step(of: Grouped, cxl: TierConfig) -> None:
    offload = as_list(of.offload, cxl)
    fast, slow = (of.replayed(offload=offload, step_by_step=slowly) for slowly in (False, True))
    assert fast.requests_jsonl() == slow.requests_jsonl()
    assert fast.to_json() == slow.to_json()

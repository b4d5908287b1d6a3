"""Replays of sessions of models with KV groups: what is kept of each layer between turns, counted in blocks."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvarts
from kvarts.core.kv.groups import PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.report.report import Report
from kvarts.sim.sessions import SessionReplay
from kvarts.sim.traffic.trace import Trace, TraceRequest

from builders.grouped import FULL, group_settings
from builders.session_traces import Talk, replayed_as_slowly, session_traces
from oracles.naive_grouped import needed_pages

pytestmark = pytest.mark.laws

KEPT: list[dict[str, Any]] = [
    {"window": 1, "sink": 0},
    {"window": 7, "sink": 3},
    {"window": 12, "sink": 4, "at_capacity": "evict"},
    {"window": 7, "sink": 3, "ttl_s": 0.06, "at_capacity": "evict"},
    {"retention": "pin"},
    {"retention": "pin", "ttl_s": 0.06},
    {"retention": "cache"},
    {"retention": "host"},
]


def tiers() -> st.SearchStrategy[Any]:
    """Host memory below the device, and how it is used; nothing where its room is missing."""
    offload = getattr(kvarts, "OffloadConfig", None)
    if offload is None:
        return st.none()
    return st.builds(
        offload,
        host_pages=st.sampled_from([20, 300]),
        policy=st.sampled_from(["eager", "lazy"]),
        h2d=st.sampled_from([10**4, 10**9]),
        d2h=st.sampled_from([10**4, 10**9]),
        kv_bytes_per_token=st.just(100),
    )


def window_of(span: int) -> KvLayer:
    return KvLayer(kind="window", num_heads=1, head_numbers=2, span=span)


LIKE_GEMMA = (PartGroup(window_of(16), 5, 5), PartGroup(FULL, 1, 1))
"""Five layers with a window of 16 tokens, and one without."""


@given(
    session_traces(),
    st.fixed_dictionaries(
        {
            "page_size": st.sampled_from([1, 3, 4]),
            "num_pages": st.sampled_from([70, 120, 300]),
            "max_num_batched_tokens": st.sampled_from([8, 32, 512]),
            "max_num_seqs": st.sampled_from([2, 8]),
            "concurrency": st.sampled_from([None, None, 1, 3]),
            "offload": st.none() | tiers(),
        }
    ),
    group_settings(),
    st.sampled_from(KEPT),
)
def test_fast_forward_equals_step_by_step(
    talk: Talk, settings: dict[str, Any], of_groups: dict[str, Any], kept: dict[str, Any]
) -> None:
    """L5; the laws of every part hold after every step, and at rest only what sessions keep is in use."""
    settings = {**settings, **of_groups}
    if settings["offload"] is None and kept.get("retention") == "host":
        kept = {"retention": "cache"}
    sessions = SessionReplay(chunk_tokens=16, **kept)
    fast = replayed_as_slowly(talk, sessions=sessions, **settings)
    settings["max_num_seqs"] = min(settings["max_num_seqs"], settings["max_num_batched_tokens"])
    audited = replay(talk.trace(), ReplayConfig(audit=True, sessions=sessions, **settings))
    assert audited.requests_jsonl() == fast.requests_jsonl()
    assert audited.summary["sessions"] == fast.summary["sessions"]


@given(session_traces(max_plain=0), st.sampled_from([1, 3, 4]), st.sampled_from([8, 512]), st.sampled_from(KEPT[:-1]))
def test_one_group_of_full_layers_is_a_model_without_groups(
    talk: Talk, page_size: int, budget: int, kept: dict[str, Any]
) -> None:
    """Where memory is no matter, what turns compute, when they end, and what is reserved at most."""
    settings: dict[str, Any] = {
        "page_size": page_size,
        "num_pages": 3000,
        "max_num_batched_tokens": budget,
        "max_num_seqs": 8,
        "sessions": SessionReplay(chunk_tokens=16, **kept),
    }
    plain = replay(talk.trace(), ReplayConfig(**settings))
    group = PartGroup(FULL, 3)
    grouped = replay(talk.trace(), ReplayConfig(kv_groups="all", groups=(group,), **settings))
    assert grouped.summary["sessions"] == plain.summary["sessions"]
    assert grouped.requests_jsonl() == plain.requests_jsonl()


def turns(*of: tuple[str, int, int, int], gap_ms: int = 10_000) -> Trace:
    """A trace of turns: session, tokens of the prompt, tokens of the answer, and for which history."""
    rows = []
    for place, (session, num_prompt, num_output, history) in enumerate(of):
        units = array("Q", [ord(session[0]) * 1000 + history * 100_000 + token for token in range(num_prompt)])
        rows.append(
            TraceRequest(place, place * gap_ms * 1_000_000, units.tobytes(), num_prompt, num_output, session_id=session)
        )
    return Trace(rows)


def report_of(trace: Trace, sessions: dict[str, Any], **settings: Any) -> Report:
    values = {"page_size": 4, "num_pages": 40, "kv_groups": "all", "groups": LIKE_GEMMA, "audit": True, **settings}
    return replay(trace, ReplayConfig(sessions=SessionReplay(**sessions), **values))


def test_a_bounded_session_keeps_of_each_layer_what_both_allow() -> None:
    trace = turns(("a", 300, 50, 0), ("a", 400, 50, 0), ("a", 500, 5, 0))
    totals = report_of(trace, {"window": 32, "sink": 4, "chunk_tokens": 32}).summary["sessions"]
    # 1 + 8 + 1 pages of the full layer; of the others, which see 15 tokens back, 4 + 1. And 8 for chunks of all.
    assert totals["peak_reserved_pages"] == (1 + 8 + 1) * 1 + (4 + 1) * 5 + 8 * 6
    assert totals["num_history_tokens_computed"] == 0


@pytest.mark.parametrize("keeps", ["all", "tails"])
def test_a_pin_keeps_what_a_next_turn_goes_on_from(keeps: str) -> None:
    """Of full layers all pages, of windows their tails."""
    others = [(other, 80, 4, 1) for other in "xyz"]
    trace = turns(("a", 64, 4, 0), *others, ("a", 100, 4, 0))
    cached = report_of(trace, {"retention": "cache"}, kv_groups=keeps, num_pages=26).summary["sessions"]
    pinned = report_of(trace, {"retention": "pin"}, kv_groups=keeps, num_pages=26).summary["sessions"]
    assert (cached["num_history_tokens_computed"], pinned["num_history_tokens_computed"]) == (67, 3)
    blocks = sum(len(needed_pages(group.layer, 64, 4)) * group.part_bytes for group in LIKE_GEMMA)
    # The pins of the others, which end at once, are of 80 tokens; a last turn leaves none.
    assert pinned["peak_reserved_pages"] == blocks == 16 * 1 + 4 * 5
    expired = report_of(trace, {"retention": "pin", "ttl_s": 15.0}, kv_groups=keeps, num_pages=26).summary["sessions"]
    assert (expired["num_expired"], expired["num_history_tokens_computed"]) == (1, 67)


def test_a_pin_is_given_up_for_a_request_that_needs_the_memory() -> None:
    trace = turns(("a", 64, 4, 0), ("x", 120, 4, 1), ("a", 80, 4, 0))
    report = report_of(trace, {"retention": "pin"}, num_pages=14)
    assert report.summary["num_requests"] == 3 and report.summary["sessions"]["num_pins_given_up"] == 0
    report = report_of(trace, {"retention": "pin"}, num_pages=32, groups=(PartGroup(FULL, 1),))
    assert report.summary["sessions"]["num_pins_given_up"] == 1


def test_at_capacity_the_session_idle_longest_goes() -> None:
    of = [("a", 8, 4, 0), ("b", 8, 4, 0), ("c", 8, 4, 0), ("a", 20, 4, 0), ("b", 20, 4, 0), ("c", 20, 4, 0)]
    bounded = {"window": 32, "sink": 4, "chunk_tokens": 32}  # 35 blocks each, and 48 for chunks
    refused = report_of(turns(*of), bounded, num_pages=20).summary["sessions"]
    assert (refused["num_refused_turns"], refused["num_evicted"]) == (1, 0)
    evicted = report_of(turns(*of), {**bounded, "at_capacity": "evict"}, num_pages=20).summary["sessions"]
    assert (evicted["num_refused_turns"], evicted["num_evicted"]) == (0, 2)


def test_a_bounded_session_has_a_state_beside_its_pages() -> None:
    groups = (PartGroup(FULL, 4), PartGroup(KvLayer(kind="state", state_bytes=8), 8))
    trace = turns(("a", 64, 4, 0), ("a", 100, 4, 0))
    bounded = report_of(trace, {"window": 16, "sink": 4, "chunk_tokens": 32}, groups=groups, num_pages=80)
    totals = bounded.summary["sessions"]
    assert totals["num_history_tokens_computed"] == 0
    # 1 + 4 + 1 pages, the state, and 8 pages for chunks; a state has the bytes of two pages.
    assert totals["peak_reserved_pages"] == 6 + 2 + 8
    # Without a window, the next turn goes on from the snapshot at the end of the prompt.
    totals = report_of(trace, {"retention": "pin"}, groups=groups, num_pages=80).summary["sessions"]
    assert totals["num_history_tokens_computed"] == 3

"""Whole random workloads of models with KV groups: against an engine that looks at every token, group and step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvarts.base.errors import ConfigError
from kvarts.core.kv.group_needs import GroupNeeds
from kvarts.core.kv.groups import GroupMemory, PartGroup, with_states
from kvarts.core.kv.layers import KvKind, KvLayer
from kvarts.cost.polynomial import LinearCost
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay

from builders.case import ROUTERS, Case, Row, branching_cases, cases, following_cases
from builders.grouped import (
    FULL,
    STATES,
    WINDOW,
    assert_grouped_as_in_naive,
    assert_same_outcome,
    part_groups,
    settings_of_keeps,
    told_by,
)
from builders.laws import replayed_as_slowly
from oracles.naive import polynomial_ns
from oracles.naive_group_engine import NaiveGroupEngine
from oracles.parts import Part

pytestmark = pytest.mark.laws


@given(
    cases(max_requests=16) | cases(max_requests=16, limits=True) | cases(max_requests=16, cancels=True),
    part_groups(by_page=True),
    st.sampled_from(["all", "tails"]),
)
def test_every_step_and_every_part_is_as_in_the_naive_engine(
    case: Case, groups: tuple[PartGroup, ...], keeps: str
) -> None:
    """L1, L4, L7, L8, of every group."""
    case.profile = "default"
    # Memory that is short now and then.
    case.num_pages = max(1, case.num_pages * 2 // 3)
    assert_grouped_as_in_naive(case, groups, keeps)


@given(
    branching_cases(),
    st.sampled_from([STATES, (*STATES, WINDOW), (STATES[1], *STATES)])
    | part_groups().filter(lambda groups: any(group.is_state for group in groups)),
    st.sampled_from(["all", "tails"]),
)
def test_snapshots_at_branches_are_those_of_the_naive_engine(
    case: Case, groups: tuple[PartGroup, ...], keeps: str
) -> None:
    """L1, L4, L5, L7, L8, and the audit, where states are also kept where a prompt leaves another."""
    assert_grouped_as_in_naive(case, groups, keeps, "branches")
    config = {"kv_groups": keeps, "groups": groups, "snapshots": "branches"}
    slow = replay(case.trace(), case.config(step_by_step=True, **config))
    assert_same_outcome(replay(case.trace(), case.config(**config)), slow)


def test_a_shared_beginning_is_found_from_the_third_prompt_on_where_snapshots_are_made_at_branches() -> None:
    """The second leaves the first after 8 tokens, and keeps the state there; with snapshots at ends, none is found."""
    shared = [1, 2] * 4
    rows = [Row(200 * place, [*shared, *[3 + place] * 7], 15, 2, None, 0, None) for place in range(4)]
    case = Case(rows, 1, 4, 40, 64, 8, "default", 1)
    hits = {}
    for snapshots in ("ends", "branches"):
        assert_grouped_as_in_naive(case, STATES, "all", snapshots)
        report = replay(case.trace(), case.config(kv_groups="all", groups=STATES, snapshots=snapshots))
        hits[snapshots] = report.request_columns["cached_tokens"].tolist()
    assert hits == {"ends": [0, 0, 0, 0], "branches": [0, 0, 8, 8]}


def test_a_head_that_lacked_memory_needs_less_once_another_runs_with_its_prefix() -> None:
    """It was taken to lack memory for as long as nothing became findable; one of a higher priority came and hit."""
    prefix, other = [1, 2, 3, 4, 5, 6], [9, 8, 7, 6]
    rows = [
        Row(0, prefix, 24, 1, None, 0, None),
        Row(100, other, 13, 4, None, 0, None),
        Row(110, [*prefix, 7], 26, 2, None, 0, None),
        Row(120, prefix, 21, 12, None, 1, None),
    ]
    case = Case(rows, 4, 4, 10, 64, 8, "default", 1)
    assert_grouped_as_in_naive(case, (PartGroup(FULL, 1),), "all")


def test_a_page_is_taken_before_a_later_turn_releases_parts() -> None:
    """One of a low priority was admitted first, so that chunks may be withdrawn; they take parts at their turns."""
    begin = [2, 1, 1, 1, 0, 1]
    rows = [
        Row(0, begin, 24, 23, None, 0, "a"),
        Row(41, [*begin, 2, 3], 27, 1, None, 0, None),
        Row(281, [*begin, 0, 0], 27, 1, None, 1, None),
        Row(281, begin, 22, 4, None, 1, None),
    ]
    groups = (
        PartGroup(FULL, 3),
        PartGroup(KvLayer(kind="window", num_heads=1, head_numbers=2, span=6), 1),
        PartGroup(KvLayer(kind="window", num_heads=1, head_numbers=2, span=3, sink=3), 1),
    )
    assert_grouped_as_in_naive(Case(rows, 4, 4, 20, 16, 4, "default", 1, 2, 0.5), groups, "tails")


def test_requests_that_begin_to_decode_give_back_in_the_order_of_admission() -> None:
    """Two hold a prefix, and who gives it back last decides what a third finds: one that passed a page was first."""
    prefix = [1] * 12
    rows = [
        Row(0, [*prefix, *[2] * 4], 16, 3, None, 0, None),
        Row(0, [*prefix, *[3] * 9], 21, 10, None, 0, None),
        Row(200, [*prefix, *[4] * 16], 28, 1, None, 0, None),
    ]
    assert_grouped_as_in_naive(Case(rows, 1, 4, 8, 64, 8, "default", 1), (PartGroup(FULL, 1), WINDOW), "all")


def test_one_who_gives_up_releases_what_its_window_has_passed_with_all_else() -> None:
    """As in vLLM, where it would have released it at its next turn: so its last pages are evicted before that page."""
    rows = [Row(0, [1, 0, 0, 0, 1], 5, 4, None, 0, None, 20), Row(50, [0, 0, 0, 1], 4, 5, None, 0, None, 20)]
    assert_grouped_as_in_naive(Case(rows, 1, 1, 8, 64, 8, "default", 1), (PartGroup(FULL, 2), WINDOW), "all")


def test_a_span_is_split_where_a_stream_has_evicted_what_comes_before() -> None:
    """Windows of one token: the run before the place of the split was evicted, and is still in the list of its span."""
    rows = [
        Row(529, [0, 3, 3], 3, 12, [0, 0, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0], -1, "a"),
        Row(536, [2, 2, 2, 3, 3], 5, 6, [0, 0, 0, 1, 0, 1], -1, None),
        Row(745, [0], 1, 1, None, 0, "a"),
        Row(745, [2], 1, 10, [1, 1, 1, 1, 1, 1, 0, 0, 0, 0], 0, None),
        Row(745, [0, 1, 3, 3, 2], 5, 9, None, -1, "a"),
        Row(745, [2, 1, 2], 3, 9, None, 0, None),
    ]
    case = Case(rows, 1, 1, 22, 16, 1, "default", 1)
    window = PartGroup(KvLayer(kind="window", num_heads=1, head_numbers=2, span=1), 2)
    replayed_as_slowly(case, kv_groups="all", groups=(window,), concurrency=3)


@given(cases(max_requests=40) | cases(max_requests=40, cancels=True), part_groups(), st.sampled_from(["all", "tails"]))
def test_fast_forward_equals_step_by_step(case: Case, groups: tuple[PartGroup, ...], keeps: str) -> None:
    """L5, of every group: also where requests come when others end, and replicas are looked at."""
    case.profile = "default"
    for changes in ({}, {"concurrency": 3}, {"router": ROUTERS[-1], "replicas": 2}):
        replayed_as_slowly(case, kv_groups=keeps, groups=groups, **changes)


retaining = (
    part_groups(by_page=True)
    .map(lambda groups: tuple(group for group in groups if not (group.is_state or group.layer.sink)))
    .filter(lambda groups: any(group.layer.keeps_tokens for group in groups))
)


@given(
    cases(max_requests=16) | cases(max_requests=16, limits=True) | cases(max_requests=16, cancels=True),
    retaining,
    st.sampled_from(["0", "0", "1", "2", "5"]),
)
def test_parts_at_an_interval_are_as_in_the_naive_engine(case: Case, groups: tuple[PartGroup, ...], keeps: str) -> None:
    """L1, L4, L5, L7, L8, where windows and states retain few parts."""
    case.profile = "default"
    case.num_pages = max(1, case.num_pages * 2 // 3)
    assert_grouped_as_in_naive(case, groups, keeps)
    for changes in ({}, {"concurrency": 3}):
        replayed_as_slowly(case, **settings_of_keeps(case, keeps), groups=groups, **changes)


@given(
    following_cases(),
    st.lists(st.tuples(st.integers(2, 24), st.sampled_from([0, 0, 0, 2])), min_size=1, max_size=2),
    st.sampled_from(["all", "tails"]),
)
def test_windows_that_pass_the_same_pages_are_as_in_the_naive_engine(
    case: Case, windows: list[tuple[int, int]], keeps: str
) -> None:
    """L1, L4, L5, L7, L8, and the audit: whoever passes a page last lists it, and others take no step for it."""
    layers = [KvLayer(kind="window", num_heads=1, head_numbers=2, span=span, sink=sink) for span, sink in windows]
    groups = (PartGroup(FULL, 1), *(PartGroup(layer, 2) for layer in layers))
    assert_grouped_as_in_naive(case, groups, keeps)
    for changes in ({}, {"concurrency": 3}):
        config = {"kv_groups": keeps, "groups": groups, **changes}
        slow = replay(case.trace(), case.config(step_by_step=True, **config))
        assert_same_outcome(replay(case.trace(), case.config(**config)), slow)


@given(cases(max_requests=24) | cases(max_requests=24, cancels=True), part_groups(), st.sampled_from(["all", "tails"]))
def test_who_reads_every_event_changes_nothing(case: Case, groups: tuple[PartGroup, ...], keeps: str) -> None:
    """L5, of two substrates: in leaps, where pages of decodes get names late; and step by step, when they are full."""
    case.profile = "default"
    for changes in ({}, {"concurrency": 3}, {"router": ROUTERS[-1], "replicas": 2}):
        report, told = told_by(case, groups, keeps, **changes)
        assert_same_outcome(report, replay(case.trace(), case.config(kv_groups=keeps, groups=groups, **changes)))
        _, told_slowly = told_by(case, groups, keeps, step_by_step=True, **changes)
        assert [replica.happened() for replica in told] == [replica.happened() for replica in told_slowly]


@given(
    branching_cases() | cases(max_requests=24, limits=True) | cases(max_requests=24, cancels=True),
    part_groups().filter(lambda groups: any(group.is_state for group in groups)),
    st.sampled_from(["all", "align"]),
    st.sampled_from(["all", "tails"]),
)
def test_states_by_page_are_the_same_in_leaps_and_for_readers(
    case: Case, groups: tuple[PartGroup, ...], mode: str, keeps: str
) -> None:
    """L1, L2, L5, and the audit, which finds every hit by itself."""
    case.profile = "default"
    config = {"kv_groups": keeps, "groups": groups, "mamba_cache_mode": mode}
    fast = replay(case.trace(), case.config(**config))
    assert_same_outcome(fast, replay(case.trace(), case.config(step_by_step=True, **config)))
    report, _ = told_by(case, groups, keeps, mamba_cache_mode=mode, audit=True)
    assert_same_outcome(report, fast)


@given(cases(max_requests=40), st.sampled_from([1, 3]), st.sampled_from(["all", "tails"]))
def test_one_group_that_keeps_everything_is_counted_as_pages_are(case: Case, part_bytes: int, keeps: str) -> None:
    """Two bookkeepings that share no code: runs of pages in a tree, and parts of pages in a list."""
    case.profile = "default"
    whole = replay(case.trace(), case.config())
    config = case.config(kv_groups=keeps, groups=(PartGroup(FULL, part_bytes),))
    counted = replay(case.trace(), config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupMemory, "is_whole", False)
        assert_same_outcome(counted, replay(case.trace(), config))
    of_groups = {"block_bytes", "total_blocks", "kv_groups"}
    left, right = (dict(report.summary) for report in (whole, counted))
    assert {key for key in right if key not in left} == of_groups
    for values in (left, right):
        config = values["config"]
        values["config"] = {key: config[key] for key in config if key not in ("kv_groups", "page_bytes")}
    assert left == {key: value for key, value in right.items() if key not in of_groups}
    for name, column in whole.requests.items():
        if name != "reason":  # a refusal says what is missing in its own words
            assert list(map(repr, column)) == list(map(repr, counted.requests[name])), name
    for name, of_steps in whole.steps.items():
        assert of_steps.tobytes() == counted.steps[name].tobytes(), name


@given(
    branching_cases()
    | cases(max_requests=10)
    | cases(max_requests=10, limits=True)
    | cases(max_requests=10, cancels=True),
    st.sampled_from([("state",), ("state", "state"), ("window",), ("state", "window"), ("chunk",)]),
    st.sampled_from(["0", "0", "none", "128"]),
    st.booleans(),
)
def test_steps_between_the_ends_of_long_pages_are_the_same_at_once(
    case: Case, kinds: tuple[KvKind, ...], interval: str, plans_ahead: bool
) -> None:
    """L5, in pages of 64 tokens: where the cache follows no decodes, they mostly take, fill and release nothing."""
    case.profile, case.page_size = "default", 64
    case.max_num_batched_tokens *= 64
    ratio, case.unit_tokens = 64 // case.unit_tokens, 64
    for row in case.rows:
        row.num_prompt_tokens = max(1, row.num_prompt_tokens * ratio - row.num_output_tokens)
        row.num_output_tokens *= 7
        row.output = None
    case.num_pages += sum(row.num_output_tokens for row in case.rows) // 640
    heads: dict[str, Any] = {"num_heads": 1, "head_numbers": 2}
    layers = [
        KvLayer(kind="state", state_bytes=1) if kind == "state" else KvLayer(kind=kind, span=100, **heads)
        for kind in kinds
    ]
    groups = (*(PartGroup(layer, 1) for layer in layers), PartGroup(FULL, 1))
    config: dict[str, Any] = {"prefix_cache_retention_interval": interval, "async_scheduling": plans_ahead}
    if "state" in kinds:
        config["mamba_cache_mode"] = "align"
    for changes in ({}, {"concurrency": 3}):
        replayed_as_slowly(case, kv_groups="all", groups=groups, **config, **changes)
    _, told = told_by(case, groups, "all", **config)
    _, told_slowly = told_by(case, groups, "all", step_by_step=True, **config)
    assert [replica.happened() for replica in told] == [replica.happened() for replica in told_slowly]


@dataclass
class Found:
    groups: tuple[PartGroup, ...]
    parts: list[dict[int, Any]]
    page_size: int

    def num_shared(self, group: int, first_page: int) -> int:
        num_sink = -(-self.groups[group].layer.sink // self.page_size)
        return sum(part.refs > 0 for page, part in self.parts[group].items() if page >= first_page or page < num_sink)

    def num_with_held_copy(self, group: int) -> int:
        return 0

    def num_idle(self, group: int) -> int:
        return sum(part.refs == 0 for part in self.parts[group].values())


@given(part_groups(), st.integers(1, 6), st.integers(1, 24), st.integers(0, 5), st.integers(1, 60), st.data())
def test_what_a_request_needs(
    groups: tuple[PartGroup, ...], page_size: int, most_new: int, num_hit: int, num_new: int, data: st.DataObject
) -> None:
    """To begin as in vLLM, at least that much if it finds less; and no step of it holds more than it may at most."""
    memory = GroupMemory(groups)
    needs = GroupNeeds(memory, page_size=page_size, most_new=most_new)
    engine = NaiveGroupEngine(
        [(group.layer, group.part_bytes) for group in groups],
        keeps_all=True,
        num_pages=1,
        page_size=page_size,
        max_num_batched_tokens=most_new,
        cost=polynomial_ns,
    )
    known = num_hit * page_size + num_new
    budget = data.draw(st.integers(1, most_new))
    wants: list[int] = []
    refs = [[data.draw(st.integers(0, 1)) for _ in range(num_hit)] for _ in groups]
    for hit in range(num_hit + 1):
        start = hit * page_size
        end = min(known, start + budget)
        found: list[dict[int, Any]] = []
        for index, group in enumerate(groups):
            found.append({page: Part(index, is_kept=True) for page in sorted(engine.groups.needed(group.layer, start))})
            for page, part in found[-1].items():
                part.refs = refs[index][page]
        wanted = engine.wanted(start, known, end, found)
        of_parts = Found(groups, found, page_size)
        assert needs.to_admit(start, known, end, of_parts) * memory.block_bytes == wanted
        wants.append(wanted)
        assert needs.least_to_admit(start, known, end, of_parts) * memory.block_bytes <= min(wants)
    most_bytes = needs.to_compute(known) * memory.block_bytes
    assert most_bytes == engine.most_of(known)
    assert max(wants) <= needs.at_most(known) * memory.block_bytes
    states = sum(group.part_bytes for group in groups if group.is_state)
    for first in range(known):
        pages = engine.while_computing(first, min(known, first + most_new))
        held = sum(groups[index].part_bytes * len(pages_of) for index, pages_of in pages.items())
        assert held + states <= most_bytes


def test_what_a_stream_of_known_tokens_has_lost_is_not_found() -> None:
    """Generated pages that others may find are released by a window, and evicted, with and without readers."""
    rows = [
        Row(0, [1], 1, 6, None, 0, None), Row(0, [1], 1, 6, None, 0, None),
        Row(0, [1, 2, 1, 2, 0, 1], 6, 1, None, 0, None),
        Row(87, [1, 2, 1, 2], 4, 6, [0, 0, 0, 0, 1, 0, 1], 1, None),
        Row(127, [1, 2, 1, 2, 1, 2, 0, 3], 8, 2, None, 1, None),
    ]  # fmt: skip
    window = PartGroup(KvLayer(kind="window", num_heads=1, head_numbers=2, span=1), part_bytes=1)
    case = Case(rows, 1, 1, 15, 4, 1, "default", 1)
    assert_grouped_as_in_naive(case, (window,), "all")
    cached = replay(case.trace(), case.config(kv_groups="all", groups=(window,))).request_columns["cached_tokens"]
    assert cached.tolist() == [0, 0, 1, 1, 4]


def test_a_decode_that_goes_on_behind_a_long_prefill_keeps_no_tail() -> None:
    """Where it continues with a chunk, no prompt ends: its window gives pages back as if it had not been put back."""
    rows = [
        Row(281, [2, 1, 1, 1, 0, 1, 0, 0], 17, 1, None, 0, None),
        Row(281, [2, 1, 1, 1, 0, 1], 14, 9, None, 0, None),
    ]
    window = PartGroup(KvLayer(kind="window", num_heads=1, head_numbers=2, span=6), part_bytes=1)
    case = Case(rows, 4, 4, 20, 16, 4, "default", 1, 2)
    assert_grouped_as_in_naive(case, (window,), "tails")


BEHIND_A_LONG_PREFILL = [Row(0, [0] * 40, 40, 1, None, 0, None), Row(0, [1], 1, 9, None, 0, None)]


@given(cases(max_requests=16, limits=True), st.sampled_from([None, 6.0]), st.booleans())
@example(Case(BEHIND_A_LONG_PREFILL, 1, 4, 20, 16, 4, "default", 1, 3), None, False)
@example(Case(BEHIND_A_LONG_PREFILL, 1, 4, 20, 16, 4, "default", 1, 3), 5.15, True)
def test_a_window_longer_than_every_context_takes_the_time_of_layers_that_keep_all(
    case: Case, max_itl_ms: float | None, plans_ahead: bool
) -> None:
    """A decode that has its turn after a chunk, where it may release parts, is a decode of the step like others."""
    case.num_pages, case.profile = 2000, "default"
    window = PartGroup(KvLayer(kind="window", num_heads=1, head_numbers=2, span=1000), part_bytes=1)
    times: list[list[Any]] = []
    for groups in ((PartGroup(FULL, 2),), (PartGroup(FULL, 1), window)):
        cost = LinearCost(step_ms=5, chunk_token_ms=0.02, decode_ms=0.1, context_token_ms=0.001)
        settings = {"max_itl_ms": max_itl_ms, "async_scheduling": plans_ahead, "cost": cost}
        report = replay(case.trace(), case.config(kv_groups="all", groups=groups, **settings))
        names = ("start_ms", "duration_ms", "decodes", "tokens", "running")
        times.append([report.requests_jsonl(), *[report.steps[name].tolist() for name in names]])
    assert times[0] == times[1]


def test_a_sink_is_not_extended_by_what_the_window_passes() -> None:
    """A prompt as long as the sink: the pages that follow are released by the window, and the sink at the end."""
    rows = [Row(0, [1, 1, 0], 3, 4, [1, 1, 1, 0], 0, None), Row(100, [0], 1, 2, [0, 0], 0, None)]
    window = PartGroup(KvLayer(kind="window", num_heads=1, head_numbers=2, span=1, sink=3), part_bytes=1)
    assert_grouped_as_in_naive(Case(rows, 1, 1, 20, 4, 1, "default", 1), (window,), "all")


def test_groups_that_have_states_by_page_already_are_refused_where_these_are() -> None:
    """From Python, without an option of a model that says so."""
    layer = KvLayer(kind="state", state_bytes=8)
    groups = with_states((PartGroup(FULL, 8), PartGroup(layer, 8)), "all")
    settings: dict[str, Any] = {"num_pages": 8, "page_size": 4, "groups": groups, "kv_groups": "all"}
    assert ReplayConfig(**settings).features["states_by_page"] == "groups"
    with pytest.raises(ConfigError, match="groups: does not go with an engine without a prefix cache"):
        ReplayConfig(no_prefix_caching=True, **settings)

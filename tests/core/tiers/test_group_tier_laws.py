"""Whole random workloads of models with KV groups and host memory below the device."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace as with_changes
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvarts.core.config import StateMode
from kvarts.core.content import Content, pack_units
from kvarts.core.events import Cancelled, Event, PartsGivenBack
from kvarts.core.kv.groups import GroupMemory, PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.core.kv.run_cache import RunCache
from kvarts.core.kv.runs import PartRun, table_of_transfer
from kvarts.core.tiers.config import LoadKv, OffloadConfig
from kvarts.core.tiers.part_policy import LazyParts
from kvarts.core.tiers.part_tier import PartTier
from kvarts.cost.polynomial import LinearCost
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.report.requests import REJECTED
from kvarts.sim.traffic.trace import Trace, TraceRequest

from builders.case import Case, Row
from builders.group_tiers import FAST, Grouped, grouped, overlapping, preempted, returning
from builders.grouped import FULL, STATES, WINDOW, Told, assert_same_outcome, part_groups

pytestmark = pytest.mark.laws


ANY = st.one_of(grouped(), overlapping(), preempted())
WITH_CANCELS = st.one_of(grouped(), overlapping(cancels=True), preempted(cancels=True))


@given(ANY)
def test_every_token_is_counted_once_and_nothing_is_held_at_rest(tiers: Grouped) -> None:
    """L1, L2, L7, L8, L10; laws of page accounting are asserted after every step."""
    report = tiers.replayed()
    columns = report.request_columns
    done = columns["status"] != REJECTED
    for replica, log in enumerate(report.step_logs):
        mine = {name: column[done & (columns["replica"] == replica)] for name, column in columns.items()}
        needed = mine["input_tokens"] + mine["output_tokens"] - 1  # the last token is never computed
        computed = needed - mine["cached_tokens"] + mine["recomputed_tokens"]
        assert log.columns["tokens"].sum() == computed.sum()
        for field in log.tier_fields:
            if field.endswith("_used"):
                assert not log.rests[field][-1:].any()  # there is none where nothing ran
    assert (columns["host_tokens"] <= columns["cached_tokens"]).all()
    assert tiers.replayed().to_json() == report.to_json()


def test_tokens_of_a_front_are_no_hits_when_the_load_behind_them_has_failed() -> None:
    """L7: the request finds the pages that it computed itself when it tries again."""
    first, second = list(range(200, 230)), list(range(30))
    prompts = [[*first[:8], 1003], [*first[:22], 1002], [*second[:25], 1002, 1002, 1002], first[:25]]
    times_ms, num_tokens = (50, 855, 1305, 1705), (17, 45, 56, 50)
    rows = [Row(*each, 1, None, 0, None) for each in zip(times_ms, prompts, num_tokens, strict=True)]
    tiers = Grouped(
        Case(rows, 2, 1, 74, 64, 4, "default", 1),
        (PartGroup(FULL, 2),),
        "tails",
        OffloadConfig(
            host_pages=500, policy="lazy", target_free=None, h2d=1000, d2h=10_000, latency_us=0.0, disk_pages=500,
            disk_read=20_000, disk_write=10**15, disk_latency_us=0.0, num_layers=8, fail_every=5,
        ),
    )  # fmt: skip
    report = tiers.replayed()
    assert report.summary["transfers"]["num_failed"] == 2
    assert report.step_logs[0].columns["tokens"].tolist() == [17, 29, 56, 17, 6]
    assert report.request_columns["cached_tokens"].tolist() == [0, 16, 0, 50 - 17 - 6]


@given(WITH_CANCELS)
def test_leaps_and_readers_of_every_event_change_nothing(tiers: Grouped) -> None:
    """L5: in leaps, step by step, and with every part named for those that read what happens to it."""
    fast = tiers.replayed(audit=False)
    assert_same_outcome(fast, tiers.replayed(audit=False, step_by_step=True))
    assert_same_outcome(fast, tiers.replayed(lambda _: [Told()]))


@given(WITH_CANCELS, st.sampled_from([1, 2, 3, 8]), st.sampled_from([0.0, 0.1]), st.sampled_from([None, 3.0, 10.0]))
def test_leaps_change_nothing_with_every_limit_of_a_step(
    tiers: Grouped, threshold: int, watermark: float, max_itl_ms: float | None
) -> None:
    """L5, audited, and the same without an audit."""
    tiers.case.long_prefill_token_threshold, tiers.case.watermark = threshold, watermark
    fast = tiers.replayed(max_itl_ms=max_itl_ms)
    assert_same_outcome(fast, tiers.replayed(max_itl_ms=max_itl_ms, step_by_step=True))
    assert_same_outcome(fast, tiers.replayed(max_itl_ms=max_itl_ms, audit=False))


@given(WITH_CANCELS, st.sampled_from([0, 1, 2, 8]), st.sampled_from(["placed", "async", "sync"]), st.booleans())
def test_parts_of_sparse_retention_are_stored_and_loaded_as_others(
    tiers: Grouped, pages_between: int, load_kv: LoadKv, plans_ahead: bool
) -> None:
    """L1, L2, L4, L5, audited: what the device retains is stored, and what a load brings is retained likewise."""
    tiers.states = "align"
    tiers.groups = tuple(replace(group, layer=replace(group.layer, sink=0)) for group in tiers.groups)
    if load_kv != "placed":
        fail_every = tiers.offload.fail_every if load_kv == "async" else 0
        tiers.offload = replace(tiers.offload, load_kv=load_kv, load_overlap="none", fail_every=fail_every)
    changes: dict[str, Any] = {"kv_groups": "all", "async_scheduling": plans_ahead}
    changes["prefix_cache_retention_interval"] = pages_between * tiers.case.page_size
    fast = tiers.replayed(**changes)
    assert_same_outcome(fast, tiers.replayed(audit=False, step_by_step=True, **changes))


@pytest.mark.parametrize("is_lazy", [False, True])
def test_the_end_of_a_request_drops_no_parts_of_another(is_lazy: bool) -> None:
    """L1: its own unknown tokens would follow a page that is not there; another request's pages are."""
    memory = GroupMemory((PartGroup(FULL, 1),), "all")
    cache = RunCache(memory, page_size=1, total_bytes=20, num_below=1)
    tier, policy = PartTier("host", 20, memory, cache.tree), LazyParts(cache, 20)
    content = Content.from_tokens(range(14), page_size=1, owner=0)
    table = cache.begin(content, cache.match(content, 0))
    cache.extend(table, 14)
    cache.close(table, 14)
    pin = table_of_transfer(1)
    tier.place(table.last, 0, 3, 14, pin)
    tier.settle(pin, is_stored=True)
    other = Content.from_tokens([*range(10), 99], page_size=1, owner=1)
    if is_lazy:
        policy.ended(other)
    else:
        tier.drop_from(other, 11)
    tier.check([])
    cache.check([])
    assert tier.num_cached_blocks == 11


def test_a_window_that_needs_no_page_of_a_prefix_leaves_no_run_without_a_part() -> None:
    """The token after the prefix attends to itself alone: nothing is used, and nothing is cut."""
    window = PartGroup(KvLayer(kind="window", num_heads=1, head_numbers=2, span=1), part_bytes=1)
    memory = GroupMemory((window,), "all")
    cache = RunCache(memory, page_size=1, total_bytes=20, num_below=1)
    tier = PartTier("host", 20, memory, cache.tree)
    content = Content.from_tokens(range(4), page_size=1, owner=0)
    table = cache.begin(content, cache.match(content, 0))
    cache.extend(table, 4)
    cache.close(table, 4)
    pin = table_of_transfer(1)
    tier.place(table.last, 0, 0, 4, pin)
    tier.settle(pin, is_stored=True)
    tier.touch(content, 2)
    tier.check([])


def test_what_a_store_alone_held_keeps_its_place_in_the_list() -> None:
    """Else what is stored last would be evicted first, although others have been idle for longer."""
    cache = RunCache(GroupMemory((WINDOW,), "all"), page_size=1, total_bytes=20)
    for owner in range(3):
        content = Content.from_tokens([owner, owner], page_size=1, owner=owner)
        table = cache.begin(content, cache.match(content, 0))
        cache.extend(table, 2)
        cache.close(table, 2)
    entries = list(cache.entries())
    for entry in entries[:2]:
        assert isinstance(entry, PartRun)
        store = table_of_transfer(1)
        cache.hold_in_place(entry, store)
        cache.unhold(store, go_first=True)
    assert list(cache.entries()) == entries


def test_what_a_store_alone_held_and_nothing_keeps_is_empty_after_it() -> None:
    """And is not listed to be evicted once more."""
    window = PartGroup(KvLayer(kind="window", num_heads=1, head_numbers=2, span=2), part_bytes=1)
    cache = RunCache(GroupMemory((window,), "tails"), page_size=1, total_bytes=4)
    content = Content(pack_units([1, 2, 3]), num_tokens=3, page_size=1, owner=0)
    table = cache.begin(content, cache.tree.match(content, 0))
    cache.extend(table, 1)
    store = table_of_transfer(1)
    cache.hold(table.held[0][0], store)
    cache.extend(table, 3)
    cache.free_skipped(table, 3)
    cache.unhold(store, go_first=True)
    cache.check([table])
    assert not list(cache.entries())


def test_a_tier_is_examined_once_a_sixteenth_has_moved_and_at_rest() -> None:
    """What a check costs is in proportion to what has moved in the tier, not to what moves on the device."""
    memory = GroupMemory((PartGroup(FULL, 1),), "all")
    cache = RunCache(memory, page_size=1, total_bytes=200, num_below=1)
    tier = PartTier("host", 200, memory, cache.tree)
    for owner, num_pages in enumerate((100, 6, 1)):
        content = Content.from_tokens(range(owner, owner + num_pages), page_size=1, owner=owner)
        table = cache.begin(content, cache.match(content, 0))
        cache.extend(table, num_pages)
        cache.close(table, num_pages)
        pin = table_of_transfer(1)
        tier.place(table.last, 0, 0, num_pages, pin)
        tier.settle(pin, is_stored=True)
        assert tier.is_check_due(at_rest=False) is (num_pages > 1)
    assert tier.is_check_due(at_rest=True)
    (run, _, _) = tier.listed()
    run.start += 1
    with pytest.raises(AssertionError, match="L1"):
        tier.check([])


@given(grouped(), st.sampled_from([STATES, (*STATES, WINDOW)]))
def test_snapshots_at_branches_go_below_and_come_back(tiers: Grouped, groups: tuple[PartGroup, ...]) -> None:
    """L1, L2, L5, L8, with the audit: leaps, single steps, and every part named."""
    tiers.groups, tiers.states = groups, "snapshots"
    fast = tiers.replayed(audit=False, snapshots="branches")
    assert_same_outcome(fast, tiers.replayed(snapshots="branches"))
    assert_same_outcome(fast, tiers.replayed(audit=False, snapshots="branches", step_by_step=True))
    assert_same_outcome(fast, tiers.replayed(lambda _: [Told()], snapshots="branches"))


@given(WITH_CANCELS, st.sampled_from(["async", "sync"]), st.sampled_from([0, 0, 3, 8]), st.sampled_from([0.0, 0.1]))
def test_leaps_and_readers_change_nothing_where_loads_are_those_of_a_connector(
    tiers: Grouped, load_kv: LoadKv, threshold: int, watermark: float
) -> None:
    """L1, L2, L5, L8: the same with the audit, step by step, and with every part named."""
    fail_every = 0 if load_kv == "sync" else tiers.offload.fail_every
    tiers.offload = replace(tiers.offload, load_kv=load_kv, load_overlap="none", fail_every=fail_every)
    tiers.case.long_prefill_token_threshold, tiers.case.watermark = threshold, watermark
    fast = tiers.replayed(audit=False)
    assert_same_outcome(fast, tiers.replayed())
    assert_same_outcome(fast, tiers.replayed(audit=False, step_by_step=True))
    assert_same_outcome(fast, tiers.replayed(lambda _: [Told()]))


@pytest.mark.parametrize("load_kv", ["async", "sync"])
def test_a_load_takes_only_what_the_window_of_its_end_sees(load_kv: LoadKv) -> None:
    """The request that comes back loads all pages of the full group, and of the window the last one."""
    units, others = list(range(20)), [list(range(100 * base, 100 * base + 20)) for base in (1, 2, 3)]
    prompts = [units, *others, [*units, 50]]
    rows = [Row(index * 1000, prompt, len(prompt), 1, None, 0, None) for index, prompt in enumerate(prompts)]
    offload = OffloadConfig(host_pages=500, load_kv=load_kv, **FAST)
    tiers = Grouped(
        Case(rows, 1, 1, 24, 64, 4, "default", 1), (PartGroup(FULL, 1), PartGroup(WINDOW.layer, 1)), "tails", offload
    )
    report = tiers.replayed()
    assert report.request_columns["host_tokens"].tolist() == [0, 0, 0, 0, 20]
    transfers = report.summary["transfers"]
    assert transfers["num_loaded_parts_group0"] == 20
    assert transfers["num_loaded_parts_group1"] < 20


@given(returning(max_requests=12), part_groups(by_page=True), st.sampled_from(["all", "tails"]))
def test_nothing_is_computed_again_that_could_be_hit(case: Case, groups: tuple[PartGroup, ...], keeps: str) -> None:
    """With room and bandwidth without end below, a small device finds what a device without end finds.

    Requests come one by one: what one of them leaves idle is stored before the next one wants its memory.
    """
    case.rows = [with_changes(row, arrival_ms=index * 60_000) for index, row in enumerate(case.rows)]
    tiers = Grouped(case, groups, keeps, OffloadConfig(host_pages=5000, **FAST))
    # Of a prompt that is too large for the small device, only the other would have anything.
    is_done = tiers.replayed().request_columns["status"] != REJECTED
    case.rows = [row for row, done in zip(case.rows, is_done, strict=True) if done]
    ample = Grouped(case, groups, "tails", tiers.offload).replayed(offload=None, num_pages=5000)
    found = tiers.replayed().request_columns["cached_tokens"]
    expected = ample.request_columns["cached_tokens"]
    # Where what leaves a window stays cached, the device itself may have more.
    as_much = found >= expected if keeps == "all" else found == expected
    assert as_much.all()


def test_a_state_is_found_that_is_not_the_last_of_a_stored_run() -> None:
    """States of consecutive pages are one run below the device, and each of them can be resumed from."""
    prompts = [[*range(12)], [0, 1000, 1000], [*range(10), 1000]]
    rows = [Row(60_000 * place, units, len(units), 1, None, 0, None) for place, units in enumerate(prompts)]
    window = PartGroup(KvLayer(kind="window", num_heads=1, head_numbers=2, span=1), 1)
    state = PartGroup(KvLayer(kind="state", num_heads=0, head_numbers=0, state_bytes=1), 1)
    tiers = Grouped(
        Case(rows, 1, 2, 7, 4, 4, "default", 1), (window, state), "all", OffloadConfig(host_pages=9, **FAST)
    )
    columns = tiers.replayed().request_columns
    assert columns["cached_tokens"].tolist() == columns["host_tokens"].tolist() == [0, 0, 10]


@pytest.mark.parametrize("keeps", ["all", "tails"])
@pytest.mark.parametrize("budget", [1000, 20])
@pytest.mark.parametrize(
    ("layer", "states"),
    [
        (WINDOW.layer, "snapshots"),
        (KvLayer(kind="window", num_heads=1, head_numbers=2, span=8, sink=4), "snapshots"),
        (KvLayer(kind="chunk", num_heads=1, head_numbers=2, span=32), "snapshots"),
        (STATES[1].layer, "all"),
        (STATES[1].layer, "align"),
    ],
)
def test_a_prompt_of_whole_pages_is_found_again_up_to_its_last_page(
    layer: KvLayer, states: StateMode, budget: int, keeps: str
) -> None:
    """Its last token is computed again, so it continues a page before its end: on a large device, and from below."""
    others = [list(range(base, base + 64)) for base in (1000, 2000, 3000)]
    prompts = [list(range(64)), *others, list(range(64))]
    rows = [Row(100_000 * place, units, 64, 2, None, 0, None) for place, units in enumerate(prompts)]
    groups = PartGroup(FULL, 2), PartGroup(layer, 2)
    small = Grouped(
        Case(rows, 1, 4, 22, budget, 4, "default", 1), groups, keeps, OffloadConfig(host_pages=1000, **FAST), states
    )
    report = small.replayed()
    assert report.request_columns["cached_tokens"].tolist() == [0, 0, 0, 0, 60]
    assert report.request_columns["host_tokens"].tolist() == [0, 0, 0, 0, 60]
    large = small.replayed(offload=None, num_pages=1000)
    assert large.request_columns["cached_tokens"].tolist() == [0, 0, 0, 0, 60]


def test_a_page_that_the_window_passed_before_the_last_chunk_is_stored_for_the_same_prompt() -> None:
    """The last chunk is one token, which does not see the first page that the last token of the page before saw."""
    layer = KvLayer(kind="window", num_heads=1, head_numbers=2, span=8)
    prompts = [list(range(48)), *(list(range(base, base + 48)) for base in (1000, 2000, 3000)), list(range(48))]
    rows = [Row(100_000 * place, units, 48, 2, None, 0, None) for place, units in enumerate(prompts)]
    case = Case(rows, 1, 4, 18, 47, 4, "default", 1)
    tiers = Grouped(case, (PartGroup(FULL, 2), PartGroup(layer, 2)), "all", OffloadConfig(host_pages=1000, **FAST))
    assert tiers.replayed().request_columns["host_tokens"].tolist() == [0, 0, 0, 0, 44]


@given(
    returning(max_requests=12),
    part_groups().filter(lambda groups: any(group.is_state for group in groups)),
    st.sampled_from(["all", "align"]),
    st.sampled_from(["async", "sync"]),
    st.sampled_from([4, 5, 7, 16]),
    st.sampled_from([1000, 100_000, 10**15]),
)
def test_states_by_page_come_back_to_requests_without_a_place(
    case: Case, groups: tuple[PartGroup, ...], mode: StateMode, loads: LoadKv, budget: int, rate: int
) -> None:
    """L1, L2, L5, L8: in leaps and step by step, also where what is left of a step reaches no page end."""
    case.max_num_batched_tokens = budget
    offload = OffloadConfig(host_pages=500, load_kv=loads, h2d=rate, d2h=10**15, latency_us=0.0)
    tiers = Grouped(case, groups, "all", offload, mode)
    fast = tiers.replayed(audit=False)
    assert_same_outcome(fast, tiers.replayed())
    assert_same_outcome(fast, tiers.replayed(audit=False, step_by_step=True))
    assert fast.summary["num_completed"] + fast.summary["num_rejected"] == len(case.rows)


def test_a_preempted_request_may_compute_nothing_in_the_step_after_its_load() -> None:
    """The audit asks for what its next token sees, and not for what it saw before it was preempted."""
    rows = [
        Row(65, [*range(100, 105), 1000, 1003, 1001], 31, 17, None, 0, None),
        Row(65, [*range(100, 106), 1002, 1000], 32, 13, None, 0, None),
        Row(115, list(range(100, 103)), 12, 1, None, 0, None),
    ]
    offload = OffloadConfig(
        host_pages=500, disk_pages=20, load_kv="async", h2d=100, d2h=1000, latency_us=0.0, disk_read=10_000,
        disk_write=100, disk_latency_us=100.0,
    )  # fmt: skip
    groups = PartGroup(FULL, 2), PartGroup(STATES[1].layer, 1)
    report = Grouped(Case(rows, 4, 4, 15, 7, 4, "default", 1), groups, "tails", offload, "align").replayed()
    assert report.summary["num_preemptions"] and report.summary["transfers"]["num_loads"]


def test_a_request_that_waits_for_the_memory_of_its_load_takes_back_what_stores_hold_in_leaps_as_well() -> None:
    """L5: running requests take the memory that it has without a load, and then it looks for what is idle."""
    prompts = [[200, 201], list(range(100, 128)), [*range(16), 1000], list(range(200, 229))]
    outputs, priorities = (1, 1, 18, 1), (1, 0, 0, 0)
    each = zip(prompts, (8, 112, 66, 114), outputs, priorities, strict=True)
    rows = [
        Row(0, units, num_tokens, num_outputs, None, priority, None)
        for units, num_tokens, num_outputs, priority in each
    ]
    offload = OffloadConfig(host_pages=500, load_kv="async", h2d=3000, d2h=1000, latency_us=5000.0)
    tiers = Grouped(Case(rows, 4, 4, 37, 7, 4, "default", 1), STATES, "all", offload, "align")
    fast, slow = (tiers.replayed(audit=False, step_by_step=slowly) for slowly in (False, True))
    assert_same_outcome(fast, slow)
    assert fast.summary["transfers"]["num_given_up"]


def test_after_its_load_a_request_computes_when_a_step_reaches_a_page_end() -> None:
    """In `align`: the chunk of another request leaves two tokens of a step, short of a page of four."""
    times_ms = 0, 1000, 2000, 2000
    prompts = [list(range(20)), list(range(100, 160)), [*range(20), 50, 51, 52, 53, 54], list(range(200, 224))]
    rows = [Row(*each, len(each[1]), 1, None, 0, None) for each in zip(times_ms, prompts, strict=True)]
    offload = OffloadConfig(host_pages=500, load_kv="async", **FAST)
    case = Case(rows, 1, 4, 16, 6, 4, "default", 1)
    report = Grouped(case, STATES, "all", offload, "align").replayed()
    assert report.request_columns["host_tokens"].tolist() == [0, 0, 20, 0]
    # Five pages of one prompt after its first, and then the rest of the other.
    assert report.step_logs[0].columns["tokens"].tolist()[-8:] == [4, 4, 4, 4, 4, 4, 4, 1]


@pytest.mark.parametrize("load_kv", ["async", "sync"])
def test_a_request_does_not_begin_after_a_state_that_was_loaded_in_the_same_step(load_kv: LoadKv) -> None:
    """As in vLLM: what a load makes findable counts as computed by the step in which its request has its turn."""
    times_ms = 0, 1000, 2000, 2000
    prompts = [list(range(20)), list(range(100, 160)), [*range(20), 50, 51], [*range(20), 60, 61]]
    rows = [Row(*each, len(each[1]), 1, None, 0, None) for each in zip(times_ms, prompts, strict=True)]
    offload = OffloadConfig(host_pages=500, load_kv=load_kv, **FAST)
    report = Grouped(Case(rows, 1, 4, 18, 64, 4, "default", 1), STATES, "all", offload, "all").replayed()
    assert report.request_columns["host_tokens"].tolist() == [0, 0, 20, 0]
    assert report.request_columns["cached_tokens"].tolist() == [0, 0, 20, 20]
    assert report.step_logs[0].columns["tokens"].tolist() == [20, 60, 2, 2]


@pytest.mark.parametrize(("load_kv", "step"), [("async", 3), ("sync", 2)])
def test_a_load_begins_in_a_step_that_reaches_no_page_end(load_kv: LoadKv, step: int) -> None:
    """In `align`: the chunks of another prompt leave two tokens of each step, as many as follow the load."""
    times_ms = 0, 1000, 2000, 2001
    prompts = [list(range(20)), list(range(100, 160)), list(range(200, 224)), [*range(20), 50, 51]]
    rows = [Row(*each, len(each[1]), 1, None, 0, None) for each in zip(times_ms, prompts, strict=True)]
    offload = OffloadConfig(host_pages=500, load_kv=load_kv, **FAST)
    report = Grouped(Case(rows, 1, 4, 20, 6, 4, "default", 1), STATES, "all", offload, "align").replayed()
    assert report.request_columns["cached_tokens"].tolist() == [0, 0, 0, 20]
    tokens = [4, 4, 4, 4, 4, 4]
    tokens[step - 1] += 2
    assert report.step_logs[0].columns["tokens"].tolist()[-6:] == tokens


@example(42, 0)
@example(290, 0)
@example(330, 0)
@example(358, 0)
@example(503, 0)
@example(84, 9)
@example(290, 3)
@example(485, 2)
@given(st.integers(0, 100_000), st.sampled_from([0, 1, 2, 3, 5, 9]))
def test_requests_whose_loads_have_ended_do_not_wait_for_each_other(seed: int, fail_every: int) -> None:
    """L8: prompts much longer than a window and a chunk, of which several are loaded at a time and then lack memory.

    A whole chunk takes parts in windows that none of the rest needs together, so it may take more than was promised.
    One whose load brought nothing waits again, before others whose loads have ended and hold the memory it needs.
    """
    random = Random(seed)
    groups = (
        PartGroup(FULL, part_bytes=1),
        PartGroup(
            KvLayer(kind="window", num_heads=1, head_numbers=2, span=random.randint(2, 6)),
            part_bytes=random.choice([1, 2, 4]),
        ),
    )
    num_requests = random.randint(10, 40)
    stems = [_units(random, random.randint(40, 120)) for _ in range(random.randint(2, 6))]
    rows = []
    for index in range(num_requests):
        stem = random.choice(stems)
        units = stem[: random.randint(len(stem) // 2, len(stem))] + _units(random, random.randint(10, 60))
        rows.append(TraceRequest(index, 0, pack_units(units), 2 * len(units), random.randint(1, 4)))
    config = ReplayConfig(
        page_size=2,
        num_pages=random.randint(180, 260) // random.randint(1, 2),
        max_num_batched_tokens=random.choice([32, 64, 100]),
        max_num_seqs=random.randint(1, 4),
        groups=groups,
        kv_groups="all",
        concurrency=random.randint(2, 4),
        cost=LinearCost(step_ms=1.0, chunk_token_ms=1.0),
        audit=True,
        offload=OffloadConfig(
            host_pages=800,
            load_kv="async",
            fail_every=fail_every,
            h2d=random.choice(["1MB/s", "100kB/s"]),
            d2h="1GB/s",
        ),
    )
    trace = Trace(rows, unit_tokens=2)
    fast, slow = (replay(trace, replace(config, step_by_step=slowly)) for slowly in (False, True))
    assert_same_outcome(fast, slow)
    assert fast.summary["num_completed"] + fast.summary["num_rejected"] == num_requests


@example(2, 3, 1, 9)
@example(4, 8, 4, 13)
@example(6, 16, 4, 11)
@given(st.integers(2, 6), st.sampled_from([2, 3, 4, 7, 8, 16]), st.integers(1, 4), st.integers(8, 40))
def test_a_request_that_lacks_a_page_gets_the_memory_of_another_whose_load_has_ended(
    span: int, part_bytes: int, num_rest: int, num_pages: int
) -> None:
    """L8: two requests whose loads leave less than a page of the window; each lacks one to compute its last tokens."""
    trace, config = _two_that_lack_a_page(span, part_bytes, num_rest, num_pages)
    fast, slow = (replay(trace, replace(config, step_by_step=slowly)) for slowly in (False, True))
    assert_same_outcome(fast, slow)
    assert fast.summary["num_completed"] + fast.summary["num_rejected"] == 7


def test_a_journal_says_that_a_load_was_given_up() -> None:
    """The last of the two, which then waits and loads again."""
    from kvarts.proof.record.journal import JournalWriter

    trace, config = _two_that_lack_a_page(4, 8, 4, 13)
    file = io.BytesIO()
    sizes: dict[str, Any] = {"total_blocks": config.num_blocks, "block_size_tokens": config.page_size}
    writer = JournalWriter(file, **sizes, memory=config.memory.to_builtins())
    replay(trace, config, observers_of=lambda _: [writer])
    writer.close()
    lines = [json.loads(line) for line in file.getvalue().splitlines()[1:]]
    of_last = [line["event"] for line in lines if line["request"] == 6]
    assert of_last.count("load_lost") == 1
    assert "admitted" in of_last[of_last.index("load_lost") :]


def _two_that_lack_a_page(span: int, part_bytes: int, num_rest: int, num_pages: int) -> tuple[Trace, ReplayConfig]:
    """Return a replay in which two requests come back whose stems others have evicted, and its configuration."""
    groups = (
        PartGroup(FULL, part_bytes=1),
        PartGroup(KvLayer(kind="window", num_heads=1, head_numbers=2, span=span), part_bytes=part_bytes),
    )
    stems = [list(range(1000 * base, 1000 * base + 40)) for base in range(1, 6)]
    prompts = [(index * 100_000, stem) for index, stem in enumerate(stems)]
    prompts += [(1_000_000, stems[index] + list(range(50 * index, 50 * index + num_rest))) for index in range(2)]
    rows = [TraceRequest(index, ns, pack_units(units), 2 * len(units), 1) for index, (ns, units) in enumerate(prompts)]
    config = ReplayConfig(
        page_size=2,
        num_pages=num_pages,
        max_num_batched_tokens=8,
        max_num_seqs=4,
        groups=groups,
        kv_groups="all",
        cost=LinearCost(step_ms=1.0, chunk_token_ms=1.0),
        audit=True,
        offload=OffloadConfig(host_pages=800, load_kv="async", h2d="5kB/s", d2h="1GB/s"),
    )
    return Trace(rows, unit_tokens=2), config


def _units(random: Random, count: int) -> list[int]:
    return [random.randint(0, 10**6) for _ in range(count)]


@pytest.mark.parametrize("load_kv", ["sync", "async"])
def test_with_a_connector_who_gives_up_first_releases_what_its_window_has_passed(load_kv: LoadKv) -> None:
    """As in vLLM, which drops requests before the turns of a step, at which the others release what theirs passed."""
    window = PartGroup(KvLayer(kind="window", num_heads=1, head_numbers=2, span=2), 1)
    rows = [
        TraceRequest(index, 0, pack_units(range(4 * index, 4 * index + 4)), 4, 6, cancel_after_ns=gives_up_ns)
        for index, gives_up_ns in enumerate((None, 2_500_000))
    ]
    told = Releases()
    config = ReplayConfig(
        page_size=1,
        num_pages=40,
        kv_groups="all",
        groups=(PartGroup(FULL, 1), window),
        cost=LinearCost(step_ms=1.0),
        audit=True,
        offload=OffloadConfig(host_memory=1000, load_kv=load_kv, h2d="1MB/s", d2h="1MB/s"),
    )
    replay(Trace(rows), config, observers_of=lambda _: [told])
    end = told.names.index(("cancelled", 1))
    # Each releases a page a step. In the last one, the other request does so after this one has left.
    given_back = [("given back", 1), ("given back", 1), ("cancelled", 1), ("given back", 0)]
    assert told.names[end - 2 : end + 2] == given_back


class Releases:
    """An EventReader that notes who gives up, and whose passed parts are given back."""

    wants_details = True

    def __init__(self) -> None:
        self.names: list[tuple[str, int]] = []

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Cancelled):
                self.names.append(("cancelled", event.request))
            elif isinstance(event, PartsGivenBack):
                self.names.append(("given back", event.content.owner))

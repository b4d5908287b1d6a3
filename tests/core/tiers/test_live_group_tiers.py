"""Engines with KV groups and tiers below that move blocks: every token finds in its blocks what it attends to."""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.build import PrepareTiers
from kvarts.core.config import EngineConfig
from kvarts.core.kv.groups import GroupMemory, PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.core.request import RequestState
from kvarts.core.tiers.config import OffloadConfig
from kvarts.core.tiers.opening import prepare_tiers

from builders.case import Case, Row
from builders.group_tiers import returning
from builders.live_groups import LiveRun
from oracles.naive import NaiveRequest

pytestmark = pytest.mark.laws

FULL = KvLayer(kind="full", num_heads=1, head_numbers=2)


@st.composite
def live_groups(draw: st.DrawFn) -> tuple[PartGroup, ...]:
    """Full layers, most often, and up to two windows; parts of one to six blocks."""
    sizes = st.sampled_from([1, 2, 4, 6])
    groups = [PartGroup(FULL, draw(sizes))] if draw(st.integers(0, 4)) else []
    spans = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 16]), min_size=0 if groups else 1, max_size=2))
    windows = (KvLayer(kind="window", num_heads=1, head_numbers=2, span=span) for span in spans)
    return (*groups, *(PartGroup(layer, draw(sizes)) for layer in windows))


def requests_of(case: Case) -> list[NaiveRequest]:
    """The requests of a case, with all that they generate, which is no other request's."""
    requests = case.naive_requests()
    own = count(100_000)
    for request in requests:
        request.output = tuple(next(own) for _ in range(request.num_output))
    return requests


def run_of(case: Case, groups: tuple[PartGroup, ...], keeps: Any, tiers: PrepareTiers) -> LiveRun:
    memory = GroupMemory(groups, keeps)
    config = EngineConfig(**case.sizes)
    return LiveRun(requests_of(case), memory, config, memory.num_blocks(case.num_pages), tiers=tiers)


@given(
    returning(max_requests=16),
    live_groups(),
    st.sampled_from(["all", "tails"]),
    st.sampled_from(["eager", "lazy", "exclusive"]),
    st.sampled_from([2, 20, 500]),
    st.sampled_from([None, 3, 30, 500]),
    st.sampled_from([0, 0, 2, 5]),
    st.booleans(),
)
def test_every_token_finds_what_it_attends_to(
    case: Case,
    groups: tuple[PartGroup, ...],
    keeps: str,
    policy: Any,
    host_pages: int,
    disk_pages: int | None,
    loses: int,
    delays: bool,
) -> None:
    """L1, L2, L6, L8, whatever was stored, loaded, awaited or preempted, and however late transfers are reported.

    A second engine finds the files that the first one has left.
    """
    offload = OffloadConfig(host_pages=host_pages, disk_pages=disk_pages, policy=policy)
    live = run_of(case, groups, keeps, partial(prepare_tiers, offload, known_keys=[], namespace="test"))
    live.executor.delays_reports, live.executor.loses = delays, loses
    live.run()
    check(live)
    again = run_of(
        case, groups, keeps, partial(prepare_tiers, offload, known_keys=live.executor.files, namespace="test")
    )
    again.executor.files = live.executor.files
    again.run()
    check(again)


def check(live: LiveRun) -> None:
    """All requests have ended as they should, and nothing is held."""
    for request in live.requests:
        if request.state is not RequestState.REJECTED:
            _, tokens = live.tokens[request.index]
            assert request.content.tokens(0, request.content.num_known_tokens).tolist() == tokens
    scheduler = live.engine.scheduler
    scheduler.check()
    assert scheduler.cache.num_used == 0
    assert live.engine.tiers is not None and live.engine.tiers.num_pages()[0] == 0


def test_a_load_that_brings_a_wrong_block_is_noticed() -> None:
    """The control: what is read is looked at, token by token."""
    groups = PartGroup(FULL, 2), PartGroup(KvLayer(kind="window", num_heads=1, head_numbers=2, span=6), 4)
    rows = [Row(seq * 100, [seq % 3 * 50 + unit for unit in range(22)], 22, 4, None, 0, None) for seq in range(9)]
    case = Case(rows, 1, 4, 7, 64, 2, "default", 1)
    offload = OffloadConfig(host_pages=100)
    right = run_of(case, groups, "tails", partial(prepare_tiers, offload))
    right.run()
    assert right.executor.num_loads > 2
    assert sum(request.cached_tokens for request in right.requests) == 6 * 20
    wrong = run_of(case, groups, "tails", partial(prepare_tiers, offload))
    wrong.executor.loads_wrong = True
    with pytest.raises(AssertionError, match="its block holds another"):
        wrong.run()


def test_a_later_engine_reads_the_files_of_the_first() -> None:
    """All that the requests share comes from files; blocks of a part are one file."""
    groups = PartGroup(FULL, 2), PartGroup(KvLayer(kind="window", num_heads=1, head_numbers=2, span=6), 4)
    rows = [Row(seq * 100, [seq * 50 + unit for unit in range(22)], 22, 4, None, 0, None) for seq in range(3)]
    case = Case(rows, 1, 4, 12, 64, 2, "default", 1)
    offload = OffloadConfig(host_pages=100, disk_pages=100)
    first = run_of(case, groups, "tails", partial(prepare_tiers, offload, known_keys=[], namespace="test"))
    first.run()
    files = first.executor.files
    assert {len(slots) for slots in files.values()} == {1 * 4, 2 * 4}
    other = run_of(case, groups, "tails", partial(prepare_tiers, offload, known_keys=files, namespace="another model"))
    other.executor.files = files.copy()
    other.run()
    assert not other.executor.num_loads_of_files
    again = run_of(case, groups, "tails", partial(prepare_tiers, offload, known_keys=files, namespace="test"))
    again.executor.files = files
    again.run()
    assert again.executor.num_loads_of_files
    assert [request.cached_tokens for request in again.requests] == [20, 20, 20]
    assert [request.cached_tokens_below for request in again.requests] == [(0, 20), (0, 20), (0, 20)]


def test_a_copy_that_the_step_computes_is_not_stored_in_it() -> None:
    """The one that was computed before has been evicted for it."""
    rows = [Row(0, [0], num_tokens, 1, None, 0, None) for num_tokens in (4, 4, 4)]
    case = Case(rows, 4, 1, 5, 4, 4, "default", 1)
    groups = (PartGroup(KvLayer(kind="window", num_heads=1, head_numbers=2, span=2), 1),)
    run_of(case, groups, "all", partial(prepare_tiers, OffloadConfig(host_pages=2))).run()

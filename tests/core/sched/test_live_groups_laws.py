"""Real engines with KV groups, without a model: plans, blocks and page tables, against engines that look at it all."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.errors import ConfigError
from kvarts.core.config import EngineConfig
from kvarts.core.kv.groups import GroupMemory, PartGroup
from kvarts.core.kv.pool import IdPool

from builders.case import Case, Row, branching_cases, cases
from builders.grouped import naive_settings
from builders.live_groups import FULL, STATE, STEP_NS, LiveRun, assert_as_naive, live_groups, window, with_outputs
from oracles.grouped_cache import GroupedCache
from oracles.naive import NaiveRequest, run_naive
from oracles.naive_group_engine import NaiveGroupEngine

pytestmark = pytest.mark.laws


def both(
    case: Case, groups: tuple[PartGroup, ...], keeps: Any, snapshots: Any = "ends"
) -> tuple[LiveRun, list[NaiveRequest], NaiveGroupEngine]:
    """A case through a live engine and through the naive one."""
    memory = GroupMemory(groups, keeps)
    config = EngineConfig(**case.sizes, snapshots=snapshots)
    requests = list(with_outputs(case.naive_requests()))
    naive = NaiveGroupEngine(
        **naive_settings(case, groups, keeps), at_branches=snapshots == "branches", cost=lambda batch, engine: STEP_NS
    )
    run_naive(requests, [naive])
    live = LiveRun(list(with_outputs(case.naive_requests())), memory, config, memory.num_blocks(case.num_pages))
    live.run()
    return live, requests, naive


@given(cases(max_requests=16), live_groups(), st.sampled_from(["all", "tails"]))
def test_every_step_and_every_block_is_as_in_the_naive_engine(
    case: Case, groups: tuple[PartGroup, ...], keeps: str
) -> None:
    """L1, L2, L4, L8: used and cached bytes of every step, of every group, equal those of an engine that looks at every
    token of every layer; and every token finds in its blocks what it attends to."""
    # Memory that is short now and then.
    case.num_pages = max(1, case.num_pages * 2 // 3)
    assert_as_in_naive(case, groups, keeps)


@given(branching_cases(), live_groups(), st.sampled_from(["all", "tails"]))
def test_snapshots_at_branches_are_those_of_the_naive_engine(
    case: Case, groups: tuple[PartGroup, ...], keeps: str
) -> None:
    """L1, L2, L4, L8: a prompt that leaves another keeps its state there, as well as at its own end."""
    assert_as_in_naive(case, groups, keeps, "branches")


def assert_as_in_naive(case: Case, groups: tuple[PartGroup, ...], keeps: str, snapshots: str = "ends") -> None:
    """Requests, steps, and parts of every group at every step."""
    case.profile = "default"
    live, requests, naive = both(case, groups, keeps, snapshots)
    block_bytes = GroupMemory(groups).block_bytes
    assert_as_naive(live, requests, naive, block_bytes)
    for request, expected in zip(live.requests, requests, strict=True):
        if expected.rejected:
            continue
        assert request.first_token_ns == expected.first_token_ns
        assert request.recomputed_tokens == expected.recomputed_tokens
        tenant, tokens = live.tokens[request.index]
        assert request.content.tokens(0, request.content.num_known_tokens).tolist() == tokens, tenant
    for step, expected_step in zip(live.steps.done, naive.steps, strict=True):
        assert step.num_released * block_bytes == expected_step.released
        assert step.num_tokens == expected_step.tokens
    scheduler = live.engine.scheduler
    assert scheduler.cache.num_used == 0
    live.engine.clear_cache()
    assert scheduler.cache.pool.num_empty == scheduler.cache.pool.total


def full_and(span: int) -> tuple[PartGroup, ...]:
    """A full group, and a window with parts of two blocks."""
    return PartGroup(FULL, 2), PartGroup(window(span), 4)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_page_that_is_given_back_one_token_early_is_read_from_another_sequence(page_size: int) -> None:
    """The control: with what is read as it is, and a window that the control plane takes for shorter."""
    # The token that still sees the page is the first of a page itself, which takes the block that was just given back.
    span = 2 * page_size + 2
    rows = [Row(0, list(range(2 + seq * 50, 24 + seq * 50)), 22, 40, None, 0, None) for seq in range(4)]
    case = Case(rows, 1, page_size, 160 // page_size, 64, 4, "default", 1)
    right = full_and(span)
    live, _, _ = both(case, right, "tails")
    assert live.executor.num_looked_at > 5_000
    config = live.engine.config
    memory = GroupMemory(full_and(span - 1), "tails")
    wrong = LiveRun(list(with_outputs(case.naive_requests())), memory, config, memory.num_blocks(case.num_pages))
    wrong.executor.layers = live.executor.layers
    with pytest.raises(AssertionError, match="its block holds another"):
        wrong.run()


@given(st.integers(1, 40), st.integers(1, 24), st.sampled_from([1, 2, 3, 4, 8]))
def test_the_longest_sequence_that_can_run_is_found(num_pages: int, span: int, page_size: int) -> None:
    """One token more is refused."""
    memory = GroupMemory(full_and(span))
    config = EngineConfig(num_pages=num_pages, page_size=page_size, max_num_batched_tokens=5, max_num_seqs=2)
    most = 10_000
    request = NaiveRequest(0, 0, (1,), 1, (2,))
    run = LiveRun([request], memory, config, memory.num_blocks(num_pages))
    scheduler: Any = run.engine.scheduler
    length = scheduler.most_tokens(most)
    assert (
        scheduler.cache.group_needs.at_most(length)
        <= scheduler.cache.pool.total
        < scheduler.cache.group_needs.at_most(length + 1)
    )
    assert length >= num_pages * page_size, "never fewer than whole pages hold"


def test_blocks_must_divide_parts() -> None:
    with pytest.raises(ConfigError, match="divide no part"):
        GroupedCache([PartGroup(FULL, 3)], page_size=4, total_bytes=12, blocks=IdPool(6))


@given(cases(max_requests=16), live_groups(), st.integers(1, 4), st.sampled_from(["all", "tails"]))
def test_states_are_those_of_the_tokens_before(
    case: Case, groups: tuple[PartGroup, ...], part_bytes: int, keeps: str
) -> None:
    """L6 without a model: a chunk begins from the state of its tokens, and a snapshot is that of a page end."""
    case.num_pages += 2 * part_bytes
    assert_as_in_naive(case, (*groups, PartGroup(STATE, part_bytes)), keeps)


def with_prefixes(*, page_size: int) -> Case:
    """Prompts that begin alike, and end in the middle of a page; the first is there before the others."""
    begin = list(range(2, 2 + 3 * page_size))
    rows = [Row(10 * seq, [*begin, 100 + seq, 200 + seq], 3 * page_size + 2, 12, None, 0, None) for seq in range(4)]
    return Case(rows, 1, page_size, 40, 64, 4, "default", 1)


def test_a_prefix_is_gone_on_from_at_its_snapshot() -> None:
    live, _, _ = both(with_prefixes(page_size=4), (PartGroup(FULL, 2), PartGroup(STATE, 6)), "all")
    assert live.executor.num_snapshots == 1, "of the prefix that all share"
    assert live.executor.num_begun_from_snapshots == 3
    assert [request.cached_tokens for request in live.requests] == [0, 12, 12, 12]

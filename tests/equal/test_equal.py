"""Law L15, the comparison itself: both sides are kvarts', and one has a fault. `.ci/run equal` runs vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from equal.compare import Difference, first_difference
from equal.ours import kvarts_steps
from equal.shrink import describe, shrunk
from equal.workload import ROWS, Step, Workload, draw_workload


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_every_request_of_a_row_ends_and_the_same_workload_gives_the_same_steps(row: str) -> None:
    workload, again = draw_workload(row, seed=1), draw_workload(row, seed=1)
    workload.publishes = again.publishes = False  # what is published is decoded with vLLM's classes
    counts: Counter[str] = Counter()
    assert first_difference(kvarts_steps(workload), kvarts_steps(again), counts) is None
    num_given_up = sum(ask.gives_up < 1 << 62 for ask in workload.asks)
    assert len(workload.asks) - num_given_up <= counts["requests"] <= len(workload.asks)


@pytest.mark.parametrize(
    ("row", "seed"), [("shipped:qwen3.5-27b:mtp:0.33", 65_006), ("foreseen:eagle:states:async", 3)]
)
def test_a_step_with_drafts_computes_no_more_tokens_than_its_budget(row: str, seed: int) -> None:
    """Also if a chunk preempts a decode that has not had its turn: it took nothing of the budget."""
    workload = draw_workload(row, seed, "0.33")
    for step in kvarts_steps(workload):
        assert sum(step.tokens.values()) <= workload.max_num_batched_tokens


def faulty_steps(workload: Workload, num_hit: int) -> Iterator[Step]:
    """Yield kvarts' steps, with a token more for a request that hits `num_hit` tokens."""
    for step in kvarts_steps(workload):
        step.admitted = {index: count + (count >= num_hit) for index, count in step.admitted.items()}
        yield step


def test_a_fault_is_found_and_shrunk_to_the_requests_that_show_it() -> None:
    workload = draw_workload("full", seed=1)

    def compare(workload: Workload) -> Difference | None:
        return first_difference(kvarts_steps(workload), faulty_steps(workload, num_hit=1), Counter())

    smaller, difference = shrunk(workload, compare)
    assert difference.fields() == ["admitted"]
    assert difference.of_vllm_alone is None
    assert len(smaller.asks) == 2 < len(workload.asks)  # one that computes a page, and one that hits it
    assert "2 requests" in describe(smaller, difference)


def test_a_side_without_further_steps_differs() -> None:
    workload = draw_workload("full", seed=1)
    short = list(kvarts_steps(workload))[:-1]
    difference = first_difference(kvarts_steps(workload), iter(short), Counter())
    assert difference is not None
    assert difference.fields() == ["number of steps"]

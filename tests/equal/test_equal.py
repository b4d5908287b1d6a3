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
@pytest.mark.parametrize("row", [row for row in ROWS if row != "published"])  # decoded with vLLM's classes
def test_every_request_of_a_row_ends_and_the_same_workload_gives_the_same_steps(row: str) -> None:
    workload = draw_workload(row, seed=1)
    counts: Counter[str] = Counter()
    assert first_difference(kvarts_steps(workload), kvarts_steps(draw_workload(row, seed=1)), counts) is None
    num_given_up = sum(ask.gives_up < 1 << 62 for ask in workload.asks)
    assert len(workload.asks) - num_given_up <= counts["requests"] <= len(workload.asks)


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

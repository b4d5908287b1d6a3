"""The router `vllm-ranks`, and that of groups in lock step, against vLLM's rule, computed from all that happened."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.content import Content
from kvarts.core.request import Request
from kvarts.sim.lockstep import WithinGroups
from kvarts.sim.routers.config import Routing
from kvarts.sim.routers.view import WorkerFacts

pytestmark = pytest.mark.laws


@given(st.integers(1, 4), st.data())
def test_the_rank_with_the_lowest_score_is_chosen(num_ranks: int, data: st.DataObject) -> None:
    router = Routing().open("vllm-ranks", WorkerFacts(num_ranks, 4, 64))
    placed: list[list[int]] = [[] for _ in range(num_ranks)]
    reports = [(0, 0, 0.0)] * num_ranks
    since = [0] * num_ranks
    for index in range(data.draw(st.integers(1, 30))):
        if data.draw(st.booleans()):
            load = st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from([0.0, 0.5, 0.75, 1.0]))
            reports = data.draw(st.lists(load, min_size=num_ranks, max_size=num_ranks))
            for rank, (waiting, running, usage) in enumerate(reports):
                router.report(rank, running, waiting, 0, 0, usage)
            since = [0] * num_ranks
        if data.draw(st.booleans()):
            rank = data.draw(st.integers(0, num_ranks - 1))
            if placed[rank]:
                router.ended(placed[rank].pop())
        scores = []
        for rank, (reported, running, usage) in enumerate(reports):
            waiting = reported + since[rank]
            pressure = 6.0 * waiting * max(0.0, usage - 0.5)
            scores.append(max(len(placed[rank]), waiting + running) + pressure)
        turns = [(index + each) % num_ranks for each in range(num_ranks)]
        expected = min(turns, key=scores.__getitem__)
        content = Content.from_tokens([1] * 8, page_size=4, owner=index)
        assert router.place(Request(index, content, 4, 4, 0), None, 0) == expected
        placed[expected].append(index)
        since[expected] += 1


@given(st.integers(1, 3), st.integers(1, 3), st.data())
def test_groups_in_turn_choose_as_front_ends_of_their_own(num_groups: int, num_ranks: int, data: st.DataObject) -> None:
    """The router of groups in lock step is one `vllm-ranks` for each group, whose requests are every so many."""
    together = WithinGroups(num_groups * num_ranks, num_ranks)
    alone = [Routing().open("vllm-ranks", WorkerFacts(num_ranks, 4, 64)) for _ in range(num_groups)]
    assert {each.staleness_ns for each in alone} == {together.staleness_ns}
    in_flight: list[int] = []
    for index in range(data.draw(st.integers(1, 30))):
        has_reports, has_end = data.draw(st.tuples(st.booleans(), st.booleans()))
        if has_reports:
            for worker in range(num_groups * num_ranks):
                group, rank = divmod(worker, num_ranks)
                waiting, running = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
                usage = data.draw(st.sampled_from([0.0, 0.5, 0.75, 1.0]))
                together.report(worker, running, waiting, 0, 0, usage)
                alone[group].report(rank, running, waiting, 0, 0, usage)
        if in_flight and has_end:
            ended = in_flight.pop()
            together.ended(ended)
            alone[ended % num_groups].ended(ended)
        content = Content.from_tokens([1] * 8, page_size=4, owner=index)
        request = Request(index, content, 4, 4, 0)
        group = index % num_groups
        chosen = alone[group].place(request, None, 0)
        assert chosen is not None
        assert together.place(request, None, 0) == group * num_ranks + chosen
        in_flight.append(index)

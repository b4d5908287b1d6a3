"""The laws of the index of a tier, as assertions."""

from __future__ import annotations

from collections.abc import Callable

from kvarts.content import Content
from kvarts.kv.pool import PageId
from kvarts.offload.index import TierIndex
from kvarts.offload.tier_run import NodeState

__all__ = ["check_index"]


def check_index(index: TierIndex, is_above: Callable[[Content, int], bool]) -> None:
    """Assert laws L1 to L3 of `index`. `is_above`: whether a faster tier has the first n pages of a content."""
    num_cached = num_pinned = 0
    slots: list[PageId] = []
    listed = {id(run): place for place, run in enumerate(index.recency())}
    useful: set[int] = set()
    for run in index.runs():
        assert run.start < run.end, f"L1: {run} has no pages"
        assert run.parent is not None
        assert run.parent.parent is None or run.parent.end == run.start, f"L3: {run} does not follow its parent"
        assert run.pins >= sum(child.pins for child in (run.children or {}).values()), f"L2: pins of {run}"
        assert (run.state is NodeState.STORED) == (id(run) in listed), f"L2: {run} is in the wrong list"
        assert run.state is not NodeState.DOOMED, f"L3: {run} can be found"
        assert run.state is not NodeState.HOLE or run.children or run.pins, f"L1: {run} is of no use"
        assert run.state is not NodeState.COMING or run.pins, f"L2: {run} is coming, and nothing pins it"
        if run.state is NodeState.STORED and not run.pins:
            num_cached += run.num_pages
        elif run.state is not NodeState.HOLE:
            num_pinned += run.num_pages
        slots += run.slots or ()
        if run.state is NodeState.STORED:
            node = run.parent
            while node.parent is not None:
                useful.add(id(node))
                assert node.pins or id(node) not in listed or listed[id(node)] > listed[id(run)], (
                    f"L3: {node} would go before {run}"
                )
                node = node.parent
    num_holes = sum(run.state is NodeState.HOLE for run in index.runs())
    assert num_holes == index.num_holes, f"L1: {num_holes} holes, counted as {index.num_holes}"
    for run in index.runs():
        if run.state is NodeState.HOLE and id(run) in useful:
            assert is_above(run.content, run.end), f"L3: what follows {run} cannot be reached"
    assert num_cached == index.num_cached, f"L1: {num_cached} pages cached, counted as {index.num_cached}"
    assert index.num_used >= num_pinned, f"L1: {num_pinned} pages pinned or coming, {index.num_used} in use"
    if index.pool.has_ids:
        slots += index.pool.empty_ids
        assert len(set(slots)) == len(slots), "L1: a page of the tier has two owners"

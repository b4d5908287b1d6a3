"""Rows of integers come back as columns, whatever their sizes."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.columns import Rows, narrowed
from kvarts.base.limits import MOST_COUNT
from kvarts.core.events import Event, LeapDone, Preemption, StepDone
from kvarts.sim.report.steps import StepLog

NUMBERS = st.one_of(
    st.integers(-3, 3), st.integers(-(1 << 15), 1 << 15), st.integers(-(1 << 31), 1 << 31), st.integers(0, 1 << 62)
)


@pytest.mark.laws
@given(
    batches=st.lists(st.lists(st.tuples(NUMBERS, NUMBERS, st.integers(0, 1)), max_size=9), max_size=6),
    near=st.sampled_from([{}, {1: 0}, {0: 1, 2: 0}]),
    unit=st.sampled_from([1, 1_000_000]),
)
def test_columns_are_those_of_the_rows(
    batches: list[list[tuple[int, int, int]]], near: dict[int, int], unit: int
) -> None:
    rows = Rows(3, near)
    whole = [[(first // unit * unit, second, third) for first, second, third in batch] for batch in batches]
    for batch in whole:
        rows.add([number for row in batch for number in row])
        rows._pack()
    expected = [[row[field] for batch in whole for row in batch] for field in range(3)]
    assert len(rows) == len(expected[0])
    assert [rows.column(field).tolist() for field in range(3)] == expected
    sent: Rows = pickle.loads(pickle.dumps(rows))
    copied = Rows(3, near)
    copied.add_columns([sent.column(field) for field in range(3)])
    assert [column.tolist() for column in sent.take_columns()] == expected
    assert [column.tolist() for column in copied.take_columns()] == expected
    assert [column.tolist() for column in rows.take_columns()] == expected
    assert not len(rows) and [len(column) for column in rows.take_columns()] == [0, 0, 0]


@pytest.mark.parametrize(
    ("first", "second", "near", "size"),
    [
        (range(1 << 60, (1 << 60) + 1000), [5] * 1000, {}, 2),
        (range(0, 1000 * 10**6, 10**6), [5] * 1000, {}, 2),
        ([1 << 33, *range(999)], range(7, 1007), {}, 5 + 2),
        (range(10**12, 10**12 + 50_000_000, 50_000), range(10**12 + 3, 10**12 + 50_000_003, 50_000), {1: 0}, 2),
    ],
    ids=["close", "whole milliseconds", "five bytes", "near another"],
)
def test_a_block_takes_the_bytes_of_its_distances(
    first: Sequence[int], second: Sequence[int], near: dict[int, int], size: int
) -> None:
    rows = Rows(2, near)
    rows.add_columns([np.array(first, np.int64), np.array(second, np.int64)])
    assert sum(len(content) for blocks in rows._blocks for *_, content in blocks) == 1000 * size
    assert [rows.column(field).tolist() for field in range(2)] == [list(first), list(second)]


COUNTS = st.one_of(st.integers(0, 3), st.integers(0, MOST_COUNT))
SPANS = (
    "num_steps",
    "used",
    "cached",
    "released",
    "running",
    "waiting",
    "blocked",
    "decodes",
    "tokens",
    "preempted",
    "admitted",
    "is_leap",
    "loading",
    "duration_ns",
)
PREEMPTED = Preemption(0, 0, 1, 1, 1, 1)


@st.composite
def steps_and_leaps(draw: st.DrawFn) -> tuple[list[Event], list[dict[str, int]]]:
    """Events of an engine, and what the spans of its log should say."""
    events: list[Event] = []
    expected: list[dict[str, int]] = []
    step = 0
    for is_leap in draw(st.lists(st.booleans(), min_size=1, max_size=8)):
        used, cached, released, running, waiting, decodes, tokens, admitted, loading = (draw(COUNTS) for _ in range(9))
        blocked, num_preempted = draw(st.integers(0, 3)), draw(st.integers(0, 2))
        durations_ns = draw(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=3))
        counts = used, cached, released, running, waiting, blocked
        if is_leap:
            pages = [0] * len(durations_ns)
            events.append(LeapDone(step, 0, durations_ns, pages, *counts, num_loading=loading))
            values = len(durations_ns), *counts, running, running, 0, 0, 1, loading, sum(durations_ns)
        else:
            preemptions = (PREEMPTED,) * num_preempted
            more = decodes, tokens, admitted, preemptions
            events.append(StepDone(step, 0, durations_ns[0], *counts, *more, num_loading=loading))
            values = 1, *counts, decodes, tokens, num_preempted, admitted, 0, loading, durations_ns[0]
        step += values[0]
        expected.append(dict(zip(SPANS, values, strict=True)))
    return events, expected


@pytest.mark.laws
@given(steps_and_leaps())
def test_spans_are_those_of_the_events(case: tuple[list[Event], list[dict[str, int]]]) -> None:
    events, expected = case
    log = StepLog(8)
    log.observe(events)
    columns = {name: log.spans[name].tolist() for name in SPANS}
    for name in SPANS:
        assert columns[name] == [span[name] for span in expected], name


@given(numbers=st.lists(NUMBERS))
def test_narrow_columns_keep_their_numbers(numbers: list[int]) -> None:
    column = np.array(numbers, np.int64)
    assert narrowed(column).tolist() == numbers
    widest = max([-number - 1 if number < 0 else number for number in numbers], default=0)
    assert narrowed(column).dtype.itemsize == next(size for size in (1, 2, 4, 8) if widest < 1 << (8 * size - 1))

"""Rows of integers come back as columns, whatever their sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.columns import PACK_AT, Rows

NUMBERS = st.one_of(
    st.integers(-3, 3), st.integers(-(1 << 15), 1 << 15), st.integers(-(1 << 31), 1 << 31), st.integers(0, 1 << 62)
)


@pytest.mark.laws
@given(batches=st.lists(st.lists(st.tuples(NUMBERS, NUMBERS, st.integers(0, 1)), max_size=9), max_size=6))
def test_columns_are_those_of_the_rows(batches: list[list[tuple[int, int, int]]]) -> None:
    rows = Rows(3)
    for batch in batches:
        rows.add([number for row in batch for number in row])
        rows._pack()
    expected = [[row[field] for batch in batches for row in batch] for field in range(3)]
    assert len(rows) == len(expected[0])
    assert rows.to_lists() == expected
    assert [column.tolist() for column in rows.take_columns()] == expected
    assert not len(rows) and [len(column) for column in rows.take_columns()] == [0, 0, 0]


def test_a_column_is_as_wide_as_its_largest_integer() -> None:
    rows = Rows(3)
    for number in range(PACK_AT // 16):
        rows.add((number % 2, number, -1 if number else 1 << 40))
    assert [column.dtype.itemsize for column in rows.take_narrow_columns()] == [1, 2, 8]

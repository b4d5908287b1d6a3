"""Plain requests are columns, and read like the requests that each row makes alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarts.base.errors import InputError
from kvarts.sim.traffic.mooncake import MooncakeReader, load_mooncake
from kvarts.sim.traffic.request_columns import RequestColumns
from kvarts.sim.traffic.trace import TraceRequest

SIZE = 4
IDS = st.one_of(st.integers(0, 9), st.integers(0, (1 << 32) + 1), st.integers(0, (1 << 64) - 1))


@st.composite
def rows(draw: st.DrawFn, *, is_plain: bool = True) -> dict[str, Any]:
    ids = draw(st.lists(IDS, min_size=1, max_size=5))
    row: dict[str, Any] = {
        "timestamp": draw(st.integers(0, 20)),
        "input_length": draw(st.integers(len(ids) * SIZE - SIZE + 1, len(ids) * SIZE)),
        "output_length": draw(st.integers(1, 9)),
        "hash_ids": ids,
    }
    if not is_plain:
        more: list[dict[str, Any]] = [
            {},
            {"timestamp": 1.5},
            {"request_id": "x"},
            {"tenant": "t"},
            {"priority": 2},
            {"cancel_after_ms": 3},
            {"input_length": 0},
            {"output_length": 0},
            {"hash_ids": [1 << 64]},
            {"hash_ids": None},
            {"timestamp": -1},
        ]
        row |= draw(st.sampled_from(more))
    return row


def written(folder: Path, lines: list[dict[str, Any]], *, blanks: bool = False) -> Path:
    path = folder / "trace.jsonl"
    path.write_text(("\n\n" if blanks else "\n").join(map(json.dumps, lines)) + "\n")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("columns")


@pytest.mark.laws
@settings(deadline=None)
@given(lines=st.lists(rows(), min_size=1, max_size=12), is_large=st.booleans())
def test_columns_read_as_the_rows_do(folder: Path, lines: list[dict[str, Any]], is_large: bool) -> None:
    path = written(folder, lines * (300 if is_large else 1))
    one_by_one = list(MooncakeReader(path, trace_block_size=SIZE))
    columns = MooncakeReader(path, trace_block_size=SIZE).read()
    assert isinstance(columns, RequestColumns)
    assert list(columns) == one_by_one
    assert [columns[index] for index in range(len(columns))] == one_by_one
    assert columns[-1] == one_by_one[-1] and columns[1:3] == one_by_one[1:3] and columns[::-2] == one_by_one[::-2]
    with pytest.raises(IndexError):
        columns[len(columns)]
    ordered = load_mooncake(path, trace_block_size=SIZE).requests
    assert ordered is not None
    first_ns = min(request.arrival_ns for request in one_by_one)
    naive = sorted(one_by_one, key=lambda request: request.arrival_ns)
    assert [(each.row, each.arrival_ns, each.units) for each in ordered] == [
        (each.row, each.arrival_ns - first_ns, each.units) for each in naive
    ]


@pytest.mark.laws
@settings(deadline=None)
@given(lines=st.lists(rows(is_plain=False), min_size=1, max_size=8), blanks=st.booleans(), skips=st.booleans())
def test_a_row_that_is_not_plain_is_read_as_it_is_alone(
    folder: Path, lines: list[dict[str, Any]], blanks: bool, skips: bool
) -> None:
    path = written(folder, lines, blanks=blanks)

    def outcome(read: str) -> tuple[list[TraceRequest] | str, int, int, int]:
        reader = MooncakeReader(path, skip_bad_lines=skips, trace_block_size=SIZE)
        try:
            found = list(reader if read == "iterated" else reader.read())
        except InputError as error:
            return str(error), 0, 0, 0
        if read == "read":  # for the rows that wait for them, it has those without output tokens
            found = [request for request in found if request.num_output_tokens]
        return found, reader.num_skipped, reader.num_rows, reader.num_without_ids

    assert outcome("read") == outcome("iterated")

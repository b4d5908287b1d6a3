"""The distinct pages of a trace, in cases that a random one met seldom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvarts.sim.traffic.info import distinct_pages
from kvarts.sim.traffic.request_columns import RequestColumns
from kvarts.sim.traffic.trace import Trace, TraceRequest, spell
from kvarts.sim.traffic.trace_request import PlainRow


@pytest.mark.parametrize("lengths", [[2, 1, 2], [1, 2, 2], [2, 2, 1]])
def test_equal_units_of_different_lengths(lengths: list[int]) -> None:
    """One unit of two tokens, and a prompt that has only the first of them: it must not part the two others."""
    requests = [TraceRequest(row, 0, (range(1),), num_tokens, 1) for row, num_tokens in enumerate(lengths)]
    assert distinct_pages(Trace(requests, unit_tokens=2), page_size=2) == 1


@pytest.mark.parametrize("tenants", [[None, "", None, ""], ["", "a", None, ""], [None, "a", "a", None]])
def test_an_empty_tenant_is_not_a_missing_one(tenants: list[str | None]) -> None:
    requests = [TraceRequest(row, 0, (range(2),), 2, 1, tenant=tenant) for row, tenant in enumerate(tenants)]
    assert distinct_pages(Trace(requests, unit_tokens=1), page_size=1) == 2 * len(set(tenants))


@given(st.data())
def test_columns_are_counted_as_a_set_of_prefixes_counts_them(data: st.DataObject) -> None:
    """Ids of prefixes, and ids that follow several others, in pages that are smaller and larger than a unit."""
    unit_tokens = data.draw(st.sampled_from([2, 3, 4, 6]), label="tokens of a unit")
    page_size = data.draw(st.sampled_from([1, 2, 3, 4, 5, 8]), label="tokens of a page")
    prompts = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=6))
    if data.draw(st.booleans(), label="ids stand for prefixes"):
        names: dict[tuple[int, ...], int] = {}
        prompts = [[names.setdefault(tuple(ids[: end + 1]), len(names)) for end in range(len(ids))] for ids in prompts]
    surplus = data.draw(st.sampled_from([b"", bytes(8)]), label="ids after those of the prompt, in a list of requests")
    columns = RequestColumns()
    seen = set()
    num_private = 0
    rows = []
    for ids in prompts:
        prompt = len(ids) * unit_tokens - data.draw(st.integers(0, unit_tokens - 1), label="missing in the last unit")
        output = data.draw(st.integers(1, 9), label="output")
        rows.append(PlainRow(prompt, output, 0, ids))
        tokens = [unit for unit in ids for _ in range(unit_tokens)][:prompt]
        num_full = prompt // page_size
        seen |= {tuple(tokens[: page_size * (page + 1)]) for page in range(num_full)}
        num_private += (prompt + output - 1) // page_size - num_full
    assert columns.add(rows, 0, unit_tokens) == len(rows)
    trace = Trace(columns, unit_tokens=unit_tokens)
    assert distinct_pages(trace, page_size) == len(seen) + num_private
    listed = Trace([replace(each, units=spell(each.units) + surplus) for each in columns], unit_tokens=unit_tokens)
    assert distinct_pages(listed, page_size) == len(seen) + num_private

"""The working set of a trace, in cases that a random one met seldom."""

from __future__ import annotations

import pytest

from kvarts.traffic.info import working_set_pages
from kvarts.traffic.trace import Trace, TraceRequest


@pytest.mark.parametrize("lengths", [[2, 1, 2], [1, 2, 2], [2, 2, 1]])
def test_equal_units_of_different_lengths(lengths: list[int]) -> None:
    """One unit of two tokens, and a prompt that has only the first of them: it must not part the two others."""
    requests = [TraceRequest(row, 0, (range(1),), num_tokens, 1) for row, num_tokens in enumerate(lengths)]
    assert working_set_pages(Trace(requests, unit_tokens=2), page_size=2) == 1


@pytest.mark.parametrize("tenants", [[None, "", None, ""], ["", "a", None, ""], [None, "a", "a", None]])
def test_an_empty_tenant_is_not_a_missing_one(tenants: list[str | None]) -> None:
    requests = [TraceRequest(row, 0, (range(2),), 2, 1, tenant=tenant) for row, tenant in enumerate(tenants)]
    assert working_set_pages(Trace(requests, unit_tokens=1), page_size=1) == 2 * len(set(tenants))

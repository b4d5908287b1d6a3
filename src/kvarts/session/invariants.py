"""Independent check of the pages of a session, based on the record of actual writes instead of counters."""

from __future__ import annotations

import numpy as np

from kvarts.executor.page_slots import PageSlots
from kvarts.session.pages import SessionPages, SessionPageTable

__all__ = ["count_retained", "holds_what_it_should"]


def count_retained(slots: PageSlots, pages: SessionPages, page_size: int, num_computed: int) -> list[int]:
    """Return, per page table, how many of the first `num_computed` tokens it holds that a later token can see."""
    return [_count(slots, table, page_size, num_computed) for table in pages.tables]


def holds_what_it_should(slots: PageSlots, pages: SessionPages, page_size: int, num_computed: int) -> bool:
    """Return whether all tokens that later ones can see are in their slots, and no table exceeds its page limit."""
    return all(
        _count(slots, table, page_size, num_computed) == table.retained.num_retained(num_computed)
        and len(table.page_ids) <= table.retained.most_pages(page_size)
        for table in pages.tables
    )


def _count(slots: PageSlots, table: SessionPageTable, page_size: int, num_computed: int) -> int:
    """Return how many tokens a page table holds that a later token can see.

    A token counts only if it was written to its own slot, the one given by page table and position.
    """
    held = slots.positions(table.page_ids)
    if not held.size:
        return 0
    expected = table.page_numbers()[:, None] * page_size + np.arange(page_size)
    seen = table.retained.sees(expected, num_computed)
    return int(np.count_nonzero((held == expected) & seen & (expected < num_computed)))

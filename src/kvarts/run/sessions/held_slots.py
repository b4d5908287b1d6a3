"""A check of the slots of a session's pages: the tokens that they hold against those that later tokens see."""

from __future__ import annotations

import numpy as np

from kvarts.core.kv.session_pages import SessionPages, SessionPageTable
from kvarts.run.page_bytes import PageSlots

__all__ = ["count_retained", "holds_what_it_should"]


def count_retained(slots: PageSlots, pages: SessionPages, page_size: int, num_computed: int) -> list[int]:
    """Return, per page table, how many of the first `num_computed` tokens it holds that a later token can see."""
    counts = (_counts(slots, table, page_size, num_computed) for table in pages.tables)
    return [count for of_table in counts for count in of_table]


def holds_what_it_should(slots: PageSlots, pages: SessionPages, page_size: int, num_computed: int) -> bool:
    """Return whether all tokens that later ones can see are in their slots, no table exceeds its page limit, and the
    state is that after the last computed token.
    """
    is_right = all(
        set(_counts(slots, table, page_size, num_computed)) == {table.retained.num_retained(num_computed)}
        and table.num_pages <= table.retained.most_pages(page_size)
        for table in pages.tables
    )
    if not (pages.has_state and num_computed):
        return is_right
    return is_right and len(pages.state) > 0 and slots.are_state_after(pages.state, num_computed - 1)


def _counts(slots: PageSlots, table: SessionPageTable, page_size: int, num_computed: int) -> list[int]:
    """Return how many tokens the page tables of a KV group hold that a later token can see, table by table.

    A token counts only if it was written to its own slot, the one given by page table and position. The blocks of a
    state count as the first of them, which is the one that plans name.
    """
    if not table.num_pages:
        return [0] * table.num_blocks
    expected = table.page_numbers()[:, None] * page_size + np.arange(page_size)
    seen = table.retained.sees(expected, num_computed) & (expected < num_computed)
    counts = [int(np.count_nonzero((slots.positions(block) == expected) & seen)) for block in table.named]
    return counts * (table.num_blocks // len(counts))

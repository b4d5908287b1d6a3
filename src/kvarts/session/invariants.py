"""An independent look at what the pages of a session hold: at what was written, not at what is counted."""

from __future__ import annotations

import numpy as np

from kvarts.executor.page_slots import PageSlots
from kvarts.kv.sink_window import OwnPages

__all__ = ["count_retained", "holds_what_it_should"]


def count_retained(slots: PageSlots, pages: OwnPages, page_size: int, num_computed: int) -> int:
    """Return how many of the first `num_computed` tokens `pages` hold, where a later token can see them.

    A token counts once, if it was written to its own slot: to the place that page table and position give it.
    """
    held = slots.positions(pages.page_ids)
    if not held.size:
        return 0
    places = np.arange(held.size).reshape(held.shape)
    num_sink_pages = pages.keeps.num_sink_pages(page_size)
    expected = places + np.where(places < num_sink_pages * page_size, 0, pages.num_dropped * page_size)
    keeps = pages.keeps
    seen = (expected < keeps.sink) | (expected >= num_computed - keeps.window)
    return int(np.count_nonzero((held == expected) & seen & (expected < num_computed)))


def holds_what_it_should(slots: PageSlots, pages: OwnPages, page_size: int, num_computed: int) -> bool:
    """Return whether every token that a later one can see is in its slot, and pages are no more than the bound."""
    num_retained = count_retained(slots, pages, page_size, num_computed)
    return num_retained == pages.keeps.num_retained(num_computed) and len(pages.page_ids) <= pages.keeps.most_pages(
        page_size
    )

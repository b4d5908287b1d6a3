"""What happened, as values: the product's language, recorded where somebody asked for it.

Page events speak of runs: pages [start_page, end_page) of a content, which keeps them as cheap as what they tell.
"""

from __future__ import annotations

import msgspec

from kvarts.content import Content

__all__ = ["PageEvent", "PagesRemoved", "PagesStored", "Preemption"]


class PagesStored(msgspec.Struct, frozen=True, gc=False):
    """A run of full pages became findable. Copies of what was findable already are not stored anew."""

    content: Content
    start_page: int
    end_page: int


class PagesRemoved(msgspec.Struct, frozen=True, gc=False):
    """A run of cached pages was evicted, the last page first. A copy that stays findable is not removed."""

    content: Content
    start_page: int
    end_page: int


PageEvent = PagesStored | PagesRemoved


class Preemption(msgspec.Struct, frozen=True, gc=False):
    """A running request lost its pages because another needed one. All requests by `index`.

    `num_pages_short` is how many pages the asker was missing; `num_used_pages` what was in use at that moment;
    `num_computed_tokens` what the victim had computed and has to find again or compute again.
    """

    victim: int
    asker: int
    num_pages_short: int
    num_used_pages: int
    num_computed_tokens: int

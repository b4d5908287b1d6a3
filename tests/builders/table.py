"""Pages that are held as transfers hold them."""

from __future__ import annotations

from kvarts.core.kv.cache import Match
from kvarts.core.kv.eviction import PinnedPages
from kvarts.core.kv.page_cache import PageCache

__all__ = ["hold_found"]


def hold_found(cache: PageCache, match: Match, start: int = 0) -> PinnedPages:
    """Hold what was found, from page `start` on."""
    return cache.hold(cache.tree.cut(match), start, match.num_pages)

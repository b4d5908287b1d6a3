"""Marks for the device's eviction order: which runs lower tiers hold, will hold, or no longer hold."""

from __future__ import annotations

from collections.abc import Sequence

from kvarts.content import Content
from kvarts.kv.cache import Match
from kvarts.kv.eviction import HeldPages, walk
from kvarts.kv.page_cache import PageCache
from kvarts.offload.safe_first import Below, SafeFirst
from kvarts.offload.tier import PageTier

__all__ = ["Marks"]


class Marks:
    """Records in `order` whether `tiers` hold the runs of `cache`. Without an order it does nothing.

    `removed`: pages that left a tier and may still be marked, as content, first page, page after the last;
    `unmark_removed` consumes them.
    """

    def __init__(self, cache: PageCache, tiers: Sequence[PageTier], order: SafeFirst | None) -> None:
        self._cache = cache
        self._tiers = tiers
        self._order = order
        self.removed: list[tuple[Content, int, int]] = []

    def unmark_removed(self, below: Below = Below.FAILED) -> None:
        """Mark pages that were removed below with `below`: they are lost if the device evicts them.

        They are not stored again while the device has them: otherwise a tier that is too small would be refilled for
        ever.
        """
        order = self._order
        if not self.removed or order is None:
            return
        for content, start, end in self.removed:
            if self._cache.tree.has(content, start):
                self._mark_match(self._cache.match(content, end), start, below)
                if len(self._tiers) > 1:
                    self.mark_held(content, start, end)
        self.removed.clear()
        order.regroup()

    def mark_as_held(self, content: Content, start: int, end: int) -> int:
        """Mark those of pages [start, end), which the device has, that a tier has as well; return how many."""
        if self._order is None:
            return 0
        num_held = self.mark_held(content, start, end)
        if num_held:
            self._order.regroup()
        return num_held

    def mark_held(self, content: Content, start: int, end: int) -> int:
        """Do the same without regrouping. Requires an order, and its `regroup` must follow."""
        if len(self._tiers) == 1:
            # A page can be found below only if its prefix is, in the tier or on the device.
            num_held = self._tiers[0].find(content, start, end)
            if num_held:
                self._mark_match(self._cache.match(content, start + num_held), start, Below.STORED)
            return num_held
        num_held = 0
        for tier in self._tiers:
            for first, last in tier.held(content, start, end):
                num_held += last - first
                self._mark_match(self._cache.match(content, last), first, Below.STORED)
        return num_held

    def mark_part(self, part: HeldPages, below: Below) -> bool:
        """Mark held pages that are still in the tree; return whether some are not. `regroup` must follow."""
        assert self._order is not None
        nodes = list(walk(part.runs, part.start))
        resident = [node for node in nodes if not node.is_orphan]
        self._order.mark(resident, below)
        return len(resident) < len(nodes)

    def _mark_match(self, match: Match, start: int, below: Below) -> None:
        """Mark the pages of `match` from `start` on."""
        assert self._order is not None
        tree = self._cache.tree
        self._order.mark(tree.isolate(tree.cut(match), start, match.num_pages), below)

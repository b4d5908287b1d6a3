"""What is stored below the device, and when.

A policy names pages: [start, end) of a content, whose first `end` pages the device has. Whoever asks stores those of
them that are neither stored nor coming.
"""

from __future__ import annotations

from typing import Protocol

from kvarts.content import Content
from kvarts.kv.cache import Holding, PageCache
from kvarts.kv.safe import Below, SafeFirstTree

__all__ = ["EagerPolicy", "LazyPolicy", "StorePolicy", "Wanted", "precedes"]

ANY = 1 << 62
Wanted = tuple[Content, int, int]


class StorePolicy(Protocol):
    """Promises: changes nothing on the device, and does bounded work."""

    def confirm(self, content: Content, num_pages: int, holding: Holding) -> None:
        """The first `num_pages` pages of `content`, in `holding`, are complete: their tokens will not change."""

    def choose(self) -> list[Wanted]:
        """What should be stored in this step."""

    @property
    def has_work(self) -> bool:
        """Whether `choose` would name something, whatever becomes of the device."""

    def pages_to_spare(self) -> int | None:
        """How many pages of the device may be taken before `choose` would name something; None: it would now."""


class EagerPolicy:
    """Every page is stored in the step after it became complete; and with it what is before it, if that is missing."""

    def __init__(self) -> None:
        self._confirmed: dict[int, Wanted] = {}
        self.holdings: dict[int, Holding] = {}
        """Who held what was chosen last when it was confirmed, by its owner."""

    def confirm(self, content: Content, num_pages: int, holding: Holding) -> None:
        """See StorePolicy."""
        self._confirmed[content.owner] = (content, 0, num_pages)
        self.holdings[content.owner] = holding

    def choose(self) -> list[Wanted]:
        """See StorePolicy."""
        confirmed = self._confirmed
        if not confirmed:
            return []
        self._confirmed = {}
        return [confirmed[owner] for owner in sorted(confirmed)]

    @property
    def has_work(self) -> bool:
        """See StorePolicy."""
        return bool(self._confirmed)

    def pages_to_spare(self) -> int | None:
        """See StorePolicy."""
        return None if self._confirmed else ANY


class LazyPolicy:
    """Cached pages are stored when they come near eviction, so that the next `target_free` pages taken lose nothing.

    Lost is what no tier below has and somebody could look for: pages of unknown tokens are no loss. The device's tree
    gives way first with what is safe; so the scan begins at the oldest of what is not, and ends at its target. Each run
    it looks at is covered or chosen, so it never looks at more than `target_free` of them, and never stands still.
    """

    def __init__(self, cache: PageCache, target_free: int) -> None:
        assert isinstance(cache.tree, SafeFirstTree)
        self._cache = cache
        self._tree = cache.tree
        self._target_free = target_free
        self.is_stuck = False
        """The tier had no room for what was chosen; nothing is chosen until that may have changed."""

    def confirm(self, content: Content, num_pages: int, holding: Holding) -> None:
        """See StorePolicy."""

    def choose(self) -> list[Wanted]:
        """See StorePolicy."""
        return [] if self.is_stuck else self._scan()[0]

    @property
    def has_work(self) -> bool:
        """See StorePolicy."""
        return False

    def pages_to_spare(self) -> int | None:
        """See StorePolicy."""
        if self.is_stuck:
            return ANY
        chosen, num_covered = self._scan()
        if chosen:
            return None
        return ANY if num_covered < self._target_free else num_covered - self._target_free

    def _scan(self) -> tuple[list[Wanted], int]:
        """What to store, and how many pages can be taken without loss once it is."""
        num_covered = self._cache.pool.num_empty + self._tree.num_safe
        chosen: list[Wanted] = []
        for node in self._tree.unsafe_nodes():
            if num_covered >= self._target_free:
                break
            start, end = node.start, node.end
            if node.below == Below.NOT and start < node.content.num_known_pages:
                known_end = min(end, node.content.num_known_pages)
                num_covered += end - known_end
                if num_covered >= self._target_free:
                    break
                start = max(start, known_end - (self._target_free - num_covered))
                num_covered += known_end - start
                if chosen and precedes((node.content, start, known_end), chosen[-1][0], chosen[-1][1]):
                    content, _, known_end = chosen.pop()
                    chosen.append((content, start, known_end))
                else:
                    chosen.append((node.content, start, known_end))
            else:
                num_covered += end - start
        return chosen, num_covered


def precedes(pages: Wanted, content: Content, start: int) -> bool:
    """Whether `pages` come right before page `start` of `content`, in the same sequence."""
    before, _, end = pages
    return end == start and before.salt == content.salt and content.common_pages(before, 0, end) == end

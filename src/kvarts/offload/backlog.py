"""Copies that have not begun: runs that are to be spilled to the next tier, and tiers that nothing can be copied to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvarts.content import Content

__all__ = ["Backlog", "Spill"]

PRUNE_AT = 10_000
"""How many runs may wait to be spilled before those that have been evicted since are removed from the queue."""

Spill = tuple[Content, int, int, int]
"""A content, a group, and pages of it: the first, and the one after the last."""


class Backlog:
    """Owner of the runs that have arrived in one of `num_tiers` tiers, and are to be copied to the next.

    `is_stored`: whether the tier at a place still has some of a run.
    """

    def __init__(self, num_tiers: int, is_stored: Callable[[int, Spill], bool]) -> None:
        self.spills: list[deque[Spill]] = [deque() for _ in range(num_tiers - 1)]
        """By tier but the last, the runs that have arrived in it."""
        self.is_behind = [False] * num_tiers
        """By tier, whether its channel is behind, or it lacks room: nothing is copied there before a transfer ends."""
        self._is_stored = is_stored
        self._prune_at = PRUNE_AT

    @property
    def has_spills(self) -> bool:
        """Whether there are runs to spill, and the way to the next tier is not behind."""
        return any(wanted and not self.is_behind[place + 1] for place, wanted in enumerate(self.spills))

    def add(self, place: int, content: Content, group: int, start: int, end: int) -> None:
        """Queue pages [start, end), which have arrived in the tier at `place`, unless that is the last one."""
        end = min(end, content.num_known_pages)  # others stay in the first tier
        if place == len(self.spills) or start >= end:
            return
        wanted = self.spills[place]
        if wanted and wanted[-1][1] == group and precedes(wanted[-1][0], wanted[-1][3], content, start):
            start = wanted.pop()[2]
        wanted.append((content, group, start, end))
        if len(wanted) > self._prune_at:
            wanted = self.spills[place] = deque(spill for spill in wanted if self._is_stored(place, spill))
            self._prune_at = max(PRUNE_AT, 2 * len(wanted))

    def go_on(self) -> None:
        """Note that a transfer has ended: all ways may carry something again."""
        self.is_behind = [False] * len(self.is_behind)

    def clear(self) -> None:
        """Spill no run that has arrived so far; the first tier may have room again."""
        self.is_behind[0] = False
        for wanted in self.spills:
            wanted.clear()


def precedes(before: Content, end: int, content: Content, start: int) -> bool:
    """Return whether page `start` of `content` directly follows the first `end` pages of `before`, in one sequence."""
    return end == start and before.salt == content.salt and content.common_pages(before, 0, end) == end

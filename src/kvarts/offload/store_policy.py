"""What is stored below the device, and when.

A policy names pages: [start, end) of a content of which the device has the first `end` pages, and where it saw them.
The caller stores those of them that are neither stored nor coming.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from kvarts.content import Content
from kvarts.kv.cache import Holding, PageCache
from kvarts.kv.tree import Match, Node, Path
from kvarts.offload.safe_first import Below, SafeFirst

__all__ = ["EagerPolicy", "LazyPolicy", "StorePolicy", "precedes"]

ANY = 1 << 62
Where = TypeVar("Where")


class StorePolicy(Protocol, Generic[Where]):
    """Chooses what is stored. Promises: `choose` changes nothing on the device, and does bounded work."""

    def confirm(self, content: Content, num_pages: int, holding: Holding) -> None:
        """Take note that the first `num_pages` pages of `content`, in `holding`, are complete and will not change."""

    def choose(self) -> list[tuple[Content, int, int, Where]]:
        """Return what should be stored in this step: content, first page, page after the last, and where these are."""

    def hold(self, content: Content, end: int, where: Where) -> Path:
        """Hold the first `end` pages of something that was just chosen."""

    @property
    def stores_deepest_first(self) -> bool:
        """Whether the last pages of what is chosen are stored, where there is room for a part only."""

    def refuse(self) -> None:
        """Take note that the tier had no room for what was chosen."""

    def end_refusal(self) -> None:
        """Take note that the tier may have room again."""

    @property
    def has_work(self) -> bool:
        """Whether `choose` would name something, whatever becomes of the device."""

    def pages_to_spare(self) -> int | None:
        """Return how many pages of the device may be taken before `choose` would name something.

        None: it would now.
        """


class EagerPolicy:
    """Every page is stored in the step after it became complete, with what is before it, if that is missing."""

    stores_deepest_first = False

    def __init__(self, cache: PageCache) -> None:
        self._cache = cache
        self._confirmed: dict[int, tuple[Content, int, int, Holding]] = {}

    def confirm(self, content: Content, num_pages: int, holding: Holding) -> None:
        """Keep the pages for the next `choose`, in place of fewer pages of the same content."""
        self._confirmed[content.owner] = (content, 0, num_pages, holding)

    def choose(self) -> list[tuple[Content, int, int, Holding]]:
        """Return all pages confirmed since the last call, by request."""
        confirmed = self._confirmed
        if not confirmed:
            return []
        self._confirmed = {}
        return [confirmed[owner] for owner in sorted(confirmed)]

    def hold(self, content: Content, end: int, where: Holding) -> Path:
        """Hold the pages where the request has them, or where they are found if it has ended."""
        path = self._cache.hold_open(where, end)  # it may have been closed since
        return self._cache.hold(self._cache.match(content, end)) if path is None else path

    @property
    def has_work(self) -> bool:
        """Whether pages were confirmed since the last `choose`."""
        return bool(self._confirmed)

    def pages_to_spare(self) -> int | None:
        """Return any number while nothing was confirmed, else None."""
        return None if self._confirmed else ANY

    def refuse(self) -> None:
        """Do nothing: a page is offered once."""

    def end_refusal(self) -> None:
        """Do nothing."""


class LazyPolicy:
    """Cached pages are stored when they come near eviction, so that the next `target_free` pages taken lose nothing.

    Lost is what no tier below has and a request could look for: pages of unknown tokens are no loss. The device evicts
    first what is safe; so the scan begins at the oldest of what is not, and ends at its target. Each run it looks at is
    covered or chosen, so it never looks at more than `target_free` of them, and never stands still.
    """

    stores_deepest_first = True

    def __init__(self, cache: PageCache, order: SafeFirst, target_free: int) -> None:
        self._cache = cache
        self._order = order
        self._target_free = target_free
        self.is_stuck = False
        """Whether the tier had no room for what was chosen; nothing is chosen until that may have changed."""

    def refuse(self) -> None:
        """Choose nothing until a transfer has ended."""
        self.is_stuck = True

    def end_refusal(self) -> None:
        """Choose again."""
        self.is_stuck = False

    def confirm(self, content: Content, num_pages: int, holding: Holding) -> None:
        """Do nothing: pages are chosen where they are about to be evicted."""

    def choose(self) -> list[tuple[Content, int, int, Node]]:
        """Return the unsafe pages nearest to eviction; nothing while the tier has no room."""
        return [] if self.is_stuck else self._scan()[0]

    def hold(self, content: Content, end: int, where: Node) -> Path:
        """Hold the pages on the way to the run that was chosen."""
        return self._cache.hold(Match(self._order.path_to(where, end), end, 0))

    @property
    def has_work(self) -> bool:
        """False: what is chosen depends on the device alone."""
        return False

    def pages_to_spare(self) -> int | None:
        """Return how many pages can be taken while the target stays covered; None if it is not now."""
        if self.is_stuck:
            return ANY
        chosen, num_covered = self._scan()
        if chosen:
            return None
        return ANY if num_covered < self._target_free else num_covered - self._target_free

    def _scan(self) -> tuple[list[tuple[Content, int, int, Node]], int]:
        """Return what to store, with its deepest run, and how many pages can be taken without loss once it is."""
        order = self._order
        num_covered = self._cache.pool.num_empty + order.num_safe
        chosen: list[tuple[Content, int, int, Node]] = []
        for node in order.unsafe_nodes():
            if num_covered >= self._target_free:
                break
            start, end = node.start, node.end
            if order.below(node) == Below.NOT and start < node.content.num_known_pages:
                known_end = min(end, node.content.num_known_pages)
                num_covered += end - known_end
                if num_covered >= self._target_free:
                    break
                start = max(start, known_end - (self._target_free - num_covered))
                num_covered += known_end - start
                if chosen and precedes(node.content, known_end, chosen[-1][0], chosen[-1][1]):
                    content, _, known_end, node = chosen.pop()  # noqa: PLW2901
                    chosen.append((content, start, known_end, node))
                else:
                    chosen.append((node.content, start, known_end, node))
            else:
                num_covered += end - start
        return chosen, num_covered


def precedes(before: Content, end: int, content: Content, start: int) -> bool:
    """Return whether page `start` of `content` comes right after the first `end` pages of `before`, in one sequence."""
    return end == start and before.salt == content.salt and content.common_pages(before, 0, end) == end

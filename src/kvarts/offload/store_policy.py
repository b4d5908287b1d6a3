"""What is stored below the device, and when.

A policy names pages: [start, end) of a content, and where it saw them. The caller stores those of them that the device
still has and that are neither stored nor coming, as far as there is room and the way down is not behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from kvarts.content import Content
from kvarts.kv.cache import Holding
from kvarts.kv.page_cache import PageCache
from kvarts.kv.tree import Node, Path
from kvarts.offload.safe_first import SafeFirst

__all__ = ["EagerPolicy", "LazyPolicy", "StorePolicy", "precedes"]

ANY = 1 << 62
Where = TypeVar("Where")


class StorePolicy(Protocol, Generic[Where]):
    """Chooses what is stored. Promises: `choose` changes nothing on the device, and does bounded work."""

    def confirm(self, content: Content, num_pages: int, holding: Holding) -> None:
        """Take note that the first `num_pages` pages of `content`, in `holding`, are complete and will not change."""

    def choose(self) -> Iterator[tuple[Content, int, int, Where]]:
        """Yield what should be stored in this step: content, first page, page after the last, and where these are.

        What the caller does not go on from stays wanted.
        """

    def path(self, content: Content, end: int, where: Where) -> tuple[Path, int]:
        """Return the runs with the first `end` pages of something just chosen, and how many of these the device has.

        The last run may reach beyond.
        """

    @property
    def stores_deepest_first(self) -> bool:
        """Whether the last pages of what is chosen are stored, where there is room for a part only."""

    def first_wanted(self, start: int, where: Where) -> int:
        """Return the first page to store of something just chosen from page `start` on, if its way is behind.

        What is stored of it from there on can be found even if the device evicts the rest before it is stored.
        """

    def refuse(self) -> None:
        """Take note that the tier had no room for what was chosen."""

    def wait(self, position: int) -> None:
        """Take note that the way to the tier is behind: nothing is stored before a transfer has ended.

        Of what was chosen last, pages from `position` on stay wanted.
        """

    def end_refusal(self) -> None:
        """Take note that the tier may have room again, and its way too."""

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
        self._wanted: dict[int, tuple[Content, int, int, Holding]] = {}
        self._chosen = -1
        """The content that was chosen last."""
        self._is_waiting = False

    def confirm(self, content: Content, num_pages: int, holding: Holding) -> None:
        """Keep the pages for `choose`, in place of fewer pages of the same content."""
        self._wanted[content.owner] = (content, 0, num_pages, holding)

    def choose(self) -> Iterator[tuple[Content, int, int, Holding]]:
        """Yield what is wanted, by request."""
        wanted = self._wanted
        if self._is_waiting:
            return
        for owner in sorted(wanted):
            self._chosen = owner
            yield wanted[owner]
            del wanted[owner]

    def first_wanted(self, start: int, where: Holding) -> int:
        """Return `start`: what is before it is on its way already."""
        return start

    def path(self, content: Content, end: int, where: Holding) -> tuple[Path, int]:
        """Return the runs where the request has them, or, if it has ended since, where they are found."""
        if where.path:
            return where.path, end
        match = self._cache.match(content, end)
        return match.nodes, match.num_pages

    @property
    def has_work(self) -> bool:
        """Whether something is wanted, and nothing keeps it from being chosen."""
        return bool(self._wanted) and not self._is_waiting

    def pages_to_spare(self) -> int | None:
        """Return None if there is something to choose, else any number."""
        return None if self._wanted and not self._is_waiting else ANY

    def refuse(self) -> None:
        """Do nothing: a page that there is no room for is not offered again."""

    def wait(self, position: int) -> None:
        """Choose nothing until a transfer has ended, and nothing again that was chosen before."""
        self._is_waiting = True
        content, _, end, holding = self._wanted[self._chosen]
        if position < end:
            self._wanted[self._chosen] = content, position, end, holding
        else:
            del self._wanted[self._chosen]

    def end_refusal(self) -> None:
        """Choose again."""
        self._is_waiting = False


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
        """Whether the tier had no room for what was chosen, or the way to it was behind."""

    def refuse(self) -> None:
        """Choose nothing until a transfer has ended."""
        self.is_stuck = True

    def wait(self, position: int) -> None:
        """Choose nothing until a transfer has ended."""
        self.is_stuck = True

    def end_refusal(self) -> None:
        """Choose again."""
        self.is_stuck = False

    def confirm(self, content: Content, num_pages: int, holding: Holding) -> None:
        """Do nothing: pages are chosen where they are about to be evicted."""

    def choose(self) -> Iterator[tuple[Content, int, int, Node]]:
        """Yield the unsafe pages nearest to eviction; nothing while none can be stored."""
        return iter(() if self.is_stuck else self._scan()[0])

    def first_wanted(self, start: int, where: Node) -> int:
        """Return the first page of all those right before that no tier below has or had."""
        return min(start, self._order.start_of_unknown(where))

    def path(self, content: Content, end: int, where: Node) -> tuple[Path, int]:
        """Return the runs on the way to the one that was chosen."""
        return self._order.path_to(where, end), end

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
        target = self._target_free
        num_covered = self._cache.pool.num_empty + order.num_safe
        chosen: list[tuple[Content, int, int, Node]] = []
        if num_covered >= target:
            return chosen, num_covered
        for node in order.unsafe_nodes():
            # Most runs are on their way already (`below` is not Below.NOT): this is spelled out to pass them quickly.
            start, end = node.start, node.end
            if not node.notes.below and start < node.content.num_known_pages:
                known_end = min(end, node.content.num_known_pages)
                num_covered += end - known_end
                if num_covered >= target:
                    break
                start = max(start, known_end - (target - num_covered))
                num_covered += known_end - start
                if chosen and precedes(node.content, known_end, chosen[-1][0], chosen[-1][1]):
                    content, _, known_end, node = chosen.pop()  # noqa: PLW2901
                    chosen.append((content, start, known_end, node))
                else:
                    chosen.append((node.content, start, known_end, node))
            else:
                num_covered += end - start
            if num_covered >= target:
                break
        return chosen, num_covered


def precedes(before: Content, end: int, content: Content, start: int) -> bool:
    """Return whether page `start` of `content` comes right after the first `end` pages of `before`, in one sequence."""
    return end == start and before.salt == content.salt and content.common_pages(before, 0, end) == end

"""Store policies: which pages are stored below the device, and when; and runs that are to be spilled further.

A policy names pages: [start, end) of a content, and where it saw them. The caller stores those that the device still
has and that are neither stored nor coming, as far as there is room and the channel is not behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvarts.core.content import Content
from kvarts.core.kv.cache import BlockTable
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.kv.pool import PageId
from kvarts.core.kv.tree import Node, Path
from kvarts.core.tiers.channel import Channel
from kvarts.core.tiers.safe_first import SafeFirst
from kvarts.core.tiers.tier import MemoryTier

__all__ = ["Backlog", "Duplicates", "EagerPolicy", "Exchange", "LateSpills", "LazyPolicy", "PagePolicy", "Spill"]

PRUNE_AT = 10_000
"""How many runs may wait in a queue before those that are of no use any more are removed from it."""

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

    def is_due(self, place: int) -> bool:
        """Return whether runs of the tier at `place` are to be spilled, and the way to the next tier is not behind."""
        return bool(self.spills[place]) and not self.is_behind[place + 1]

    @property
    def has_spills(self) -> bool:
        """Whether there are runs to spill, and the way to the next tier is not behind."""
        return any(self.is_due(place) for place in range(len(self.spills)))

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

    def begun(self, target: int) -> None:
        """Note that a store or a spill to the tier at `target` has begun, for which it may have evicted others."""

    def ended(self, target: int, *, is_stored: bool) -> None:
        """Note that a store or a spill to the tier at `target` has ended."""

    def used(self, by_tier: Sequence[int]) -> None:
        """Note that so many pages of each tier have been used."""

    def go_on(self) -> None:
        """Note that a transfer has ended: all ways may carry something again."""
        if True in self.is_behind:
            self.is_behind = [False] * len(self.is_behind)

    def clear(self) -> None:
        """Spill no run that has arrived so far; the first tier may have room again."""
        self.is_behind[0] = False
        for wanted in self.spills:
            wanted.clear()


class Duplicates:
    """Pages that the device has again, and `tiers` still have. The first tier releases them when it needs room.

    The last to come are released first: the device evicts them last, and they must be stored again only then. Pages
    that waited twice as long as any that was used are evicted before that. A slower tier with fewer empty pages
    than `num_free` releases them at once. `num_here`: how many of the first pages of a content, at most a number of
    them, the device has.
    """

    def __init__(self, tiers: Sequence[MemoryTier], *, num_free: int, num_here: Callable[[Content, int], int]) -> None:
        self._host, *self._slower = tiers
        self._num_free = num_free
        self._num_here = num_here
        self._runs: list[tuple[Content, int, int]] = []
        self._prune_at = PRUNE_AT

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, content: Content, start: int, end: int) -> None:
        """Note that the device has pages [start, end) again, or for the first time."""
        for tier in self._slower:
            if tier.num_empty_blocks < self._num_free:
                tier.move_out(content, start, end)
        self._runs.append((content, start, end))
        if len(self._runs) > self._prune_at:
            self._runs = [run for run in self._runs if self._is_in_both(*run)]
            self._prune_at = max(PRUNE_AT, 2 * len(self._runs))

    def _is_in_both(self, content: Content, start: int, end: int) -> bool:
        return bool(self._host.held(content, start, self._num_here(content, end)))

    def make_room(self, num_pages: int) -> None:
        """Release duplicates until `num_pages` can be stored without an eviction that may cost a hit."""
        host, runs = self._host, self._runs
        if host.num_empty_blocks >= num_pages:
            return
        num_pages -= host.num_forsaken(num_pages - host.num_empty_blocks)
        while runs and host.num_empty_blocks < num_pages:
            content, start, end = runs.pop()
            end = self._num_here(content, end)
            while start < end and (num_short := num_pages - host.num_empty_blocks) > 0:
                held = host.held(content, start, end)
                if not held:
                    end = start
                    break
                first, last = held[-1]
                end = max(first, last - num_short)
                host.move_out(content, end, last)
            if start < end:
                runs.append((content, start, end))


class Exchange:
    """Pages that a load evicts from the device and that no tier has: they are stored in host memory while it runs.

    As many as `write` carries before the load needs their place, if it fills that last, after one page at least: the
    first page by the time that `read` brings the first of those there, and all of them a page before the end of the
    load. A load never waits. `page_bytes`: those of a page.
    """

    def __init__(self, write: Channel, read: Channel, page_bytes: int) -> None:
        self._write = write
        self._read = read
        self._page_bytes = page_bytes
        self.num_pages = 0
        """How many pages the load that is about to begin leaves time to store."""
        self._runs: list[tuple[Content, int, int, list[PageId]]] = []

    def __len__(self) -> int:
        return len(self._runs)

    def begin(self, num_loaded: int, now_ns: int) -> None:
        """Note that the next evictions make room for a load of `num_loaded` pages from host memory."""
        write, read, size = self._write, self._read, self._page_bytes
        in_time = write.num_by(now_ns, read.within_ns(now_ns, (num_loaded - 1) * size), size)
        after_first = num_loaded - 1 - read.num_by(now_ns, write.within_ns(now_ns, size), size)
        self.num_pages = max(0, min(in_time, after_first))

    def add(self, node: Node, start: int, end: int) -> None:
        """Note that pages [start, end) of `node` are evicted, as far as a request could look them up."""
        content = node.content
        end = min(end, content.num_known_pages)
        if start >= end:
            return
        page_ids = [] if node.page_ids is None else node.page_ids[start - node.start : end - node.start]
        if self._runs and precedes(content, end, *self._runs[-1][:2]):
            content, _, end, later_ids = self._runs.pop()
            page_ids += later_ids
        self._runs.append((content, start, end, page_ids))

    def take(self) -> list[tuple[Content, int, int, list[PageId]]]:
        """Return these pages, with their ids if they have any, the last to be evicted first."""
        runs, self._runs = self._runs, []
        runs.reverse()
        return runs


class LateSpills(Backlog):
    """What each tier evicts next is copied to the next tier shortly before: nothing is queued as it arrives.

    `num_pages`: how many of these are copied. `changed`: by tier but the last, whether it may evict other pages next
    than when it was last asked.
    """

    def __init__(self, num_tiers: int, num_pages: int) -> None:
        super().__init__(num_tiers, lambda place, spill: True)
        self.num_pages = num_pages
        self.changed = [False] * (num_tiers - 1)

    def is_due(self, place: int) -> bool:
        """Return whether the tier at `place` has changed, and the way to the next tier is not behind."""
        return self.changed[place] and not self.is_behind[place + 1]

    def add(self, place: int, content: Content, group: int, start: int, end: int) -> None:
        """Do nothing: these pages are the last to be evicted."""

    def begun(self, target: int) -> None:
        """Note that the tier at `target` may have evicted pages."""
        self._note(target)

    def ended(self, target: int, *, is_stored: bool) -> None:
        """Note that the tier at `target` has other pages. A spill that failed waits for the next change."""
        if is_stored:
            self._note(target - 1)
            self._note(target)
        elif target:
            self.changed[target - 1] = False  # otherwise it would begin, and fail, for ever

    def used(self, by_tier: Sequence[int]) -> None:
        """Note that these tiers have another order of eviction."""
        for place, num_pages in enumerate(by_tier):
            if num_pages:
                self._note(place)

    def clear(self) -> None:
        """Note that the tiers are empty."""
        super().clear()
        self.changed = [False] * len(self.changed)

    def _note(self, place: int) -> None:
        if 0 <= place < len(self.changed):
            self.changed[place] = True


def precedes(before: Content, end: int, content: Content, start: int) -> bool:
    """Return whether page `start` of `content` directly follows the first `end` pages of `before`, in one sequence."""
    return end == start and before.salt == content.salt and content.common_pages(before, 0, end) == end


ANY = 1 << 62
PagePolicy: TypeAlias = "EagerPolicy | LazyPolicy"
"""Chooses whole pages to store: content, first page, page after the last, and where these are.

Promises: `choose` changes nothing on the device, and does bounded work. It is not called while the channel to the first
tier is behind, or that lacks room. `stores_deepest_first`: whether the last of the chosen pages are stored if there is
not room for all.
"""


class EagerPolicy:
    """Every page is stored in the step after it became complete, with missing pages before it."""

    stores_deepest_first = False
    exclusive_pages: int | None = None

    def __init__(self, cache: PageCache) -> None:
        self._cache = cache
        self._wanted: dict[int, tuple[Content, int, int, BlockTable]] = {}

    def confirm(self, content: Content, num_pages: int, table: BlockTable) -> None:
        """Keep the first `num_pages` pages, which are complete, for `choose`, in place of fewer of the same content."""
        self._wanted[content.owner] = (content, 0, num_pages, table)

    def preempted(self, content: Content, num_pages: int, table: BlockTable) -> None:
        """Keep all complete pages of a request that has lost its `table` for `choose`.

        Until `ended`, it may find pages of unknown tokens again, so these are stored as well.
        """
        self._wanted[content.owner] = (content, 0, num_pages, table)

    def ended(self, content: Content) -> None:
        """Want no pages of unknown tokens any more: the request, which was preempted before, has ended."""
        wanted = self._wanted.pop(content.owner, None)
        if wanted is not None and wanted[1] < (end := min(wanted[2], content.num_known_pages)):
            self._wanted[content.owner] = (content, wanted[1], end, wanted[3])

    def choose(self) -> list[tuple[Content, int, int, BlockTable]]:
        """Return the wanted pages, by request. They stay wanted until `tried`."""
        wanted = self._wanted
        if len(wanted) < 2:
            return list(wanted.values())
        return [wanted[owner] for owner in sorted(wanted)]

    def tried(self, content: Content) -> None:
        """Want no pages of `content` any more: all that the device has are stored or coming, or there is no room."""
        del self._wanted[content.owner]

    def path(self, content: Content, start: int, end: int, where: BlockTable, room: int) -> tuple[Path, int, int]:
        """Return the runs with pages [start, end), and these as far as the device has them. The last may reach beyond.

        They are those of the request, or, if it has ended since, those that are found.
        """
        if where.path:
            return where.path, start, end
        match = self._cache.match(content, end)
        return match.nodes, start, match.num_pages

    @property
    def has_work(self) -> bool:
        """Whether pages are wanted."""
        return bool(self._wanted)

    def pages_to_spare(self) -> int | None:
        """Return None if there is something to choose, else any number."""
        return None if self._wanted else ANY

    def wait(self, content: Content, position: int) -> None:
        """Do not choose pages of `content` before `position` again: the channel was behind, or the tier lacked room."""
        _, _, end, table = self._wanted[content.owner]
        if position < end:
            self._wanted[content.owner] = content, position, end, table
        else:
            del self._wanted[content.owner]

    def forget(self) -> None:
        """Want nothing."""
        self._wanted.clear()


class LazyPolicy:
    """Cached pages are stored when they near eviction, so that the next `target_free` pages taken lose nothing.

    A loss is a page that no lower tier has and a request could look up; pages of unknown tokens are not a loss. The
    device evicts safe pages first, so the scan begins at the oldest unsafe one, and ends at its target. Each run that
    it visits is covered or chosen, so it never visits more than `target_free` of them, and always makes progress.

    `is_exclusive`: the first tier releases pages that the device has again when it needs room, and a slower one at once
    if it has fewer empty pages than `exclusive_pages`; as many of those that a tier evicts next are spilled. Otherwise
    tiers release no pages that the device has, and spill all that arrive.
    """

    stores_deepest_first = True

    def __init__(self, cache: PageCache, order: SafeFirst, target_free: int, *, is_exclusive: bool = False) -> None:
        self.exclusive_pages = target_free if is_exclusive else None
        self._cache = cache
        self._order = order
        self._target_free = target_free
        self._preempted: set[int] = set()
        """Owners of contents whose pages of unknown tokens may be looked up."""
        self.has_work = False
        """Whether pages were left that may find room now: otherwise stores depend on the device alone."""

    def wait(self, content: Content, position: int) -> None:
        """Choose again when a transfer has ended."""
        self.has_work = True

    def forget(self) -> None:
        """Have nothing left to choose."""
        self.has_work = False

    def confirm(self, content: Content, num_pages: int, table: BlockTable) -> None:
        """Do nothing: pages are chosen when they are about to be evicted."""

    def preempted(self, content: Content, num_pages: int, table: BlockTable) -> None:
        """Choose pages of unknown tokens as well."""
        self._preempted.add(content.owner)
        self._order.covered.clear()

    def ended(self, content: Content) -> None:
        """Choose no pages of unknown tokens any more."""
        self._preempted.discard(content.owner)

    def choose(self) -> list[tuple[Content, int, int, Node]]:
        """Return the unsafe pages nearest to eviction."""
        self.has_work = False
        return self._scan()[0]

    def tried(self, content: Content) -> None:
        """Do nothing: what is not stored is chosen again while it is unsafe."""

    def path(self, content: Content, start: int, end: int, where: Node, room: int) -> tuple[Path, int, int]:
        """Return the runs with pages [start, end) up to the chosen one, and these pages.

        Without `room` for all, they begin where the unstored stretch begins that reaches `start`.
        """
        if room < end - start:
            start = min(start, self._order.start_of_unknown(where))
        return self._order.path_to(where, start, end), start, end

    def pages_to_spare(self) -> int | None:
        """Return how many pages can be taken while the target stays covered; None if it is not covered now."""
        chosen, num_covered = self._scan()
        if chosen:
            return None
        return ANY if num_covered < self._target_free else num_covered - self._target_free

    def _scan(self) -> tuple[list[tuple[Content, int, int, Node]], int]:
        """Return the pages to store, with their deepest run, and how many can then be taken without loss."""
        order, target = self._order, self._target_free
        num_covered = self._cache.pool.num_empty + order.num_safe
        order.covered.reach(target - num_covered, self._is_covered)
        num_covered += order.covered.num_pages
        chosen: list[tuple[Content, int, int, Node]] = []
        for node in order.unsafe_nodes() if num_covered < target else ():
            if num_covered >= target:
                break
            start, end = node.start, node.end
            if node.notes.below:
                # Most runs are stored or coming (`below` is not NOT).
                num_covered += end - start
                continue
            content = node.content
            known_end = self._known_end(node)
            if start < known_end:
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
        return chosen, num_covered

    def _known_end(self, node: Node) -> int:
        """Return the page after the last one of `node` that a request could look up."""
        content = node.content
        known_end = content.num_known_pages
        return node.end if known_end > node.end or content.owner in self._preempted else known_end

    def _is_covered(self, node: Node) -> bool:
        """Return whether `node` need not be stored, and will not have to be while it is listed."""
        if node.notes.below:
            return True
        # A content of bytes never grows.
        return isinstance(node.content.units, bytes) and self._known_end(node) <= node.start

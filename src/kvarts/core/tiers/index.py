"""The index of one lower tier: the pages that it holds, the pages that are coming, and the order of eviction.

A tree of runs, as on the device, with two differences. A page has at most one copy. And a run may be a *hole*: its
pages are not in the tier, but later pages are, which can be used as long as the device has the hole's pages.

Recency applies to whole prefixes: touching a page touches all pages before it, and the deepest page is evicted first,
so the rest of a sequence is always a prefix of it. A pin is identified by its deepest run: everything from there to the
root is pinned. A run that is removed from the tree while it is pinned is *doomed*: it cannot be found, and its pages
are released when the last pin ends.

An example, with room for four pages. A has the pages a0 a1 a2 and B the pages a0 a1 b2; both are stored, B last:

    tree       a0 a1 --+-- a2        eviction order: a2, b2, a1, a0
                       +-- b2

C has the pages c0 c1, and the device stores only c1. All room is taken, so a2 is evicted, and c0 becomes a hole:

    tree       a0 a1 ----- b2        eviction order: b2, a1, a0, c1
               (c0) ------ c1

`find(C, 0, 2)` is 0, `find(C, 1, 2)` is 1: c1 can be loaded as long as the device has c0, or computes it.

Longer than other files: pins, placements and recency concern one tree, and all its operations keep the same laws, which
`check_index` states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import ClassVar, Final

from kvarts.base.records import Value
from kvarts.core.content import NOTHING, Content, PageKey
from kvarts.core.kv.pool import CountPool, IdPool, PageId

__all__ = [
    "ALL",
    "NodeState",
    "OnRemoved",
    "OnStored",
    "Placement",
    "Segment",
    "TierIndex",
    "TierRun",
    "check_index",
]

ALL: Final = 1 << 62
NUM_WALKS: Final = 256
"""How many walks through the tree are remembered: a power of two."""

OnStored = Callable[[Content, int, int, Content | None], object]
"""Called for a run that becomes findable: content, first page, page after the last, the content before it."""

OnRemoved = Callable[[Content, int, int], object]
"""Called for a run that stops being findable: content, first page, page after the last."""


class NodeState(IntEnum):
    """The state of the pages of a run."""

    HOLE = 0
    COMING = 1
    STORED = 2
    DOOMED = 3


HOLE: Final = NodeState.HOLE
COMING: Final = NodeState.COMING
STORED: Final = NodeState.STORED
DOOMED: Final = NodeState.DOOMED
"""By name, because the states of runs are compared in every walk."""


class TierRun:
    """Pages [start, end) of `content`. Written by TierIndex only.

    `slots`: ids of the tier's pages; None if they are only counted, or in a hole. `placement`: the placement that a
    coming run belongs to. `writer`: the number of the engine that stored it, where several share the tier. `used_at`:
    how many pages had arrived in the tier when it was last used. `is_spilled`: whether it has been copied to the next
    tier since then. `is_gone`: it has left the tree. `older` and `newer`: neighbours in the order of recency, for
    stored runs.
    """

    __slots__ = (
        "children",
        "content",
        "end",
        "is_gone",
        "is_spilled",
        "key",
        "newer",
        "older",
        "parent",
        "pins",
        "placement",
        "slots",
        "start",
        "state",
        "used_at",
        "writer",
    )

    def __init__(
        self,
        content: Content,
        key: PageKey,
        start: int,
        end: int,
        parent: TierRun | None,
        state: NodeState,
        pins: int = 0,
        writer: int = 0,
    ) -> None:
        self.content = content
        self.key = key
        self.start = start
        self.end = end
        self.parent = parent
        self.state = state
        self.pins = pins
        self.children: dict[PageKey, TierRun] | None = None
        self.slots: list[PageId] | None = None
        self.writer = writer
        self.used_at = 0
        self.is_spilled = self.is_gone = False
        self.placement: Placement | None = None
        self.older: TierRun | None = None
        self.newer: TierRun | None = None

    @property
    def num_pages(self) -> int:
        """The number of pages of the run."""
        return self.end - self.start

    def __repr__(self) -> str:
        return f"TierRun(pages {self.start}..{self.end}, {self.state.name}, pins {self.pins})"


class Segment(Value):
    """Pages [start, end) of a sequence, and the tier's pages that they are copied to or from, if these have ids."""

    FIELDS: ClassVar[tuple[str, ...]] = ("start", "end", "slots")
    __slots__ = FIELDS

    def __init__(self, start: int, end: int, slots: tuple[PageId | bytes, ...] | None) -> None:
        self.start: Final = start
        self.end: Final = end
        self.slots: Final = slots


class Placement:
    """Pages of `content` that are coming: `num_pages` in `segments`, in order of position.

    `run` is the deepest; it is pinned.
    """

    __slots__ = ("content", "num_pages", "run", "segments")

    def __init__(self, content: Content, run: TierRun, segments: tuple[Segment, ...], num_pages: int) -> None:
        self.content = content
        self.run = run
        self.segments = segments
        self.num_pages = num_pages


class TierIndex:
    """Owner of one tier's pages: empty, cached, or in use because they are pinned, coming or doomed.

    `on_stored` and `on_removed` are called for runs that become or stop being findable.
    """

    def __init__(self, num_pages: int, *, with_slots: bool) -> None:
        self.pool: CountPool | IdPool = IdPool(num_pages) if with_slots else CountPool(num_pages)
        self.num_cached = 0
        """Findable pages that are not pinned."""
        self.num_evicted = 0
        self.num_refused = 0
        """Pages that were not stored because no room could be made."""
        self.num_holes = 0
        """Runs of the tree that are holes."""
        self.num_arrived = 0
        """Pages that were stored: the clock of `TierRun.used_at`."""
        self.longest_wait = 0
        """The most pages that arrived between two uses of a page."""
        self.writer = 0
        """The engine that stores from now on, where several share the tier."""
        self.told_of = 0
        """The engine that had stored what `on_stored` or `on_removed` is called for."""
        self._with_slots = with_slots
        self.on_stored: OnStored | None = None
        self.on_removed: OnRemoved | None = None
        self._roots: dict[str | None, TierRun] = {}
        self._walked: list[TierRun | None] = [None] * NUM_WALKS
        """Runs at which walks have ended: all their pages are those of the content in `_walked_of`."""
        self._walked_of: list[Content | None] = [None] * NUM_WALKS
        # A sentinel closes the order of recency to a ring: its `newer` is the oldest run.
        self._ring = _root()
        self._ring.older = self._ring.newer = self._ring

    @property
    def num_used(self) -> int:
        """Pages that are pinned, coming, or doomed and not yet released."""
        return self.pool.total - self.pool.num_empty - self.num_cached

    # Finding ----------------------------------------------------------------------------------------------

    def find(self, content: Content, start: int, limit: int) -> int:
        """Return how many consecutive pages of `content` in [start, limit) are stored, from `start` on."""
        _, position, _ = self._walk(content, limit, start)
        return position - start if position > start else 0

    def stored(self, content: Content, start: int, end: int) -> list[tuple[int, int]]:
        """Return the longest stretches of pages [start, end) that are stored, whether or not earlier pages are."""
        # Not by `_path`: this runs for each run that becomes findable on a device.
        stretches: list[tuple[int, int]] = []
        node = self._before(content, start)
        position = node.end
        while position < end and node.children:
            child = node.children.get(content.key(position))
            if child is None:
                break
            first, last = position, child.end
            position = content.common_pages(child.content, first, last if last < end else end)
            if position > start and child.state is STORED:
                if first < start:
                    first = start
                if stretches and stretches[-1][1] == first:
                    first = stretches.pop()[0]
                stretches.append((first, position))
            if position < last:
                break
            node = child
        return stretches

    def coming(self, content: Content, start: int, limit: int) -> tuple[Placement, int] | None:
        """Return the placement that brings page `start` of `content`, and how many pages it brings from there on.

        Only pages [start, limit). None if the page is not coming.
        """
        found: Placement | None = None
        num_pages = 0
        for run, before, position in self._path(content, start, limit):
            if position <= start:
                continue
            if run.placement is None or (found is not None and run.placement is not found):
                break
            found = run.placement
            num_pages += position - (before if before > start else start)
        return None if found is None else (found, num_pages)

    def missing(self, content: Content, start: int, end: int) -> int:
        """Return how many of the pages [start, end) are neither stored nor coming."""
        num_missing = end - start
        node = self._before(content, start)
        position = node.end
        while position < end and node.children:
            run = node.children.get(content.key(position))
            if run is None:
                break
            first, last = position, run.end
            position = content.common_pages(run.content, first, last if last < end else end)
            if position > start and run.state is not HOLE:
                num_missing -= position - (first if first > start else start)
            if position < last:
                break
            node = run
        return num_missing

    def absent(self, content: Content, start: int, end: int) -> list[tuple[int, int]]:
        """Return the stretches of pages [start, end) that are neither stored nor coming."""
        stretches: list[tuple[int, int]] = []
        for run, before, position in self._path(content, start, end):
            if position > start and run.state is not HOLE:
                if before > start:
                    stretches.append((start, before))
                start = position
        if start < end:
            stretches.append((start, end))
        return stretches

    # Pinning ----------------------------------------------------------------------------------------------

    def pin(self, content: Content, end: int) -> TierRun:
        """Pin all runs of the first `end` pages, holes included. The tree must have all of these pages."""
        node, position = self._descend(content, end)
        assert position == end, f"pages from {position} on are not in the tier, and were to be pinned up to {end}"
        self._pin(node)
        return node

    def pin_stored(self, content: Content, start: int, limit: int) -> TierRun | None:
        """Pin the pages that `find` counts, and all runs before them; return the deepest run; None without pages."""
        node, position, cut = self._walk(content, limit, start)
        if position <= start:
            return None
        if cut is not None:
            node = self._split(cut, position)
        self._pin(node)
        return node

    def unpin(self, run: TierRun) -> None:
        """End one pin. `run` is the result of `pin`, and may have been removed from the tree."""
        node = run
        while (parent := node.parent) is not None:
            pins = node.pins = node.pins - 1
            if pins <= 0:
                assert pins == 0, f"{node} was unpinned more often than it was pinned"
                if node.state is STORED:
                    self.num_cached += node.end - node.start
                elif node.state is DOOMED:
                    self.pool.give(node.end - node.start, node.slots)
                elif not node.children:
                    assert node.state is HOLE, f"{node} is coming, and nothing pins it"
                    self._unlink(node)
            node = parent
        children = run.children
        if children is not None and len(children) == 1 and run.state is STORED:
            (child,) = children.values()
            is_alike = child.pins == run.pins and child.state is STORED and child.writer == run.writer
            is_alike = is_alike and child.used_at == run.used_at and child.is_spilled == run.is_spilled
            if is_alike and child.newer is run:
                newer = run.newer
                assert newer is not None
                child.newer = newer
                newer.older = child
                self._join(run, child)

    def slots_of(self, run: TierRun, start: int) -> tuple[PageId, ...] | None:
        """Return the ids of the pages from `start` to the end of `run`, which must all be stored."""
        if not self._with_slots:
            return None
        slots: list[PageId] = []
        node = run
        while node.end > start:
            assert node.slots is not None and node.parent is not None
            slots[:0] = node.slots[max(0, start - node.start) :]
            node = node.parent
        return tuple(slots)

    def touch(self, run: TierRun) -> None:
        """Make all runs from `run` to the root the most recent, deeper ones older."""
        ring = self._ring
        now = self.num_arrived
        below: TierRun | None = None
        node: TierRun | None = run
        while node is not None:
            parent = node.parent
            if node.state is STORED:
                node.used_at = now
                node.is_spilled = False
                if node.newer is not None:
                    _unlist(node)
                if (
                    below is not None
                    and below.pins == node.pins
                    and below.writer == node.writer
                    and node.children is not None
                    and len(node.children) == 1
                ):
                    # No other run follows it, and no pin ends at it: both have the same history.
                    self._join(node, below)
                else:
                    _list_before(ring, node)
                    below = node
            else:
                below = None
            node = parent

    def note_use(self, run: TierRun, start: int) -> None:
        """Measure how long the pages from `start` to the end of `run` have waited for their use now."""
        node = run
        while node.end > start and node.parent is not None:
            wait = self.num_arrived - node.used_at
            if node.state is STORED and wait > self.longest_wait:
                self.longest_wait = wait
            node = node.parent

    def num_forsaken(self, limit: int) -> int:
        """Return how many of the next `limit` evictions have waited twice as long as any page that was used."""
        num_pages = 0
        for run in self.recency() if limit > 0 else ():
            if self.num_arrived - run.used_at <= 2 * self.longest_wait:
                break
            if not run.pins:
                num_pages += run.end - run.start
                if num_pages >= limit:
                    return limit
        return num_pages

    # Storing and removing ---------------------------------------------------------------------------------

    def place(
        self, content: Content, start: int, end: int, *, deepest_first: bool = False, limit: int = ALL
    ) -> Placement | None:
        """Make room for the missing pages of [start, end); None if all are present or no room can be made.

        If there is not room for all, or more than `limit` are missing, place the first of them, or the last if
        `deepest_first`. `settle` must follow.
        """
        node, position, run_in_part = self._walk(content, end)
        num_missing = end - (position if position > start else start)
        holes: list[TierRun] = []
        is_hole = False
        if self.num_holes:
            holes = self._holes(node, start)
            for hole in holes:
                num_missing += hole.end - (hole.start if hole.start > start else start)
            is_hole = run_in_part is not None and run_in_part.state is HOLE and position > start
            if is_hole:
                num_missing += position - max(node.end, start)
        if num_missing <= 0:
            return None
        deepest = node if run_in_part is None else self._split(run_in_part, position)
        if is_hole:
            holes.append(deepest)
        self._pin(deepest)
        pool = self.pool
        num_empty = pool.num_empty
        room = num_empty + self.num_cached
        if limit <= room:
            room = limit
        elif num_missing > room:
            self.num_refused += num_missing - room
        if num_missing > room:
            if not room:
                self.unpin(deepest)
                return None
            while deepest_first and num_missing > room:
                start += num_missing - room
                num_missing = self.missing(content, start, end)
                holes = [hole for hole in holes if hole.end > start]
            num_missing = min(num_missing, room)
        if num_missing > num_empty:
            self._evict(num_missing - num_empty)
        placement = Placement(content, deepest, (), num_missing)
        segments = []
        num_left = num_missing
        for hole in holes:
            if not num_left:
                break
            run = hole
            if run.start < start:
                self._split(run, start)
            if run.end - run.start > num_left:
                run = self._split(run, run.start + num_left)
            segments.append(self._fill(run, placement, content))
            num_left -= run.num_pages
            placement.run = run
        if num_left:
            # Everything up to `deepest` is pinned already.
            run = deepest
            if position < start:
                run = self._add(run, content, position, start)
                position = start
            run = self._add(run, content, position, position + num_left)
            segments.append(self._fill(run, placement, content))
            placement.run = run
        elif placement.run is not deepest:
            self._pin(placement.run)
            self.unpin(deepest)
        placement.segments = tuple(segments)
        self._remember(content, placement.run)
        return placement

    def settle(self, placement: Placement, *, is_stored: bool) -> list[tuple[int, int]]:
        """End a placement: its pages are stored, or will never arrive. Return the runs of pages that are here now."""
        last = node = placement.run
        arrived: list[TierRun] = []
        first = placement.segments[0].start
        while node.end > first and (parent := node.parent) is not None:
            if node.placement is placement:
                node.placement = None
                if node.state is COMING:
                    if is_stored:
                        self.num_arrived += node.end - node.start
                        node.state = STORED
                        arrived.append(node)
                    else:
                        node.state = HOLE
                        self.num_holes += 1
                        self.pool.give(node.end - node.start, node.slots)
                        node.slots = None
            node = parent
        arrived.reverse()
        here = [(run.start, run.end) for run in arrived]
        on_stored = self.on_stored
        if on_stored is not None:
            for run in arrived:
                parent = run.parent
                self.told_of = run.writer
                on_stored(run.content, run.start, run.end, None if parent is None or not run.start else parent.content)
        # Last, because `touch` may join the stored runs to the run before them or after them.
        if is_stored:
            self.touch(last)
        self.unpin(last)
        return here

    def vacate(self, content: Content, end: int, count: int) -> None:
        """Evict up to `count` of the first `end` pages of `content`, the deepest first.

        It ends before one that is pinned, that something follows, or that is not here.
        """
        run, _ = self._descend(content, end)
        while count > 0 and run.state is STORED and not (run.pins or run.children):
            before = run.parent
            assert before is not None
            if run.num_pages > count:
                self._split(run, run.end - count)
            count -= run.num_pages
            self.num_evicted += run.num_pages
            self._drop(run)
            run = before

    def move_out(self, content: Content, start: int, end: int) -> None:
        """Release those of pages [start, end) that are stored and not pinned: the device has them.

        Pages before others that stay become a hole.
        """
        for run, first, last in reversed(list(self._path(content, start, end))):
            if last <= start or run.state is not STORED or run.pins:
                continue
            moving = self._split(run, last) if last < run.end else run
            if first < start:
                self._split(moving, start)
            if not moving.children:
                self._drop(moving)
                continue
            _unlist(moving)
            moving.state = HOLE
            self.num_holes += 1
            self.num_cached -= moving.num_pages
            self.pool.give(moving.num_pages, moving.slots)
            moving.slots = None
            if self.on_removed is not None:
                self.told_of = moving.writer
                self.on_removed(moving.content, moving.start, moving.end)

    def note_spilled(self, content: Content, start: int, end: int) -> None:
        """Note that those of pages [start, end) that are stored have been copied to the next tier."""
        for run, first, last in list(self._path(content, start, end)):
            if last > start and run.state is STORED:
                spilled = self._split(run, last) if last < run.end else run
                if first < start:
                    self._split(spilled, start)
                spilled.is_spilled = True

    def drop(self, content: Content, page: int) -> None:
        """Drop `page` and all later pages."""
        for run, _, position in self._path(content, page, page + 1):
            if position > page:
                if run.start < page:
                    self._split(run, page)
                self._drop(run)

    def lose(self, content: Content, start: int, end: int) -> None:
        """Note that the device no longer has pages [start, end): pages after a hole in them cannot be used."""
        if not self.num_holes:
            return
        node = self._before(content, start)
        position = node.end
        while position < end and node.children:
            run = node.children.get(content.key(position))
            if run is None:
                return
            last = run.end
            position = content.common_pages(run.content, position, last if last < end else end)
            if position > start and run.state is HOLE:
                if run.start < start:
                    self._split(run, start)
                self._drop(run)
                return
            if position < last:
                return
            node = run

    def reset(self) -> None:
        """Drop all pages. Pinned and coming pages cannot be found again, and are released when that ends."""
        for root in self._roots.values():
            for run in list((root.children or {}).values()):
                self._drop(run)

    # Internals --------------------------------------------------------------------------------------------

    def _pin(self, run: TierRun) -> None:
        node = run
        while (parent := node.parent) is not None:
            pins = node.pins
            if not pins and node.state is STORED:
                self.num_cached -= node.end - node.start
            node.pins = pins + 1
            node = parent

    def _before(self, content: Content, most: int) -> TierRun:
        """Return a run, or the root, with which pages of `content` end, at most `most`: the deepest that is known."""
        slot = content.owner & (NUM_WALKS - 1)
        node = self._walked[slot]
        if node is None or node.is_gone or self._walked_of[slot] is not content:
            return self._root_of(content)
        while node.end > most:
            before = node.parent
            assert before is not None
            node = before
        return node

    def _root_of(self, content: Content) -> TierRun:
        root = self._roots.get(content.salt)
        if root is None:
            root = self._roots[content.salt] = _root()
        return root

    def _walk(self, content: Content, end: int, start: int = ALL) -> tuple[TierRun, int, TierRun | None]:
        """Return the deepest run wholly within `end` pages, the number of known pages, and a run cut by the end.

        Stop before the first run that has pages from `start` on and is not stored.
        """
        node = begin = self._before(content, end)
        position = node.end
        if position > start:
            last: TierRun | None = None
            run = node
            while run.end > start:
                before = run.parent
                assert before is not None
                if run.state is not STORED:
                    last = before
                run = before
            if last is not None:
                return last, last.end, None
        in_part: TierRun | None = None
        while position < end and node.children:
            child = node.children.get(content.key(position))
            if child is None:
                break
            child_end = child.end
            stop = child_end if child_end < end else end
            other = child.content
            common = stop if other is content else content.common_pages(other, position, stop)
            if common > start and child.state is not STORED:
                break
            position = common
            if common < child_end:
                in_part = child
                break
            node = child
        if node is not begin:
            self._remember(content, node)
        return node, position, in_part

    def _remember(self, content: Content, node: TierRun) -> None:
        """Begin later walks of `content` at `node`, or at a deeper run where one has ended before."""
        if node.end > content.num_known_pages:
            return  # the names of these pages change when their tokens become known
        slot = content.owner & (NUM_WALKS - 1)
        last = self._walked[slot]
        if last is None or last.is_gone or last.end < node.end or self._walked_of[slot] is not content:
            self._walked[slot], self._walked_of[slot] = node, content

    def _descend(self, content: Content, end: int) -> tuple[TierRun, int]:
        """Return the deepest run of the first `end` pages, split where they end or differ, and that position."""
        node, position, run_in_part = self._walk(content, end)
        return (node if run_in_part is None else self._split(run_in_part, position)), position

    def _path(self, content: Content, start: int, end: int) -> Iterator[tuple[TierRun, int, int]]:
        """Yield the known runs of pages [start, end), each with the first and last position in common.

        There may be runs before them.
        """
        node = self._before(content, start)
        position = node.end
        while position < end and node.children:
            child = node.children.get(content.key(position))
            if child is None:
                return
            first, position = position, content.common_pages(child.content, position, min(child.end, end))
            is_whole = position == child.end
            yield child, first, position
            if not is_whole:
                return
            node = child

    def _holes(self, deepest: TierRun, start: int) -> list[TierRun]:
        """Return the holes from page `start` up to `deepest`, in order of position."""
        holes = []
        node = deepest
        while node.parent is not None and node.end > start:
            if node.state is HOLE:
                holes.append(node)
            node = node.parent
        holes.reverse()
        return holes

    def _fill(self, run: TierRun, placement: Placement, content: Content) -> Segment:
        """Begin to store the pages of a hole. `content` has them as well, and is of the engine that stores."""
        self.num_holes -= 1
        run.state = COMING
        if run.writer != self.writer:
            run.writer = self.writer
            run.content = content
        run.placement = placement
        run.slots = self.pool.take(run.num_pages)
        return Segment(run.start, run.end, None if run.slots is None else tuple(run.slots))

    def _add(self, parent: TierRun, content: Content, start: int, end: int) -> TierRun:
        """Add a hole, pinned once, and return it."""
        key = content.key(start)
        run = TierRun(content, key, start, end, parent, HOLE, 1, writer=self.writer)
        self.num_holes += 1
        if parent.children is None:
            parent.children = {}
        parent.children[key] = run
        return run

    def _split(self, run: TierRun, at: int) -> TierRun:
        """Split `run` before page `at`; return the head. `run` becomes the tail."""
        assert run.start < at < run.end
        parent = run.parent
        assert parent is not None and parent.children is not None
        head = TierRun(run.content, run.key, run.start, at, parent, run.state, run.pins)
        head.placement = run.placement
        head.writer = run.writer
        head.used_at = run.used_at
        head.is_spilled = run.is_spilled
        self.num_holes += run.state is HOLE
        if run.slots is not None:
            head.slots = run.slots[: at - run.start]
            del run.slots[: at - run.start]
        if run.newer is not None:
            _list_before(run.newer, head)  # deeper pages are evicted first
        parent.children[head.key] = head
        run.start = at
        run.key = run.content.key(at)
        run.parent = head
        head.children = {run.key: run}
        return head

    def _join(self, head: TierRun, tail: TierRun) -> None:
        """Join `head`, which must not be listed, to `tail`, its only child. The result is `tail`."""
        parent = head.parent
        assert parent is not None and parent.children is not None
        if head.slots is not None:
            assert tail.slots is not None
            head.slots += tail.slots
            tail.slots = head.slots
        head.newer = None
        tail.start = head.start
        tail.key = head.key
        tail.parent = parent
        parent.children[tail.key] = tail
        head.is_gone = True

    def _evict(self, count: int) -> None:
        """Evict `count` cached pages."""
        while count > 0:
            run = self._ring.newer
            assert run is not None
            while run.pins:
                run = run.newer
                assert run is not None
            assert not run.children, f"{run} would be evicted before what follows it"
            first, end = run.start, run.end
            num_pages = end - first
            if count < num_pages:
                num_pages = count
            count -= num_pages
            self.num_evicted += num_pages
            self.num_cached -= num_pages
            start = end - num_pages
            slots = run.slots
            self.pool.give(num_pages, None if slots is None else slots[start - first :])
            if start > first:
                run.end = start
                if slots is not None:
                    del slots[start - first :]
            else:
                _unlist(run)
                self._cut_off(run)
            if self.on_removed is not None:
                self.told_of = run.writer
                self.on_removed(run.content, start, end)

    def _drop(self, run: TierRun) -> None:
        removed: list[TierRun] = []
        self._cut_off(run)
        stack = [run]
        while stack:
            node = stack.pop()
            stack += (node.children or {}).values()
            node.children = None
            node.is_gone = True
            if node is not run:
                self.num_holes -= node.state is HOLE
            if node.state is STORED:
                _unlist(node)
                removed.append(node)
                if node.pins:
                    node.state = DOOMED
                else:
                    self.num_cached -= node.num_pages
                    self.pool.give(node.num_pages, node.slots)
            elif node.state is COMING:
                node.state = DOOMED
        if self.on_removed is not None:
            for node in removed:
                self.told_of = node.writer
                self.on_removed(node.content, node.start, node.end)

    def _cut_off(self, run: TierRun) -> None:
        """Remove `run` from the tree, and the holes before it that no longer precede any run."""
        self._unlink(run)
        node = run.parent
        while node is not None and node.parent is not None:
            if node.state is not HOLE or node.children or node.pins:
                return
            self._unlink(node)
            node = node.parent

    def _unlink(self, run: TierRun) -> None:
        parent = run.parent
        assert parent is not None
        run.is_gone = True
        if parent.children is not None and parent.children.get(run.key) is run:
            del parent.children[run.key]
            self.num_holes -= run.state is HOLE

    # Inspection -------------------------------------------------------------------------------------------------------

    def runs(self) -> Iterator[TierRun]:
        """Yield all runs of the tree, holes included, parents before children."""
        stack = list(self._roots.values())
        while stack:
            for child in (stack.pop().children or {}).values():
                yield child
                stack.append(child)

    def recency(self) -> Iterator[TierRun]:
        """Yield stored runs, the oldest first."""
        run = self._ring.newer
        while run is not None and run is not self._ring:
            yield run
            run = run.newer


def _root() -> TierRun:
    return TierRun(NOTHING, b"", 0, 0, None, HOLE)


def _list_before(newer: TierRun, run: TierRun) -> None:
    older = newer.older
    assert older is not None
    run.older = older
    run.newer = newer
    older.newer = run
    newer.older = run


def _unlist(run: TierRun) -> None:
    older, newer = run.older, run.newer
    assert older is not None and newer is not None
    older.newer = newer
    newer.older = older
    run.older = run.newer = None


def check_index(index: TierIndex, is_above: Callable[[Content, int], bool]) -> None:
    """Assert laws L1 to L3 of `index`. `is_above`: whether a faster tier has the first n pages of a content."""
    num_cached = num_pinned = 0
    slots: list[PageId] = []
    listed = {id(run): place for place, run in enumerate(index.recency())}
    useful: set[int] = set()
    for run in index.runs():
        assert run.start < run.end, f"L1: {run} has no pages"
        assert run.parent is not None
        assert run.parent.parent is None or run.parent.end == run.start, f"L3: {run} does not follow its parent"
        assert run.pins >= sum(child.pins for child in (run.children or {}).values()), f"L2: pins of {run}"
        assert (run.state is NodeState.STORED) == (id(run) in listed), f"L2: {run} is in the wrong list"
        assert run.state is not NodeState.DOOMED, f"L3: {run} can be found"
        assert run.state is not NodeState.HOLE or run.children or run.pins, f"L1: {run} is of no use"
        assert run.state is not NodeState.COMING or run.pins, f"L2: {run} is coming, and nothing pins it"
        if run.state is NodeState.STORED and not run.pins:
            num_cached += run.num_pages
        elif run.state is not NodeState.HOLE:
            num_pinned += run.num_pages
        slots += run.slots or ()
        if run.state is NodeState.STORED:
            node = run.parent
            while node.parent is not None:
                useful.add(id(node))
                assert node.pins or id(node) not in listed or listed[id(node)] > listed[id(run)], (
                    f"L3: {node} would go before {run}"
                )
                node = node.parent
    num_holes = sum(run.state is NodeState.HOLE for run in index.runs())
    assert num_holes == index.num_holes, f"L1: {num_holes} holes, counted as {index.num_holes}"
    for run in index.runs():
        if run.state is NodeState.HOLE and id(run) in useful:
            assert is_above(run.content, run.end), f"L3: what follows {run} cannot be reached"
    assert num_cached == index.num_cached, f"L1: {num_cached} pages cached, counted as {index.num_cached}"
    assert index.num_used >= num_pinned, f"L1: {num_pinned} pages pinned or coming, {index.num_used} in use"
    if index.pool.has_ids:
        slots += index.pool.empty_ids
        assert len(set(slots)) == len(slots), "L1: a page of the tier has two owners"

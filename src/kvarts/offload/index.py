"""The index of one tier below the device: which pages it holds, which are on their way, and which goes first.

A tree of runs, as on the device, with two differences. A page has one copy at most. And a run may be a *hole*: not
here, but something after it is, which can be used as long as the device has the hole's pages.

Recency is that of whole prefixes: whatever touches a page touches what is before it, and the deepest page goes first,
so what remains of a sequence is always a prefix of it. A pin is its deepest run: everything from there to the root is
pinned. What leaves the tree while it is pinned is *doomed*: nobody finds it, and its pages are given back when the
last pin ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum

import msgspec

from kvarts.content import Content, PageKey
from kvarts.kv.pool import CountPool, IdPool, PageId

__all__ = ["NodeState", "Placement", "Segment", "TierIndex", "TierRun"]


class NodeState(IntEnum):
    """Of the pages of a run."""

    HOLE = 0
    COMING = 1
    STORED = 2
    DOOMED = 3


class TierRun(msgspec.Struct, eq=False):
    """Pages [start, end) of `content`. Written by TierIndex only.

    `slots`: ids of the tier's pages, or None where they are only counted, or there are none. `placement`: what a
    coming run belongs to. `older` and `newer`: neighbours in the order of recency, for stored runs.
    """

    content: Content
    key: PageKey
    start: int
    end: int
    parent: TierRun | None
    state: NodeState
    pins: int = 0
    children: dict[PageKey, TierRun] | None = None
    slots: list[PageId] | None = None
    placement: Placement | None = None
    older: TierRun = None  # type: ignore[assignment]
    newer: TierRun = None  # type: ignore[assignment]

    @property
    def num_pages(self) -> int:
        """Its length."""
        return self.end - self.start

    def __repr__(self) -> str:
        return f"TierRun(pages {self.start}..{self.end}, {self.state.name}, pins {self.pins})"


class Segment(msgspec.Struct, frozen=True):
    """Pages [start, end) of a sequence, and the tier's pages they go to or come from, where these have ids."""

    start: int
    end: int
    slots: tuple[PageId | bytes, ...] | None


class Placement(msgspec.Struct, eq=False):
    """Pages that are coming: `num_pages` in `segments`, root side first. `run` is the deepest; it is pinned."""

    run: TierRun
    segments: tuple[Segment, ...]
    num_pages: int


NOTHING = Content(b"", num_tokens=0, page_size=1, owner=-1)


class TierIndex:
    """Owner of one tier's pages: empty, cached, or in use because they are pinned, coming or doomed.

    `on_stored` and `on_removed` are told of runs that become findable and that no longer are.
    """

    def __init__(
        self,
        num_pages: int,
        *,
        with_slots: bool,
        on_stored: Callable[[TierRun], object] | None = None,
        on_removed: Callable[[Content, int, int], object] | None = None,
    ) -> None:
        self.pool: CountPool | IdPool = IdPool(num_pages) if with_slots else CountPool(num_pages)
        self.num_cached = 0
        """Findable pages that nothing pins."""
        self.num_evicted = 0
        self.num_refused = 0
        """Pages that no room could be made for."""
        self.num_holes = 0
        """Runs of the tree that are not here."""
        self._with_slots = with_slots
        self.on_stored = on_stored
        self.on_removed = on_removed
        self._roots: dict[str | None, TierRun] = {}
        # One sentinel closes the order of recency to a ring: newer of it is the oldest run.
        self._ring = _root()
        self._ring.older = self._ring.newer = self._ring

    @property
    def num_used(self) -> int:
        """Pages that are pinned, coming, or doomed and not yet given back."""
        return self.pool.total - self.pool.num_empty - self.num_cached

    @property
    def num_free(self) -> int:
        """Pages that something new can take: empty or cached."""
        return self.pool.num_empty + self.num_cached

    # Finding ----------------------------------------------------------------------------------------------

    def find(self, content: Content, start: int, limit: int) -> int:
        """How many pages of `content` from page `start` on are stored, one after the other, up to page `limit`."""
        position = 0
        node = self._roots.get(content.salt)
        while node is not None and position < limit and node.children:
            child = node.children.get(content.key(position))
            if child is None:
                break
            common = content.common_pages(child.content, position, child.end if child.end < limit else limit)
            if common > start and child.state is not NodeState.STORED:
                break
            position = common
            if common < child.end:
                break
            node = child
        return position - start if position > start else 0

    def stored(self, content: Content, end: int) -> list[tuple[int, int]]:
        """The stretches of the first `end` pages that are stored, each as long as can be."""
        stretches: list[tuple[int, int]] = []
        for run, start, position in self._path(content, end):
            if run.state is NodeState.STORED:
                if stretches and stretches[-1][1] == start:
                    start = stretches.pop()[0]  # noqa: PLW2901
                stretches.append((start, position))
        return stretches

    def missing(self, content: Content, start: int, end: int) -> int:
        """How many of the pages [start, end) are neither stored nor coming."""
        num_missing = end - start
        for run, before, position in self._path(content, end):
            if position > start and run.state is not NodeState.HOLE:
                num_missing -= position - (before if before > start else start)
        return num_missing

    # Pinning ----------------------------------------------------------------------------------------------

    def pin(self, content: Content, end: int) -> TierRun:
        """Pins everything here of the first `end` pages, which must be known to the tree, holes or not."""
        node, position = self._descend(content, end)
        assert position == end, f"pages from {position} on are not here, and were to be pinned up to {end}"
        self._pin(node)
        return node

    def unpin(self, run: TierRun) -> None:
        """Ends one pin; `run` is what `pin` answered."""
        node = run
        while node.parent is not None:
            node.pins -= 1
            assert node.pins >= 0, f"{node} was unpinned more often than it was pinned"
            if node.pins == 0:
                if node.state is NodeState.STORED:
                    self.num_cached += node.end - node.start
                elif node.state is NodeState.DOOMED:
                    self.pool.give(node.end - node.start, node.slots)
                elif not node.children:
                    assert node.state is NodeState.HOLE, f"{node} is coming, and nothing pins it"
                    self._unlink(node)
            node = node.parent

    def slots_of(self, run: TierRun, start: int) -> tuple[PageId, ...] | None:
        """Where the pages from `start` to the end of `run` are, which are all stored."""
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
        """Makes everything from `run` to the root most recent, the deepest page the oldest of it."""
        ring = self._ring
        node: TierRun | None = run
        while node is not None:
            if node.state is NodeState.STORED:
                if node.newer is not None:
                    node.older.newer = node.newer
                    node.newer.older = node.older
                _list_before(ring, node)
            node = node.parent

    # Coming and going -------------------------------------------------------------------------------------

    def place(self, content: Content, start: int, end: int, *, deepest_first: bool = False) -> Placement | None:
        """Makes room for those of the pages [start, end) that are missing, as far as it can be made.

        Where that is not for all, for the first, or for the last if `deepest_first`. None if nothing is missing or
        there is no room at all. `settle` must follow.
        """
        node, position, run_in_part = self._walk(content, end)
        holes = self._holes(node, start) if self.num_holes else []
        num_missing = end - (position if position > start else start)
        for hole in holes:
            num_missing += hole.end - (hole.start if hole.start > start else start)
        is_hole = run_in_part is not None and run_in_part.state is NodeState.HOLE and position > start
        if is_hole:
            num_missing += position - max(node.end, start)
        if num_missing <= 0:
            return None
        deepest = node if run_in_part is None else self._split(run_in_part, position)
        if is_hole:
            holes.append(deepest)
        self._pin(deepest)
        room = self.num_free
        if num_missing > room:
            self.num_refused += num_missing - room
            if not room:
                self.unpin(deepest)
                return None
            while deepest_first and num_missing > room:
                start += num_missing - room
                num_missing = self.missing(content, start, end)
                holes = [hole for hole in holes if hole.end > start]
            num_missing = min(num_missing, room)
        placement = Placement(deepest, (), num_missing)
        self._evict(num_missing - self.pool.num_empty)
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
            segments.append(self._fill(run, placement))
            num_left -= run.num_pages
            placement.run = run
        if num_left:
            # Everything up to `deepest` is pinned already.
            run = deepest
            if position < start:
                run = self._add(run, content, position, start)
                position = start
            run = self._add(run, content, position, position + num_left)
            segments.append(self._fill(run, placement))
            placement.run = run
        elif placement.run is not deepest:
            self._pin(placement.run)
            self.unpin(deepest)
        placement.segments = tuple(segments)
        return placement

    def settle(self, placement: Placement, *, is_stored: bool) -> None:
        """What was coming is here, or will never be."""
        node: TierRun = placement.run
        arrived = []
        while node.parent is not None:
            if node.placement is placement:
                node.placement = None
                if node.state is NodeState.COMING:
                    if is_stored:
                        node.state = NodeState.STORED
                        arrived.append(node)
                    else:
                        node.state = NodeState.HOLE
                        self.num_holes += 1
                        self.pool.give(node.num_pages, node.slots)
                        node.slots = None
            node = node.parent
        self.unpin(placement.run)
        if is_stored:
            self.touch(placement.run)
        if self.on_stored is not None:
            for node in reversed(arrived):
                self.on_stored(node)

    def drop(self, content: Content, page: int) -> None:
        """Forgets `page` and everything that follows it."""
        for run, _, position in self._path(content, page + 1):
            if position > page:
                if run.start < page:
                    self._split(run, page)
                self._drop(run)

    def lose(self, content: Content, start: int, end: int) -> None:
        """The device no longer has pages [start, end): what follows a hole there is of no use."""
        for run, _, position in self._path(content, end):
            if run.state is NodeState.HOLE and position > start:
                if run.start < start:
                    self._split(run, start)
                self._drop(run)
                return

    def reset(self) -> None:
        """Forgets everything. What is pinned or coming is given back when that ends, and never found again."""
        for root in self._roots.values():
            for run in list((root.children or {}).values()):
                self._drop(run)

    # Inside -----------------------------------------------------------------------------------------------

    def _pin(self, run: TierRun) -> None:
        node = run
        while node.parent is not None:
            if node.pins == 0 and node.state is NodeState.STORED:
                self.num_cached -= node.end - node.start
            node.pins += 1
            node = node.parent

    def _walk(self, content: Content, end: int) -> tuple[TierRun, int, TierRun | None]:
        """The deepest run wholly among the first `end` pages, up to where these are here, and a run that goes on."""
        node = self._roots.get(content.salt)
        if node is None:
            node = self._roots[content.salt] = _root()
        position = 0
        while position < end and node.children:
            child = node.children.get(content.key(position))
            if child is None:
                break
            position = content.common_pages(child.content, position, child.end if child.end < end else end)
            if position < child.end:
                return node, position, child
            node = child
        return node, position, None

    def _descend(self, content: Content, end: int) -> tuple[TierRun, int]:
        """The deepest run of the first `end` pages, cut where they end or differ, and where that is."""
        node, position, run_in_part = self._walk(content, end)
        return (node if run_in_part is None else self._split(run_in_part, position)), position

    def _path(self, content: Content, end: int) -> Iterator[tuple[TierRun, int, int]]:
        """The runs of the first `end` pages, as far as they are known here: each with the pages it shares with them."""
        position = 0
        node = self._roots.get(content.salt)
        while node is not None and position < end and node.children:
            child = node.children.get(content.key(position))
            if child is None:
                return
            start, position = position, content.common_pages(child.content, position, min(child.end, end))
            is_whole = position == child.end
            yield child, start, position
            if not is_whole:
                return
            node = child

    def _holes(self, deepest: TierRun, start: int) -> list[TierRun]:
        """Holes from page `start` up to `deepest`, root side first."""
        holes = []
        node = deepest
        while node.parent is not None and node.end > start:
            if node.state is NodeState.HOLE:
                holes.append(node)
            node = node.parent
        holes.reverse()
        return holes

    def _fill(self, run: TierRun, placement: Placement) -> Segment:
        self.num_holes -= 1
        run.state = NodeState.COMING
        run.placement = placement
        run.slots = self.pool.take(run.num_pages)
        return Segment(run.start, run.end, None if run.slots is None else tuple(run.slots))

    def _add(self, parent: TierRun, content: Content, start: int, end: int) -> TierRun:
        """A new hole, pinned once."""
        key = content.key(start)
        run = TierRun(content, key, start, end, parent, NodeState.HOLE, 1)
        self.num_holes += 1
        if parent.children is None:
            parent.children = {}
        parent.children[key] = run
        return run

    def _split(self, run: TierRun, at: int) -> TierRun:
        """Splits `run` before page `at`; returns the head. `run` becomes the tail."""
        assert run.start < at < run.end
        parent = run.parent
        assert parent is not None and parent.children is not None
        head = TierRun(run.content, run.key, run.start, at, parent, run.state, run.pins)
        head.placement = run.placement
        self.num_holes += run.state is NodeState.HOLE
        if run.slots is not None:
            head.slots = run.slots[: at - run.start]
            del run.slots[: at - run.start]
        if run.newer is not None:
            _list_before(run.newer, head)  # deeper pages go first
        parent.children[head.key] = head
        run.start = at
        run.key = run.content.key(at)
        run.parent = head
        head.children = {run.key: run}
        return head

    def _evict(self, count: int) -> None:
        """Makes `count` cached pages empty, if it is above 0."""
        while count > 0:
            run = self._ring.newer
            while run.pins:
                run = run.newer
            assert not run.children, f"{run} would be evicted before what follows it"
            num_pages = min(count, run.num_pages)
            count -= num_pages
            self.num_evicted += num_pages
            self.num_cached -= num_pages
            start = run.end - num_pages
            slots = None if run.slots is None else run.slots[start - run.start :]
            self.pool.give(num_pages, slots)
            gone = run.content, start, run.end
            if start > run.start:
                run.end = start
                if run.slots is not None:
                    del run.slots[start - run.start :]
            else:
                _unlist(run)
                self._cut_off(run)
            if self.on_removed is not None:
                self.on_removed(*gone)

    def _drop(self, run: TierRun) -> None:
        removed: list[TierRun] = []
        self._cut_off(run)
        stack = [run]
        while stack:
            node = stack.pop()
            stack += (node.children or {}).values()
            node.children = None
            if node is not run:
                self.num_holes -= node.state is NodeState.HOLE
            if node.state is NodeState.STORED:
                _unlist(node)
                removed.append(node)
                if node.pins:
                    node.state = NodeState.DOOMED
                else:
                    self.num_cached -= node.num_pages
                    self.pool.give(node.num_pages, node.slots)
            elif node.state is NodeState.COMING:
                node.state = NodeState.DOOMED
        if self.on_removed is not None:
            for node in removed:
                self.on_removed(node.content, node.start, node.end)

    def _cut_off(self, run: TierRun) -> None:
        """Takes `run` out of the tree, and the holes before it that nothing follows any more."""
        self._unlink(run)
        node = run.parent
        while node is not None and node.parent is not None:
            if node.state is not NodeState.HOLE or node.children or node.pins:
                return
            self._unlink(node)
            node = node.parent

    def _unlink(self, run: TierRun) -> None:
        parent = run.parent
        assert parent is not None
        if parent.children is not None and parent.children.get(run.key) is run:
            del parent.children[run.key]
            self.num_holes -= run.state is NodeState.HOLE

    # Laws -------------------------------------------------------------------------------------------------

    def runs(self) -> Iterator[TierRun]:
        """Every run of the tree, holes included, parents before children."""
        stack = list(self._roots.values())
        while stack:
            for child in (stack.pop().children or {}).values():
                yield child
                stack.append(child)

    def recency(self) -> Iterator[TierRun]:
        """Stored runs, the oldest first."""
        run = self._ring.newer
        while run is not self._ring:
            yield run
            run = run.newer

    def check(self, is_above: Callable[[Content, int], bool]) -> None:
        """Asserts laws L1 and L3. `is_above`: whether a faster tier has the first pages of a content, so many."""
        num_cached = num_pinned = 0
        slots: list[PageId] = []
        listed = {id(run): index for index, run in enumerate(self.recency())}
        useful: set[int] = set()
        for run in self.runs():
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
        num_holes = sum(run.state is NodeState.HOLE for run in self.runs())
        assert num_holes == self.num_holes, f"L1: {num_holes} holes, counted as {self.num_holes}"
        for run in self.runs():
            if run.state is NodeState.HOLE and id(run) in useful:
                assert is_above(run.content, run.end), f"L3: what follows {run} cannot be reached"
        assert num_cached == self.num_cached, f"L1: {num_cached} pages cached, counted as {self.num_cached}"
        assert self.num_used >= num_pinned, f"L1: {num_pinned} pages pinned or coming, {self.num_used} in use"
        if isinstance(self.pool, IdPool):
            slots += self.pool.empty_ids
            assert len(set(slots)) == len(slots), "L1: a page of the tier has two owners"


def _root() -> TierRun:
    return TierRun(NOTHING, b"", 0, 0, None, NodeState.HOLE)


def _list_before(newer: TierRun, run: TierRun) -> None:
    older = newer.older
    run.older = older
    run.newer = newer
    older.newer = run
    newer.older = run


def _unlist(run: TierRun) -> None:
    run.older.newer = run.newer
    run.newer.older = run.older
    run.older = run.newer = None  # type: ignore[assignment]

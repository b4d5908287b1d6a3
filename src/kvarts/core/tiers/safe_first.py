"""The eviction order of a device with lower tiers: runs that a tier also holds are evicted first, without loss.

A run is *safe* if a lower tier holds it and all runs that follow it in the tree are safe: a page is never evicted
before the pages that follow it. Unreferenced safe runs are in a separate list and are evicted first. A run that becomes
safe enters that list as if it had just been released; a run that becomes unsafe enters the other list as its next to be
evicted.

An example: the device has A, of the pages a0 a1 a2, and B, of b0 b1, which was released later. The tier has a1, b0, b1:

    stored below    -  yes -       yes yes
    pages           a0 a1  a2      b0  b1
    safe            -  -   -       yes yes     a1 is not safe: a2, which follows it, is not stored
    evicted         5. 4.  3.      2.  1.      LRU alone: 3. 2. 1. for A, then 5. 4. for B

LRU alone would first evict a2, which would be lost; here the first two evictions lose nothing. As soon as a2 is
evicted, a1 is safe.

When a run becomes findable, the tiers are asked whether they have its pages: they may have been evicted here before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from kvarts.core.content import Content
from kvarts.core.hints import Hints
from kvarts.core.kv.eviction import (
    EvictionOrder,
    LruOrder,
    Node,
    NoteRequest,
    Path,
    TreeWatcher,
    as_list,
    noter_of,
    ranges_read_by,
)

__all__ = ["COMING", "FAILED", "NOT", "STORED", "SafeFirst"]


NOT: Final = 0
COMING: Final = 1
STORED: Final = 2
FAILED: Final = 3
"""Whether a lower tier holds a run: numbers, since compiled code compares members of an enum as objects. FAILED: it
did, or was to, and does not; that is not tried again."""


class Notes:
    """Notes on a run and all its copies. `first` is the copy that is found.

    `num_unsafe`: how many of the runs that follow it are not safe.
    """

    __slots__ = ("below", "first", "num_unsafe")

    def __init__(self, first: Node, below: int = 0, num_unsafe: int = 0) -> None:
        self.first = first
        self.below = below
        self.num_unsafe = num_unsafe


class Covered:
    """The first runs of an order that need no store, as many as a target takes, kept from one scan to the next.

    In an order that is no list of runs, there are never any. `num_pages`: their pages.
    """

    def __init__(self, order: EvictionOrder) -> None:
        self.num_pages = 0
        self._order = as_list(order)
        self._last: Node | None = None
        self._sizes: dict[Node, int] = {}

    def reach(self, num_pages: int, is_covered: Callable[[Node], bool]) -> None:
        """End with the first run that makes them at least `num_pages`, or before the first that is not covered."""
        order, sizes, last, total = self._order, self._sizes, self._last, self.num_pages
        if order is None:
            return
        while last is not None and total - sizes[last] >= num_pages:
            total -= sizes.pop(last)
            last = order.before(last)
        while total < num_pages and (node := order.after(last)) is not None and is_covered(node):
            size = sizes[node] = node.end - node.start
            total += size
            last = node
        self.num_pages, self._last = total, last

    def others(self, listed: Iterable[Node]) -> Iterator[Node]:
        """Return the runs of the order, all of them `listed`, that follow these."""
        order = self._order
        if order is None or self._last is None:
            yield from listed
            return
        node = order.after(self._last)
        while node is not None:
            yield node
            node = order.after(node)

    def clear(self) -> None:
        """Forget all: the next scan starts at the first run."""
        if self._sizes:
            self._sizes, self._last, self.num_pages = {}, None, 0

    def removed(self, node: Node) -> None:
        """Note that `node` leaves the order."""
        size = self._sizes.pop(node, 0)
        self.num_pages -= size
        if node is self._last:
            assert self._order is not None
            self._last = self._order.before(node)

    def split(self, head: Node, tail: Node) -> None:
        """Note that `head` is listed right after `tail`, from which it was split."""
        if tail in self._sizes:
            self._sizes[tail] = tail.end - tail.start
            self._sizes[head] = head.end - head.start
            if tail is self._last:
                self._last = head

    def cut(self, node: Node, num_pages: int) -> None:
        """Note that the last pages of `node` were evicted."""
        if node in self._sizes:
            self._sizes[node] -= num_pages
            self.num_pages -= num_pages


class SafeFirst(EvictionOrder, TreeWatcher):
    """Two orders made by `make`: one for the safe runs, and one for the rest. An EvictionOrder and a TreeWatcher.

    A tree gets it as both, or only as its watcher if the tree's order is another one that wraps it. Runs that change
    lists together keep the order in which they were listed.
    """

    def __init__(self, make: Callable[[], EvictionOrder] = LruOrder) -> None:
        self.num_safe = 0
        """Cached pages that are safe."""
        self.on_grown: Callable[[Content, int, int], object] | None = None
        """Called for pages that became findable: content, first page, page after the last."""
        self._safe = make()
        self._rest = make()
        self.covered = Covered(self._rest)
        """The unsafe runs next to be evicted that need no store."""
        # The stamp of each listed run. A run put before all others gets a stamp below the smallest.
        self._safe_stamps: dict[Node, int] = {}
        self._rest_stamps: dict[Node, int] = {}
        self._last_stamp = self._first_stamp = 0
        self._toggled: list[Node] = []
        self.reads_ranges = ranges_read_by(self._rest)
        self.note_request: NoteRequest | None = None if noter_of(self._rest) is None else self._note_request

    # Interface of the tiers -------------------------------------------------------------------------------

    def mark(self, nodes: list[Node], below: int) -> None:
        """Record whether a lower tier holds `nodes`: `below` is NOT, COMING, STORED or FAILED. Then call `regroup`."""
        if below == NOT:
            self.covered.clear()
        for node in nodes:
            notes = node.notes
            was_stored = notes.below == STORED
            notes.below = below
            # A run that precedes an unsafe run stays unsafe.
            if (below == STORED) != was_stored and not notes.num_unsafe:
                self._toggle(notes)

    def regroup(self) -> None:
        """Move runs to the list that they now belong to. Those that move together keep their order."""
        if not self._toggled:
            return
        safe_stamps, rest_stamps = self._safe_stamps, self._rest_stamps
        moving: dict[Node, int] = {}
        for node in self._toggled:
            if node.refs == 0:
                stamps = safe_stamps if _is_unsafe(node.notes) else rest_stamps
                if node in stamps:
                    moving[node] = stamps[node]
        self._toggled = []
        in_order = list(moving)
        if len(in_order) > 1:
            in_order.sort(key=lambda node: (moving[node], -node.start))
        now_safe: list[Node] = []
        now_unsafe: list[Node] = []
        for node in in_order:
            if _is_unsafe(node.notes):
                del safe_stamps[node]
                self._safe.removed(node)
                if not node.holds:
                    self.num_safe -= node.end - node.start
                now_unsafe.append(node)
            else:
                del rest_stamps[node]
                self.covered.removed(node)
                self._rest.removed(node)
                now_safe.append(node)
        if now_safe:
            self._list_safe(now_safe)
            for node in now_safe:
                self._safe.released((node,))  # one by one, because they are on different paths
        if now_unsafe:
            self.put_back(now_unsafe)

    def unsafe_nodes(self) -> Iterator[Node]:
        """Return unreferenced runs that are not safe, the next to be evicted first, without those in `covered`."""
        return self.covered.others(self._rest)

    def below(self, node: Node) -> int:
        """Return whether a lower tier holds `node`, as one of NOT, COMING, STORED and FAILED."""
        below: int = node.notes.below
        return below

    def path_to(self, node: Node, start: int, end: int) -> Path:
        """Return the runs with pages [start, end), along the path to `node`. Those at both ends may reach beyond."""
        path: Path = []
        while node.end > start:
            if node.start < end:
                path.append(node)
            if not node.start:
                break
            node = _before(node).first
        path.reverse()
        return path

    def up_from(self, node: Node) -> Iterator[Node]:
        """Yield `node` and the runs before it, the deepest first, each as the copy that is found."""
        yield node
        while node.start:
            node = _before(node).first
            yield node

    def start_of_unknown(self, node: Node) -> int:
        """Return the start of the unstored stretch that ends with `node`: all its runs are NOT."""
        start = node.start
        while node.start and _before(node).below == NOT:
            node = _before(node).first
            start = node.start
        return start

    # Interface of the tree: unreferenced runs -------------------------------------------------------------

    def __iter__(self) -> Iterator[Node]:
        """Return all listed runs, the safe ones first."""
        yield from self._safe
        yield from self._rest

    def released(self, nodes: Sequence[Node]) -> None:
        """List each of `nodes` in the list that it belongs to."""
        safe = []
        rest = []
        for node in nodes:
            if _is_unsafe(node.notes):
                self._last_stamp += 1
                self._rest_stamps[node] = self._last_stamp
                rest.append(node)
            else:
                safe.append(node)
        if safe:
            # Runs that follow a safe run are safe: these are the deepest.
            self._list_safe(safe)
            self._safe.released(safe)
        if rest:
            self._rest.released(rest)

    def pinned(self, nodes: Sequence[Node], path: Sequence[Node]) -> None:
        """Unlist `nodes`."""
        safe = []
        rest = []
        for node in nodes:
            if self._safe_stamps.pop(node, None) is None:
                del self._rest_stamps[node]
                self.covered.removed(node)
                rest.append(node)
            else:
                if not node.holds:
                    self.num_safe -= node.end - node.start
                safe.append(node)
        if safe:
            self._safe.pinned(safe, ())
        self._rest.pinned(rest, path)

    def removed(self, node: Node) -> None:
        """Unlist `node`."""
        if self._safe_stamps.pop(node, None) is None:
            del self._rest_stamps[node]
            self.covered.removed(node)
            self._rest.removed(node)
            return
        if not node.holds:
            self.num_safe -= node.end - node.start
        self._safe.removed(node)

    def put_back(self, nodes: Sequence[Node]) -> None:
        """List `nodes` in the lists that they belong to, before all listed runs."""
        self.covered.clear()
        safe = [node for node in nodes if not _is_unsafe(node.notes)]
        rest = [node for node in nodes if _is_unsafe(node.notes)]
        for order, stamps, part in (
            (self._safe, self._safe_stamps, safe),
            (self._rest, self._rest_stamps, rest),
        ):
            order.put_back(part)
            for node in reversed(part):
                self._first_stamp -= 1
                stamps[node] = self._first_stamp
        self.num_safe += sum(node.end - node.start for node in safe if not node.holds)

    def split(self, head: Node, tail: Node) -> None:
        """List `head` right after `tail`, in the same list."""
        stamp = self._safe_stamps.get(tail)
        if stamp is None:
            self._rest_stamps[head] = self._rest_stamps[tail]
            self._rest.split(head, tail)
            self.covered.split(head, tail)
        else:
            self._safe_stamps[head] = stamp
            self._safe.split(head, tail)

    def held(self, node: Node) -> None:
        """Skip `node` until it is unheld."""
        if node in self._safe_stamps:
            self.num_safe -= node.end - node.start
            self._safe.held(node)
        else:
            self._rest.held(node)

    def unheld(self, node: Node) -> None:
        """Stop skipping `node`."""
        if node in self._safe_stamps:
            self.num_safe += node.end - node.start
            self._safe.unheld(node)
        else:
            self._rest.unheld(node)

    def next_run(self) -> Node:
        """Return the first evictable safe run, or else the first of the rest."""
        node: Node = self._safe.next_run() if self.num_safe else self._rest.next_run()
        return node

    # Interface of the tree: all runs ----------------------------------------------------------------------

    def born(self, node: Node) -> None:
        """Count `node` as unsafe: no lower tier can hold it yet."""
        parent = node.parent
        assert parent is not None
        before = parent.notes
        if before is None:
            before = parent.notes = Notes(parent)
        node.notes = Notes(node)
        was_unsafe = _is_unsafe(before)
        before.num_unsafe += 1
        if not was_unsafe:
            self._toggle(before)

    def may_grow(self, node: Node) -> bool:
        """Return whether `node` is unknown to the tiers, like the pages that would extend it."""
        return self.below(node) == 0

    def extended(self, node: Node, start: int) -> None:
        """Move runs that became unsafe, and let the tiers mark the new pages that they have."""
        if self._toggled:
            self.regroup()
        if node.duplicates is None and self.on_grown is not None:
            self.on_grown(node.content, start, node.end)

    def divided(self, heads: Sequence[Node], tails: Sequence[Node]) -> None:
        """Create separate notes for the heads."""
        old = tails[0].notes
        notes = Notes(heads[0], old.below, int(_is_unsafe(old)))
        for head in heads:
            head.notes = notes
        if self._toggled:
            self._toggled += heads  # if the run was to move, its head must move as well

    def cut(self, node: Node, num_pages: int) -> None:
        """Count the pages of `node` that are evicted."""
        if node in self._safe_stamps:
            self.num_safe -= num_pages
        else:
            self.covered.cut(node, num_pages)

    def first_copy_gone(self, node: Node) -> None:
        """Record which copy is now the first."""
        assert node.duplicates
        node.notes.first = node.duplicates[0]

    def died(self, node: Node) -> None:
        """Move the run before `node` if it has become safe."""
        notes = node.notes
        before = _before(node)
        if _is_unsafe(notes):
            before.num_unsafe -= 1
            if not _is_unsafe(before):
                self._toggle(before)
                self.regroup()

    # Internals --------------------------------------------------------------------------------------------

    def _note_request(self, hints: Hints | None, now_ns: int) -> None:
        for order in (self._safe, self._rest):
            note = noter_of(order)
            assert note is not None
            note(hints, now_ns)

    def _list_safe(self, nodes: Sequence[Node]) -> None:
        """Record that `nodes` are in the list of safe runs."""
        for node in nodes:
            self._last_stamp += 1
            self._safe_stamps[node] = self._last_stamp
            if not node.holds:
                self.num_safe += node.end - node.start

    def _toggle(self, notes: Notes) -> None:
        """Record that a run has become safe or unsafe, and update the runs before it as far as they change too."""
        while True:
            node = notes.first
            parent = node.parent
            if parent is None:
                return
            self._toggled += [copy for copy in node.duplicates or (node,) if copy.refs == 0]
            before = parent.notes
            was_unsafe = _is_unsafe(before)
            before.num_unsafe += 1 if _is_unsafe(notes) else -1
            if _is_unsafe(before) == was_unsafe:
                return
            notes = before


def _before(node: Node) -> Notes:
    """Return the notes of the run before `node`; its `parent` may be a copy that was evicted."""
    assert node.parent is not None
    notes: Notes = node.parent.notes
    return notes


def _is_unsafe(notes: Notes) -> bool:
    return notes.num_unsafe > 0 or notes.below != STORED

"""The eviction order of a device with tiers below it: what a tier holds as well goes first, since it is not lost.

A run is *safe* if a tier below holds it and everything that follows it in the tree is safe too: a page never goes
before what follows it. Safe runs that nothing references are listed apart and go first. A run that becomes safe enters
their list as if it had just been released; a run that no longer is goes before all others of its own list.

When a run comes back to the device, the tier below has to be asked whether it has the run still. It can only have what
was evicted here before, so a run keeps a note that something *trails* it: that a run after it was evicted that a tier
held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum

import msgspec

from kvarts.content import Content
from kvarts.hints import Hints
from kvarts.kv.eviction import EvictionOrder, LruOrder, NoteRequest, noter_of
from kvarts.kv.node import Node, Path

__all__ = ["Below", "SafeFirst"]


class Below(IntEnum):
    """Whether a tier below holds a run. `FAILED`: it did, or was to, and does not; that is not tried again."""

    NOT = 0
    COMING = 1
    STORED = 2
    FAILED = 3


COMING, STORED = int(Below.COMING), int(Below.STORED)


class Notes(msgspec.Struct, eq=False):
    """What is noted of a run and of all its copies, of which `first` is found.

    `num_unsafe` of the runs that follow it are not safe. `trails`: a tier may have something that followed it.
    """

    first: Node
    below: int = 0
    trails: bool = False
    num_unsafe: int = 0


class SafeFirst:
    """Two orders made by `make`: of the runs that are safe, and of the rest. An EvictionOrder and a TreeWatcher.

    A tree is handed it as both, or as its watcher alone where another order around it is the tree's. Runs that change
    lists together keep the order in which they were listed.
    """

    def __init__(self, make: Callable[[], EvictionOrder] = LruOrder) -> None:
        self.num_safe = 0
        """Cached pages that are safe."""
        self.hears_all = False
        """Whether `on_grown` is asked of every run that is new, and not only where something may trail it."""
        self.on_grown: Callable[[Content, int, int], int] | None = None
        """Is told of pages that were not resident and can be found now: content, first page, page after the last.
        Answers how many of them a tier below has."""
        self._safe = make()
        self._rest = make()
        # When each listed run was listed. A run that goes before all others is listed before the first.
        self._safe_stamps: dict[Node, int] = {}
        self._rest_stamps: dict[Node, int] = {}
        self._last_stamp = self._first_stamp = 0
        self._toggled: list[Node] = []
        self.note_request: NoteRequest | None = None if noter_of(self._rest) is None else self._note_request

    # What tiers tell and ask ------------------------------------------------------------------------------

    def mark(self, nodes: Iterable[Node], below: Below) -> None:
        """Note of `nodes` whether a tier below holds them. `regroup` must follow."""
        for node in nodes:
            notes = node.notes
            was_stored = notes.below == STORED
            notes.below = below
            # A run with something unsafe after it stays unsafe.
            if (below == STORED) != was_stored and not notes.num_unsafe:
                self._toggle(notes)

    def regroup(self) -> None:
        """Move runs to the list they belong to now. Those that move together keep their order."""
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
        in_order = sorted(moving, key=lambda node: (moving[node], -node.start))
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
                self._rest.removed(node)
                now_safe.append(node)
        if now_safe:
            self._list_safe(now_safe)
            for node in now_safe:
                self._safe.released((node,))  # one by one: they are of different paths
        if now_unsafe:
            self._rest.put_back(now_unsafe)
            for node in reversed(now_unsafe):
                self._first_stamp -= 1
                rest_stamps[node] = self._first_stamp

    def unsafe_nodes(self) -> Iterator[Node]:
        """Return unreferenced runs that are not safe, the next to be evicted first."""
        return iter(self._rest)

    def below(self, node: Node) -> int:
        """Return whether a tier below holds `node`, as Below has it."""
        below: int = node.notes.below
        return below

    def may_be_followed(self, node: Node) -> bool:
        """Return whether a tier below may have something that followed `node`, while it does not have `node`."""
        notes: Notes = node.notes
        return notes.trails and notes.below != STORED

    def path_to(self, node: Node, end: int) -> Path:
        """Return the runs with the pages before page `end` of `node`, or of what is before it.

        The last one may reach beyond.
        """
        while node.start >= end:
            node = _before(node).first
        path = [node]
        while node.start:
            node = _before(node).first
            path.append(node)
        path.reverse()
        return path

    def start_of_unknown(self, node: Node) -> int:
        """Return the first page from which on, up to `node` and with it, all is `Below.NOT`."""
        start = node.start
        while node.start and _before(node).below == Below.NOT:
            node = _before(node).first
            start = node.start
        return start

    # What the tree tells and asks of runs that nothing references -----------------------------------------

    def __iter__(self) -> Iterator[Node]:
        """Return all listed runs, those that are safe first."""
        yield from self._safe
        yield from self._rest

    def released(self, nodes: Sequence[Node]) -> None:
        """List each of `nodes` where it belongs."""
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
            # What follows a safe run is safe: these are the deepest.
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
            self._rest.removed(node)
            return
        if not node.holds:
            self.num_safe -= node.end - node.start
        self._safe.removed(node)

    def put_back(self, nodes: Sequence[Node]) -> None:
        """List `nodes` where they belong, before what is listed there."""
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
        """List `head` where `tail` is, right after it."""
        stamp = self._safe_stamps.get(tail)
        if stamp is None:
            self._rest_stamps[head] = self._rest_stamps[tail]
            self._rest.split(head, tail)
        else:
            self._safe_stamps[head] = stamp
            self._safe.split(head, tail)

    def held(self, node: Node) -> None:
        """Pass `node` by."""
        if node in self._safe_stamps:
            self.num_safe -= node.end - node.start
            self._safe.held(node)
        else:
            self._rest.held(node)

    def unheld(self, node: Node) -> None:
        """Stop passing `node` by."""
        if node in self._safe_stamps:
            self.num_safe += node.end - node.start
            self._safe.unheld(node)
        else:
            self._rest.unheld(node)

    def next_run(self) -> Node:
        """Return the first safe run that can go, or else the first of the rest."""
        node: Node = self._safe.next_run() if self.num_safe else self._rest.next_run()
        return node

    # What the tree tells and asks of all runs -------------------------------------------------------------

    def born(self, node: Node) -> None:
        """Count `node` as unsafe: no tier below can hold it yet."""
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
        """Return whether `node` is unknown to the tiers, as what follows it is."""
        return self.below(node) == 0

    def extended(self, node: Node, start: int) -> None:
        """Move what is no longer safe, and ask whether a tier below has what is new here."""
        if self._toggled:
            self.regroup()
        if node.twins is not None or self.on_grown is None:
            return
        notes = node.notes
        if start > node.start:
            if notes.trails or self.hears_all:
                self.on_grown(node.content, start, node.end)
        elif self.hears_all or _before(node).trails:
            # Something else may follow what is below, anywhere.
            notes.trails = True
            if not self.on_grown(node.content, start, node.end):
                notes.trails = False

    def divided(self, heads: Sequence[Node], tails: Sequence[Node]) -> None:
        """Give the heads notes of their own."""
        old = tails[0].notes
        notes = Notes(heads[0], old.below, old.trails, int(_is_unsafe(old)))
        for head in heads:
            head.notes = notes
        if self._toggled:
            self._toggled += heads  # if the run was to move, its head is to move as well

    def cut(self, node: Node, num_pages: int) -> None:
        """Note that something trails `node`, if a tier has what was evicted."""
        if node in self._safe_stamps:
            self.num_safe -= num_pages
        if node.notes.below == STORED:
            node.notes.trails = True

    def first_copy_gone(self, node: Node) -> None:
        """Note which copy is the first now."""
        assert node.twins
        node.notes.first = node.twins[0]

    def died(self, node: Node) -> None:
        """Note that something trails what was before `node`, and move that if it is safe now."""
        notes = node.notes
        before = _before(node)
        if notes.below in (COMING, STORED):
            before.trails = True
        if _is_unsafe(notes):
            before.num_unsafe -= 1
            if not _is_unsafe(before):
                self._toggle(before)
                self.regroup()

    # Inside -----------------------------------------------------------------------------------------------

    def _note_request(self, hints: Hints | None, now_ns: int) -> None:
        for order in (self._safe, self._rest):
            note = noter_of(order)
            assert note is not None
            note(hints, now_ns)

    def _list_safe(self, nodes: Sequence[Node]) -> None:
        """Note that `nodes` are in the list of safe runs from now on."""
        for node in nodes:
            self._last_stamp += 1
            self._safe_stamps[node] = self._last_stamp
            if not node.holds:
                self.num_safe += node.end - node.start

    def _toggle(self, notes: Notes) -> None:
        """Count a run as safe that was not, or the other way round; and with it, perhaps, what is before it."""
        while True:
            node = notes.first
            parent = node.parent
            if parent is None:
                return
            self._toggled += [copy for copy in node.twins or (node,) if copy.refs == 0]
            before = parent.notes
            was_unsafe = _is_unsafe(before)
            before.num_unsafe += 1 if _is_unsafe(notes) else -1
            if _is_unsafe(before) == was_unsafe:
                return
            notes = before


def _before(node: Node) -> Notes:
    """Return the notes of what comes before `node`; its `parent` may be a copy that was evicted."""
    assert node.parent is not None
    notes: Notes = node.parent.notes
    return notes


def _is_unsafe(notes: Notes) -> bool:
    return notes.num_unsafe > 0 or notes.below != STORED

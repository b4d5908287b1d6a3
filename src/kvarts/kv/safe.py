"""A prefix tree that evicts first what is not lost by it: pages that a tier below holds as well.

A run is *safe* if the tier below holds it and everything that follows it in the tree is safe too: a page never goes
before what follows it. Safe runs that nobody references have a list of their own, which is evicted first. A run that
becomes safe goes to the young end of that list; one that no longer is, to the old end of the other.

When a run comes back to the device, somebody has to ask whether the tier below has it still. It can only have what was
evicted here before, so a run remembers that something *trails* it: that a run after it was evicted that was below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum

from kvarts.content import Content, PageKey
from kvarts.event_log import Tell
from kvarts.events import PagesRemoved
from kvarts.kv.pool import PageId
from kvarts.kv.tree import NOTHING, Match, Node, Path, PrefixTree

__all__ = ["Below", "SafeFirstTree"]


class Below(IntEnum):
    """Whether a tier below holds a run. `FAILED`: it was, or was to be, and is not; that is not tried again."""

    NOT = 0
    COMING = 1
    STORED = 2
    FAILED = 3


STORED = int(Below.STORED)


class Children(dict[PageKey, Node]):
    """The children of a run and its twins. `num_unsafe` of them are not safe; `owner` is the run's first copy."""

    __slots__ = ("num_unsafe", "owner")

    def __init__(self, owner: Node) -> None:
        super().__init__()
        self.num_unsafe = 0
        self.owner = owner


class SafeFirstTree(PrefixTree):
    """A PrefixTree with two lists. Writes `stamp`, `is_safe`, `below` and `trails` of its nodes.

    Stamps are in the order of the lists, so that runs that change lists together keep their order.
    """

    def __init__(self, tell: Tell | None = None) -> None:
        super().__init__(tell)
        self._knows_below = True
        self.num_safe = 0
        """Cached pages that are safe."""
        self._safe = Node(NOTHING, b"", 0, 0, 0, None)
        self._safe.older = self._safe.newer = self._safe
        self.tells_all = False
        """Whether `gone` receives every run that is evicted, and `on_grown` is asked of every one that is new; not only
        where something may trail it."""
        self.on_grown: Callable[[Content, int, int], int] | None = None
        """Is told of pages that were not resident and can be found now: content, first page, page after the last.
        Answers how many of them the tier below has."""
        self._last_stamp = self._first_stamp = 0
        self._toggled: list[Node] = []

    def mark(self, path: Path, start: int, end: int, below: Below) -> None:
        """Says of pages [start, end) of `path` whether a tier below holds them. `regroup` must follow."""
        if start >= end:
            return
        node = path[-1]
        if node.end == end and node.start <= start:
            # What is stored is most often the end of one run.
            if node.start < start:
                self._split(node, start)
            self._mark(node, below)
            return
        for node in self.walk(path):
            if node.end <= start:
                break
            if node.start >= end:
                continue
            if node.end > end:
                node = self._split(node, end)  # noqa: PLW2901
            if node.start < start:
                self._split(node, start)
            self._mark(node, below)

    def mark_match(self, match: Match, start: int, below: Below) -> None:
        """As `mark`, for the pages of `match` from `start` on."""
        self.mark(self.cut(match), start, match.num_pages, below)

    def regroup(self) -> None:
        """Moves runs to the list they belong to now. Those that move together keep their order."""
        if not self._toggled:
            return
        moving = {id(node): node for node in self._toggled if node.is_safe == _is_unsafe(node) and node.refs == 0}
        self._toggled = []
        in_order = sorted(moving.values(), key=lambda node: (node.stamp, -node.start))
        for node in in_order:
            older, newer = node.older, node.newer
            older.newer = newer
            newer.older = older
            if not node.is_safe:
                self._list(node, is_safe=True)
        for node in reversed(in_order):
            if _is_unsafe(node):
                if not node.holds:
                    self.num_safe -= node.end - node.start
                node.is_safe = False
                self._first_stamp -= 1
                node.stamp = self._first_stamp
                self._list_before(self._lru.newer, node)

    def unsafe_nodes(self) -> Iterator[Node]:
        """Unreferenced runs that are not safe, the next to be evicted first."""
        return self._nodes_of(self._lru)

    def lru_nodes(self) -> Iterator[Node]:
        """See PrefixTree."""
        yield from self._nodes_of(self._safe)
        yield from self._nodes_of(self._lru)

    # Holding ----------------------------------------------------------------------------------------------

    def pin(self, match: Match) -> Path:
        """See PrefixTree."""
        for node in self.cut(match):
            if node.is_safe:
                node.is_safe = False
                if not node.holds:
                    self.num_safe -= node.end - node.start
        return super().pin(match)

    def path_to(self, node: Node, end: int) -> Path:
        """The path of the pages before page `end` of `node`, or of what is before it."""
        while node.start >= end:
            node = _before(node)
        if end < node.end:
            node = self._split(node, end)
        path = [node]
        while node.start:
            node = _before(node)
            path.append(node)
        path.reverse()
        return path

    def extend(self, path: Path, content: Content, end: int, page_ids: list[PageId] | None) -> None:
        """See PrefixTree."""
        start = path[-1].end if path else 0
        if start >= end:
            return
        num_held_by_path = len(path)
        super().extend(path, content, end, page_ids)
        if self._toggled:
            self.regroup()
        node = path[-1]
        if node.twins is not None or self.on_grown is None:
            return
        if len(path) == num_held_by_path:
            if node.trails or self.tells_all:
                self.on_grown(content, start, end)
        else:
            assert node.parent is not None
            if node.parent.trails or self.tells_all:
                # Something else may follow what is below, anywhere.
                node.trails = self.on_grown(content, node.start, end) > 0

    def release(self, path: Path) -> None:
        """See PrefixTree."""
        for node in self.walk(path):
            node.refs -= 1
            assert node.refs >= 0, f"{node} was released more often than it was pinned"
            if node.refs == 0:
                self._list(node, is_safe=not _is_unsafe(node))
                if not node.holds:
                    self.num_cached += node.end - node.start

    def evict(self, count: int) -> list[PageId]:
        """See PrefixTree."""
        assert count <= self.num_cached, f"{count} pages to evict, {self.num_cached} cached"
        self.num_cached -= count
        page_ids: list[PageId] = []
        while count:
            num_safe = self.num_safe
            if num_safe:
                # It is nobody's loss, so nothing changes lists by it.
                num_evicted = count if count < num_safe else num_safe
                self._evict_from(self._safe, num_evicted, page_ids)
                self.num_safe -= num_evicted
                count -= num_evicted
            else:
                count = self._evict_from(self._lru, count, page_ids, one_run=True)
                if self._toggled:
                    self.regroup()
        return page_ids

    # Inside -----------------------------------------------------------------------------------------------

    def _count_cached(self, node: Node, sign: int) -> None:
        super()._count_cached(node, sign)
        if node.is_safe:
            self.num_safe += sign * (node.end - node.start)

    def _tell_removed(self, node: Node, start: int, end: int) -> None:
        if self.tell is not None:
            self.tell(PagesRemoved(node.content, start, end))
        if self.gone is not None and (self.tells_all or (node.trails and node.below != STORED)):
            self.gone.append((node.content, start, end))

    def _nodes_of(self, ring: Node) -> Iterator[Node]:
        node = ring.newer
        while node is not ring:
            yield node
            node = node.newer

    def _list(self, node: Node, *, is_safe: bool) -> None:
        """Puts `node` at the young end of a list."""
        self._last_stamp += 1
        node.stamp = self._last_stamp
        node.is_safe = is_safe
        self._list_before(self._safe if is_safe else self._lru, node)
        if is_safe and not node.holds:
            self.num_safe += node.end - node.start

    def _mark(self, node: Node, below: Below) -> None:
        was_stored = node.below == STORED
        copies = node.twins or (node,)
        for copy in copies:
            copy.below = below
        # Whoever has something unsafe after it stays what it was.
        if (below == STORED) != was_stored and not (node.children and node.children.num_unsafe):  # type: ignore[attr-defined]
            self._toggle(copies[0])

    def _toggle(self, first_copy: Node) -> None:
        """What was safe is not, or the other way round; and with it, perhaps, what is before it."""
        node: Node | None = first_copy
        while node is not None and node.parent is not None:
            self._toggled += [copy for copy in node.twins or [node] if copy.refs == 0]
            siblings = node.parent.children
            assert isinstance(siblings, Children)
            is_unsafe = _is_unsafe(node)
            owner = siblings.owner
            was_unsafe = _is_unsafe(owner)
            siblings.num_unsafe += 1 if is_unsafe else -1
            node = owner if _is_unsafe(owner) != was_unsafe else None

    def _new_children(self, node: Node) -> Children:
        return Children((node.twins or [node])[0])

    def _on_birth(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None and isinstance(parent.children, Children)
        owner = parent.children.owner
        was_unsafe = _is_unsafe(owner)
        parent.children.num_unsafe += 1  # no tier below can hold it yet
        if not was_unsafe:
            self._toggle(owner)

    def _on_split(self, tail: Node) -> None:
        assert tail.parent is not None and isinstance(tail.parent.children, Children)
        tail.parent.children.num_unsafe = int(_is_unsafe(tail))
        if self._toggled:
            # If the run was to move, its heads are to move as well.
            self._toggled += [copy.parent for copy in tail.twins or [tail] if copy.parent is not None]

    def _on_cut(self, node: Node) -> None:
        if node.below == STORED:
            node.trails = True

    def _on_death(self, node: Node) -> None:
        if node.twins is not None:
            if isinstance(node.children, Children):
                node.children.owner = node.twins[0]
            return
        owner = _before(node)
        assert isinstance(owner.children, Children)
        if node.below == STORED:
            for copy in owner.twins or (owner,):
                copy.trails = True
        if _is_unsafe(node):
            was_unsafe = _is_unsafe(owner)
            owner.children.num_unsafe -= 1
            if _is_unsafe(owner) != was_unsafe:
                self._toggle(owner)


def _before(node: Node) -> Node:
    """The first copy of what comes before `node`, whose `parent` may be a copy that was evicted."""
    assert node.parent is not None and isinstance(node.parent.children, Children)
    return node.parent.children.owner


def _is_unsafe(node: Node) -> bool:
    children = node.children
    return node.below != STORED or (children is not None and children.num_unsafe > 0)  # type: ignore[attr-defined]

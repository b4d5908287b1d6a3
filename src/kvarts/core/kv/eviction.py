"""Runs of whole pages, and the choice of the next run to evict: the interface that caches call, and the default order.

A cache owns runs, references, and the sequence of runs. An order owns only the choice of the next run: it lists the
runs that nothing references. A run is listed by `released` and unlisted by `pinned` or `removed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, Protocol, cast

from mypy_extensions import mypyc_attr

from kvarts.base.user_code import added_state, set_state
from kvarts.core.content import NOTHING, Content, PageKey
from kvarts.core.hints import Hints
from kvarts.core.kv.pool import PageId

__all__ = [
    "BaseOrder",
    "EvictionOrder",
    "LruOrder",
    "Node",
    "NoteRequest",
    "Path",
    "PinnedPages",
    "Run",
    "TreeWatcher",
    "as_list",
    "noter_of",
    "pages_seen_by",
    "ranges_read_by",
    "walk",
]


class Node:
    """Pages [start, end) of `content`, counted from the first token.

    Written by PrefixTree, except for `place`, `older`, `newer` and `notes`.

    `key` names its first page among its siblings. `refs`: how many paths hold the run; at 0 it is listed for eviction.
    `holds`: how many transfers do; with both at 0 the run is cached. `pins`: how many of the paths keep it for later.
    `is_gone`: it has left the tree. `is_orphan`: it has, and a transfer still holds it. `children` is by their keys,
    and one dict for all duplicates. `page_ids` is None where pages are only counted. A root has neither content nor
    key.

    `place` belongs to the eviction order: its state of the run, whether the run is referenced or not. It is None for a
    new run, and only such a run grows; the parts of a split run share it. `older` and `newer` are links for an order
    that keeps runs in lists; they are set while it lists the run. `notes` belongs to the tree's watcher: one object for
    all duplicates.
    """

    __slots__ = (
        "children",
        "content",
        "duplicates",
        "end",
        "holds",
        "is_gone",
        "is_orphan",
        "key",
        "newer",
        "notes",
        "older",
        "page_ids",
        "parent",
        "pins",
        "place",
        "refs",
        "start",
    )

    older: Node
    newer: Node

    def __init__(
        self,
        content: Content,
        key: PageKey,
        start: int,
        end: int,
        refs: int,
        parent: Node | None,
        children: dict[PageKey, Node] | None = None,
    ) -> None:
        self.content = content
        self.key = key
        self.start = start
        self.end = end
        self.refs = refs
        self.parent = parent
        self.children = children
        self.duplicates: list[Node] | None = None
        self.page_ids: list[PageId] | None = None
        self.holds = 0
        self.pins = 0
        self.place: Any = None
        self.notes: Any = None
        self.is_orphan = self.is_gone = False

    @property
    def group(self) -> int:
        """Its KV group: whole pages are one."""
        return 0

    def __repr__(self) -> str:
        return f"Node(pages {self.start}..{self.end}, refs {self.refs}, duplicates {len(self.duplicates or ())})"


Path = list[Node]
"""Consecutive runs from the first page on."""


class PinnedPages:
    """Consecutive runs from page `start` on that a transfer holds."""

    __slots__ = ("runs", "start")

    def __init__(self, runs: Path, start: int) -> None:
        self.runs: Final = runs
        self.start: Final = start

    def nodes(self) -> Path:
        """Return the runs of the pages, deepest first: those that were split since are several."""
        # `walk`, without a generator: this runs for every store, and usually there is one run.
        runs, index = self.runs, len(self.runs)
        nodes: Path = []
        while index:
            index -= 1
            node = runs[index]
            floor = runs[index - 1].end if index else self.start
            nodes.append(node)
            while node.start > floor:
                assert node.parent is not None
                node = node.parent
                nodes.append(node)
        return nodes


def walk(path: Path, start: int = 0) -> Iterator[Node]:
    """Yield the runs that `path` holds, deepest first; `start`: its first page."""
    for index in range(len(path) - 1, -1, -1):
        node = path[index]
        floor = path[index - 1].end if index else start
        yield node
        while node.start > floor:
            assert node.parent is not None
            node = node.parent
            yield node


NoteRequest = Callable[[Hints | None, int], object]


class Run(Protocol):
    """A run as orders see it: a Node of whole pages, or a PartRun, the parts of pages in one KV group.

    `place` belongs to the order. It is None for a new run, and only such a run grows; the two parts of a split run
    share it.
    """

    place: Any

    @property
    def content(self) -> Content:
        """A content that has its pages."""

    @property
    def start(self) -> int:
        """Its first page, counted from the first token."""

    @property
    def end(self) -> int:
        """The page after its last."""

    @property
    def key(self) -> PageKey:
        """The name of its first page among those that follow the same page."""

    @property
    def group(self) -> int:
        """Its KV group; 0 where pages are whole."""

    @property
    def parent(self) -> Run | None:
        """The run right before it in the same group, or None."""

    @property
    def children(self) -> Mapping[PageKey, object] | None:
        """The followers of its last page, by key; None or empty without any."""

    @property
    def holds(self) -> int:
        """How many transfers hold it while it is listed."""


class EvictionOrder(Protocol):
    """The calls of a cache about runs that nothing references. `nodes` are Runs, all of one kind.

    Promises: the order is total, and the same calls give the same order, whatever the process or hash seed. `next_run`
    and iteration change nothing. The order changes no field of a node except `place`, `older` and `newer`; state that
    must survive while a run is unlisted belongs in `place`.

    An order may also have `note_request(hints, now_ns)`. The cache calls it before a request pins or releases runs: the
    time is `now_ns`, and until the next call, released runs are those of a request with `hints`, None for none. If its
    `reads_ranges` is true, the runs of a request whose hints have ranges are released part by part, the deepest first,
    each after a call with the hints of that part alone.

    If its class itself sets `sees_pages` to true, it evicts the same pages, however these are divided into runs, so
    nothing need be split that only a running request has. Classes derived from it may look at runs: they do not inherit
    this.

    The cache does the rest. If the order names a run that others follow, in layers that keep every token, a run after
    it is evicted instead. Runs are evicted from their tails, and only as far as needed.
    """

    def __iter__(self) -> Iterator[Any]:
        """Iterate over all listed runs, the next to be evicted first; runs that transfers hold are among them."""

    def released(self, nodes: Sequence[Any]) -> None:
        """List `nodes`, which belong to one path in one group and are no longer referenced: deepest first."""

    def pinned(self, nodes: Sequence[Any], path: Sequence[Any]) -> None:
        """Unlist `nodes`, which are referenced again: the listed ones of `path`, which was hit."""

    def removed(self, node: Any) -> None:
        """Unlist `node`, which is evicted as a whole or listed elsewhere from now on."""

    def put_back(self, nodes: Sequence[Any]) -> None:
        """List `nodes`, which were listed elsewhere and are to be evicted before all runs listed here, in this order.

        They may be of different paths.
        """

    def split(self, head: Any, tail: Any) -> None:
        """List `head`, the first part of a split run; `tail`, the rest, is listed already and is evicted before it.

        They have the same `place`.
        """

    def held(self, node: Any) -> None:
        """Skip the listed `node` from now on: a transfer holds it. It keeps its place."""

    def unheld(self, node: Any) -> None:
        """Stop skipping `node`."""

    def next_run(self) -> Any:
        """Return the first run that no transfer holds. At least one is not held."""


def noter_of(order: EvictionOrder | None) -> NoteRequest | None:
    """Return `order.note_request`; None if the order has no such method."""
    note: NoteRequest | None = getattr(order, "note_request", None)
    return note


def pages_seen_by(order: EvictionOrder) -> bool:
    """Return whether `order` evicts the same pages, however these are divided into runs."""
    return bool(vars(type(order)).get("sees_pages", False))


def as_list(order: EvictionOrder) -> LruOrder | None:
    """Return `order` if its class itself lists runs in a ring, where `after` and `before` are the whole order."""
    return cast("LruOrder", order) if vars(type(order)).get("is_ring", False) else None


def ranges_read_by(order: EvictionOrder | None) -> bool:
    """Return `order.reads_ranges`; False if the order lacks that attribute."""
    return bool(getattr(order, "reads_ranges", False))


@mypyc_attr(allow_interpreted_subclasses=True)
class BaseOrder:
    """A base class of orders: a subclass defines at least `released`, `removed`, `split` and the iteration."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a subclass, for copies."""
        return added_state(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the attributes of a copy."""
        set_state(self, state)

    def __iter__(self) -> Iterator[Run]:
        """Iterate over all listed runs, the next to be evicted first."""
        raise NotImplementedError

    def released(self, nodes: Sequence[Run]) -> None:
        """List `nodes`, deepest first."""
        raise NotImplementedError

    def removed(self, node: Run) -> None:
        """Unlist `node`."""
        raise NotImplementedError

    def split(self, head: Run, tail: Run) -> None:
        """List `head`, which is evicted after `tail`."""
        raise NotImplementedError

    def pinned(self, nodes: Sequence[Run], path: Sequence[Run]) -> None:
        """Unlist `nodes`."""
        for node in nodes:
            self.removed(node)

    def put_back(self, nodes: Sequence[Run]) -> None:
        """List `nodes` as if they had just been released, one after the other."""
        for node in nodes:
            self.released((node,))

    def held(self, node: Run) -> None:
        """Do nothing: `next_run` checks."""

    def unheld(self, node: Run) -> None:
        """Do nothing: `next_run` checks."""

    def next_run(self) -> Run:
        """Return the first run that no transfer holds."""
        return next(node for node in self if not node.holds)


@mypyc_attr(allow_interpreted_subclasses=True)
class LruOrder:
    """Evicts the least recently released run first, and the deepest of those released together.

    That is exactly the order of a page-by-page list to which a request's pages are appended, deepest first. It links
    runs of whole pages to each other, so it lists no parts of KV groups.
    """

    __slots__ = ("_ring",)
    links_pages: ClassVar[bool] = True
    sees_pages: ClassVar[bool] = True
    is_ring: ClassVar[bool] = True

    def __init__(self) -> None:
        # One sentinel closes the list to a ring: its `newer` is the oldest run, its `older` the youngest.
        self._ring = Node(NOTHING, b"", 0, 0, 0, None)
        self._ring.older = self._ring.newer = self._ring

    def __getstate__(self) -> dict[str, Any]:
        """Return what a subclass adds: a copy lists no runs, which belong to one cache."""
        return added_state(self, ("_ring",))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the attributes of a copy, which lists no runs."""
        LruOrder.__init__(self)
        set_state(self, state)

    def __iter__(self) -> Iterator[Node]:
        """Iterate over all listed runs, the least recently released first."""
        node = self._ring.newer
        while node is not self._ring:
            yield node
            node = node.newer

    def after(self, node: Node | None) -> Node | None:
        """Return the listed run that was released right after `node`; None: the first, or after the last."""
        newer = (self._ring if node is None else node).newer
        return None if newer is self._ring else newer

    def before(self, node: Node) -> Node | None:
        """Return the run that was listed right before `node`; None before the first. `node` may just have left."""
        return None if node.older is self._ring else node.older

    # Linking and unlinking are inlined: this runs for every request.

    def released(self, nodes: Sequence[Node]) -> None:
        """Append `nodes` at the young end."""
        ring = self._ring
        youngest = ring.older
        for node in nodes:
            node.older = youngest
            youngest.newer = node
            youngest = node
        youngest.newer = ring
        ring.older = youngest

    def pinned(self, nodes: Sequence[Node], path: Sequence[Node]) -> None:
        """Remove `nodes` from the list."""
        for node in nodes:
            older, newer = node.older, node.newer
            older.newer = newer
            newer.older = older

    def removed(self, node: Node) -> None:
        """Remove `node` from the list."""
        older, newer = node.older, node.newer
        older.newer = newer
        newer.older = older

    def put_back(self, nodes: Sequence[Node]) -> None:
        """Insert `nodes` at the old end."""
        for node in reversed(nodes):
            self._put_after(self._ring, node)

    def split(self, head: Node, tail: Node) -> None:
        """Insert `head` right after `tail`."""
        self._put_after(tail, head)

    def held(self, node: Node) -> None:
        """Do nothing: `next_run` checks."""

    def unheld(self, node: Node) -> None:
        """Do nothing: `next_run` checks."""

    def next_run(self) -> Node:
        """Return the oldest run that no transfer holds."""
        node = self._ring.newer
        while node.holds:
            node = node.newer
        return node

    def _put_after(self, older: Node, node: Node) -> None:
        newer = older.newer
        node.older = older
        node.newer = newer
        older.newer = node
        newer.older = node


class TreeWatcher(Protocol):
    """Is notified of all runs, referenced or not.

    Promises: it changes no field of a node except `notes`, and only `extended` splits runs. `notes` belongs to the
    watcher and is the same object for all copies of a run; a root has none before its first child is born.
    """

    def born(self, node: Node) -> None:
        """Record `node`, the first copy of its pages."""

    def may_grow(self, node: Node) -> bool:
        """Return whether `node`, a leaf with one holder, may be extended by the pages that follow it."""

    def extended(self, node: Node, start: int) -> None:
        """Record that a holder made pages findable, up to the end of `node`; those from `start` on are new.

        Called when the tree has finished its work; may cause splits.
        """

    def divided(self, heads: Sequence[Node], tails: Sequence[Node]) -> None:
        """Give `heads` separate notes: all copies of a run were split, and heads and tails have the same notes."""

    def cut(self, node: Node, num_pages: int) -> None:
        """Record that the last `num_pages` of `node`, which is the only copy, were evicted."""

    def first_copy_gone(self, node: Node) -> None:
        """Record that `node`, the first of several copies, was evicted; the next is now first of `duplicates`."""

    def died(self, node: Node) -> None:
        """Record that `node`, the last copy of its pages, was evicted."""

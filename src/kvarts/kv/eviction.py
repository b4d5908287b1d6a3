"""Which run is evicted next: the question that a cache asks, and the answer that is the default.

A cache owns runs, references and what follows what. An order owns which run goes next, and nothing else: it lists the
runs that nothing references. A run enters it by `released` and leaves it by `pinned` or `removed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from mypy_extensions import mypyc_attr

from kvarts.content import Content, PageKey
from kvarts.hints import Hints
from kvarts.kv.node import NOTHING, Node

__all__ = ["BaseOrder", "EvictionOrder", "LruOrder", "NoteRequest", "Run", "noter_of"]

NoteRequest = Callable[[Hints | None, int], object]


class Run(Protocol):
    """What an order reads of a run: a Node of whole pages, or the parts of pages in one KV group, a PartRun.

    `place` is the order's own. A new run has None; a run with another does not grow, and the two parts of a run that is
    split have the same.
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
        """The run right before it, of the same group; None if there is none."""

    @property
    def children(self) -> Mapping[PageKey, object] | None:
        """What follows its last page, by key; None or empty if nothing does."""

    @property
    def holds(self) -> int:
        """How many transfers hold it while it is listed."""


class EvictionOrder(Protocol):
    """What a cache tells of runs that nothing references, and what it asks. `nodes` are Runs, all of one kind.

    Promises: the order is total, and the same calls give the same order, whatever the process or hash seed. `next_run`
    and iteration change nothing. The order changes nothing about a node but `place`, `older` and `newer`; what it keeps
    about runs that come and go belongs in `place`.

    An order may also have `note_request(hints, now_ns)`. The cache calls it before a request pins or releases runs: the
    time is `now_ns`, and until the next call, released runs are those of a request with `hints`, None for none.

    The cache sees to the rest. Where the order names a run that others follow, in layers that keep every token, what
    goes is a run after it. Runs are eaten from their tails, and no further than is needed.
    """

    def __iter__(self) -> Iterator[Any]:
        """Return all listed runs, the next to be evicted first; runs that transfers hold are among them."""

    def released(self, nodes: Sequence[Any]) -> None:
        """List `nodes`, of one path in one group, which nothing references any more: deepest first."""

    def pinned(self, nodes: Sequence[Any], path: Sequence[Any]) -> None:
        """Unlist `nodes`, which are referenced again: those of `path`, which was hit, that were listed."""

    def removed(self, node: Any) -> None:
        """Unlist `node`, which is evicted as a whole or listed elsewhere from now on."""

    def put_back(self, nodes: Sequence[Any]) -> None:
        """List `nodes`, which were listed elsewhere and should go before what is listed here, in this order.

        They may be of different paths.
        """

    def split(self, head: Any, tail: Any) -> None:
        """List `head`, the first part of a run that was split; `tail`, the rest, is listed already and goes before it.

        They have the same `place`.
        """

    def held(self, node: Any) -> None:
        """Pass the listed `node` by from now on: a transfer holds it. It keeps its place."""

    def unheld(self, node: Any) -> None:
        """Stop passing `node` by."""

    def next_run(self) -> Any:
        """Return the first run that no transfer holds. There is one."""


def noter_of(order: EvictionOrder | None) -> NoteRequest | None:
    """Return `order.note_request`; None if the order has no such method."""
    note: NoteRequest | None = getattr(order, "note_request", None)
    return note


@mypyc_attr(allow_interpreted_subclasses=True)
class BaseOrder:
    """An order to begin with: a subclass says at least what is `released`, `removed`, `split`, and in which order."""

    def __iter__(self) -> Iterator[Run]:
        """Return all listed runs, the next to be evicted first."""
        raise NotImplementedError

    def released(self, nodes: Sequence[Run]) -> None:
        """List `nodes`, deepest first."""
        raise NotImplementedError

    def removed(self, node: Run) -> None:
        """Unlist `node`."""
        raise NotImplementedError

    def split(self, head: Run, tail: Run) -> None:
        """List `head`, which goes after `tail`."""
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
        """Do nothing: `next_run` looks."""

    def unheld(self, node: Run) -> None:
        """Do nothing: `next_run` looks."""

    def next_run(self) -> Run:
        """Return the first run that no transfer holds."""
        return next(node for node in self if not node.holds)


@mypyc_attr(allow_interpreted_subclasses=True)
class LruOrder:
    """What was released longest ago goes first, and of what was released together the deepest.

    That is exactly the order of a page-by-page list to which a request's pages are appended, deepest first.
    """

    __slots__ = ("_ring",)

    def __init__(self) -> None:
        # One sentinel closes the list to a ring: newer of it is the oldest run, older of it the youngest.
        self._ring = Node(NOTHING, b"", 0, 0, 0, None)
        self._ring.older = self._ring.newer = self._ring

    def __iter__(self) -> Iterator[Node]:
        """Return all listed runs, the one released longest ago first."""
        node = self._ring.newer
        while node is not self._ring:
            yield node
            node = node.newer

    # Linking and unlinking are spelled out where they are used: this runs for every request.

    def released(self, nodes: Sequence[Node]) -> None:
        """Put `nodes` at the young end."""
        ring = self._ring
        youngest = ring.older
        for node in nodes:
            node.older = youngest
            youngest.newer = node
            youngest = node
        youngest.newer = ring
        ring.older = youngest

    def pinned(self, nodes: Sequence[Node], path: Sequence[Node]) -> None:
        """Take `nodes` out of the list."""
        for node in nodes:
            older, newer = node.older, node.newer
            older.newer = newer
            newer.older = older

    def removed(self, node: Node) -> None:
        """Take `node` out of the list."""
        older, newer = node.older, node.newer
        older.newer = newer
        newer.older = older

    def put_back(self, nodes: Sequence[Node]) -> None:
        """Put `nodes` at the old end."""
        for node in reversed(nodes):
            self._put_after(self._ring, node)

    def split(self, head: Node, tail: Node) -> None:
        """Put `head` right after `tail`."""
        self._put_after(tail, head)

    def held(self, node: Node) -> None:
        """Do nothing: `next_run` looks."""

    def unheld(self, node: Node) -> None:
        """Do nothing: `next_run` looks."""

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

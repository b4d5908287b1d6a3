"""How old cached runs are, across the models of one device: an order that remembers when runs were released."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvarts.kv.eviction import EvictionOrder, noter_of
from kvarts.kv.node import Node

__all__ = ["AgedOrder", "ReleaseClock"]


class ReleaseClock:
    """Counts releases, of all caches of one memory together: what was released earlier is older."""

    __slots__ = ("_first", "_last")

    def __init__(self) -> None:
        self._first = self._last = 0

    def tick(self) -> int:
        """Return the stamp of a release that happens now."""
        self._last += 1
        return self._last

    def before_all(self) -> int:
        """Return a stamp older than all others."""
        self._first -= 1
        return self._first


class AgedOrder:
    """An EvictionOrder around `inner` that remembers for each run when it was released.

    Which run goes next is the answer of `inner`, also where that depends on what follows a run or on tiers below. How
    old that run is can be compared with the runs of other orders that have the same clock.
    """

    __slots__ = ("_clock", "_inner", "_stamps", "next_run", "note_request")

    def __init__(self, inner: EvictionOrder, clock: ReleaseClock) -> None:
        self._inner = inner
        self.next_run = inner.next_run
        """Returns what `inner` would evict next."""
        self.note_request = noter_of(inner)
        self._clock = clock
        self._stamps: dict[Node, int] = {}

    @property
    def next_stamp(self) -> int:
        """When the run that is evicted next was released; something is cached."""
        return self._stamps[self.next_run()]

    @property
    def num_next_pages(self) -> int:
        """Pages of that run."""
        node: Node = self.next_run()
        return node.end - node.start

    def __iter__(self) -> Iterator[Node]:
        """Return all listed runs, in the order of `inner`."""
        return iter(self._inner)

    def released(self, nodes: Sequence[Node]) -> None:
        """List `nodes`, all of the same age."""
        stamp = self._clock.tick()
        stamps = self._stamps
        for node in nodes:
            stamps[node] = stamp
        self._inner.released(nodes)

    def pinned(self, nodes: Sequence[Node], path: Sequence[Node]) -> None:
        """Unlist `nodes`."""
        stamps = self._stamps
        for node in nodes:
            del stamps[node]
        self._inner.pinned(nodes, path)

    def removed(self, node: Node) -> None:
        """Unlist `node`."""
        del self._stamps[node]
        self._inner.removed(node)

    def put_back(self, nodes: Sequence[Node]) -> None:
        """List `nodes`, older than all others."""
        for node in reversed(nodes):
            self._stamps[node] = self._clock.before_all()
        self._inner.put_back(nodes)

    def split(self, head: Node, tail: Node) -> None:
        """List `head`, as old as `tail`."""
        self._stamps[head] = self._stamps[tail]
        self._inner.split(head, tail)

    def held(self, node: Node) -> None:
        """Pass `node` by."""
        self._inner.held(node)

    def unheld(self, node: Node) -> None:
        """Stop passing `node` by."""
        self._inner.unheld(node)

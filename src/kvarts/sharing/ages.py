"""Ages of cached runs, comparable across the models of one device: an order that records when runs were released."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvarts.kv.eviction import EvictionOrder, Node, noter_of, ranges_read_by

__all__ = ["AgedOrder", "ReleaseClock"]


class ReleaseClock:
    """Counts the releases of all caches of one memory: an earlier release has a smaller stamp."""

    __slots__ = ("_first", "_last")

    def __init__(self) -> None:
        self._first = self._last = 0

    def tick(self) -> int:
        """Return the stamp of the present release."""
        self._last += 1
        return self._last

    def before_all(self) -> int:
        """Return a stamp older than all others."""
        self._first -= 1
        return self._first


class AgedOrder:
    """An EvictionOrder around `inner` that also records when each run was released.

    `inner` chooses the next run, even where its choice depends on later runs or on lower tiers. The stamps make the age
    of that run comparable with runs of other orders that have the same clock.
    """

    __slots__ = ("_clock", "_inner", "_stamps", "next_run", "note_request", "reads_ranges")

    def __init__(self, inner: EvictionOrder, clock: ReleaseClock) -> None:
        self._inner = inner
        self.next_run = inner.next_run
        """Returns the run that `inner` would evict next."""
        self.note_request = noter_of(inner)
        self.reads_ranges = ranges_read_by(inner)
        self._clock = clock
        self._stamps: dict[Node, int] = {}

    @property
    def next_stamp(self) -> int:
        """The release stamp of the run that is evicted next. There must be a cached run."""
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
        """List `nodes`, all with the same age."""
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
        """List `head` with the age of `tail`."""
        self._stamps[head] = self._stamps[tail]
        self._inner.split(head, tail)

    def held(self, node: Node) -> None:
        """Skip `node` until it is unheld."""
        self._inner.held(node)

    def unheld(self, node: Node) -> None:
        """Stop skipping `node`."""
        self._inner.unheld(node)

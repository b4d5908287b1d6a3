"""Base classes of the eviction orders that a league compares with LRU. Each implements the engine's `EvictionOrder`.

An order observes which runs are hit, released and evicted. Time is counted in releases. Caches of single objects
identify an evicted object by its key; here a run is identified by its tenant, its KV group, its place in the prompt
and its first page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from kvarts.content import PageKey
from kvarts.kv.eviction import BaseOrder, Run

__all__ = ["RankedOrder", "RankedRuns", "RunKey", "run_key"]

Rank = tuple[float, ...]
Entry = tuple[Rank, int, int, int, Run]
RunKey = tuple[str | None, int, int, PageKey]

LEAST_TO_CLEAN = 64


def run_key(node: Run) -> RunKey:
    """Return the key by which an evicted run is remembered."""
    return node.content.salt, node.group, node.start, node.key


class RankedRuns:
    """Runs by rank, lowest first. Ties: first listed first; within one path, deepest first."""

    def __init__(self) -> None:
        self.num_pages = 0
        """Pages of all runs, counted when the runs were listed."""
        self._entries: dict[Run, Entry] = {}
        self._sizes: dict[Run, int] = {}
        self._heap: list[Entry] = []
        self._num_pushed = 0

    def __contains__(self, node: Run) -> bool:
        return node in self._entries

    def __iter__(self) -> Iterator[Run]:
        return (entry[-1] for entry in sorted(self._entries.values(), key=lambda entry: entry[:-1]))

    def add(self, node: Run, rank: Rank, now: int) -> None:
        """List `node`, or move it if it is listed already."""
        size = node.end - node.start
        self.num_pages += size - self._sizes.get(node, 0)
        self._sizes[node] = size
        self._num_pushed += 1
        entry = self._entries[node] = (rank, now, -node.start, self._num_pushed, node)
        heappush(self._heap, entry)
        if len(self._heap) > LEAST_TO_CLEAN + 4 * len(self._entries):
            self._rebuild()

    def remove(self, node: Run) -> None:
        """Unlist `node`."""
        del self._entries[node]
        self.num_pages -= self._sizes.pop(node)

    def split(self, head: Run, tail: Run) -> None:
        """List `head` directly after `tail`, with the same rank."""
        rank, now, _, _, _ = self._entries[tail]
        self.add(head, rank, now)
        self.add(tail, rank, now)

    def first(self) -> Run | None:
        """Return the run with the lowest rank; None if the list is empty."""
        if not self._entries:
            return None
        heap = self._heap
        while self._entries.get(heap[0][-1]) is not heap[0]:
            heappop(heap)
        return heap[0][-1]

    def first_free(self) -> Run | None:
        """Return the run with the lowest rank that no transfer holds; None if all are held."""
        node = self.first()
        if node is None or not node.holds:
            return node
        return next((node for node in self if not node.holds), None)

    def rank_of(self, node: Run) -> Rank:
        """Return the rank of a listed run."""
        return self._entries[node][0]

    def listed_at(self, node: Run) -> int:
        """Return the time at which a run was listed."""
        return self._entries[node][1]

    def _rebuild(self) -> None:
        self._heap = list(self._entries.values())
        heapify(self._heap)


class RankedOrder(BaseOrder):
    """Evicts the run with the lowest rank, which subclasses define.

    The `place` of a run is its number of hits and the time of its first release.
    """

    def __init__(self) -> None:
        self.runs = RankedRuns()
        self.now = 0

    def rank(self, node: Run, hits: int, born: int) -> Rank:
        """Return the rank of a run that is released now."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Run]:
        """Return all listed runs, the lowest rank first."""
        return iter(self.runs)

    def released(self, nodes: Sequence[Run]) -> None:
        """List `nodes` by their ranks."""
        self.now += 1
        for node in nodes:
            hits, born = node.place or (0, self.now)
            node.place = (hits, born)
            self.runs.add(node, self.rank(node, hits, born), self.now)

    def pinned(self, nodes: Sequence[Run], path: Sequence[Run]) -> None:
        """Unlist `nodes`, and count a hit of every run of `path`."""
        for node in nodes:
            self.runs.remove(node)
        for node in path:
            hits, born = node.place or (0, self.now)
            node.place = (hits + 1, born)

    def removed(self, node: Run) -> None:
        """Unlist `node`."""
        self.runs.remove(node)

    def split(self, head: Run, tail: Run) -> None:
        """List `head` with the rank of `tail`."""
        self.runs.split(head, tail)

    def next_run(self) -> Run:
        """Return the run of the lowest rank that no transfer holds."""
        node = self.runs.first_free()
        assert node is not None, "nothing to evict is listed"
        return node

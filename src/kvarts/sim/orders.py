"""The eviction orders that a league compares with LRU. Each implements the engine's `EvictionOrder`.

An order observes which runs are hit, released and evicted. Time is counted in releases. Caches of single objects
identify an evicted object by its key; here a run is identified by its tenant, its KV group, its place in the prompt
and its first page.

These use times, the hints of requests (`kvarts.core.hints.Hints`) and the ends of sessions:

- Hinted: priority, then time to live, then LRU: what vLLM's `kv.retain`, Dynamo's `cache_control` and the retention of
  TensorRT-LLM have in common.
- Soonest return: Pan et al., "KVFlow: Efficient Prefix Caching for Accelerating LLM-Based Multi-Agent Workflows",
  NeurIPS 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from kvarts.core.content import PageKey
from kvarts.core.hints import Hints
from kvarts.core.kv.eviction import BaseOrder, Run
from kvarts.sim.traffic.trace import Trace, spell

__all__ = [
    "HintedOrder",
    "RankedOrder",
    "RankedRuns",
    "RunKey",
    "SessionAwareOrder",
    "SoonestReturnOrder",
    "TimedOrder",
    "finishing",
    "run_key",
]

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

    def remove(self, node: Run) -> int:
        """Unlist `node`; return its pages when it was listed."""
        del self._entries[node]
        size = self._sizes.pop(node)
        self.num_pages -= size
        return size

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


class TimedOrder(RankedOrder):
    """A RankedOrder whose ranks change with time: the rank of a run changes when its `place.until_ns` passes.

    `hints`: those of the request whose runs are released. Ties are LRU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hints: Hints | None = None
        self.now_ns = 0
        self._kept = RankedRuns()
        """Listed runs whose `until_ns` has not passed, ordered by it."""

    def place_of(self, before: Any, *, is_last: bool) -> Any:
        """Return the place of a run that is released now. `is_last`: it has the last pages of its request."""
        raise NotImplementedError

    def rank_of(self, place: Any) -> Rank:
        """Return the rank of a run now."""
        raise NotImplementedError

    def note_request(self, hints: Hints | None, now_ns: int) -> None:
        """Set the time and the hints; rank again the runs whose time has passed."""
        self.hints, self.now_ns = hints, now_ns
        while (node := self._kept.first()) is not None and node.place.until_ns <= now_ns:
            self._kept.remove(node)
            self.runs.add(node, self.rank_of(node.place), self.runs.listed_at(node))

    def released(self, nodes: Sequence[Run]) -> None:
        """List `nodes` by their new places."""
        self.now += 1
        for node in nodes:
            place = node.place = self.place_of(node.place, is_last=node is nodes[0])
            self.runs.add(node, self.rank_of(place), self.now)
            if place.until_ns > self.now_ns:
                self._kept.add(node, (place.until_ns,), self.now)

    def pinned(self, nodes: Sequence[Run], path: Sequence[Run]) -> None:
        """Unlist `nodes`."""
        for node in nodes:
            self._unlist(node)

    def removed(self, node: Run) -> None:
        """Unlist `node`."""
        self._unlist(node)

    def split(self, head: Run, tail: Run) -> None:
        """List `head` with the rank of `tail`."""
        self.runs.split(head, tail)
        if tail in self._kept:
            self._kept.split(head, tail)

    def _unlist(self, node: Run) -> None:
        self.runs.remove(node)
        if node in self._kept:
            self._kept.remove(node)


class Kept(NamedTuple):
    """How long a run is kept. `lapses`: its priority ends at `until_ns`."""

    priority: int = 0
    until_ns: int = 0
    lapses: bool = True


class HintedOrder(TimedOrder):
    """Evicts the run of the lowest priority; among equals one whose time to live has passed, or that has none; LRU.

    Without a `ttl_ms`, a `pause_ms` keeps a run for `PAUSES` such pauses, because clients return late. A run has the
    largest priority and the latest end that its requests gave, those of its pages if they gave ranges. A priority with
    a time to live lapses at its end.
    """

    PAUSES = 2
    reads_ranges = True

    def place_of(self, before: Kept | None, *, is_last: bool) -> Kept:
        """Return the larger of what earlier requests and this one ask for."""
        hints = self.hints or Hints()
        ttl_ns = hints.ttl_ns
        if ttl_ns is None and hints.pause_ns is not None:
            ttl_ns = self.PAUSES * hints.pause_ns
        wanted = Kept(hints.priority or 0, self.now_ns + (ttl_ns or 0), lapses=ttl_ns is not None or not hints.priority)
        if before is None or (before.lapses and before.until_ns <= self.now_ns):
            return wanted
        return Kept(
            max(before.priority, wanted.priority),
            max(before.until_ns, wanted.until_ns),
            lapses=before.lapses and wanted.lapses,
        )

    def rank_of(self, place: Kept) -> Rank:
        """Return the priority, and whether the time to live has not passed."""
        is_kept = place.until_ns > self.now_ns
        return (place.priority if is_kept or not place.lapses else 0, is_kept)


class ExpectedReturn(NamedTuple):
    """When the client of a run returns, and until when it is waited for."""

    until_ns: int = 0
    return_ns: int = 0


class SoonestReturnOrder(TimedOrder):
    """Evicts runs whose client does not return, by LRU; then the one whose client returns last.

    A client that gives a `pause_ms` returns after that. It is waited for as long again. The publication counts the
    steps of a workflow until an agent runs; a client knows a time instead.
    """

    def place_of(self, before: ExpectedReturn | None, *, is_last: bool) -> ExpectedReturn:
        """Return the time of the latest client, and the longest wait for any."""
        pause_ns = None if self.hints is None else self.hints.pause_ns
        before = before or ExpectedReturn()
        if pause_ns is None:
            return before
        return ExpectedReturn(max(self.now_ns + 2 * pause_ns, before.until_ns), self.now_ns + pause_ns)

    def rank_of(self, place: ExpectedReturn) -> Rank:
        """Return whether the client is waited for, and when it returns."""
        return (1, -place.return_ns) if place.until_ns > self.now_ns else (0, 0)


class SessionAwareOrder(RankedOrder):
    """LRU, but the pages of an ended session are evicted first, back to where other requests branched off.

    `last_turns`: the prompts of the last turn of each session. A prompt is looked up only when its request is done,
    which is when a client would announce the end of the session; the order does not know it earlier. The latest
    turn of a session that continues is kept as long as LRU keeps it.
    """

    def __init__(self, last_turns: frozenset[bytes]) -> None:
        super().__init__()
        self._last_turns = last_turns
        self._is_over = False

    def released(self, nodes: Sequence[Run]) -> None:
        """List `nodes`, as expendable if they belong to a last turn."""
        self._is_over = bytes(nodes[0].content.units) in self._last_turns
        super().released(nodes)

    def rank(self, node: Run, hits: int, born: int) -> Rank:
        """Return 0 for pages of ended sessions, 1 for all others."""
        # Nodes are listed deepest first: from the first one with several children upwards, all are shared.
        self._is_over = self._is_over and len(node.children or ()) < 2
        return (0 if self._is_over else 1, self.now)


def finishing(trace: Trace) -> Callable[[], SessionAwareOrder]:
    """Return a factory of orders that know the ends of the sessions of `trace`."""
    last: dict[str, int] = {}
    rows = list(trace)
    for index, request in enumerate(rows):
        if request.session_id is not None:
            last[request.session_id] = index
    ends = [rows[index] for index in last.values()]
    prompts = frozenset(
        bytes(trace.content(request, page_size=1, owner=0).units) if trace.has_output_tokens else spell(request.units)
        for request in ends
    )
    return partial(SessionAwareOrder, prompts)

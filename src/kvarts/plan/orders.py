"""The eviction orders that a league compares with LRU. Each implements the engine's `EvictionOrder`.

An order observes which runs are hit, released and evicted. Time is counted in releases. Caches of single objects
identify an evicted object by its key; here a run is identified by its tenant, its KV group, its place in the prompt
and its first page.

Orders with several queues, S3-FIFO and ARC, are adapted from objects to runs of pages.

The papers assume objects of one size, and may refuse to admit one. Here sizes are in pages, and computed pages are
always cached: a run that would not be admitted is evicted next. An order is not given the size of the pool; the most
pages that were ever listed stand for it.

Other orders use times, the hints of requests (`kvarts.hints.Hints`) and the ends of sessions:

- Hinted: priority, then time to live, then LRU: what vLLM's `kv.retain`, Dynamo's `cache_control` and the retention of
  TensorRT-LLM have in common.
- Soonest return: Pan et al., "KVFlow: Efficient Prefix Caching for Accelerating LLM-Based Multi-Agent Workflows",
  NeurIPS 2025.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from kvarts.content import PageKey
from kvarts.hints import Hints
from kvarts.kv.eviction import BaseOrder, Run
from kvarts.traffic.trace import Trace, spell

__all__ = [
    "ArcOrder",
    "HintedOrder",
    "QueuesOrder",
    "RankedOrder",
    "RankedRuns",
    "RunKey",
    "S3FifoOrder",
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


class _Ghosts:
    """Recently evicted runs, at most `most_pages` pages of them."""

    def __init__(self) -> None:
        self.num_pages = 0
        self._sizes: OrderedDict[RunKey, int] = OrderedDict()

    def add(self, node: Run, size: int, most_pages: int) -> None:
        self.take(run_key(node))
        self._sizes[run_key(node)] = size
        self.num_pages += size
        while self.num_pages > most_pages and self._sizes:
            self.num_pages -= self._sizes.popitem(last=False)[1]

    def take(self, key: RunKey) -> bool:
        """Forget a run; return whether it was remembered."""
        size = self._sizes.pop(key, None)
        if size is None:
            return False
        self.num_pages -= size
        return True


class QueuesOrder(BaseOrder):
    """Runs in queues. The `place` of a run is its queue, its hits since it entered that queue, and its rank in it."""

    def __init__(self, names: Sequence[str]) -> None:
        self.queues = {name: RankedRuns() for name in names}
        self.now = 0
        self.most_pages = 0

    def next_queue(self) -> str:
        """Return the queue from which to evict next; not an empty one, unless all are."""
        raise NotImplementedError

    def arrived(self, node: Run) -> tuple[str, int]:
        """Return queue and rank of a run that is released for the first time."""
        raise NotImplementedError

    def came_back(self, node: Run, queue: str, hits: int, rank: int) -> tuple[str, int]:
        """Return queue and rank of a run that is released again, with the number of its `hits`."""
        raise NotImplementedError

    def settle(self) -> None:
        """Move runs that should not be at the head of their queue."""

    def evicted(self, node: Run, queue: str, size: int) -> None:
        """Record that a run was evicted, which had `size` pages when it was listed.

        Of these it may have lost some before, from its tail: how many depends on how many pages were asked for at once.
        """

    def __iter__(self) -> Iterator[Run]:
        """Return all listed runs: those of the next queue, then those of the others."""
        first = self.next_queue()
        yield from self.queues[first]
        for name, queue in self.queues.items():
            if name != first:
                yield from queue

    def released(self, nodes: Sequence[Run]) -> None:
        """List `nodes`."""
        self.now += 1
        for node in nodes:
            if node.place is None:
                queue, rank = self.arrived(node)
                hits = 0
            else:
                queue, hits, rank = node.place
                if hits:
                    queue, rank = self.came_back(node, queue, hits, rank)
            self.put(node, queue, hits, rank)
        self.most_pages = max(self.most_pages, sum(queue.num_pages for queue in self.queues.values()))
        self.settle()

    def pinned(self, nodes: Sequence[Run], path: Sequence[Run]) -> None:
        """Unlist `nodes`, and count a hit for every run of `path` that was listed before."""
        for node in nodes:
            self.queues[node.place[0]].remove(node)
        for node in path:
            if node.place is not None:
                queue, hits, rank = node.place
                node.place = (queue, hits + 1, rank)
        self.settle()

    def removed(self, node: Run) -> None:
        """Unlist `node`."""
        queue = node.place[0]
        size = self.queues[queue].remove(node)
        self.evicted(node, queue, size)
        self.settle()

    def split(self, head: Run, tail: Run) -> None:
        """List `head` after `tail`."""
        self.queues[tail.place[0]].split(head, tail)

    def next_run(self) -> Run:
        """Return the first run of the next queue that no transfer holds; if all are held, one of another queue."""
        first = self.next_queue()
        for name in (first, *(name for name in self.queues if name != first)):
            node = self.queues[name].first_free()
            if node is not None:
                return node
        raise AssertionError("nothing to evict is listed")

    def put(self, node: Run, queue: str, hits: int, rank: int) -> None:
        """List `node` in a queue."""
        node.place = (queue, hits, rank)
        self.queues[queue].add(node, (rank,), self.now)

    def move(self, node: Run, queue: str, hits: int, rank: int) -> None:
        """List `node` in another queue, or elsewhere in its own."""
        self.queues[node.place[0]].remove(node)
        self.put(node, queue, hits, rank)


class S3FifoOrder(QueuesOrder):
    """S3-FIFO: a small queue for new runs, a main one for runs that were hit there or returned soon after eviction."""

    SMALL = 0.1
    MOST_HITS = 3

    def __init__(self) -> None:
        super().__init__(("small", "main"))
        self._ghosts = _Ghosts()
        self._num_moved = 0

    def next_queue(self) -> str:
        """Return the small queue if it exceeds its share, else the main queue."""
        small, main = self.queues["small"], self.queues["main"]
        is_small = small.num_pages > self.SMALL * self.most_pages or not main.num_pages
        return "small" if is_small and small.num_pages else "main"

    def arrived(self, node: Run) -> tuple[str, int]:
        """Return the main queue if the run was evicted from the small queue recently, else the small queue."""
        self._num_moved += 1
        return "main" if self._ghosts.take(run_key(node)) else "small", self._num_moved

    def came_back(self, node: Run, queue: str, hits: int, rank: int) -> tuple[str, int]:
        """Return the queue and rank that the run had: a hit moves nothing."""
        return queue, rank

    def settle(self) -> None:
        """Move runs with hits to the end of the main queue."""
        while (node := self.queues[self.next_queue()].first()) is not None:
            queue, hits, _ = node.place
            if not hits:
                return
            self._num_moved += 1
            self.move(node, "main", 0 if queue == "small" else min(hits, self.MOST_HITS) - 1, self._num_moved)

    def evicted(self, node: Run, queue: str, size: int) -> None:
        """Remember runs evicted from the small queue."""
        if queue == "small":
            self._ghosts.add(node, size, self.most_pages)


class ArcOrder(QueuesOrder):
    """ARC: one LRU queue for runs used once and one for runs used again; returns of evicted runs adapt their sizes."""

    def __init__(self) -> None:
        super().__init__(("once", "again"))
        self._ghosts = {"once": _Ghosts(), "again": _Ghosts()}
        self._once_pages = 0.0

    def next_queue(self) -> str:
        """Return the queue that exceeds its target size."""
        once, again = self.queues["once"], self.queues["again"]
        return "once" if once.num_pages and (once.num_pages > self._once_pages or not again.num_pages) else "again"

    def arrived(self, node: Run) -> tuple[str, int]:
        """Return queue and rank; the return of an evicted run enlarges the target of the queue that it left."""
        once, again = self._ghosts["once"], self._ghosts["again"]
        size, key = node.end - node.start, run_key(node)
        num_once, num_again = max(1, once.num_pages), max(1, again.num_pages)
        if once.take(key):
            self._once_pages = min(self.most_pages, self._once_pages + size * max(1.0, num_again / num_once))
        elif again.take(key):
            self._once_pages = max(0.0, self._once_pages - size * max(1.0, num_once / num_again))
        else:
            return "once", self.now
        return "again", self.now

    def came_back(self, node: Run, queue: str, hits: int, rank: int) -> tuple[str, int]:
        """Return the recent end of the queue of runs used again."""
        return "again", self.now

    def evicted(self, node: Run, queue: str, size: int) -> None:
        """Remember the run under the queue that it left."""
        self._ghosts[queue].add(node, size, self.most_pages)


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

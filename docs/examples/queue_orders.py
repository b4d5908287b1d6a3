"""Eviction orders with several queues: `kvarts plan policies TRACE --policy queue_orders:ArcOrder`.

The papers assume objects of one size, and may refuse to admit one. Here runs of pages are evicted, sizes are in pages,
and computed pages are always cached: a run that would not be admitted is evicted next. An order is not given the size
of the pool; the most pages that were ever listed stand for it.

- S3FifoOrder: Yang et al., "FIFO Queues Are All You Need for Cache Eviction", SOSP 2023.
- ArcOrder: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003.
- TinyLfuOrder: Einziger et al., "TinyLFU: A Highly Efficient Cache Admission Policy", ACM TOS 2017.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvarts.core.kv.eviction import BaseOrder, Run
from kvarts.sim.orders import RankedRuns, RunKey, run_key

__all__ = ["ArcOrder", "QueuesOrder", "S3FifoOrder", "TinyLfuOrder"]


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


class TinyLfuOrder(QueuesOrder):
    """W-TinyLFU: a small LRU window, and a main part that admits only runs used more often than the run they displace.

    The main part is a probation and a protected queue. Use counts include evicted runs, and are halved every
    `HALVED_AFTER` uses.
    """

    WINDOW = 0.01
    PROTECTED = 0.8
    HALVED_AFTER = 50_000

    def __init__(self) -> None:
        super().__init__(("window", "probation", "protected"))
        self._uses: dict[RunKey, int] = {}
        self._num_counted = 0

    def next_queue(self) -> str:
        """Return the window if it exceeds its share and its head is used no more than the main one; else main."""
        window, probation, protected = self.queues.values()
        main = "probation" if probation.num_pages else "protected"
        if not window.num_pages or not (probation.num_pages or protected.num_pages):
            return "window" if window.num_pages else main
        if window.num_pages <= self.WINDOW * self.most_pages:
            return main
        candidate, victim = window.first(), self.queues[main].first()
        assert candidate is not None and victim is not None
        return main if self._uses.get(run_key(candidate), 0) > self._uses.get(run_key(victim), 0) else "window"

    def arrived(self, node: Run) -> tuple[str, int]:
        """Return the window."""
        self._count(node)
        return "window", self.now

    def came_back(self, node: Run, queue: str, hits: int, rank: int) -> tuple[str, int]:
        """Return the protected queue for a run of the main part, else the window."""
        self._count(node)
        return "window" if queue == "window" else "protected", self.now

    def settle(self) -> None:
        """Move the head of the window to the main part if it is used more than the victim; trim the protected queue."""
        window, probation, protected = self.queues.values()
        while protected.num_pages > self.PROTECTED * self.most_pages:
            node = protected.first()
            assert node is not None
            self.move(node, "probation", 0, self.now)
        while window.num_pages > self.WINDOW * self.most_pages and (
            self.next_queue() != "window" or not (probation.num_pages or protected.num_pages)
        ):
            node = window.first()
            assert node is not None
            self.move(node, "probation", 0, self.now)

    def _count(self, node: Run) -> None:
        key = run_key(node)
        self._uses[key] = min(15, self._uses.get(key, 0) + 1)
        self._num_counted += 1
        if self._num_counted == self.HALVED_AFTER:
            self._num_counted = 0
            self._uses = {key: uses // 2 for key, uses in self._uses.items() if uses > 1}

"""Eviction orders that use times and the hints of requests (`kvarts.hints.Hints`).

- Hinted: priority, then time to live, then LRU: what vLLM's `kv.retain`, Dynamo's `cache_control` and the retention of
  TensorRT-LLM have in common.
- TTL by tool: Li et al., "Continuum: Efficient and Robust Multi-Turn LLM Agent Scheduling with KV Cache Time-to-Live",
  arXiv 2511.02230, 2025.
- Soonest return: Pan et al., "KVFlow: Efficient Prefix Caching for Accelerating LLM-Based Multi-Agent Workflows",
  NeurIPS 2025.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from kvarts.hints import Hints
from kvarts.kv.eviction import Run
from kvarts.plan.orders import Rank, RankedOrder, RankedRuns

__all__ = ["HintedOrder", "SoonestReturnOrder", "ToolTtlOrder", "best_ttl_ns"]


class TimedOrder(RankedOrder):
    """A RankedOrder of which ranks change with time: that of a run when its `place.until_ns` passes.

    `hints`: those of the request whose runs are released. Ties are LRU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hints: Hints | None = None
        self.now_ns = 0
        self._kept = RankedRuns()
        """Listed runs of which the time has not passed, by that."""

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
    largest priority and the latest end that its requests gave. A priority with a time to live lapses at its end.
    """

    PAUSES = 2

    def place_of(self, before: Kept | None, *, is_last: bool) -> Kept:
        """Return the larger of what earlier requests and this one ask for."""
        hints = self.hints or Hints()
        ttl_ns = hints.ttl_ns
        if ttl_ns is None and hints.pause_ns is not None:
            ttl_ns = self.PAUSES * hints.pause_ns
        asked = Kept(hints.priority or 0, self.now_ns + (ttl_ns or 0), lapses=ttl_ns is not None or not hints.priority)
        if before is None:
            return asked
        priority = 0 if before.lapses and before.until_ns <= self.now_ns else before.priority
        return Kept(
            max(priority, asked.priority), max(before.until_ns, asked.until_ns), lapses=before.lapses and asked.lapses
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


class Paused(NamedTuple):
    """A run of a request that ended at `since_ns` to run `tool`, and is kept until `until_ns`.

    `is_last`: the run has the last pages of that request.
    """

    until_ns: int
    since_ns: int
    tool: str
    is_last: bool


class ToolTtlOrder(TimedOrder):
    """LRU, but the KV of a paused client is kept for a time to live: the best one for its tool, by recent pauses.

    A pause ends when a request finds all pages of an earlier one. The time to live is the pause that maximises the
    probability of a return before its end, minus the cost of the expected time kept. The publication counts both in
    seconds of prefill and queueing. An order knows no compute times: here the cost of a second is the hits that a run
    which is not kept has per second. Requests without a `tool` are of one tool. The `MOST_PAUSES` last pauses of a
    tool count.
    """

    MOST_PAUSES = 64
    MOST_TOOLS = 1024

    def __init__(self) -> None:
        super().__init__()
        self._pauses: dict[str, deque[int]] = {}
        self._num_ended = 0
        self._hits = self._life_ns = 0.0
        """Of runs that were not kept: the share that was hit, and the mean time from release to hit or eviction."""
        self._tool, self._ttl_ns = "", 0

    def released(self, nodes: Sequence[Run]) -> None:
        """List `nodes`, kept for the time to live of the request's tool."""
        tool = (self.hints.tool if self.hints is not None else None) or ""
        self._tool = tool if tool in self._pauses or len(self._pauses) < self.MOST_TOOLS else ""
        self._ttl_ns = best_ttl_ns(self._pauses.get(self._tool, ()), self._hits, self._life_ns)
        super().released(nodes)

    def place_of(self, before: Paused | None, *, is_last: bool) -> Paused:
        """Return a pause that begins now."""
        until_ns = self.now_ns + self._ttl_ns
        if before is not None:
            until_ns = max(until_ns, before.until_ns)
        return Paused(until_ns, self.now_ns, self._tool, is_last)

    def rank_of(self, place: Paused) -> Rank:
        """Return whether the time to live has not passed."""
        return (place.until_ns > self.now_ns,)

    def pinned(self, nodes: Sequence[Run], path: Sequence[Run]) -> None:
        """Unlist `nodes`; count the pause of the request whose last pages are found."""
        last = path[-1] if path else None
        if last is not None and last in self.runs and last.place.is_last and not last.group:
            pauses = self._pauses.setdefault(last.place.tool, deque(maxlen=self.MOST_PAUSES))
            pauses.append(self.now_ns - last.place.since_ns)
        for node in nodes:
            self._end(node, 1.0)
        super().pinned(nodes, path)

    def removed(self, node: Run) -> None:
        """Unlist `node`, which is evicted."""
        self._end(node, 0.0)
        super().removed(node)

    def split(self, head: Run, tail: Run) -> None:
        """List `head` with the rank of `tail`; it does not have the last pages."""
        super().split(head, tail)
        head.place = head.place._replace(is_last=False)

    def _end(self, node: Run, hits: float) -> None:
        """Count the end of a run, if it was not kept."""
        if node in self._kept:
            return
        self._num_ended += 1
        weight = 1 / min(self._num_ended, 100)
        self._hits += (hits - self._hits) * weight
        self._life_ns += (self.now_ns - node.place.since_ns - self._life_ns) * weight


def best_ttl_ns(pauses_ns: Collection[int], hits: float, life_ns: float) -> int:
    """Return the pause that is the best time to live, see ToolTtlOrder; 0 if none is better than nothing.

    `hits`: those that a run which is not kept has in `life_ns`.
    """
    if not life_ns:
        return 0
    best, best_ns = 0.0, 0
    shorter_ns = 0
    for index, pause_ns in enumerate(sorted(pauses_ns)):
        kept_ns = shorter_ns + (len(pauses_ns) - index) * pause_ns
        shorter_ns += pause_ns
        value = index + 1 - kept_ns * hits / life_ns
        if value > best:
            best, best_ns = value, pause_ns
    return best_ns

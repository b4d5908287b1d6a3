"""Eviction orders published in 2025, limited to the input of an order: no prompt text, tool calls or wall clock.

- Tail-optimised LRU: Zhang et al., "Tail-Optimized Caching for LLM Inference", NeurIPS 2025.
- Workload-aware: Wang et al., "KVCache Cache in the Wild: Characterizing and Optimizing KVCache Cache at a Large Cloud
  Provider", USENIX ATC 2025, on the traces of Qwen-Bailian.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

from kvarts.kv.eviction import Run
from kvarts.plan.learned import Kind, LearnedOrder, Place
from kvarts.plan.orders import Rank, RankedOrder

__all__ = ["TailOptimisedOrder", "WorkloadAwareOrder"]


class TailOptimisedOrder(RankedOrder):
    """LRU, but pages that a conversation can spare are evicted first.

    They are the last pages of a prompt and its answer. Without them, the next turn still computes at most
    `MOST_TOKENS`. Their number is `MOST_TOKENS` minus the tokens that a turn adds, the mean of turns so far.
    """

    MOST_TOKENS = 4096

    def __init__(self) -> None:
        super().__init__()
        self._num_turns = 0
        self._num_new = 0.0
        """Mean number of pages that a turn adds."""
        self._first_free = 0

    def released(self, nodes: Sequence[Run]) -> None:
        """List `nodes`; mark the deepest pages as expendable if the next turn can spare them."""
        deepest = nodes[0]
        new = next((node.start for node in reversed(nodes) if node.place is None), deepest.end)
        # The request continues an earlier one. With KV groups, only the first counts: it keeps every token.
        if nodes[-1].place is not None and not deepest.group:
            self._num_turns += 1
            self._num_new += (deepest.end - new - self._num_new) / min(self._num_turns, 100)
        num_spare = self.MOST_TOKENS // deepest.content.page_size - self._num_new
        self._first_free = round(deepest.end - max(0.0, num_spare))
        super().released(nodes)

    def rank(self, node: Run, hits: int, born: int) -> Rank:
        """Return 0 for expendable pages, 1 for all others."""
        return (0 if node.start >= self._first_free else 1, self.now)


class WorkloadAwareOrder(LearnedOrder):
    """Evicts the run least likely to return during the time the cache would keep it; ties: the deepest first.

    Each turn number of conversations is a category. A category has a probability of return and exponentially
    distributed times until then; both are learned. The time that the cache keeps a run is the mean age at eviction.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[Kind, float] = {}
        self._came: dict[Kind, tuple[float, float]] = {}
        """Number of runs of each category that returned, and the sum of their times until then."""
        self._life = 1.0

    def learn(self) -> None:
        """Do nothing: the counts are used directly."""

    def removed(self, node: Run) -> None:
        """Unlist `node`, and update the mean time for which runs are kept."""
        self._life += (self.now - node.place.last - self._life) / 100
        super().removed(node)

    def came_back(self, place: Place, away: int, num_pages: int) -> None:
        """Count the return of a run of a category."""
        count, total = self._came.get(place.kind, (0.0, 0.0))
        self._came[place.kind] = count + 1.0, total + away

    def kind_of(self, returns: int, before: Place | None, node: Run, away: int) -> Kind:
        """Return the category: the number of returns of the run itself and of the run before it."""
        kind = min(returns, 7), 0 if before is None else 1 + min(before.returns, 7), 0
        self._seen[kind] = self._seen.get(kind, 0.0) + 1.0
        return kind

    def worth(self, place: Place) -> float:
        """Return the probability that a run returns within the time for which the cache keeps one."""
        count, total = self._came.get(place.kind, (0.0, 0.0))
        share = (count + 1.0) / (self._seen[place.kind] + 2.0)
        mean = (total + 1.0) / (count + 1.0)
        age = self.now - place.last
        return share * (exp(-age / mean) - exp(-(age + self._life) / mean))

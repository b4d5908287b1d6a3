"""An eviction order that finds out how long to keep what has come back: shadows try it, on what has been seen so far.

On chat, a conversation comes back after longer than LRU keeps anything: by then all of its pages have gone. What has
come back once (`returns`, counted also for what had been evicted in between) is likelier to come back again, and worth
keeping longer. How much longer depends on the trace and on the pool, and too long is worse than LRU. So some small
caches that only count pages, the shadows, go through the same requests, each with another bonus; the order takes the
bonus of the one that found most, not long ago. It knows nothing of requests to come.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvarts.content import Content
from kvarts.kv.cache import PageCache
from kvarts.kv.node import Node
from kvarts.kv.pool import CountPool
from kvarts.kv.tree import PrefixTree
from kvarts.plan.orders import Rank, RankedOrder, RunKey, run_key

__all__ = ["AdaptiveOrder", "RememberingOrder"]


class RememberingOrder(RankedOrder):
    """LRU, but what has come back counts as released later: by `bonus` releases a return, for at most `most_returns`.

    What was evicted is remembered, the last `MOST_REMEMBERED` runs, so that it has come back also then.
    """

    MOST_REMEMBERED = 200_000

    def __init__(self, bonus: int = 1000, most_returns: int = 2) -> None:
        super().__init__()
        self.bonus = bonus
        self.most_returns = most_returns
        self._remembered: dict[RunKey, int] = {}

    def released(self, nodes: Sequence[Node]) -> None:
        """List `nodes`; one that is new, and was here before, has come back."""
        remembered = self._remembered
        for node in nodes:
            key = run_key(node)
            if node.place is None:
                node.place = (remembered.get(key, -1) + 1, self.now)
            remembered.pop(key, None)
            remembered[key] = node.place[0]
        while len(remembered) > self.MOST_REMEMBERED:
            del remembered[next(iter(remembered))]
        super().released(nodes)

    def rank(self, node: Node, hits: int, born: int) -> Rank:
        """Return the time, later for what came back."""
        return (self.now + self.bonus * min(hits, self.most_returns),)


class _Shadow:
    """A cache of `num_pages` pages that counts what requests would have found in it; `score` forgets slowly."""

    def __init__(self, num_pages: int, bonus: int, most_returns: int) -> None:
        self.bonus = bonus
        self.most_returns = most_returns
        self.score = 0.0
        self._num_pages = num_pages
        self._cache = PageCache(CountPool(num_pages), PrefixTree(RememberingOrder(bonus, most_returns)))

    def use(self, content: Content, num_pages: int, decay: float) -> None:
        cache = self._cache
        size = min(num_pages, self._num_pages)
        match = cache.match(content, size)
        self.score = self.score * decay + match.num_pages
        holding = cache.open(match)
        cache.grow(holding, size)
        cache.close(holding, content, size, size)


class AdaptiveOrder(RememberingOrder):
    """A RememberingOrder with the bonus of its best shadow. It begins as LRU."""

    CHOICES = ((0, 0), (1000, 1), (300, 2), (1000, 2), (600, 5))
    """Bonus and most returns of the shadows."""
    HALF_LIFE = 8000
    """Releases after which a hit of a shadow counts half."""
    CHOOSE_EVERY = 25
    BETTER_BY = 1.01
    GROWS_BY = 1.1

    def __init__(self) -> None:
        super().__init__(0, 0)
        self._shadows: list[_Shadow] = []
        self._most_pages = self._shadow_pages = 0
        self._is_full = False
        self._decay = 0.5 ** (1 / self.HALF_LIFE)

    def released(self, nodes: Sequence[Node]) -> None:
        """List `nodes`, and let the shadows find what they would have found."""
        super().released(nodes)
        self._most_pages = max(self._most_pages, self.runs.num_pages)
        if not self._is_full:
            return  # nothing has been evicted: all are alike
        if self._most_pages > self._shadow_pages * self.GROWS_BY:
            self._open_shadows()
        deepest = nodes[0]
        for shadow in self._shadows:
            shadow.use(deepest.content, deepest.end, self._decay)
        if self.now % self.CHOOSE_EVERY == 0:
            self._choose()

    def put_back(self, nodes: Sequence[Node]) -> None:
        """List `nodes`, which were not used."""
        for node in nodes:
            super().released((node,))

    def removed(self, node: Node) -> None:
        """Unlist `node`. The first that goes says how large the pool is."""
        self._is_full = True
        super().removed(node)

    def _open_shadows(self) -> None:
        """Begin anew with shadows as large as the pool, which no order is told of; their scores stay."""
        scores = [shadow.score for shadow in self._shadows] or [0.0] * len(self.CHOICES)
        self._shadow_pages = self._most_pages
        self._shadows = [_Shadow(self._shadow_pages, *choice) for choice in self.CHOICES]
        for shadow, score in zip(self._shadows, scores, strict=True):
            shadow.score = score

    def _choose(self) -> None:
        best = max(self._shadows, key=lambda shadow: shadow.score)
        mine = next(s for s in self._shadows if (s.bonus, s.most_returns) == (self.bonus, self.most_returns))
        if best.score <= mine.score * self.BETTER_BY:
            return
        self.bonus, self.most_returns = best.bonus, best.most_returns
        for node in list(self.runs):
            listed = self.runs.listed_at(node)
            self.runs.add(node, (listed + self.bonus * min(node.place[0], self.most_returns),), listed)

"""An eviction order that finds out how long to keep what has come back: shadows try it, on what has been seen so far.

On chat, a conversation comes back after longer than LRU keeps anything: by then all of its pages have gone. What has
come back once (`returns`, counted also for what had been evicted in between) is likelier to come back again, and worth
keeping longer. How much longer depends on the trace and on the pool, and too long is worse than LRU. So some small
caches that only count pages, the shadows, go through the same requests, each with another bonus; the order takes the
bonus of the one that found most, not long ago. It knows nothing of requests to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvarts.content import Content
from kvarts.kv.node import Node
from kvarts.kv.page_cache import PageCache
from kvarts.kv.pool import CountPool
from kvarts.kv.tree import PrefixTree
from kvarts.plan.orders import Rank, RankedOrder, RunKey, run_key

__all__ = ["AdaptiveOrder", "RememberingOrder", "Weights"]

Place = tuple[int, int, float]


class Weights(NamedTuple):
    """What makes a run count as released later, or earlier, in releases.

    `bonus`: for each return, up to `most_returns`. `malus`: for each release that it is used to stay away, up to
    `most_away`.
    """

    bonus: int
    most_returns: int
    malus: float = 0.0
    most_away: int = 0


USUAL = Weights(1000, 2)


class RememberingOrder(RankedOrder):
    """LRU, but what has come back counts as released later, and what is used to stay away as released earlier.

    What was evicted is remembered, the last `MOST_REMEMBERED` runs, so that it has come back also then. `place` of a
    run is its returns, its last release, and how many releases it was away, a mean in which the last time counts half;
    a run that is new takes that of the one before it.
    """

    MOST_REMEMBERED = 200_000

    def __init__(self, weights: Weights = USUAL) -> None:
        super().__init__()
        self.weights = weights
        self._remembered: dict[RunKey, Place] = {}

    def released(self, nodes: Sequence[Node]) -> None:
        """List `nodes`; one that is new, and was here before, has come back."""
        self.now += 1
        remembered = self._remembered
        away = 0.0
        for node in reversed(nodes):  # from the beginning of the prompt on
            key = run_key(node)
            place: Place | None = node.place
            returns = 0
            if place is not None:
                returns = place[0]
            elif (place := remembered.get(key)) is not None:
                returns = place[0] + 1
            if place is not None:
                away = (place[2] + self.now - place[1]) / 2 if place[2] else self.now - place[1]
            node.place = (returns, self.now, away)
            remembered.pop(key, None)
            remembered[key] = node.place
        while len(remembered) > self.MOST_REMEMBERED:
            del remembered[next(iter(remembered))]
        for node in nodes:
            self.runs.add(node, self.rank_of(node), self.now)

    def pinned(self, nodes: Sequence[Node], path: Sequence[Node]) -> None:
        """Unlist `nodes`, and count a return of every run of `path`."""
        for node in nodes:
            self.runs.remove(node)
        for node in path:
            if node.place is not None:
                returns, last, away = node.place
                node.place = (returns + 1, last, away)

    def rank_of(self, node: Node) -> Rank:
        """Return when it was released, later for what came back, and earlier for what is used to stay away."""
        returns, last, away = node.place
        bonus, most_returns, malus, most_away = self.weights
        return (last + bonus * min(returns, most_returns) - malus * min(away, most_away),)


class _Shadow:
    """A cache of `num_pages` pages that counts what requests would have found in it; `score` forgets slowly."""

    def __init__(self, num_pages: int, weights: Weights) -> None:
        self.weights = weights
        self.score = 0.0
        self._num_pages = num_pages
        self._cache = PageCache(CountPool(num_pages), PrefixTree(RememberingOrder(weights)))

    def use(self, content: Content, num_pages: int, decay: float) -> None:
        cache = self._cache
        size = min(num_pages, self._num_pages)
        match = cache.match(content, size)
        self.score = self.score * decay + match.num_pages
        holding = cache.open(match)
        cache.grow(holding, size)
        cache.close(holding, size, size)


class AdaptiveOrder(RememberingOrder):
    """A RememberingOrder with the weights of its best shadow. It begins as LRU."""

    CHOICES = (
        Weights(0, 0),
        Weights(1000, 1),
        Weights(300, 2),
        Weights(1000, 2),
        Weights(600, 5),
        Weights(0, 0, 0.5, 30),
    )
    """Of the shadows."""
    HALF_LIFE = 8000
    """Releases after which a hit of a shadow counts half."""
    CHOOSE_EVERY = 25
    BETTER_BY = 1.01
    GROWS_BY = 1.1

    def __init__(self) -> None:
        super().__init__(self.CHOICES[0])
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
        self._shadows = [_Shadow(self._shadow_pages, weights) for weights in self.CHOICES]
        for shadow, score in zip(self._shadows, scores, strict=True):
            shadow.score = score

    def _choose(self) -> None:
        best = max(self._shadows, key=lambda shadow: shadow.score)
        mine = next(shadow for shadow in self._shadows if shadow.weights == self.weights)
        if best.score <= mine.score * self.BETTER_BY:
            return
        self.weights = best.weights
        for node in list(self.runs):
            self.runs.add(node, self.rank_of(node), self.runs.listed_at(node))

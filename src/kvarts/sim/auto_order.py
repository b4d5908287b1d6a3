"""`auto`: LRU with corrections, and a choice among such orders by shadow caches.

A correction moves a run's time of release: later if it returned before, earlier if it usually stays away, and earlier
if its client runs no tool, since an answer that ends in a tool call is followed within seconds. Time is counted in
releases. Nothing is known about future requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvarts.core.content import Content
from kvarts.core.hints import Hints
from kvarts.core.kv.eviction import BaseOrder, Run
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.kv.pool import CountPool
from kvarts.core.kv.tree import PrefixTree
from kvarts.sim.orders import RankedRuns, RunKey, run_key

__all__ = ["LRU", "AutoOrder", "WeightedOrder", "Weights"]


class Weights(NamedTuple):
    """Corrections of a time of release, in releases.

    `bonus` per return, up to `most_returns`; `malus` per release of absence, up to `most_away`; `idle` if the client
    runs no tool. `of_session`: new runs of a conversation have the absence of the run that they follow.
    """

    bonus: int = 0
    most_returns: int = 0
    malus: float = 0.0
    most_away: int = 0
    idle: int = 0
    of_session: bool = False


LRU = Weights()


class Place:
    """State of a run. `last`: the time of its last release; `end`: its end page at that time.

    `returns`, and `away`: the mean absence before each, the latest counting half. `is_new`: it has not returned; then
    `session_away` is the absence of the run that it follows. `paused`: its client runs a tool.
    """

    __slots__ = ("away", "end", "is_new", "last", "paused", "returns", "session_away")

    def __init__(self, last: int, end: int, returns: int, away: int) -> None:
        self.last = last
        self.end = end
        self.returns = returns
        self.away = away
        self.session_away = 0
        self.is_new = True
        self.paused = False

    def moved(self, last: int, end: int) -> Place:
        """Return the state at another release."""
        place = Place(last, end, self.returns, self.away)
        place.session_away, place.is_new, place.paused = self.session_away, self.is_new, self.paused
        return place

    def returned(self, away: int, last: int, end: int) -> Place:
        """Return the state after a return."""
        place = Place(last, end, self.returns + 1, (self.away + away) // 2 if self.away else away)
        place.session_away, place.is_new, place.paused = self.session_away, False, self.paused
        return place


class WeightedOrder(BaseOrder):
    """Evicts the run with the earliest corrected time of release.

    Evicted runs are remembered, the last `MOST_REMEMBERED` of them: one that is computed again has returned.
    `is_paused`: whether the client of the runs that are released now runs a tool.
    """

    MOST_REMEMBERED = 20_000

    def __init__(self, weights: Weights = LRU) -> None:
        self.now = 0
        self.num_pages = 0
        """Number of listed pages; with several KV groups, those of the first."""
        self.weights = weights
        self.is_paused = False
        self._runs = RankedRuns()
        self._sizes: dict[Run, int] = {}
        self._gone: dict[RunKey, Place] = {}

    def __iter__(self) -> Iterator[Run]:
        """Return all listed runs, the earliest corrected time first."""
        return iter(self._runs)

    def next_run(self) -> Run:
        """Return the first run that no transfer holds."""
        node = self._runs.first_free()
        assert node is not None, "nothing to evict is listed"
        return node

    def released(self, nodes: Sequence[Run]) -> None:
        """List `nodes`; a new run that was evicted earlier has returned."""
        self.now += 1
        top = nodes[-1].parent
        before: Place | None = None if top is None else top.place
        for node in reversed(nodes):
            place: Place | None = node.place
            if place is not None:
                place = place.moved(self.now, node.end)
            elif (gone := self._gone.pop(run_key(node), None)) is not None:
                place = gone.returned(self.now - gone.last, self.now, node.end)
            else:
                place = Place(self.now, node.end, 0, 0)
            if before is not None and place.is_new:
                place.session_away = before.away or before.session_away
            place.paused = self.is_paused
            node.place = before = place
        for node in nodes:
            self._list(node)

    def pinned(self, nodes: Sequence[Run], path: Sequence[Run]) -> None:
        """Unlist `nodes`, which return."""
        for node in nodes:
            self._unlist(node)
            place: Place = node.place
            content = node.content
            if node.end < place.end and node.end < content.num_known_pages:
                self._remember((content.salt, node.group, node.end, content.key(node.end)), place)
            node.place = place.returned(self.now + 1 - place.last, place.last, node.end)

    def removed(self, node: Run) -> None:
        """Unlist `node`, and remember it as evicted."""
        self._unlist(node)
        self._remember(run_key(node), node.place)

    def split(self, head: Run, tail: Run) -> None:
        """List `head`, which is evicted after `tail`."""
        head.place = tail.place.moved(tail.place.last, head.end)
        self._runs.split(head, tail)
        self._sizes[head], self._sizes[tail] = head.end - head.start, tail.end - tail.start

    def put_back(self, nodes: Sequence[Run]) -> None:
        """List `nodes` where they were listed before."""
        for node in nodes:
            if node.place is None:
                self.released((node,))
            else:
                self._list(node)

    def relist(self, weights: Weights) -> None:
        """List all runs again, by `weights`."""
        nodes = list(self._sizes)
        self.weights = weights
        self._runs = RankedRuns()
        self._sizes.clear()
        self.num_pages = 0
        for node in nodes:
            self._list(node)

    def _rank(self, place: Place) -> float:
        """Return the corrected time of release."""
        bonus, most_returns, malus, most_away, idle, of_session = self.weights
        away = place.session_away if of_session and place.is_new else place.away
        at = place.last + bonus * min(place.returns, most_returns) - malus * min(away, most_away)
        return at if place.paused else at - idle

    def _list(self, node: Run) -> None:
        place: Place = node.place
        self._runs.add(node, (self._rank(place),), place.last)
        size = self._sizes[node] = node.end - node.start
        if not node.group:
            self.num_pages += size

    def _unlist(self, node: Run) -> None:
        self._runs.remove(node)
        size = self._sizes.pop(node)
        if not node.group:
            self.num_pages -= size

    def _remember(self, key: RunKey, place: Place) -> None:
        gone = self._gone
        gone.pop(key, None)
        gone[key] = place
        if len(gone) > self.MOST_REMEMBERED:
            del gone[next(iter(gone))]


class _Shadow:
    """A simulated cache of `num_pages` pages under one order. `score` counts its hits and decays exponentially."""

    def __init__(self, num_pages: int, weights: Weights) -> None:
        self.order = WeightedOrder(weights)
        self.score = 0.0
        self._num_pages = num_pages
        self._cache = PageCache(CountPool(num_pages), PrefixTree(self.order))

    def use(self, content: Content, num_pages: int, decay: float, *, is_paused: bool) -> None:
        """Serve a request of `num_pages` pages and add its hits to the score."""
        cache = self._cache
        size = min(num_pages, self._num_pages)
        self.order.is_paused = is_paused
        match = cache.match(content, size)
        self.score = self.score * decay + match.num_pages
        table = cache.open(match)
        cache.grow(table, size)
        cache.close(table, size, size)


class AutoOrder(WeightedOrder):
    """Follows the best of several weighted orders, LRU among them. Starts as the first of `CHOICES`.

    Shadow caches, one per order, count the hits that each would have had recently. The order changes when another has
    more hits, by at least `BETTER_BY` of the pages requested.
    """

    CHOICES: tuple[Weights, ...] = (
        Weights(malus=0.5, most_away=30, idle=20),
        LRU,
        Weights(bonus=1000, most_returns=2),
        Weights(malus=0.5, most_away=30, idle=20, of_session=True),
    )
    HALF_LIFE = 8000
    CHOOSE_EVERY = 25
    BETTER_BY = 0.001
    GROWS_BY = 1.1

    def __init__(self) -> None:
        super().__init__(self.CHOICES[0])
        self._shadows: list[_Shadow] = []
        self._most_pages = self._shadow_pages = 0
        self._is_full = False
        self._asked = 0.0
        self._turn = 0
        self._decay = 0.5 ** (1 / self.HALF_LIFE)

    def note_request(self, hints: Hints | None, now_ns: int) -> None:
        """Set whether the client of the next runs runs a tool, or will return for another reason."""
        self.is_paused = hints is not None and (hints.tool is not None or hints.pause_ms is not None)

    def released(self, nodes: Sequence[Run]) -> None:
        """List `nodes` and replay the request on the shadows."""
        super().released(nodes)
        deepest = nodes[0]
        if deepest.group:
            return  # shadows model the layers that keep every token, which are the first KV group
        self._most_pages = max(self._most_pages, self.num_pages)
        turn = self.now // self.CHOOSE_EVERY
        is_due, self._turn = turn > self._turn, turn
        if not self._is_full:
            return  # nothing has been evicted yet, so all orders are equal
        if self._most_pages > self._shadow_pages * self.GROWS_BY:
            self._open_shadows()
        self._asked = self._asked * self._decay + deepest.end
        for shadow in self._shadows:
            shadow.use(deepest.content, deepest.end, self._decay, is_paused=self.is_paused)
        if is_due:
            self._choose()

    def removed(self, node: Run) -> None:
        """Unlist `node`. The first removal shows that the pool is full, and so how large it is."""
        self._is_full = True
        super().removed(node)

    def _open_shadows(self) -> None:
        """Replace the shadows by empty ones, as large as the most pages ever listed; keep their scores."""
        scores = [shadow.score for shadow in self._shadows] or [0.0] * len(self.CHOICES)
        self._shadow_pages = self._most_pages
        self._shadows = [_Shadow(self._shadow_pages, weights) for weights in self.CHOICES]
        for shadow, score in zip(self._shadows, scores, strict=True):
            shadow.score = score

    def _choose(self) -> None:
        best = max(self._shadows, key=lambda shadow: shadow.score)
        mine = next(shadow for shadow in self._shadows if shadow.order.weights == self.weights)
        if best.score > mine.score + self.BETTER_BY * self._asked:
            self.relist(best.order.weights)

"""An eviction order that learns how soon runs of a kind return, and one that falls back to LRU where that is worse.

A kept page takes room until it is hit or given up. The value of keeping it is hits per page and unit of time,
maximised over all times to keep it: the Gittins index of the run. (Hit density in Beckmann et al., "LHD: Improving
Cache Hit Rate by Maximizing Hit Density", NSDI 2018, uses the time that the cache happens to keep it instead.) The
probability that a run returns at a given age is learned from runs of its kind, including those that were evicted and
then requested again. Time is counted in releases. The order knows nothing about future requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from kvarts.content import Content
from kvarts.kv.eviction import BaseOrder, Run
from kvarts.kv.page_cache import PageCache
from kvarts.kv.pool import CountPool
from kvarts.kv.tree import PrefixTree
from kvarts.plan.orders import RankedRuns, RunKey, run_key

__all__ = ["AutoOrder", "LearnedOrder"]

Kind = tuple[int, int, int]
"""Number of returns, class of the run before it, and length of the last absence."""

ALL: Kind = (-1, -1, -1)
"""The kind of every run when runs are ranked by weights in one queue."""


class Weights(NamedTuple):
    """LRU with corrections: returns count as a later release, habitual absence as an earlier one.

    In releases: `bonus` per return, up to `most_returns`; `malus` per release of absence, up to `most_away`.
    """

    bonus: int = 0
    most_returns: int = 0
    malus: float = 0.0
    most_away: int = 0


LRU = Weights()

NUM_AGES = 30
STEPS = 2
"""Age classes grow by factors of 2 ** (1 / STEPS)."""
BEGINS = [0.0, *(2.0 ** (step / STEPS) for step in range(1, NUM_AGES + 1))]
WIDTHS = [BEGINS[age + 1] - BEGINS[age] for age in range(NUM_AGES)]


def _age_table() -> list[int]:
    ages, age = [], 0
    for releases in range(1 << 10):
        while age + 1 < NUM_AGES and BEGINS[age + 1] <= releases:
            age += 1
        ages.append(age)
    return ages


AGES = _age_table()


def age_of(releases: int) -> int:
    """Return the age class of a run that was released `releases` releases ago."""
    shift = 0
    while releases >= len(AGES):
        releases >>= 1
        shift += STEPS
    return min(AGES[releases] + shift, NUM_AGES - 1)


class Place:
    """State of a run: its kind, time of last release, end page at that time, returns, and mean absence."""

    __slots__ = ("away", "end", "kind", "last", "returns")

    def __init__(self, kind: Kind, last: int, end: int, returns: int, away: int) -> None:
        self.kind = kind
        self.last = last
        self.end = end
        self.returns = returns
        self.away = away


class ReturnCounts:
    """Counts of pages by kind and age of return. Sole owner of the counts, which decay exponentially."""

    HALF_LIFE = 20_000
    PRIOR_PAGES = 400.0
    """Weight of the prior, in pages: each kind starts as if this many pages had behaved like the average kind."""

    def __init__(self) -> None:
        self._came: dict[Kind, list[float]] = {}
        """Pages that returned, by age."""
        self._left: dict[Kind, list[float]] = {}
        """Pages that were given up for good, by age."""

    def came_back(self, kind: Kind, age: int, num_pages: int) -> None:
        """Count a run that returned at `age`."""
        self._of(self._came, kind)[age] += num_pages

    def gave_up(self, kind: Kind, age: int, num_pages: int) -> None:
        """Count a run that had not returned by `age` and is no longer remembered."""
        self._of(self._left, kind)[age] += num_pages

    def _of(self, counts: dict[Kind, list[float]], kind: Kind) -> list[float]:
        row = counts.get(kind)
        if row is None:
            row = counts[kind] = [0.0] * NUM_AGES
        return row

    def forget(self, factor: float) -> None:
        """Multiply all counts by `factor`."""
        for counts in (self._came, self._left):
            for row in counts.values():
                row[:] = [value * factor for value in row]

    def worths(self, waiting: dict[Kind, list[float]]) -> tuple[dict[Kind, list[float]], list[float]]:
        """Return the value of keeping a run, in hits per page and release, by kind and age; and that of unseen kinds.

        `waiting`: pages of each kind that have not returned yet, by age.
        """
        kinds = {*self._came, *self._left, *waiting}
        nothing = [0.0] * NUM_AGES
        came_of = {kind: self._came.get(kind, nothing) for kind in kinds}
        seen_of = {}
        for kind in sorted(kinds):
            seen, total = [0.0] * NUM_AGES, 0.0
            came, left, wait = came_of[kind], self._left.get(kind, nothing), waiting.get(kind, nothing)
            for age in range(NUM_AGES - 1, -1, -1):
                half = (left[age] + wait[age]) / 2  # on average these stayed for half of this age class
                seen[age] = total + came[age] + half
                total += came[age] + 2 * half
            seen_of[kind] = seen
        ordered = sorted(kinds)
        all_came = [sum(came_of[kind][age] for kind in ordered) for age in range(NUM_AGES)]
        all_seen = [sum(seen_of[kind][age] for kind in ordered) for age in range(NUM_AGES)]
        usual = [(came + 1e-3) / (seen + 1.0) for came, seen in zip(all_came, all_seen, strict=True)]
        worths = {}
        for kind in ordered:
            came, seen = came_of[kind], seen_of[kind]
            hazards = [
                (came[age] + self.PRIOR_PAGES * usual[age]) / (seen[age] + self.PRIOR_PAGES) for age in range(NUM_AGES)
            ]
            worths[kind] = _gittins(hazards)
        return worths, _gittins(usual)


def _gittins(hazards: list[float]) -> list[float]:
    """Return, per age, the most hits per release that keeping a run of that age can bring.

    `hazards`: the probability of a return within each age class, given no earlier return.
    """
    worths = []
    for begin in range(NUM_AGES):
        best, alive, spent = 0.0, 1.0, 0.0
        for age in range(begin, NUM_AGES):
            hazard = hazards[age]
            spent += alive * (1.0 - hazard / 2) * WIDTHS[age]
            alive *= 1.0 - hazard
            best = max(best, (1.0 - alive) / spent)
        worths.append(best)
    return worths


class LearnedOrder(BaseOrder):
    """Evicts the run with the lowest value: expected hits per page and time of keeping it.

    Each kind has a queue, ordered by time of release; eviction compares the heads of all queues. With `weights`, all
    runs are in one queue ranked by these weights, and nothing is learned.
    """

    MOST_REMEMBERED = 20_000
    LEARN_EVERY = 100

    def __init__(self, weights: Weights | None = None) -> None:
        self.now = 0
        self.num_pages = 0
        """Number of listed pages; with several KV groups, those of the first."""
        self.weights = weights
        self._queues: dict[Kind, RankedRuns] = {}
        self._gone: dict[RunKey, tuple[Place, int]] = {}
        """Evicted runs, and tails cut off runs, with their numbers of pages; the oldest eviction first."""
        self._reuse = ReturnCounts()
        self._worths: dict[Kind, list[float]] = {}
        self._usual = [1.0 / (1 + age) for age in range(NUM_AGES)]
        self._listed: dict[Run, int] = {}

    # Calls of the tree ---------------------------------------------------------------------------------------

    def released(self, nodes: Sequence[Run]) -> None:
        """List `nodes`; count a return for new runs that were evicted earlier."""
        self.now += 1
        if self.now % self.LEARN_EVERY == 0:
            self.learn()
        before: Place | None = None
        top = nodes[-1].parent
        if top is not None:
            before = top.place
        for node in reversed(nodes):
            place: Place | None = node.place
            if place is None:
                place = self._returned(node) or Place(self.kind_of(0, before, node, 0), self.now, node.end, 0, 0)
            else:
                place = Place(place.kind, self.now, node.end, place.returns, place.away)
            place.kind = self.kind_of(place.returns, before, node, place.away)
            node.place = before = place
        for node in nodes:
            self._list(node)

    def _returned(self, node: Run) -> Place | None:
        """Return the place of a new run that was evicted earlier, with one more return; None if it was not."""
        gone = self._gone.pop(run_key(node), None)
        if gone is None:
            return None
        place, num_pages = gone
        away = self.now - place.last
        self.came_back(place, away, min(num_pages, node.end - node.start))
        return Place(place.kind, self.now, node.end, place.returns + 1, _mean(place.away, away))

    def pinned(self, nodes: Sequence[Run], path: Sequence[Run]) -> None:
        """Unlist `nodes` and count their return."""
        for node in nodes:
            place: Place = node.place
            self._unlist(node)
            if node.end < place.end:
                self._forget_rest(node, place)
            away = self.now + 1 - place.last
            self.came_back(place, away, node.end - node.start)
            node.place = Place(place.kind, place.last, node.end, place.returns + 1, _mean(place.away, away))

    def removed(self, node: Run) -> None:
        """Unlist `node` and remember it as evicted."""
        self._unlist(node)
        place: Place = node.place
        self._remember(run_key(node), place, max(1, place.end - node.start))

    def split(self, head: Run, tail: Run) -> None:
        """List `head`, which is evicted after `tail`."""
        place: Place = tail.place
        head.place = Place(place.kind, place.last, head.end, place.returns, place.away)
        self._queues[self._queue_of(place)].split(head, tail)
        self._listed[head] = head.end - head.start
        self._listed[tail] = tail.end - tail.start

    def put_back(self, nodes: Sequence[Run]) -> None:
        """List `nodes` where they were listed before."""
        for node in nodes:
            if node.place is None:
                self.released((node,))
            else:
                self._list(node)

    # Queries of the tree -------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Run]:
        """Return all listed runs by merging the queues: the head with the lowest value is always next."""
        queues = {kind: iter(queue) for kind, queue in self._queues.items()}
        heads: list[tuple[float, int, Kind, Run]] = []
        for kind, queue in queues.items():
            if (node := next(queue, None)) is not None:
                heads.append((*self._worth(node), kind, node))
        heapify(heads)
        while heads:
            _, _, kind, node = heappop(heads)
            yield node
            if (following := next(queues[kind], None)) is not None:
                heappush(heads, (*self._worth(following), kind, following))

    def next_run(self) -> Run:
        """Return the run with the lowest value that no transfer holds."""
        best: tuple[float, int, Kind] | None = None
        found: Run | None = None
        for kind, queue in self._queues.items():
            node = queue.first()
            if node is None:
                continue
            worth = (*self._worth(node), kind)
            if best is None or worth < best:
                best, found = worth, node
        assert found is not None, "nothing to evict is listed"
        return super().next_run() if found.holds else found

    # Learning -------------------------------------------------------------------------------------------------

    def came_back(self, place: Place, away: int, num_pages: int) -> None:
        """Count `num_pages` that returned after `away` releases."""
        if self.weights is None:
            self._reuse.came_back(place.kind, age_of(away), num_pages)

    def worth(self, place: Place) -> float:
        """Return the current value of keeping a run."""
        worths = self._worths.get(place.kind, self._usual)
        return worths[age_of(self.now - place.last)]

    def kind_of(self, returns: int, before: Place | None, node: Run, away: int) -> Kind:
        """Return the kind of a run that is released now. `before`: the place of the run that precedes it."""
        parent = node.parent
        follows = 0
        if before is not None:
            follows = 4 if parent is not None and len(parent.children or ()) > 1 else 1 + min(before.returns, 2)
        return min(returns, 3), follows, 0 if not away else 1 + min(3, age_of(away) // 6)

    # Inside ---------------------------------------------------------------------------------------------------

    def _worth(self, node: Run) -> tuple[float, int]:
        """Return the value of keeping a run, and the time of its release to break ties."""
        place: Place = node.place
        weights = self.weights
        if weights is not None:
            return self._rank(place, weights), place.last
        return self.worth(place), place.last

    @staticmethod
    def _rank(place: Place, weights: Weights) -> float:
        """Return the corrected time of release."""
        bonus, most_returns, malus, most_away = weights
        return place.last + bonus * min(place.returns, most_returns) - malus * min(place.away, most_away)

    def _queue_of(self, place: Place) -> Kind:
        return place.kind if self.weights is None else ALL

    def _list(self, node: Run) -> None:
        place: Place = node.place
        kind, weights = self._queue_of(place), self.weights
        queue = self._queues.get(kind)
        if queue is None:
            queue = self._queues[kind] = RankedRuns()
        queue.add(node, (place.last if weights is None else self._rank(place, weights),), place.last)
        self._listed[node] = node.end - node.start
        if not node.group:
            self.num_pages += node.end - node.start

    def _unlist(self, node: Run) -> None:
        place: Place = node.place
        self._queues[self._queue_of(place)].remove(node)
        num_pages = self._listed.pop(node)
        if not node.group:
            self.num_pages -= num_pages

    def relist(self, weights: Weights | None) -> None:
        """List all runs again, ranked by `weights`, or by kind if None."""
        nodes = list(self._listed)
        self.weights = weights
        self._queues.clear()
        self._listed.clear()
        self.num_pages = 0
        for node in nodes:
            self._list(node)

    def _forget_rest(self, node: Run, place: Place) -> None:
        """Remember the tail that was evicted from a run."""
        content = node.content
        if node.end < content.num_known_pages:
            self._remember((content.salt, node.group, node.end, content.key(node.end)), place, place.end - node.end)

    def _remember(self, key: RunKey, place: Place, num_pages: int) -> None:
        gone = self._gone
        gone.pop(key, None)
        gone[key] = place, num_pages
        if len(gone) > self.MOST_REMEMBERED:
            oldest = next(iter(gone))
            place, num_pages = gone.pop(oldest)
            if self.weights is None:
                self._reuse.gave_up(place.kind, age_of(self.now - place.last), num_pages)

    def learn(self) -> None:
        """Recompute the value of each kind and age."""
        if self.weights is not None:
            return
        waiting: dict[Kind, list[float]] = {}
        now = self.now
        for node in self._listed:
            self._wait(waiting, node.place, now, node.end - node.start)
        for place, num_pages in self._gone.values():
            self._wait(waiting, place, now, num_pages)
        self._worths, self._usual = self._reuse.worths(waiting)
        self._reuse.forget(0.5 ** (self.LEARN_EVERY / self._reuse.HALF_LIFE))

    @staticmethod
    def _wait(waiting: dict[Kind, list[float]], place: Place, now: int, num_pages: int) -> None:
        row = waiting.get(place.kind)
        if row is None:
            row = waiting[place.kind] = [0.0] * NUM_AGES
        row[age_of(now - place.last)] += num_pages


def _mean(before: int, away: int) -> int:
    """Return the running mean of absences; the latest counts half."""
    return (before + away) // 2 if before else away


class _Shadow:
    """A simulated cache of `num_pages` pages under one order. `score` counts its hits and decays exponentially."""

    def __init__(self, num_pages: int, weights: Weights | None) -> None:
        self.order = LearnedOrder(weights)
        self.score = 0.0
        self._num_pages = num_pages
        self._cache = PageCache(CountPool(num_pages), PrefixTree(self.order))

    def use(self, content: Content, num_pages: int, decay: float) -> None:
        """Serve a request of `num_pages` pages and add its hits to the score."""
        cache = self._cache
        size = min(num_pages, self._num_pages)
        match = cache.match(content, size)
        self.score = self.score * decay + match.num_pages
        holding = cache.open(match)
        cache.grow(holding, size)
        cache.close(holding, size, size)


class AutoOrder(LearnedOrder):
    """Follows the best of several orders: LRU, LRU with weights, or the learned one. Starts as LRU.

    Shadow caches, one per order, count the hits that each would have had recently. The order changes when another has
    more hits, by at least `BETTER_BY` of the pages requested.
    """

    CHOICES: tuple[Weights | None, ...] = (
        LRU,
        None,
        Weights(1000, 2),
        Weights(300, 2),
        Weights(malus=0.5, most_away=30),
    )
    HALF_LIFE = 8000
    CHOOSE_EVERY = 25
    BETTER_BY = 0.002
    GROWS_BY = 1.1

    def __init__(self) -> None:
        super().__init__(LRU)
        self._shadows: list[_Shadow] = []
        self._most_pages = self._shadow_pages = 0
        self._is_full = False
        self._asked = 0.0
        self._turn = 0
        self._decay = 0.5 ** (1 / self.HALF_LIFE)

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
            shadow.use(deepest.content, deepest.end, self._decay)
        if is_due:
            self._choose()

    def removed(self, node: Run) -> None:
        """Unlist `node`. The first removal shows that the pool is full, and so how large it is."""
        self._is_full = True
        super().removed(node)

    def learn(self) -> None:
        """Copy the values learned by the shadow with the learned order."""
        for shadow in self._shadows:
            if shadow.order.weights is None:
                self._worths, self._usual = shadow.order._worths, shadow.order._usual

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
            self.learn()

"""Eviction orders from publications: `kvarts plan policies TRACE --policy published_orders:LpcOrder`.

None closes more of the gap to the optimum than the orders that kvarts has, see the league of policies in
docs/performance.md. Orders with several queues are in queue_orders.py. An order is not given prompt text, so features
of text are replaced, as each class says.

- MarconiOrder: Pan et al., "Marconi: Prefix Caching for the Era of Hybrid LLMs", MLSys 2025. The other half of the
  publication, which states are kept at all, is `--set snapshots=branches`.
- TailOptimisedOrder: Zhang et al., "Tail-Optimized Caching for LLM Inference", NeurIPS 2025.
- WorkloadAwareOrder: Wang et al., "KVCache Cache in the Wild: Characterizing and Optimizing KVCache Cache at a Large
  Cloud Provider", USENIX ATC 2025.
- ToolTtlOrder: Li et al., "Continuum: Efficient and Robust Multi-Turn LLM Agent Scheduling with KV Cache Time-to-Live",
  arXiv 2511.02230, 2025.
- LpcOrder: Yang et al., "Learned Prefix Caching for Efficient LLM Inference", NeurIPS 2025.
- SaeOrder: Fang et al., "Not All Tokens Are Worth Caching: Learning Semantic-Aware Eviction for LLM Prefix Caches",
  arXiv 2605.18825, 2026.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import erfc, exp, log, log2, sqrt
from typing import NamedTuple

from kvarts.core.hints import Hints
from kvarts.core.kv.eviction import BaseOrder, Run
from kvarts.sim.orders import Rank, RankedOrder, RankedRuns, RunKey, TimedOrder, run_key

__all__ = [
    "LpcOrder",
    "MarconiOrder",
    "SaeOrder",
    "TailOptimisedOrder",
    "ToolTtlOrder",
    "WorkloadAwareOrder",
    "best_ttl_ns",
]


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


class Used(NamedTuple):
    """State of a run of MarconiOrder: the time of its last release, and the compute that a hit saves per byte."""

    last: int
    savings: float


class MarconiOrder(BaseOrder):
    """Evicts the run of the lowest sum of recency and savings, both scaled to the largest: for models with states.

    Savings are the tokens that a hit need not compute, per memory in tokens of KV: 1 for KV, and for a snapshot of
    states the length of its prefix divided by `STATE_TOKENS`, the tokens whose KV takes as many bytes as the states.
    The publication subtracts what the snapshot before it on the same path saves, which an order is not given; and it
    tunes `ALPHA`, the weight of savings, by replaying what came before. Here both are fixed. KV group 0 keeps every
    token, and the others are states.
    """

    ALPHA = 1.0
    STATE_TOKENS = 7000
    RESCALE_EVERY = 500

    def __init__(self) -> None:
        self.now = 0
        self._runs = RankedRuns()
        self._listed: dict[Run, None] = {}
        self._scale = 0.0
        """Releases that are worth as much as one unit of savings."""

    def __iter__(self) -> Iterator[Run]:
        """Return all listed runs, the lowest sum first."""
        return iter(self._runs)

    def next_run(self) -> Run:
        """Return the run of the lowest sum that no transfer holds."""
        node = self._runs.first_free()
        assert node is not None, "nothing to evict is listed"
        return node

    def released(self, nodes: Sequence[Run]) -> None:
        """List `nodes` as used now."""
        self.now += 1
        for node in nodes:
            length = node.end * node.content.page_size
            node.place = Used(self.now, length / self.STATE_TOKENS if node.group else 1.0)
            self._list(node)
        if not self.now % self.RESCALE_EVERY:
            self._rescale()

    def removed(self, node: Run) -> None:
        """Unlist `node`."""
        del self._listed[node]
        self._runs.remove(node)

    def split(self, head: Run, tail: Run) -> None:
        """List `head` directly after `tail`."""
        self._listed[head] = None
        self._runs.split(head, tail)

    def _list(self, node: Run) -> None:
        place: Used = node.place
        self._listed[node] = None
        self._runs.add(node, (place.last + self._scale * place.savings,), place.last)

    def _rescale(self) -> None:
        """Let the range of savings weigh `ALPHA` times as much as that of ages, and list all runs again."""
        places: list[Used] = [node.place for node in self._listed]
        most = max(place.savings for place in places)
        self._scale = self.ALPHA * (self.now - min(place.last for place in places)) / most
        nodes = list(self._listed)
        self._runs = RankedRuns()
        for node in nodes:
            self._list(node)


Kind = tuple[int, ...]


class Place(NamedTuple):
    """State of a run. `last`: the time of its last release; `turn`: the requests that had it or what it continues."""

    kind: Kind
    last: int
    returns: int
    turn: int


class KindsOrder(BaseOrder):
    """Evicts the run of the lowest value, which depends on its kind and on the releases since its last one.

    Each kind has a queue, ordered by time of release, and the heads of all queues are compared. Evicted runs are
    remembered, the last `MOST_REMEMBERED` of them: one that is computed again has returned.
    """

    MOST_REMEMBERED = 20_000

    def __init__(self) -> None:
        self.now = 0
        self.is_paused = False
        self._queues: dict[Kind, RankedRuns] = {}
        self._gone: dict[RunKey, Place] = {}

    def kind_of(self, node: Run, place: Place | None, turn: int, nodes: Sequence[Run]) -> Kind:
        """Return the kind of a run that is released now, as one of `nodes`; `place`: its state before, if any."""
        raise NotImplementedError

    def worth(self, kind: Kind, age: int) -> float:
        """Return the value of keeping a run, `age` releases after its last."""
        raise NotImplementedError

    def came_back(self, place: Place, away: int) -> None:
        """Count the return of a run after `away` releases."""

    def gave_up(self, place: Place) -> None:
        """Count a run that is remembered no longer, without a return."""

    def note_request(self, hints: Hints | None, now_ns: int) -> None:
        """Set whether the client runs a tool."""
        self.is_paused = hints is not None and hints.tool is not None

    def released(self, nodes: Sequence[Run]) -> None:
        """List `nodes` by their new kinds."""
        self.now += 1
        top = nodes[-1].parent
        turn = max((node.place.turn for node in nodes if node.place is not None), default=0)
        turn = 1 + max(turn, 0 if top is None or top.place is None else top.place.turn)
        for node in reversed(nodes):
            place: Place | None = node.place
            if place is None and (gone := self._gone.pop(run_key(node), None)) is not None:
                self.came_back(gone, self.now - gone.last)
                place = gone._replace(returns=gone.returns + 1)
            kind = self.kind_of(node, place, turn, nodes)
            node.place = Place(kind, self.now, 0 if place is None else place.returns, turn)
        for node in nodes:
            self._list(node)

    def pinned(self, nodes: Sequence[Run], path: Sequence[Run]) -> None:
        """Unlist `nodes` and count their return."""
        for node in nodes:
            place: Place = node.place
            self._queues[place.kind].remove(node)
            self.came_back(place, self.now + 1 - place.last)
            node.place = place._replace(returns=place.returns + 1)

    def removed(self, node: Run) -> None:
        """Unlist `node` and remember it as evicted."""
        place: Place = node.place
        self._queues[place.kind].remove(node)
        self._gone.pop(run_key(node), None)
        self._gone[run_key(node)] = place
        if len(self._gone) > self.MOST_REMEMBERED:
            self.gave_up(self._gone.pop(next(iter(self._gone))))

    def split(self, head: Run, tail: Run) -> None:
        """List `head`, which is evicted after `tail`."""
        self._queues[tail.place.kind].split(head, tail)

    def put_back(self, nodes: Sequence[Run]) -> None:
        """List `nodes` where they were listed before."""
        for node in nodes:
            if node.place is None:
                self.released((node,))
            else:
                self._list(node)

    def next_run(self) -> Run:
        """Return the run of the lowest value that no transfer holds."""
        heads = [node for queue in self._queues.values() if (node := queue.first()) is not None]
        found = min(heads, key=self._key)
        return super().next_run() if found.holds else found

    def __iter__(self) -> Iterator[Run]:
        """Return all listed runs by merging the queues: the head of the lowest value is always next."""
        queues = {kind: iter(queue) for kind, queue in self._queues.items()}
        heads = [(*self._key(node), node) for queue in queues.values() if (node := next(queue, None)) is not None]
        heapify(heads)
        while heads:
            _, _, kind, node = heappop(heads)
            yield node
            if (following := next(queues[kind], None)) is not None:
                heappush(heads, (*self._key(following), following))

    def _key(self, node: Run) -> tuple[float, int, Kind]:
        place: Place = node.place
        return self.worth(place.kind, self.now - place.last), place.last, place.kind

    def _list(self, node: Run) -> None:
        queue = self._queues.get(node.place.kind)
        if queue is None:
            queue = self._queues[node.place.kind] = RankedRuns()
        queue.add(node, (node.place.last,), node.place.last)


class WorkloadAwareOrder(KindsOrder):
    """Evicts the run least likely to return during the time for which the cache would keep it.

    Each turn number of conversations is a category. A category has a probability of return and exponentially
    distributed times until then; both are learned. The time that the cache keeps a run is the mean age at eviction.
    """

    MOST_TURNS = 8

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[Kind, float] = {}
        self._came: dict[Kind, tuple[float, float]] = {}
        """Number of runs of each category that returned, and the sum of their times until then."""
        self._life = 1.0

    def kind_of(self, node: Run, place: Place | None, turn: int, nodes: Sequence[Run]) -> Kind:
        """Return the category: the returns of the run, and the turn of its conversation."""
        kind = (0 if place is None else min(place.returns, self.MOST_TURNS), min(turn, self.MOST_TURNS))
        self._seen[kind] = self._seen.get(kind, 0.0) + 1.0
        return kind

    def came_back(self, place: Place, away: int) -> None:
        """Count the return of a run of a category."""
        count, total = self._came.get(place.kind, (0.0, 0.0))
        self._came[place.kind] = count + 1.0, total + away

    def removed(self, node: Run) -> None:
        """Unlist `node`, and update the mean time for which runs are kept."""
        self._life += (self.now - node.place.last - self._life) / 100
        super().removed(node)

    def worth(self, kind: Kind, age: int) -> float:
        """Return the probability of a return within the time for which the cache keeps a run."""
        count, total = self._came.get(kind, (0.0, 0.0))
        share = (count + 1.0) / (self._seen[kind] + 2.0)
        mean = (total + 1.0) / (count + 1.0)
        return share * (exp(-age / mean) - exp(-(age + self._life) / mean))


class LpcOrder(KindsOrder):
    """Evicts the conversation least likely to continue, given that it has not continued until now.

    The publication predicts continuation from the text of the last prompt with a small model trained beforehand, and
    combines that with the time of the last access. Here a logistic model learns while it is used, from the turn, the
    lengths of prompt and new part, and whether the client runs a tool; predictions are in `NUM_CLASSES` classes. A
    probability decays with the age, by the mean time until a return.
    """

    NUM_CLASSES = 10
    RATE = 0.05

    def __init__(self) -> None:
        super().__init__()
        self._weights = [0.0] * 5
        self._open: dict[RunKey, tuple[list[float], int]] = {}
        """Features of predictions without an outcome, and the time of each."""
        self._mean_away = 100.0
        self._class = 0

    def released(self, nodes: Sequence[Run]) -> None:
        """List `nodes` by the prediction for their request; learn that predictions long ago did not come true."""
        deepest = nodes[0]
        num_new = sum(node.end - node.start for node in nodes if node.place is None)
        turn = 1 + max((node.place.turn for node in nodes if node.place is not None), default=0)
        size = deepest.content.page_size
        features = [
            1.0,
            log2(turn),
            log2(deepest.end * size) / 10,
            log2(1 + num_new * size) / 10,
            float(self.is_paused),
        ]
        self._class = min(self.NUM_CLASSES - 1, int(self._predicted(features) * self.NUM_CLASSES))
        super().released(nodes)
        self._open.pop(key := run_key(deepest), None)
        self._open[key] = features, self.now
        while self._open and (oldest := next(iter(self._open.items())))[1][1] < self.now - 5 * self._mean_away:
            del self._open[oldest[0]]
            self._learn(oldest[1][0], 0.0)

    def kind_of(self, node: Run, place: Place | None, turn: int, nodes: Sequence[Run]) -> Kind:
        """Return the class of the prediction."""
        return (self._class,)

    def pinned(self, nodes: Sequence[Run], path: Sequence[Run]) -> None:
        """Unlist `nodes`; learn that their conversation continued."""
        for node in nodes:
            self._continued(run_key(node))
        super().pinned(nodes, path)

    def came_back(self, place: Place, away: int) -> None:
        """Update the mean time until a return."""
        self._mean_away += (away - self._mean_away) / 200

    def worth(self, kind: Kind, age: int) -> float:
        """Return the probability that the conversation still continues."""
        predicted = (kind[0] + 0.5) / self.NUM_CLASSES
        waits = predicted * exp(-age / self._mean_away)
        return waits / (waits + 1.0 - predicted)

    def _continued(self, key: RunKey) -> None:
        if (prediction := self._open.pop(key, None)) is not None:
            self._learn(prediction[0], 1.0)

    def _predicted(self, features: list[float]) -> float:
        total = sum(weight * feature for weight, feature in zip(self._weights, features, strict=True))
        return 1.0 / (1.0 + exp(-max(-30.0, min(30.0, total))))

    def _learn(self, features: list[float], outcome: float) -> None:
        step = self.RATE * (outcome - self._predicted(features))
        self._weights = [weight + step * feature for weight, feature in zip(self._weights, features, strict=True)]


class SaeOrder(KindsOrder):
    """Evicts the lowest priority of several queues, whose parameters are learned from returns and evictions.

    A run of a conversation is worth the probability that it returns at its age, by log-normal times between turns.
    A run that several conversations share is worth a power of its depth instead. Both are multiplied by the weight of
    the run's type, which rises with returns and falls with evictions that were right. The publication knows types of
    tokens from chat templates; here types are the first run of a prompt, older turns, new parts, and new parts whose
    client runs a tool.
    """

    RATE = 0.02

    def __init__(self) -> None:
        super().__init__()
        self._type_worth = [0.5] * 4
        self._log_mean, self._log_square = log(50.0), log(50.0) ** 2 + 1.0
        self._power = 0.5

    def kind_of(self, node: Run, place: Place | None, turn: int, nodes: Sequence[Run]) -> Kind:
        """Return queue (1 for shared runs), type, and the depth as a power of 2."""
        is_shared = len(node.children or ()) > 1
        what = 0 if not node.start else 1 if place is not None else 2 + self.is_paused
        return (int(is_shared), what, node.start.bit_length() if is_shared else 0)

    def came_back(self, place: Place, away: int) -> None:
        """Learn from a return: times between turns, the weight of the type, and that depth matters less."""
        at = log(max(1, away))
        self._log_mean += self.RATE * (at - self._log_mean)
        self._log_square += self.RATE * (at * at - self._log_square)
        what = place.kind[1]
        self._type_worth[what] += self.RATE * (1.0 - self._type_worth[what])
        if place.kind[0]:
            self._power = max(0.05, self._power * (1.0 - self.RATE))

    def removed(self, node: Run) -> None:
        """Unlist `node`; its type is worth less until it returns."""
        what = node.place.kind[1]
        self._type_worth[what] -= self.RATE * self._type_worth[what]
        if node.place.kind[0]:
            self._power = min(2.0, self._power * (1.0 + self.RATE))
        super().removed(node)

    def worth(self, kind: Kind, age: int) -> float:
        """Return the priority of a run."""
        is_shared, what, depth = kind
        if is_shared:
            return self._type_worth[what] * exp(-self._power * depth)
        spread = sqrt(max(0.1, self._log_square - self._log_mean**2))
        return self._type_worth[what] * erfc((log(max(1, age)) - self._log_mean) / (spread * sqrt(2.0))) / 2


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

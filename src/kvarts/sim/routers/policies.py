"""Policies: kvarts' own (round robin, by load, by prefix); the routers of llm-d, SGLang, vLLM, AIBrix and Dynamo.

A policy has a name, such as `llm-d:prefix=3,queue=2`, or `module:Class` for your own. Names and defaults of those
routers are theirs (Dynamo as of 1.6.1). Where they count characters, a token counts as four
of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from math import ceil, exp
from typing import Any, Literal

import msgspec

from kvarts.base.errors import ConfigError, did_you_mean, problem_of
from kvarts.base.limits import brief, check_number, check_whole
from kvarts.base.settings import SettingError
from kvarts.base.user_code import code_named, is_code_name
from kvarts.core.sched.rank_loads import RANKS_STALENESS_NS, RankLoads
from kvarts.sim.routers.directory import IndexRule
from kvarts.sim.routers.view import Asked, Needs, View

__all__ = [
    "POLICIES",
    "AibrixPrefix",
    "BySession",
    "DynamoKv",
    "LeastLoaded",
    "LlmD",
    "PowerOfTwo",
    "PrefixAware",
    "ProductionStackKv",
    "ProductionStackPrefix",
    "RoundRobinPolicy",
    "SglangCacheAware",
    "VllmRanks",
    "policy_of",
    "ring_order",
    "split_names",
]

CHARS_PER_TOKEN = 4
NS_PER_S = 1_000_000_000


class RoundRobinPolicy(msgspec.Struct):
    """Sends requests to the workers in turn."""

    next_turn: int = 0

    def choose(self, asked: Asked, view: View) -> int:
        """Return the worker after the one chosen last."""
        place = self.next_turn % len(view.workers)
        self.next_turn = place + 1
        return view.workers[place]


class LeastLoaded(msgspec.Struct, frozen=True):
    """Chooses the worker with the fewest requests in flight."""

    def choose(self, asked: Asked, view: View) -> int:
        """Return that worker; among equals, the one with the lowest number."""
        return view.least(view.num_requests)


class PowerOfTwo(msgspec.Struct, frozen=True):
    """Draws two workers at random and chooses the one with fewer requests in flight."""

    def choose(self, asked: Asked, view: View) -> int:
        """Return that worker."""
        if len(view.workers) == 1:
            return view.workers[0]
        return view.any_least(view.num_requests, view.random.sample(view.workers, 2))


class BySession(msgspec.Struct, frozen=True):
    """Sends all requests of a session to one worker, by rendezvous hashing, and others to the lowest rate."""

    def choose(self, asked: Asked, view: View) -> int:
        """Return the worker of the session."""
        if asked.session is None:
            return view.least(view.rates(asked.now_ns))
        session = asked.session
        return max(view.workers, key=lambda worker: ring_order(session, worker))


class PrefixAware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Chooses the worker with the lowest cost: the prompt pages that it would have to compute, plus its load.

    A page in host memory saves `host_weight` of a page, and one on disk `disk_weight`, because they must be loaded. If
    workers read from each other, a page that only others have saves the share of its time that reading it is sooner.
    Load is the pages in use plus the pages that all tokens of waiting requests would fill, in the same unit. So an idle
    worker without the prefix wins over a loaded one with it as soon as the load exceeds the pages saved by the hit.
    """

    host_weight: float = 0.75
    disk_weight: float = 0.25

    needs = Needs(pages="schedule", metrics=True)

    def __post_init__(self) -> None:
        check_number(self.host_weight, "host_weight", most=1.0)
        check_number(self.disk_weight, "disk_weight", most=1.0)

    def choose(self, asked: Asked, view: View) -> int:
        """Return the worker with the lowest cost; among equals, the one with the lowest number."""
        used, waiting = view.metrics.used_pages, view.metrics.waiting_pages
        cost: list[float] = [a + b for a, b in zip(used, waiting, strict=True)]
        limit = (asked.num_tokens - 1) // view.page_size
        weights = view.weights_below(self.host_weight, self.disk_weight)
        for worker, pages in view.pages(asked, limit).items():
            cost[worker] -= pages[0]
            for saved, below in zip(weights, pages[1:], strict=False):
                cost[worker] -= saved * below
        for worker, saved in enumerate(view.saved_by_peers(asked, limit)):
            cost[worker] -= saved
        return view.least(cost)


def ring_order(session: str, worker: int) -> bytes:
    """Return the sort key of a worker for a session: the greatest takes it. Equal keys in every process."""
    return blake2b(f"{session}\0{worker}".encode(), digest_size=8).digest()


class SglangCacheAware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """SGLang gateway, `cache_aware`, with the defaults of its command line.

    If the most and the fewest requests in flight differ by more than `balance_abs_threshold`, and by the factor
    `balance_rel_threshold`, the least loaded worker is chosen. Otherwise, the worker with the longest match in a tree
    of placed texts, if its share of the text exceeds `cache_threshold`; else the least loaded one. The tree of
    each worker is cut to `max_tree_size` characters every `eviction_interval` seconds.
    """

    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    eviction_interval: float = 60.0
    max_tree_size: int = 67_108_864

    def __post_init__(self) -> None:
        check_number(self.cache_threshold, "cache_threshold", most=1.0)
        check_whole(self.balance_abs_threshold, "balance_abs_threshold", least=0)
        check_number(self.balance_rel_threshold, "balance_rel_threshold", most=1e9)
        check_number(self.eviction_interval, "eviction_interval", most=1e9)
        check_whole(self.max_tree_size, "max_tree_size", least=CHARS_PER_TOKEN)

    @property
    def needs(self) -> Needs:
        """A tree of tokens."""
        return Needs(
            placements=IndexRule(
                block_tokens=1,
                most_blocks=self.max_tree_size // CHARS_PER_TOKEN,
                every_ns=round(self.eviction_interval * NS_PER_S),
            )
        )

    def choose(self, asked: Asked, view: View) -> int:
        """Return the worker of the longest match, or the least loaded one."""
        loads = [view.num_requests[worker] for worker in view.workers]
        most, least = max(loads), min(loads)
        if not (most - least > self.balance_abs_threshold and most > self.balance_rel_threshold * least):
            found, num_tokens = view.placements(asked)
            longest = max(found.values(), default=0)
            if num_tokens and longest / num_tokens > self.cache_threshold:
                return next(worker for worker in found if found[worker] == longest)
        return view.least(view.num_requests)


class ProductionStackPrefix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM production stack, `prefixaware`: a random server of those with the longest match, or without one, of all.

    Matches are in chunks of `chunk_size` characters, in a trie from which nothing is ever evicted.
    """

    chunk_size: int = 128

    def __post_init__(self) -> None:
        check_whole(self.chunk_size, "chunk_size", least=CHARS_PER_TOKEN)

    @property
    def needs(self) -> Needs:
        """A trie of chunks."""
        return Needs(placements=IndexRule(block_tokens=self.chunk_size // CHARS_PER_TOKEN))

    def choose(self, asked: Asked, view: View) -> int:
        """Return one of the workers of the longest match."""
        found, _ = view.placements(asked)
        longest = max(found.values(), default=0)
        among = [worker for worker in view.workers if found.get(worker) == longest] if longest else view.workers
        return view.any_of(among)


class ProductionStackKv(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM production stack, `kvaware`: the server where LMCache holds the longest prefix of the prompt.

    Matches are in whole chunks of `chunk_tokens`. If the match is empty, or shorter than the prompt minus `threshold`
    tokens, the server of the session is chosen, or without a session the one with the lowest request rate.
    """

    threshold: int = 2000
    chunk_tokens: int = 256

    needs = Needs(pages="end")

    def __post_init__(self) -> None:
        check_whole(self.threshold, "threshold", least=0)
        check_whole(self.chunk_tokens, "chunk_tokens")

    def choose(self, asked: Asked, view: View) -> int:
        """Return a worker of the longest match, or that of the session."""
        pages = {worker: sum(found) for worker, found in view.pages(asked, asked.num_tokens // view.page_size).items()}
        chunks = {worker: count * view.page_size // self.chunk_tokens for worker, count in pages.items()}
        longest = max(chunks.values(), default=0)
        if longest * self.chunk_tokens < max(asked.num_tokens - self.threshold, 0) or not longest:
            return BySession().choose(asked, view)
        return view.any_of([worker for worker in view.workers if chunks.get(worker) == longest])


class AibrixPrefix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AIBrix, `prefix-cache`: the longest match among the workers that are not much busier than the others.

    If the most requests in flight exceed 2 * (mean + 1), and the fewest by at least 8, the least loaded
    worker is chosen. Otherwise, in order of matched share and then of load, the first with at most the mean plus
    `std_factor` standard deviations of requests; without one, the least loaded.
    """

    block_tokens: int = 16
    std_factor: float = 1.0

    def __post_init__(self) -> None:
        check_whole(self.block_tokens, "block_tokens")
        check_number(self.std_factor, "std_factor", most=1e6)

    @property
    def needs(self) -> Needs:
        """An index of blocks."""
        return Needs(placements=IndexRule(block_tokens=self.block_tokens))

    def choose(self, asked: Asked, view: View) -> int:
        """Return the worker."""
        from statistics import fmean, pstdev  # a mock starts without it

        counts = view.num_requests
        loads = [counts[worker] for worker in view.workers]
        most, least, mean = max(loads), min(loads), fmean(loads)
        if not (most > 2 * (mean + 1) and most - least >= 8):
            found, num_blocks = view.placements(asked)
            bound = mean + self.std_factor * pstdev(loads)
            fit = [worker for worker in view.workers if worker in found and counts[worker] <= bound]
            if fit:
                share = max((found[worker] * 100 // num_blocks, -counts[worker]) for worker in fit)
                return view.any_of(
                    [worker for worker in fit if (found[worker] * 100 // num_blocks, -counts[worker]) == share]
                )
        return view.any_least(counts)


class VllmRanks(msgspec.Struct, frozen=True):
    """vLLM 0.32 with `--data-parallel-size`: the front end's choice of a rank, as of RankLoads."""

    needs = Needs(metrics=True)

    def open(self) -> OpenVllmRanks:
        """Return the policy with its own state."""
        return OpenVllmRanks(self.needs)


class OpenVllmRanks:
    """One front end."""

    def __init__(self, needs: Needs) -> None:
        self.needs = needs
        self._loads = RankLoads()
        self._num_reports = 0

    def choose(self, asked: Asked, view: View) -> int:
        """Return the rank with the lowest score."""
        metrics = view.metrics
        if metrics.num_reports != self._num_reports:
            self._num_reports = metrics.num_reports
            self._loads.forget_placed()
        return self._loads.choose(view.workers, view.num_requests, metrics.running, metrics.waiting, metrics.usage)


class DynamoKv(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """cost = prefill_load_scale * max(0, prefill blocks - hits) + blocks in flight + weight * requests; least wins.

    Prefill blocks are the uncached prompt tokens in flight plus the prompt tokens of this request, in blocks. Hits:
    blocks on the device times `overlap_score_credit`, plus those in host memory and on disk times their weights. The
    credit of a worker shrinks with `overlap_score_credit_decay` as it has more to prefill than the worker with the
    least. Blocks in flight are the distinct blocks of all requests of the worker, including this one. Ties are broken
    at random. With a `temperature`, all choices are random, with higher probability for lower costs.

    `role`: a decode pool counts only the blocks, each request's separately; a prefill pool counts only the prefill.
    """

    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    prefill_load_scale: float = 1.0
    decode_active_request_weight: float = 0.0
    host_weight: float = 0.75
    disk_weight: float = 0.25
    temperature: float = 0.0
    role: Literal["mixed", "prefill", "decode"] = "mixed"

    def __post_init__(self) -> None:
        for field in self.__struct_fields__[:-1]:
            check_number(getattr(self, field), field, most=1e9)
        if self.role not in ("mixed", "prefill", "decode"):
            raise SettingError(f"must be 'mixed', 'prefill' or 'decode', got {self.role!r}", "role")

    @property
    def needs(self) -> Needs:
        """Cache events of ended steps, and the blocks in flight."""
        if self.role == "decode":
            return Needs()
        return Needs(pages="end", prefills=True, blocks=self.role == "mixed")

    def choose(self, asked: Asked, view: View) -> int:
        """Return a worker of the least cost."""
        costs = self.costs(asked, view)
        if not self.temperature:
            return view.any_least(costs)
        among = [costs[worker] for worker in view.workers]
        least = min(among)
        scale = (max(among) - least) * self.temperature
        if not scale:
            return view.any_of(view.workers)
        weights = [exp((least - cost) / scale) for cost in among]
        return view.random.choices(view.workers, weights)[0]

    def costs(self, asked: Asked, view: View) -> list[float]:
        """Return the costs, indexed by worker."""
        size = view.page_size
        num_blocks = asked.num_tokens // size
        requests = view.num_requests
        weight = self.decode_active_request_weight
        if self.role == "decode":
            costs = [float(blocks + num_blocks) for blocks in view.num_blocks]
        else:
            prefill = view.prefill_tokens
            weights = view.weights_below(self.host_weight, self.disk_weight)
            blocks = [(tokens + asked.num_tokens) / size for tokens in prefill]
            for worker, pages in view.pages(asked, num_blocks).items():
                blocks[worker] -= self._credit(asked, view, worker) * pages[0]
                for saved, pages_below in zip(weights, pages[1:], strict=False):
                    blocks[worker] -= saved * pages_below
            costs = [self.prefill_load_scale * max(0.0, each) for each in blocks]
            if view.active is not None:
                for worker, in_flight in view.active.num_blocks.items():
                    costs[worker] += in_flight
                for worker, shared in view.active.shared(asked.content, num_blocks).items():
                    costs[worker] -= shared
                costs = [cost + num_blocks for cost in costs]
        return [cost + weight * count for cost, count in zip(costs, requests, strict=True)] if weight else costs

    def cached_tokens(self, asked: Asked, worker: int, view: View) -> int:
        """Return the tokens of the blocks that `worker` has on its device."""
        found = view.pages(asked, asked.num_tokens // view.page_size).get(worker)
        return 0 if found is None else found[0] * view.page_size

    def _credit(self, asked: Asked, view: View, worker: int) -> float:
        if not self.overlap_score_credit_decay:
            return self.overlap_score_credit
        prefill = view.prefill_tokens
        more = (prefill[worker] - min(map(prefill.__getitem__, view.workers))) / view.page_size
        share = more / ceil(asked.num_tokens / view.page_size)
        return self.overlap_score_credit / (1 + self.overlap_score_credit_decay * share)


Scores = list[float]

MOST_PREFIX_TOKENS = 131_072
MOST_PREFIX_BLOCKS = 31_250
LONG_TOKENS = 8192
MOST_TOKENS = 4_194_304
MOST_WAITING = 128
MOST_COLD = 1024
CPU_WEIGHT = 0.8


class LlmD(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each field but `length` is the weight of a scorer; without any, the weights are queue 2, kv 2 and prefix 3.

    `prefix`: share of the prompt's blocks that were placed there before, by a placement index; with `length` w, it is
    (1 - w) of that plus w times the squared ratio of matched tokens to 8,192. `precise`: the same share by cache
    events, where blocks in tiers below the device count 0.8. `queue`: waiting requests; the fewest score 1 and the most
    0. `running`: the same for running requests. `kv`: share of free pages. `active`: requests in flight from this
    router. `tokens`: prompt tokens in flight, relative to 4,194,304. `load`: 0.5, decreasing to 0 with up to 128
    waiting requests. `cold`: a request whose prefix no worker has is placed on the worker that least recently received
    such a request.
    """

    prefix: float | None = None
    queue: float | None = None
    kv: float | None = None
    precise: float | None = None
    running: float | None = None
    active: float | None = None
    tokens: float | None = None
    load: float | None = None
    cold: float | None = None
    length: float = 0.0

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if value is not None:
                check_number(value, field, most=1.0 if field == "length" else 1e6)

    @property
    def weights(self) -> dict[str, float]:
        """The scorers in use and their weights."""
        given = {field: getattr(self, field) for field in self.__struct_fields__ if field != "length"}
        weights = {field: weight for field, weight in given.items() if weight is not None}
        return weights or {"prefix": 3.0, "queue": 2.0, "kv": 2.0}

    @property
    def needs(self) -> Needs:
        """The data that the scorers in use read."""
        used = set(self.weights)
        return Needs(
            pages="end" if "precise" in used else "no",
            placements=IndexRule(most_tokens=MOST_PREFIX_TOKENS, most_blocks=MOST_PREFIX_BLOCKS)
            if used & {"prefix", "cold"}
            else None,
            metrics=bool(used & set(OF_METRICS)),
            prefills="tokens" in used,
        )

    def open(self) -> OpenLlmD:
        """Return the policy with its own state."""
        return OpenLlmD(self)


class OpenLlmD:
    """One llm-d router. Owner of the state of its scorers between requests."""

    def __init__(self, settings: LlmD) -> None:
        self._settings = settings
        self.needs = settings.needs
        scorers: dict[str, Callable[[Asked, View], Scores | None]] = {
            "prefix": self._prefix,
            "precise": self._precise,
            "active": lambda asked, view: _active(view),
            "tokens": lambda asked, view: [
                1 - min(tokens + asked.num_tokens, MOST_TOKENS) / MOST_TOKENS for tokens in view.prefill_tokens
            ],
            "cold": self._cold,
        }
        self._scorers = [(weight, scorers[name]) for name, weight in settings.weights.items() if name in scorers]
        self._metric_scorers = [
            (weight, OF_METRICS[name]) for name, weight in settings.weights.items() if name in OF_METRICS
        ]
        self._is_cold = False
        self._cold_last: OrderedDict[int, None] = OrderedDict()
        """Workers that received a request without a hit, the least recent first."""
        self._base: tuple[Any, Scores] = None, []
        """Version of the metrics, and the sum of the scorers that read only metrics, computed from it."""

    def choose(self, asked: Asked, view: View) -> int:
        """Return a worker of the highest score."""
        scores = self._of_metrics(view)
        for weight, scorer in self._scorers:
            of_scorer = scorer(asked, view)
            if of_scorer is not None:
                scores = [score + weight * each for score, each in zip(scores, of_scorer, strict=True)]
        most = max(map(scores.__getitem__, view.workers))
        chosen = view.any_of([worker for worker in view.workers if scores[worker] == most])
        if self._is_cold:
            self._cold_last.pop(chosen, None)
            self._cold_last[chosen] = None
            if len(self._cold_last) > MOST_COLD:
                self._cold_last.popitem(last=False)
        return chosen

    def _of_metrics(self, view: View) -> Scores:
        made_from = view.metrics.num_reports, len(view.num_requests), tuple(view.workers)
        if self._base[0] != made_from:
            scores = [0.0] * len(view.num_requests)
            for weight, scorer in self._metric_scorers:
                scores = [score + weight * each for score, each in zip(scores, scorer(view), strict=True)]
            self._base = made_from, scores
        return self._base[1]

    def _prefix(self, asked: Asked, view: View) -> Scores | None:
        found, num_blocks = view.placements(asked)
        if not found:
            return None
        assert view.index is not None
        length = self._settings.length
        scores = [0.0] * len(view.num_requests)
        for worker, blocks in found.items():
            scores[worker] = (1 - length) * blocks / num_blocks
            scores[worker] += length * min(1.0, blocks * view.index.block_tokens / LONG_TOKENS) ** 2
        return scores

    def _precise(self, asked: Asked, view: View) -> Scores | None:
        num_blocks = asked.num_tokens // view.page_size
        scores = [0.0] * len(view.num_requests)
        for worker, (pages, *below) in view.pages(asked, num_blocks).items():
            scores[worker] = (pages + CPU_WEIGHT * sum(below)) / num_blocks
        return scores

    def _cold(self, asked: Asked, view: View) -> Scores | None:
        self._is_cold = not view.placements(asked)[0]
        scores = [0.5] * len(view.num_requests)
        num_workers = len(view.workers)
        if not self._is_cold or num_workers == 1:
            return scores
        never = [worker for worker in view.workers if worker not in self._cold_last]
        ranked = never + [worker for worker in self._cold_last if worker in view.workers]
        for rank, worker in enumerate(ranked):
            scores[worker] = 1 - rank / (num_workers - 1)
        return scores


def _spread(values: list[int], view: View) -> Scores:
    """Return 1 for the least value and 0 for the largest, linearly; 1 for all if they are equal."""
    among = [values[worker] for worker in view.workers]
    most, least = max(among), min(among)
    if most == least:
        return [1.0] * len(values)
    return [(most - value) / (most - least) for value in values]


def _active(view: View) -> Scores:
    """Return 1 for a worker without requests in flight, otherwise its relative distance from the most loaded worker."""
    counts = view.num_requests
    most = max(map(counts.__getitem__, view.workers)) or 1
    return [1.0 if not count else (most - count) / most for count in counts]


OF_METRICS: dict[str, Callable[[View], Scores]] = {
    "queue": lambda view: _spread(view.metrics.waiting, view),
    "kv": lambda view: [1 - usage for usage in view.metrics.usage],
    "running": lambda view: _spread(view.metrics.running, view),
    "load": lambda view: [0.5 * (1 - min(waiting, MOST_WAITING) / MOST_WAITING) for waiting in view.metrics.waiting],
}
"""Scorers that read only metrics."""


POLICIES: dict[str, type[msgspec.Struct]] = {
    "round-robin": RoundRobinPolicy,
    "least-loaded": LeastLoaded,
    "power-of-two": PowerOfTwo,
    "session": BySession,
    "prefix": PrefixAware,
    "dynamo-kv": DynamoKv,
    "llm-d": LlmD,
    "sglang-cache-aware": SglangCacheAware,
    "production-stack-prefix": ProductionStackPrefix,
    "production-stack-kv": ProductionStackKv,
    "aibrix-prefix": AibrixPrefix,
    "vllm-ranks": VllmRanks,
}

STALENESS_NS = {"llm-d": 50_000_000, "vllm-ranks": RANKS_STALENESS_NS}
"""Default maximum age of metrics: llm-d polls them every 50 ms, vLLM's ranks report theirs every 100 ms. Other policies
see current ones."""


def split_names(text: str) -> list[str]:
    """Return the routers in a comma-separated list, whose options may themselves be separated by commas."""
    names: list[str] = []
    for part in text.split(","):
        if names and "=" in part and ":" not in part:
            names[-1] += f",{part}"
        else:
            names.append(part.strip())
    return names


def policy_of(router: str | Callable[[], Any]) -> Any:
    """Return a new RouterPolicy: by name, or made by a class or a function without arguments.

    Raise ConfigError for the field `router`.
    """
    if callable(router):
        return _made(router, getattr(router, "__name__", repr(router)))
    if is_code_name(router) and router.partition(":")[0] not in POLICIES:
        return _imported(router)
    name, _, options = router.partition(":")
    struct = POLICIES.get(name)
    if struct is None:
        hint = did_you_mean(name, list(POLICIES)) or "For one of your own, give module:Class."
        raise SettingError(f"must be one of {', '.join(POLICIES)}, got {name!r}", "router", hint=hint)
    values: dict[str, Any] = {}
    known = {each.name: each for each in msgspec.structs.fields(struct)}
    known.pop("next_turn", None)
    for part in options.split(",") if options else ():
        key, equals, value = part.partition("=")
        if not equals or key not in known:
            hint = f"Known: {', '.join(known)}." if known else f"{name} has no options."
            raise SettingError(f"{name} has no option {part!r}", "router", hint=hint)
        if key in values:
            raise SettingError(f"{name} has {key} twice", "router")
        values[key] = value
    try:
        made: Any = msgspec.convert(values, struct, strict=False)
    except msgspec.ValidationError as error:
        raise SettingError(f"{name}: {problem_of(error)}", "router", hint="Write NAME:key=value,key=value.") from error
    except ConfigError as error:
        raise SettingError(f"{name}: {error.field} {error.what}", "router", hint=error.hint) from error
    return made.open() if hasattr(made, "open") else made


def _imported(text: str) -> Any:
    hint = "Name a policy, or module:Class of a module that Python finds."
    return _made(code_named(text, "router", hint), text)


def _made(maker: Callable[[], Any], name: str) -> Any:
    try:
        made = maker()
    except TypeError as error:
        hint = "Give a class, or a function without arguments that makes one."
        raise SettingError(f"{name} makes no router: {error}", "router", hint=hint) from error
    return _checked(made, name)


def _checked(policy: Any, name: str) -> Any:
    if not callable(getattr(policy, "choose", None)):
        hint = "See kvarts.policies.RouterPolicy for what a policy has."
        raise SettingError(f"{name} has no choose", "router", hint=hint)
    needs = getattr(policy, "needs", None)
    if needs is not None and not hasattr(needs, "pages"):
        hint = "Write needs = Needs(metrics=True), with Needs of kvarts."
        raise SettingError(f"{name} has needs that are not a Needs: {brief(needs)}", "router", hint=hint)
    return policy

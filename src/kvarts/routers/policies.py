"""Policies: kvarts' own (round robin, by load, by prefix); the routers of SGLang, vLLM, its stack, AIBrix and Dynamo.

Names and defaults of those routers are theirs (Dynamo as of 1.6.1). Where they count characters, a token counts as four
of them.
"""

from __future__ import annotations

from hashlib import blake2b
from math import ceil, exp
from statistics import fmean, pstdev
from typing import Literal

import msgspec

from kvarts.limits import check_number, check_whole
from kvarts.routers.approximate import IndexRule
from kvarts.routers.view import Asked, Needs, View
from kvarts.sched.rank_loads import RankLoads
from kvarts.settings import SettingError

__all__ = [
    "AibrixPrefix",
    "BySession",
    "DynamoKv",
    "LeastLoaded",
    "PowerOfTwo",
    "PrefixAware",
    "ProductionStackKv",
    "ProductionStackPrefix",
    "RoundRobinPolicy",
    "SglangCacheAware",
    "VllmRanks",
    "ring_order",
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
        for worker, pages in view.pages(asked, limit).items():
            cost[worker] -= pages[0]
            for saved, below in zip((self.host_weight, self.disk_weight), pages[1:], strict=False):
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
    eviction_interval: float = 120.0
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
                return view.any_of([worker for worker in view.workers if found.get(worker) == longest])
        return view.any_least(view.num_requests)


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
        view.num_tied += 1
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
            blocks = [(tokens + asked.num_tokens) / size for tokens in prefill]
            for worker, pages in view.pages(asked, num_blocks).items():
                blocks[worker] -= self._credit(asked, view, worker) * pages[0]
                for saved, pages_below in zip((self.host_weight, self.disk_weight), pages[1:], strict=False):
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

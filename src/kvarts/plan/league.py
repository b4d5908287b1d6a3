"""Comparison of eviction policies on one trace: hits one request at a time, and latencies under load.

Both use the engine's own tree and pool. With LRU, the hits one request at a time equal the curve. With KV groups, the
parts of all groups share one list, in the eviction order of the engine: a running request holds, in each group, the
parts that its next token needs, and one that does not fit is refused and finds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvarts.errors import ConfigError
from kvarts.kv.eviction import EvictionOrder, LruOrder
from kvarts.kv.group_needs import GroupNeeds
from kvarts.kv.page_cache import PageCache
from kvarts.kv.pool import CountPool
from kvarts.kv.run_cache import RunCache
from kvarts.kv.tree import PrefixTree
from kvarts.plan import orders
from kvarts.plan.cache import CachePlan
from kvarts.plan.orders import HintedOrder, SoonestReturnOrder, finishing
from kvarts.plan.replays import share_kept, summary_of
from kvarts.plan.weighted import AutoOrder
from kvarts.processes import Processes
from kvarts.request import Request
from kvarts.rooms import code_named
from kvarts.sched.prefill import AlignedChunks
from kvarts.sim.config import ReplayConfig
from kvarts.traffic.trace import Trace

__all__ = ["ALL_POLICIES", "POLICIES", "GroupHits", "League", "find_policy", "serial_hits"]

MakeOrder = Callable[[], EvictionOrder]

POLICIES: dict[str, MakeOrder] = {
    "lru": LruOrder,
    "auto": AutoOrder,
    "s3-fifo": orders.S3FifoOrder,
    "arc": orders.ArcOrder,
    "soonest-return": SoonestReturnOrder,
    "hinted": HintedOrder,
}
"""Policies that need nothing beyond the calls of `EvictionOrder` and the hints of requests, by command-line names."""

SESSION_AWARE = "session-aware"
ALL_POLICIES = (*POLICIES, SESSION_AWARE)


class League:
    """Comparison of policies on the trace of `plan`: at sizes one request at a time, and in replays under `config`.

    `command` returns the command line that shows the hit ratio of a policy at a size; `replay_command` returns the one
    that replays it. `processes`: those that replay, which share the trace; default: this one.
    """

    def __init__(
        self,
        plan: CachePlan,
        policies: Sequence[str],
        *,
        config: ReplayConfig | None = None,
        command: Callable[[str, int], str],
        replay_command: Callable[[str, int], str],
        on_replay: Callable[[], object] | None = None,
        processes: Processes | None = None,
    ) -> None:
        self._plan = plan
        self._processes = Processes(shared=plan.trace) if processes is None else processes
        self._makers = {name: find_policy(name, plan.trace) for name in dict.fromkeys(("lru", *policies))}
        self._config = config
        self._command = command
        self._replay_command = replay_command
        self._on_replay = on_replay

    def to_builtins(self, sizes: Sequence[int]) -> list[dict[str, Any]]:
        """Return a row for each size and policy, and with a `config` also rows of replays with latencies, JSON-able.

        Replays use the same sizes, capped at the pages of `config`.
        """
        cases = [(name, size) for size in sizes for name in self._makers]
        tasks = [(self._plan.page_size, size, self._makers[name]) for name, size in cases]
        hits = self._processes.all(_hits, tasks)
        rows = [self._row(*case, found) for case, found in zip(cases, hits, strict=True)]
        if self._config is None:
            return rows
        config = self._config.certain
        replayed = sorted({min(size, config.num_pages) for size in sizes})
        cases = [(name, size) for size in replayed for name in self._makers]
        changed = [msgspec.structs.replace(config, eviction=self._makers[name], num_pages=size) for name, size in cases]
        for _ in cases:
            if self._on_replay is not None:
                self._on_replay()
        summaries = self._processes.all(summary_of, changed)
        return rows + [self._replayed(*case, summary) for case, summary in zip(cases, summaries, strict=True)]

    def _row(self, name: str, num_pages: int, hits: int) -> dict[str, Any]:
        plan = self._plan
        point = plan.point(num_pages)
        hit_ratio = hits * plan.page_size / plan.num_prompt_tokens if plan.num_prompt_tokens else 0.0
        gap = point["optimum_hit_ratio"] - point["hit_ratio"]
        assert hits <= plan.optimum.hit_pages(num_pages), f"{name} finds more than the optimum"
        return {
            "policy": name,
            "pages": num_pages,
            "hit_ratio": hit_ratio,
            "lru_hit_ratio": point["hit_ratio"],
            "optimum_hit_ratio": point["optimum_hit_ratio"],
            "gap_closed": (hit_ratio - point["hit_ratio"]) / gap if gap > 0 else None,
            "command": self._command(name, num_pages),
        }

    def _replayed(self, name: str, num_pages: int, summary: dict[str, Any]) -> dict[str, Any]:
        goodput = summary["goodput"]
        return {
            "policy": name,
            "pages": num_pages,
            "replayed": True,
            "hit_ratio": summary["prefix_hit_ratio"],
            "ttft_ms": summary["ttft_ms"],
            "goodput_per_s": None if goodput is None else goodput["requests_per_s"],
            "slo_ratio": share_kept(summary),
            "num_evicted_pages": summary["num_evicted_pages"],
            "command": self._replay_command(name, num_pages),
        }


def find_policy(name: str, trace: Trace | None) -> MakeOrder:
    """Return the factory of an order: a name of POLICIES, or `module:Class`. Raise ConfigError for anything else.

    The session-aware order takes the ends of sessions from `trace`; None where requests are not known beforehand.
    """
    if name == SESSION_AWARE and trace is not None:
        return finishing(trace)
    if name == SESSION_AWARE:
        raise ConfigError(
            f"{name!r} needs a trace, which has the ends of sessions",
            field="policy",
            hint="Give hinted, and let clients send a ttl.",
        )
    if name in POLICIES:
        return POLICIES[name]
    known = ", ".join(ALL_POLICIES)
    hint = f"Give one of {known}, or module:Class of an EvictionOrder that Python can import."
    if ":" not in name:
        raise ConfigError(f"{name!r} is not a policy", field="policy", hint=hint)
    try:
        make: MakeOrder = code_named(name)
    except ConfigError as error:
        raise ConfigError(error.what, field="policy", hint=hint) from error
    try:
        make().released  # noqa: B018  (found before anything is replayed)
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"{name!r} makes no EvictionOrder: {error}", field="policy", hint=hint) from error
    return make


def _hits(trace: Trace, task: tuple[int, int, MakeOrder]) -> int:
    return serial_hits(trace, *task)


def serial_hits(trace: Trace, page_size: int, num_pages: int, make_order: MakeOrder) -> int:
    """Return the number of pages that all requests find together; with LruOrder this is the curve at `num_pages`."""
    cache = PageCache(CountPool(num_pages), PrefixTree(make_order()))
    hits = 0
    for owner, request in enumerate(trace):
        content = trace.content(request, page_size=page_size, owner=owner)
        computed = (request.num_prompt_tokens + request.num_output_tokens - 1) // page_size
        known = min(content.num_known_pages, computed, num_pages)
        cache.set_time(request.arrival_ns)
        match = cache.match(content, known)
        hits += min(match.num_pages, (request.num_prompt_tokens - 1) // page_size)
        holding = cache.open(match)
        cache.grow(holding, known)
        cache.close(holding, known, known)
    return hits


class GroupHits:
    """Hits of `trace` on an engine of `config`, which counts KV groups. Each size is simulated once and cached."""

    def __init__(self, trace: Trace, config: ReplayConfig) -> None:
        self._trace = trace
        self._memory = config.memory
        self._page_size = config.page_size
        self._at_branches = config.snapshots == "branches"
        self._make_order = config.eviction
        self._most_new = config.max_num_batched_tokens
        aligns = self._memory.aligns
        self._aligned = AlignedChunks(config.page_size, config.max_num_batched_tokens) if aligns else None
        self._needs = GroupNeeds(self._memory, page_size=config.page_size, most_new=config.max_num_batched_tokens)
        self._num_prompt_tokens = sum(request.num_prompt_tokens for request in trace)
        self._found: dict[int, int] = {}

    def hit_ratio(self, num_pages: int) -> float:
        """Return the share of prompt tokens that are hits in as much memory as `num_pages` whole pages occupy."""
        return self.hit_pages(num_pages) * self._page_size / self._num_prompt_tokens

    def hit_pages(self, num_pages: int) -> int:
        """Return the number of pages that all requests find together."""
        found = self._found.get(num_pages)
        if found is None:
            found = self._found[num_pages] = self._look(num_pages)
        return found

    def _look(self, num_pages: int) -> int:
        memory, page_size = self._memory, self._page_size
        num_blocks = memory.num_blocks(num_pages)
        total_bytes = num_blocks * memory.block_bytes
        cache = RunCache(
            memory,
            page_size=page_size,
            total_bytes=total_bytes,
            eviction_order=None if self._make_order is LruOrder else self._make_order(),
            at_branches=self._at_branches,
        )
        num_found = 0
        for index, request in enumerate(self._trace):
            num_prompt, num_output = request.num_prompt_tokens, request.num_output_tokens
            if self._needs.of_request(num_prompt, num_output) <= num_blocks:
                content = self._trace.content(request, page_size=page_size, owner=index)
                cache.now_ns = request.arrival_ns
                num_found += self._serve(cache, Request(index, content, num_prompt, num_output))
        return num_found

    def _serve(self, cache: RunCache, request: Request) -> int:
        """Compute the tokens of `request`; return the number of pages that it found."""
        page_size, most_new, num_prompt = self._page_size, self._most_new, request.num_prompt_tokens
        num_tokens = max(num_prompt, num_prompt + request.max_tokens - 1)
        match = cache.match(request.content, (num_prompt - 1) // page_size)
        holding = cache.begin(request.content, match)
        at = match.num_pages * page_size
        while at < num_tokens:
            # A chunk of the prompt, or generated tokens up to the end of a page.
            is_prompt = at < num_prompt
            end = min(num_prompt, at + most_new) if is_prompt else min(num_tokens, at + page_size - at % page_size)
            if end - at > most_new:
                end = at + most_new
            if is_prompt and self._aligned is not None:
                end = at + self._aligned.num_tokens(request, at, end - at, holding.branch)
            cache.extend(holding, end, is_end=is_prompt and end == num_prompt)
            cache.settle(holding, end)
            at = end
        cache.close(holding, at // page_size)
        cache.computed.clear()  # its steps are over
        return match.num_pages

"""The cache curves of a trace in one value, which needs no model; and what memory of tiers saves.

Memory below the device saves prefill: counted are the hits over device, host and disk, and the savings of the next GiB.

The tiers are modelled as one LRU list: pages evicted from the device move to the host, and from there to disk. The hits
down to a tier are then those in the sum of all pages down to it. This is a bound for one request at a time. Replays
with these tiers rarely exceed it, and then by little; most stay below, as tiers also keep copies of pages above them
and requests overlap. With `replayed`, the hits of replays are reported as well.

With KV groups, the parts of all groups share one list, in the eviction order of the engine: a running request holds, in
each group, the parts that its next token needs, and one that does not fit is refused and finds nothing.

A hit in a tier saves computing its tokens and costs loading them. Both are counted as if nothing else ran, in seconds
of prefill and of transfer. This is not how much earlier the last token arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import gcd, isqrt
from typing import Any

import msgspec
import numpy as np

from kvarts.base.columns import Column
from kvarts.base.limits import MOST_PAGES, check_whole
from kvarts.base.processes import Processes
from kvarts.core.kv.block_sizes import needs_of
from kvarts.core.kv.eviction import EvictionOrder, LruOrder
from kvarts.core.kv.group_needs import GroupNeeds
from kvarts.core.kv.groups import GroupMemory, PartGroup
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.kv.pool import CountPool
from kvarts.core.kv.run_cache import RunCache
from kvarts.core.kv.tree import PrefixTree
from kvarts.core.parts.chunk_ends import AlignedChunks
from kvarts.core.request import Request
from kvarts.core.sched.plan import Batch, Chunk
from kvarts.plan.curve import HitCurve, Optimum, find_knees, lru_curve, stack_distances
from kvarts.plan.reuse import OTHER, OWN, SHARED, Reuse, find_token_reuse
from kvarts.sim.config import ReplayConfig
from kvarts.sim.traffic.request_columns import RequestColumns
from kvarts.sim.traffic.trace import Trace, TraceRequest

__all__ = [
    "Breakdown",
    "CachePlan",
    "GroupHits",
    "GroupPlan",
    "HitPlan",
    "MakeOrder",
    "PricedTier",
    "TiersPlan",
    "best_buy",
    "least_pages_of",
    "prefill_s_per_token",
    "serial_hits",
]

MakeOrder = Callable[[], EvictionOrder]

AGES_S = (1, 10, 60, 600, 3600)
AGES = ("below 1 s", "1 to 10 s", "10 s to 1 min", "1 to 10 min", "10 min to 1 h", "1 h and more")
TURNS = ("no session", "1", "2", "3", "4 to 7", "8 to 15", "16 and more")
FIRST_TURNS = (1, 2, 3, 4, 8, 16)
SOURCES = {"own_history": OWN, "other_requests": OTHER, "shared_prefix": SHARED}
NS_PER_S = 1_000_000_000
SHARES = (0.5, 0.8, 0.9, 0.95, 0.99, 1.0)
MOST_POINTS = 2000
"""Most points of a curve in the output; the curve is linear between them."""
GIB = 1 << 30
DOUBLINGS = 6
STEP_SHARE = 1 / 16
ROUNDS = 2
"""How often the sizes of a simulated curve are halved where it rises: they are a fifth apart there."""
RISES = 0.02
"""It rises where this share of all hits, or more, is between two sizes."""
SNAPSHOTS = 4
"""More snapshots of states than one request can leave."""


class Breakdown:
    """Token counts of one trace. `tokens` and `reuse` are its spans in tokens and in pages.

    Every prompt token is counted once at each size, as found or as computed.

    A token is computed for one of three reasons. It was never seen before at its place, after the same tokens (never
    seen). It was seen, but in no full page that both prompts share, or it is the last token of a prompt (unaligned).
    Or its page was evicted.
    """

    def __init__(self, trace: Trace, tokens: Reuse, reuse: Reuse, distances: Column) -> None:
        self._reuse = reuse
        hittable = reuse.hittable
        counted = np.flatnonzero(hittable)  # the spans that can be hits
        self._distances, self._hittable = distances[counted], hittable[counted]
        self._request, self._source = reuse.request[counted], reuse.source[counted]
        self._seen_tokens = int(tokens.hittable.sum())
        turns: dict[str, int] = {}
        requests = trace.requests or []
        turn_of: list[int] = []
        tenant_of: list[str | None] = []
        if isinstance(requests, RequestColumns):  # which have neither sessions nor tenants
            turn_of, tenant_of, requests = [0] * len(requests), [None] * len(requests), []
        for request in requests:
            turn = 0
            if request.session_id is not None:
                turn = turns[request.session_id] = turns.get(request.session_id, 0) + 1
            turn_of.append(turn)
            tenant_of.append(request.tenant)
        self._tenants = sorted(set(tenant_of), key=lambda name: (name is not None, name or ""))
        places = {name: place for place, name in enumerate(self._tenants)}
        self._tenant = np.array([places[name] for name in tenant_of])
        self._turn = np.searchsorted(FIRST_TURNS, np.array(turn_of), side="right")
        self._has_sessions = bool(turns)
        ages_ns = reuse.arrival_ns[self._request] - reuse.arrival_ns[reuse.previous[counted]]
        self._age = np.searchsorted(np.array(AGES_S) * NS_PER_S, ages_ns, side="right")

    def at(self, num_pages: int) -> dict[str, Any]:
        """Return the prompt tokens found and computed in a pool of `num_pages`, JSON-able."""
        reuse, page_size = self._reuse, self._reuse.page_size
        found = np.clip(num_pages - self._distances, 0, self._hittable)
        lost = self._hittable - found
        num_found, num_lost = int(found.sum()) * page_size, int(lost.sum()) * page_size
        num_tokens = reuse.num_prompt_tokens
        has_hits, has_losses = (np.zeros(len(reuse.num_pages), bool) for _ in range(2))
        has_hits[self._request[found > 0]] = has_losses[self._request[lost > 0]] = True
        by_source = self._tokens_by(found, lost, self._source, 1 + max(SOURCES.values()))
        seen = int(self._hittable.sum()) * page_size
        result: dict[str, Any] = {
            "hit_tokens": num_found,
            "requests_with_hits": int(has_hits.sum()),
            "requests_with_losses": int(has_losses.sum()),
            "computed_tokens": {
                "never_seen": num_tokens - self._seen_tokens,
                "unaligned": self._seen_tokens - seen,
                "evicted": num_lost,
            },
            "by_origin": {name: by_source[source] for name, source in SOURCES.items()},
            "by_age": dict(zip(AGES, self._tokens_by(found, lost, self._age, len(AGES)), strict=True)),
        }
        if self._has_sessions:
            by_turn = self._tokens_by(found, lost, self._turn[self._request], len(TURNS))
            result["by_turn"] = {
                name: {
                    "prompt_tokens": int(reuse.prompt_tokens[self._turn == place].sum()),
                    **by_turn[place],
                }
                for place, name in enumerate(TURNS)
                if (self._turn == place).any()
            }
        if self._tenants != [None]:
            by_tenant = self._tokens_by(found, lost, self._tenant[self._request], len(self._tenants))
            result["by_tenant"] = {
                "" if name is None else name: {
                    "prompt_tokens": int(reuse.prompt_tokens[self._tenant == place].sum()),
                    **by_tenant[place],
                }
                for place, name in enumerate(self._tenants)
            }
        return result

    def _tokens_by(self, found: Column, lost: Column, kinds: Column, num_kinds: int) -> list[dict[str, int]]:
        """Return the tokens found and evicted of spans of each kind."""
        hits, losses = (np.bincount(kinds, pages, num_kinds).astype(np.int64).tolist() for pages in (found, lost))
        page_size = self._reuse.page_size
        return [
            {"hit_tokens": hit * page_size, "evicted_tokens": lost * page_size}
            for hit, lost in zip(hits, losses, strict=True)
        ]


class HitPlan:
    """What memory of each size finds on `trace`, one request at a time. Sizes are in pages of `page_size` tokens.

    `curve`: the hits of all sizes; `least_pages`: the smallest size that can hold each request alone.
    """

    def __init__(self, trace: Trace, page_size: int, curve: HitCurve, least_pages: int) -> None:
        self.trace = trace
        self.page_size = page_size
        self.curve = curve
        self.least_pages = least_pages
        self.knees = find_knees(curve, least_pages)
        self._optima: dict[int, int] = {}

    @property
    def main_knee(self) -> int:
        """The middle knee; the smallest pool that loses nothing if the curve has none."""
        return self.knees[len(self.knees) // 2] if self.knees else max(self.least_pages, self.curve.most_pages)

    @property
    def sizes_under_pressure(self) -> list[int]:
        """The main knee, and half of it where every request still fits: sizes at which policies differ."""
        return sorted({max(self.least_pages, self.main_knee // 2), self.main_knee})

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return self.curve.num_prompt_tokens

    def default_sizes(self) -> list[int]:
        """Return the knees, and the sizes that reach round shares of all possible hits; none is below `least_pages`."""
        return sorted({*self.knees, *(max(self.least_pages, self.curve.size_for(share)) for share in SHARES)})

    def look(self, sizes: Iterable[int]) -> None:
        """Find out at once what `sizes` find, if that takes simulations."""

    def hit_pages(self, num_pages: int) -> int:
        """Return the number of pages that all requests together find in `num_pages`."""
        raise NotImplementedError

    def hit_ratio(self, num_pages: int) -> float:
        """Return the share of prompt tokens that are hits in `num_pages`."""
        return self.curve.ratio_of(self.hit_pages(num_pages))

    def most_hit_pages(self, num_pages: int) -> int:
        """Return an upper bound on the pages that all requests together find in `num_pages`, under any policy."""
        if num_pages not in self._optima:
            self._optima[num_pages] = self.look_ahead(num_pages)
        return self._optima[num_pages]

    def look_ahead(self, num_pages: int) -> int:
        """Compute `most_hit_pages`."""
        raise NotImplementedError

    def hits_under(self, cases: Sequence[tuple[MakeOrder, int]], processes: Processes) -> list[int]:
        """Return the `hit_pages` of other eviction orders, each with a size. `processes` share the trace."""
        raise NotImplementedError

    def in_tiers(self, sizes: Sequence[int], page_bytes: int) -> list[tuple[int, float]]:
        """Return what tiers of `sizes` find as one LRU list, the device first.

        For each: the pages found in it and in none above it, and the bytes to load of each of their tokens.
        `page_bytes`: those of a page.
        """
        raise NotImplementedError

    def look_at_tiers(self, points: Iterable[Sequence[int]]) -> None:
        """Find out at once what tiers of these sizes find, if that takes simulations."""

    def most_below(self, above: Sequence[int]) -> int:
        """Return the smallest tier below those of sizes `above` that loses nothing."""
        return max(self.curve.most_pages - sum(above), 0)

    def point(self, num_pages: int) -> dict[str, Any]:
        """Return the hit ratio of LRU and of the optimum at one size."""
        check_whole(num_pages, "at", most=MOST_PAGES)
        return {
            "pages": num_pages,
            "tokens": num_pages * self.page_size,
            "hit_ratio": self.hit_ratio(num_pages),
            "optimum_hit_ratio": self.curve.ratio_of(self.most_hit_pages(num_pages)),
        }

    def sizes_to_builtins(self) -> dict[str, Any]:
        """Return the smallest and the largest size of interest, and those between, JSON-able."""
        return {
            "least_pages": self.least_pages,
            "most_hit_ratio": self.curve.most_hit_ratio,
            "most_pages": self.curve.most_pages,
            "knees": [self.point(size) for size in self.knees],
            "pages_for_share_of_hits": {f"{share:g}": self.curve.size_for(share) for share in SHARES},
        }

    def curve_to_builtins(self) -> dict[str, Any]:
        """Return the curve, linear between its sizes, JSON-able."""
        curve = self.curve
        kept = np.linspace(0, len(curve.sizes) - 1, min(len(curve.sizes), MOST_POINTS)).round().astype(int)
        return {
            "pages": curve.sizes[kept].tolist(),
            "hit_ratio": [curve.ratio_of(hits) for hits in curve.hits[kept].tolist()],
        }


class CachePlan(HitPlan):
    """Curve, optimum and breakdown of `trace` for pages of `page_size`. The trace must be a list, not a stream."""

    def __init__(self, trace: Trace, page_size: int, *, count_outputs: bool = False) -> None:
        self._tokens = tokens = find_token_reuse(trace)
        self._reuse = reuse = tokens.in_pages(page_size, count_outputs=count_outputs)
        self._distances = stack_distances(reuse)
        least = -(-int((tokens.num_pages + tokens.num_private).max()) // page_size)
        super().__init__(trace, page_size, lru_curve(reuse, self._distances), least)
        self.optimum = Optimum(reuse)
        self.count_outputs = count_outputs

    def hit_pages(self, num_pages: int) -> int:
        """Return the number of pages that all requests together find in a pool of `num_pages`."""
        return self.curve.hit_pages(num_pages)

    def look_ahead(self, num_pages: int) -> int:
        """Return the most pages that they can find."""
        return self.optimum.hit_pages(num_pages)

    def hits_under(self, cases: Sequence[tuple[MakeOrder, int]], processes: Processes) -> list[int]:
        """Return the hits of other orders in pools of these sizes."""
        return processes.all(_pool_hits, [(self.page_size, size, make) for make, size in cases])

    def in_tiers(self, sizes: Sequence[int], page_bytes: int) -> list[tuple[int, float]]:
        """Return what tiers find: down to each, the curve at the sum of all sizes down to it."""
        hits = [0, *(self.hit_pages(total) for total in accumulate(sizes))]
        return [(below - above, page_bytes // self.page_size) for above, below in pairwise(hits)]

    def to_builtins(self, sizes: Iterable[int] | None = None) -> dict[str, Any]:
        """Return all curves and points, JSON-able. `sizes`: points of interest; None: `default_sizes`."""
        chosen = self.default_sizes() if sizes is None else list(sizes)
        breakdown = Breakdown(self.trace, self._tokens, self._reuse, self._distances)
        return {
            "trace": self.trace.name,
            "num_requests": len(self._reuse.num_pages),
            "num_prompt_tokens": self._reuse.num_prompt_tokens,
            "page_size": self.page_size,
            "count_outputs": self.count_outputs,
            **self.sizes_to_builtins(),
            "at": [{**self.point(size), **breakdown.at(size)} for size in chosen],
            "curve": self.curve_to_builtins(),
        }


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
        table = cache.open(match)
        cache.grow(table, known)
        cache.close(table, known, known)
    return hits


def _pool_hits(trace: Trace, task: tuple[int, int, MakeOrder]) -> int:
    return serial_hits(trace, *task)


def least_pages_of(plan: HitPlan, config: ReplayConfig) -> int:
    """Return the smallest memory of an engine of `config` that can hold each request of `plan` alone."""
    if config.kv_groups == "off":
        return plan.least_pages
    memory = config.memory
    needs = _needs_of(config)
    num_blocks = max(needs.of_request(request.num_prompt_tokens, request.num_output_tokens) for request in plan.trace)
    return -(-num_blocks * memory.block_bytes // memory.page_bytes)


def _needs_of(config: ReplayConfig) -> GroupNeeds:
    return needs_of(config.memory, page_size=config.page_size, most_new=config.max_num_batched_tokens)


class GroupHits:
    """Hits of `trace` on an engine of `config`, which counts KV groups. Each size is simulated once and cached.

    `processes`: those that simulate, which share the trace; default: this one. `only_known`: no memory for outputs
    that the trace does not contain.
    """

    def __init__(
        self, trace: Trace, config: ReplayConfig, processes: Processes | None = None, *, only_known: bool = False
    ) -> None:
        self._config = config
        self._only_known = only_known
        self._processes = Processes(shared=trace) if processes is None else processes
        self._page_size = config.page_size
        self._num_prompt_tokens = sum(request.num_prompt_tokens for request in trace)
        self._found: dict[int, Column] = {}

    def hit_ratio(self, num_pages: int) -> float:
        """Return the share of prompt tokens that are hits in as much memory as `num_pages` whole pages occupy."""
        return self.hit_pages(num_pages) * self._page_size / self._num_prompt_tokens

    def hit_pages(self, num_pages: int) -> int:
        """Return the number of pages that all requests find together."""
        return int(self.by_request(num_pages).sum())

    def by_request(self, num_pages: int) -> Column:
        """Return the number of pages that each request finds."""
        self.look([num_pages])
        return self._found[num_pages]

    def look(self, sizes: Iterable[int]) -> None:
        """Simulate `sizes`, as far as they are not known, at once."""
        new = [size for size in dict.fromkeys(sizes) if size not in self._found]
        found = self._processes.all(_group_hits, [(self._config, size, self._only_known) for size in new])
        self._found.update((size, np.array(pages, np.int64)) for size, pages in zip(new, found, strict=True))

    def curve(self, least_pages: int, most_pages: int) -> HitCurve:
        """Return the most that this much memory or less finds, linear between simulated sizes from `least_pages` on.

        Sizes double up to `most_pages`, and are closer to each other where the curve rises.
        """
        sizes = [max(1, least_pages)]
        while sizes[-1] * 2 < most_pages:
            sizes.append(sizes[-1] * 2)
        sizes = sorted({*sizes, max(sizes[-1], most_pages)})
        self.look(sizes)
        most = max(self.hit_pages(size) for size in sizes)
        for _ in range(ROUNDS):
            between = [
                isqrt(low * high)
                for low, high in pairwise(sizes)
                if low < isqrt(low * high) < high and self._rises(low, high, most)
            ]
            self.look(between)
            sizes = sorted({*sizes, *between})
        hits = np.maximum.accumulate([self.hit_pages(size) for size in sizes])
        end = int(np.argmax(hits)) + 1  # the first that finds all that can be found
        return HitCurve(
            np.array([0, *sizes[:end]], np.int64),
            np.array([0, *hits[:end].tolist()], np.int64),
            page_size=self._page_size,
            num_prompt_tokens=self._num_prompt_tokens,
        )

    def _rises(self, low: int, high: int, most: int) -> bool:
        """Return whether much is found in `high` pages and not in `low`, or the last of `most` pages."""
        few, many = self.hit_pages(low), self.hit_pages(high)
        return many - few >= max(1, RISES * most) or few < most == many


def _group_hits(trace: Trace, task: tuple[ReplayConfig, int, bool]) -> list[int]:
    """Return the number of pages that each request finds on an engine with the memory of that many pages."""
    return _Serial(*task).run(trace)


class _Serial:
    """Runs requests one after the other in a cache of `config` with KV groups, in the memory of `num_pages` pages.

    `only_known`: they end with their last known token.
    """

    def __init__(self, config: ReplayConfig, num_pages: int, only_known: bool) -> None:
        self._only_known = only_known
        memory, make_order = config.memory, config.eviction
        self._page_size = config.page_size
        self._most_new = config.max_num_batched_tokens
        self._aligned = None
        if memory.aligns:
            self._aligned = AlignedChunks(
                config.page_size, config.max_num_batched_tokens, saves_inside=memory.saves_inside
            )
        self._needs = _needs_of(config)
        self._releases_apart = sum(group.is_state or group.is_bounded for group in memory.groups) > 1
        self._release_places = _release_places(memory, config.page_size)
        """The numbers of tokens after a page end at which a group may release parts."""
        self._num_blocks = memory.num_blocks(num_pages)
        self._cache = RunCache(
            memory,
            page_size=config.page_size,
            total_bytes=self._num_blocks * memory.block_bytes,
            eviction_order=None if make_order is LruOrder else make_order(),
            at_branches=config.snapshots == "branches",
        )

    def run(self, trace: Trace) -> list[int]:
        """Return the number of pages that each request of `trace` finds."""
        found = []
        for index, request in enumerate(trace):
            num_prompt, num_output = request.num_prompt_tokens, request.num_output_tokens
            num_hit = 0
            if self._needs.of_request(num_prompt, num_output) <= self._num_blocks:
                content = trace.content(request, page_size=self._page_size, owner=index)
                self._cache.now_ns = request.arrival_ns
                num_hit = self._serve(Request(index, content, num_prompt, num_output))
            found.append(num_hit)
        return found

    def _serve(self, request: Request) -> int:
        """Compute the tokens of `request`; return the number of pages that it found."""
        page_size, most_new, num_prompt, cache = self._page_size, self._most_new, request.num_prompt_tokens, self._cache
        num_tokens = max(num_prompt, num_prompt + request.max_tokens - 1)
        if self._only_known:
            num_tokens = max(num_prompt, min(num_tokens, request.content.num_known_pages * page_size))
        match = cache.match(request.content, (num_prompt - 1) // page_size)
        table = cache.begin(request.content, match)
        table.prefill_end = num_prompt
        at = match.num_pages * page_size
        while at < num_tokens:
            # A chunk of the prompt, or generated tokens up to the end of a page.
            is_prompt = at < num_prompt
            end = min(num_prompt, at + most_new) if is_prompt else min(num_tokens, at + page_size - at % page_size)
            if is_prompt and self._aligned is not None:
                end = at + self._aligned.num_tokens(request, at, end - at, table.branch)
            if not is_prompt and (self._releases_apart or end == num_tokens):
                # Groups that release in different steps have their order, and the last step releases nothing: the
                # request ends with it.
                for place in self._release_places:
                    each = at - at % page_size + place
                    if at < each < end:
                        cache.extend(table, each)
                        cache.free_skipped(table, each)
            cache.extend(table, end, is_end=is_prompt and end == num_prompt)
            if end < num_tokens:
                cache.free_skipped(table, end)
            at = end
        cache.close(table, at // page_size)
        cache.computed.clear()  # its steps are over
        return match.num_pages


def _release_places(memory: GroupMemory, page_size: int) -> list[int]:
    """Return how many tokens after a page end, less than a page, sequences have when a group may release parts."""
    places = {1 % page_size}  # a snapshot of a state, when a token follows it
    for group in memory.groups:
        if group.layer.kind == "chunk":
            assert group.layer.span is not None
            places.update(range(0, page_size, gcd(group.layer.span, page_size)))
        elif group.is_bounded:
            assert group.layer.span is not None
            places.add((group.layer.span - 1) % page_size)
    return sorted(places)


class GroupPlan(HitPlan):
    """The same with the KV groups of `config`, in as much memory as whole pages occupy. `plan`: that of whole pages.

    With groups, more memory can find less: after a longer hit, fewer parts of windows, or other snapshots, are left
    behind. There are no stack distances then, so each size is simulated. Outputs occupy memory, as in an engine.

    The optimum is a bound: of layers that keep less, it only counts the state of the request that runs. Tiers below the
    device are a list of the parts that they store: those of known tokens, and only the tails of windows.
    """

    def __init__(self, plan: CachePlan, config: ReplayConfig, processes: Processes | None = None) -> None:
        self._config = config
        self._memory = memory = config.memory
        self._needs = _needs_of(config)
        self._found = GroupHits(plan.trace, config, processes)
        of_tiers = msgspec.structs.replace(config, kv_groups="tails")
        self._below = GroupHits(plan.trace, of_tiers, processes, only_known=True)
        least = least_pages_of(plan, config)
        super().__init__(plan.trace, config.page_size, self._found.curve(least, self._enough(plan.trace)), least)
        blocks = [group.part_bytes // memory.block_bytes for group in memory.groups]
        kinds = list(zip(memory.groups, blocks, strict=True))
        self._whole_blocks = sum(size for group, size in kinds if not (group.is_state or group.is_bounded))
        self._bounds: dict[int, Optimum] = {}
        self._most_below: int | None = None

    def _enough(self, trace: Trace) -> int:
        """Return a size in which nothing is evicted."""
        memory, page_size = self._memory, self._config.page_size
        num_pages = num_requests = 0
        for request in trace:
            num_pages += -(-(request.num_prompt_tokens + request.num_output_tokens) // page_size)
            num_requests += 1
        of_states = SNAPSHOTS * num_requests * memory.num_state_blocks * memory.block_bytes
        return num_pages - (-of_states // memory.page_bytes)

    def hit_pages(self, num_pages: int) -> int:
        """Return the number of pages that all requests together find in the memory of `num_pages`."""
        return self._found.hit_pages(num_pages)

    def look(self, sizes: Iterable[int]) -> None:
        """Simulate `sizes` at once."""
        self._found.look(sizes)

    def look_ahead(self, num_pages: int) -> int:
        """Return the most pages that all requests together can find.

        It is the optimum of the layers that keep every token alone, among the requests that fit.
        """
        num_blocks = self._memory.num_blocks(num_pages)
        fitting = [
            request
            for request in self.trace
            if self._needs.of_request(request.num_prompt_tokens, request.num_output_tokens) <= num_blocks
        ]
        if not fitting:
            return 0
        if len(fitting) not in self._bounds:  # a size refuses the largest, so these are others
            tokens = find_token_reuse(_part_of(self.trace, fitting))
            self._bounds[len(fitting)] = Optimum(tokens.in_pages(self.page_size, count_outputs=True))
        optimum = self._bounds[len(fitting)]
        if not self._whole_blocks:
            return optimum.hit_pages(optimum.most_pages)
        return optimum.hit_pages((num_blocks - self._memory.num_state_blocks) // self._whole_blocks)

    def hits_under(self, cases: Sequence[tuple[MakeOrder, int]], processes: Processes) -> list[int]:
        """Return the hits of other orders in memory of these sizes."""
        tasks = [(msgspec.structs.replace(self._config, eviction=make), size, False) for make, size in cases]
        return [sum(found) for found in processes.all(_group_hits, tasks)]

    def in_tiers(self, sizes: Sequence[int], page_bytes: int) -> list[tuple[int, float]]:
        """Return what tiers find; a request finds the most that any of the tiers down to one finds.

        A hit loads the parts that it needs and that a shorter one above does not have.
        """
        found = [self._found.by_request(sizes[0])]
        for total, size in zip(self._totals(sizes), sizes[1:], strict=True):
            found.append(np.maximum(found[-1], self._below.by_request(total)) if size else found[-1])
        tiers = []
        for above, below in pairwise([np.zeros_like(found[0]), *found]):
            num_pages = int((below - above).sum())
            loaded = self._loaded_bytes(above, below) if num_pages else page_bytes
            tiers.append((num_pages, loaded / (max(1, num_pages) * self.page_size)))
        return tiers

    def look_at_tiers(self, points: Iterable[Sequence[int]]) -> None:
        """Simulate the devices of `points`, and the lists of their tiers, at once."""
        points = list(points)
        self._found.look(sizes[0] for sizes in points)
        self._below.look(
            total for sizes in points for total, size in zip(self._totals(sizes), sizes[1:], strict=True) if size
        )

    def most_below(self, above: Sequence[int]) -> int:
        """Return the smallest tier below those of sizes `above` that loses nothing."""
        if self._most_below is None:
            self._most_below = self._below.curve(self.least_pages, self._enough(self.trace)).most_pages
        return max(self._most_below - self._of_device(above[0]) - sum(above[1:]), 0)

    def _totals(self, sizes: Sequence[int]) -> list[int]:
        """Return the size of the list down to each tier below the device."""
        return list(accumulate(sizes[1:], initial=self._of_device(sizes[0])))[1:]

    def _of_device(self, num_pages: int) -> int:
        """Return the pages of the device in a list that only keeps the tails of windows, as tiers do.

        Where the device keeps more, they are as many as hold its parts of layers that keep every token.
        """
        if self._memory.keeps == "tails":
            return num_pages
        return num_pages * self._whole_blocks * self._memory.block_bytes // self._memory.page_bytes

    def _loaded_bytes(self, above: Column, below: Column) -> int:
        """Return the bytes that requests load which find `below` pages, and above `above` of them."""
        ends = [pair for pair in zip(above.tolist(), below.tolist(), strict=True) if pair[0] < pair[1]]
        return sum(
            group.part_bytes * sum(_num_loaded(group, start, end, self.page_size) for start, end in ends)
            for group in self._memory.groups
        )


def _num_loaded(group: PartGroup, start: int, end: int, page_size: int) -> int:
    """Return the number of parts of `group` that a hit of `end` pages needs beside those of one of `start` pages."""
    if group.is_state:
        return 1
    first = group.layer.first_seen(end * page_size) // page_size if group.is_bounded else 0
    sink = min(-(-group.layer.sink // page_size), first)
    return end - max(first, start) + max(0, sink - start)


def _part_of(trace: Trace, requests: list[TraceRequest]) -> Trace:
    """Return a trace of some `requests` of `trace`."""
    return Trace(requests, unit_tokens=trace.unit_tokens, has_output_tokens=trace.has_output_tokens)


class PricedTier(msgspec.Struct, frozen=True, kw_only=True):
    """`pages` of memory that are loaded at `bytes_per_s`; None for the device.

    `price`: per GiB, in any unit; None if unknown.
    """

    name: str
    pages: int
    bytes_per_s: int | None = None
    price: float | None = None


def prefill_s_per_token(config: ReplayConfig, num_tokens: int) -> float:
    """Return the mean compute time per token of a prompt of `num_tokens` that runs alone."""
    total_ns = start = 0
    while start < num_tokens:
        size = min(config.max_num_batched_tokens, num_tokens - start)
        chunk = Chunk(start, size, num_tokens, num_tokens)
        total_ns += config.cost_model.step_ns(Batch((chunk,), 0, 0, config.num_pages * config.page_size))
        start += size
    return total_ns / NS_PER_S / num_tokens


class TiersPlan:
    """Comparison of sizes of `tiers`: the device first; each is slower than the one before it.

    `replayed` returns the results of replays with tiers; None for those that are not possible. `also`: additional sizes
    in pages to examine, by name of the tier. `page_bytes`: those of a page in each.
    """

    def __init__(
        self,
        plan: HitPlan,
        tiers: Sequence[PricedTier],
        *,
        page_bytes: int,
        s_per_token: float,
        replayed: Callable[[Sequence[Sequence[PricedTier]]], Sequence[dict[str, Any] | None]] | None = None,
        also: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._plan = plan
        self._tiers = tiers
        self._page_bytes = page_bytes
        self._s_per_token = s_per_token
        self._replayed = replayed
        self._also = also or {}
        last_ns = max(request.arrival_ns for request in plan.trace)
        self._hours = last_ns / NS_PER_S / 3600
        self._num_requests = sum(1 for _ in plan.trace)

    def to_builtins(self) -> dict[str, Any]:
        """Return the curves over host memory and over disk, and the next GiB of each tier, JSON-able."""
        curves = [self._larger(1), self._larger(2)]
        nexts = [self._enlarged(place) for place in range(len(self._tiers))]
        every = [*(tiers for curve in curves for tiers in curve), *(tiers for tiers, _ in nexts), self._tiers]
        self._plan.look_at_tiers([tier.pages for tier in tiers] for tiers in every)
        points = [[self._point(tiers) for tiers in curve] for curve in curves]
        if self._replayed is not None:
            replays = self._replayed([tiers for curve in curves for tiers in curve])
            for point, replay in zip([point for curve in points for point in curve], replays, strict=True):
                point["replayed"] = replay
        whole, rest = divmod(self._page_bytes, self._plan.page_size)
        (_, of_all) = self._plan.in_tiers([0, self._plan.most_below([0])], self._page_bytes)[1]
        return {
            "prefill_us_per_token": self._s_per_token * 1e6,
            "kv_bytes_per_token": self._page_bytes / self._plan.page_size if rest else whole,
            "hours": self._hours,
            "curve": points[0],
            "disk_curve": points[1],
            "load_us_per_token": {
                tier.name: of_all / tier.bytes_per_s * 1e6 for tier in self._tiers if tier.bytes_per_s is not None
            },
            "now": self._point(self._tiers),
            "next_gib": [self._next(*more) for more in zip(self._tiers, *zip(*nexts, strict=True), strict=True)],
        }

    def saved_s(self, tiers: Sequence[PricedTier]) -> float:
        """Return the compute seconds saved by all hits, minus the seconds of loading from below the device."""
        return self._saved_s(tiers, self._found(tiers))

    def _saved_s(self, tiers: Sequence[PricedTier], found: Sequence[tuple[int, float]]) -> float:
        saved = 0.0
        for tier, (num_pages, token_bytes) in zip(tiers, found, strict=True):
            # A page that is slower to load than to compute is computed.
            load_s = 0.0 if tier.bytes_per_s is None else token_bytes / tier.bytes_per_s
            saved += num_pages * self._plan.page_size * max(0.0, self._s_per_token - load_s)
        return saved

    def _found(self, tiers: Sequence[PricedTier]) -> list[tuple[int, float]]:
        """Return the pages found in each tier and in none above it, and the bytes of a token of these."""
        return self._plan.in_tiers([tier.pages for tier in tiers], self._page_bytes)

    def _point(self, tiers: Sequence[PricedTier]) -> dict[str, Any]:
        found = self._found(tiers)
        tokens = [num_pages * self._plan.page_size for num_pages, _ in found]
        saved_s = self._saved_s(tiers, found)
        of_all = self._plan.num_prompt_tokens or 1
        return {
            "pages": {tier.name: tier.pages for tier in tiers},
            "gib": {tier.name: self._gib(tier.pages) for tier in tiers},
            "hit_ratio": {tier.name: hits / of_all for tier, hits in zip(tiers, tokens, strict=True)},
            "saved_s": saved_s,
            "saved_s_per_hour": saved_s / self._hours if self._hours else None,
            "saved_ms_per_request": saved_s * 1e3 / self._num_requests,
        }

    def _larger(self, place: int) -> list[list[PricedTier]]:
        """Return the tiers with the one at `place` varied, from empty to the size that holds every reused page."""
        if place >= len(self._tiers):
            return []
        device, tier = self._tiers[0], self._tiers[place]
        most = self._plan.most_below([above.pages for above in self._tiers[:place]])
        also = self._also.get(tier.name, ())
        sizes = {0, tier.pages, most, *(device.pages << step for step in range(DOUBLINGS)), device.pages // 2, *also}
        return [
            [*self._tiers[:place], msgspec.structs.replace(tier, pages=size), *self._tiers[place + 1 :]]
            for size in sorted(sizes)
            if size <= max(most, tier.pages, *also)
        ]

    def _enlarged(self, place: int) -> tuple[list[PricedTier], int]:
        """Return the tiers with the one at `place` larger by a sixteenth, at least a GiB, and by how many pages.

        A curve has flat parts and cliffs, so the effect of exactly one GiB would not be representative.
        """
        tier = self._tiers[place]
        step = max(-(-GIB // self._page_bytes), int(tier.pages * STEP_SHARE), 1)
        more = list(self._tiers)
        more[place] = msgspec.structs.replace(tier, pages=tier.pages + step)
        return more, step

    def _next(self, tier: PricedTier, more: Sequence[PricedTier], step: int) -> dict[str, Any]:
        """Return the savings per further GiB of a tier, averaged over `step` pages, with which there are `more`."""
        gained_s = (self.saved_s(more) - self.saved_s(self._tiers)) / self._gib(step)
        per_hour = gained_s / self._hours if self._hours else None
        return {
            "tier": tier.name,
            "saved_s": gained_s,
            "saved_s_per_hour": per_hour,
            "saved_ms_per_request": gained_s * 1e3 / self._num_requests,
            "price": tier.price,
            "saved_s_per_price": gained_s / tier.price if tier.price else None,
        }

    def _gib(self, pages: int) -> float:
        return pages * self._page_bytes / GIB


def best_buy(tiers: Mapping[str, Any]) -> str | None:
    """Return the tier whose next GiB saves most for its price; None without prices, or if none saves anything."""
    priced = [each for each in tiers["next_gib"] if each["saved_s_per_price"]]
    return max(priced, key=lambda each: each["saved_s_per_price"])["tier"] if priced else None

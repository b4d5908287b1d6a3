"""The cache curves of a trace in one value, which needs no model; and what memory of models and of tiers saves.

Memory is divided among several models by marginal gain, compared with equal and weighted shares.

Each model has a curve of hits over bytes. Along the concave hull of a curve, gains per byte only fall, so giving the
memory piece by piece to the model that gains most gives the most hits in total. The reported hits of a share are those
of the curve itself, which meets the hull wherever a whole piece was given.

Memory below the device saves prefill: counted are the hits over device, host and disk, and the savings of the next GiB.

The tiers are modelled as one LRU list: pages evicted from the device move to the host, and from there to disk. The hits
down to a tier are then the curve at the sum of all pages down to it. This is a bound for one request at a time. Replays
with these tiers rarely exceed it, and then by little; most stay below, as tiers also keep copies of pages above them
and requests overlap. With `replayed`, the hits of replays are reported as well.

A hit in a tier saves computing its tokens and costs loading them. Both are counted as if nothing else ran, in seconds
of prefill and of transfer. This is not how much earlier the last token arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from kvarts.columns import Column
from kvarts.limits import MOST_PAGES, check_whole
from kvarts.plan.curve import Optimum, concave_hull, find_knees, lru_curve, stack_distances
from kvarts.plan.reuse import OTHER, OWN, SHARED, Reuse, find_token_reuse
from kvarts.sched.plan import Batch, Chunk
from kvarts.sim.config import ReplayConfig
from kvarts.traffic.request_columns import RequestColumns
from kvarts.traffic.trace import Trace

__all__ = [
    "Breakdown",
    "CachePlan",
    "ModelMemory",
    "PricedTier",
    "TiersPlan",
    "best_buy",
    "divide",
    "prefill_s_per_token",
]

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


class CachePlan:
    """Curve, optimum and breakdown of `trace` for pages of `page_size`. The trace must be a list, not a stream."""

    def __init__(self, trace: Trace, page_size: int, *, count_outputs: bool = False) -> None:
        self.trace = trace
        self.page_size = page_size
        self._tokens = find_token_reuse(trace)
        self._reuse = reuse = self._tokens.in_pages(page_size, count_outputs=count_outputs)
        self._distances = stack_distances(reuse)
        self.curve = lru_curve(reuse, self._distances)
        self.optimum = Optimum(reuse)
        self.least_pages = -(-int((self._tokens.num_pages + self._tokens.num_private).max()) // page_size)
        """The smallest pool that can hold each request alone."""
        self.knees = find_knees(self.curve, self.least_pages)
        self.count_outputs = count_outputs
        self._optima: dict[int, float] = {}

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
        return self._reuse.num_prompt_tokens

    def default_sizes(self) -> list[int]:
        """Return the knees, and the sizes that reach round shares of all possible hits; none is below `least_pages`."""
        return sorted({*self.knees, *(max(self.least_pages, self.curve.size_for(share)) for share in SHARES)})

    def point(self, num_pages: int) -> dict[str, Any]:
        """Return the hit ratio of LRU and of the optimum at one size."""
        check_whole(num_pages, "at", most=MOST_PAGES)
        if num_pages not in self._optima:
            self._optima[num_pages] = self.optimum.hit_ratio(num_pages)
        return {
            "pages": num_pages,
            "tokens": num_pages * self.page_size,
            "hit_ratio": self.curve.hit_ratio(num_pages),
            "optimum_hit_ratio": self._optima[num_pages],
        }

    def to_builtins(self, sizes: Iterable[int] | None = None) -> dict[str, Any]:
        """Return all curves and points, JSON-able. `sizes`: points of interest; None: `default_sizes`."""
        chosen = self.default_sizes() if sizes is None else list(sizes)
        breakdown = Breakdown(self.trace, self._tokens, self._reuse, self._distances)
        curve = self.curve
        kept = np.linspace(0, len(curve.sizes) - 1, min(len(curve.sizes), MOST_POINTS)).round().astype(int)
        return {
            "trace": self.trace.name,
            "num_requests": len(self._reuse.num_pages),
            "num_prompt_tokens": self._reuse.num_prompt_tokens,
            "page_size": self.page_size,
            "count_outputs": self.count_outputs,
            "least_pages": self.least_pages,
            "most_hit_ratio": curve.most_hit_ratio,
            "most_pages": curve.most_pages,
            "knees": [self.point(size) for size in self.knees],
            "pages_for_share_of_hits": {f"{share:g}": curve.size_for(share) for share in SHARES},
            "at": [{**self.point(size), **breakdown.at(size)} for size in chosen],
            "curve": {
                "pages": curve.sizes[kept].tolist(),
                "hit_ratio": [curve.hit_ratio(size) for size in curve.sizes[kept].tolist()],
            },
        }


class ModelMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A model, its trace and curve, and the KV bytes per token."""

    name: str
    plan: CachePlan
    kv_bytes_per_token: int
    weight: float = 1.0

    @property
    def page_bytes(self) -> int:
        """Size of a page in bytes."""
        return self.plan.page_size * self.kv_bytes_per_token


def divide(models: Sequence[ModelMemory], num_bytes: int) -> dict[str, Any]:
    """Return equal, weighted and marginal shares of `num_bytes`, and the hits of each, JSON-able."""
    total_weight = sum(model.weight for model in models)
    ways = {
        "equal": [num_bytes // len(models)] * len(models),
        "weighted": [int(num_bytes * model.weight / total_weight) for model in models],
        "marginal": _by_gain(models, num_bytes),
    }
    num_tokens = sum(model.plan.num_prompt_tokens for model in models) or 1
    found: dict[str, Any] = {"bytes": num_bytes, "shares": {}}
    for way, sizes in ways.items():
        hits = [
            model.plan.curve.hit_pages(size // model.page_bytes) * model.plan.page_size
            for model, size in zip(models, sizes, strict=True)
        ]
        found["shares"][way] = {
            "hit_ratio": sum(hits) / num_tokens,
            "models": {
                model.name: {
                    "bytes": size,
                    "pages": size // model.page_bytes,
                    "hit_ratio": hit / (model.plan.num_prompt_tokens or 1),
                    "fits_every_request": size // model.page_bytes >= model.plan.least_pages,
                }
                for model, size, hit in zip(models, sizes, hits, strict=True)
            },
        }
    return found


def _by_gain(models: Sequence[ModelMemory], num_bytes: int) -> list[int]:
    """Return bytes for each model: first the need of its largest request, then pieces in order of gain per byte.

    If the largest requests do not all fit, each model gets the same fraction of its need. Memory left at the end is
    divided equally.
    """
    sizes = [model.plan.least_pages * model.page_bytes for model in models]
    if sum(sizes) > num_bytes:
        return [int(size * num_bytes / sum(sizes)) for size in sizes]
    left = num_bytes - sum(sizes)
    pieces: list[tuple[float, int, int]] = []
    for place, model in enumerate(models):
        pages, hits = (column.tolist() for column in concave_hull(model.plan.curve, model.plan.least_pages))
        for low, high, low_hits, high_hits in zip(pages, pages[1:], hits, hits[1:], strict=False):
            piece = (high - low) * model.page_bytes
            pieces.append((-(high_hits - low_hits) * model.plan.page_size / piece, place, piece))
    # Gains fall along each hull, so the pieces of a model stay in order; the sort is stable among equals.
    for gain, place, piece in sorted(pieces, key=lambda each: each[:2]):
        given = min(piece, left)
        if gain < 0:
            sizes[place] += given
            left -= given
    return [size + left // len(models) for size in sizes]


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
    in pages to examine, by name of the tier.
    """

    def __init__(
        self,
        plan: CachePlan,
        tiers: Sequence[PricedTier],
        *,
        kv_bytes_per_token: int,
        s_per_token: float,
        replayed: Callable[[Sequence[Sequence[PricedTier]]], Sequence[dict[str, Any] | None]] | None = None,
        also: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._plan = plan
        self._tiers = tiers
        self._token_bytes = kv_bytes_per_token
        self._s_per_token = s_per_token
        self._replayed = replayed
        self._also = also or {}
        last_ns = max(request.arrival_ns for request in plan.trace)
        self._hours = last_ns / NS_PER_S / 3600
        self._num_requests = sum(1 for _ in plan.trace)

    def to_builtins(self) -> dict[str, Any]:
        """Return the curves over host memory and over disk, and the next GiB of each tier, JSON-able."""
        curves = [self._larger(1), self._larger(2)]
        points = [[self._point(tiers) for tiers in curve] for curve in curves]
        if self._replayed is not None:
            replays = self._replayed([tiers for curve in curves for tiers in curve])
            for point, replay in zip([point for curve in points for point in curve], replays, strict=True):
                point["replayed"] = replay
        return {
            "prefill_us_per_token": self._s_per_token * 1e6,
            "kv_bytes_per_token": self._token_bytes,
            "hours": self._hours,
            "curve": points[0],
            "disk_curve": points[1],
            "load_us_per_token": {
                tier.name: self._load_s(tier) * 1e6 for tier in self._tiers if tier.bytes_per_s is not None
            },
            "now": self._point(self._tiers),
            "next_gib": [self._next(place) for place in range(len(self._tiers))],
        }

    def saved_s(self, tiers: Sequence[PricedTier]) -> float:
        """Return the compute seconds saved by all hits, minus the seconds of loading from below the device."""
        saved = 0.0
        for tier, tokens in zip(tiers, self._tokens(tiers), strict=True):
            # A page that is slower to load than to compute is computed.
            saved += tokens * max(0.0, self._s_per_token - self._load_s(tier))
        return saved

    def _load_s(self, tier: PricedTier) -> float:
        """Return the seconds needed to load a token from a tier."""
        return 0.0 if tier.bytes_per_s is None else self._token_bytes / tier.bytes_per_s

    def _tokens(self, tiers: Sequence[PricedTier]) -> list[int]:
        """Return the tokens found in each tier and in none above it."""
        found = []
        pages = before = 0
        for tier in tiers:
            pages += tier.pages
            hits = self._plan.curve.hit_pages(pages) * self._plan.page_size
            found.append(hits - before)
            before = hits
        return found

    def _point(self, tiers: Sequence[PricedTier]) -> dict[str, Any]:
        tokens = self._tokens(tiers)
        saved_s = self.saved_s(tiers)
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
        most = max(self._plan.curve.most_pages - sum(above.pages for above in self._tiers[:place]), 0)
        also = self._also.get(tier.name, ())
        sizes = {0, tier.pages, most, *(device.pages << step for step in range(DOUBLINGS)), device.pages // 2, *also}
        return [
            [*self._tiers[:place], msgspec.structs.replace(tier, pages=size), *self._tiers[place + 1 :]]
            for size in sorted(sizes)
            if size <= max(most, tier.pages, *also)
        ]

    def _next(self, place: int) -> dict[str, Any]:
        """Return the savings per further GiB of one tier, averaged over the next sixteenth of its size, at least a GiB.

        A curve has flat parts and cliffs, so the effect of exactly one GiB would not be representative.
        """
        tier = self._tiers[place]
        step = max(-(-GIB // (self._token_bytes * self._plan.page_size)), int(tier.pages * STEP_SHARE), 1)
        more = list(self._tiers)
        more[place] = msgspec.structs.replace(tier, pages=tier.pages + step)
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
        return pages * self._plan.page_size * self._token_bytes / GIB


def best_buy(tiers: Mapping[str, Any]) -> str | None:
    """Return the tier whose next GiB saves most for its price; None without prices, or if none saves anything."""
    priced = [each for each in tiers["next_gib"] if each["saved_s_per_price"]]
    return max(priced, key=lambda each: each["saved_s_per_price"])["tier"] if priced else None

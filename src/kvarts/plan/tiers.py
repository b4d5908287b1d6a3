"""Savings of memory below the device: hits over device, host and disk, and the savings of the next GiB of each.

The tiers are modelled as one LRU list: pages evicted from the device move to the host, and from there to disk. The hits
down to a tier are then the curve at the sum of all pages down to it. This is a bound for one request at a time. Replays
with these tiers rarely exceed it, and then by little; most stay below, as tiers also keep copies of pages above them
and requests overlap. With `replayed`, the hits of replays are reported as well.

A hit in a tier saves computing its tokens and costs loading them. Both are counted as if nothing else ran, in seconds
of prefill and of transfer. This is not how much earlier the last token arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvarts.plan.cache import CachePlan
from kvarts.sched.plan import Batch, Chunk
from kvarts.sim.config import ReplayConfig

__all__ = ["PricedTier", "TiersPlan", "best_buy", "prefill_s_per_token"]

GIB = 1 << 30
DOUBLINGS = 6
NS_PER_S = 1_000_000_000
STEP_SHARE = 1 / 16


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

    `replayed` returns the results of a replay with tiers; None if they are not possible. `also`: additional sizes in
    pages to examine, by name of the tier.
    """

    def __init__(
        self,
        plan: CachePlan,
        tiers: Sequence[PricedTier],
        *,
        kv_bytes_per_token: int,
        s_per_token: float,
        replayed: Callable[[Sequence[PricedTier]], dict[str, Any] | None] | None = None,
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
        return {
            "prefill_us_per_token": self._s_per_token * 1e6,
            "kv_bytes_per_token": self._token_bytes,
            "hours": self._hours,
            "curve": [self._point(tiers, with_replay=True) for tiers in self._larger(1)],
            "disk_curve": [self._point(tiers, with_replay=True) for tiers in self._larger(2)],
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

    def _point(self, tiers: Sequence[PricedTier], *, with_replay: bool = False) -> dict[str, Any]:
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
            **({"replayed": self._replayed(tiers)} if with_replay and self._replayed is not None else {}),
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

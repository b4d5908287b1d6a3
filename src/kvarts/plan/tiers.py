"""What memory below the device buys: hits of device, host and disk together, and what the next GiB of each saves.

The tiers are taken as one LRU list: what leaves the device goes to the host, what leaves that to disk. So what is found
down to a tier is the curve at the sum of all pages down to it: a bound of one request at a time, which no replay with
these tiers exceeds by much and most stay below, as tiers keep copies of what is above them and requests overlap. What a
replay finds stands beside it where `replayed` answers.

A hit in a tier saves computing its tokens, and costs loading them. Both are counted as if nothing else ran: seconds of
prefill and of transfers, that is, not how much earlier the last token comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvarts.plan.cache import CachePlan
from kvarts.sched.plan import Batch, Chunk
from kvarts.sim.config import ReplayConfig

__all__ = ["Tier", "TiersPlan", "best_buy", "prefill_s_per_token"]

GIB = 1 << 30
DOUBLINGS = 6
NS_PER_S = 1_000_000_000
STEP_SHARE = 1 / 16


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """`pages` of memory from which a page comes at `bytes_per_s`; None for the device, where it is already.

    `price`: of a GiB, in any unit; None where it is not known.
    """

    name: str
    pages: int
    bytes_per_s: int | None = None
    price: float | None = None


def prefill_s_per_token(config: ReplayConfig, num_tokens: int) -> float:
    """Return what computing a token of a prompt of `num_tokens` takes, on average, with nothing else in its steps."""
    total_ns = start = 0
    while start < num_tokens:
        size = min(config.max_num_batched_tokens, num_tokens - start)
        chunk = Chunk(start, size, num_tokens, num_tokens)
        total_ns += config.cost_model.step_ns(Batch((chunk,), 0, 0, config.num_pages * config.page_size))
        start += size
    return total_ns / NS_PER_S / num_tokens


class TiersPlan:
    """`tiers`: the device first; each is slower than the one before it.

    `replayed` answers what a replay with tiers finds; None where they cannot be. `also`: sizes in pages that are looked
    at too, by the name of the tier.
    """

    def __init__(
        self,
        plan: CachePlan,
        tiers: Sequence[Tier],
        *,
        kv_bytes_per_token: int,
        s_per_token: float,
        replayed: Callable[[Sequence[Tier]], dict[str, Any] | None] | None = None,
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

    def saved_s(self, tiers: Sequence[Tier]) -> float:
        """Return the seconds that all hits save, less those of loading what lies below the device."""
        saved = 0.0
        for tier, tokens in zip(tiers, self._tokens(tiers), strict=True):
            # A page that is slower to load than to compute is computed.
            saved += tokens * max(0.0, self._s_per_token - self._load_s(tier))
        return saved

    def _load_s(self, tier: Tier) -> float:
        """Return what loading a token from a tier takes."""
        return 0.0 if tier.bytes_per_s is None else self._token_bytes / tier.bytes_per_s

    def _tokens(self, tiers: Sequence[Tier]) -> list[int]:
        """Return the tokens that are found in each tier, and not above it."""
        found = []
        pages = before = 0
        for tier in tiers:
            pages += tier.pages
            hits = self._plan.curve.hit_pages(pages) * self._plan.page_size
            found.append(hits - before)
            before = hits
        return found

    def _point(self, tiers: Sequence[Tier], *, with_replay: bool = False) -> dict[str, Any]:
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

    def _larger(self, place: int) -> list[list[Tier]]:
        """Return the tiers with none of one below the device, and with more, until it holds all that is ever found."""
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
        """Return what a GiB more of one tier saves: the average over the next sixteenth of it, and a GiB at least.

        A curve has flat parts and cliffs, so what exactly one GiB changes says little.
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
    """Return the tier of which the next GiB saves most for its price; None without prices, or where none saves."""
    priced = [each for each in tiers["next_gib"] if each["saved_s_per_price"]]
    return max(priced, key=lambda each: each["saved_s_per_price"])["tier"] if priced else None

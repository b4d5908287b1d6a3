"""Hits and losses of requests in a pool of one size, by tenant, turn, origin and age."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvarts.columns import Column
from kvarts.plan.reuse import OTHER, OWN, SHARED, Reuse
from kvarts.traffic.trace import Trace

__all__ = ["Breakdown"]

AGES_S = (1, 10, 60, 600, 3600)
AGES = ("below 1 s", "1 to 10 s", "10 s to 1 min", "1 to 10 min", "10 min to 1 h", "1 h and more")
TURNS = ("no session", "1", "2", "3", "4 to 7", "8 to 15", "16 and more")
FIRST_TURNS = (1, 2, 3, 4, 8, 16)
SOURCES = {"own_history": OWN, "other_requests": OTHER, "shared_prefix": SHARED}
NS_PER_S = 1_000_000_000


class Breakdown:
    """Token counts of one trace. `tokens` and `reuse` are its spans in tokens and in pages.

    Every prompt token is counted once at each size, as found or as computed.

    A token is computed for one of three reasons. It was never seen before at its place, after the same tokens (never
    seen). It was seen, but in no full page that both prompts share, or it is the last token of a prompt (unaligned).
    Or its page was evicted.
    """

    def __init__(self, trace: Trace, tokens: Reuse, reuse: Reuse, distances: Column) -> None:
        requests = trace.requests or []
        self._reuse = reuse
        self._distances = distances
        self._hittable = reuse.hittable
        self._seen_tokens = int(tokens.hittable.sum())
        tenants = {request.tenant for request in requests}
        self._tenants = sorted(tenants, key=lambda name: (name is not None, name or ""))
        places = {name: place for place, name in enumerate(self._tenants)}
        self._tenant = np.array([places[request.tenant] for request in requests])
        turns: dict[str, int] = {}
        of_request = []
        for request in requests:
            turn = 0
            if request.session_id is not None:
                turn = turns[request.session_id] = turns.get(request.session_id, 0) + 1
            of_request.append(turn)
        self._turn = np.searchsorted(FIRST_TURNS, np.array(of_request), side="right")
        self._has_sessions = bool(turns)
        ages_ns = reuse.arrival_ns[reuse.request] - reuse.arrival_ns[reuse.previous]
        self._age = np.searchsorted(np.array(AGES_S) * NS_PER_S, ages_ns, side="right")

    def at(self, num_pages: int) -> dict[str, Any]:
        """Return the prompt tokens found and computed in a pool of `num_pages`, JSON-able."""
        reuse, page_size = self._reuse, self._reuse.page_size
        found = np.clip(num_pages - self._distances, 0, self._hittable)
        lost = self._hittable - found
        num_found, num_lost = int(found.sum()) * page_size, int(lost.sum()) * page_size
        num_tokens = reuse.num_prompt_tokens
        by_request = np.bincount(reuse.request, found, len(reuse.num_pages))
        lost_by_request = np.bincount(reuse.request, lost, len(reuse.num_pages))
        seen = int(self._hittable.sum()) * page_size
        result: dict[str, Any] = {
            "hit_tokens": num_found,
            "requests_with_hits": int((by_request > 0).sum()),
            "requests_with_losses": int((lost_by_request > 0).sum()),
            "computed_tokens": {
                "never_seen": num_tokens - self._seen_tokens,
                "unaligned": self._seen_tokens - seen,
                "evicted": num_lost,
            },
            "by_origin": {name: self._tokens(found, lost, reuse.source == source) for name, source in SOURCES.items()},
            "by_age": {name: self._tokens(found, lost, self._age == place) for place, name in enumerate(AGES)},
        }
        if self._has_sessions:
            turn = self._turn[reuse.request]
            result["by_turn"] = {
                name: {
                    "prompt_tokens": int(reuse.prompt_tokens[self._turn == place].sum()),
                    **self._tokens(found, lost, turn == place),
                }
                for place, name in enumerate(TURNS)
                if (self._turn == place).any()
            }
        if self._tenants != [None]:
            tenant = self._tenant[reuse.request]
            result["by_tenant"] = {
                "" if name is None else name: {
                    "prompt_tokens": int(reuse.prompt_tokens[self._tenant == place].sum()),
                    **self._tokens(found, lost, tenant == place),
                }
                for place, name in enumerate(self._tenants)
            }
        return result

    def _tokens(self, found: Column, lost: Column, chosen: Column) -> dict[str, int]:
        page_size = self._reuse.page_size
        return {
            "hit_tokens": int(found[chosen].sum()) * page_size,
            "evicted_tokens": int(lost[chosen].sum()) * page_size,
        }

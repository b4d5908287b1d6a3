"""Policies of kvarts, and those common to all routers: round robin, by load, by session, by prefix."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from kvarts.limits import check_number
from kvarts.routers.view import Asked, Needs, View

__all__ = ["BySession", "LeastLoaded", "PowerOfTwo", "PrefixAware", "RoundRobinPolicy", "ring_order"]


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

    A page in host memory saves `host_weight` of a page, and one on disk `disk_weight`, because they must be loaded.
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
        for worker, pages in view.pages(asked, (asked.num_tokens - 1) // view.page_size).items():
            cost[worker] -= pages[0]
            for saved, below in zip((self.host_weight, self.disk_weight), pages[1:], strict=False):
                cost[worker] -= saved * below
        return view.least(cost)


def ring_order(session: str, worker: int) -> bytes:
    """Return the sort key of a worker for a session: the greatest takes it. Equal keys in every process."""
    return blake2b(f"{session}\0{worker}".encode(), digest_size=8).digest()

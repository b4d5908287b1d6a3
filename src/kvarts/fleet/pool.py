"""A pool of workers that are alike, behind one router."""

from __future__ import annotations

from collections.abc import Sequence

from kvarts.fleet.worker import Worker
from kvarts.request import Request
from kvarts.sim.router import Router

__all__ = ["Pool"]


class Pool:
    """Workers of one configuration. `active`: those that requests are sent to, by their numbers."""

    def __init__(self, name: str, workers: Sequence[Worker], router: Router) -> None:
        self.name = name
        self.workers = list(workers)
        self.active = list(workers)
        self.router = router

    def choose(self, request: Request) -> Worker:
        """Return the worker that `request` goes to."""
        active = self.active
        if len(active) == 1:
            return active[0]
        return active[self.router.choose(request, [worker.replica for worker in active])]

    def never_fits(self, request: Request) -> str | None:
        """Return the reason why no worker could ever have the pages of `request`; None if they could."""
        return self.workers[0].scheduler.never_fits(request)

"""The prefix router that looks: it asks the schedulers and caches themselves, at the moment of each arrival."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvarts.core.request import Request
from kvarts.sim.router import RoundRobin, Routed

__all__ = ["LookingRouter"]


class LookingRouter(RoundRobin):
    """Chooses the engine with the fewest prompt pages to compute, pages in use and pages waited for; device only."""

    is_told = True
    reads_metrics = True  # so that the engines are where they are when a request arrives

    def __init__(self, engines: Sequence[Routed]) -> None:
        super().__init__(len(engines))
        self.engines = engines

    def place(self, request: Request, session: str | None, now_ns: int) -> int | None:
        return min(range(len(self.engines)), key=lambda index: self.cost(request, self.engines[index]))

    def cost(self, request: Request, engine: Any) -> int:
        config, scheduler = engine.config, engine.scheduler
        hit_pages = scheduler.cache.match(request.content, (request.num_known - 1) // config.page_size).num_pages
        num_waiting_pages = config.pages_for(scheduler.waiting.num_waiting_tokens)
        to_compute = config.pages_for(request.num_prompt_tokens) - hit_pages
        return int(to_compute + scheduler.cache.num_used + num_waiting_pages)

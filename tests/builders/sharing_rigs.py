"""Models on one device that take turns when they are told to."""

from __future__ import annotations

from kvarts.core.config import EngineConfig
from kvarts.core.content import Content
from kvarts.core.kv.cache import Cache
from kvarts.core.request import Request
from kvarts.core.sched.scheduler import Scheduler
from kvarts.sim.sharing.device import SharedDevice
from kvarts.sim.sharing.memory import DevicePart

from builders.engines import make_scheduler

__all__ = ["PAGE_SIZE", "Rig"]

PAGE_SIZE = 4


class Rig:
    def __init__(self, device: SharedDevice) -> None:
        self.device = device
        self.schedulers: dict[str, Scheduler] = {}
        self.num_requests = 0

    def attach(self, name: str, part: DevicePart, cache: Cache, config: EngineConfig) -> None:
        part.token_budget = 1000
        self.schedulers[name] = make_scheduler(config, cache=cache, pages=part)
        self.device.attach(name, self.schedulers[name])

    def add(self, model: str, num_pages: int, *, num_output: int = 2, priority: int = 0) -> Request:
        """A request that is like no other and whose prompt fills `num_pages`."""
        index = self.num_requests
        self.num_requests += 1
        tokens = range(index * 10_000, index * 10_000 + num_pages * PAGE_SIZE)
        content = Content.from_tokens(tokens, page_size=PAGE_SIZE, owner=index)
        request = Request(index, content, num_pages * PAGE_SIZE, num_output, priority=priority)
        assert self.schedulers[model].add(request) is None
        return request

    def turn(self, model: str, now_ns: int = 0) -> list[Request]:
        scheduler = self.schedulers[model]
        self.device.memory.parts[model].refresh()
        self.device.now_ns = now_ns
        before = scheduler.cache.num_released
        plan = scheduler.schedule(now_ns)
        finished = scheduler.commit(now_ns + 1) if plan.batch.num_tokens else []
        self.device.end_turn(model, has_released=scheduler.cache.num_released != before)
        self.device.check()
        return finished

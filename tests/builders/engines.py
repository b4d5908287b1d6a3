"""Engines for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvarts.build import build_engine
from kvarts.config import EngineConfig
from kvarts.event_log import EventReader
from kvarts.executor.base import VirtualExecutor
from kvarts.executor.cost import LinearCost
from kvarts.executor.simulated import SimExecutor
from kvarts.kv.cache import Cache
from kvarts.kv.page_cache import PageCache
from kvarts.sched.scheduler import Scheduler
from kvarts.sim.replica import Replica

__all__ = ["make_replica", "make_scheduler", "whole_pages"]


def make_replica(
    config: EngineConfig,
    executor: VirtualExecutor | None = None,
    *,
    readers: Sequence[EventReader] = (),
    step_by_step: bool = False,
    **kwargs: Any,
) -> Replica:
    """An engine in virtual time; a step takes a millisecond unless `executor` says otherwise."""
    executor = executor or SimExecutor(LinearCost(step_ms=1.0))
    return Replica(build_engine(config, executor, readers=readers, **kwargs), executor, step_by_step=step_by_step)


def make_scheduler(config: EngineConfig, **kwargs: Any) -> Scheduler:
    """A scheduler of pages that are only counted."""
    return build_engine(config, SimExecutor(LinearCost(step_ms=1.0)), **kwargs).scheduler


def whole_pages(cache: Cache) -> PageCache:
    """Return `cache`, which has whole pages, as what it is."""
    assert isinstance(cache, PageCache)
    return cache

"""Engines for tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from kvarts.core.build import Planning, Storage, Watching, build_engine, preparation_of
from kvarts.core.config import EngineConfig
from kvarts.core.content import Content
from kvarts.core.engine import Engine
from kvarts.core.event_log import EventReader
from kvarts.core.executor import Executor, VirtualExecutor
from kvarts.core.kv.cache import Cache
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.request import Request
from kvarts.core.sched.scheduler import Scheduler
from kvarts.cost.polynomial import LinearCost
from kvarts.cost.simulated import SimExecutor
from kvarts.proof.audit.opening import audit_of
from kvarts.sim.replica import Replica

__all__ = ["engine_with", "make_replica", "make_scheduler", "request_of", "run", "whole_pages"]


def engine_with(config: EngineConfig, executor: Executor, **fields: Any) -> Engine:
    """An engine with any fields of Storage, Planning and Watching."""
    kinds = (Storage, Planning, Watching)
    sorted_fields = [{name: fields.pop(name) for name in kind._fields if name in fields} for kind in kinds]
    assert not fields, fields
    return build_engine(config, executor, *(kind(**given) for kind, given in zip(kinds, sorted_fields, strict=True)))


def make_replica(
    config: EngineConfig,
    executor: VirtualExecutor | None = None,
    *,
    readers: Sequence[EventReader] = (),
    step_by_step: bool = False,
    offload: Any = None,
    audit: bool | Literal["laws"] = False,
    **kwargs: Any,
) -> Replica:
    """An engine in virtual time; a step takes a millisecond unless `executor` says otherwise."""
    executor = executor or SimExecutor(LinearCost(step_ms=1.0))
    engine = engine_with(
        config, executor, readers=readers, tiers=preparation_of(offload), audit=audit_of(audit), **kwargs
    )
    return Replica(engine, executor, step_by_step=step_by_step)


def make_scheduler(config: EngineConfig, *, offload: Any = None, **kwargs: Any) -> Scheduler:
    """A scheduler of pages that are only counted."""
    executor = SimExecutor(LinearCost(step_ms=1.0))
    return engine_with(config, executor, tiers=preparation_of(offload), **kwargs).scheduler


def whole_pages(cache: Cache) -> PageCache:
    """Return `cache`, which has whole pages, as what it is."""
    assert isinstance(cache, PageCache)
    return cache


def request_of(index: int, tokens: Iterable[int], max_tokens: int = 1) -> Request:
    """A request whose pages are tokens."""
    prompt = list(tokens)
    content = Content.from_tokens(prompt, page_size=1, owner=index)
    return Request(index, content, num_prompt_tokens=len(prompt), max_tokens=max_tokens)


def run(engine: Replica, *requests: Request) -> None:
    """Run `requests` from now on, to the end of the last one."""
    for request in requests:
        engine.submit(request, engine.now_ns)
    engine.run_until(1 << 60, [])
    engine.flush()
    assert not engine.has_work

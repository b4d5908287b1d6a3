"""Builds an engine: pool, tree, cache, tiers and scheduler, made here and handed in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvarts.config import EngineConfig
from kvarts.engine import Engine
from kvarts.event_log import EventLog, EventReader, Tell
from kvarts.executor.base import Executor
from kvarts.kv.cache import PageCache
from kvarts.rooms import from_room
from kvarts.sched.input_batch import InputBatch
from kvarts.sched.loads import LowerTiers
from kvarts.sched.page_source import OnePool, PageSource
from kvarts.sched.policy import AdmissionPolicy, PriorityPolicy
from kvarts.sched.scheduler import Scheduler

__all__ = ["TierOpener", "build_engine"]


class TierOpener(Protocol):
    """Settings of tiers below a device, which can be opened below one cache."""

    @property
    def evicts_safe_first(self) -> bool:
        """Whether the device evicts first what a tier below holds as well."""

    @property
    def full_prompt_hits(self) -> bool:
        """Whether a load may cover a whole prompt."""

    def open_tiers(
        self, cache: PageCache, config: EngineConfig, *, with_page_ids: bool, tell: Tell | None
    ) -> LowerTiers | None:
        """Open the tiers below `cache`; None if the settings ask for none."""


def build_engine(
    config: EngineConfig,
    executor: Executor,
    *,
    readers: Sequence[EventReader] = (),
    num_waiting: int = 1,
    log: EventLog | None = None,
    cache: PageCache | None = None,
    pages: PageSource | None = None,
    policy: AdmissionPolicy | None = None,
    offload: TierOpener | None = None,
    audit: bool = False,
) -> Engine:
    """Build an engine for `executor`.

    `readers`: of what it tells; `num_waiting`: see EventLog. `log`, `cache` and `pages`: of a part of a shared device,
    instead of a log of these readers and an own pool. `policy`: which waiting request is next; by priority and arrival
    if left out. `offload`: tiers below the device. `audit`: assert the laws of page accounting after every step; and
    unless the device is shared, hold every event against a second bookkeeping. Raises ConfigError for an audit without
    the room `audit`.
    """
    auditor = None
    if audit and cache is None:
        auditor = from_room("audit.reader", "AuditReader", field="audit")(
            config.num_pages,
            config.page_size,
            safe_first=offload is not None and offload.evicts_safe_first,
            full_prompt_hits=offload is not None and offload.full_prompt_hits,
        )
        readers = (*readers, auditor)
    if log is None:
        log = EventLog(readers, num_waiting=num_waiting)
    tell = log.tell_details
    with_page_ids = executor.needs_page_ids
    if cache is None:
        cache = PageCache(
            config.num_pages,
            with_page_ids=with_page_ids,
            tell=tell,
            safe_first=offload is not None and offload.evicts_safe_first,
        )
    if pages is None:
        pages = OnePool(cache, token_budget=config.max_num_batched_tokens)
    tiers = None
    if offload is not None:
        tiers = offload.open_tiers(cache, config, with_page_ids=with_page_ids, tell=tell)
    scheduler = Scheduler(
        config,
        cache,
        pages,
        PriorityPolicy() if policy is None else policy,
        tiers=tiers,
        batch=InputBatch(config.max_num_seqs, config.page_size) if with_page_ids else None,
        tell=tell,
    )
    if auditor is not None:
        auditor.account = cache
    return Engine(config, scheduler, executor, log, audit=audit)

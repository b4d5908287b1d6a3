"""Builds an engine: makes pool, tree, cache, tiers and scheduler, and hands them in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvarts.config import EngineConfig
from kvarts.engine import Engine
from kvarts.errors import ConfigError
from kvarts.event_log import EventLog, EventReader, Tell
from kvarts.executor.base import Executor
from kvarts.kv.block_pages import BlockPages
from kvarts.kv.cache import PageCache
from kvarts.kv.eviction import EvictionOrder, LruOrder
from kvarts.kv.group_memory import GroupMemory
from kvarts.kv.pins import Pins
from kvarts.kv.pool import CountPool, IdPool
from kvarts.kv.tiered_pages import TieredPages
from kvarts.kv.transfer import PrefillTimes
from kvarts.kv.tree import PrefixTree
from kvarts.kv.watcher import TreeWatcher
from kvarts.rooms import from_room
from kvarts.sched.drafts import Drafter
from kvarts.sched.group_batch import GroupBatch
from kvarts.sched.group_loads import GroupTiers
from kvarts.sched.grouped import GroupedScheduler
from kvarts.sched.input_batch import InputBatch
from kvarts.sched.loads import LowerTiers
from kvarts.sched.page_source import OnePool, PageSource
from kvarts.sched.policy import AdmissionPolicy, PriorityPolicy
from kvarts.sched.scheduler import Scheduler

__all__ = [
    "GroupTierSettings",
    "PreparedTiers",
    "TierSettings",
    "build_engine",
    "build_grouped_engine",
    "build_sharing_engine",
]


class PreparedTiers(Protocol):
    """Tiers that can be opened below one cache, which has a tree made with `order` and `watcher`."""

    order: EvictionOrder
    watcher: TreeWatcher | None
    evicts_safe_first: bool
    """Whether the device evicts pages first that a tier below holds as well."""

    full_prompt_hits: bool
    """Whether a load may cover a whole prompt."""

    def open_below(
        self,
        cache: PageCache,
        *,
        with_page_ids: bool,
        tell: Tell | None,
        prefill: PrefillTimes | None,
        fingerprint: Callable[[], str] | None,
    ) -> LowerTiers:
        """Open the tiers below `cache`.

        `prefill`: how long computing takes; None: that is measured. `fingerprint`: what pages depend on beside tokens.
        """


class TierSettings(Protocol):
    """Settings of tiers below a device."""

    def prepare(self, config: EngineConfig, make_order: Callable[[], EvictionOrder]) -> PreparedTiers | None:
        """Prepare tiers below an engine of `config` that evicts by orders of `make_order`; None without tiers."""


class GroupTierSettings(Protocol):
    """Settings of tiers below a device with KV groups."""

    def group_tiers(self, memory: GroupMemory, page_size: int) -> dict[str, int]:
        """Return the blocks of each tier, by its name. Raise ConfigError for tiers that know whole pages only."""

    def open_group_tiers(
        self, config: EngineConfig, cache: TieredPages, *, with_page_ids: bool, prefill: PrefillTimes | None
    ) -> GroupTiers:
        """Open the tiers, of which there is at least one, below `cache`."""


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
    make_order: Callable[[], EvictionOrder] = LruOrder,
    offload: TierSettings | None = None,
    below: PreparedTiers | None = None,
    moves_pages: bool | None = None,
    prefill: PrefillTimes | None = None,
    audit: bool = False,
    drafter: Drafter | None = None,
) -> Engine:
    """Return an engine around `executor`.

    `readers`: readers of its events; `num_waiting`: how many events may wait, as in EventLog. `log`, `cache` and
    `pages`: those of an engine that shares its device, instead of a new log with these readers and a pool of its own.
    `policy`: which waiting request is next; by default by priority, then arrival. `make_order`: makes the order in
    which runs are evicted. `offload`: tiers below the device; `below`: instead, tiers that were prepared for the tree
    of `cache`. `prefill`: how long prompts take to compute, for the choice between that and loading them; by default
    that is measured. `moves_pages`: the executor carries out transfers; left out, if it needs page ids; otherwise they
    take the time of their channels. `audit`: assert the laws of page accounting after every step, and, unless the
    device is shared, check every event against a second bookkeeping. `drafter`: guesses how sequences go on, for an
    executor that says which guesses are right; those of virtual time compute no tokens, and have none. Raise
    ConfigError for an audit if the room `audit` is not installed.
    """
    if offload is not None:
        assert below is None and cache is None, "the tree of a given cache was made without these tiers"
        below = offload.prepare(config, make_order)
    if audit and cache is None:
        auditor = from_room("audit.auditor", "Auditor", field="audit")(
            config.num_pages,
            config.page_size,
            safe_first=below is not None and below.evicts_safe_first,
            is_lru=make_order is LruOrder,
            full_prompt_hits=below is not None and below.full_prompt_hits,
            page_counts=lambda: cache,
        )
        readers = (*readers, auditor)
    if log is None:
        log = EventLog(readers, num_waiting=num_waiting)
    tell = log.tell_details
    with_page_ids = executor.needs_page_ids
    if moves_pages is None:
        moves_pages = with_page_ids
    if cache is None:
        pool = IdPool(config.num_pages) if with_page_ids else CountPool(config.num_pages)
        order, watcher = (make_order(), None) if below is None else (below.order, below.watcher)
        cache = PageCache(pool, PrefixTree(order, tell, watcher=watcher))
    pins = None
    if pages is None:
        pins = Pins(cache, tell)
        pages = OnePool(cache, token_budget=config.max_num_batched_tokens, pins=pins)
    tiers = None
    if below is not None:
        fingerprint = getattr(executor, "fingerprint", None)  # not every executor has a model
        tiers = below.open_below(cache, with_page_ids=moves_pages, tell=tell, prefill=prefill, fingerprint=fingerprint)
    scheduler = Scheduler(
        config,
        cache,
        pages,
        PriorityPolicy() if policy is None else policy,
        tiers=tiers,
        batch=InputBatch(config.max_num_seqs, config.page_size) if with_page_ids else None,
        tell=tell,
        pins=pins,
        drafter=drafter,
    )
    return Engine(config, scheduler, executor, log, audit=audit, moves_pages=moves_pages)


def build_grouped_engine(
    config: EngineConfig,
    memory: GroupMemory,
    executor: Executor,
    *,
    num_blocks: int,
    readers: Sequence[EventReader] = (),
    num_waiting: int = 1,
    policy: AdmissionPolicy | None = None,
    audit: bool = False,
    offload: GroupTierSettings | None = None,
    prefill: PrefillTimes | None = None,
    drafter: Drafter | None = None,
    moves_pages: bool | None = None,
) -> Engine:
    """Return an engine around an executor of a model with KV groups, in `num_blocks` blocks of `memory`.

    What else there is says `build_engine`. With tiers, an audit asserts the laws of page accounting, and checks no
    events. Raise ConfigError for an audit if the room `audit` is not installed, and for a reader of page and request
    events of an engine with tiers: what a load brings of a page in part has no event.
    """
    if offload is not None and offload.group_tiers(memory, config.page_size):
        log = EventLog(readers, num_waiting=num_waiting)
        if log.tell_details is not None:
            raise ConfigError(
                "is not told of KV groups with tiers below the device yet: pages are loaded in part",
                field="readers",
                hint="Leave out what reads events of pages, or the tiers.",
            )
        below = TieredPages(memory, num_blocks=num_blocks, page_size=config.page_size)
        if moves_pages is None:
            moves_pages = executor.needs_page_ids
        tiers = offload.open_group_tiers(config, below, with_page_ids=moves_pages, prefill=prefill)
        return _grouped(
            config, below, executor, log, policy, audit=audit, tiers=tiers, drafter=drafter, moves_pages=moves_pages
        )
    if audit:
        groups = tuple(
            from_room("audit.part_ledger", "AuditedGroup", field="audit")(
                group.layer.kind, group.part_bytes // memory.block_bytes, group.layer.span, group.layer.sink
            )
            for group in memory.groups
        )
        auditor = from_room("audit.group_auditor", "GroupAuditor", field="audit")(
            groups, num_blocks, config.page_size, keeps_all=memory.keeps == "all", part_counts=lambda: cache
        )
        readers = (*readers, auditor)
    log = EventLog(readers, num_waiting=num_waiting)
    tell = log.tell_details
    cache: BlockPages = BlockPages(memory, num_blocks=num_blocks, page_size=config.page_size, tell=tell)
    return _grouped(config, cache, executor, log, policy, audit=audit, drafter=drafter, moves_pages=moves_pages)


def build_sharing_engine(
    config: EngineConfig,
    cache: BlockPages,
    executor: Executor,
    *,
    log: EventLog,
    pages: PageSource,
    policy: AdmissionPolicy | None = None,
) -> Engine:
    """Return an engine of a model with KV groups that shares its device: `cache` is that of its part, `pages`."""
    return _grouped(config, cache, executor, log, policy, audit=False, pages=pages, moves_pages=False)


def _grouped(
    config: EngineConfig,
    cache: BlockPages,
    executor: Executor,
    log: EventLog,
    policy: AdmissionPolicy | None,
    *,
    audit: bool,
    tiers: GroupTiers | None = None,
    pages: PageSource | None = None,
    drafter: Drafter | None = None,
    moves_pages: bool | None = None,
) -> Engine:
    """Return an engine with KV groups in `cache`. `tiers`: those below it. `pages`: of a device that is shared."""
    rows = GroupBatch(cache, config.max_num_seqs) if executor.needs_page_ids else None
    policy = PriorityPolicy() if policy is None else policy
    tell = log.tell_details
    scheduler = GroupedScheduler(
        config,
        cache,
        policy,
        rows=rows,
        pages=pages,
        tiers=tiers,
        tell=tell,
        pins=Pins(cache, tell) if pages is None else None,
        drafter=drafter,
    )
    if moves_pages is None:
        moves_pages = executor.needs_page_ids
    return Engine(config, scheduler, executor, log, audit=audit, moves_pages=moves_pages)

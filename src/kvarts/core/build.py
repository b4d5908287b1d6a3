"""Builds an engine: creates the cache, tiers, queue and scheduler, and passes them to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, cast

from kvarts.base.errors import ConfigError
from kvarts.core.config import EngineConfig
from kvarts.core.engine import Engine
from kvarts.core.event_log import EventLog, EventReader, Tell
from kvarts.core.executor import Executor
from kvarts.core.kv.cache import Cache, Memory, Pins
from kvarts.core.kv.eviction import EvictionOrder, LruOrder, TreeWatcher
from kvarts.core.kv.page_cache import OneGroupCache, PageCache
from kvarts.core.kv.pool import CountPool, IdPool
from kvarts.core.kv.tree import PrefixTree
from kvarts.core.parts.catalogue import Opening, compose
from kvarts.core.sched.page_source import OnePool, PageSource
from kvarts.core.sched.plan import Batch
from kvarts.core.sched.policy import AdmissionPolicy, PriorityPolicy, WaitingQueue
from kvarts.core.sched.scheduler import Scheduler
from kvarts.core.tiers.config import OffloadConfig
from kvarts.core.tiers.opening import prepare_tiers

if TYPE_CHECKING:  # only an engine with KV groups, tiers, handoffs or page ids pays for them
    from kvarts.core.kv.group_pages import GroupPages
    from kvarts.core.kv.groups import GroupMemory
    from kvarts.core.kv.transfer import LoadKv, PrefillNs
    from kvarts.core.sched.drafts import Drafter
    from kvarts.core.sched.handoffs import Handoffs
    from kvarts.core.sched.input_batch import InputBatch
    from kvarts.core.sched.loads import Loads
    from kvarts.core.sched.lower_tiers import GroupOffers, LowerTiers

__all__ = [
    "Audit",
    "OpenAudit",
    "OpenedAudit",
    "PrepareTiers",
    "PreparedTiers",
    "build_engine",
    "open_group_cache",
    "preparation_of",
]


class PreparedTiers(Protocol):
    """Tiers that can be opened below one cache, whose tree of whole pages was made with `order` and `watcher`."""

    order: EvictionOrder
    watcher: TreeWatcher | None
    evicts_safe_first: bool
    """Whether the device evicts pages first that a tier below also holds."""

    full_prompt_hits: bool
    """Whether a load may cover a whole prompt."""

    is_lazy: bool
    """Whether the choice of what to store depends on which is evicted next."""

    load_kv: LoadKv
    """How requests wait for their loads."""

    tier_names: Sequence[str]
    """The names of the tiers of this engine alone, the fastest first. With KV groups their parts are in its tree."""

    def open_below(
        self,
        cache: Cache,
        *,
        with_page_ids: bool,
        tell: Tell | None,
        prefill: PrefillNs | None,
        fingerprint: Callable[[], str] | None,
        splits: bool,
    ) -> LowerTiers:
        """Open the tiers below `cache`.

        `prefill`: compute times; None: measured while running. `fingerprint`: returns an identifier of everything that
        pages depend on besides their tokens. `splits`: a request may compute its first pages while others are loaded.
        """


class OpenedAudit(Protocol):
    """The audit of one engine, before that engine is built."""

    make_order: Callable[[], EvictionOrder]
    """Makes the engine's eviction order, watched where the audit needs it."""

    def open(
        self,
        config: EngineConfig,
        memory: GroupMemory | None,
        num_blocks: int | None,
        below: PreparedTiers | None,
        *,
        plans_ahead: bool,
        finds_prefixes: bool,
        account: Callable[[], Memory],
    ) -> EventReader:
        """Return the reader that checks the engine's events. `account`: returns the engine's cache, once it has one."""


OpenAudit: TypeAlias = Callable[..., OpenedAudit]
"""Opens an independent ledger for an engine: `kvarts.proof.audit.opening.open_audit`, which is passed in from above.

Raises ConfigError for a part of the engine that the ledger does not follow.
"""

Audit: TypeAlias = OpenAudit | Literal["laws"] | None
"""How an engine is audited: by its laws and by an independent ledger, by its laws alone, or not."""

PrepareTiers = Callable[[EngineConfig, Callable[[], EvictionOrder], "GroupMemory | None"], PreparedTiers | None]
"""Prepares tiers below an engine with a config, an eviction order and KV groups, if any; returns None without tiers.

Raises ConfigError for tiers that store whole pages only, below a device with KV groups.
"""


def preparation_of(settings: OffloadConfig | None, **of_files: Any) -> PrepareTiers | None:
    """Return what prepares the tiers of `settings`; None without settings.

    `of_files`: the keys and the namespace of the pages in files, for the function that opens these tiers.
    """
    return None if settings is None else partial(prepare_tiers, settings, **of_files)


def build_engine(
    config: EngineConfig,
    executor: Executor,
    *,
    memory: GroupMemory | None = None,
    num_blocks: int | None = None,
    readers: Sequence[EventReader] = (),
    num_waiting: int = 1,
    log: EventLog | None = None,
    cache: Cache | None = None,
    pages: PageSource | None = None,
    policy: AdmissionPolicy | None = None,
    make_order: Callable[[], EvictionOrder] = LruOrder,
    tiers: PrepareTiers | None = None,
    below: PreparedTiers | None = None,
    moves_pages: bool | None = None,
    prefill: PrefillNs | None = None,
    audit: Audit = None,
    drafter: Drafter | None = None,
    num_draft_slots: int = 0,
    holds_pages: bool = False,
    hands_over: bool = False,
    plans_ahead: bool = False,
    finds_prefixes: bool = True,
    step_ns: Callable[[Batch], int] | None = None,
    leaps_told: bool = True,
) -> Engine:
    """Return an engine around `executor`.

    `memory`: the KV groups of a model in which some layers keep less than every token. It has `num_blocks` blocks,
    by default as many as `config.num_pages` pages occupy. `readers`: readers of its events; `num_waiting`: number of
    events that may wait, as in EventLog. `log`, `cache` and `pages`: those of an engine that shares its device,
    instead of a new log with these readers and a separate pool. `policy`: chooses the next waiting request; default:
    by priority, then arrival. `make_order`: makes the order in which runs are evicted. `tiers`: prepares tiers below
    the device; `below`: instead, tiers that were prepared for the tree of `cache`. `prefill`: compute times of prompts,
    for the choice between computing and loading; default: measured. `moves_pages`: the executor performs transfers;
    default: if it needs page ids; otherwise transfers take the time of their channels. `audit`: assert the laws of
    page accounting after every step, and check every event against an independent ledger; `"laws"`: without the ledger.
    `drafter`: proposes draft tokens, for an executor that verifies them; executors in virtual time compute no tokens
    and do not support one. `num_draft_slots`: drafts come first, see Scheduler. `holds_pages`: pages are kept in use
    between requests. `hands_over`: other engines compute the prompts of requests or continue them. `plans_ahead`: a
    step is planned while the one before it runs, as in Scheduler; not for executors that compute tokens.
    `finds_prefixes`: False for an engine without a prefix cache, whose requests find nothing. `step_ns`: the expected
    duration of a step, for `max_itl_ms`. `leaps_told`: an engine with KV groups and readers of details may leap, see
    GroupPages.

    Raise ConfigError for an audit whose ledger does not follow some part, and for `max_itl_ms` without `step_ns`.
    """
    opening: OpenedAudit | None = None
    if audit is not None and audit != "laws":
        opening = audit(
            config,
            make_order,
            has_groups=memory is not None,
            has_tiers=tiers is not None,
            plans_ahead=plans_ahead,
            hands_over=hands_over,
            shares_device=cache is not None,
            drafts_first=num_draft_slots > 0,
        )
        make_order = opening.make_order
    if tiers is not None:
        assert cache is None, "the tree of a given cache was made without these tiers"
        below = tiers(config, make_order, memory)
    if memory is not None:
        num_blocks = memory.num_blocks(config.num_pages) if num_blocks is None else num_blocks
    is_lazy = memory is not None and below is not None and below.is_lazy
    if opening is not None:

        def account() -> Cache:
            assert cache is not None
            return cache

        auditor = opening.open(
            config,
            memory,
            num_blocks,
            below,
            plans_ahead=plans_ahead,
            finds_prefixes=finds_prefixes,
            account=account,
        )
        readers = (*readers, auditor)
    if log is None:
        log = EventLog(readers, num_waiting=num_waiting)
    tell = log.tell_details
    if moves_pages is None:
        moves_pages = executor.needs_page_ids
    is_shared = pages is not None
    if cache is None:
        needs_ids = executor.needs_page_ids
        # Ids, events, tiers and handoffs name the parts of a group.
        counts_only = below is None and tell is None and not (needs_ids or holds_pages or hands_over)
        # An order that decides run by run may evict others where requests have made other runs of the same pages.
        if memory is None or (memory.is_whole and counts_only and make_order is LruOrder):
            cache = _page_cache(config, make_order, below, tell, memory, with_page_ids=needs_ids)
        else:
            assert num_blocks is not None
            cache = open_group_cache(
                config,
                memory,
                num_blocks=num_blocks,
                tell=tell,
                with_ids=executor.needs_page_ids or holds_pages or (below is not None and moves_pages),
                num_below=0 if below is None else len(below.tier_names),
                watches_list=is_lazy,
                make_order=make_order,
                plans_ahead=plans_ahead,
                leaps_told=leaps_told and not hands_over,
            )
    pins = None
    fingerprint = getattr(executor, "fingerprint", None)  # executors without a model lack it
    if pages is None:
        pins = Pins(cache, tell)
        pages = OnePool(cache, token_budget=config.max_num_batched_tokens, pins=pins)
    page_size = config.page_size
    blocks_of = (lambda num_known: cache.needs.to_compute(num_known, page_size)) if is_shared else None
    waiting = WaitingQueue(PriorityPolicy() if policy is None else policy, blocks_of)
    loads: Loads | None = None
    if below is not None:
        lower = below.open_below(
            cache,
            with_page_ids=moves_pages,
            tell=tell,
            prefill=prefill,
            fingerprint=fingerprint,
            splits=not executor.needs_page_ids,  # rows of a batch are of requests that run
        )
        from kvarts.core.sched.load_waits import Asynchronous, Reserve, Synchronous
        from kvarts.core.sched.loads import Loads, Waits

        waits: Waits
        if below.load_kv == "placed":
            waits = Reserve(cache, pages)
        elif below.load_kv == "async":
            waits = Asynchronous(cache, page_size, tell)
        else:
            waits = Synchronous(cache, page_size, tell)
        offers = None if memory is None else cast("GroupOffers", lower.layout)
        loads = Loads(lower, cache, waiting, page_size, tell, waits, offers)
    batch: InputBatch | None = None
    if executor.needs_page_ids:
        if cache.settles:
            from kvarts.core.sched.group_batch import GroupBatch

            batch = GroupBatch(cast("GroupPages", cache), config.max_num_seqs)
        else:
            from kvarts.core.sched.input_batch import MOST_LATE, InputBatch

            # Without events and tiers, an LRU order evicts the same pages whenever a used page becomes findable.
            is_unseen = make_order is LruOrder and tell is None and below is None and pins is not None
            is_plain = drafter is None and not hands_over
            most_late = max(0, MOST_LATE - page_size) if is_unseen and is_plain else 0
            batch = InputBatch(config.max_num_seqs, page_size, most_late=most_late)
    handoffs: Handoffs | None = None
    if hands_over:
        from kvarts.core.sched.handoffs import Handoffs

        handoffs = Handoffs(cache, tell, finds_prefixes=finds_prefixes)
    # As in vLLM, the block that stands for missing ones counts as memory here.
    num_kept = int(config.watermark * (cache.pool.total + 1))
    scheduler = Scheduler(
        config,
        cache,
        pages,
        waiting,
        batch=batch,
        tell=tell,
        pins=pins,
        lag=int(plans_ahead),
        finds_prefixes=finds_prefixes,
        num_kept=num_kept,
    )
    asked = Opening(scheduler, config, loads, handoffs, drafter, num_draft_slots, step_ns, num_kept)
    scheduler.hooks = compose(asked)
    return Engine(config, scheduler, executor, log, audit=audit is not None, moves_pages=moves_pages)


def open_group_cache(
    config: EngineConfig,
    memory: GroupMemory,
    *,
    num_blocks: int,
    tell: Tell | None,
    with_ids: bool,
    num_below: int = 0,
    watches_list: bool = False,
    make_order: Callable[[], EvictionOrder] = LruOrder,
    plans_ahead: bool = False,
    leaps_told: bool = False,
) -> GroupPages:
    """Return the cache of an engine for a model with the KV groups of `memory`, in `num_blocks` blocks.

    `with_ids`: parts have ids, which executors and pages kept in use between requests need. `tell` receives the events
    of parts. `num_below` and `watches_list`: for tiers below, see GroupPages. `make_order`: makes the order in which
    runs of parts are evicted; LruOrder stands for the cache's own list. `plans_ahead`, `leaps_told`: see GroupPages.

    Raise ConfigError for an order derived from LruOrder, which links whole pages.
    """
    from kvarts.core.kv.group_pages import GroupPages

    order = None if make_order is LruOrder else make_order()
    if getattr(order, "links_pages", False):
        raise ConfigError(
            f"makes {type(order).__name__}, which is derived from LruOrder: that lists whole pages only",
            field="eviction",
            hint="Derive it from BaseOrder.",
        )
    return GroupPages(
        memory,
        num_blocks=num_blocks,
        page_size=config.page_size,
        most_new_tokens=config.max_num_batched_tokens,
        with_ids=with_ids,
        tell=tell,
        num_below=num_below,
        watches_list=watches_list,
        eviction_order=order,
        at_branches=config.snapshots == "branches",
        plans_ahead=plans_ahead,
        leaps_told=leaps_told,
    )


def _page_cache(
    config: EngineConfig,
    make_order: Callable[[], EvictionOrder],
    below: PreparedTiers | None,
    tell: Tell | None,
    memory: GroupMemory | None,
    *,
    with_page_ids: bool,
) -> PageCache:
    """Return a cache of whole pages; with `memory`, they are counted as the parts of its only group."""
    pool = IdPool(config.num_pages) if with_page_ids else CountPool(config.num_pages)
    order, watcher = (make_order(), None) if below is None else (below.order, below.watcher)
    tree = PrefixTree(order, tell, watcher=watcher)
    if memory is None:
        return PageCache(pool, tree)
    return OneGroupCache(pool, tree, page_bytes=memory.page_bytes, most_new_tokens=config.max_num_batched_tokens)

"""Builds an engine: creates the cache, tiers, queue and scheduler, and passes them to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TypeAlias, cast

from kvarts.base.errors import ConfigError
from kvarts.core.config import BatchRules, EngineConfig
from kvarts.core.engine import Engine
from kvarts.core.event_log import Emit, EventLog, EventReader
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
from kvarts.core.sched.running import Running
from kvarts.core.sched.scheduler import Scheduler
from kvarts.core.sched.wheel import DecodeWheel
from kvarts.core.tiers.config import OffloadConfig
from kvarts.core.tiers.opening import prepare_tiers

if TYPE_CHECKING:  # only an engine with KV groups, tiers, handoffs or page ids pays for them
    from kvarts.core.kv.group_pages import Decoding, GroupPages
    from kvarts.core.kv.groups import GroupMemory
    from kvarts.core.kv.transfer import LoadKv, PrefillNs
    from kvarts.core.sched.drafts import Drafter
    from kvarts.core.sched.foreseen_drafts import Speculation
    from kvarts.core.sched.handoffs import Handoffs
    from kvarts.core.sched.input_batch import InputBatch
    from kvarts.core.sched.loads import Loads
    from kvarts.core.sched.lower_tiers import GroupOffers, LowerTiers
    from kvarts.core.tiers.hicache import HostMemory

__all__ = [
    "Audit",
    "OpenAudit",
    "OpenedAudit",
    "Planning",
    "PrepareTiers",
    "PreparedTiers",
    "Storage",
    "Watching",
    "build_engine",
    "open_group_cache",
    "preparation_of",
]


class PreparedTiers(Protocol):
    """Tiers that can be opened below one cache, whose tree of whole pages was made with `order` and `watcher`."""

    order: EvictionOrder
    watcher: TreeWatcher | None
    num_safe_tiers: int
    """The device evicts pages first that one of so many tiers below, the fastest, also holds."""

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
        emit: Emit | None,
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
        self, num_blocks: int | None, below: PreparedTiers | None, *, account: Callable[[], Memory]
    ) -> EventReader:
        """Return the reader that checks the engine's events. `account`: returns the engine's cache, once it has one."""


OpenAudit: TypeAlias = "Callable[[EngineConfig, Storage, Planning], OpenedAudit]"
"""Opens an independent ledger for an engine: `kvarts.proof.audit.opening.open_audit`, which is passed in from above.

Raises ConfigError for a part of the engine that the ledger does not follow.
"""

Audit: TypeAlias = "OpenAudit | Literal['laws'] | None"
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


class Storage(NamedTuple):
    """Where an engine keeps KV: on its device, and in tiers below.

    `memory`: the KV groups of a model in which some layers keep less than every token. It has `num_blocks` blocks, by
    default as many as `num_pages` pages of the config occupy. `make_order`: makes the order in which runs are evicted.
    `cache` and `pages`: those of an engine that shares its device. `holds_pages`: pages are kept in use between
    requests. `leaps_emitted`: an engine with KV groups and readers of details may leap, see GroupPages.

    `tiers`: prepares tiers below the device; `below`: instead, tiers that were prepared for the tree of `cache`.
    `prefill`: compute times of prompts, for the choice between computing and loading; default: measured. `moves_pages`:
    the executor performs transfers; default: if it needs page ids; otherwise transfers take the time of their channels.
    `host`: host memory below a radix cache of whole runs, in place of such tiers.
    """

    memory: GroupMemory | None = None
    num_blocks: int | None = None
    make_order: Callable[[], EvictionOrder] = LruOrder
    cache: Cache | None = None
    pages: PageSource | None = None
    holds_pages: bool = False
    leaps_emitted: bool = True
    tiers: PrepareTiers | None = None
    below: PreparedTiers | None = None
    prefill: PrefillNs | None = None
    moves_pages: bool | None = None
    host: HostMemory | None = None


class Planning(NamedTuple):
    """How an engine plans its steps.

    `policy`: chooses the next waiting request; default: by priority, then arrival. `drafter`: proposes draft tokens,
    for an executor that verifies them; executors in virtual time compute no tokens and do not support one.
    `num_draft_slots`: drafts come first, see Scheduler. `speculation`: drafts in virtual time. `hands_over`: other
    engines compute the prompts of requests or continue them. `plans_ahead`: a step is planned while the one before it
    runs, as in Scheduler; not for executors that compute tokens. `finds_prefixes`: False for an engine without a prefix
    cache, whose requests find nothing. `step_ns`: the expected duration of a step, for `max_itl_ms`. `ends_steps`: as
    of Preemptor. `running`: the order in which running requests are preempted. `batches`: steps of prompts or of
    decodes, over a radix cache of whole runs, by these rules; the policy and the order of preemption are then theirs.
    """

    policy: AdmissionPolicy | None = None
    drafter: Drafter | None = None
    num_draft_slots: int = 0
    speculation: Speculation | None = None
    hands_over: bool = False
    plans_ahead: bool = False
    finds_prefixes: bool = True
    step_ns: Callable[[Batch], int] | None = None
    ends_steps: bool = True
    running: type[Running] = Running
    batches: BatchRules | None = None


class Watching(NamedTuple):
    """Readers of what an engine does, and what checks it.

    `readers`: readers of its events; `num_waiting`: number of events that may wait, as in EventLog. `log`: that of an
    engine that shares its device, instead of a new log with these readers. `audit`: assert the laws of page accounting
    after every step, and check every event against an independent ledger; `"laws"`: without the ledger.
    """

    readers: Sequence[EventReader] = ()
    num_waiting: int = 1
    log: EventLog | None = None
    audit: Audit = None


OWN_DEVICE: Final = Storage()
ONE_AFTER_THE_OTHER: Final = Planning()
UNWATCHED: Final = Watching()


def build_engine(
    config: EngineConfig,
    executor: Executor,
    storage: Storage = OWN_DEVICE,
    planning: Planning = ONE_AFTER_THE_OTHER,
    watching: Watching = UNWATCHED,
) -> Engine:
    """Return an engine around `executor`.

    Raise ConfigError for an audit whose ledger does not follow some part, and for `max_itl_ms` without `step_ns`.
    """
    return _Assembly(config, executor, storage, planning, watching).engine()


class _Assembly:
    """An engine that is being built: its log and cache first, then what reads or fills them."""

    def __init__(
        self, config: EngineConfig, executor: Executor, storage: Storage, planning: Planning, watching: Watching
    ) -> None:
        self.config, self.executor = config, executor
        self.storage, self.planning, self.watching = storage, planning, watching
        audit = watching.audit
        opening = None if audit is None or audit == "laws" else audit(config, storage, planning)
        self.make_order = storage.make_order if opening is None else opening.make_order
        self.below = storage.below
        if storage.tiers is not None:
            assert storage.cache is None, "the tree of a given cache was made without these tiers"
            self.below = storage.tiers(config, self.make_order, storage.memory)
        self.num_blocks = storage.num_blocks
        if storage.memory is not None and self.num_blocks is None:
            self.num_blocks = storage.memory.num_blocks(config.num_pages)
        readers = watching.readers
        if opening is not None:
            readers = (*readers, opening.open(self.num_blocks, self.below, account=lambda: self.cache))
        self.log = watching.log or EventLog(readers, num_waiting=watching.num_waiting)
        self.emit = self.log.emit_details
        self.moves_pages = executor.needs_page_ids if storage.moves_pages is None else storage.moves_pages
        self.cache: Cache = self._own_cache() if storage.cache is None else storage.cache
        self.pins: Pins | None = None
        self.pages: PageSource
        if storage.pages is None:
            self.pins = Pins(self.cache, self.emit)
            self.pages = OnePool(self.cache, token_budget=config.max_num_batched_tokens, pins=self.pins)
        else:
            self.pages = storage.pages

    def engine(self) -> Engine:
        config, planning = self.config, self.planning
        waiting = self._queue()
        loads = None if self.below is None else self._loads(self.below, waiting)
        # As in vLLM, the block that stands for missing ones counts as memory here.
        num_pieces = 1 if self.storage.memory is None else self.storage.memory.num_pieces
        num_kept = int(config.watermark * (self.cache.pool.total // num_pieces + 1)) * num_pieces
        batch = self._batch() if self.executor.needs_page_ids else None
        running = planning.running(self.cache, DecodeWheel(config.page_size), batch, plans_ahead=planning.plans_ahead)
        scheduler = Scheduler(
            config,
            self.cache,
            self.pages,
            waiting,
            running,
            emit=self.emit,
            pins=self.pins,
            finds_prefixes=planning.finds_prefixes,
            num_kept=num_kept,
        )
        asked = Opening(
            scheduler,
            config,
            loads,
            self._handoffs() if planning.hands_over else None,
            planning.drafter,
            planning.num_draft_slots,
            planning.speculation,
            planning.step_ns,
            num_kept,
            planning.batches,
            self.storage.host,
        )
        scheduler.preemptor.ends_steps = planning.ends_steps
        scheduler.hooks = compose(asked)
        audit = self.watching.audit is not None
        return Engine(config, scheduler, self.executor, self.log, audit=audit, moves_pages=self.moves_pages)

    def _own_cache(self) -> Cache:
        """Return a cache of its own: of whole pages, or of the groups of the model."""
        storage, memory, below = self.storage, self.storage.memory, self.below
        needs_ids, hands_over = self.executor.needs_page_ids, self.planning.hands_over
        # Ids, events, tiers and handoffs name the parts of a group.
        counts_only = below is None and self.emit is None and not (needs_ids or storage.holds_pages or hands_over)
        if self.planning.batches is not None:
            from kvarts.core.kv.radix import RadixCache, RadixTree, make_radix_order

            if storage.host is not None:
                from kvarts.core.kv.hicache import HostRadixCache, HostRadixTree

                spec = storage.host.spec
                tree = HostRadixTree(spec.num_pages, storage.host.policy, spec.name, self.emit)
                return HostRadixCache(CountPool(self.config.num_pages), tree)
            rules = self.planning.batches
            if rules.window:
                from kvarts.core.kv.windows import WindowRadixCache, WindowRadixTree

                windowed = WindowRadixTree(rules.window, self.config.page_size, rules.window_pages, self.emit)
                return WindowRadixCache(CountPool(self.config.num_pages), windowed, rules.window)
            if rules.slots:
                from kvarts.core.kv.states import StateRadixCache, StateRadixTree

                stateful = StateRadixTree(rules.slots, self.emit)
                return StateRadixCache(CountPool(self.config.num_pages), stateful, 1 + rules.state_buffers)
            order = make_radix_order(self.planning.batches, self.config.page_size)
            return RadixCache(CountPool(self.config.num_pages), RadixTree(self.emit, order))
        # An order that decides run by run may evict others where requests have made other runs of the same pages.
        if memory is None or (memory.is_whole and counts_only and self.make_order is LruOrder):
            return _page_cache(self.config, self.make_order, below, self.emit, memory, with_page_ids=needs_ids)
        assert self.num_blocks is not None
        from kvarts.core.kv.group_pages import Decoding

        return open_group_cache(
            self.config,
            memory,
            num_blocks=self.num_blocks,
            emit=self.emit,
            with_ids=needs_ids or storage.holds_pages or (below is not None and self.moves_pages),
            below=below,
            make_order=self.make_order,
            decoding=Decoding(
                self.planning.plans_ahead,
                storage.leaps_emitted and not hands_over,
                None if self.planning.speculation is None else self.planning.speculation.space,
            ),
        )

    def _queue(self) -> WaitingQueue:
        needs, page_size = self.cache.needs, self.config.page_size
        is_shared = self.storage.pages is not None
        blocks_of = (lambda num_known: needs.to_compute(num_known, page_size)) if is_shared else None
        return WaitingQueue(self.planning.policy or PriorityPolicy(), blocks_of)

    def _loads(self, below: PreparedTiers, waiting: WaitingQueue) -> Loads:
        from kvarts.core.sched.load_waits import Asynchronous, Reserve, Synchronous
        from kvarts.core.sched.loads import Loads, Waits

        cache, page_size, emit = self.cache, self.config.page_size, self.emit
        lower = below.open_below(
            cache,
            with_page_ids=self.moves_pages,
            emit=emit,
            prefill=self.storage.prefill,
            fingerprint=getattr(self.executor, "fingerprint", None),  # executors without a model lack it
            splits=not self.executor.needs_page_ids,  # rows of a batch are of requests that run
        )
        waits: Waits
        if below.load_kv == "placed":
            waits = Reserve(cache, self.pages)
        elif below.load_kv == "async":
            waits = Asynchronous(cache, page_size, emit)
        else:
            waits = Synchronous(cache, page_size, emit)
        offers = None if self.storage.memory is None else cast("GroupOffers", lower.layout)
        return Loads(lower, cache, waiting, page_size, emit, waits, offers)

    def _batch(self) -> InputBatch:
        config, planning = self.config, self.planning
        if self.cache.frees_skipped:
            from kvarts.core.sched.group_batch import GroupBatch

            return GroupBatch(cast("GroupPages", self.cache), config.max_num_seqs)
        from kvarts.core.sched.input_batch import MOST_LATE, InputBatch

        # Without events and tiers, an LRU order evicts the same pages whenever a used page becomes findable.
        is_plain = self.make_order is LruOrder and planning.drafter is None and not planning.hands_over
        is_unseen = self.emit is None and self.below is None and self.pins is not None
        most_late = max(0, MOST_LATE - config.page_size) if is_plain and is_unseen else 0
        return InputBatch(config.max_num_seqs, config.page_size, most_late=most_late)

    def _handoffs(self) -> Handoffs:
        from kvarts.core.sched.handoffs import Handoffs

        return Handoffs(self.cache, self.emit, finds_prefixes=self.planning.finds_prefixes)


def open_group_cache(
    config: EngineConfig,
    memory: GroupMemory,
    *,
    num_blocks: int,
    emit: Emit | None,
    with_ids: bool,
    below: PreparedTiers | None = None,
    make_order: Callable[[], EvictionOrder] = LruOrder,
    decoding: Decoding | None = None,
) -> GroupPages:
    """Return the cache of an engine for a model with the KV groups of `memory`, in `num_blocks` blocks.

    `with_ids`: parts have ids, which executors and pages kept in use between requests need. `emit` receives the events
    of parts. `below`: the tiers below it. `make_order`: makes the order in which runs of parts are evicted; LruOrder
    stands for the cache's own list. `decoding`: how pages of decodes are taken; None: one step after the other.

    Raise ConfigError for an order derived from LruOrder, which links whole pages.
    """
    from kvarts.core.kv.group_pages import STEP_BY_STEP, GroupPages, GroupsBelow

    order = None if make_order is LruOrder else make_order()
    if getattr(order, "links_pages", False):
        raise ConfigError(
            f"makes {type(order).__name__}, which is derived from LruOrder: that lists whole pages only",
            field="eviction",
            hint="Derive it from BaseOrder.",
        )
    return GroupPages(
        memory,
        IdPool(num_blocks) if with_ids else CountPool(num_blocks),
        page_size=config.page_size,
        most_new_tokens=config.max_num_batched_tokens,
        emit=emit,
        below=GroupsBelow() if below is None else GroupsBelow(len(below.tier_names), below.is_lazy),
        eviction_order=order,
        at_branches=config.snapshots == "branches",
        decoding=STEP_BY_STEP if decoding is None else decoding,
    )


def _page_cache(
    config: EngineConfig,
    make_order: Callable[[], EvictionOrder],
    below: PreparedTiers | None,
    emit: Emit | None,
    memory: GroupMemory | None,
    *,
    with_page_ids: bool,
) -> PageCache:
    """Return a cache of whole pages; with `memory`, they are counted as the parts of its only group."""
    pool = IdPool(config.num_pages) if with_page_ids else CountPool(config.num_pages)
    order, watcher = (make_order(), None) if below is None else (below.order, below.watcher)
    tree = PrefixTree(order, emit, watcher=watcher)
    if memory is None:
        return PageCache(pool, tree)
    return OneGroupCache(pool, tree, page_bytes=memory.page_bytes, most_new_tokens=config.max_num_batched_tokens)

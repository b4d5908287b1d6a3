"""kvarts' side: its scheduler on a workload, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from equal.ranks import run_ranks
from equal.workload import FULL, NEVER, STEP_NS, Step, TracedAsk, Workload
from kvarts.core.build import Planning, Storage, Watching, build_engine
from kvarts.core.config import EngineConfig
from kvarts.core.content import Content
from kvarts.core.event_log import EventReader
from kvarts.core.events import (
    Admitted,
    ChunkComputed,
    DraftTaken,
    Event,
    Finished,
    PagesRemoved,
    PagesStored,
    Preemption,
)
from kvarts.core.executor import Executor
from kvarts.core.keys import BlockKeys
from kvarts.core.kv.eviction import LruOrder
from kvarts.core.kv.groups import STATE_SPAN, GroupMemory, PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.core.kv.runs import PartRun, RunMatch
from kvarts.core.kv.transfer import Loaded, Offer, Weighed
from kvarts.core.request import Request, RequestState
from kvarts.core.sched.foreseen_drafts import Speculation
from kvarts.core.sched.plan import StepPlan, StepResult
from kvarts.core.sched.policy import ArrivalPolicy
from kvarts.core.sched.running import Running, RunningByArrival
from kvarts.cost.simulated import SimExecutor
from kvarts.sim.routers.config import Routing
from kvarts.sim.routers.view import WorkerFacts


class Recorder:
    """An EventReader that keeps what one step did."""

    wants_details = True

    def __init__(
        self, *, page_size: int, with_events: bool, block_pages: Sequence[int] = (), lookahead: int = 0
    ) -> None:
        self.step = Step()
        self.num_hit: dict[int, int] = {}
        self.num_drafted: dict[int, int] = {}
        self.keys: dict[int, BlockKeys] = {}
        self._page_size = page_size
        self._with_events = with_events
        self._block_pages = block_pages
        self._lookahead = lookahead

    def observe(self, events: Sequence[Event]) -> None:
        """Note the events of a step."""
        step = self.step
        for event in events:
            if isinstance(event, ChunkComputed):
                step.tokens[event.request] = event.end - event.start
            elif isinstance(event, DraftTaken):
                self.num_drafted[event.request] = event.end - event.start
            elif isinstance(event, Admitted):
                step.admitted[event.request] = event.num_hit_pages * self._page_size
            elif isinstance(event, Preemption):
                step.preempted.append(event.victim)
            elif isinstance(event, Finished):
                step.ended.append(event.request)
            elif not self._with_events:
                continue
            elif isinstance(event, PagesStored):
                step.stored += self._names(event.content, event.start_page, event.end_page, event.group)
            elif isinstance(event, PagesRemoved):
                names = self._names(event.content, event.start_page, event.end_page, event.group)
                step.removed += reversed(names)

    def _names(self, content: Content, start: int, end: int, group: int | None) -> list[tuple[int, str]]:
        keys = self.keys.get(id(content))
        if keys is None:
            keys = self.keys[id(content)] = BlockKeys(content, lookahead=self._lookahead)
        count = self._block_pages[group] if group is not None and self._block_pages else 1
        return [(group or 0, keys[page].hex()) for page in range(start + count - 1, end, count)]


def memory_of(workload: Workload) -> GroupMemory | None:
    """Return the KV groups of a workload; None for one group that keeps everything."""
    groups = workload.groups
    if groups == [FULL]:
        return None
    kinds = [
        ("state", STATE_SPAN) if kind in ("states", "aligned") else (kind.removeprefix("latent-"), span)
        for kind, span in groups
    ]
    layers = [KvLayer(kind=kind, num_heads=1, head_numbers=32, span=span) for kind, span in kinds]  # type: ignore[arg-type]
    parts = tuple(PartGroup(layer, part_bytes=1) for layer in layers)
    return GroupMemory(
        parts,
        aligns=("aligned", None) in groups,
        retention_interval=workload.retention,
        renames_states=workload.version == "0.32",
        saves_inside=workload.saves_inside,
        drops_last=workload.is_eagle and workload.version == "0.32",
    )


def kvarts_steps(workload: Workload) -> Iterator[Step]:
    """Yield what kvarts does in each step, in all ranks, until every request has ended."""
    if workload.num_ranks > 1:
        return run_ranks(workload, run_kvarts, OurFrontEnd(workload))
    return run_kvarts(workload)


def run_kvarts(workload: Workload) -> Iterator[Step]:
    """Yield what kvarts does in each step, until every request has ended."""
    config = EngineConfig(
        num_pages=workload.num_pages,
        page_size=workload.page_size,
        max_num_batched_tokens=workload.max_num_batched_tokens,
        max_num_seqs=workload.max_num_seqs,
        long_prefill_token_threshold=workload.long_prefill_token_threshold,
        prefill_schedule_interval=workload.prefill_schedule_interval,
        watermark=workload.watermark,
    )
    memory = memory_of(workload)
    if workload.started is not None:
        config, memory = workload.started, workload.started.memory if workload.started.groups else None
    kinds = workload.groups
    if memory is not None:
        is_latent = [group.is_latent for group in memory.groups]
        kinds = [("latent_window" if each else kind, span) for each, (kind, span) in zip(is_latent, kinds, strict=True)]
    tiers: Any = None if workload.load_kv is None else Below(workload)
    executor: Executor = SimExecutor(workload.cost)
    drafter = None
    if workload.num_draft_slots:
        executor, drafter = Sampler(workload), Drafts(workload)
    num_pieces = 1
    block_pages: tuple[int, ...] = ()
    if memory is not None and workload.started is not None:
        num_pieces, block_pages = memory.num_pieces, tuple(group.block_pages for group in memory.groups)
    recorder = Recorder(
        page_size=workload.page_size,
        with_events=workload.with_events and not workload.publishes,
        block_pages=block_pages,
        lookahead=workload.lookahead,
    )
    readers: list[EventReader] = [recorder]
    if workload.publishes:
        from equal.published import Published  # decodes with vLLM's classes
        from kvarts.core.keys import VLLM_DEFAULT_SEED, KeyMaker, root_key
        from kvarts.doors.kv_events.copies import CopiesReader

        sink = Published(recorder, kinds, block_pages, workload.page_size)
        hashes = KeyMaker("sha256", root_key("sha256", VLLM_DEFAULT_SEED), lookahead=workload.lookahead)
        readers.append(CopiesReader(sink, hashes=hashes, clears=False, block_pages=block_pages))
    engine = build_engine(
        config,
        executor,
        Storage(memory=memory, num_blocks=workload.num_blocks * num_pieces, below=tiers, moves_pages=False),
        Planning(
            drafter=drafter,
            num_draft_slots=workload.num_draft_slots,
            speculation=speculation_of(workload) if workload.num_drafts else None,
            plans_ahead=workload.is_async,
            finds_prefixes=workload.finds_prefixes,
            ends_steps=workload.version == "0.32",
            policy=ArrivalPolicy() if workload.has_ties else None,
            running=RunningByArrival if workload.has_ties else Running,
        ),
        Watching(readers),
    )
    requests: list[Request] = []
    preempted: set[int] = set()
    scheduler = engine.scheduler
    step = 0
    is_under_way = False
    """Whether a step runs, with asynchronous scheduling: it ends when those that arrived during it are known."""
    asks = workload.asks
    while len(requests) < len(asks) or workload.is_open or engine.has_work or is_under_way:
        ask = asks[len(requests)] if len(requests) < len(asks) else None
        if isinstance(ask, TracedAsk) and not engine.has_work:
            engine.now_ns = max(engine.now_ns, ask.row.arrival_ns)
        now_ns = engine.now_ns if workload.is_traced else step * STEP_NS
        while len(requests) < len(asks):
            ask = asks[len(requests)]
            if isinstance(ask, TracedAsk) and ask.row.arrival_ns <= now_ns:
                ask.step = step
            if ask.step > step:
                break
            requests.append(request_of(workload, len(requests)))
            assert engine.submit(requests[-1], now_ns) is None
        if tiers is not None:
            tiers.begin(step)
        recorder.step = Step()
        recorder.num_drafted = {}
        given_up = [request for request, ask in zip(requests, asks, strict=False) if ask.gives_up == step]
        given_up = [each for each in given_up if each.state not in (RequestState.FINISHED, RequestState.CANCELLED)]
        for request in given_up:
            if workload.is_async:
                scheduler.give_up(request)
            else:
                engine.cancel(request)
        if is_under_way:
            engine.end()
        decoded = {each.index: each.admission for each in given_up if scheduler.wheel.has(each)}
        if engine.begin(now_ns):
            decoding = [each.index for each in scheduler.running if each.state is RequestState.DECODING]
            decoding = [index for index in decoding if index not in scheduler.step.held]
            num_free = scheduler.cache.num_free
            is_under_way = workload.is_async
            if is_under_way:
                engine.log.flush()
            else:
                engine.end()
            # Of those that stopped in the step before, some compute the token that ended them; and of those that were
            # given up during it, some compute a token.
            stopped = [index for index in recorder.step.ended if requests[index].stops]
            gone = sorted(decoded, key=decoded.__getitem__) + stopped
            gone = [index for index in gone if index not in (*recorder.step.preempted, *scheduler.step.held)]
            num_gone = engine.batch.num_decodes - len(decoding) if workload.is_async else 0
            recorder.step.tokens.update(dict.fromkeys(decoding + gone[:num_gone], 1))
            for index in set(recorder.num_drafted) & set(recorder.step.tokens):
                recorder.step.tokens[index] += recorder.num_drafted[index]
        else:
            num_free = scheduler.cache.num_free
            is_under_way = False
            engine.emit()
        recorder.step.num_free = num_free // num_pieces
        preempted.update(recorder.step.preempted)
        ended = {index for index in recorder.step.ended if asks[index].num_good == NEVER} - preempted
        recorder.step.cached = {index: requests[index].cached_tokens for index in ended}
        if workload.is_open:
            recorder.step.load = scheduler.num_waiting, scheduler.running.num_running, scheduler.cache.num_used
        yield recorder.step
        step += 1


def speculation_of(workload: Workload) -> Speculation:
    """Return the drafts in virtual time of a workload."""
    asks = workload.asks
    return Speculation(
        num_drafts=workload.num_drafts,
        num_slots=workload.num_drafts if workload.is_eagle else 0,
        most_tokens=workload.most_tokens,
        accepts=lambda index, place: asks[index].drafts[place - 1][1],
        lookahead=workload.lookahead,
        drops_last=workload.is_eagle and workload.version == "0.32",
        names_at_ends=workload.version != "0.32",
    )


class Sampler:
    """An executor of tokens: it samples those of the workload, and accepts the drafts that are right."""

    needs_page_ids = True

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._row_of: dict[int, int] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        """Return the next token of each row, after the drafts that are right."""
        asks = self._workload.asks
        tokens = np.zeros(self._workload.max_num_seqs, np.uint64)
        accepted = []
        for chunk in plan.batch.chunks:
            self._row_of[chunk.row] = chunk.request_index
            if chunk.is_last:
                tokens[chunk.row] = asks[chunk.request_index].output[chunk.num_known_tokens - chunk.num_prompt_tokens]
        if plan.decodes is not None:
            drafted = [] if plan.drafts is None else plan.drafts.rows.tolist()
            for row, position in zip(plan.decodes.rows.tolist(), plan.decodes.positions.tolist(), strict=True):
                ask = asks[self._row_of[row]]
                place = position + 1 - len(ask.prompt)
                num_right = ask.drafts[place - 1][1] if row in drafted else 0
                if num_right:
                    accepted.append((row, num_right))
                tokens[row] = ask.output[place + num_right]
        return StepResult(STEP_NS, tokens, accepted=tuple(accepted))


class Drafts:
    """kvarts' drafter of the workload."""

    def __init__(self, workload: Workload) -> None:
        self._asks = workload.asks

    def draft(self, request: Request, num_most: int, batch: Any) -> Any:
        """Return right tokens, then wrong ones."""
        ask = self._asks[request.index]
        place = request.content.num_known_tokens - len(ask.prompt)
        num_drafted, num_right = ask.drafts[place - 1]
        assert num_drafted <= num_most
        return np.array([*ask.output[place : place + num_right], *[1] * (num_drafted - num_right)], np.uint64)

    def judge(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Learn nothing."""


class Below:
    """A tier below kvarts' device: it has the first pages of each request, in all groups, and loads take steps.

    As a connector of vLLM does, it loads all that a request needs after what the device has of every group.
    """

    watcher = None
    num_safe_tiers = 0
    is_lazy = full_prompt_hits = is_due = slows_down = False
    num_tiers = 1
    tier_names = ("below",)
    next_ns = NEVER

    def __init__(self, workload: Workload) -> None:
        self.order = LruOrder()
        assert workload.load_kv is not None
        self.load_kv = workload.load_kv
        self.num_transfers = 0
        self._workload = workload
        self._num_below = [ask.num_below for ask in workload.asks]
        self._has_failed: set[int] = set()
        self._offered: dict[int, tuple[Content, int, int]] = {}
        self._loads: list[tuple[int, Loaded]] = []
        self._step = 0

    def open_below(self, cache: Any, **_: Any) -> Any:
        """Return the tier."""
        self._cache = cache
        return self

    @property
    def layout(self) -> Any:
        """What it offers in parts of pages."""
        return self

    def offered(self, request: int) -> RunMatch:
        """Return the pages that the device and the tier have together: those after the device's are loaded."""
        content, start, num_pages = self._offered[request]
        tree = self._cache.parts.tree
        found = RunMatch(content, tree.root(content.salt), [], num_pages)
        here = tree.pieces(tree.match(content, start))
        found.pieces = []
        for group, pieces in enumerate(here):
            _, first = tree.needed(group, num_pages * self._workload.page_size)
            kept = [(run, max(begin, first), end) for run, begin, end in pieces if end > first]
            if max(first, start) < num_pages:
                below = PartRun(group, None, max(first, start), num_pages, [], is_kept=True, list_index=len(here))
                kept.append((below, below.start, below.end))
            found.pieces.append(kept)
        return found

    def begin_step(self, now_ns: int) -> None:
        """Take note of the step."""

    @property
    def has_work(self) -> bool:
        """Whether a load is under way."""
        return bool(self._loads)

    has_loaded = has_work

    def take_loaded(self) -> list[Loaded]:
        """Return the loads that the next plan knows to have ended."""
        ended = [loaded for step, loaded in self._loads if step <= self._step]
        self._loads = [(step, loaded) for step, loaded in self._loads if step > self._step]
        return ended

    def begin(self, step: int) -> None:
        """Begin a step."""
        self._step = step

    def lookup(self, request: int, content: Content, start: int, limit: int) -> Offer | None:
        """Return the pages after `start` that it has."""
        num_pages = min(self._num_below[request], limit) - start
        self._offered[request] = content, start, start + num_pages
        return Offer(num_pages, (num_pages,)) if num_pages > 0 else None

    def weigh(self, offer: Offer, *_: Any, **__: Any) -> Weighed:
        """Load everything: a connector of vLLM does not weigh loads."""
        return Weighed(offer.num_pages, offer.by_tier)

    def start_load(self, request: int, content: Content, start: int, num_pages: int, *_: Any, **__: Any) -> int:
        """Begin a load."""
        ask = self._workload.asks[request]
        self.num_transfers += 1
        num_good = num_pages
        if request not in self._has_failed and ask.num_good < num_pages:
            self._has_failed.add(request)
            num_good = ask.num_good
            self._num_below[request] = start + num_good
        self._loads.append(
            (self._step + ask.load_steps + self._workload.is_async, Loaded(request, start + num_good, (num_good,)))
        )
        return 0

    def use_early(self, transfer: int) -> None:
        """A load is used within its step."""
        self._loads.pop()

    def step_ns(self, now_ns: int, duration_ns: int) -> int:
        """Return the duration of a step."""
        return duration_ns

    def num_pages(self) -> tuple[int, ...]:
        """Return no counts."""
        return 0, 0

    def coming(self, *_: Any) -> None:
        """Return nothing: no other engine stores."""

    def holds(self) -> list[Any]:
        """Return nothing: only loads hold pages."""
        return []

    def _pass(self, *_: Any) -> Any:
        """Do nothing: nothing is stored."""

    def turn(self, request: int, *, is_used: bool) -> None:
        """Do nothing: what was loaded is stored nowhere."""

    plan_stores = confirm = preempted = keep_state = resumed = ended = forget = check = recognise = _pass


def request_of(workload: Workload, index: int) -> Request:
    """Return a request as kvarts has it."""
    ask = workload.asks[index]
    if isinstance(ask, TracedAsk):
        content = ask.trace.content(ask.row, page_size=workload.page_size, owner=index)
        return Request(index, content, ask.row.num_prompt_tokens, len(ask.output), ask.row.arrival_ns)
    known = ask.prompt if workload.num_draft_slots else ask.prompt + ask.output
    content = Content.from_tokens(known, page_size=workload.page_size, owner=index, lookahead=workload.lookahead)
    request = Request(index, content, len(ask.prompt), len(ask.output), ask.step * STEP_NS, -ask.priority)
    request.stops = ask.stops
    return request


def usage_of(num_used: int, num_blocks: int) -> float:
    """Return the share of blocks in use as vLLM computes it: its last bit can decide between equal ranks."""
    return 1.0 - (num_blocks - num_used) / num_blocks


class OurFrontEnd:
    """kvarts' router of data-parallel ranks."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._router = Routing().open(
            "vllm-ranks",
            WorkerFacts(workload.num_ranks, workload.page_size, workload.max_num_batched_tokens),
        )

    def place(self, index: int) -> int:
        """Return the rank of a request."""
        request = request_of(self._workload, index)
        rank = self._router.place(request, None, request.arrival_ns)
        assert rank is not None
        return rank

    def ended(self, indices: list[int]) -> None:
        """Record that requests have ended."""
        for index in indices:
            self._router.ended(index)

    def report(self, loads: list[tuple[int, int, int]]) -> None:
        """Record what the ranks report."""
        for rank, (waiting, running, num_used) in enumerate(loads):
            self._router.report(rank, running, waiting, num_used, 0, usage_of(num_used, self._workload.num_blocks))

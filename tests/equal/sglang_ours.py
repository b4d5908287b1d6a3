"""kvarts' side: its engine with SGLang's batches on a load, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import msgspec

from kvarts.core.build import Audit, Watching, build_engine
from kvarts.core.content import Content
from kvarts.core.events import Admitted, ChunkComputed, Event, Finished, Preemption
from kvarts.core.kv.hicache import HostRadixCache
from kvarts.core.kv.states import StateRadixCache
from kvarts.core.kv.windows import WindowRadixCache
from kvarts.core.request import Request, RequestState
from kvarts.core.tiers.channel import Channel
from kvarts.core.tiers.hicache import HostCopies
from kvarts.cost.simulated import SimExecutor
from kvarts.doors.kv_events.batches import Batch
from kvarts.doors.kv_events.sglang import SglangReader, SglangWire
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replay import planning_of, storage_of
from kvarts.sim.replica import Receiving

from oracles.naive_sglang import SglangLoad, SglangStep

STEP_NS = 1_000_000


class _Recorder:
    """An EventReader that keeps what one step did."""

    wants_details = True

    def __init__(self, page_size: int) -> None:
        self.step = SglangStep()
        self._page_size = page_size

    def observe(self, events: Sequence[Event]) -> None:
        step = self.step
        for event in events:
            if isinstance(event, ChunkComputed):
                step.tokens[event.request] = event.end - event.start
            elif isinstance(event, Admitted):
                step.admitted[event.request] = event.num_hit_pages * self._page_size
                for tier, num_pages in event.by_tier or ():
                    num_tokens = num_pages * self._page_size
                    step.loaded[event.request] = step.loaded.get(event.request, 0) + num_tokens
                    if tier == "disk" and num_tokens:
                        step.fetched[event.request] = num_tokens
            elif isinstance(event, Preemption):
                step.retracted.append(event.victim)
            elif isinstance(event, Finished):
                step.ended.append(event.request)


class _Published:
    """A sink of KV events: decodes what is published, as a consumer does."""

    def __init__(self) -> None:
        self._wire = SglangWire()
        self.events: list[dict[str, Any]] = []

    def put(self, batch: Batch) -> None:
        self.events += msgspec.msgpack.decode(self._wire.encode(batch.told, batch.time_s))[1]

    def pace(self) -> None:
        pass


def config_of(load: SglangLoad) -> ReplayConfig:
    """Return the configuration of a replay with the server of a load, in steps of a millisecond."""
    return ReplayConfig(
        engine="sglang",
        num_pages=load.size // load.page_size,
        page_size=load.page_size,
        max_num_batched_tokens=load.chunk,
        max_num_seqs=load.max_running,
        max_prefill_tokens=load.max_prefill,
        disable_overlap_schedule=not load.overlap,
        schedule_conservativeness=None if load.ignore_eos else load.conservativeness,
        schedule_policy=load.policy,  # type: ignore[arg-type]
        radix_eviction_policy=load.eviction,  # type: ignore[arg-type]
        radix_eviction_policy_config=msgspec.json.encode(load.eviction_config).decode() if load.eviction_config else "",
        enable_priority_scheduling=load.priorities,
        schedule_low_priority_values_first=load.priorities and load.lower_first,
        disable_priority_preemption=load.priorities and not load.preempts,
        priority_scheduling_preemption_threshold=load.threshold if load.priorities else 10,
        retraction_policy=load.retraction,  # type: ignore[arg-type]
        scheduler_recv_interval=load.recv_interval,
        hicache_ratio=load.host_ratio,
        hicache_write_policy=load.write_policy,  # type: ignore[arg-type]
        **_storage_of(load),
        sliding_window_size=load.window,
        swa_full_tokens_ratio=load.window_ratio if load.window else 0.8,
        **_states_of(load),
        cost="linear:step_ms=1",
    )


def _states_of(load: SglangLoad) -> dict[str, Any]:
    if not load.slots:
        return {}
    return {
        "max_mamba_cache_size": load.slots,
        "mamba_radix_cache_strategy": "extra_buffer" if load.buffers else "no_buffer",
        "mamba_track_interval": load.track_interval,
        "mamba_chunk_size": load.state_chunk,
    }


def _storage_of(load: SglangLoad) -> dict[str, Any]:
    if not load.prefetch_policy:
        return {}
    return {
        "hicache_storage_backend": "file",
        "hicache_storage_prefetch_policy": load.prefetch_policy,
        "hicache_storage_backend_extra_config": msgspec.json.encode(load.storage_config).decode(),
        "hicache_storage_prefetch_retry_poll_interval": load.retry_interval,
        "hicache_storage_prefetch_retry_max_attempts": load.max_retries,
    }


class _Lasting(Channel):
    """A channel whose transfers take so many steps from when they begin."""

    __slots__ = ("num_steps",)

    def __init__(self, num_steps: int) -> None:
        super().__init__("clock", latency_us=0, bytes_per_s=1)
        self.num_steps = num_steps

    def submit(self, now_ns: int, num_bytes: int) -> int:
        return now_ns + self.num_steps * STEP_NS


class _Clock(Channel):
    """A channel whose transfers take so many steps."""

    __slots__ = ("now", "num_steps")

    def __init__(self, num_steps: int) -> None:
        super().__init__("clock", latency_us=0, bytes_per_s=1)
        self.now, self.num_steps = 0, num_steps

    def submit(self, now_ns: int, num_bytes: int) -> int:
        return (self.now + self.num_steps) * STEP_NS


def kvarts_steps(load: SglangLoad, *, audit: Audit = "laws", cancels: float = 0.0) -> Iterator[SglangStep]:
    """Yield what kvarts does in each step, until every request has ended. All laws are checked after each.

    `cancels`: the share of steps after which a request is cancelled; then the steps go on until nothing is under way.
    """
    page_size = load.page_size
    config = config_of(load)
    recorder = _Recorder(page_size)
    published = _Published()
    readers = [SglangReader(published)] if load.has_events else []
    watching = Watching([recorder, *readers], audit=audit)
    engine = build_engine(config, SimExecutor(config.cost_model), storage_of(config), planning_of(config), watching)
    scheduler = engine.scheduler
    assert published.events == [{"type": "AllBlocksCleared"}] * len(readers)
    clocks = _Clock(load.d2h_steps), _Clock(load.h2d_steps)
    if isinstance(scheduler.host, HostCopies):
        scheduler.host.to_host, scheduler.host.to_device = clocks
        storage = scheduler.host.storage
        if storage is not None:
            storage.querying, storage.reading = _Lasting(load.query_steps), _Lasting(load.read_steps)
            storage.writing, storage.batch_pages = _Lasting(load.write_steps), load.batch_pages
            for index in load.stored:
                tokens = load.asks[index].prompt + load.asks[index].output
                content = Content.from_tokens(tokens, page_size=page_size, owner=-1 - index)
                storage.store(content, len(tokens) // page_size)
    door = Receiving(set(), load.recv_interval)
    is_late = True
    num_arrived = number = num_ended = 0
    live: dict[int, Request] = {}
    draw = Random(len(load.asks))
    while num_ended < len(load.asks) or (cancels and engine.has_work):
        now_ns = number * STEP_NS
        while num_arrived < len(load.asks) and load.asks[num_arrived].step <= number:
            ask = load.asks[num_arrived]
            tokens = ask.prompt + ask.output
            content = Content.from_tokens(tokens, page_size=page_size, owner=num_arrived, salt=ask.salt)
            request = Request(num_arrived, content, len(ask.prompt), len(ask.output), now_ns, priority=ask.priority)
            door.add(request)
            live[num_arrived] = request
            num_arrived += 1
        for request in door.enter(is_late=is_late):
            assert engine.submit(request, now_ns) is None
        step = recorder.step = SglangStep()
        for clock in clocks:
            clock.now = number
        published.events = []
        if engine.begin(now_ns):
            if engine.batch.num_decodes:
                decoding = [each.index for each in scheduler.running if each.state is RequestState.DECODING]
                step.tokens = dict.fromkeys(decoding, 1)
                step.kind = "decode"
            for request in engine.end():
                del live[request.index]
        else:
            engine.emit()
        door.end(1, has_prompts=bool(engine.batch.chunks))
        is_late = not engine.has_work
        if step.retracted:  # in the order in which they were queued again
            places = {request.index: place for place, request in enumerate(scheduler.waiting)}
            step.retracted.sort(key=places.__getitem__)
        if step.tokens and not step.kind:
            step.kind = "prefill"
        num_ended += len(step.ended)
        if live and draw.random() < cancels:
            engine.now_ns = now_ns + STEP_NS - 1
            engine.cancel(live.pop(draw.choice(list(live))))
            num_ended += 1
        num_free, num_cached = scheduler.cache.num_free, scheduler.cache.num_cached
        step.free, step.evictable = (num_free - num_cached) * page_size, num_cached * page_size
        step.waiting = scheduler.num_waiting
        if isinstance(scheduler.cache, WindowRadixCache):
            step.window_free = scheduler.cache.windowed.num_unit_empty * page_size
            step.window_evictable = scheduler.cache.windowed.windows.num_idle * page_size
        if isinstance(scheduler.cache, StateRadixCache):
            step.slots_free = scheduler.cache.stateful.num_unit_empty
            step.slots_evictable = scheduler.cache.stateful.components.num_idle
        if isinstance(scheduler.cache, HostRadixCache):
            step.host_free = scheduler.cache.tiered.num_free_below * page_size
        if isinstance(scheduler.host, HostCopies) and scheduler.host.storage is not None:
            step.stored = scheduler.host.storage.num_pages * page_size
            step.reserved = scheduler.host.storage.num_asked * page_size
        step.events = published.events
        yield step
        number += 1

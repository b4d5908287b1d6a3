"""Assembly of a fleet of mocks: a server for each worker, and one for the router in front of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from kvarts.config import EngineConfig
from kvarts.event_log import EventReader
from kvarts.executor.base import NoRotation
from kvarts.executor.page_bytes import NoPageBytes, PageSlots
from kvarts.fleet.config import FleetConfig, FleetWorker
from kvarts.fleet.live import LiveFleet
from kvarts.fleet.worker import Worker
from kvarts.limits import MOST_PAGES
from kvarts.llm.llm_engine import LLMEngine
from kvarts.llm.loop import EngineLoop, ModelHost
from kvarts.openai_api.fleet.foreseen import Foreseen
from kvarts.openai_api.fleet.paced import FleetClock, FleetMeter, FleetRecorder, PacedFleet, WorkerMeters
from kvarts.openai_api.fleet.transfers import KvTransfers
from kvarts.openai_api.meter import GoneEngines, Meter
from kvarts.openai_api.opening import Door, Opened, make_served, meter_of, mock_limits, open_app
from kvarts.openai_api.prompts import WordText
from kvarts.openai_api.served import Limits, Served
from kvarts.openai_api.words import VOCABULARY_SIZE

__all__ = ["OpenedFleet", "OpenedWorker", "open_fleet"]


class OpenedWorker(msgspec.Struct, frozen=True):
    """The server of worker `index`. `transfers`: its part in handoffs, which is to learn the server's address."""

    index: int
    name: str
    opened: Opened
    transfers: KvTransfers


Scaled = Callable[[list[OpenedWorker], list[OpenedWorker]], object]


def open_fleet(
    config: FleetConfig,
    door: Door,
    *,
    model: str = "mock",
    speedup: float = 1.0,
    readers_of: Callable[[FleetWorker], Sequence[EventReader]] = lambda _: (),
    sources_of: Callable[[int], list[dict[str, Any]]] = lambda _: [],
    close_events: Callable[[int], object] = lambda _: None,
) -> OpenedFleet:
    """Return mocks of all workers of `config`, and the router in front of them, all served under one name.

    `readers_of` returns the readers of all events of a worker, `sources_of` where the worker with a number publishes
    its KV events, and `close_events` ends that once the worker has left.
    """
    return OpenedFleet(
        config, door, model, speedup=speedup, readers_of=readers_of, sources_of=sources_of, close_events=close_events
    )


class OpenedFleet:
    """The servers of a fleet: one for its router, and one for each worker. For parameters see `open_fleet`.

    `workers`: those that are there now. `on_scaled`: receives those that a scaler has added, and those that have left,
    in the engine's thread.
    """

    def __init__(
        self,
        config: FleetConfig,
        door: Door,
        model: str,
        *,
        speedup: float,
        readers_of: Callable[[FleetWorker], Sequence[EventReader]],
        sources_of: Callable[[int], list[dict[str, Any]]],
        close_events: Callable[[int], object],
    ) -> None:
        self.config = config
        self.on_scaled: Scaled = lambda added, gone: None
        self.close_events = close_events
        self._door = door
        self._speedup = speedup
        self._names = door.names or (model,)
        self._readers_of = readers_of
        self._sources_of = sources_of
        limits = [mock_limits(door, pool.each) for pool in config.pools]
        longest = max(limits, key=lambda each: each.max_model_len)
        self.gone = GoneEngines(self._names[0], meter_of(door, longest, speedup=speedup))
        self._meters = WorkerMeters(self.gone)
        self._described: dict[int, FleetWorker] = {}
        self._clock = clock = FleetClock(speedup=speedup)
        live = LiveFleet(config, self._all_readers_of)
        foreseen = Foreseen(seed=door.seed)
        self.fleet = paced = PacedFleet(
            live,
            clock,
            foreseen,
            self._meters,
            knows_tokens=config.first.profile != "mocker",
            keeps=door.is_recording,
            on_scaled=None if config.scaler is None else self._scaled,
        )
        engine = LLMEngine(paced, foreseen, foreseen.of_generations(), clock, page_size=config.page_size)
        self.loop = loop = EngineLoop(engine)
        paced.is_asked = loop.wait_for_task
        self._recorder = FleetRecorder(paced) if door.is_recording else None
        self.workers = [self._open(worker) for worker in live.workers]
        context = context_in_front(config, [each.max_model_len for each in limits])
        most = msgspec.structs.replace(limits[0], max_model_len=context)
        meter = meter_of(msgspec.structs.replace(door, residency_share=0.0), most, speedup=speedup)
        in_front = self._served(live.workers[0], together(config), most, meter, None)
        # The page is of engines; each worker has one.
        no_page = msgspec.structs.replace(door, has_page=False)
        gone = None if config.scaler is None else self.gone
        self.front = open_app([in_front], no_page, speedup=speedup, engines=self._engines(), gone=gone)
        self._tell_sources()

    def _all_readers_of(self, worker: FleetWorker) -> list[EventReader]:
        meter = meter_of(self._door, mock_limits(self._door, worker.pool.each), speedup=self._speedup)
        self._meters.add(worker.index, meter)
        self._described[worker.index] = worker
        return [*self._readers_of(worker), *meter.readers]

    def _engines(self) -> list[Served]:
        return [worker.opened.served for worker in self.workers]

    def _tell_sources(self) -> None:
        sources = [source for worker in self.workers for source in worker.opened.routes.event_sources]
        self.front.routes.event_sources = sources

    def look_again(self) -> None:
        """Let the router's door answer for the workers that are there now. In its event loop."""
        self.front.routes.set_engines(self._engines())
        self._tell_sources()

    def _scaled(self, added: list[Worker], gone: list[int]) -> None:
        """Open the servers of `added`, and count for those that have `gone` no longer. In the engine's thread."""
        opened = [self._open(worker) for worker in added]
        there = [*self.workers, *opened]
        left = [worker for worker in there if worker.index in gone]
        self.workers = [worker for worker in there if worker.index not in gone]
        for worker in left:
            del self._described[worker.index]
            served = worker.opened.served
            self._meters.leave(worker.index, served.host.core)
            self.loop.held.remove(served.outbox)
        self.on_scaled([worker for worker in opened if worker not in left], left)

    def _open(self, worker: Worker) -> OpenedWorker:
        """Return the server of a worker."""
        config, door, speedup = self.config, self._door, self._speedup
        described = self._described[worker.index]
        each = described.pool.each
        meter = self._meters.of(worker.index)
        served = self._served(worker, each, mock_limits(door, each), meter, described)
        transfers = KvTransfers(
            self.fleet,
            self.loop,
            worker,
            seed=door.seed,
            tensor_parallel=int(getattr(each.cost, "tensor_parallel", 1)),
            hold_s=config.hold_s / speedup,
            faults=config.faults,
        )
        served.transfers = transfers
        opened = open_app([served], door, speedup=speedup)
        opened.app.shares_log = True
        opened.routes.event_sources += self._sources_of(worker.index)
        return OpenedWorker(worker.index, f"worker {worker.index} ({described.pool.name})", opened, transfers)

    def _served(
        self, worker: Worker, of_host: EngineConfig, limits: Limits, meter: Meter, described: FleetWorker | None
    ) -> Served:
        config, door = self.config, self._door
        host = ModelHost(
            loop=self.loop,
            core=worker.engine,
            config=of_host,
            clock=self._clock,
            slots=PageSlots(1, config.page_size),
            rotation=NoRotation(),
            kv=NoPageBytes(),
            token_bytes=config.token_bytes,
            vocab_size=VOCABULARY_SIZE,
            max_positions=limits.max_model_len,
            fingerprint=lambda: f"mock {door.seed}",
        )
        facts: dict[str, object] = {"mock": True, "seed": door.seed, "speedup": self._speedup}
        if described is not None:
            each = described.pool.each
            facts |= {
                "role": described.pool.role,
                "pool": described.pool.name,
                "cost_model": each.to_builtins()["cost"],
            }
        rank = 0 if described is None else described.index
        of_worker = msgspec.structs.replace(door, is_recording=False, rank=rank)
        made = make_served(host, WordText(), self._names, of_worker, limits=limits, meter=meter, facts=facts)
        made.recorder = self._recorder
        made.make_meter = partial(FleetMeter, self.fleet, self._meters, meter)
        return made


def context_in_front(config: FleetConfig, of_pools: Sequence[int]) -> int:
    """Return the context of requests to the router: one that fits some worker of each kind that it passes through.

    `of_pools`: the context of the workers of each pool.
    """
    behind: dict[bool, list[int]] = {}
    for pool, tokens in zip(config.pools, of_pools, strict=True):
        behind.setdefault(pool.role == "decode", []).append(tokens)
    return min(map(max, behind.values()))


def together(config: FleetConfig) -> EngineConfig:
    """Return the configuration of an engine with the places and the pages of all workers."""
    each = [worker.pool.each for worker in config.workers]
    return EngineConfig(
        num_pages=min(MOST_PAGES, sum(of_worker.num_pages for of_worker in each)),
        page_size=config.page_size,
        max_num_seqs=sum(of_worker.max_num_seqs for of_worker in each),
        max_num_batched_tokens=sum(of_worker.max_num_batched_tokens for of_worker in each),
    )

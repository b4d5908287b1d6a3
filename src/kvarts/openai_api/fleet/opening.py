"""Assembly of a fleet of mocks: a server for each worker, and one for the router in front of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from kvarts.config import EngineConfig
from kvarts.event_log import EventReader
from kvarts.executor.page_bytes import NoPageBytes
from kvarts.executor.page_slots import PageSlots
from kvarts.executor.rotation import NoRotation
from kvarts.fleet.config import FleetConfig, FleetWorker
from kvarts.fleet.live import LiveFleet
from kvarts.fleet.worker import Worker
from kvarts.limits import MOST_PAGES
from kvarts.llm.llm_engine import LLMEngine
from kvarts.llm.loop import EngineLoop, ModelHost
from kvarts.openai_api.fleet.foreseen import Foreseen
from kvarts.openai_api.fleet.paced import FleetClock, FleetMeter, PacedFleet
from kvarts.openai_api.fleet.recorded import FleetRecorder
from kvarts.openai_api.fleet.transfers import KvTransfers
from kvarts.openai_api.meter import Meter
from kvarts.openai_api.opening import Door, Opened, make_served, meter_of, mock_limits, open_app
from kvarts.openai_api.prompts import WordText
from kvarts.openai_api.served import Limits, Served
from kvarts.openai_api.words import VOCABULARY_SIZE

__all__ = ["OpenedFleet", "OpenedWorker", "open_fleet"]


class OpenedWorker(msgspec.Struct, frozen=True):
    """The server of a worker. `transfers`: its part in handoffs, which is to learn the server's address."""

    name: str
    opened: Opened
    transfers: KvTransfers


class OpenedFleet(msgspec.Struct, frozen=True):
    """The servers of a fleet: one for its router, and one for each worker."""

    front: Opened
    workers: tuple[OpenedWorker, ...]
    fleet: PacedFleet
    loop: EngineLoop


def open_fleet(
    config: FleetConfig,
    door: Door,
    *,
    model: str = "mock",
    speedup: float = 1.0,
    readers_of: Callable[[FleetWorker], Sequence[EventReader]] = lambda _: (),
) -> OpenedFleet:
    """Return mocks of all workers of `config`, and the router in front of them, all served under one name.

    `readers_of` returns the readers of all events of a worker.
    """
    described = config.workers
    limits = [mock_limits(door, worker.pool.each) for worker in described]
    meters = [meter_of(door, each, speedup=speedup) for each in limits]
    clock = FleetClock(speedup=speedup)

    def all_readers_of(worker: FleetWorker) -> list[EventReader]:
        if worker.index == len(meters):  # a scaler has added it
            meters.append(meter_of(door, mock_limits(door, worker.pool.each), speedup=speedup))
        return [*readers_of(worker), *meters[worker.index].readers]

    live = LiveFleet(config, all_readers_of)
    foreseen = Foreseen(seed=door.seed)
    knows_tokens = config.first.profile != "mocker"
    paced = PacedFleet(live, clock, foreseen, meters, knows_tokens=knows_tokens, keeps=door.is_recording)
    engine = LLMEngine(paced, foreseen, foreseen.of_generations(), clock, page_size=config.page_size)
    loop = EngineLoop(engine)
    paced.is_asked = loop.wait_for_task
    recorder = FleetRecorder(paced) if door.is_recording else None
    names = door.names or (model,)
    of_door = msgspec.structs.replace(door, is_recording=False)

    def served(
        worker: Worker, of_host: EngineConfig, limits: Limits, meter: Meter, described: FleetWorker | None
    ) -> Served:
        host = ModelHost(
            loop=loop,
            core=worker.engine,
            config=of_host,
            clock=clock,
            slots=PageSlots(1, config.page_size),
            rotation=NoRotation(),
            kv=NoPageBytes(),
            token_bytes=config.token_bytes,
            vocab_size=VOCABULARY_SIZE,
            max_positions=limits.max_model_len,
            fingerprint=lambda: f"mock {door.seed}",
        )
        facts: dict[str, object] = {"mock": True, "seed": door.seed, "speedup": speedup}
        if described is not None:
            each = described.pool.each
            facts |= {
                "role": described.pool.role,
                "pool": described.pool.name,
                "cost_model": each.to_builtins()["cost"],
            }
        rank = 0 if described is None else described.index
        of_worker = msgspec.structs.replace(of_door, rank=rank)
        made = make_served(host, WordText(), names, of_worker, limits=limits, meter=meter, facts=facts)
        made.recorder = recorder
        made.make_meter = partial(FleetMeter, paced, meters, meter)
        return made

    workers = []
    engines = []
    for worker, each, of_worker, meter in zip(live.workers, described, limits, meters, strict=True):
        of_engine = served(worker, each.pool.each, of_worker, meter, each)
        tensor_parallel = int(getattr(each.pool.each.cost, "tensor_parallel", 1))
        transfers = KvTransfers(
            paced,
            loop,
            worker,
            seed=door.seed,
            tensor_parallel=tensor_parallel,
            hold_s=config.hold_s / speedup,
            faults=config.faults,
        )
        of_engine.transfers = transfers
        engines.append(of_engine)
        opened = open_app([of_engine], door, speedup=speedup)
        workers.append(OpenedWorker(f"worker {each.index} ({each.pool.name})", opened, transfers))
    most = limits_in_front(config, limits)
    meter = meter_of(msgspec.structs.replace(door, residency_share=0.0), most, speedup=speedup)
    in_front = served(live.workers[0], together(config), most, meter, None)
    # The page is of engines; each worker has one.
    no_page = msgspec.structs.replace(door, has_page=False)
    front = open_app([in_front], no_page, speedup=speedup, engines=engines)
    return OpenedFleet(front, tuple(workers), paced, loop)


def limits_in_front(config: FleetConfig, limits: Sequence[Limits]) -> Limits:
    """Return the limits of requests to the router: a context that fits some worker that it passes through."""
    most = []
    for is_second in (False, True):
        behind = [
            each.max_model_len
            for each, worker in zip(limits, config.workers, strict=True)
            if (worker.pool.role == "decode") is is_second
        ]
        most += [max(behind)] if behind else []
    return msgspec.structs.replace(limits[0], max_model_len=min(most))


def together(config: FleetConfig) -> EngineConfig:
    """Return the configuration of an engine with the places and the pages of all workers."""
    each = [worker.pool.each for worker in config.workers]
    return EngineConfig(
        num_pages=min(MOST_PAGES, sum(of_worker.num_pages for of_worker in each)),
        page_size=config.page_size,
        max_num_seqs=sum(of_worker.max_num_seqs for of_worker in each),
        max_num_batched_tokens=sum(of_worker.max_num_batched_tokens for of_worker in each),
    )

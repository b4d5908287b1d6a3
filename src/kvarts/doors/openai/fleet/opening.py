"""Assembly of a fleet of mocks: a server for each worker, and one for the router in front of them.

With `kv_transfer_params`, a client computes a prompt on one worker, and lets another one continue with its pages. The
fields are those of vLLM's connector for NIXL. A request with `do_remote_decode` computes its prompt; its answer names
the worker that holds the pages. A request with these fields, and `do_remote_prefill`, fetches them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import Any

import msgspec

from kvarts.base.decoders import convert
from kvarts.base.errors import problem_of
from kvarts.base.limits import MOST_PAGES, whole_number
from kvarts.core.config import EngineConfig
from kvarts.core.event_log import EventReader
from kvarts.core.executor import no_rotation
from kvarts.doors.openai.answer import Choice
from kvarts.doors.openai.errors import ApiError
from kvarts.doors.openai.fleet.paced import FleetClock, FleetMeter, FleetRecorder, PacedFleet, WorkerMeters
from kvarts.doors.openai.foreseen import Foreseen
from kvarts.doors.openai.meter import GoneEngines, Meter
from kvarts.doors.openai.opening import Door, MockSettings, Opened, meter_of, mock_facts, mock_limits, open_app
from kvarts.doors.openai.prompts import WordText
from kvarts.doors.openai.served import Ask, Limits, Served
from kvarts.doors.openai.server import Address, OpenAIServer
from kvarts.doors.openai.words import VOCABULARY_SIZE
from kvarts.run.engine_loop import EngineLoop, ModelHost
from kvarts.run.llm_engine import LLMEngine
from kvarts.run.page_bytes import NoPageBytes, PageSlots
from kvarts.sim.fleet.config import FleetConfig, FleetWorker, ModelPools, PoolConfig
from kvarts.sim.fleet.faults import Fault
from kvarts.sim.fleet.live import LiveFleet
from kvarts.sim.fleet.worker import Worker
from kvarts.sim.traffic.trace_request import DirectRequest

__all__ = ["KvTransfers", "OpenedFleet", "OpenedWorker", "engine_id_of"]

PARAM = "kv_transfer_params"
TICK_S = 0.01


def engine_id_of(seed: int, worker: int) -> str:
    """Return the name of a worker's engine, which is the same in every run."""
    return f"kvarts-{seed}-{worker}"


class KvTransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a request. Others are ignored."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_block_ids: list[Any] | None = None
    remote_host: str | None = None
    remote_port: int | str | None = None

    @property
    def names_holder(self) -> bool:
        """Whether it names the holder of the pages; vLLM fetches none if a field is missing."""
        names = self.remote_engine_id, self.remote_request_id, self.remote_host, self.remote_port
        return bool(self.remote_block_ids) and None not in names


class KvTransfers:
    """The WorkerDoor of the door of `worker`. `address`: its host and port, once it listens.

    `loop` owns the engines of `fleet`. `hold_s`: how long the worker holds pages, in real time. `faults`: those of the
    fleet; requests are refused while the worker is down. `model`: that of the worker, if there are several.
    """

    def __init__(
        self,
        fleet: PacedFleet,
        loop: EngineLoop,
        worker: Worker,
        *,
        seed: int,
        tensor_parallel: int,
        hold_s: float,
        faults: Sequence[Fault] = (),
        model: str | None = None,
    ) -> None:
        self._model = model
        self._downs = [fault for fault in faults if fault.kind == "down" and fault.worker == worker.index]
        self.address = ("127.0.0.1", 0)
        self._fleet = fleet
        self._loop = loop
        self._hold_s = hold_s
        self._worker = worker
        self._seed = seed
        self._tensor_parallel = tensor_parallel

    def check(self, asks: Sequence[Ask]) -> None:
        """Raise ApiError for requests that cannot be sent to a worker, or whose fields have wrong types."""
        self._check_up()
        params = _params_of(asks[0])
        if not (params.do_remote_decode or params.do_remote_prefill):
            return
        if params.do_remote_decode and params.do_remote_prefill:
            raise ApiError(400, "has do_remote_decode and do_remote_prefill: a request is one of them", param=PARAM)
        if len(asks) > 1:
            raise ApiError(400, "is of one prompt and one choice", param=PARAM)
        if params.do_remote_decode and asks[0].params.max_tokens != 1:
            told = (
                f"with do_remote_decode, only the prompt is computed: max_tokens is 1, got {asks[0].params.max_tokens}"
            )
            raise ApiError(400, told, param="max_tokens")

    def _check_up(self) -> None:
        """Raise ApiError if a scaler has taken the worker away, or if it is down now.

        In the second case it may be tried again when the fault ends, in whole seconds.
        """
        if not self._fleet.fleet.takes_requests(self._worker):
            raise ApiError(503, f"worker {self._worker.index} was taken away")
        if not self._downs:
            return
        clock = self._fleet.clock
        now_ns = clock.now_ns()
        for fault in self._downs:
            if fault.start_ns <= now_ns and (fault.end_ns is None or now_ns < fault.end_ns):
                left_s = None if fault.end_ns is None else float(ceil((fault.end_ns - now_ns) / 1e9 / clock.speedup))
                raise ApiError(503, f"worker {self._worker.index} is down", retry_after_s=left_s)

    def assign(self, index: int, ask: Ask) -> None:
        """Send request `index` to this worker. In the engine's thread."""
        if self._model is not None:
            self._fleet.models[index] = self._model
        params = _params_of(ask)
        fetches = self._fetched(params) if params.do_remote_prefill and params.names_holder else None
        self._fleet.direct[index] = DirectRequest(self._worker.index, bool(params.do_remote_decode), fetches)

    def clear_cache(self) -> None:
        """Drop every cached page of the worker that is not in use."""
        self._fleet.catch_up()
        self._fleet.fleet.clear_cache(self._worker)

    def _fetched(self, params: KvTransferParams) -> int | None:
        """Return the request whose pages are named; None if no worker of this fleet holds them."""
        name, _, text = str(params.remote_request_id).rpartition("-")
        number = whole_number(text)
        if number is None:
            return None
        holder = self._fleet.fleet.holder(number)
        if holder is None or (holder.decode.request_id or "") != name:
            return None
        is_there = params.remote_engine_id == engine_id_of(self._seed, holder.source)
        return int(number) if is_there else None

    def told(self, asked: dict[str, Any] | None, choices: Sequence[Choice]) -> dict[str, Any] | None:
        """Return the fields of an answer: where the pages of its prompt are held, if it asked for that; else None."""
        request = choices[0].request
        if request is None or not (asked or {}).get("do_remote_decode"):
            return None
        # Nothing else may happen until then, and nothing moves an idle fleet.
        asyncio.get_running_loop().call_later(self._hold_s + TICK_S, self._catch_up)
        num_pages = -(-request.num_prompt_tokens // request.content.page_size)
        host, port = self.address
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": list(range(num_pages)),
            "remote_engine_id": engine_id_of(self._seed, self._worker.index),
            "remote_request_id": f"{request.request_id or ''}-{request.index}",
            "remote_host": host,
            "remote_port": port,
            "tp_size": self._tensor_parallel,
            "remote_num_tokens": request.num_prompt_tokens,
        }

    def _catch_up(self) -> None:
        self._loop.post(lambda _: self._fleet.catch_up())


class DoorOfModel:
    """A WorkerDoor: the part of the router's door that serves one of several models, named `model`."""

    def __init__(self, fleet: PacedFleet, model: str, clear_cache: Callable[[], object]) -> None:
        self._fleet = fleet
        self._model = model
        self._clear_cache = clear_cache

    def check(self, asks: Sequence[Ask]) -> None:
        """Accept all requests."""

    def assign(self, index: int, ask: Ask) -> None:
        """Send request `index` to the workers of this model. In the engine's thread."""
        self._fleet.models[index] = self._model

    def clear_cache(self) -> None:
        """Drop every cached page that is not in use."""
        self._clear_cache()

    def told(self, asked: dict[str, Any] | None, choices: Sequence[Choice]) -> dict[str, Any] | None:
        """Return the fields of an answer: what was asked."""
        return asked


def _params_of(ask: Ask) -> KvTransferParams:
    """Return the fields of a request. Raise ApiError if one has the wrong type."""
    try:
        return convert(ask.kv_transfer_params or {}, KvTransferParams)
    except msgspec.ValidationError as error:
        raise ApiError(400, problem_of(error), param=PARAM) from error


class OpenedWorker(msgspec.Struct, frozen=True):
    """The server of worker `index`. `transfers`: its part in handoffs, which is to learn the server's address."""

    index: int
    name: str
    opened: Opened
    transfers: KvTransfers


MakeServer = Callable[["OpenedFleet", Address, Callable[[str], object]], OpenAIServer]
Scaled = Callable[[list[OpenedWorker], list[OpenedWorker]], object]


class OpenedFleet(Opened):
    """The mocks of all workers of `config`, a server for each, and that of the router in front of them.

    `workers`: those that are there now. `on_scaled`: receives those that a scaler has added, and those that have left,
    in the engine's thread. `make_server`: makes FleetServers.
    """

    def __init__(self, config: FleetConfig, door: Door, settings: MockSettings, make_server: MakeServer) -> None:
        self.config = config
        self._make_server = make_server
        self.on_scaled: Scaled = lambda added, gone: None
        self._readers = settings.readers
        speedup = settings.speedup
        self._door = door
        self._speedup = speedup
        self._models = config.behind_routers(by_model=len(config.of_models) > 1)
        self._unnamed = door.names or (settings.model,)
        self._names = door.names or (config.of_models[0].model or settings.model,)
        self.gone = [self._gone_of(of_model) for of_model in self._models]
        self._meters = WorkerMeters()
        self._described: dict[int, FleetWorker] = {}
        self._clock = clock = FleetClock(speedup=speedup)
        live = LiveFleet(config, self._all_readers_of)
        first = config.first
        foreseen = Foreseen(seed=door.seed, knows_tokens=first.profile != "mocker", plans_ahead=first.async_scheduling)
        self.fleet = paced = PacedFleet(
            live,
            clock,
            foreseen,
            self._meters,
            keeps=door.is_recording,
            on_scaled=None if config.scaler is None else self._scaled,
        )
        engine = LLMEngine(paced, foreseen, foreseen.of_generations(), clock, page_size=config.page_size)
        self.loop = loop = EngineLoop(engine)
        clock.is_asked = loop.wait_for_task
        self._recorder = FleetRecorder(paced) if door.is_recording else None
        self.workers = [self._open(worker) for worker in live.workers]
        in_front = [self._in_front(of_model, live.workers) for of_model in self._models]
        # The page is of engines; each worker has one.
        no_page = msgspec.structs.replace(door, has_page=False)
        gone = [] if config.scaler is None else self.gone
        front = open_app(in_front, no_page, speedup=speedup, watcher=settings.watcher, engines=self.engines, gone=gone)
        super().__init__(front.app, front.models, front.routes)
        self._tell_sources()

    def server(self, address: Address, *, say: Callable[[str], object] = lambda _: None) -> OpenAIServer:
        """Return the servers of the router, at `address`, and of the workers at the next ports."""
        return self._make_server(self, address, say)

    @property
    def engines(self) -> list[Served]:
        """The models by engine: those of the workers."""
        return [worker.opened.served for worker in self.workers]

    def close_events(self, worker: int) -> None:
        """End with the readers of a worker that has left."""
        self._readers.close(worker)

    def _gone_of(self, of_model: ModelPools) -> GoneEngines:
        """Return the counts of removed workers with this model: none so far."""
        longest = max(of_model.pools, key=lambda pool: mock_limits(self._door, pool.each).max_model_len).each
        return GoneEngines(self._names_of(of_model)[0], meter_of(self._door, longest, self._speedup))

    def _in_front(self, of_model: ModelPools, workers: Sequence[Worker]) -> Served:
        """Return a model as the router's door serves it."""
        door, speedup = self._door, self._speedup
        limits = [mock_limits(door, pool.each) for pool in of_model.pools]
        context = context_in_front(of_model.pools, [each.max_model_len for each in limits])
        most = msgspec.structs.replace(limits[0], max_model_len=context)
        meter = Meter(max_model_len=context, speedup=speedup)
        first = next(worker for worker in workers if self._model_of(self._described[worker.index].pool) is of_model)
        made = self._served(first, together(of_model.pools), most, meter, of_model, None)
        if of_model.model is not None:
            made.transfers = DoorOfModel(self.fleet, of_model.model, first.engine.clear_cache)
        return made

    def _names_of(self, of_model: ModelPools) -> Sequence[str]:
        """Return the names by which requests ask for a model."""
        if of_model.model is None:
            return self._names
        return (of_model.model or self._unnamed[0],)

    def _model_of(self, pool: PoolConfig) -> ModelPools:
        return next(each for each in self._models if pool.name in [one.name for one in each.pools])

    def _all_readers_of(self, worker: FleetWorker) -> list[EventReader]:
        each, of_model = worker.pool.each, self._model_of(worker.pool)
        meter = meter_of(self._door, each, self._speedup)
        gone = self.gone[self._models.index(of_model)]
        self._meters.add(worker.index, meter, gone)
        self._described[worker.index] = worker
        name, is_added = self._names_of(of_model)[0], worker.index >= self.config.replicas
        return [*self._readers.of_worker(name, each, worker.index, is_added=is_added), *meter.readers]

    def _tell_sources(self) -> None:
        sources = [source for worker in self.workers for source in worker.opened.routes.event_sources]
        self.routes.event_sources = sources

    def look_again(self) -> None:
        """Let the router's door answer for the workers that are there now. In its event loop."""
        self.routes.set_engines(self.engines)
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
        config, door, speedup = self.config, self._door, self._speedup
        described = self._described[worker.index]
        each = described.pool.each
        meter = self._meters.of(worker.index)
        of_model = self._model_of(described.pool)
        served = self._served(worker, each, mock_limits(door, each), meter, of_model, described)
        transfers = KvTransfers(
            self.fleet,
            self.loop,
            worker,
            seed=door.seed,
            tensor_parallel=int(getattr(each.cost, "tensor_parallel", 1)),
            hold_s=config.hold_s / speedup,
            faults=config.faults,
            model=of_model.model,
        )
        served.transfers = transfers
        opened = open_app([served], door, speedup=speedup)
        opened.app.shares_log = True
        opened.routes.event_sources += self._readers.sources_of(worker.index)
        return OpenedWorker(worker.index, f"worker {worker.index} ({described.pool.name})", opened, transfers)

    def _served(
        self,
        worker: Worker,
        of_host: EngineConfig,
        limits: Limits,
        meter: Meter,
        of_model: ModelPools,
        described: FleetWorker | None,
    ) -> Served:
        config, door = self.config, self._door
        host = ModelHost(
            loop=self.loop,
            core=worker.engine,
            config=of_host,
            clock=self._clock,
            slots=PageSlots(1, config.page_size),
            rotate_late=no_rotation,
            kv=NoPageBytes(),
            token_bytes=config.token_bytes_of(of_model),
            vocab_size=VOCABULARY_SIZE,
            max_positions=limits.max_model_len,
            fingerprint=lambda: f"mock {door.seed}",
        )
        facts: dict[str, object] = {"mock": True, "seed": door.seed, "speedup": self._speedup}
        if described is not None:
            pool = described.pool
            facts |= {"role": pool.role, "pool": pool.name, **mock_facts(door, self._speedup, pool.each)}
        rank = 0 if described is None else described.index
        of_worker = msgspec.structs.replace(door, is_recording=False, rank=rank)
        adapters = door.adapters if of_model is self._models[0] else ()
        names = self._names_of(of_model)
        made = Served(host, WordText(), names, of_worker, limits=limits, meter=meter, facts=facts, adapters=adapters)
        made.recorder = self._recorder
        made.make_meter = partial(FleetMeter, self.fleet, self._meters, meter)
        return made


def context_in_front(pools: Sequence[PoolConfig], of_pools: Sequence[int]) -> int:
    """Return the context of requests to the router: one that fits some worker of each kind that it passes through.

    `of_pools`: the context of the workers of each pool.
    """
    behind: dict[bool, list[int]] = {}
    for pool, tokens in zip(pools, of_pools, strict=True):
        behind.setdefault(pool.role == "decode", []).append(tokens)
    return min(map(max, behind.values()))


def together(pools: Sequence[PoolConfig]) -> EngineConfig:
    """Return the configuration of an engine with the places and the pages of all workers of `pools`."""
    each = [pool.each for pool in pools for _ in range(pool.each.replicas)]
    return EngineConfig(
        num_pages=min(MOST_PAGES, sum(of_worker.num_pages for of_worker in each)),
        page_size=each[0].page_size,
        max_num_seqs=sum(of_worker.max_num_seqs for of_worker in each),
        max_num_batched_tokens=sum(of_worker.max_num_batched_tokens for of_worker in each),
    )

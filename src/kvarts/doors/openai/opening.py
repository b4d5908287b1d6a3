"""Assembly of a server: a model or a mock, its text, its metrics, and the application around them.

A mock of a model is the engine of a replay, advanced step by step on a clock that keeps pace with real time. Its
decisions about pages depend only on its configuration, its arrivals and their order, so a replay of recorded arrivals
makes the same decisions at the same model time, event for event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from kvarts.base.clock import Clock, PacedClock, PutOffClock
from kvarts.base.settings import SettingError
from kvarts.core.build import Planning, Storage, Watching, build_engine, preparation_of
from kvarts.core.config import EngineConfig, EngineOptions
from kvarts.core.engine import Engine
from kvarts.core.event_log import EventReader
from kvarts.core.executor import CostModel, no_rotation
from kvarts.core.kv.groups import GroupMemory
from kvarts.core.parts.combines import check_combination
from kvarts.core.request import Request
from kvarts.cost.simulated import PrefillCost, SimExecutor
from kvarts.doors.openai.access import Guard
from kvarts.doors.openai.app import OpenAIApp, Watcher
from kvarts.doors.openai.failures import FailureScript
from kvarts.doors.openai.meter import OF_VLLM, Bounds, Meter
from kvarts.doors.openai.prompts import HubText
from kvarts.doors.openai.routes import Routes
from kvarts.doors.openai.served import Door, Limits, Models, Served, vllm_priority
from kvarts.doors.openai.server import Address, OpenAIServer
from kvarts.doors.openai.words import NUM_WORDS, VOCABULARY_SIZE, vary_words
from kvarts.proof.audit.opening import audit_of
from kvarts.run.engine_loop import EngineLoop, ModelHost
from kvarts.run.llm_engine import CoreEngine, LLMEngine
from kvarts.run.mock import MockExecutor, Vocabulary
from kvarts.run.page_bytes import NoPageBytes, PageSlots
from kvarts.run.text import DetokenizingExecutor
from kvarts.run.wrappers import WaitingExecutor
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replica import Replica

if TYPE_CHECKING:
    from kvarts.doors.openai.meter import GoneEngines, Residency
    from kvarts.doors.openai.recordings import ArrivalRecorder

__all__ = [
    "VLLM_FACE",
    "Door",
    "Face",
    "MockParts",
    "MockSettings",
    "Opened",
    "OwnReaders",
    "PacedEngine",
    "Readers",
    "face_of",
    "foreseen_mock",
    "groups_of",
    "meter_of",
    "mock_facts",
    "mock_limits",
    "mock_model",
    "mock_of",
    "mock_parts",
    "open_app",
    "open_model",
]


class PacedEngine:
    """A CoreEngine: a Replica that executes one step at a time, and waits in its pauses for tasks."""

    def __init__(self, replica: Replica, clock: Clock) -> None:
        self._replica = replica
        self._clock = clock

    def submit(self, request: Request, now_ns: int) -> str | None:
        """Queue `request`, or return why it can never run. Transfers that have ended meanwhile are finished first."""
        self._replica.run_until(now_ns, [])
        return self._replica.submit(request, now_ns)

    def cancel(self, request: Request) -> None:
        """Drop `request` between steps; its pages are free at once."""
        self._replica.wake(self._clock.now_ns())
        self._replica.cancel(request)

    def step(self, now_ns: int) -> list[Request]:
        """Execute one step that starts at `now_ns`, or wait until one is possible. Return finished requests.

        A task that is queued meanwhile interrupts the wait; the next call goes on with it.
        """
        replica = self._replica
        if not replica.scheduler.has_work:  # transfers only, which have progressed meanwhile
            replica.run_until(now_ns, [])
            if replica.has_work:
                self._clock.wait_unless_asked(replica.now_ns)
            return []
        if not replica.is_pausing:
            replica.start(now_ns)
        if replica.is_pausing and not self._clock.wait_unless_asked(replica.now_ns):
            return []
        return replica.finish()

    @property
    def has_work(self) -> bool:
        """Whether there are requests, or transfers under way."""
        return self._replica.has_work


class MockParts(msgspec.Struct, frozen=True):
    """The parts of a mock of one model, alone or on a shared device.

    `executor` makes tokens, `detokenizing` turns them into words, and `waiting` ends the step when its time has passed;
    the engine must be built on `waiting`. `seed` draws the tokens.
    """

    executor: MockExecutor
    detokenizing: DetokenizingExecutor
    waiting: WaitingExecutor
    seed: int
    vocabulary: Vocabulary

    def host(
        self,
        loop: EngineLoop,
        core: Engine,
        config: EngineConfig,
        clock: Clock,
        *,
        token_bytes: int,
        max_positions: int | None,
        groups: GroupMemory | None,
    ) -> ModelHost:
        """Return the model that `core` computes, advanced by `loop`. Other arguments as for ModelHost."""
        return ModelHost(
            loop=loop,
            core=core,
            config=config,
            clock=clock,
            slots=self.executor.slots,
            rotate_late=self.executor.rotate_late,
            kv=NoPageBytes(),
            token_bytes=token_bytes,
            vocab_size=self.vocabulary.size,
            max_positions=max_positions,
            fingerprint=lambda: f"mock {self.seed}",
            kv_groups="off" if groups is None else groups.keeps,
            memory=groups,
        )


IN_WORDS = Vocabulary(NUM_WORDS, vary_words, VOCABULARY_SIZE)


def mock_parts(
    config: EngineConfig,
    cost: CostModel,
    clock: Clock,
    *,
    seed: int,
    groups: GroupMemory | None,
    num_blocks: int,
    vocabulary: Vocabulary = IN_WORDS,
) -> MockParts:
    """Return the parts of a mock. `groups`, `num_blocks`: KV groups of the model, and the blocks of its memory."""
    put_off = PutOffClock(clock)
    executor = MockExecutor(
        config, cost, put_off, vocab_size=vocabulary.num_drawn, seed=seed, vary=vocabulary.vary, groups=groups,
        num_blocks=num_blocks,
    )  # fmt: skip
    detokenizing = DetokenizingExecutor(executor, max_num_seqs=config.max_num_seqs, clock=put_off)
    return MockParts(executor, detokenizing, WaitingExecutor(detokenizing, put_off), seed, vocabulary)


def mock_model(
    config: EngineConfig,
    cost: CostModel,
    *,
    seed: int = 0,
    clock: Clock | None = None,
    token_bytes: int = 0,
    max_positions: int | None = None,
    storage: Storage | None = None,
    watching: Watching | None = None,
    vocabulary: Vocabulary = IN_WORDS,
    around: Callable[[CoreEngine], CoreEngine] = lambda core: core,
) -> ModelHost:
    """Return a model whose steps take the time of `cost` on `clock`, by default real time, and which writes words.

    `around`: returns the engine to run, given that of the model.
    """
    clock = PacedClock() if clock is None else clock
    storage = storage or Storage()
    groups = storage.memory
    num_blocks = 0 if groups is None else storage.num_blocks or groups.num_blocks(config.num_pages)
    parts = mock_parts(config, cost, clock, seed=seed, groups=groups, num_blocks=num_blocks, vocabulary=vocabulary)
    prefill = PrefillCost(cost, token_budget=config.max_num_batched_tokens, pool_tokens=config.pool_tokens)
    core = build_engine(
        config,
        parts.waiting,
        storage._replace(prefill=prefill.prefill_ns, moves_pages=False),
        Planning(step_ns=cost.step_ns),
        watching or Watching(),
    )
    if isinstance(clock, PacedClock):
        clock.is_at_rest = lambda: not core.scheduler.has_work
    paced = around(PacedEngine(Replica(core, SimExecutor(cost), step_by_step=True), clock))
    loop = EngineLoop(LLMEngine(paced, parts.executor, parts.detokenizing, clock, page_size=config.page_size))
    if isinstance(clock, PacedClock):
        clock.is_asked = loop.wait_for_task
    return parts.host(loop, core, config, clock, token_bytes=token_bytes, max_positions=max_positions, groups=groups)


DEFAULT_TOKENS = 128
AHEAD = "steps are planned before the tokens of the last one are known; --no-async-scheduling prevents that"


def mock_of(
    config: ReplayConfig, readers: Sequence[EventReader], *, max_positions: int, speedup: float = 1.0, **of_mock: Any
) -> ModelHost:
    """Return the engine of a replay of `config` as a mock, on a clock that is `speedup` times as fast as real time.

    It plans a step when the tokens of the last one are known, also if `config` plans ahead. `of_mock`: as of
    `mock_model`.
    """
    if "started_drafts" in config.features:
        raise SettingError("does not go with vLLM's front end: it is not modelled", "speculative_tokens")
    config = msgspec.structs.replace(config, async_scheduling=False)
    return mock_model(
        config,
        config.cost_model,
        clock=PacedClock(speedup=speedup),
        max_positions=max_positions,
        storage=Storage(
            memory=groups_of(config),
            num_blocks=None if config.kv_groups == "off" else config.num_blocks,
            make_order=config.eviction,
            tiers=preparation_of(config.offload),
        ),
        watching=Watching(tuple(readers), audit=audit_of(config.audit)),
        **of_mock,
    )


def foreseen_mock(
    config: ReplayConfig,
    readers: Sequence[EventReader],
    *,
    max_positions: int,
    speedup: float = 1.0,
    seed: int = 0,
    token_bytes: int = 0,
) -> ModelHost:
    """Return the engine of a replay of `config` as a mock: its steps are those of a replay, and its answers foreseen.

    For engines that plan a step before the tokens of the last one are known, or that draft.
    """
    # Mocks of other engines need no replay to be ready.
    from kvarts.doors.openai.foreseen import Foreseen, ForeseenEngine
    from kvarts.sim.replay import build_replica, planning_of, storage_of

    check_combination({**config.features, "mock": "command"})
    cost, clock = config.cost_model, PacedClock(speedup=speedup)
    foreseen = Foreseen(seed=seed, knows_tokens=config.profile != "mocker", plans_ahead=config.async_scheduling)
    watching = Watching(tuple(readers), audit=audit_of(config.audit))
    config = msgspec.structs.replace(config, step_by_step=True)
    replica = build_replica(config, cost, storage_of(config), planning_of(config), watching)
    core = replica.engine
    clock.is_at_rest = lambda: not core.scheduler.has_work
    paced = ForeseenEngine(replica, clock, foreseen)
    loop = EngineLoop(LLMEngine(paced, foreseen, foreseen.of_generations(), clock, page_size=config.page_size))
    clock.is_asked = loop.wait_for_task
    return ModelHost(
        loop=loop,
        core=core,
        config=config,
        clock=clock,
        slots=PageSlots(0, config.page_size),
        rotate_late=no_rotation,
        kv=NoPageBytes(),
        token_bytes=token_bytes,
        vocab_size=IN_WORDS.size,
        max_positions=max_positions,
        fingerprint=lambda: f"mock {seed}",
        memory=groups_of(config),
        why_no_sessions=AHEAD if config.async_scheduling else "answers are drawn when requests arrive",
    )


class Opened:
    """A server before its sockets are opened. `engines`: the served engines, by default the models."""

    def __init__(self, app: OpenAIApp, models: Models, routes: Routes) -> None:
        self.app = app
        self.models = models
        self.routes = routes

    @property
    def served(self) -> Served:
        """The model, or the first of several."""
        return self.models.first

    @property
    def recorder(self) -> ArrivalRecorder | None:
        """The recorder of arrivals at that model."""
        return self.served.recorder

    @property
    def engines(self) -> list[Served]:
        """The models by engine: behind a router, those of its workers."""
        return list(self.models)

    def server(self, address: Address, *, say: Callable[[str], object] = lambda _: None) -> OpenAIServer:
        """Return the server at `address`. `say`: receives what workers do. Raise ConfigError if it is taken."""
        return OpenAIServer(self.app, self.models, address)


class Readers(Protocol):
    """Opens readers of the events of a mock's engines, which may publish them. All may raise ConfigError."""

    def of_model(self, name: str, config: ReplayConfig) -> Sequence[EventReader]:
        """Return the readers of the next model."""

    def of_worker(self, name: str, config: ReplayConfig, worker: int, *, is_added: bool) -> Sequence[EventReader]:
        """Return the readers of a worker of a fleet with the model `name`; `is_added`: a scaler added it."""

    def sources_of(self, worker: int) -> list[dict[str, Any]]:
        """Return where the events of an engine are published."""

    def close(self, worker: int) -> None:
        """End with a worker that has left."""


class OwnReaders:
    """Readers without sockets: the same ones for all engines."""

    def __init__(self, *readers: EventReader) -> None:
        self._readers = readers

    def of_model(self, name: str, config: ReplayConfig) -> Sequence[EventReader]:
        """Return all of them."""
        return self._readers

    def of_worker(self, name: str, config: ReplayConfig, worker: int, *, is_added: bool) -> Sequence[EventReader]:
        """Return those of its model."""
        return self.of_model(name, config)

    def sources_of(self, worker: int) -> list[dict[str, Any]]:
        """Return nothing: they do not publish."""
        return []

    def close(self, worker: int) -> None:
        """Do nothing."""


class Face(NamedTuple):
    """What clients see of the engine that a server is of: its routes, the bounds of its metrics, and its priorities.

    `priority`: returns the priority in the engine, where larger ones come first, of a request's `priority`.
    """

    routes: type[Routes]
    bounds: Bounds
    priority: Callable[[int | None], int]


VLLM_FACE = Face(Routes, OF_VLLM, vllm_priority)


def face_of(config: ReplayConfig) -> Face:
    """Return the face of a mock of the engine that `config` names."""
    if config.batches is None:
        return VLLM_FACE
    from kvarts.doors.openai.sglang import OF_SGLANG, SglangRoutes, sglang_priority

    return Face(SglangRoutes, OF_SGLANG, partial(sglang_priority, config))


class MockSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a mock beside its engine and its door. `model`: its name without one; `token_bytes`: KV of a token.

    `speedup`: divides the time of steps. `readers`: of the events of its engines. `watcher`: of its requests.
    """

    model: str = "mock"
    speedup: float = 1.0
    token_bytes: int = 0
    readers: Readers = OwnReaders()
    watcher: Watcher | None = None


def groups_of(config: ReplayConfig) -> GroupMemory | None:
    """Return the KV groups of a mocked model; None if it counts whole pages."""
    return None if config.kv_groups == "off" else config.memory


def mock_facts(door: Door, speedup: float, config: ReplayConfig) -> dict[str, Any]:
    """Return the facts of a mock for /server_info."""
    return {"mock": True, "seed": door.seed, "speedup": speedup, "cost_model": config.to_builtins()["cost"]}


def meter_of(door: Door, config: ReplayConfig, speedup: float) -> Meter:
    """Return the meter of a mock's engine, with that of the residency of blocks if `door` asks for it."""
    limits, residency = mock_limits(door, config), _residency_of(door, speedup)
    bounds = face_of(config).bounds
    return Meter(max_model_len=limits.max_model_len, speedup=speedup, residency=residency, bounds=bounds)


def _residency_of(door: Door, speedup: float = 1.0) -> Residency | None:
    if not door.residency_share:
        return None
    from kvarts.doors.openai.meter import Residency

    return Residency(door.residency_share, seed=door.seed, speedup=speedup)


def mock_limits(door: Door, config: ReplayConfig) -> Limits:
    """Return the limits of a mock: a context that fits in its pages, and a default length of answers."""
    most = door.limits.max_model_len
    if config.kv_groups == "off":
        most = min(most, config.pool_tokens)
    else:
        from kvarts.core.kv.block_sizes import needs_of  # imported only for a model with KV groups

        needs = needs_of(config.memory, page_size=config.page_size, most_new=config.max_num_batched_tokens)
        most = needs.most_tokens(most, config.num_blocks)
    if config.start is not None:
        most = min(most, config.start.max_model_len)
    return msgspec.structs.replace(
        door.limits,
        max_model_len=most,
        default_tokens=DEFAULT_TOKENS if door.limits.default_tokens is None else door.limits.default_tokens,
    )


def open_model(
    path: str,
    door: Door,
    *,
    readers: Sequence[EventReader] = (),
    max_model_len: int | None = None,
    tool_call_parser: str = "auto",
    options: EngineOptions | None = None,
    **settings: Any,
) -> Opened:
    """Return the model in `path`, with `options` and other `settings` of kvarts.LLM. Raise the errors of kvarts.LLM.

    `tool_call_parser`: the model's format of calls, see kvarts.doors.openai.tool_calls.
    """
    residency = _residency_of(door)
    if residency is not None:
        readers = [*readers, residency]
    from kvarts.run.torch.llm import LLM  # which needs PyTorch

    llm = LLM(path, options=options, readers=readers, **settings)
    host = llm.host()
    most = host.core.scheduler.most_tokens(host.max_positions or 1 << 40)
    limits = msgspec.structs.replace(
        door.limits, max_model_len=most if max_model_len is None else min(most, max_model_len)
    )
    meter = Meter(max_model_len=limits.max_model_len, residency=residency)
    host.core.log.add_reader(meter)
    facts = {"mock": False, "dtype": settings.get("dtype", "auto" if options is None else options.dtype)}
    text = HubText(host.tokenizer, host.eos_ids, tool_call_parser=tool_call_parser)
    served = Served(host, text, door.names or (path,), door, limits=limits, meter=meter, facts=facts)
    return open_app([served], door)


def open_app(
    served: Sequence[Served],
    door: Door,
    *,
    speedup: float | None = None,
    watcher: Watcher | None = None,
    engines: Sequence[Served] | None = None,
    gone: Sequence[GoneEngines] = (),
    face: Face = VLLM_FACE,
) -> Opened:
    """Return the application around the served models. `engines` and `gone`: see Routes."""
    models = Models(served)
    for each in served:
        each.priority_of = face.priority
    routes = face.routes(models, speedup=speedup, engines=engines, gone=gone)
    script = FailureScript(door.fail, seed=door.seed)
    app = OpenAIApp(
        models,
        routes,
        script=script,
        guard=Guard(door.keys, origins=door.origins, hosts=door.hosts),
        allows_failures=door.allows_failures,
        watcher=watcher,
        has_page=door.has_page,
        access_log=door.access_log,
    )
    return Opened(app, models, routes)

"""The engines of several mocks on one device, advanced turn by turn on a clock that keeps pace with real time.

One loop owns all of them. A request is assigned to a model before it is queued; its index is unique among all models.

`open_several` assembles such mocks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import msgspec

from kvarts.base.clock import Clock, PacedClock
from kvarts.core.event_log import EventLog
from kvarts.core.executor import CostModel
from kvarts.core.request import Request
from kvarts.core.sampling import Logprobs, SamplingParams
from kvarts.core.sched.plan import Batch
from kvarts.core.sched.policy import NEVER_NS
from kvarts.cost.simulated import SimExecutor
from kvarts.doors.openai.meter import Meter
from kvarts.doors.openai.opening import (
    Door,
    MockParts,
    MockSettings,
    groups_of,
    meter_of,
    mock_facts,
    mock_limits,
    mock_parts,
)
from kvarts.doors.openai.prompts import WordText
from kvarts.doors.openai.served import Health, Served
from kvarts.run.engine_loop import EngineLoop
from kvarts.run.llm_engine import LLMEngine
from kvarts.run.mock import MockExecutor
from kvarts.run.text import DetokenizingExecutor, Generation
from kvarts.sim.config import ReplayConfig
from kvarts.sim.sharing.config import SharingConfig
from kvarts.sim.sharing.device import SharedDevice, debts
from kvarts.sim.sharing.outcome import Contention
from kvarts.sim.sharing.replay import open_tenant
from kvarts.sim.sharing.tenant import Tenant, TurnOrder
from kvarts.sim.sharing.turns import TurnLoop

__all__ = ["ModelOfDevice", "PacedDevice", "SamplingOfModels", "TurnCost", "open_several"]

RETRY_NS = 1_000_000
"""Delay before the next attempt when all waiting requests are for a degraded model, which does not admit any."""
NS_PER_S = 1e9


class TurnCost:
    """A CostModel in which a turn without computation, of a model that has given way to another, takes no time."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self.decode_ns = cost.decode_ns

    def step_ns(self, batch: Batch) -> int:
        """Return the duration of a step."""
        return self._cost.step_ns(batch) if batch.chunks or batch.num_decodes else 0


Assignments: TypeAlias = dict[int, str]
"""The model of each request under way, by index."""


class PacedDevice:
    """A CoreEngine: the turns of all models, one at a time; in a pause it waits for tasks."""

    def __init__(
        self, device: SharedDevice, turns: TurnLoop, tenants: Mapping[str, Tenant], models: Assignments, clock: Clock
    ) -> None:
        self.device = device
        self._turns = turns
        self._tenants = dict(tenants)
        self._models = models
        self._clock = clock

    @property
    def has_requests(self) -> bool:
        """Whether a request runs or waits."""
        return any(tenant.scheduler.has_work for tenant in self._tenants.values())

    @property
    def has_work(self) -> bool:
        """Whether there are requests, or transfers under way."""
        return self._turns.has_work

    def submit(self, request: Request, now_ns: int) -> str | None:
        """Queue `request`, or return why it can never run. Transfers that have ended meanwhile are finished first."""
        name = self._models.get(request.index)
        assert name is not None, "a request is assigned before it is queued"
        self._turns.run_until(now_ns, [])
        self._turns.wake(now_ns)
        reason = self._tenants[name].submit(request, now_ns)
        if reason is not None:
            self._models.pop(request.index, None)
        return reason

    def cancel(self, request: Request) -> None:
        """Drop `request` between steps, now; its pages are free at once, for other models as well.

        The last step of its own model may have ended long before: others had their turns since.
        """
        name = self._models.get(request.index)
        assert name is not None
        if self._turns.is_pausing:
            self._turns.wake(self._clock.now_ns())
        now_ns = self.device.now_ns = max(self._clock.now_ns(), self._turns.now_ns)
        self._tenants[name].cancel(request, now_ns)

    def step(self, now_ns: int) -> list[Request]:
        """Execute one turn that starts at `now_ns`, or wait until one is possible. Return finished requests.

        A task that is queued meanwhile interrupts the wait; the next call goes on with it.
        """
        turns = self._turns
        if not self.has_requests:  # transfers only, which have progressed meanwhile
            turns.run_until(now_ns, [])
            if turns.has_work:
                self._clock.wait_unless_asked(max(turns.now_ns, now_ns))
            return []
        if not turns.is_pausing and turns.start(now_ns) == NEVER_NS:
            self._clock.wait_until_ns(now_ns + RETRY_NS)
            turns.wake(now_ns + RETRY_NS)
            return []
        if turns.is_pausing and not self._clock.wait_unless_asked(turns.now_ns):
            return []
        finished = turns.finish()
        for tenant in self._tenants.values():
            del tenant.settled[:]  # for reports, which a mock does not make
        return finished


class SamplingOfModels:
    """A SamplingState and Generations of all models: each request is sampled by its own model."""

    def __init__(
        self,
        executors: Mapping[str, MockExecutor],
        generations: Mapping[str, DetokenizingExecutor],
        models: Assignments,
    ) -> None:
        self._executors = dict(executors)
        self._generations = dict(generations)
        self._models = models

    def add(
        self, request_index: int, params: SamplingParams, prompt: Sequence[int], stop_ids: Collection[int] = ()
    ) -> None:
        """Start sampling for a request; tokens in `stop_ids` end it."""
        self._executors[self._name(request_index)].add(request_index, params, prompt, stop_ids)

    def drop(self, request_index: int) -> None:
        """Forget a request, if it was added."""
        name = self._models.get(request_index)
        if name is not None:
            self._executors[name].drop(request_index)
            self._models.pop(request_index, None)

    def logprobs(self, request_index: int) -> Logprobs:
        """Return the log-probabilities of the tokens of a request so far."""
        return self._executors[self._name(request_index)].logprobs(request_index)

    def prompt_logprobs(self, request_index: int) -> Logprobs | None:
        """Return the log-probabilities of its prompt."""
        return self._executors[self._name(request_index)].prompt_logprobs(request_index)

    def error(self, request_index: int) -> None:
        """Return None: mocks do not fail in sampling."""

    def of_generations(self) -> GenerationsOfModels:
        """Return the generations of the same requests."""
        return GenerationsOfModels(self._generations, self._models)

    def _name(self, request_index: int) -> str:
        name = self._models.get(request_index)
        assert name is not None, "the request is under way"
        return name


class GenerationsOfModels:
    """The generations under way, of all models."""

    def __init__(self, generations: Mapping[str, DetokenizingExecutor], models: Assignments) -> None:
        self._generations = generations
        self._models = models

    def add(self, generation: Generation) -> None:
        """Start making text for a request."""
        self._of(generation.request.index).add(generation)

    def get(self, request_index: int) -> Generation | None:
        """Return a request under way; None if `request_index` is unknown."""
        name = self._models.get(request_index)
        return None if name is None else self._generations[name].get(request_index)

    def drop(self, request_index: int) -> Generation | None:
        """Forget a request, and return its tokens and text; None if it was not added."""
        name = self._models.get(request_index)
        return None if name is None else self._generations[name].drop(request_index)

    def _of(self, request_index: int) -> DetokenizingExecutor:
        name = self._models.get(request_index)
        assert name is not None, "the request is under way"
        return self._generations[name]


class ModelOfDevice:
    """The Sharing of one model."""

    def __init__(self, name: str, paced: PacedDevice, models: Assignments, tenant: Tenant) -> None:
        self._name = name
        self._paced = paced
        self._models = models
        self._tenant = tenant

    def assign(self, index: int) -> None:
        """Assign request `index`, which is about to be queued, to this model."""
        self._models[index] = self._name

    def set_health(self, health: Health) -> None:
        """Set the health of this model, between steps, after its requests were ended."""
        left = self._paced.device.set_health(self._name, health)
        assert not left, "its requests were ended before"
        self._tenant.is_fresh = True

    def loans(self) -> list[tuple[str, int]]:
        """Return the memory that this model uses out of others' guarantees: each lender, and the bytes."""
        parts = self._paced.device.memory.parts
        found = debts(
            self._paced.device.memory.num_bytes,
            {name: part.guaranteed_bytes for name, part in parts.items()},
            {name: part.num_used_bytes for name, part in parts.items()},
        )
        return [(lender, num_bytes) for (lender, borrower), num_bytes in found.items() if borrower == self._name]

    @property
    def num_reclaimed(self) -> int:
        """Requests of this model that were preempted for other models."""
        return self._paced.device.num_reclaimed(self._name)


class _Engine(msgspec.Struct, frozen=True):
    tenant: Tenant
    parts: MockParts
    meter: Meter


def open_several(config: SharingConfig, door: Door, settings: MockSettings) -> list[Served]:
    """Return mocks of all models of `config`, served under their names in it."""
    clock = PacedClock(speedup=settings.speedup)
    device = SharedDevice(
        config.kv_bytes,
        is_static=config.static_split,
        reclaim_after_ns=round(min(config.reclaim_after_s, 1e9) * NS_PER_S),
    )
    engines = {name: _engine(config, name, device, clock, door, settings) for name in config.models}
    tenants = [engine.tenant for engine in engines.values()]
    turns = TurnLoop(
        device,
        tenants,
        TurnOrder(device, tenants),
        Contention(tenants),
        step_by_step=True,
        audit=config.each.audit,
    )
    models: Assignments = {}
    paced = PacedDevice(device, turns, {tenant.name: tenant for tenant in tenants}, models, clock)
    clock.is_at_rest = lambda: not paced.has_requests
    sampling = SamplingOfModels(
        {name: engine.parts.executor for name, engine in engines.items()},
        {name: engine.parts.detokenizing for name, engine in engines.items()},
        models,
    )
    loop = EngineLoop(LLMEngine(paced, sampling, sampling.of_generations(), clock, page_size=config.each.page_size))
    clock.is_asked = loop.wait_for_task
    served: list[Served] = []
    for name, engine in engines.items():
        of_model: ReplayConfig = config.configs[name]
        limits = mock_limits(door, of_model)
        host = engine.parts.host(
            loop,
            engine.tenant.engine,
            of_model,
            clock,
            token_bytes=config.page_bytes[name] // of_model.page_size,
            max_positions=limits.max_model_len,
            groups=groups_of(of_model),
        )
        served.append(
            Served(
                host,
                WordText(),
                (name,),
                door,
                limits=limits,
                meter=engine.meter,
                facts=mock_facts(door, settings.speedup, of_model),
                sharing=ModelOfDevice(name, paced, models, engine.tenant),
                adapters=() if served else None,
            )
        )
    return served


def _engine(
    config: SharingConfig, name: str, device: SharedDevice, clock: Clock, door: Door, settings: MockSettings
) -> _Engine:
    """Build the engine of one model, and register it on the device."""
    of_model = config.configs[name]
    meter = meter_of(door, of_model, settings.speedup)
    log = EventLog([*settings.readers.of_model(name, of_model), *meter.readers], num_waiting=1)
    cost = TurnCost(of_model.cost_model)
    num_counted = config.most_bytes(name) // config.counted_bytes[name]
    parts = mock_parts(of_model, cost, clock, seed=door.seed, groups=groups_of(of_model), num_blocks=num_counted)
    tenant = open_tenant(config, name, device, parts.waiting, log=log, times=SimExecutor(cost), with_ids=True)
    return _Engine(tenant, parts, meter)

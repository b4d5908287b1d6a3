"""Assembly of a server of several mocks on one device."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvarts.clock import Clock, PacedClock
from kvarts.event_log import EventLog, EventReader
from kvarts.executor.simulated import SimExecutor
from kvarts.llm.llm_engine import LLMEngine
from kvarts.llm.loop import EngineLoop
from kvarts.openai_api.app import Watcher
from kvarts.openai_api.meter import Meter
from kvarts.openai_api.mock import MockParts, mock_parts
from kvarts.openai_api.opening import Door, Opened, make_served, meter_of, mock_limits, open_app
from kvarts.openai_api.prompts import WordText
from kvarts.openai_api.sharing.device import (
    Assignments,
    ModelOfDevice,
    PacedDevice,
    SamplingOfModels,
    TurnCost,
)
from kvarts.sharing.config import ObserversOf, SharingConfig
from kvarts.sharing.device import SharedDevice
from kvarts.sharing.outcome import Contention
from kvarts.sharing.replay import open_tenant
from kvarts.sharing.tenant import Tenant
from kvarts.sharing.turn_order import TurnOrder
from kvarts.sharing.turns import TurnLoop
from kvarts.sim.config import ReplayConfig

__all__ = ["open_several"]

NS_PER_S = 1e9


class _Engine(msgspec.Struct, frozen=True):
    tenant: Tenant
    parts: MockParts
    meter: Meter


def open_several(
    config: SharingConfig,
    door: Door,
    *,
    speedup: float = 1.0,
    readers_of: ObserversOf = lambda _: (),
    clock: Clock | None = None,
    watcher: Watcher | None = None,
) -> Opened:
    """Return mocks of all models of `config`, served under their names in it.

    `readers_of` returns the readers of all events of a model, by its name.
    """
    paced_clock = PacedClock(speedup=speedup)
    if clock is None:
        clock = paced_clock
    device = SharedDevice(
        config.kv_bytes,
        is_static=config.static_split,
        reclaim_after_ns=round(min(config.reclaim_after_s, 1e9) * NS_PER_S),
    )
    names = list(config.models)
    limits = {name: mock_limits(door, config.configs[name]) for name in names}
    engines = {
        name: _engine(
            config, name, device, clock, meter_of(door, limits[name], speedup=speedup),
            seed=door.seed, readers=readers_of(name),
        )
        for name in names
    }  # fmt: skip
    tenants = [engines[name].tenant for name in names]
    turns = TurnLoop(
        device,
        tenants,
        TurnOrder(device, tenants),
        Contention(tenants),
        step_by_step=True,
        audit=config.each.audit,
    )
    models = Assignments()
    paced = PacedDevice(device, turns, {tenant.name: tenant for tenant in tenants}, models, clock)
    paced_clock.is_at_rest = lambda: not paced.has_requests
    sampling = SamplingOfModels(
        {name: engine.parts.executor for name, engine in engines.items()},
        {name: engine.parts.detokenizing for name, engine in engines.items()},
        models,
    )
    loop = EngineLoop(LLMEngine(paced, sampling, sampling.of_generations(), clock, page_size=config.each.page_size))
    served = []
    for name, engine in engines.items():
        of_model: ReplayConfig = config.configs[name]
        host = engine.parts.host(
            loop,
            engine.tenant.engine,
            of_model,
            clock,
            token_bytes=config.page_bytes[name] // of_model.page_size,
            max_positions=limits[name].max_model_len,
            groups=None if of_model.kv_groups == "off" else of_model.memory,
        )
        facts = {"mock": True, "seed": door.seed, "speedup": speedup, "cost_model": of_model.to_builtins()["cost"]}
        served.append(
            make_served(
                host,
                WordText(),
                (name,),
                door,
                limits=limits[name],
                meter=engine.meter,
                facts=facts,
                sharing=ModelOfDevice(name, paced, models, engine.tenant),
                adapters=door.adapters if name == names[0] else (),
            )
        )
    return open_app(served, door, speedup=speedup, watcher=watcher)


def _engine(
    config: SharingConfig,
    name: str,
    device: SharedDevice,
    clock: Clock,
    meter: Meter,
    *,
    seed: int,
    readers: Sequence[EventReader],
) -> _Engine:
    """Build the engine of one model, and register it on the device."""
    of_model = config.configs[name]
    log = EventLog([*readers, *meter.readers], num_waiting=1)
    cost = TurnCost(of_model.cost_model)
    groups = None if of_model.kv_groups == "off" else of_model.memory
    num_counted = config.most_bytes(name) // config.counted_bytes[name]
    parts = mock_parts(of_model, cost, clock, seed=seed, groups=groups, num_blocks=num_counted)
    tenant = open_tenant(config, name, device, parts.waiting, log=log, times=SimExecutor(cost), with_ids=True)
    return _Engine(tenant, parts, meter)

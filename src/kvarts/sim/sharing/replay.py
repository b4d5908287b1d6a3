"""Replay of several models on one device, or on several identical devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from kvarts.core.build import Planning, Storage, Watching, build_engine, open_group_cache, preparation_of
from kvarts.core.event_log import EventLog, EventReader
from kvarts.core.executor import Executor, VirtualExecutor
from kvarts.core.sched.policy import NEVER_NS
from kvarts.cost.simulated import SimExecutor
from kvarts.sim.arrivals import Arrivals
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replay import MANY_EVENTS, Traffic, make_router, prefill_cost, trace_of
from kvarts.sim.report.report import EngineTotals, Report
from kvarts.sim.report.requests import RequestLog
from kvarts.sim.router import Router
from kvarts.sim.sharing.config import ObserversOf, SharingConfig
from kvarts.sim.sharing.device import SharedDevice
from kvarts.sim.sharing.outcome import Contention, OfDevice, TurnLog
from kvarts.sim.sharing.report import SharedReport, slices, split_config
from kvarts.sim.sharing.tenant import Tenant, TurnOrder
from kvarts.sim.sharing.turns import SharedDriver, TurnLoop

__all__ = ["open_tenant", "replay_several"]

NS_PER_S = 1e9


def replay_several(
    traffic: Mapping[str, Traffic],
    config: SharingConfig,
    *,
    on_progress: Callable[[int], object] | None = None,
    observers_of: ObserversOf | None = None,
) -> SharedReport:
    """Replay a trace for each model of `config`, and report on each model and the device.

    `on_progress` receives the number of requests that have ended since its last call. `observers_of` returns the
    observers of a model's events, by its name, or with several devices by its name and the number of the device; an
    observed replay runs step by step. Raises ConfigError for a model without a trace, and a trace without a model.
    """
    config.check_traces(traffic)
    traces = {name: trace_of(traffic[name]) for name in config.models}
    engines: dict[str, list[Tenant]] = {name: [] for name in config.models}
    routers = {
        name: make_router(of_model, engines[name], shares_devices=True) for name, of_model in config.configs.items()
    }
    opened = [open_device(config, number, observers_of, routers) for number in range(config.each.replicas)]
    arrivals = []
    for name, share in config.models.items():
        of_model = config.configs[name]
        source = of_model.source(traces[name])
        log = RequestLog(largest_hit_counts=of_model.profile == "mocker", tiers=_preparation_of(of_model))
        engines[name] += [device.tenants[name] for device in opened]
        arrivals.append(
            Arrivals(
                traces[name],
                source,
                routers[name],
                engines[name],
                log,
                priority=share.priority,
                config=of_model,
            )
        )
    loops = []
    for number, each in enumerate(opened):
        tenants = list(each.tenants.values())
        loop = TurnLoop(
            each.device,
            tenants,
            TurnOrder(each.device, tenants),
            Contention(tenants),
            # Observed devices go step by step. So do KV groups: the parts that a leap takes and releases are not known.
            step_by_step=config.each.step_by_step or config.has_groups or any(device.is_observed for device in opened),
            audit=config.each.audit,
            changes=config.changes,
            clocks=[partial(router.note_time, number) for router in routers.values()] if each.is_observed else (),
        )
        loops.append(loop)
    SharedDriver(arrivals, loops, on_progress=on_progress).run()
    for each in opened:
        for name, of_steps in each.logs.items():
            of_steps.late = each.tenants[name].scheduler.preemptor.take_preemptions()
    reports = {}
    for (name, of_model), of_traffic in zip(config.configs.items(), arrivals, strict=True):
        reports[name] = Report(
            traces[name],
            of_model,
            of_traffic.log,
            [device.logs[name] for device in opened],
            [EngineTotals.of(device.tenants[name].scheduler) for device in opened],
        )
    outcomes = [
        OfDevice(
            config,
            each.logs,
            {name: tenant.settled for name, tenant in each.tenants.items()},
            loop.contest.outcome(),
            number if len(opened) > 1 else None,
        )
        for number, (each, loop) in enumerate(zip(opened, loops, strict=True))
    ]
    num_reclaimed = {name: sum(each.device.num_reclaimed(name) for each in opened) for name in config.models}
    baselines = None
    if config.baselines:
        split = replay_several(traces, split_config(config))
        baselines = {"split": split.reports, "slice": slices(traces, config)}
    return SharedReport(config, reports, outcomes, num_reclaimed=num_reclaimed, baselines=baselines)


class OpenedDevice(msgspec.Struct, frozen=True):
    """A device, and by model its engine and the log of its steps."""

    device: SharedDevice
    tenants: dict[str, Tenant]
    logs: dict[str, TurnLog]
    is_observed: bool


def open_device(
    config: SharingConfig, number: int, observers_of: ObserversOf | None, routers: Mapping[str, Router]
) -> OpenedDevice:
    """Build device `number` of those that `config` describes. `routers`: by model; they read its events if they do."""
    device = SharedDevice(
        config.kv_bytes,
        is_static=config.static_split,
        reclaim_after_ns=round(min(config.reclaim_after_s * NS_PER_S, NEVER_NS)),
    )
    tenants: dict[str, Tenant] = {}
    logs: dict[str, TurnLog] = {}
    is_observed = False
    for name, of_model in config.configs.items():
        observers: Sequence[EventReader] = ()
        if observers_of is not None:
            observers = observers_of(name if of_model.replicas == 1 else (name, number))
        router = routers[name]
        of_router = router.reader_of(number) if of_model.replicas > 1 or router.holds_requests else None
        readers = [*observers, *(() if of_router is None else (of_router,))]
        is_observed = is_observed or bool(readers)
        num_counted = config.most_bytes(name) // config.counted_bytes[name]
        memory = None if of_model.kv_groups == "off" else of_model.memory.to_builtins()
        steps = logs[name] = TurnLog(num_counted, _preparation_of(of_model), memory)
        log = EventLog([steps, *readers], num_waiting=1 if observers else MANY_EVENTS)
        executor = SimExecutor(of_model.cost_model)
        tenants[name] = open_tenant(config, name, device, executor, log=log, times=executor)
        router.follow(number, log)
    return OpenedDevice(device, tenants, logs, is_observed)


def open_tenant(
    config: SharingConfig,
    name: str,
    device: SharedDevice,
    executor: Executor,
    *,
    log: EventLog,
    times: VirtualExecutor,
    with_ids: bool = False,
) -> Tenant:
    """Build the engine of the model `name`, and register it on `device`.

    `times`: the durations of its decodes. `with_ids`: pages and blocks have ids, which events name.
    """
    of_model = config.configs[name]
    prepare = preparation_of(of_model.offload)
    memory = None if of_model.kv_groups == "off" else of_model.memory
    below = None if prepare is None else prepare(of_model, of_model.eviction, memory)
    register = partial(device.register, name, guaranteed_bytes=config.guaranteed_bytes[name])
    if memory is None:
        part = register(
            page_bytes=config.page_bytes[name],
            with_page_ids=with_ids,
            order=of_model.eviction() if below is None else below.order,
            watcher=None if below is None else below.watcher,
            emit=log.emit_details,
        )
    else:
        part = register(
            parts=open_group_cache(
                of_model,
                memory,
                num_blocks=config.most_bytes(name) // config.counted_bytes[name],
                emit=log.emit_details,
                with_ids=with_ids,
                below=below,
                make_order=of_model.eviction,
            )
        )
    engine = build_engine(
        of_model,
        executor,
        Storage(
            memory=memory,
            cache=part.cache,
            pages=part,
            below=below,
            prefill=prefill_cost(of_model),
            moves_pages=False,
        ),
        Planning(policy=of_model.admission()),
        Watching(log=log),
    )
    device.attach(name, engine.scheduler, engine.cancel)
    return Tenant(name, engine, times, device, part, share=config.shares[name])


def _preparation_of(config: ReplayConfig) -> dict[str, int]:
    return config.tiers

"""Replay of several models on one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

from kvarts.build import build_engine
from kvarts.event_log import EventLog, EventReader
from kvarts.executor.cost import CostModel
from kvarts.executor.simulated import SimExecutor
from kvarts.kv.eviction import LruOrder
from kvarts.report.report import Report
from kvarts.report.requests import RequestLog
from kvarts.sched.plan import StepPlan, StepResult
from kvarts.sharing.config import SharingConfig
from kvarts.sharing.device import SharedDevice
from kvarts.sharing.report import SharedReport
from kvarts.sharing.steps import TurnLog
from kvarts.sharing.tenant import Tenant
from kvarts.sharing.turns import TurnLoop
from kvarts.sim.replay import Traffic, trace_of
from kvarts.traffic.source import source_of
from kvarts.traffic.trace import Trace

__all__ = ["replay_several", "replay_shared"]

MANY_EVENTS = 16
"""So many events wait in virtual time before readers get them: nothing there has to be on time."""


class TurnExecutor(SimExecutor):
    """A SimExecutor with turns of no time where its model gave way to another and has nothing left to compute."""

    def __init__(self, cost: CostModel) -> None:
        super().__init__(cost)
        self._nothing = StepResult(0)

    def execute(self, plan: StepPlan) -> StepResult:
        """Return the duration of the step."""
        return super().execute(plan) if plan.batch.chunks or plan.batch.num_decodes else self._nothing


def replay_shared(
    traces: Mapping[str, Trace],
    config: SharingConfig,
    *,
    on_progress: Callable[[int], object] | None = None,
    observers_of: Callable[[str], Sequence[EventReader]] | None = None,
) -> SharedReport:
    """Replay several models. Deprecated: call `kvarts.replay`."""
    warnings.warn(
        "replay_shared(traces, config) is now replay(traces, config); the old name goes with the next release",
        DeprecationWarning,
        stacklevel=2,
    )
    return replay_several(traces, config, on_progress=on_progress, observers_of=observers_of)


def replay_several(
    traffic: Mapping[str, Traffic],
    config: SharingConfig,
    *,
    on_progress: Callable[[int], object] | None = None,
    observers_of: Callable[[str], Sequence[EventReader]] | None = None,
) -> SharedReport:
    """Replay a trace for each model of `config`, and report, of each and of the device.

    `on_progress` is told how many requests have ended since it was last told. `observers_of` answers what observes the
    events of a model; to be observed, a replay goes step by step. Raises ConfigError for a model without a trace, and
    for one more trace.
    """
    config.check_traces(traffic)
    traces = {name: trace_of(traffic[name]) for name in config.models}
    device = SharedDevice(
        config.kv_bytes, max_num_batched_tokens=config.each.max_num_batched_tokens, is_static=config.static_split
    )
    tenants: list[Tenant] = []
    logs: dict[str, TurnLog] = {}
    is_observed = False
    for name, share in config.models.items():
        of_model = config.configs[name]
        tiers = {} if of_model.offload is None else of_model.offload.tiers(of_model.page_size)
        below = None if of_model.offload is None else of_model.offload.prepare(of_model, LruOrder)
        steps = logs[name] = TurnLog(of_model.num_pages, tiers)
        observers = () if observers_of is None else observers_of(name)
        is_observed = is_observed or bool(observers)
        log = EventLog([steps, *observers], num_waiting=1 if observers else MANY_EVENTS)
        part = device.register(
            name,
            page_bytes=config.page_bytes[name],
            weight=share.weight,
            guaranteed_bytes=config.guaranteed_bytes[name],
            floor=share.floor,
            ceiling=share.ceiling,
            order=None if below is None else below.order,
            watcher=None if below is None else below.watcher,
            tell=log.tell_details,
        )
        executor = TurnExecutor(of_model.cost_model)
        policy = of_model.admission()
        engine = build_engine(of_model, executor, log=log, cache=part.cache, pages=part, policy=policy, below=below)
        device.attach(name, engine.scheduler, engine.cancel)
        source = source_of(traces[name], concurrency=of_model.concurrency, speedup=of_model.speedup)
        requests = RequestLog(largest_hit_counts=of_model.profile == "mocker", tiers=tiers)
        tenants.append(
            Tenant(
                name,
                engine,
                executor,
                part,
                traces[name],
                source,
                requests,
                weight=share.weight,
                priority=share.priority,
            )
        )
    turns = TurnLoop(
        device,
        tenants,
        step_by_step=config.each.step_by_step or is_observed,
        audit=config.each.audit,
        changes=config.changes,
        on_progress=on_progress,
    )
    turns.run()
    reports = {
        tenant.name: Report(
            traces[tenant.name],
            config.configs[tenant.name],
            tenant.log,
            [logs[tenant.name]],
            num_evicted_pages=tenant.cache.num_evicted,
            transfers=[] if tenant.tiers is None else [tenant.tiers.totals()],
        )
        for tenant in tenants
    }
    return SharedReport(
        config,
        reports,
        logs,
        num_reclaimed={tenant.name: device.num_reclaimed(tenant.name) for tenant in tenants},
        contested={tenant.name: (tenant.contested_tokens, tenant.contested_share) for tenant in tenants},
    )

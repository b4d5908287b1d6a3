"""Replay of several models on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvarts.build import build_engine
from kvarts.event_log import EventLog, EventReader
from kvarts.executor.cost import CostModel
from kvarts.executor.simulated import SimExecutor
from kvarts.report.report import Report
from kvarts.report.requests import RequestLog
from kvarts.sched.plan import StepPlan, StepResult
from kvarts.sharing.config import SharingConfig
from kvarts.sharing.device import SharedDevice
from kvarts.sharing.report import SharedReport
from kvarts.sharing.steps import TurnLog
from kvarts.sharing.turns import Tenant, TurnLoop
from kvarts.traffic.source import source_of
from kvarts.traffic.trace import Trace

__all__ = ["replay_shared"]

MANY_EVENTS = 512
"""So many events wait in virtual time before readers get them: nothing there has to be on time."""


class TurnExecutor(SimExecutor):
    """A SimExecutor whose turn takes no time if its model gave way to another and has nothing left to compute."""

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
    """Replays a trace for each model of `config`, and reports, of each and of the device.

    `on_progress`: see `replay`. `observers_of` answers who observes the events of a model; to be observed, a replay
    goes step by step. Raises ConfigError for a model without a trace, and for one more trace.
    """
    config.check_traces(traces)
    device = SharedDevice(
        config.kv_bytes, max_num_batched_tokens=config.max_num_batched_tokens, is_static=config.is_static
    )
    tenants: list[Tenant] = []
    logs: dict[str, TurnLog] = {}
    is_observed = False
    for name, share in config.shares.items():
        of_model = config.configs[name]
        steps = logs[name] = TurnLog(of_model.num_pages)
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
            tell=log.tell_details,
        )
        executor = TurnExecutor(of_model.cost_model)
        engine = build_engine(of_model, executor, log=log, cache=part.cache, pages=part)
        device.attach(name, engine.scheduler, engine.cancel)
        source = source_of(traces[name], concurrency=of_model.concurrency, speedup=of_model.speedup)
        requests = RequestLog(largest_hit_counts=False)
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
    first = next(iter(config.configs.values()))
    turns = TurnLoop(
        device,
        tenants,
        step_by_step=first.step_by_step or is_observed,
        audit=first.audit,
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

"""Replay of several models on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvarts.engine import Engine, Observer
from kvarts.executor.simulated import SimExecutor
from kvarts.report.report import Report
from kvarts.report.requests import RequestLog
from kvarts.sharing.config import SharingConfig
from kvarts.sharing.device import SharedDevice
from kvarts.sharing.report import SharedReport
from kvarts.sharing.steps import TurnLog
from kvarts.sharing.turns import Lane, Tenant
from kvarts.traffic.source import source_of
from kvarts.traffic.trace import Trace

__all__ = ["replay_shared"]


def replay_shared(
    traces: Mapping[str, Trace],
    config: SharingConfig,
    *,
    on_progress: Callable[[int], object] | None = None,
    observers_of: Callable[[str], Sequence[Observer]] | None = None,
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
        part = device.register(
            name,
            page_bytes=config.page_bytes[name],
            weight=share.weight,
            guaranteed_bytes=config.guaranteed_bytes[name],
            floor=share.floor,
            ceiling=share.ceiling,
        )
        observers = () if observers_of is None else observers_of(name)
        is_observed = is_observed or bool(observers)
        log = logs[name] = TurnLog(of_model.num_pages)
        engine = Engine(of_model, SimExecutor(of_model.cost_model), sink=log, observers=observers, part=part)
        device.attach(name, engine.scheduler, engine.cancel)
        source = source_of(traces[name], concurrency=of_model.concurrency, speedup=of_model.speedup)
        requests = RequestLog(largest_hit_counts=False)
        tenants.append(
            Tenant(name, engine, part, traces[name], source, requests, weight=share.weight, priority=share.priority)
        )
    first = next(iter(config.configs.values()))
    lane = Lane(
        device,
        tenants,
        step_by_step=first.step_by_step or is_observed,
        audit=first.audit,
        changes=config.changes,
        on_progress=on_progress,
    )
    lane.run()
    reports = {
        tenant.name: Report(
            traces[tenant.name],
            config.configs[tenant.name],
            tenant.log,
            [logs[tenant.name]],
            stalls_ns=tenant.scheduler.stalls_ns,
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

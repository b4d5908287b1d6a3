"""Replay of traffic through the control plane, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvarts.engine import Engine, Observer
from kvarts.executor.simulated import SimExecutor
from kvarts.report.report import Report
from kvarts.report.requests import RequestLog
from kvarts.report.steps import StepLog
from kvarts.sim.config import ReplayConfig
from kvarts.sim.driver import Driver
from kvarts.sim.router import make_router
from kvarts.traffic.formats import load_trace
from kvarts.traffic.source import source_of
from kvarts.traffic.trace import Trace
from kvarts.traffic.workload import Workload

__all__ = ["replay"]


def replay(
    trace: Trace | Workload | Path | str,
    config: ReplayConfig | None = None,
    *,
    on_progress: Callable[[int], object] | None = None,
    observers_of: Callable[[int], Sequence[Observer]] | None = None,
) -> Report:
    """Replays `trace` through the engines that `config` describes, and reports.

    `trace`: a Trace, a Workload to make one from, or the path of a file. `on_progress` is told how many
    requests have ended since it was last told. `observers_of` answers who observes the events of a
    replica. Raises InputError for a trace that cannot be read.
    """
    config = config or ReplayConfig()
    if isinstance(trace, Workload):
        trace = trace.trace()
    elif not isinstance(trace, Trace):
        trace = load_trace(trace)
    source = source_of(trace, concurrency=config.concurrency, speedup=config.speedup)
    tiers = {} if config.offload is None else config.offload.tiers(config.page_size)
    requests = RequestLog(largest_hit_counts=config.profile == "mocker", tiers=tiers)
    steps = [StepLog(config.num_pages, tiers) for _ in range(config.replicas)]
    engines = [
        Engine(
            config,
            SimExecutor(config.cost_model),
            sink=log,
            step_by_step=config.step_by_step,
            audit=config.audit,
            offload=config.offload,
            observers=() if observers_of is None else observers_of(replica),
        )
        for replica, log in enumerate(steps)
    ]
    driver = Driver(trace, source, engines, make_router(config.router), requests, on_progress=on_progress)
    driver.run()
    schedulers = [engine.scheduler for engine in engines]
    return Report(
        trace,
        config,
        requests,
        steps,
        stalls_ns=[stall_ns for scheduler in schedulers for stall_ns in scheduler.stalls_ns],
        num_evicted_pages=sum(scheduler.cache.num_evicted for scheduler in schedulers),
        transfers=[scheduler.offloader.totals() for scheduler in schedulers if scheduler.offloader is not None],
    )

"""Replay of traffic through the control plane, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvarts.build import build_engine
from kvarts.event_log import EventReader
from kvarts.executor.simulated import SimExecutor
from kvarts.report.report import Report
from kvarts.report.requests import RequestLog
from kvarts.report.steps import StepLog
from kvarts.sim.config import ReplayConfig
from kvarts.sim.driver import Driver
from kvarts.sim.replica import Replica
from kvarts.sim.router import make_router
from kvarts.traffic.formats import load_trace
from kvarts.traffic.source import source_of
from kvarts.traffic.trace import Trace
from kvarts.traffic.workload import Workload

__all__ = ["open_replica", "replay"]

MANY_EVENTS = 512
"""So many events wait in virtual time before readers get them: nothing there has to be on time."""


def replay(
    trace: Trace | Workload | Path | str,
    config: ReplayConfig | None = None,
    *,
    on_progress: Callable[[int], object] | None = None,
    observers_of: Callable[[int], Sequence[EventReader]] | None = None,
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
    requests = RequestLog(largest_hit_counts=config.profile == "mocker")
    tiers = {} if config.offload is None else config.offload.tiers(config.page_size)
    steps = [StepLog(config.num_pages, tiers) for _ in range(config.replicas)]
    replicas = [
        open_replica(config, [log, *(() if observers_of is None else observers_of(index))])
        for index, log in enumerate(steps)
    ]
    driver = Driver(trace, source, replicas, make_router(config.router), requests, on_progress=on_progress)
    driver.run()
    schedulers = [replica.scheduler for replica in replicas]
    return Report(
        trace,
        config,
        requests,
        steps,
        num_evicted_pages=sum(scheduler.cache.num_evicted for scheduler in schedulers),
        offloaders=[scheduler.tiers for scheduler in schedulers if scheduler.tiers is not None],
    )


def open_replica(config: ReplayConfig, readers: Sequence[EventReader]) -> Replica:
    """Build an engine in virtual time. `readers`: of what it tells."""
    executor = SimExecutor(config.cost_model)
    engine = build_engine(
        config, executor, readers=readers, num_waiting=MANY_EVENTS, offload=config.offload, audit=config.audit
    )
    return Replica(engine, executor, step_by_step=config.step_by_step)

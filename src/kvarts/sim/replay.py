"""Replay of traffic through the control plane, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, overload

from kvarts.build import build_engine
from kvarts.event_log import EventReader
from kvarts.executor.base import VirtualExecutor
from kvarts.executor.prefill import PrefillCost
from kvarts.executor.simulated import SimExecutor
from kvarts.report.report import Report
from kvarts.report.requests import RequestLog
from kvarts.report.steps import StepLog
from kvarts.sim.arrivals import Arrivals
from kvarts.sim.config import ReplayConfig
from kvarts.sim.driver import Driver, Runner
from kvarts.sim.lockstep import GivenDuration, LockstepCost, Ranks, num_ranks_of
from kvarts.sim.replica import Replica
from kvarts.sim.router import make_router
from kvarts.sim.trials import ReplayTrials
from kvarts.traffic.formats import load_trace
from kvarts.traffic.trace import Trace
from kvarts.traffic.workload import Workload

__all__ = ["Replayable", "Traffic", "open_replica", "replay", "replay_one", "trace_of"]

MANY_EVENTS = 16
"""The number of events buffered in virtual time before readers get them, as none of them is urgent there. A larger
buffer would only evict the engine's data from the processor's cache."""

Traffic = Trace | Workload | Path | str
"""A Trace, a Workload to make one from, or the path of a file."""

TrafficT_contra = TypeVar("TrafficT_contra", contravariant=True)
NameT_co = TypeVar("NameT_co", covariant=True)
NameT = TypeVar("NameT")
ReportT_co = TypeVar("ReportT_co", covariant=True)
TrafficT = TypeVar("TrafficT")
ReportT = TypeVar("ReportT")


class Replayable(Protocol[TrafficT_contra, NameT_co, ReportT_co]):
    """A configuration that can be replayed: ReplayConfig for one model, SharingConfig for several on one device."""

    def replay(
        self,
        traffic: TrafficT_contra,
        *,
        on_progress: Callable[[int], object] | None = None,
        observers_of: Callable[[NameT_co], Sequence[EventReader]] | None = None,
    ) -> ReportT_co:
        """Replay `traffic` and return the report. `observers_of` returns the observers of a replica, or of a model."""


@overload
def replay(
    trace: Traffic,
    config: None = None,
    *,
    on_progress: Callable[[int], object] | None = None,
    observers_of: Callable[[int], Sequence[EventReader]] | None = None,
) -> Report: ...


@overload
def replay(
    trace: TrafficT,
    config: Replayable[TrafficT, NameT, ReportT],
    *,
    on_progress: Callable[[int], object] | None = None,
    observers_of: Callable[[NameT], Sequence[EventReader]] | None = None,
) -> ReportT: ...


def replay(
    trace: Any,
    config: Replayable[Any, Any, Any] | None = None,
    *,
    on_progress: Callable[[int], object] | None = None,
    observers_of: Callable[[Any], Sequence[EventReader]] | None = None,
) -> Any:
    """Replay `trace` with `config` and return the report.

    With a ReplayConfig, `trace` is a Trace, a Workload to make one from, or the path of a file. With a SharingConfig it
    is a mapping of these by the name of the model. `on_progress` is called with the number of requests that have ended
    since its last call. `observers_of` returns the readers that observe the events of a replica, by number, or of a
    model, by name. Raises InputError for a trace that cannot be read.
    """
    return (config or ReplayConfig()).replay(trace, on_progress=on_progress, observers_of=observers_of)


def trace_of(traffic: Traffic) -> Trace:
    """Return `traffic` as a Trace. Raises InputError for a file that cannot be read."""
    if isinstance(traffic, Workload):
        return traffic.trace()
    return traffic if isinstance(traffic, Trace) else load_trace(traffic)


def replay_one(
    traffic: Traffic,
    config: ReplayConfig,
    *,
    on_progress: Callable[[int], object] | None = None,
    observers_of: Callable[[int], Sequence[EventReader]] | None = None,
) -> Report:
    """Replay the traffic of one model through the engines of `config`; the arguments are those of `replay`."""
    trace = trace_of(traffic)
    source = config.source(trace)
    tiers = config.tiers
    requests = RequestLog(largest_hit_counts=config.profile == "mocker", tiers=tiers)
    memory = None if config.kv_groups == "off" else config.memory.to_builtins()
    steps = [StepLog(config.num_blocks, tiers, memory) for _ in range(config.replicas)]
    ranks = num_ranks_of(config.cost_model)
    replicas: list[Replica] = []
    router = make_router(config, replicas, ranks=ranks, tells_pages=config.kv_groups == "off")
    readers: list[list[EventReader]] = []
    for index, log in enumerate(steps):
        of_router = router.reader_of(index) if config.replicas > 1 else None
        observers = () if observers_of is None else observers_of(index)
        readers.append([log, *observers, *(() if of_router is None else (of_router,))])
    runners: list[Runner] = []
    if ranks == 1:
        replicas += [open_replica(config, each) for each in readers]
        runners.extend(replicas)
    else:
        for first in range(0, config.replicas, ranks):
            group, runner = open_ranks(config, readers[first : first + ranks])
            replicas += group
            runners.append(runner)
    for index, replica in enumerate(replicas):
        router.follow(index, replica.engine.log)
    sessions = None if config.sessions is None else config.sessions.open(config, trace, source, replicas)
    arrivals = Arrivals(
        trace,
        source,
        router,
        replicas,
        requests,
        sessions=sessions,
        delay_ns=config.frontend_ns,
        timeout_ns=config.client_timeout_ns,
        stops=config.stop_tokens,
    )
    Driver([arrivals], runners, ranks=ranks, on_progress=on_progress).run()
    schedulers = [replica.scheduler for replica in replicas]
    return Report(
        trace,
        config,
        requests,
        steps,
        num_evicted_pages=sum(scheduler.cache.num_evicted for scheduler in schedulers),
        transfers=[scheduler.tiers.totals() for scheduler in schedulers if scheduler.tiers is not None],
        sessions=None if sessions is None else sessions.totals,
        num_evicted_parts=list(map(sum, zip(*(each.num_evicted_parts() for each in replicas), strict=True))),
        trials=ReplayTrials(trace, config),
    )


def prefill_cost(config: ReplayConfig) -> PrefillCost:
    """Return the cost of prompts in an engine of `config`."""
    return PrefillCost(config.cost_model, token_budget=config.max_num_batched_tokens, pool_tokens=config.pool_tokens)


def open_replica(config: ReplayConfig, readers: Sequence[EventReader]) -> Replica:
    """Build an engine in virtual time. `readers` receive its events."""
    return _open(config, readers, SimExecutor(config.cost_model))


def open_ranks(config: ReplayConfig, readers: Sequence[Sequence[EventReader]]) -> tuple[list[Replica], Ranks]:
    """Build engines in virtual time that are in lock step, one per entry of `readers`; return them and their runner."""
    cost = cast(LockstepCost, config.cost_model)
    executors = [GivenDuration(cost) for _ in readers]
    replicas = [_open(config, each, executor) for each, executor in zip(readers, executors, strict=True)]
    return replicas, Ranks(replicas, executors, cost, step_by_step=config.step_by_step)


def _open(config: ReplayConfig, readers: Sequence[EventReader], executor: VirtualExecutor) -> Replica:
    engine = build_engine(
        config,
        executor,
        memory=None if config.kv_groups == "off" else config.memory,
        readers=readers,
        num_waiting=MANY_EVENTS,
        policy=config.admission(),
        make_order=config.eviction,
        offload=config.offload,
        prefill=prefill_cost(config),
        audit=config.audit,
        holds_pages=config.sessions is not None and config.sessions.holds_pages,
        plans_ahead=config.async_scheduling and config.profile == "default",
        step_ns=config.cost_model.step_ns,
    )
    return Replica(engine, executor, step_by_step=config.step_by_step, plans_ahead=config.async_scheduling)

"""Replay of traffic through the control plane, in virtual time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgspec
import numpy as np
from msgspec import structs

from kvarts.core.build import Planning, Storage, Watching, build_engine, preparation_of
from kvarts.core.event_log import EventReader
from kvarts.core.executor import CostModel
from kvarts.cost.simulated import PrefillCost, SimExecutor
from kvarts.proof.audit.opening import audit_of
from kvarts.sim.arrivals import Arrivals, SessionsKept
from kvarts.sim.config import ReplayConfig
from kvarts.sim.driver import Driver, Runner
from kvarts.sim.replayed_sessions import open_replayed_sessions
from kvarts.sim.replica import Replica
from kvarts.sim.report.report import EngineTotals, Report
from kvarts.sim.report.requests import RequestLog, Taken
from kvarts.sim.report.steps import StepLog
from kvarts.sim.router import AskedCaches, RoundRobin, Routed, Router
from kvarts.sim.traffic.trace import Trace
from kvarts.sim.vllm_start import rules_of

if TYPE_CHECKING:
    from pathlib import Path

    from kvarts.core.kv.transfer import PeersGain, PrefillNs
    from kvarts.sim.lockstep import LockstepCost, Ranks
    from kvarts.sim.report.advice import Trials
    from kvarts.sim.traffic.workload import Workload

__all__ = [
    "Traffic",
    "build_replica",
    "make_router",
    "open_replica",
    "planning_of",
    "replay_one",
    "replay_with_spread",
    "storage_of",
    "trace_of",
]

MANY_EVENTS = 32
"""The number of events buffered in virtual time before readers get them, as none of them is urgent there. A larger
buffer would only evict the engine's data from the processor's cache."""
MANY_REQUESTS = 20_000
"""The number of requests from which on a replay is divided among processes by default: some seconds."""
GROUPS_PER_WORKER = 8
"""Groups of replicas per process: several, so that none ends long before the others, and progress is told."""

Traffic: TypeAlias = "Trace | Workload | Path | str"
"""A Trace, a Workload to make one from, or the path of a file."""


def replay_with_spread(
    traffic: Traffic,
    config: ReplayConfig,
    *,
    workers: int | None = 1,
    on_progress: Callable[[int], object] | None = None,
    observers_of: Callable[[int], Sequence[EventReader]] | None = None,
) -> Report:
    """Replay the traffic of one model, and report the uncertainty of latencies; the arguments are those of `replay`.

    With a cost model that has an uncertainty, `traffic` is replayed some ten times more. With the constants that ship,
    the uncertainty follows from their errors on measurements to which they were not fitted.
    """
    pairs = config.cost.alternatives() if hasattr(config.cost, "alternatives") else []
    trace = trace_of(traffic)
    if not pairs:
        report = replay_one(trace, config, workers=workers, on_progress=on_progress, observers_of=observers_of)
        report.held_out = config.held_out(trace)
        return report
    from kvarts.base.processes import Processes
    from kvarts.sim.trials import spread_of

    report = replay_one(trace, config, on_progress=on_progress, observers_of=observers_of)
    configs = [structs.replace(config, cost=cost) for pair in pairs for cost in pair]
    with Processes(workers, trace) as processes:
        summaries = processes.all(_summary, configs)
    report.spread = spread_of(list(zip(summaries[::2], summaries[1::2], strict=True)))
    return report


def _summary(trace: Trace, config: ReplayConfig) -> dict[str, Any]:
    """Return the summary of a replay. Runs in other processes, too."""
    return replay_one(trace, config).summary


def trace_of(traffic: Traffic) -> Trace:
    """Return `traffic` as a Trace. Raises InputError for a file that cannot be read."""
    if isinstance(traffic, Trace):
        return traffic
    if not isinstance(traffic, str | os.PathLike):
        return traffic.trace()
    from kvarts.sim.traffic.formats import load_trace

    return load_trace(traffic)


def replay_one(
    traffic: Traffic,
    config: ReplayConfig,
    *,
    workers: int | None = 1,
    on_progress: Callable[[int], object] | None = None,
    observers_of: Callable[[int], Sequence[EventReader]] | None = None,
) -> Report:
    """Replay the traffic of one model through the engines of `config`; the arguments are those of `replay`."""
    trace = trace_of(traffic)
    observers = [] if observers_of is None else [observers_of(index) for index in range(config.replicas)]
    if workers != 1 and not any(observers) and _are_apart(trace, config, workers):
        requests, done = _done_apart(trace, config, workers, on_progress)
    else:
        requests, done = _done(trace, config, on_progress, observers)
    if config.audit and trace.requests is not None:
        _expect_same(trace, config, requests, done.steps)
    return Report(
        trace,
        config,
        requests,
        done.steps,
        done.engines,
        sessions=done.sessions,
        trials=lambda: _trials(trace, config),
    )


class _Done(msgspec.Struct, frozen=True):
    """The outcome of replicas, without their requests."""

    steps: list[StepLog]
    engines: list[EngineTotals]
    sessions: Mapping[str, int] | None = None


def _expect_same(trace: Trace, config: ReplayConfig, requests: RequestLog, steps: Sequence[StepLog]) -> None:
    """Replay `trace` without an audit. Raise AuditError if a request or a step differs from `requests` and `steps`."""
    from kvarts.proof.audit.auditor import expect_same  # replays without an audit do not import it

    plain, done = _done(trace, structs.replace(config, audit=False), None, ())
    of_steps = [[{**log.columns, "released": log.released()} for log in logs] for logs in (steps, done.steps)]
    expect_same(requests.columns, of_steps[0], plain.columns, of_steps[1])


def _request_log(config: ReplayConfig) -> RequestLog:
    return RequestLog(largest_hit_counts=config.profile == "mocker", tiers=config.tiers)


def _done(
    trace: Trace,
    config: ReplayConfig,
    on_progress: Callable[[int], object] | None,
    observers: Sequence[Sequence[EventReader]],
) -> tuple[RequestLog, _Done]:
    """Replay in this process. `observers`: of each replica; empty for none."""
    source = config.source(trace)
    tiers = config.tiers
    requests = _request_log(config)
    memory = None if config.kv_groups == "off" else config.memory.to_builtins()
    steps = [StepLog(config.num_blocks, tiers, memory) for _ in range(config.replicas)]
    ranks = int(getattr(config.cost_model, "num_ranks", 1))  # engines in lock step
    replicas: list[Replica] = []
    router = make_router(config, replicas, ranks=ranks)
    readers: list[list[EventReader]] = []
    for index, log in enumerate(steps):
        of_router = router.reader_of(index) if config.replicas > 1 or router.holds_requests else None
        of_index = observers[index] if observers else ()
        readers.append([log, *of_index, *(() if of_router is None else (of_router,))])
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
    sessions: SessionsKept | None = None
    if config.sessions is not None:
        sessions = open_replayed_sessions(config.sessions, config, trace, source, replicas)
    arrivals = Arrivals(
        trace,
        source,
        router,
        replicas,
        requests,
        sessions=sessions,
        config=config,
    )
    Driver([arrivals], runners, ranks=ranks, on_progress=on_progress).run()
    engines = [EngineTotals.of(replica.scheduler) for replica in replicas]
    return requests, _Done(steps, engines, None if sessions is None else sessions.totals)


_Part = tuple[Taken, _Done]
"""The contents of the log of the requests of a group of replicas, and all else."""


# Replicas in several processes ------------------------------------------------------------------------------------


def _are_apart(trace: Trace, config: ReplayConfig, workers: int | None) -> bool:
    """Return whether no replica affects another, and it is worth it to replay them in other processes.

    So it is where requests arrive at known times, and their replicas follow from their order.
    """
    return (
        config.replicas > 1
        and config.router == "round-robin"
        and config.routing is None
        and config.concurrency is trace.concurrency is None
        and config.sessions is None
        and not config.retries
        and not config.stop_tokens
        and not config.audit
        and int(getattr(config.cost_model, "num_ranks", 1)) == 1
        and trace.requests is not None
        and not trace.has_sessions
        and (workers is not None or _are_many(len(trace.requests)))
        and trace.is_in_order
    )


def _are_many(num_requests: int) -> bool:
    """Return whether so many requests are divided among processes by default."""
    if num_requests < MANY_REQUESTS:
        return False
    from kvarts.base.processes import num_cores

    return num_cores() > 1


def _done_apart(
    trace: Trace, config: ReplayConfig, workers: int | None, on_progress: Callable[[int], object] | None
) -> tuple[RequestLog, _Done]:
    """Replay neighbouring replicas together, each group in one of several processes."""
    from kvarts.base.processes import Processes, num_cores

    assert trace.requests is not None
    num_workers = num_cores() if workers is None else workers
    num_groups = min(config.replicas, num_workers * GROUPS_PER_WORKER)
    bounds = [config.replicas * group // num_groups for group in range(num_groups + 1)]
    of_index = np.arange(len(trace.requests)) % config.replicas
    indexes = [np.flatnonzero((of_index >= first) & (of_index < end)) for first, end in pairwise(bounds)]
    found: dict[int, _Part] = {}
    with Processes(num_workers, trace) as processes:
        tasks = {str(group): (*ends, config) for group, ends in enumerate(pairwise(bounds))}
        for group, part in processes.results(_part, tasks):
            found[int(group)] = part
            if on_progress is not None:
                on_progress(len(indexes[int(group)]))
    done = [found[group] for group in range(num_groups)]
    requests = _request_log(config)
    requests.put_together([(part[0], own, first) for part, own, first in zip(done, indexes, bounds, strict=False)])
    for part, own in zip(done, indexes, strict=True):
        for log in part[1].steps:
            log.preemptions = [
                (step, structs.replace(each, victim=int(own[each.victim]), asker=int(own[each.asker])))
                for step, each in log.preemptions
            ]
    several = [part[1] for part in done]
    return requests, _Done(
        [log for each in several for log in each.steps], [engine for each in several for engine in each.engines]
    )


def _part(trace: Trace, task: tuple[int, int, ReplayConfig]) -> _Part:
    """Replay the replicas from `first` to `end`. Runs in other processes, too."""
    first, end, config = task
    requests = trace.requests
    assert requests is not None
    own = chain.from_iterable(
        requests[start + first : start + end] for start in range(0, len(requests), config.replicas)
    )
    part = Trace(
        own,
        unit_tokens=trace.unit_tokens,
        has_output_tokens=trace.has_output_tokens,
        knows_prefixes=trace.knows_prefixes,
        name=trace.name,
    )
    log, done = _done(part, structs.replace(config, replicas=end - first), None, ())
    return log.take(), done


def _trials(trace: Trace, config: ReplayConfig) -> Trials:
    """Return trials of other sizes. They are not audited: the audit that was asked for is of the replay itself."""
    from kvarts.sim.trials import ReplayTrials

    return ReplayTrials(replay_one, trace, structs.replace(config, audit=False))


def make_router(
    config: ReplayConfig,
    engines: Sequence[Routed],
    *,
    ranks: int = 1,
    shares_devices: bool = False,
    peers: PeersGain | None = None,
    tiers: Mapping[str, bool] | None = None,
) -> Router:
    """Return a new router for a replay of `config`, with `engines` as its workers.

    `ranks`: the number of consecutive engines in lock step. `shares_devices`: other models are on the workers' devices.
    `peers`: what workers save that read pages from each other, if they do. `tiers`: the tiers that any worker has, and
    whether they are of files, if these are not those of `config`.
    """
    if config.router == "round-robin" and config.routing is None:
        if ranks == 1:
            return RoundRobin(config.replicas)
        from kvarts.sim.lockstep import WithinGroups

        return WithinGroups(config.replicas, ranks)
    if tiers is None:
        tiers = tiers_of(config)
    # These events cost time, and caches that are asked answer the same if no event is late and none waits for the end
    # of its step.
    routing = config.routing_settings
    asks_groups = config.kv_groups != "off" and not routing.counts_at_ends(config.router)
    is_asking = (shares_devices or asks_groups) and not routing.event_lag_ns
    return open_router(config, tiers, peers, AskedCaches(engines, tuple(tiers)) if is_asking else None)


def open_router(
    config: ReplayConfig, tiers: Mapping[str, bool], peers: PeersGain | None, asked: AskedCaches | None
) -> Router:
    """Return a new router of `config` that knows its workers. It reads their events, except where caches are `asked`.

    `tiers`, `peers`: as in `make_router`.
    """
    from kvarts.sim.routers.view import WorkerFacts  # replays that take turns import nothing of routers

    workers = WorkerFacts(
        config.replicas,
        config.page_size,
        config.max_num_batched_tokens,
        tiers=("device", *(tiers if asked is None else ())),
        are_files=tuple(tiers.values()),
        directory=asked,
        peers=peers,
        memory=None if config.kv_groups == "off" else config.memory,
    )
    return config.routing_settings.open(config.router, workers)


def tiers_of(config: ReplayConfig) -> dict[str, bool]:
    """Return the tiers below an engine, the fastest first, and whether each is of files."""
    are_files = () if config.below is None else config.below.are_files
    return dict(zip(config.tiers, are_files, strict=True))


def prefill_cost(config: ReplayConfig) -> PrefillNs:
    """Return the cost of prompts in an engine of `config`."""
    cost = PrefillCost(config.cost_model, token_budget=config.max_num_batched_tokens, pool_tokens=config.pool_tokens)
    return cost.prefill_ns


def storage_of(config: ReplayConfig) -> Storage:
    """Return where an engine in virtual time of `config` keeps KV."""
    return Storage(
        memory=None if config.kv_groups == "off" else config.memory,
        num_blocks=None if config.kv_groups == "off" else config.num_blocks,
        make_order=config.eviction,
        holds_pages=config.sessions is not None and config.sessions.holds_pages,
        leaps_emitted=not config.step_by_step,
        tiers=None if config.plans_batches else preparation_of(config.offload),
        host=config.host,
        prefill=prefill_cost(config),
    )


def planning_of(config: ReplayConfig) -> Planning:
    """Return how an engine in virtual time of `config` plans its steps."""
    policy, running = config.order
    drafts = None if config.start is None else config.start.drafts
    return Planning(
        policy=policy,
        running=running,
        plans_ahead=config.async_scheduling and config.profile == "default",
        finds_prefixes=not config.no_prefix_caching,
        step_ns=config.cost_model.step_ns,
        ends_steps=rules_of(config.engine).ends_steps,
        batches=config.batches,
        speculation=None if drafts is None else drafts.speculation(),
    )


def open_replica(config: ReplayConfig, readers: Sequence[EventReader]) -> Replica:
    """Build an engine in virtual time. `readers` receive its events."""
    watching = Watching(readers, num_waiting=MANY_EVENTS, audit=audit_of(config.audit))
    return build_replica(config, config.cost_model, storage_of(config), planning_of(config), watching)


def build_replica(
    config: ReplayConfig, cost: CostModel, storage: Storage, planning: Planning, watching: Watching
) -> Replica:
    """Build an engine in virtual time whose steps take as long as `cost` returns."""
    executor = SimExecutor(cost)
    engine = build_engine(config, executor, storage, planning, watching)
    return Replica(
        engine,
        executor,
        step_by_step=config.step_by_step,
        plans_ahead=config.async_scheduling,
        recv_interval=config.scheduler_recv_interval,
    )


def open_ranks(config: ReplayConfig, readers: Sequence[Sequence[EventReader]]) -> tuple[list[Replica], Ranks]:
    """Build engines in virtual time that are in lock step, one per entry of `readers`; return them and their runner."""
    from kvarts.sim.lockstep import Ranks

    replicas = [open_replica(config, each) for each in readers]
    return replicas, Ranks(replicas, cast("LockstepCost", config.cost_model), step_by_step=config.step_by_step)

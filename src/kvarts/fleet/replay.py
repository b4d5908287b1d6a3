"""Replay of traffic on a fleet, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import structs

from kvarts.build import build_engine
from kvarts.event_log import EventReader
from kvarts.executor.base import CostModel
from kvarts.executor.simulated import SimExecutor
from kvarts.fleet.config import FleetConfig, PoolConfig, Role
from kvarts.fleet.cost import DecodeOnly
from kvarts.fleet.driver import FleetDriver
from kvarts.fleet.handoff import TIMES
from kvarts.fleet.links import FixedRate, Links, SharedByWorkers
from kvarts.fleet.pool import Front, Pool
from kvarts.fleet.queues import ByAge, ByReservation
from kvarts.fleet.report import FleetReport
from kvarts.fleet.worker import Worker
from kvarts.limits import MOST_REPLICAS
from kvarts.report.requests import RequestLog
from kvarts.report.steps import StepLog
from kvarts.settings import SettingError
from kvarts.sim.arrivals import Arrivals
from kvarts.sim.replay import MANY_EVENTS, Traffic, prefill_cost, trace_of
from kvarts.sim.replica import Replica
from kvarts.sim.router import Router, make_router

__all__ = ["replay_fleet"]

RANKS: dict[Role, int] = {"prefill": 0, "mixed": 1, "decode": 2}
"""Which workers come first where something happens at one time."""


def replay_fleet(
    traffic: Traffic,
    config: FleetConfig,
    *,
    on_progress: Callable[[int], object] | None = None,
    observers_of: Callable[[int], Sequence[EventReader]] | None = None,
) -> FleetReport:
    """Replay the traffic of one model on the fleet described by `config`, and return the report."""
    trace = trace_of(traffic)
    first = config.first
    is_mocker = first.profile == "mocker"
    source = first.source(trace)
    log = RequestLog(largest_hit_counts=is_mocker, more=("source", *TIMES, "num_bytes", "num_restarts"))
    steps: list[StepLog] = []

    def opener(of_pool: PoolConfig, router: Router) -> Callable[[int], Worker]:
        rank = RANKS[of_pool.role] * MOST_REPLICAS

        def open_next(number: int) -> Worker:
            index = len(steps)
            steps.append(StepLog(of_pool.each.num_pages, {}, None))
            of_router = router.reader_of(number)
            observers = () if observers_of is None else observers_of(index)
            readers = [steps[-1], *observers, *(() if of_router is None else (of_router,))]
            return open_worker(of_pool, index, rank + index, readers)

        return open_next

    startup_ns = round(config.startup_s * 1e9)
    fronts: dict[bool, Front] = {}
    for is_second in (False, True):
        behind = [each.each for each in config.pools if (each.role == "decode") is is_second]
        if behind:
            num_workers = sum(each.replicas for each in behind)
            fronts[is_second] = Front(make_router(structs.replace(behind[0], replicas=num_workers), ()))
    if any(front.router.holds_requests for front in fronts.values()):
        raise SettingError(
            "is not modelled in a fleet yet: no request waits in a router",
            "routing.queue_threshold",
            hint="Leave it out.",
        )
    pools = []
    for each in config.pools:
        front = fronts[each.role == "decode"]
        opened = opener(each, front.router)
        pools.append(Pool(each.name, each.role, each.each.replicas, opened, front, startup_ns=startup_ns))
    arrivals = Arrivals(
        trace,
        source,
        fronts[False].router,
        fronts[False].engines,
        log,
        delay_ns=first.frontend_ns,
        timeout_ns=first.client_timeout_ns,
    )
    driver = FleetDriver(
        arrivals,
        fronts[False],
        fronts.get(True, fronts[False]),
        links_of(config),
        token_bytes=config.token_bytes,
        only_missing=config.transfer == "missing",
        is_mocker=is_mocker,
        scaler=None if config.scaler is None else config.scaler(),
        faults=config.faults,
        on_progress=on_progress,
    )
    driver.run()
    schedulers = [worker.scheduler for worker in driver.workers]
    return FleetReport(
        trace,
        config,
        log,
        steps,
        num_evicted_pages=sum(each.cache.num_evicted for each in schedulers),
        deadlocks=driver.deadlocks,
        num_faults=driver.num_faults,
        num_failed_transfers=driver.num_failed_transfers,
        pools=pools,
    )


def links_of(config: FleetConfig) -> Links:
    """Return the links between the workers, by the configured sharing."""
    latency_ns = round(config.latency_ms * 1e6)
    if config.sharing == "worker" and config.bytes_per_s is not None:
        return SharedByWorkers(config.bytes_per_s, latency_ns)
    return FixedRate(config.bytes_per_s, latency_ns)


def open_worker(pool: PoolConfig, index: int, rank: int, readers: Sequence[EventReader]) -> Worker:
    """Build worker `index` of a fleet. `readers` receive the events of its engine; for `rank` see Worker."""
    config = pool.each
    is_mocker = config.profile == "mocker"
    cost: CostModel = config.cost_model
    if is_mocker and pool.role == "decode":
        cost = DecodeOnly(cost)
    executor = SimExecutor(cost)
    queue = ByReservation() if is_mocker else ByAge()
    engine = build_engine(
        config,
        executor,
        readers=readers,
        num_waiting=MANY_EVENTS,
        policy=queue if pool.role == "decode" else config.admission(),
        make_order=config.eviction,
        prefill=prefill_cost(config),
        audit=config.audit,
        hands_over=True,
    )
    replica = Replica(engine, executor, plans_ahead=config.async_scheduling)
    worker = Worker(index, rank, replica, queue, only_prefills=pool.role == "prefill", leaps=not config.step_by_step)
    if is_mocker:
        worker.handoffs.passes_blocked = False
        worker.handoffs.join_tokens = 0
    return worker

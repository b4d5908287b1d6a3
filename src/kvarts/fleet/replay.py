"""Replay of traffic on a fleet, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import structs

from kvarts.build import build_engine, preparation_of
from kvarts.event_log import EventReader
from kvarts.executor.base import CostModel
from kvarts.executor.simulated import SimExecutor
from kvarts.fleet.config import TOKEN_BYTES, FleetConfig, FleetWorker, PoolConfig, Role
from kvarts.fleet.driver import FleetDriver
from kvarts.fleet.handoff import TIMES
from kvarts.fleet.layer_wise import LayerWise, LayerWiseLinks, SharedLayerWise
from kvarts.fleet.links import FixedRate, Links, PeerLinks, SharedLinks, StoreLinks
from kvarts.fleet.moves import BelowTiers, Incoming, PeersOfWorkers, PeerUse, StoreUse, WorkersStore
from kvarts.fleet.pool import Front, Pool
from kvarts.fleet.report import FleetReport
from kvarts.fleet.worker import ByAge, ByReservation, DecodeOnly, Worker
from kvarts.limits import MOST_REPLICAS
from kvarts.report.requests import RequestLog
from kvarts.report.steps import StepLog
from kvarts.rooms import from_room
from kvarts.sim.arrivals import Arrivals
from kvarts.sim.replay import MANY_EVENTS, Traffic, make_router, prefill_cost, trace_of
from kvarts.sim.replica import Replica
from kvarts.sim.router import Router

__all__ = ["BuiltFleet", "replay_fleet"]

STORE = "store"
"""The name of a store among the tiers of a worker."""
PEERS = "peers"
"""The name of the host memory of other workers among the tiers of a worker."""
RANKS: dict[Role, int] = {"prefill": 0, "mixed": 1, "decode": 2}
"""Which workers come first where something happens at one time."""


def replay_fleet(
    traffic: Traffic,
    config: FleetConfig,
    *,
    on_progress: Callable[[int], object] | None = None,
    observers_of: Callable[[FleetWorker], Sequence[EventReader]] | None = None,
) -> FleetReport:
    """Replay the traffic of one model on the fleet described by `config`, and return the report."""
    trace = trace_of(traffic)
    first = config.first
    source = first.source(trace)
    log = RequestLog(
        largest_hit_counts=first.profile == "mocker",
        tiers=tiers_of(config),
        more=("source", *TIMES, "num_bytes", "num_restarts", "is_local"),
    )
    steps: list[StepLog] = []

    def readers_of(worker: FleetWorker) -> list[EventReader]:
        each = worker.pool.each
        memory = None if each.kv_groups == "off" else each.memory.to_builtins()
        shared = {} if opened.store is None else {STORE: opened.store.size}
        if config.pulls:
            shared[PEERS] = config.num_host_pages
        steps.append(StepLog(each.num_blocks, {**each.tiers, **shared}, memory))
        return [steps[-1], *(() if observers_of is None else observers_of(worker))]

    def arrivals_at(front: Front) -> Arrivals:
        return Arrivals(
            trace,
            source,
            front.router,
            front.engines,
            log,
            delay_ns=first.frontend_ns,
            timeout_ns=first.client_timeout_ns,
            stops=first.stop_tokens,
        )

    opened = BuiltFleet(config)
    driver = opened.open(arrivals_at, readers_of, on_progress=on_progress)
    driver.run()
    schedulers = [worker.scheduler for worker in driver.workers]
    store, store_links = opened.store, opened.store_links
    return FleetReport(
        trace,
        config,
        log,
        steps,
        num_evicted_pages=sum(each.cache.num_evicted for each in schedulers),
        tier_names=tiers_of(config),
        store=None if store is None or store_links is None else store_report(store, store_links, driver.now_ns),
        pulls=None if opened.peers is None else pulls_report(opened.peers),
        transfers=[each.tiers.totals() for each in schedulers if each.tiers is not None],
        evicted_parts=[each.num_evicted_parts() for each in schedulers],
        deadlocks=driver.deadlocks,
        num_faults=driver.num_faults,
        num_failed_transfers=driver.num_failed_transfers,
        pools=opened.pools,
    )


def tiers_of(config: FleetConfig) -> list[str]:
    """Return the names of the tiers below any worker."""
    names = list(dict.fromkeys(name for pool in config.pools for name in pool.each.tiers))
    names += [PEERS] if config.pulls else []
    return names if config.store is None else [*names, STORE]


class BuiltFleet:
    """The workers of a fleet with their routers, and the store that they share, for one run. `open` must follow.

    `num_waiting`: as of an EventLog.
    """

    def __init__(self, config: FleetConfig, *, num_waiting: int = MANY_EVENTS) -> None:
        self._config = config
        self._num_waiting = num_waiting
        self.store, self.store_links = open_store(config)
        self._pool_of: dict[int, int] = {}
        """The place of each worker's pool."""
        link_of = self._pool_of if config.sharing == "pool" else None
        self.layer_wise = None if config.transfer != "layer-wise" else layer_wise_links_of(config, link_of)
        pulling = links_of(config, link_of)
        self.links: Links = pulling if self.layer_wise is None else self.layer_wise
        self.peer_links = PeerLinks(pulling) if config.pulls else None
        self.peers = None if self.peer_links is None else open_peers(config, self.peer_links)
        self.pools: list[Pool] = []
        self._num_workers = 0

    def open(
        self,
        arrivals_at: Callable[[Front], Incoming],
        readers_of: Callable[[FleetWorker], Sequence[EventReader]],
        *,
        on_progress: Callable[[int], object] | None = None,
    ) -> FleetDriver:
        """Build the workers, and return the driver that runs them.

        `arrivals_at` returns the requests that arrive at the first router, `readers_of` the readers of a worker's
        events.
        """
        config, store, store_links = self._config, self.store, self.store_links
        fronts: dict[bool, Front] = {}
        for is_second in (False, True):
            behind = [each.each for each in config.pools if (each.role == "decode") is is_second]
            if behind:
                num_workers = sum(each.replicas for each in behind)
                most_tiers = max(behind, key=lambda each: len(each.tiers))
                of_all = structs.replace(behind[0], replicas=num_workers, offload=most_tiers.offload)
                replicas: list[Replica] = []
                peers_gain = None if self.peers is None else self.peers.gain(prefill_cost(of_all), config.page_size)
                router = make_router(of_all, replicas, tells_pages=of_all.kv_groups == "off", peers=peers_gain)
                fronts[is_second] = Front(router, replicas)
        startup_ns = round(config.startup_s * 1e9)
        for place, each in enumerate(config.pools):
            front = fronts[each.role == "decode"]
            opened = self._opener(each, place, front.router, readers_of)
            self.pools.append(Pool(each.name, each.role, each.each.replicas, opened, front, startup_ns=startup_ns))
        peers, peer_links = self.peers, self.peer_links
        return FleetDriver(
            arrivals_at(fronts[False]),
            fronts[False],
            fronts.get(True, fronts[False]),
            self.links,
            token_bytes=config.token_bytes,
            only_missing=config.transfer == "missing",
            least_remote=config.least_remote,
            hold_ns=round(config.hold_s * 1e9),
            is_mocker=config.first.profile == "mocker",
            tier_names=tiers_of(config),
            store=None if store is None or store_links is None else StoreUse(store, store_links),
            peers=None if peers is None or peer_links is None else PeerUse(peers, peer_links),
            layer_wise=self.layer_wise,
            scaler=None if config.scaler is None else config.scaler(),
            faults=config.faults,
            on_progress=on_progress,
        )

    def _opener(
        self,
        of_pool: PoolConfig,
        place: int,
        router: Router,
        readers_of: Callable[[FleetWorker], Sequence[EventReader]],
    ) -> Callable[[int], Worker]:
        """Return a function that builds the next worker of a pool, given its number behind `router`."""
        rank = RANKS[of_pool.role] * MOST_REPLICAS

        def open_next(number: int) -> Worker:
            index = self._num_workers
            self._num_workers += 1
            self._pool_of[index] = place
            of_router = router.reader_of(number)
            readers = [*readers_of(FleetWorker(index, of_pool)), *(() if of_router is None else (of_router,))]
            return open_worker(
                of_pool, index, rank + index, readers, self.store or self.peers, num_waiting=self._num_waiting
            )

        return open_next


def open_store(config: FleetConfig) -> tuple[WorkersStore | None, StoreLinks | None]:
    """Return the store that the workers share, and their links to it. Raise ConfigError if its room is missing."""
    settings = config.store
    if settings is None:
        return None, None
    links = StoreLinks(*settings.bytes_per_s, round(settings.latency_us * 1e3))
    first, unit_bytes = config.first, config.stored_unit_bytes
    if first.kv_groups == "off":
        make = from_room("offload.shared_store", "SharedStore", field="store")
        return make(config.store_size, unit_bytes, links), links
    make = from_room("offload.shared_parts", "SharedParts", field="store")
    return make(config.store_size, unit_bytes, links, memory=first.memory, page_size=first.page_size), links


def open_peers(config: FleetConfig, links: PeerLinks) -> PeersOfWorkers:
    """Return the host memory from which workers read. Raise ConfigError if its room is missing."""
    assert config.bytes_per_s is not None
    unit_bytes = config.token_bytes * config.page_size
    make = from_room("offload.peers", "PeerMemory", field="transfer.pull")
    if config.first.kv_groups != "off":
        unit_bytes = config.stored_unit_bytes
        make = from_room("offload.peer_parts", "PeerParts", field="transfer.pull")
    opened: PeersOfWorkers = make(unit_bytes, links, latency_ms=config.latency_ms, bytes_per_s=config.bytes_per_s)
    return opened


def pulls_report(memory: PeersOfWorkers) -> dict[str, Any]:
    """Return what workers read from the host memory of others, as a part of the report."""
    unit = memory.unit
    pulled = [
        {"reader": reader, "source": source, unit: num_loaded}
        for reader, loaded_from in sorted(memory.num_loaded().items())
        for source, num_loaded in sorted(loaded_from.items())
    ]
    return {f"num_pulled_{unit}": sum(row[unit] for row in pulled), "pulled": pulled}


def store_report(store: WorkersStore, links: StoreLinks, end_ns: int) -> dict[str, Any]:
    """Return the use of a store, as a part of the report."""
    unit = store.unit
    loaded = [
        {"reader": reader, "writer": writer, unit: num_loaded}
        for reader, loaded_from in sorted(store.num_loaded().items())
        for writer, num_loaded in sorted(loaded_from.items())
    ]
    read_ns, write_ns = links.busy_ns
    num_loaded = sum(row[unit] for row in loaded)
    num_of_others = sum(row[unit] for row in loaded if row["reader"] != row["writer"])
    return {
        unit: store.size,
        f"{unit.removesuffix('s')}_bytes": store.unit_bytes,
        f"num_cached_{unit}": store.num_cached,
        f"num_evicted_{unit}": store.num_evicted,
        "num_parts_without_room" if unit == "blocks" else "num_pages_without_room": store.num_refused,
        f"num_loaded_{unit}": num_loaded,
        "of_others_pct": num_of_others / num_loaded if num_loaded else None,
        "read_busy_pct": read_ns / end_ns if end_ns else None,
        "write_busy_pct": write_ns / end_ns if end_ns else None,
        "loaded": loaded,
    }


def links_of(config: FleetConfig, link_of: Mapping[int, int] | None) -> FixedRate | SharedLinks:
    """Return the links between the workers, by the configured sharing. `link_of`: see SharedLinks."""
    latency_ns = round(config.latency_ms * 1e6)
    if config.sharing != "none" and config.bytes_per_s is not None:
        return SharedLinks(config.bytes_per_s, latency_ns, link_of)
    return FixedRate(config.bytes_per_s, latency_ns)


def layer_wise_links_of(config: FleetConfig, link_of: Mapping[int, int] | None) -> LayerWiseLinks:
    """Return the links between the workers, if each layer is sent once it is computed."""
    assert config.bytes_per_s is not None
    latency_ns = round(config.latency_ms * 1e6)
    if config.sharing == "none":
        return LayerWise(config.bytes_per_s, latency_ns, config.layers)
    return SharedLayerWise(config.bytes_per_s, latency_ns, config.layers, link_of)


def open_worker(
    pool: PoolConfig,
    index: int,
    rank: int,
    readers: Sequence[EventReader],
    shared: BelowTiers | None,
    *,
    num_waiting: int = MANY_EVENTS,
) -> Worker:
    """Build worker `index` of a fleet. `readers` receive the events of its engine; for `rank` see Worker.

    `shared`: memory below its own tiers, shared with others.
    """
    config = pool.each
    is_mocker = config.profile == "mocker"
    cost: CostModel = config.cost_model
    if is_mocker and pool.role == "decode":
        cost = DecodeOnly(cost)
    executor = SimExecutor(cost)
    queue = ByReservation() if is_mocker else ByAge()
    tiers = preparation_of(config.offload)
    if shared is not None:
        token_bytes = TOKEN_BYTES if config.placement is None else config.placement.kv_bytes_per_token
        tiers = shared.below(index, config.offload, token_bytes)
    engine = build_engine(
        config,
        executor,
        memory=None if config.kv_groups == "off" else config.memory,
        readers=readers,
        num_waiting=num_waiting,
        policy=queue if pool.role == "decode" else config.admission(),
        make_order=config.eviction,
        tiers=tiers,
        prefill=prefill_cost(config),
        audit=config.audit,
        hands_over=True,
        plans_ahead=config.async_scheduling and config.profile == "default",
        step_ns=cost.step_ns,
    )
    replica = Replica(engine, executor, plans_ahead=config.async_scheduling)
    worker = Worker(index, rank, replica, queue, only_prefills=pool.role == "prefill", leaps=not config.step_by_step)
    worker.handoffs.has_any_between_steps = pool.role != "mixed"
    if is_mocker:
        worker.handoffs.passes_blocked = False
        worker.handoffs.join_tokens = 0
    return worker

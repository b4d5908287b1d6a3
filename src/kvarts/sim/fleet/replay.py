"""Replay of traffic on a fleet, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import structs

from kvarts.base.errors import InputError
from kvarts.base.limits import MOST_REPLICAS, brief
from kvarts.core.build import Watching
from kvarts.core.event_log import EventReader
from kvarts.core.executor import CostModel
from kvarts.core.tiers.links import FixedRate, Links, PeerLinks, SharedLinks, StoreLinks
from kvarts.core.tiers.peer_parts import PeerParts
from kvarts.core.tiers.peers import PeerMemory
from kvarts.core.tiers.shared_parts import SharedParts
from kvarts.core.tiers.shared_store import SharedStore
from kvarts.proof.audit.opening import audit_of
from kvarts.sim.arrivals import Arrivals
from kvarts.sim.config import ReplayConfig
from kvarts.sim.fleet.config import PEERS, STORE, TOKEN_BYTES, FleetConfig, FleetWorker, ModelPools, PoolConfig, Role
from kvarts.sim.fleet.driver import FleetDriver
from kvarts.sim.fleet.handoff import TIMES
from kvarts.sim.fleet.layer_wise import LayerWise, LayerWiseLinks, SharedLayerWise
from kvarts.sim.fleet.pool import ModelRouters, Pool, RouterPool
from kvarts.sim.fleet.report import FleetOutcome, FleetReport
from kvarts.sim.fleet.transitions import Below, Incoming, PeersOfWorkers, PeerUse, StoreUse, WorkersStore
from kvarts.sim.fleet.worker import ByAge, ByReservation, DecodeOnly, Worker
from kvarts.sim.replay import (
    MANY_EVENTS,
    Traffic,
    build_replica,
    make_router,
    planning_of,
    prefill_cost,
    storage_of,
    tiers_of,
    trace_of,
)
from kvarts.sim.replica import Replica
from kvarts.sim.report.report import EngineTotals
from kvarts.sim.report.requests import RequestLog
from kvarts.sim.report.steps import StepLog
from kvarts.sim.router import Router
from kvarts.sim.traffic.trace import Trace

__all__ = ["BuiltFleet", "replay_fleet"]

RANKS: dict[Role, int] = {"prefill": 0, "mixed": 1, "decode": 2}
"""Which workers come first where something happens at one time."""


def replay_fleet(
    traffic: Traffic,
    config: FleetConfig,
    *,
    on_progress: Callable[[int], object] | None = None,
    observers_of: Callable[[FleetWorker], Sequence[EventReader]] | None = None,
) -> FleetReport:
    """Replay traffic on the fleet described by `config`, and return the report.

    If workers have several models and requests name theirs, each model has routers of its own. Raise InputError for a
    request that names none of these models.
    """
    trace = trace_of(traffic)
    first = config.first
    models = models_asked_for(trace, config)
    source = first.source(trace)
    log = RequestLog(
        largest_hit_counts=first.profile == "mocker",
        tiers=config.tier_names,
        more=("source", *TIMES, "num_bytes", "num_restarts", "is_local", *(["model"] if models else [])),
    )
    steps: list[StepLog] = []

    def readers_of(worker: FleetWorker) -> list[EventReader]:
        each = worker.pool.each
        memory = None if each.kv_groups == "off" else each.memory.to_builtins()
        shared = opened.shared_by(worker.pool)
        steps.append(StepLog(each.num_blocks, {**each.tiers, **shared}, memory))
        return [steps[-1], *(() if observers_of is None else observers_of(worker))]

    def arrivals_at(router_pool: RouterPool) -> Arrivals:
        return Arrivals(
            trace,
            source,
            router_pool.router,
            router_pool.engines,
            log,
            config=first,
        )

    opened = BuiltFleet(config, by_model=bool(models))
    driver = opened.open(arrivals_at, readers_of, on_progress=on_progress)
    driver.run()
    outcome = FleetOutcome(
        models,
        stores=opened.stores_report(driver.now_ns),
        pulls=[pulls_report(memory) for memory in opened.peers],
        deadlocks=driver.deadlocks,
        num_faults=driver.num_faults,
        num_failed_transfers=driver.num_failed_transfers,
        pools=opened.pools,
    )
    return FleetReport(trace, config, log, steps, [EngineTotals.of(each.scheduler) for each in driver.workers], outcome)


def models_asked_for(trace: Trace, config: FleetConfig) -> list[str]:
    """Return the models that requests are sent to by their names; empty if all requests go to any worker.

    Raise InputError for a request that names none of these models.
    """
    names = [of_model.model or "" for of_model in config.of_models]
    if len(names) == 1 or not (trace.names_models or config.asks_for_models):
        return []
    for request in trace.requests or ():
        if request.model not in names:
            what = "names no model" if request.model is None else f"asks for {brief(request.model)}"
            raise InputError(
                f"row {request.row + 1} {what}, and the pools have {' and '.join(filter(None, names))}",
                path=trace.name,
                field="model",
                hint="A pool may have another served_model_name.",
            )
    return names


class BuiltFleet:
    """The workers of a fleet with their routers, and the store that they share, for one run. `open` must follow.

    `by_model`: the workers of each model have routers, a store, and peers to read from that are not those of others.
    `num_waiting`: as of an EventLog.
    """

    def __init__(self, config: FleetConfig, *, by_model: bool = False, num_waiting: int = MANY_EVENTS) -> None:
        self._config = config
        self._num_waiting = num_waiting
        self._behind = config.behind_routers(by_model=by_model)
        settings = config.store
        self.store_links = None
        if settings is not None:
            rate, read_rate, write_rate = settings.bytes_per_s
            self.store_links = StoreLinks(rate, read_rate, settings.latency_ns, write_rate)
        self.stores = (
            [] if self.store_links is None else [open_store(config, each, self.store_links) for each in self._behind]
        )
        self._pool_of: dict[int, int] = {}
        """The place of each worker's pool."""
        link_of = self._pool_of if config.sharing == "pool" else None
        self.layer_wise = None if config.transfer != "layer-wise" else layer_wise_links_of(config, link_of)
        pulling = links_of(config, link_of)
        self.links: Links = pulling if self.layer_wise is None else self.layer_wise
        self.peer_links = PeerLinks(pulling) if config.pulls else None
        self.peers = (
            [] if self.peer_links is None else [open_peers(config, each, self.peer_links) for each in self._behind]
        )
        self.pools: list[Pool] = []
        self._num_workers = 0

    def open(
        self,
        arrivals_at: Callable[[RouterPool], Incoming],
        readers_of: Callable[[FleetWorker], Sequence[EventReader]],
        *,
        on_progress: Callable[[int], object] | None = None,
    ) -> FleetDriver:
        """Build the workers, and return the driver that runs them.

        `arrivals_at` returns the requests that arrive at the first router, `readers_of` the readers of a worker's
        events.
        """
        config, store_links, peer_links = self._config, self.store_links, self.peer_links
        router_pools: dict[tuple[int, bool], RouterPool] = {}
        for place, of_model in enumerate(self._behind):
            for is_second in (False, True):
                pools = [each.each for each in of_model.pools if (each.role == "decode") is is_second]
                if pools:
                    router_pools[place, is_second] = self._router_pool(pools, place)
        startup_ns = round(config.startup_s * 1e9)
        for number, each in enumerate(config.pools):
            place = self._place_of(each)
            router_pool = router_pools[place, each.role == "decode"]
            below = self.stores[place].below if self.stores else self.peers[place].below if self.peers else None
            opened = self._opener(each, number, router_pool.router, readers_of, below)
            model = self._behind[place].model
            self.pools.append(
                Pool(each.name, each.role, each.each.replicas, opened, router_pool, model=model, startup_ns=startup_ns)
            )
        of_models = []
        for place, of_model in enumerate(self._behind):
            behind = router_pools[place, False]
            token_bytes = config.token_bytes_of(of_model)
            of_models.append(ModelRouters(of_model.model, behind, router_pools.get((place, True), behind), token_bytes))
        return FleetDriver(
            arrivals_at(of_models[0].first),
            of_models,
            self.links,
            config,
            store=None if store_links is None else StoreUse(self.stores, store_links),
            peers=None if peer_links is None else PeerUse(self.peers, peer_links),
            layer_wise=self.layer_wise,
            names_no_models=len(self._behind) < len(config.of_models),
            on_progress=on_progress,
        )

    def _router_pool(self, pools: Sequence[ReplayConfig], place: int) -> RouterPool:
        """Return a router in front of `pools` without workers yet; `place`: that of their model."""
        num_workers = sum(each.replicas for each in pools)
        of_all = structs.replace(pools[0], replicas=num_workers)
        by_tiers = sorted(pools, key=lambda each: len(each.tiers), reverse=True)
        tiers = {name: is_files for each in by_tiers for name, is_files in tiers_of(each).items()}
        replicas: list[Replica] = []
        peers_gain = None
        if self.peers:
            peers_gain = self.peers[place].gain(prefill_cost(of_all), of_all.page_size, next(iter(tiers)))
        router = make_router(of_all, replicas, peers=peers_gain, tiers=tiers)
        return RouterPool(router, replicas)

    def _place_of(self, pool: PoolConfig) -> int:
        return next(
            place for place, of_model in enumerate(self._behind) if pool.name in [each.name for each in of_model.pools]
        )

    def shared_by(self, pool: PoolConfig) -> dict[str, int]:
        """Return the sizes of the memory that workers of `pool` share with others, by the names of these tiers."""
        place = self._place_of(pool)
        shared = {STORE: self.stores[place].size} if self.stores else {}
        return {**shared, PEERS: self._behind[place].num_host_pages} if self.peers else shared

    def stores_report(self, end_ns: int) -> list[dict[str, Any]]:
        """Return the use of the stores, as a part of the report."""
        links = self.store_links
        return [] if links is None else [store_report(store, links, end_ns) for store in self.stores]

    def _opener(
        self,
        of_pool: PoolConfig,
        place: int,
        router: Router,
        readers_of: Callable[[FleetWorker], Sequence[EventReader]],
        below: Below | None,
    ) -> Callable[[int], Worker]:
        """Return a function that builds the next worker of a pool, given its number behind `router`.

        `below`: prepares its tiers, if it shares memory with others.
        """
        rank = RANKS[of_pool.role] * MOST_REPLICAS

        def open_next(number: int) -> Worker:
            index = self._num_workers
            self._num_workers += 1
            self._pool_of[index] = place
            of_router = router.reader_of(number)
            readers = [*readers_of(FleetWorker(index, of_pool)), *(() if of_router is None else (of_router,))]
            return open_worker(of_pool, index, rank + index, readers, below, num_waiting=self._num_waiting)

        return open_next


def open_store(config: FleetConfig, of_model: ModelPools, links: StoreLinks) -> WorkersStore:
    """Return the store that the workers of a model share."""
    assert config.store is not None
    first, size, unit_bytes = of_model.first, of_model.store_size(config.store), of_model.stored_unit_bytes
    opened: WorkersStore
    if first.kv_groups == "off":
        opened = SharedStore(size, unit_bytes, links)
    else:
        most = max(len(pool.each.tiers) for pool in of_model.pools)
        opened = SharedParts(size, unit_bytes, links, memory=first.memory, page_size=first.page_size, most_above=most)
    return opened


def open_peers(config: FleetConfig, of_model: ModelPools, links: PeerLinks) -> PeersOfWorkers:
    """Return the host memory from which the workers of a model read."""
    assert config.bytes_per_s is not None
    unit_bytes = config.token_bytes_of(of_model) * config.page_size
    make: type[PeerMemory | PeerParts] = PeerMemory
    if of_model.first.kv_groups != "off":
        unit_bytes, make = of_model.stored_unit_bytes, PeerParts
    return make(unit_bytes, links, latency_ms=config.latency_ms, bytes_per_s=config.bytes_per_s)


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
    below: Below | None,
    *,
    num_waiting: int = MANY_EVENTS,
) -> Worker:
    """Build worker `index` of a fleet. `readers` receive the events of its engine; for `rank` see Worker.

    `below`: prepares its tiers, if it shares memory with others.
    """
    config = pool.each
    is_mocker = config.profile == "mocker"
    cost: CostModel = config.cost_model
    if is_mocker and pool.role == "decode":
        cost = DecodeOnly(cost)
    queue = ByReservation() if is_mocker else ByAge()
    storage = storage_of(config)
    if below is not None:
        token_bytes = TOKEN_BYTES if config.placement is None else config.placement.kv_bytes_per_token
        storage = storage._replace(tiers=below(index, config.offload, token_bytes))
    planning = planning_of(config)._replace(hands_over=True, step_ns=cost.step_ns)
    if pool.role == "decode":
        planning = planning._replace(policy=queue)
    audit = audit_of("laws" if pool.left_out_by_audit(shares_memory=below is not None) else config.audit)
    watching = Watching(readers, num_waiting=num_waiting, audit=audit)
    replica = build_replica(config, cost, storage, planning, watching)
    worker = Worker(index, rank, replica, queue, only_prefills=pool.role == "prefill", leaps=not config.step_by_step)
    worker.handoffs.has_any_between_steps = pool.role != "mixed"
    if is_mocker:
        worker.handoffs.passes_blocked = False
        worker.handoffs.join_tokens = 0
    return worker

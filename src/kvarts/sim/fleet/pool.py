"""Pools of identical workers, and the routers in front of them."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from kvarts.core.request import Request
from kvarts.sim.fleet.handoff import Handoff
from kvarts.sim.fleet.scaling import PoolState
from kvarts.sim.fleet.worker import Worker
from kvarts.sim.replica import Replica
from kvarts.sim.router import Informed, Router

__all__ = ["ModelRouters", "Pool", "RouterPool"]


class RouterPool(Informed):
    """A router and the workers behind it, which are those of one pool or of several.

    The router knows workers by their places in `workers`, which are all that there ever were. `replicas`: their
    engines, empty before workers are added.
    """

    def __init__(self, router: Router, replicas: list[Replica]) -> None:
        self._replicas = replicas
        super().__init__(router, replicas)
        self.pools: list[Pool] = []
        self.workers: list[Worker] = []
        self._places: dict[int, int] = {}
        self.stranded: list[Handoff] = []
        """Requests that arrived while no worker was active."""
        self.held: dict[Request, Handoff] = {}
        """Requests that wait in the router, in no order."""

    def add(self, worker: Worker) -> None:
        """Add a new worker, which the router has a place for."""
        place = len(self.workers)
        self.workers.append(worker)
        self._replicas.append(worker.replica)
        self._places[worker.index] = place
        self.record(worker.replica)
        self.router.follow(place, worker.engine.log)

    def replace(self, worker: Worker, by: Worker) -> None:
        """Let `by` stand for `worker`; both were removed."""
        self.forget(worker)
        place = self._places[worker.index]
        self.workers[place] = by
        self._replicas[place] = by.replica

    def forget(self, worker: Worker) -> None:
        """Have the router forget the pages of `worker`, which was removed."""
        self.router.forget(self._places[worker.index])

    def enter(self, worker: Worker) -> None:
        """Send requests to `worker` again."""
        self.router.enter(self._places[worker.index])

    def leave(self, worker: Worker) -> None:
        """Send nothing to `worker` any more."""
        self.router.leave(self._places[worker.index])

    @property
    def is_open(self) -> bool:
        """Whether any worker takes requests."""
        return any(pool.active for pool in self.pools)

    def has(self, worker: Worker) -> bool:
        """Return whether `worker` is, or was, one of its workers."""
        return worker.index in self._places

    def sends_to(self, worker: Worker) -> bool:
        """Return whether requests are sent to `worker`."""
        return any(worker in pool.active for pool in self.pools)

    @property
    def waiting(self) -> list[Handoff]:
        """Requests that no worker has, because none was active or because they wait in the router."""
        in_router = self.held.values()
        return [*self.stranded, *sorted(in_router, key=lambda handoff: handoff.decode.index)]

    @property
    def roles(self) -> str:
        """The roles of its workers, in words."""
        return " or ".join(dict.fromkeys(pool.role for pool in self.pools))

    def choose(self, request: Request, handoff: Handoff, now_ns: int) -> Worker | None:
        """Return the worker for `request`, which is of `handoff`, at `now_ns`; None if it waits in the router."""
        session = handoff.row.session_id
        place = self.router.place(request, session, now_ns)
        if place is None:
            self.held[request] = handoff
            return None
        return self._one_that_fits(request, session, place, now_ns)

    def take_placed(self, now_ns: int) -> list[Handoff]:
        """Return the requests that waited in the router and are placed now, in order; `routed` is their worker."""
        placed = []
        for request, place in self.router.take_placed(now_ns):
            handoff = self.held.pop(request)
            handoff.routed = self._one_that_fits(request, handoff.row.session_id, place, now_ns).index
            placed.append(handoff)
        return placed

    def withdraw(self, handoff: Handoff) -> bool:
        """Remove a request if it waits in the router; return whether it did."""
        for request in (handoff.decode, handoff.prefill):
            if request is not None and self.held.pop(request, None) is not None:
                self.router.withdraw(request)
                return True
        return False

    def _one_that_fits(self, request: Request, session: str | None, place: int, now_ns: int) -> Worker:
        """Return the worker that the router chose, or if `request` could never run there, the least busy that can."""
        worker = self.workers[place]
        if len(self.pools) > 1 and worker.scheduler.never_fits(request) is not None:
            active = [each for pool in self.pools for each in pool.active]
            others = [each for each in active if each.scheduler.never_fits(request) is None]
            if others:
                worker = min(others, key=lambda each: (each.num_owned, each.index))
                self.ended(request)
                if self.router.is_told:
                    self.router.placed(request, session, self._places[worker.index], now_ns)
        return worker

    def ended(self, request: Request) -> None:
        """Notify the router that a worker has no pages of `request` any more."""
        if self.router.is_told:
            self.router.ended(request.index)

    def never_fits(self, request: Request) -> str | None:
        """Return the reason why no worker could ever have the pages of `request`; None if any could."""
        if len(self.pools) == 1:
            return self.pools[0].workers[0].scheduler.never_fits(request)
        reasons = [pool.workers[0].scheduler.never_fits(request) for pool in self.pools]
        return None if None in reasons else reasons[0]


class ModelRouters:
    """The routers that requests for `model` pass; with None, requests for any model.

    `first`: in front of the workers that they arrive at; `second`: of those that only generate, or `first` again if
    there are none. `token_bytes`: bytes of the KV of a token on a link.
    """

    def __init__(self, model: str | None, first: RouterPool, second: RouterPool, token_bytes: int) -> None:
        self.model = model
        self.first = first
        self.second = second
        self.token_bytes = token_bytes
        self.splits = first is not second
        self.router_pools = [first, second] if self.splits else [first]
        self.only_prefills = self.splits and all(pool.role == "prefill" for pool in first.pools)
        """Whether every worker that requests arrive at only computes prompts."""


class Pool:
    """Workers of one configuration, behind `router_pool`. Owner of their lives; `open_worker` makes a new one.

    `active`: those that requests are sent to, by their numbers. `model`: the name by which requests ask for it, if they
    ask for any. A worker that is added starts for `startup_ns`; one that is taken away drains: it ends its requests.
    """

    def __init__(
        self,
        name: str,
        role: str,
        num_workers: int,
        open_worker: Callable[[int], Worker],
        router_pool: RouterPool,
        *,
        model: str | None = None,
        startup_ns: int = 0,
    ) -> None:
        self.name = name
        self.role = role
        self.model = model
        self.router_pool = router_pool
        router_pool.pools.append(self)
        self._open_worker = open_worker
        self._startup_ns = startup_ns
        self.workers: list[Worker] = []
        """All that there ever were."""
        for _ in range(num_workers):
            self._add()
        self.active = list(self.workers)
        self.starting: list[tuple[int, Worker]] = []
        """Workers that are not ready yet, with the time at which each will be."""
        self.draining: list[Worker] = []
        self.down: list[Worker] = []
        """Workers that are to come up again, or not."""
        self.born_ns: dict[int, int] = {worker.index: 0 for worker in self.workers}
        self.gone_ns: dict[int, int] = {}
        self.gone: list[Worker] = []
        """Removed workers that still have memory."""
        self._first_gone: Worker | None = None
        """The first released worker, which stands for all later ones."""

    def _add(self) -> Worker:
        worker = self._open_worker(len(self.router_pool.workers))
        self.workers.append(worker)
        self.router_pool.add(worker)
        return worker

    # Faults -----------------------------------------------------------------------------------------------

    def go_down(self, worker: Worker) -> None:
        """Send no requests to `worker` while it is down."""
        starting = [each for each in self.starting if each[1] is worker]
        if worker in self.active:
            self.active.remove(worker)
            self.router_pool.leave(worker)
        elif starting:
            self.starting.remove(starting[0])
        else:
            return  # it drains
        self.down.append(worker)

    def come_up(self, worker: Worker) -> None:
        """Resume sending requests to `worker`."""
        if worker in self.down:
            self.down.remove(worker)
            self._activate(worker)

    def _activate(self, worker: Worker) -> None:
        insort(self.active, worker, key=lambda worker: worker.index)
        self.router_pool.enter(worker)

    # Scaling ----------------------------------------------------------------------------------------------

    def next_ready_ns(self) -> int | None:
        """Return when the next worker is ready; None if none is starting."""
        return self.starting[0][0] if self.starting else None

    def make_ready(self, now_ns: int) -> None:
        """Activate workers whose startup has ended."""
        while self.starting and self.starting[0][0] <= now_ns:
            self._activate(self.starting.pop(0)[1])

    def remove_drained(self, now_ns: int) -> None:
        """Remove draining workers that have finished all their requests."""
        for worker in [each for each in self.draining if not each.num_owned]:
            self.draining.remove(worker)
            self._go(worker, now_ns)

    def _go(self, worker: Worker, now_ns: int) -> None:
        self.gone_ns[worker.index] = now_ns
        self.gone.append(worker)

    def release(self, worker: Worker) -> Worker:
        """Release the memory of a removed worker at rest; return the worker that stands for it from now on."""
        worker.engine.log.flush()
        self.gone.remove(worker)
        if self._first_gone is None:
            self._first_gone = worker
        self.workers[self.workers.index(worker)] = self._first_gone
        self.router_pool.replace(worker, self._first_gone)
        return self._first_gone

    def scale(self, target: int, now_ns: int) -> list[Worker]:
        """Add or remove workers until there are `target`, including those that start; return the new ones.

        If there are too many, the newest starting workers are removed first, then the active ones with the largest
        indices.
        """
        target = max(1, target)
        while len(self.active) + len(self.starting) > target and self.starting:
            self._go(self.starting.pop()[1], now_ns)
        while len(self.active) > target:
            worker = self.active.pop()
            self.draining.append(worker)
            self.router_pool.leave(worker)
        added = []
        while len(self.active) + len(self.starting) < target:
            self.router_pool.router.join()
            worker = self._add()
            self.born_ns[worker.index] = now_ns
            added.append(worker)
            if self._startup_ns:
                self.starting.append((now_ns + self._startup_ns, worker))
                self.router_pool.leave(worker)
            else:
                self.active.append(worker)
        return added

    def worker_ns(self, end_ns: int) -> int:
        """Return the summed lifetimes of all workers until `end_ns`."""
        return sum(
            min(self.gone_ns.get(index, end_ns), end_ns) - min(born_ns, end_ns)
            for index, born_ns in self.born_ns.items()
        )

    def state(self) -> PoolState:
        """Return the state that a scaler receives. Leaps of its workers must be cut."""
        workers = tuple(worker.state() for worker in self.active)
        return PoolState(self.name, self.role, workers, len(self.starting), len(self.draining), self.model)

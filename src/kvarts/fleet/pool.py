"""A pool of identical workers behind one router."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from kvarts.fleet.handoff import Handoff
from kvarts.fleet.scaling import PoolState, WorkerState
from kvarts.fleet.worker import Worker
from kvarts.request import Request
from kvarts.sim.replica import Replica
from kvarts.sim.router import Informed, Router

__all__ = ["Pool"]


class Pool(Informed):
    """Workers of one configuration. Owner of their life cycle; `open_worker` makes a new one.

    `active`: the workers that receive requests, ordered by index. An added worker starts for `startup_ns`; a removed
    one drains: it finishes the requests it has. The router identifies workers by their positions in `workers`.
    """

    def __init__(
        self, role: str, num_workers: int, open_worker: Callable[[int], Worker], router: Router, *, startup_ns: int = 0
    ) -> None:
        self._replicas: list[Replica] = []
        super().__init__(router, self._replicas)
        self.role = role
        self._open_worker = open_worker
        self._startup_ns = startup_ns
        self.workers: list[Worker] = []
        """All workers, including those that are gone."""
        self._places: dict[int, int] = {}
        for _ in range(num_workers):
            self._add()
        self.active = list(self.workers)
        self.starting: list[tuple[int, Worker]] = []
        """Workers that are not ready yet, with the time at which each will be."""
        self.draining: list[Worker] = []
        self.down: list[Worker] = []
        """Workers that are down; some may never come up again."""
        self.stranded: list[Handoff] = []
        """Requests that arrived while no worker was active."""
        self.born_ns: dict[int, int] = {worker.index: 0 for worker in self.workers}
        self.gone_ns: dict[int, int] = {}

    def _add(self) -> Worker:
        place = len(self.workers)
        worker = self._open_worker(place)
        self.workers.append(worker)
        self._replicas.append(worker.replica)
        self._places[worker.index] = place
        self.router.follow(place, worker.engine.log)
        return worker

    def choose(self, request: Request, session: str | None, now_ns: int) -> Worker:
        """Return the worker for `request` at `now_ns`."""
        place = self.router.place(request, session, now_ns)
        assert place is not None, "no request waits in the router of a fleet"
        return self.workers[place]

    def ended(self, request: Request) -> None:
        """Notify the router that no worker of this pool has `request` any more."""
        if self.router.is_told:
            self.router.ended(request.index)

    def never_fits(self, request: Request) -> str | None:
        """Return the reason why no worker could ever hold the pages of `request`; None if one could."""
        return self.workers[0].scheduler.never_fits(request)

    # Faults -----------------------------------------------------------------------------------------------

    def go_down(self, worker: Worker) -> None:
        """Send no requests to `worker` while it is down."""
        starting = [each for each in self.starting if each[1] is worker]
        if worker in self.active:
            self.active.remove(worker)
            self.router.leave(self._places[worker.index])
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
        self.router.enter(self._places[worker.index])

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
            self.gone_ns[worker.index] = now_ns

    def scale(self, target: int, now_ns: int) -> list[Worker]:
        """Add or remove workers until there are `target`, including those that start; return the new ones.

        If there are too many, the newest starting workers are removed first, then the active ones with the largest
        indices.
        """
        target = max(1, target)
        while len(self.active) + len(self.starting) > target and self.starting:
            self.gone_ns[self.starting.pop()[1].index] = now_ns
        while len(self.active) > target:
            worker = self.active.pop()
            self.draining.append(worker)
            self.router.leave(self._places[worker.index])
        added = []
        while len(self.active) + len(self.starting) < target:
            self.router.join()
            worker = self._add()
            self.born_ns[worker.index] = now_ns
            added.append(worker)
            if self._startup_ns:
                self.starting.append((now_ns + self._startup_ns, worker))
                self.router.leave(self._places[worker.index])
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
        """Return the state that a scaler receives."""
        workers = tuple(
            WorkerState(
                worker.index,
                worker.scheduler.running.num_running,
                worker.scheduler.num_waiting + len(worker.pending),
                worker.scheduler.waiting.num_waiting_tokens
                + sum(handoff.decode.num_prompt_tokens for handoff in worker.pending),
                worker.scheduler.cache.num_used / worker.scheduler.cache.pool.total,
            )
            for worker in self.active
        )
        return PoolState(self.role, workers, len(self.starting), len(self.draining))

"""A pool of workers that are alike, behind one router."""

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
    """Workers of one configuration. Owner of their lives; `open_worker` makes a new one.

    `active`: those that requests are sent to, by their numbers. A worker that is added starts for `startup_ns`; one
    that is taken away drains: it ends what it has. The router knows workers by their places in `workers`.
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
        """All that there ever were."""
        self._places: dict[int, int] = {}
        for _ in range(num_workers):
            self._add()
        self.active = list(self.workers)
        self.starting: list[tuple[int, Worker]] = []
        """Workers that are not ready yet, and when they are."""
        self.draining: list[Worker] = []
        self.down: list[Worker] = []
        """Workers that are to come up again, or not."""
        self.stranded: list[Handoff] = []
        """Requests that came while no worker was active."""
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
        """Return the worker that `request` goes to, at `now_ns`."""
        place = self.router.place(request, session, now_ns)
        assert place is not None, "no request waits in the router of a fleet"
        return self.workers[place]

    def ended(self, request: Request) -> None:
        """Tell the router that a worker has nothing of `request` any more."""
        if self.router.is_told:
            self.router.ended(request.index)

    def never_fits(self, request: Request) -> str | None:
        """Return the reason why no worker could ever have the pages of `request`; None if they could."""
        return self.workers[0].scheduler.never_fits(request)

    # Faults -----------------------------------------------------------------------------------------------

    def go_down(self, worker: Worker) -> None:
        """Send nothing to `worker` any more until it comes up."""
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
        """Send requests to `worker` again."""
        if worker in self.down:
            self.down.remove(worker)
            self._activate(worker)

    def _activate(self, worker: Worker) -> None:
        insort(self.active, worker, key=lambda worker: worker.index)
        self.router.enter(self._places[worker.index])

    # Scaling ----------------------------------------------------------------------------------------------

    def next_ready_ns(self) -> int | None:
        """Return when the next worker is ready; None if none starts."""
        return self.starting[0][0] if self.starting else None

    def make_ready(self, now_ns: int) -> None:
        """Let workers that are ready now have requests."""
        while self.starting and self.starting[0][0] <= now_ns:
            self._activate(self.starting.pop(0)[1])

    def remove_drained(self, now_ns: int) -> None:
        """Let workers that drain and have nothing left go."""
        for worker in [each for each in self.draining if not each.num_owned]:
            self.draining.remove(worker)
            self.gone_ns[worker.index] = now_ns

    def scale(self, target: int, now_ns: int) -> list[Worker]:
        """Let there be `target` workers, those that start included; return the new ones.

        Of too many, the newest that start go first, then the active ones with the largest numbers.
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
        """Return for how long workers were there, together, until `end_ns`."""
        return sum(
            min(self.gone_ns.get(index, end_ns), end_ns) - min(born_ns, end_ns)
            for index, born_ns in self.born_ns.items()
        )

    def state(self) -> PoolState:
        """Return what a scaler sees."""
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

"""Engines in lock step: the data-parallel ranks of a model with experts.

Experts are divided over the ranks, so every layer waits for the tokens of all ranks. Steps of the ranks start together,
and their duration follows from all batches together; a rank with nothing to compute waits for the others. Steps that
are identical on every rank are done at once, with the same result as one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from kvarts.core.request import Request
from kvarts.core.sched.rank_loads import RANKS_STALENESS_NS, RankLoads
from kvarts.cost.simulated import LeapTimes
from kvarts.sim.replica import MOST_STEPS, NEVER_NS, Replica
from kvarts.sim.router import RoundRobin, Routed

if TYPE_CHECKING:
    from kvarts.cost.polynomial import ScaledCost
    from kvarts.cost.roofline import RooflineCost

__all__ = ["LockstepCost", "Ranks", "WithinGroups"]


LockstepCost: TypeAlias = "RooflineCost | ScaledCost"
"""Costs of common steps of several engines. The order of ranks does not matter."""


class Ranks:
    """A Runner of replicas in lock step. Owner of their common step.

    Each rank has tiers of its own below its device. A common step lasts as long as that of the rank whose loads arrive
    last.
    """

    def __init__(self, replicas: Sequence[Replica], cost: LockstepCost, *, step_by_step: bool = False) -> None:
        self._ranks = list(replicas)
        self._cost = cost
        self._leaps = not step_by_step
        self._under_way: list[Replica] = []
        """The replicas with a step, or with identical steps, under way."""
        self._idle: list[Replica] = []
        """Replicas that had nothing to compute in the current step."""
        self._dropping: list[tuple[Request, Routed]] = []
        """Requests that were given up since the current step started."""
        self._is_under_way = False
        self._last_decode_ns = 10_000_000
        self.is_pausing = False
        self.now_ns = 0

    @property
    def has_work(self) -> bool:
        """Whether there is something to do or to wait for."""
        return any(replica.has_work for replica in self._ranks)

    def wake(self, now_ns: int) -> None:
        """End a pause at `now_ns`, because a request arrives."""
        if self.is_pausing:
            self.is_pausing = self._is_under_way = False
            self._emit_idle()
            self.now_ns = now_ns
        elif not self._is_under_way and now_ns > self.now_ns:
            self.now_ns = now_ns

    def flush(self) -> None:
        """Hand all waiting events to their readers."""
        for replica in self._ranks:
            replica.flush()

    def start(self, now_ns: int, until_ns: int = NEVER_NS) -> int:
        """Start a step of every rank at `now_ns`, and all identical ones that start before `until_ns`.

        Return when the last one ends. `finish` must be called for that time before anything else is done.
        """
        assert not self._is_under_way
        self._is_under_way = True
        busy = [replica for replica in self._ranks if replica.has_work]
        others_join = [replica for replica in busy if replica.join(now_ns)]
        must_plan = [replica for replica in busy if replica.end_transfers(now_ns)]
        num_steps = 0 if must_plan else self._num_alike(busy, now_ns)
        if others_join:
            num_steps = min(num_steps, 1)
        if num_steps > 0:
            self.now_ns = self._leap(busy, now_ns, min(until_ns, _next_ns(busy, now_ns)), num_steps)
            return self.now_ns
        computing = []
        for replica in busy:
            # Transfers that ended may have been all that was left: nothing is stored for its own sake.
            if replica.has_work and replica.prepare(now_ns):
                computing.append(replica)
            else:
                replica.engine.now_ns = now_ns
                self._idle.append(replica)
        if not computing:
            waits = self.has_work and not others_join and not any(each.scheduler.has_released for each in busy)
            self.now_ns = _next_ns(busy, now_ns) if waits else now_ns
            assert self.now_ns < NEVER_NS, "L8: there is work, and nothing can be computed"
            self.is_pausing = True
            return self.now_ns
        duration_ns = self._cost.together_ns([replica.engine.batch for replica in computing])
        duration_ns = max(replica.with_loads_ns(now_ns, duration_ns) for replica in computing)
        for replica in computing:
            replica.engine.carry_out(now_ns, duration_ns)
            self._under_way.append(replica)
        self.now_ns = now_ns + duration_ns
        return self.now_ns

    def finish(self) -> list[Request]:
        """End the started steps; return the requests that finished, rank by rank in admission order."""
        self._is_under_way = self.is_pausing = False
        finished = [request for replica in self._under_way for request in replica.finish()]
        self._under_way.clear()
        self._emit_idle()
        if self._dropping:
            dropping, self._dropping = self._dropping, []
            for request, routed in dropping:
                if request not in finished:
                    routed.cancel(request, self.now_ns)
                    finished.append(request)
        return finished

    def drop(self, request: Request, routed: Routed, now_ns: int) -> bool:
        """Drop `request` of the rank `routed`; return False if `finish` will do that."""
        if self._is_under_way:
            self._dropping.append((request, routed))
            return False
        routed.cancel(request, now_ns)
        return True

    def run_until(self, until_ns: int, finished: list[Request]) -> int:
        """Do steps as long as there is work and the next one starts before `until_ns`.

        Add the requests that finished to `finished`. Return a time before which another call would do nothing, unless
        a request arrives or is dropped.
        """
        while True:
            if self._is_under_way:
                if self.now_ns > until_ns:
                    return self.now_ns
                finished += self.finish()
            if self.now_ns >= until_ns or not self.has_work:
                return until_ns
            self.start(self.now_ns, until_ns)

    def run_towards(self, until_ns: int, finished: list[Request], is_watched: bool) -> int:
        """Do steps as `run_until` does; return `until_ns`, from which time something may end."""
        self.run_until(until_ns, finished)
        return until_ns

    def quiet_until(self, now_ns: int) -> int | None:
        """Return the end of the identical steps that could start now: no request ends before. None if they cannot."""
        busy = [replica for replica in self._ranks if replica.has_work]
        num_steps = 0 if any(replica.num_joining for replica in busy) else self._num_alike(busy, now_ns)
        next_ns = _next_ns(busy, now_ns)
        if not num_steps or next_ns <= now_ns:
            return None
        return min(now_ns + sum(self._durations_ns(busy, min(num_steps, MOST_STEPS))), next_ns)

    def _emit_idle(self) -> None:
        for replica in self._idle:
            replica.engine.emit()
        self._idle.clear()

    def _num_alike(self, busy: Sequence[Replica], now_ns: int) -> int:
        if not self._leaps or not busy:
            return 0
        return min(
            min(replica.scheduler.horizon(now_ns), replica.scheduler.cache.most_certain_steps) for replica in busy
        )

    def _durations_ns(self, busy: Sequence[Replica], num_steps: int) -> list[int]:
        """Return the durations of the next `num_steps` common steps, if they are identical."""
        wheels = [replica.scheduler.wheel for replica in busy]
        decodes = [(wheel.num_decoding, wheel.known_tokens) for wheel in wheels]
        return self._cost.decodes_together_ns(decodes, num_steps)

    def _leap(self, busy: Sequence[Replica], now_ns: int, until_ns: int, num_steps: int) -> int:
        num_steps = min(num_steps, (until_ns - now_ns) // self._last_decode_ns + 2, MOST_STEPS)
        durations_ns = self._durations_ns(busy, num_steps)
        end_ns = now_ns + sum(durations_ns)
        while len(durations_ns) > 1 and end_ns - durations_ns[-1] >= until_ns:
            end_ns -= durations_ns.pop()
        self._last_decode_ns = durations_ns[-1] or 1
        for replica in busy:
            replica.leap(now_ns, LeapTimes(list(durations_ns)))
            self._under_way.append(replica)
        return end_ns


def _next_ns(busy: Sequence[Replica], now_ns: int) -> int:
    """Return when the next transfer of a rank ends, or another request may become the head of its waiting queue."""
    return min((replica.next_ns(now_ns) for replica in busy), default=NEVER_NS)


class WithinGroups(RoundRobin):
    """Sends requests to groups of `ranks` engines in turn, and within a group as vLLM's front end does: RankLoads."""

    is_told = True
    reads_metrics = True
    staleness_ns = RANKS_STALENESS_NS

    def __init__(self, num_workers: int, ranks: int) -> None:
        super().__init__(num_workers)
        self._num_ranks = ranks
        self._groups = [RankLoads() for _ in range(num_workers // ranks)]
        self._worker_of: dict[int, int] = {}
        self._num_in_flight = [0] * num_workers
        self._running = [0] * num_workers
        self._waiting = [0] * num_workers
        self._usage = [0.0] * num_workers

    def place(self, request: Request, session: str | None, now_ns: int) -> int | None:
        """Return a rank of the next group."""
        group = self.next_turn % len(self._groups)
        self.next_turn = group + 1
        ranks = list(range(group * self._num_ranks, (group + 1) * self._num_ranks))
        worker = self._groups[group].choose(ranks, self._num_in_flight, self._running, self._waiting, self._usage)
        self.placed(request, session, worker, now_ns)
        return worker

    def placed(self, request: Request, session: str | None, worker: int, now_ns: int) -> None:
        """Count a request in flight."""
        self._worker_of[request.index] = worker
        self._num_in_flight[worker] += 1

    def ended(self, request: int) -> None:
        """Count a request in flight less."""
        self._num_in_flight[self._worker_of.pop(request)] -= 1

    def report(
        self, worker: int, running: int, waiting: int, used_pages: int, waiting_pages: int, usage: float
    ) -> None:
        """Record the load of a rank."""
        self._running[worker], self._waiting[worker], self._usage[worker] = running, waiting, usage
        self._groups[worker // self._num_ranks].forget_placed()

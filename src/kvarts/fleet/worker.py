"""A worker of a fleet: an engine in virtual time that can be interrupted, and what waits for the end of its step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvarts.events import Blocked
from kvarts.fleet.handoff import Handoff
from kvarts.limits import LATEST_NS, TooLateError
from kvarts.request import Request, RequestState
from kvarts.sched.handoffs import Handoffs
from kvarts.sched.policy import NEVER_NS
from kvarts.sim.replica import Replica

__all__ = ["Queue", "Worker"]


class Queue(Protocol):
    """An admission policy of a worker that takes over requests."""

    def lets_reserve(self, request: Request) -> bool:
        """Return whether `request` may take pages although others wait for memory."""


class Worker:
    """Engine `index` of a fleet. Owner of what it has under way, and of the requests that want pages in it.

    Steps that are alike are done at once up to the next thing that happens to this worker, whenever that is: what is
    under way is only counted, and carried out when it ends or is `cut` short.

    `rank`: its place among workers at which something happens at the same time.
    """

    def __init__(self, index: int, rank: int, replica: Replica, queue: Queue, *, leaps: bool) -> None:
        self.index = index
        self.rank = rank
        self.replica = replica
        self.engine = replica.engine
        self.scheduler = replica.scheduler
        assert replica.scheduler.handoffs is not None
        self.handoffs: Handoffs = replica.scheduler.handoffs
        self.queue = queue
        self.end_ns = NEVER_NS
        """When what is under way ends; NEVER_NS for an idle worker."""
        self.pending: deque[Handoff] = deque()
        """Requests that want pages here for a prompt that another worker has computed."""
        self.num_in_transfer = 0
        self.deferred: list[tuple[Callable[[Handoff, int], None], Handoff]] = []
        """What is done at the end of the step under way."""
        self.interrupts: list[tuple[Callable[[Handoff, Worker, int], None], Handoff]] = []
        """What is done once the step under way has ended, and what followed from that."""
        self.is_down = False
        """Whether it takes no requests, and loses what it has at the end of the step under way."""
        self.is_failing = False
        """Whether it has yet to lose what it has."""
        self.num_owned = 0
        """Requests that are here, in whatever form."""
        self.refused_at = -1
        """The `generation` in which the first pending request was refused; -1 if it was not."""
        self.is_mocker = replica.config.profile == "mocker"
        self._leaps = leaps
        self._durations_ns: list[int] = []
        self._start_ns = 0
        self._num_wanted = 16

    def start(self, now_ns: int) -> bool:
        """Start a step, or many that are alike; return whether there is anything to do."""
        engine, replica, scheduler = self.engine, self.replica, self.scheduler
        others_join = replica.join(now_ns)
        if self._leaps and not others_join and not self._attempts_next():
            num_steps = min(scheduler.horizon(now_ns), scheduler.cache.most_certain_steps, self._num_wanted)
            if num_steps > 1:
                self._durations_ns = replica.decode_ns(num_steps)
                self._start_ns = now_ns
                self.end_ns = now_ns + sum(self._durations_ns)
                if self.end_ns > LATEST_NS:
                    raise TooLateError
                return True
        if not engine.prepare(now_ns):
            return False
        engine.carry_out(now_ns)
        self.end_ns = engine.now_ns
        return True

    def _attempts_next(self) -> bool:
        """Return whether the first pending request may get its pages at the end of the next step."""
        if not self.pending:
            return False
        # Pages that decodes fill may be found, and then the first pending request needs fewer.
        return self.refused_at != self.generation() or (not self.is_mocker and self.scheduler.running.num_sharing > 0)

    def generation(self) -> int:
        """Return a number that changes when a request that was refused pages may get them."""
        running = self.scheduler.running
        if self.is_mocker:
            return running.num_left
        return running.num_left + running.num_admitted + self.scheduler.cache.num_published

    def cut(self, now_ns: int) -> bool:
        """Let what is under way end with the step that is at `now_ns`; return whether there is one.

        It is over, and the worker idle, if a step ended at `now_ns`.
        """
        durations_ns = self._durations_ns
        if not durations_ns:
            return self.end_ns != NEVER_NS
        end_ns, num_steps = self._start_ns, 0
        while end_ns < now_ns or not num_steps:
            end_ns += durations_ns[num_steps]
            num_steps += 1
        self._num_wanted = num_steps + 16
        del durations_ns[num_steps:]
        self.end_ns = end_ns
        self._do_leap()
        if end_ns > now_ns:
            return True
        assert not self.finish(), "a request ended before the end of steps that were alike"
        return False

    def _do_leap(self) -> None:
        durations_ns, self._durations_ns = self._durations_ns, []
        if durations_ns:
            self.replica.leap(self._start_ns, durations_ns, self.end_ns)

    def finish(self) -> list[Request]:
        """End what is under way, now; return the requests that ended here or are held, in admission order."""
        if self._durations_ns:
            self._num_wanted += self._num_wanted
            self._do_leap()
        self.end_ns = NEVER_NS
        return self.replica.finish()

    def withdraw(self, request: Request, now_ns: int) -> None:
        """Drop `request`, between steps. It is as a new one, except that it keeps its tokens."""
        if request.state is RequestState.DECODING and request not in self.scheduler.running.stalled:
            request.last_token_ns = now_ns
        self.replica.cancel(request, now_ns)
        self.handoffs.renew(request)

    def changed(self) -> None:
        """Note that the head of the queue may be admitted now."""
        self.scheduler.blocked = Blocked.NOT

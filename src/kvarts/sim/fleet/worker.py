"""A worker of a fleet: an engine in virtual time that can be interrupted, with actions deferred to a step's end."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from kvarts.base.limits import LATEST_NS, TooLateError
from kvarts.core.events import Blocked
from kvarts.core.executor import CostModel
from kvarts.core.request import Request, RequestState
from kvarts.core.sched.handoffs import Handoffs
from kvarts.core.sched.plan import Batch
from kvarts.core.sched.policy import NEVER_NS
from kvarts.cost.simulated import LeapTimes
from kvarts.sim.fleet.handoff import Handoff
from kvarts.sim.fleet.scaling import WorkerState
from kvarts.sim.replica import MOST_STEPS, Replica

__all__ = ["ByAge", "ByReservation", "DecodeOnly", "Queue", "Worker"]


def age(request: Request) -> tuple[int, int, int]:
    """Return the sort key of a request: priority, then arrival at the fleet."""
    return -request.priority, request.arrival_ns, request.index


class _Listed:
    """Waiting requests in a list, in their order."""

    def __init__(self) -> None:
        self._waiting: list[Request] = []

    def remove(self, request: Request) -> None:
        """Remove `request`."""
        self._waiting.remove(request)

    def holds_until_ns(self, now_ns: int) -> int:
        """Return NEVER_NS: the order does not change with time."""
        return NEVER_NS

    def num_ahead(self, request: Request) -> int:
        """Return the number of requests ahead of `request`."""
        return self._waiting.index(request)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)


class ByAge(_Listed):
    """Larger priorities first; among equals, earlier arrival at the fleet, whichever worker the request was on before.

    A preempted request therefore never waits for one that arrived after it.
    """

    def push(self, request: Request) -> None:
        """Add `request`."""
        insort(self._waiting, request, key=age)

    def head(self, now_ns: int) -> Request:
        """Return the oldest request."""
        return self._waiting[0]

    def lets_reserve(self, request: Request) -> bool:
        """Return whether no older request here needs memory, so that `request` may reserve pages for its prompt."""
        return not any(other.state is not RequestState.LOADED and age(other) < age(request) for other in self._waiting)


class ByReservation(_Listed):
    """The order of Dynamo's mocker: preempted requests at the head, the others by order of reservation.

    While `is_gated`, a request that has its pages is admitted before preempted ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_gated = False
        self.orders: dict[int, int] = {}
        """Place of each request in the order of reservations, by index."""

    def push(self, request: Request) -> None:
        """Add `request`."""
        if request.state is RequestState.PREEMPTED:
            self._waiting.insert(0, request)
            return
        order = self.orders.get(request.index, NEVER_NS)
        for place, other in enumerate(self._waiting):
            if self.orders.get(other.index, NEVER_NS) > order:
                self._waiting.insert(place, request)
                return
        self._waiting.append(request)

    def head(self, now_ns: int) -> Request:
        """Return the first request; while gated, the first whose pages are loaded, if there is one."""
        if self.is_gated:
            for request in self._waiting:
                if request.state is RequestState.LOADED:
                    return request
        return self._waiting[0]

    def lets_reserve(self, request: Request) -> bool:
        """Return True: preempted requests wait behind all reservations."""
        return True


NOT_BLOCKED: Final = Blocked.NOT


Queue: TypeAlias = "ByAge | ByReservation"
"""The admission policy of a worker that takes over requests."""


class Worker:
    """Engine `index` of a fleet. Owner of its step under way, and of the requests that wait for its pages.

    Identical steps are executed at once, as a leap up to the next event of this worker, whenever that is: the leap is
    only scheduled at its start, and carried out when it ends or is `cut` short.

    `rank`: its place among workers at which something happens at the same time. `only_prefills`: it computes prompts,
    which others go on with.
    """

    def __init__(
        self, index: int, rank: int, replica: Replica, queue: Queue, *, only_prefills: bool, leaps: bool
    ) -> None:
        self.index = index
        self.only_prefills = only_prefills
        self.rank = rank
        self.replica = replica
        self.engine = replica.engine
        self.scheduler = replica.scheduler
        assert replica.scheduler.handoffs is not None
        self.handoffs: Handoffs = replica.scheduler.handoffs
        self.queue = queue
        self.tiers = replica.engine.tiers
        self.tier_names = () if self.tiers is None else self.tiers.tier_names
        self.end_ns = NEVER_NS
        """When the step or leap under way ends; NEVER_NS for an idle worker."""
        self.wake_ns = NEVER_NS
        """When an idle worker must look again, as a transfer to or from a tier below ends."""
        self.pending: deque[Handoff] = deque()
        """Requests that wait for pages here, for a prompt that another worker has computed."""
        self.deferred: list[tuple[int, Handoff]] = []
        """Actions of the fleet at the end of the step under way, by their numbers in kvarts.sim.fleet.transitions."""
        self.interrupts: list[tuple[Callable[[Handoff, Worker, int], None], Handoff]] = []
        """Actions after the step under way has ended and its consequences were carried out."""
        self.is_down = False
        """Whether it accepts no requests, and loses those that it has at the end of the step under way."""
        self.is_failing = False
        """Whether it has yet to lose its requests."""
        self.is_clearing = False
        """Whether it drops its cached pages at the end of the step under way."""
        self.num_owned = 0
        """Requests on this worker, in any state."""
        self.refused_at = -1
        """The `generation` in which the first pending request was refused; -1 if it was not."""
        self.is_mocker = replica.config.profile == "mocker"
        self._leaps = leaps
        self._plans_idle = replica.scheduler.plans_idle or replica.plans_ahead
        self._must_plan = False
        """Whether transfers have ended since the last step: the next one may have to store something."""
        self._times: LeapTimes | None = None
        """The durations of the leap under way; None if it has been carried out, or a step is under way."""
        self._start_ns = 0
        self._num_wanted = 16
        """Steps of the next leap at most, if its durations are listed: it may be cut short."""

    def start(self, now_ns: int) -> bool:
        """Start a step, or a leap of identical ones; return whether there was work.

        Without work, `wake_ns` is when a transfer ends.
        """
        engine, replica, scheduler, tiers = self.engine, self.replica, self.scheduler, self.tiers
        self.wake_ns = NEVER_NS
        if not (self._plans_idle or scheduler.running.num_running or scheduler.num_waiting):
            return False  # pages were released or reserved, which needs no step
        others_join = replica.join(now_ns)
        if tiers is not None:
            self.end_transfers(now_ns)
            if not engine.has_work:
                replica.rest()
                engine.emit()
                return False
        must_plan, self._must_plan = self._must_plan, False
        if self._leaps and not (others_join or must_plan or self._attempts_next()):
            num_steps = scheduler.horizon(now_ns)
            if num_steps > scheduler.cache.most_certain_steps:
                num_steps = scheduler.cache.most_certain_steps
            most_steps = MOST_STEPS if replica.decodes_by_rule else self._num_wanted
            if num_steps > most_steps:
                num_steps = most_steps
            if num_steps > 1:
                times = replica.decode_times(num_steps)
                if tiers is not None:
                    times.end_before(tiers.next_ns - now_ns)
                self._times = times
                self._start_ns = now_ns
                self.end_ns = now_ns + times.total_ns
                if self.end_ns > LATEST_NS:
                    raise TooLateError
                return True
        while not replica.prepare(now_ns):
            if replica.has_leaving:  # they have left with this plan, and `finish` returns them
                self.end_ns = replica.pause(now_ns)
                return True
            if scheduler.has_released:
                replica.join(now_ns)
                continue  # for that memory
            if tiers is not None:
                engine.emit()
                self.wake_ns = tiers.next_ns
            return False
        engine.carry_out(now_ns)
        self.end_ns = engine.now_ns
        return True

    def end_transfers(self, now_ns: int) -> None:
        """End the transfers to and from tiers below that are due. The worker is idle."""
        if self.tiers is None:
            return
        self.scheduler.settle()  # before transfers that end now release memory
        if self.tiers.advance_to(now_ns):
            self.changed()
            self._must_plan = True

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is under way: no request, no step, no transfer to or from a tier below."""
        tiers = self.tiers
        is_moving = tiers is not None and (tiers.has_work or self.wake_ns != NEVER_NS)
        return not (self.num_owned or is_moving or self.end_ns != NEVER_NS)

    def lose_memory(self) -> None:
        """Drop all pages of the device and of its own tiers below; no request may have any."""
        if self.tiers is not None:
            self.tiers.reset()
        self.engine.clear_cache()

    def lose_transfers(self, now_ns: int) -> None:
        """End transfers as failed; requests that wait for a load wait no longer. The worker is idle."""
        if self.tiers is not None:
            assert self.scheduler.loads is not None
            self.engine.now_ns = max(self.engine.now_ns, now_ns)
            self.tiers.abort(now_ns)
            self.scheduler.loads.take_ended()

    def _attempts_next(self) -> bool:
        """Return whether the first pending request may get its pages at the end of the next step."""
        if not self.pending:
            return False
        if self.refused_at != self.generation():
            return True
        # Pages that decodes complete may be hits for the first pending request; what their windows release is free.
        scheduler = self.scheduler
        return not self.is_mocker and (scheduler.running.num_sharing > 0 or scheduler.cache.frees_skipped)

    def generation(self) -> int:
        """Return a number that changes whenever a refused request may get its pages."""
        running, cache = self.scheduler.running, self.scheduler.cache
        if self.is_mocker:
            # As in Dynamo's mocker, and stores below, which it does not have, release pages as well.
            return running.num_left if self.tiers is None else running.num_left + cache.num_released
        return running.num_left + running.num_admitted + cache.num_published + cache.num_released

    def cut(self, now_ns: int) -> bool:
        """Shorten a leap to end with the step at `now_ns`; return whether that step is still under way.

        If the step ends exactly at `now_ns`, it is finished and the worker becomes idle.
        """
        times = self._times
        if times is None:
            return self.end_ns != NEVER_NS
        times.end_before(now_ns - self._start_ns)
        self._num_wanted = times.num_steps + 16
        end_ns = self.end_ns = self._start_ns + times.total_ns
        self._do_leap(times)
        if end_ns > now_ns:
            return True
        assert not self.finish(), "a request ended before the end of steps that were alike"
        return False

    def state(self) -> WorkerState:
        """Return its state in the step under way. A leap must be `cut` first, so that this is its last step."""
        assert self._times is None, "a leap is looked into"
        scheduler, pending = self.scheduler, self.pending
        running, cache = scheduler.running, scheduler.cache
        return WorkerState(
            self.index,
            running.num_running,
            scheduler.num_waiting + len(pending),
            scheduler.waiting.num_waiting_tokens + sum(each.decode.num_prompt_tokens for each in pending),
            cache.num_used / cache.pool.total,
            self.replica.known_tokens + sum(each.num_computed for each in running.chunked),
            self.replica.config.pool_tokens,
        )

    def count_leap(self) -> None:
        """Do the leap under way, if there is one, with the present pages below the device."""
        if self._times is not None:
            self._do_leap(self._times)

    def _do_leap(self, times: LeapTimes) -> None:
        self._times = None
        self.replica.leap(self._start_ns, times)

    def finish(self) -> list[Request]:
        """End the step or leap under way; return the requests that ended here, are held, or were dropped with it.

        They are in the order of admission; those that were dropped come last.
        """
        if self._times is not None:
            self._num_wanted += self._num_wanted
            self._do_leap(self._times)
        self.end_ns = NEVER_NS
        return self.replica.finish()

    def withdraw(self, request: Request, now_ns: int) -> None:
        """Drop `request` between steps. It becomes like a new one, except that it keeps its tokens."""
        if request.state is RequestState.DECODING and request not in self.scheduler.running.stalled:
            request.last_token_ns = now_ns
        self.replica.cancel(request, now_ns)
        self.handoffs.renew(request)

    def changed(self) -> None:
        """Record that the head of the queue may be admitted now."""
        self.scheduler.blocked = NOT_BLOCKED


class DecodeOnly:
    """Cost of a worker that generates: `cost` for the decodes; prompts take no time.

    A sequence whose recompute ends in the step counts as a decode, as it does for workers that compute prompts.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self.decode_ns = cost.decode_ns
        self.decode_times = getattr(cost, "decode_times", None)

    def step_ns(self, batch: Batch) -> int:
        """Return the duration of a step."""
        num_decodes, known_tokens = batch.num_decodes, batch.decode_known_tokens
        for chunk in batch.chunks:
            if chunk.is_last and chunk.end > chunk.num_prompt_tokens:
                num_decodes += 1
                known_tokens += chunk.end
        return self._cost.step_ns(Batch((), num_decodes, known_tokens, batch.pool_tokens))

"""The turns of several models on one device: one at a time, each one step.

At any time, after arrivals and changes of health, a device does in this order: it ends the transfers that are due; it
stores the pages that the previous step completed in the tiers below its model, since others may evict them before the
model's next turn; and the next model in turn starts a step. If no model can step, the device waits for the end of the
next transfer, or for the next change of health. If all running requests only decode, and no model has tiers, many turns
are executed at once; their records are the same as if the turns had been executed one by one.

An example: models X and Y without guarantees, with tiers below X, on a device of three pages. x0 is the page of a
request of X that ends with X's first step:

    ms          0          1          2          3
    X           | step     |          | step     |
    Y                      | step     |          | step
    memory      x0 - -     x0 y0 -    x0 y0 x1   ...
                           ^ x0 is copied to host memory, before Y's step takes y0

Y's second step needs a page, and none is empty. x0 is the oldest that no request uses. Its eviction loses nothing,
because it was stored between the turns; X's own next turn could come too late.

`SharedDriver` is the loop of a replay of several models on identical devices.

A leap is over many turns that are certain to be identical, and takes their pages. In these turns all running requests
decode, and no request arrives or finishes before the last of them. They end where the next turn is that of a model
which has something else to do, such as a chunk of a prompt: a model with short steps has many turns between two long
steps of another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

from kvarts.base.limits import LATEST_NS, TooLateError
from kvarts.core.events import Blocked, Turns
from kvarts.core.request import Request
from kvarts.core.sched.lower_tiers import TiersBelow
from kvarts.core.sched.policy import NEVER_NS
from kvarts.sim.arrivals import Arrivals
from kvarts.sim.driver import Driver
from kvarts.sim.report.requests import FAILED
from kvarts.sim.router import Routed
from kvarts.sim.sharing.config import HealthChange
from kvarts.sim.sharing.device import SharedDevice
from kvarts.sim.sharing.outcome import Contention
from kvarts.sim.sharing.tenant import Tenant, TurnOrder

__all__ = ["HealthChange", "SharedDriver", "TurnLoop"]

NS_PER_S = 1e9


class TurnLeap:
    """The steps of one model in many turns executed at once: pages and duration of each, and the state before it.

    None with `num_steps` 0: the turns end at the model's first.
    """

    __slots__ = (
        "cache",
        "cached",
        "due",
        "durations_ns",
        "horizon",
        "starts_ns",
        "tenant",
        "withheld",
    )

    def __init__(self, tenant: Tenant, num_steps: int, horizon: int) -> None:
        self.tenant = tenant
        self.cache = tenant.cache
        self.durations_ns: list[int] = tenant.decode_ns(num_steps) if num_steps else []
        self.due: list[int] = tenant.scheduler.wheel.pages_due_by_step(num_steps) if num_steps else []
        self.horizon = horizon
        """The last certain step: it may end requests."""
        self.starts_ns: list[int] = []
        self.cached: list[int] = []
        self.withheld: list[int] = []

    def keep(self, starts_ns: list[int]) -> None:
        """Set the starts of its steps; drop the steps that have none."""
        self.starts_ns = starts_ns
        num_steps = len(starts_ns)
        if num_steps < len(self.durations_ns):
            del self.durations_ns[num_steps:], self.due[num_steps:]

    def take(self) -> None:
        """Take the pages of its steps, where no other model takes any of its memory in these turns.

        Its part is as fresh as the plan.
        """
        num_steps, part = len(self.starts_ns), self.tenant.part
        self.withheld = [part.num_withheld] * num_steps
        self.cached = part.take_in_turns(self.due) if any(self.due) else [self.cache.num_cached] * num_steps

    def begin(self) -> None:
        """Start the steps; `end` must follow."""
        self.tenant.leap(self.durations_ns, self.due, Turns(self.starts_ns, self.cached, self.withheld))

    def end(self) -> list[Request]:
        """End the steps; return the requests that finished."""
        return self.tenant.end_leap(len(self.starts_ns))


class TurnLeaps:
    """Turns that begin before `until_ns`, of the models of `strides` in `order`.

    They end with the first step at its horizon, at the end of the known durations, or before the turn of a model that
    has no certain steps. If only one model has certain steps, there is only its stride, and no other model has a turn
    before `alone_until_ns`.
    """

    def __init__(
        self, strides: Sequence[TurnLeap], order: TurnOrder, until_ns: int, alone_until_ns: int, *, is_apart: bool
    ) -> None:
        self._strides = strides
        self._order = order
        self._until_ns = until_ns
        self._alone_until_ns = alone_until_ns
        self._is_apart = is_apart
        """Whether each model has separate memory."""

    def shorten(self, until_ns: int) -> None:
        """Leave out turns that do not begin before `until_ns`."""
        if until_ns < self._until_ns:
            self._until_ns = until_ns

    def certain_until(self, now_ns: int) -> int:
        """Return the time before which no request ends if the turns begin at `now_ns`, without taking pages."""
        if len(self._strides) == 1:
            ends_ns, num_steps = self._alone(now_ns)
            return min(ends_ns[num_steps], self._until_ns)
        places, starts_ns, end_ns = self._turns(now_ns)
        num_turns = self._num_fitting(places, starts_ns)
        if num_turns < len(places):
            end_ns = _start_of(places, starts_ns, num_turns)
        return min(end_ns, self._until_ns)

    def _alone(self, now_ns: int) -> tuple[list[int], int]:
        """Return the ends of the steps of the only stride, each the start of the next, and how many it has."""
        ends_ns = list(accumulate(self._strides[0].durations_ns, initial=now_ns))
        num_steps = len(ends_ns) - 1
        until_ns = min(self._until_ns, self._alone_until_ns)
        if ends_ns[num_steps - 1] >= until_ns:
            num_steps = bisect_left(ends_ns, until_ns, 0, num_steps)
        return ends_ns, num_steps

    def take(self, now_ns: int) -> tuple[list[TurnLeap], int]:
        """Take the pages of as many turns as possible, from `now_ns` on.

        Return the strides that have steps, in the order in which they end, and the end of the last.
        """
        strides = self._strides
        if len(strides) == 1:
            stride = strides[0]
            ends_ns, num_steps = self._alone(now_ns)
            if not num_steps:
                return [], now_ns
            stride.keep(ends_ns[:num_steps])
            stride.take()
            return [stride], ends_ns[num_steps]
        places, starts_ns, end_ns = self._turns(now_ns)
        if not places:
            return [], now_ns
        num_turns = self._num_fitting(places, starts_ns)
        if num_turns < len(places):
            end_ns = _start_of(places, starts_ns, num_turns)
            for place in places[num_turns:]:
                starts_ns[place].pop()
            del places[num_turns:]
        last_first = list(dict.fromkeys(reversed(places)))
        ordered = [strides[place] for place in reversed(last_first)]
        for place in last_first:
            strides[place].keep(starts_ns[place])
        if self._is_apart or len(ordered) == 1:
            for stride in ordered:
                stride.take()
        else:
            self._take_in_turns(places)
        return ordered, end_ns

    def _turns(self, now_ns: int) -> tuple[list[int], list[list[int]], int]:
        strides = self._strides
        active = [stride.tenant for stride in strides]
        durations_ns = [stride.durations_ns for stride in strides]
        return self._order.turns(active, durations_ns, [stride.horizon for stride in strides], now_ns, self._until_ns)

    def _num_fitting(self, places: Sequence[int], starts_ns: Sequence[Sequence[int]]) -> int:
        """Return for how many of the first turns there is memory. For each model alone, there is enough."""
        if self._is_apart:
            return len(places)
        strides = self._strides
        num_bytes = 0
        for stride, of_stride in zip(strides, starts_ns, strict=True):
            num_bytes += sum(stride.due[: len(of_stride)]) * stride.tenant.part.page_bytes
        num_free = strides[0].tenant.part.memory.num_free_bytes
        if num_bytes <= num_free:
            return len(places)
        steps = [0] * len(strides)
        for turn, place in enumerate(places):
            stride = strides[place]
            num_free -= stride.due[steps[place]] * stride.tenant.part.page_bytes
            if num_free < 0:
                return turn
            steps[place] += 1
        return len(places)

    def _take_in_turns(self, places: Sequence[int]) -> None:
        """Take the pages of these turns one by one: taking pages for one model may evict those of another."""
        strides = self._strides
        num_free = strides[0].tenant.part.memory.num_free_bytes
        sizes = [stride.tenant.part.page_bytes for stride in strides]
        unused = [stride.cache.pool.total - stride.cache.num_used for stride in strides]
        num_cached = [stride.cache.num_cached for stride in strides]
        steps = [0] * len(strides)
        for place in places:
            stride = strides[place]
            step = steps[place]
            steps[place] = step + 1
            stride.withheld.append(unused[place] - num_free // sizes[place])
            num_due = stride.due[step]
            if num_due:
                stride.cache.take(num_due)
                num_cached = [stride.cache.num_cached for stride in strides]
                unused[place] -= num_due
                num_free -= num_due * sizes[place]
            stride.cached.append(num_cached[place])


def _start_of(places: Sequence[int], starts_ns: Sequence[Sequence[int]], turn: int) -> int:
    """Return the start of one of the turns of `places`, by its number."""
    place = places[turn]
    return starts_ns[place][places[:turn].count(place)]


def plan_turn_leaps(
    device: SharedDevice, tenants: Sequence[Tenant], order: TurnOrder, first: Tenant, now_ns: int, until_ns: int
) -> TurnLeaps | None:
    """Return the turns from `now_ns` to `until_ns` that are certain to be identical; None without any.

    `first` has the next turn, as `order` has just said.
    """
    if first.wants_tokens:  # the most frequent reason, and the cheapest to find
        return None
    for tenant in tenants:
        if tenant.part.claimed_bytes and device.may_preempt_for(tenant.name, now_ns):
            return None
    active = order.able
    horizons = []
    num_stepping = 0
    for tenant in active:
        if tenant.wants_tokens:
            horizons.append(0)
            continue
        tenant.part.refresh()
        num_steps = max(0, tenant.scheduler.horizon(now_ns))
        horizons.append(num_steps)
        if not num_steps:
            if tenant is first:
                return None
            continue
        num_stepping += 1
        waiting = tenant.scheduler.waiting
        if waiting.num_waiting:
            until_ns = min(until_ns, waiting.holds_until_ns(now_ns))
    # Compute only the durations that reach `until_ns`.
    if num_stepping == 1:
        alone_until_ns = order.alone_until_ns(first, now_ns) if len(active) > 1 else NEVER_NS
        horizon = horizons[active.index(first)]
        guess = (min(until_ns, alone_until_ns) - now_ns) // first.step_ns + 2
        stride = TurnLeap(first, min(guess, horizon), horizon)
        return TurnLeaps([stride], order, until_ns, alone_until_ns, is_apart=True)
    guesses = order.steps_until(active, horizons, now_ns, until_ns)
    strides = [
        TurnLeap(tenant, min(guess, horizon), horizon)
        for tenant, guess, horizon in zip(active, guesses, horizons, strict=True)
    ]
    return TurnLeaps(strides, order, until_ns, 0, is_apart=device.is_static)


class TurnLoop:
    """A Runner: executes the models of one device in turns. `device` has them registered by the names of `tenants`.

    Owner of the current work: a step, many turns at once, or a pause. `changes`: of health; each takes effect at the
    end of the work that is running at its time. `clocks`: receive the time before anything happens at it.
    """

    def __init__(
        self,
        device: SharedDevice,
        tenants: Sequence[Tenant],
        order: TurnOrder,
        contest: Contention,
        *,
        step_by_step: bool = False,
        audit: bool = False,
        changes: Sequence[HealthChange] = (),
        clocks: Sequence[Callable[[int], object]] = (),
    ) -> None:
        self._device = device
        self._clocks = clocks
        self._tenants = list(tenants)
        self._with_tiers = [(tenant, tenant.tiers) for tenant in tenants if tenant.tiers is not None]
        # With tiers, one model's pages may have to be stored before another can take them. Exactness takes precedence.
        self._leaps = not step_by_step and not self._with_tiers
        self._audit = audit
        self._changes = sorted(changes, key=lambda change: change.time_ns)
        for change in self._changes:
            device.health(change.model)  # raises now for an unknown model, not in the middle of the replay
        self._order = order
        self.contest = contest
        self._wanting = 0
        """The models that had requests when the current step began."""
        self.now_ns = 0
        """The end of the current work; without any, the time that the device has reached."""
        self.is_pausing = False
        """Whether the device waits: no step can start before a transfer, a change of health or an arrival."""
        self._is_under_way = False
        self._stepping: Tenant | None = None
        """The model whose step is running; None for many turns at once."""
        self._since_ns = 0
        """The start of that step."""
        self._to_store: Tenant | None = None
        """The model, with tiers, of the last step, if the pages that it completed are not stored yet."""
        self._last: TurnLeap | None = None
        """In a leap of many turns, the steps of the model that has the last one."""
        self._num_released = 0
        """The number of pages that the model of the last running step had released before it."""
        self._planned: TurnLeaps | None = None
        """The plan of `quiet_until`, for the call of `start` that follows it."""
        self._failed: list[tuple[Request, str]] = []
        self._dropping: list[tuple[Request, Routed]] = []
        """Requests that were cancelled since the current work began."""
        self._change()

    # Interface of a Runner --------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether there are requests, transfers, or changes of health to come."""
        return (
            bool(self._changes)
            or any(tenant.engine.has_work for tenant in self._tenants)
            or any(tenant.is_fresh for tenant, _ in self._with_tiers)
        )

    def wake(self, now_ns: int) -> None:
        """End a pause at `now_ns`, because a request arrives."""
        self._planned = None
        if self.is_pausing:
            self.is_pausing = self._is_under_way = False
            self.now_ns = now_ns
        elif not self._is_under_way and now_ns > self.now_ns:
            self.now_ns = now_ns
            self._order.rest()

    def start(self, now_ns: int, until_ns: int = NEVER_NS) -> int:
        """Start a turn at `now_ns`, and all that are certain to be identical and start before `until_ns`.

        Return the end of the last one, or of the pause; NEVER_NS, without starting work, if nothing is to come.
        """
        assert not self._is_under_way
        self.now_ns = self._device.now_ns = now_ns
        self._tell_time()
        self._store_completed()
        may_leap = self._leaps
        # Models that wait for pages of others and did not get enough: they have no other turn until one of these acts.
        tried: list[Tenant] = []
        while True:
            for below in self._with_tiers:
                self._look_below(*below)
            tenant = self._order.next(now_ns, tried)
            if tenant is None:
                return self._pause()
            was_stalled = tenant.is_stalled
            if (may_leap and self._leap(tenant, until_ns)) or self._begin(tenant):
                self._is_under_way = True
                return self.now_ns
            tried = [*tried, tenant] if was_stalled else []
            # A turn without a step may make more turns certain than `quiet_until` has planned.
            may_leap = False

    def drop(self, request: Request, routed: Routed, now_ns: int) -> bool:
        """Drop `request` of the model `routed`; return False if `finish` will do that."""
        self._planned = None
        if self._is_under_way:
            self._dropping.append((request, routed))
            return False
        self._device.now_ns = now_ns
        routed.cancel(request, now_ns)
        return True

    def finish(self) -> list[Request]:
        """End the work of `start`; return the requests that finished, then those dropped.

        `take_failed` returns those that failed.
        """
        finished = self._finish()
        if self._dropping:
            dropping, self._dropping = self._dropping, []
            for request, routed in dropping:
                if request not in finished and not request.is_over:
                    routed.cancel(request, self.now_ns)
                    finished.append(request)
        return finished

    def _finish(self) -> list[Request]:
        self._is_under_way = False
        self._device.now_ns = self.now_ns
        finished: list[Request] = []
        if self.is_pausing:
            self.is_pausing = False
        elif self._stepping is not None:
            tenant, self._stepping = self._stepping, None
            finished = tenant.engine.end()
            if tenant.cache.num_used != tenant.scheduler.mark.used:
                tenant.settle(self.now_ns)
            self._end_turn(tenant)
            duration_ns = self.now_ns - self._since_ns
            self._order.spend(tenant, duration_ns)
            self.contest.count(tenant, self._wanting, duration_ns)
            if tenant.tiers is not None:
                tenant.is_fresh = True
                self._to_store = tenant
        else:
            assert self._last is not None
            stride, self._last = self._last, None
            finished = self._end_stride(stride)
        if self._audit:
            self._device.check()
        if self._changes:
            self._change()
        return finished

    def run_until(self, until_ns: int, finished: list[Request]) -> int:
        """Execute all turns that start before `until_ns`; add finished requests to `finished`.

        Return a time before which another call would do nothing, unless a request arrives or is dropped.
        """
        while True:
            if self._is_under_way:
                if self.now_ns > until_ns:
                    return self.now_ns
                finished += self.finish()
            if self.now_ns >= until_ns or self.start(self.now_ns, until_ns) == NEVER_NS:
                return until_ns

    def run_towards(self, until_ns: int, finished: list[Request], is_watched: bool) -> int:
        """Execute steps as `run_until` does; return `until_ns`, the earliest time at which anything else may end."""
        self.run_until(until_ns, finished)
        return until_ns

    def quiet_until(self, now_ns: int) -> int | None:
        """Return the time before which no request can end if many turns could start now; None if only one could.

        Its plan is for a call of `start` at `now_ns`, unless a request arrives before that.
        """
        self._device.now_ns = now_ns
        tenant = self._order.next(now_ns) if self._leaps else None
        if tenant is None:
            return None
        strides = self._planned = self._plan(tenant, now_ns, NEVER_NS)
        if strides is None:
            return None
        until_ns = strides.certain_until(now_ns)
        return until_ns if until_ns > now_ns else None

    def flush(self) -> None:
        """Pass all buffered events to the readers of the logs."""
        for tenant in self._tenants:
            tenant.engine.log.flush()
        self._device.check()

    # Health -----------------------------------------------------------------------------------------------

    def take_failed(self) -> list[tuple[Request, str]]:
        """Return the requests that failed since the last call, with the reasons."""
        failed, self._failed = self._failed, []
        return failed

    def give_up(self) -> None:
        """Fail the waiting requests, because no model can step and no change is to come."""
        for tenant in self._tenants:
            waiting = list(tenant.scheduler.waiting)
            assert not waiting or self._device.health(tenant.name) == "degraded", (
                "L8: the replay ended with requests left over"
            )
            tenant.reach(self.now_ns)
            for request in waiting:
                tenant.engine.cancel(request)
                self._failed.append((request, "its model was degraded, and admitted no request until the end"))
            tenant.is_fresh = False

    def _change(self) -> None:
        """Apply the changes of health that are due."""
        while self._changes and self._changes[0].time_ns <= self.now_ns:
            self._tell_time()
            self._store_completed()
            change = self._changes.pop(0)
            tenant = next(tenant for tenant in self._tenants if tenant.name == change.model)
            tenant.reach(self.now_ns)
            ended = self._device.set_health(change.model, change.health)
            tenant.is_fresh = True
            tenant.settle(self.now_ns)
            reason = f"its model died at {change.time_ns / NS_PER_S:g} s"
            self._failed += [(request, reason) for request in ended]

    def _tell_time(self) -> None:
        for clock in self._clocks:
            clock(self.now_ns)

    # Turns ------------------------------------------------------------------------------------------------

    def _pause(self) -> int:
        """Wait for the next change or the next end of a transfer."""
        next_ns = self._next_change_ns()
        for _, tiers in self._with_tiers:
            if tiers.next_ns < next_ns:
                next_ns = tiers.next_ns
        if next_ns == NEVER_NS:
            return NEVER_NS
        self.is_pausing = self._is_under_way = True
        if next_ns > self.now_ns:
            self.now_ns = next_ns
        return self.now_ns

    def _next_change_ns(self) -> int:
        return self._changes[0].time_ns if self._changes else NEVER_NS

    def _begin(self, tenant: Tenant) -> bool:
        """Begin the turn of `tenant`; return whether a step is running. If not, the turn is over."""
        self._order.pass_turn(tenant, self.now_ns)
        tenant.part.refresh()
        self._num_released = tenant.cache.num_released
        engine = tenant.engine
        start_ns = engine.now_ns = self.now_ns
        self._wanting = self.contest.wanting()
        has_begun = engine.begin(self.now_ns)
        for other in self._tenants:
            if other.scheduler.preemptor.gave_way or other.part.has_given_back:
                other.settle(start_ns)
                other.is_fresh |= other.part.has_given_back
                other.part.has_given_back = False
        if has_begun:
            self._stepping = tenant
            self._since_ns = self.now_ns
            self.now_ns = engine.now_ns
            return True
        engine.emit()
        self._end_turn(tenant)
        if tenant.tiers is not None:
            tenant.is_fresh = False
            self._store(tenant)
        if self._audit:
            self._device.check()
        return False

    def _end_turn(self, tenant: Tenant) -> None:
        self._device.end_turn(tenant.name, has_released=tenant.cache.num_released != self._num_released)

    # Tiers ------------------------------------------------------------------------------------------------

    def _store_completed(self) -> None:
        """Store, once, the completed pages of the model that executed the last step."""
        if self._to_store is not None:
            tenant, self._to_store = self._to_store, None
            self._store(tenant)

    def _store(self, tenant: Tenant) -> None:
        """End transfers of `tenant` that are due after its turn; if it has no next turn, begin to store its pages."""
        tiers = tenant.tiers
        assert tiers is not None
        self._end_transfers(tenant, tiers)
        if tiers.is_due and tenant.is_stalled:
            tenant.store(self.now_ns)

    def _look_below(self, tenant: Tenant, tiers: TiersBelow) -> None:
        """End transfers of `tenant` that are due; if it cannot step, begin its stores in place of its next step."""
        engine = tenant.engine
        self._end_transfers(tenant, tiers)
        if tenant.is_fresh and tenant.is_stalled:
            tenant.is_fresh = False
            if engine.has_work:
                tenant.store(self.now_ns)
            engine.now_ns = self.now_ns
            engine.emit()

    def _end_transfers(self, tenant: Tenant, tiers: TiersBelow) -> None:
        num_released = tenant.cache.num_released
        if not tiers.advance_to(self.now_ns):
            return
        tenant.is_fresh = True
        tenant.scheduler.blocked = Blocked.NOT
        if tenant.cache.num_released != num_released:
            tenant.settle(self.now_ns)
            self._device.retry_blocked(but=tenant.name)

    # Many turns at once -----------------------------------------------------------------------------------

    def _plan(self, first: Tenant, now_ns: int, until_ns: int) -> TurnLeaps | None:
        until_ns = min(until_ns, self._next_change_ns(), self._device.reclaims_at_ns())
        return plan_turn_leaps(self._device, self._tenants, self._order, first, now_ns, until_ns)

    def _leap(self, first: Tenant, until_ns: int) -> bool:
        """Start as many turns as are certain to be identical; return False without any."""
        strides, self._planned = self._planned, None
        if strides is not None:
            strides.shorten(until_ns)
        else:
            strides = self._plan(first, self.now_ns, until_ns)
        if strides is None:
            return False
        ordered, end_ns = strides.take(self.now_ns)
        if not ordered:
            return False
        if end_ns > LATEST_NS:
            raise TooLateError
        self.now_ns = end_ns
        wanting = self.contest.wanting()
        if len(ordered) == 1:
            last = ordered[0]
            self.contest.count(last.tenant, wanting, end_ns - last.starts_ns[0])
            self._order.leap_alone(last.tenant, last.starts_ns[0], end_ns, last.durations_ns[-1])
        else:
            for stride in ordered:
                self.contest.count(stride.tenant, wanting, sum(stride.durations_ns))
                self._order.leap(stride.tenant, stride.starts_ns, stride.durations_ns)
            # The last turn may finish requests, which the other models must not see before it ends.
            for stride in ordered[:-1]:
                self._num_released = stride.cache.num_released
                stride.begin()
                finished = self._end_stride(stride)
                assert not finished, "a request finished before the last of many turns"
            last = ordered[-1]
        self._last = last
        self._num_released = last.cache.num_released
        last.begin()
        return True

    def _end_stride(self, stride: TurnLeap) -> list[Request]:
        num_used = stride.cache.num_used
        finished = stride.end()
        if stride.cache.num_used != num_used:
            stride.tenant.settle(self.now_ns)
        self._end_turn(stride.tenant)
        return finished


class SharedDriver(Driver):
    """A Driver of devices on which requests may also fail: because a model dies, or admits none until the end."""

    def __init__(
        self,
        arrivals: Sequence[Arrivals],
        devices: Sequence[TurnLoop],
        *,
        on_progress: Callable[[int], object] | None = None,
    ) -> None:
        super().__init__(arrivals, devices, on_progress=on_progress)
        self._devices = devices

    def _run_alone(self, index: int, until_ns: int) -> None:
        super()._run_alone(index, until_ns)
        self._fail(index, self._devices[index].now_ns)

    def _end(self, index: int, finished: list[Request]) -> None:
        super()._end(index, finished)
        self._fail(index, self._devices[index].now_ns)

    def _fail(self, index: int, now_ns: int) -> None:
        for request, reason in self._devices[index].take_failed():
            of_model, row, _ = self._in_engines.pop(request)
            of_model.reject(request, row, index, reason, max(now_ns, request.arrival_ns), FAILED)
            self._num_refused += 1
            self._emit(1)

    def _settle(self) -> None:
        """Fail the requests of models that are still degraded, then those that arrive as a consequence."""
        now_ns = max(device.now_ns for device in self._devices)
        while self._in_engines:
            for index, device in enumerate(self._devices):
                device.give_up()
                self._fail(index, now_ns)
            self._take_placed(now_ns)
            # One time after the other: what fails brings requests that may arrive before the next ones.
            while not self._in_engines and (arrival_ns := self._look_ahead()) != NEVER_NS:
                self._arrive(arrival_ns)

"""One engine in virtual time: steps, leaps over identical steps, and pauses.

The events of a leap are the same as if its steps had been done one by one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import accumulate
from typing import Final

import msgspec

from kvarts.base.limits import LATEST_NS, TooLateError
from kvarts.core.engine import Engine
from kvarts.core.events import (
    Blocked,
    CopiesRemoved,
    Event,
    LeapDone,
    PagesRemoved,
    PerStep,
    StepEnded,
    StepStarted,
)
from kvarts.core.executor import VirtualExecutor
from kvarts.core.request import Request, RequestState
from kvarts.core.sched.policy import NEVER_NS
from kvarts.core.sched.scheduler import Scheduler
from kvarts.core.sched.wheel import PagesDue
from kvarts.cost.simulated import LeapTimes
from kvarts.sim.router import Routed

__all__ = ["NEVER_NS", "Joining", "Receiving", "Replica", "tell_by_step"]


FAR_NS: Final = 1_000_000_000
"""A useful distance to look ahead for ends: requests arrive more often than that."""
NO_TIMES: Final[list[int]] = []
"""The starts of steps whose events need none."""
OF_PROMPTS: Final = 1000
"""What a step of prompts counts as before requests are received."""
MOST_STEPS: Final = 1 << 16
"""The most steps of a leap: bounds the memory of its event."""


class Replica:
    """An engine in virtual time: its executor gives the durations of steps.

    Owner of the current activity: a step, a leap or a pause. `step_by_step`: never do many steps at once.
    `plans_ahead`: the next step is planned while one runs (Joining). `recv_interval`: as of Receiving.
    """

    def __init__(
        self,
        engine: Engine,
        executor: VirtualExecutor,
        *,
        step_by_step: bool = False,
        plans_ahead: bool = False,
        recv_interval: int = 1,
    ) -> None:
        self.engine = engine
        self.config = engine.config
        self.scheduler: Scheduler = engine.scheduler
        self._executor = executor
        self._decode_times = getattr(executor, "decode_times", None)
        self._tiers = engine.below
        self._leaps = not step_by_step
        self._door: Door | None = None
        if plans_ahead:
            self._door = Joining(self.scheduler.coming)
        elif recv_interval > 1:
            self._door = Receiving(self.scheduler.coming, recv_interval)
        self._pool_tokens = engine.config.pool_tokens
        self._is_under_way = False
        self._plans_late = True
        """Whether no step runs while the next one is planned: the engine is idle, or its last plan was empty."""
        self._dropping: list[Request] = []
        """Requests that were given up since the current activity started."""
        self._leaving: list[Request] = []
        """Requests that were given up, and that the next plan drops: it was made before, and computes their tokens."""
        self._num_leapt = 0
        """Identical steps under way; 0 for a scheduled step."""
        self.is_pausing = False
        """Whether the engine waits: nothing can be computed before a transfer ends or a request arrives."""
        self._must_plan = False
        """Whether transfers have ended since the last step, so that it cannot be followed by a leap."""
        self._last_decode_ns = 10_000_000  # a first guess; decides how many durations to request

    @property
    def now_ns(self) -> int:
        """The end of the current activity; without one, the time that the engine has reached."""
        return self.engine.now_ns

    @property
    def has_work(self) -> bool:
        """Whether there is something to do or to wait for: requests, or transfers."""
        return self.engine.has_work or self.num_joining > 0

    @property
    def num_joining(self) -> int:
        """The number of requests that wait for a step that is not planned yet."""
        return 0 if self._door is None else self._door.num_requests

    @property
    def known_tokens(self) -> int:
        """The known tokens of all decodes in the step under way, the last one of a leap; without one, in the next."""
        return self.scheduler.wheel.known_tokens_after(max(0, self._num_leapt - 1))

    @property
    def plans_ahead(self) -> bool:
        """Whether the next step is planned while one runs."""
        return isinstance(self._door, Joining)

    def wake(self, now_ns: int) -> None:
        """End a pause at `now_ns`, because a request arrives."""
        if self.is_pausing:
            self.is_pausing = self._is_under_way = False
            self.engine.now_ns = now_ns

    def submit(self, request: Request, now_ns: int) -> str | None:
        """Queue `request` at `now_ns`, or return the reason why it can never run. Ends a pause."""
        if self.is_pausing:
            self.wake(now_ns)
        if self._door is not None and not self._plans_late:
            reason = self.scheduler.never_fits(request)
            if reason is None:
                self._door.add(request)
            else:
                request.become(RequestState.REJECTED)
                self.refuse(request, reason, now_ns)
            return reason
        return self.engine.submit(request, now_ns)

    def refuse(self, request: Request, reason: str, now_ns: int) -> None:
        """Emit the event that `request` was refused at `now_ns` before it was queued, for `reason`."""
        self.engine.refuse(request, reason, now_ns)

    def cancel(self, request: Request, now_ns: int = 0) -> None:
        """Drop `request` between steps, at `now_ns` if the engine is not beyond that. Its pages are free at once.

        Transfers that are due end first.
        """
        self.engine.now_ns = max(self.engine.now_ns, now_ns)
        if self._tiers is not None and self._tiers.advance_to(self.engine.now_ns):
            self._must_plan = True
        if request in self._leaving:
            self._leaving.remove(request)
            self.scheduler.take_back(request)
        if self._door is not None and self._door.drop(request):
            self.engine.leave(request)
        else:
            self.engine.cancel(request)
        if self._door is not None and self._is_idle:
            self._plans_late = True

    def drop(self, request: Request, routed: Routed, now_ns: int) -> bool:
        """Drop `request`; return False if `finish` will do that, at the end of the current activity or of the next."""
        return self.give_up(request, now_ns, is_busy=self._is_under_way)

    def give_up(self, request: Request, now_ns: int, *, is_busy: bool) -> bool:
        """Drop `request`, as `drop` does. `is_busy`: something is under way, and `finish` follows."""
        if is_busy:
            if request not in self._dropping and request not in self._leaving:
                self._dropping.append(request)
            return False
        if request in self._leaving or self._leaves_later(request):
            return False
        self.cancel(request, now_ns)
        return True

    @property
    def has_leaving(self) -> bool:
        """Whether `finish` returns requests that the last plan has dropped, or the next one drops."""
        return bool(self._leaving)

    def _leaves_later(self, request: Request) -> bool:
        """Let the next plan drop `request`, if that plan is made already and knows it; return whether it is so."""
        if not self.scheduler.running.lag or self._plans_late or (self._door is None or self._door.has(request)):
            return False
        self.scheduler.give_up(request)
        self._leaving.append(request)
        return True

    def join(self, now_ns: int) -> bool:
        """Queue the requests that join the step planned at `now_ns`; return whether others wait for the next one."""
        plans_late, self._plans_late = self._plans_late, False
        door = self._door
        if door is None:
            return False
        for request in door.enter(is_late=plans_late or self._is_idle):
            self.engine.submit(request, now_ns)
        return door.num_requests > 0

    def end_transfers(self, now_ns: int) -> bool:
        """End the transfers that are due by `now_ns`; return whether any ended since the last step.

        If so, the next step must be planned. Between steps.
        """
        tiers, scheduler = self._tiers, self.scheduler
        if tiers is None:
            return False
        scheduler.settle()  # before transfers that end now release memory
        must_plan, self._must_plan = tiers.advance_to(now_ns) or self._must_plan, False
        if must_plan:
            scheduler.blocked = Blocked.NOT
        return must_plan

    @property
    def _is_idle(self) -> bool:
        """Whether no request runs or waits, but for those that join."""
        return not (self.scheduler.running.num_running or self.scheduler.num_waiting)

    def flush(self) -> None:
        """Hand all waiting events to the readers of the log."""
        self.engine.log.flush()

    def start(self, now_ns: int, until_ns: int = NEVER_NS) -> int:
        """Start a step at `now_ns`, and all identical following steps that start before `until_ns`.

        Return when the last one ends. `finish` must be called for that time before anything else is done.
        """
        assert not self._is_under_way
        self._is_under_way = True
        engine, tiers, scheduler = self.engine, self._tiers, self.scheduler
        others_join = must_plan = False
        if self._door is not None:
            others_join = self.join(now_ns)
        if tiers is not None:
            must_plan = self.end_transfers(now_ns)
        if must_plan:
            if not engine.has_work:
                return self.pause(now_ns)
        elif self._leaps and not scheduler.running.chunked:  # else the horizon is 0
            num_steps = scheduler.horizon(now_ns)
            if num_steps > 0:
                if others_join:
                    num_steps = 1
                if tiers is not None and tiers.next_ns < until_ns:
                    until_ns = tiers.next_ns
                waiting = scheduler.waiting
                if waiting.num_waiting and (holds_until_ns := waiting.holds_until_ns(now_ns)) < until_ns:
                    until_ns = holds_until_ns
                return self._leap(now_ns, until_ns, num_steps)
        if engine.prepare(now_ns):
            engine.carry_out(now_ns)
            return engine.now_ns
        self._plans_late = True
        # Requests that join need not wait: no step is under way.
        waits = engine.has_work and not (others_join or scheduler.has_released or self._leaving)
        return self.pause(self.next_ns(now_ns) if waits else now_ns)

    def rest(self) -> None:
        """Record that no step follows: requests that arrive are queued at once."""
        self._plans_late = True

    def prepare(self, now_ns: int) -> bool:
        """Plan the step that starts at `now_ns`; return whether it has any work."""
        if self.engine.prepare(now_ns):
            return True
        self._plans_late = True
        return False

    def finish(self) -> list[Request]:
        """End what `start` started; return the requests that finished, in admission order, then those dropped."""
        finished = self._end() if self._door is None else self._finish_behind(self._door)
        if self._dropping:
            dropping, self._dropping = self._dropping, []
            for request in dropping:
                if request not in finished and not self._leaves_later(request):
                    self.cancel(request, self.engine.now_ns)
                    finished.append(request)
        return finished

    def _finish_behind(self, door: Door) -> list[Request]:
        """End what `start` started, where requests wait for a step that knows them."""
        engine = self.engine
        for request in door.take_due():  # the next plan, which was made when this step began, knows them
            engine.submit(request, engine.now_ns)
        door.end(self._num_leapt or 1, has_prompts=not self._num_leapt and bool(engine.batch.chunks))
        leaving, self._leaving = self._leaving, []  # those that are added from here on leave later
        finished = self._end()
        if self._is_idle:
            self._plans_late = True
        for request in leaving:
            request.cancelled_ns = engine.now_ns
            finished.append(request)
        return finished

    def _end(self) -> list[Request]:
        """End the step, the leap or the pause; return the requests that finished."""
        self._is_under_way = False
        if self._num_leapt:
            return self._end_leap()
        if self.is_pausing:
            self.is_pausing = False
            self.engine.emit()
            return []
        return self.engine.end()

    def _end_leap(self) -> list[Request]:
        engine, scheduler = self.engine, self.scheduler
        num_leapt, self._num_leapt = self._num_leapt, 0
        emit = engine.log.emit_details
        if emit is not None:
            emit(StepEnded(scheduler.wheel.num_steps + num_leapt - 1, engine.now_ns))
        finished = scheduler.commit_leap(num_leapt, engine.now_ns)
        engine.emit()
        return finished

    def run_until(self, until_ns: int, finished: list[Request]) -> int:
        """Do steps as long as there is work and the next one starts before `until_ns`.

        Add the requests that finished to `finished`. Return a time before which another call would do nothing, unless
        a request arrives or is dropped.
        """
        engine, running, waiting = self.engine, self.scheduler.running, self.scheduler.waiting
        while True:
            if self._is_under_way:
                if engine.now_ns > until_ns:
                    return engine.now_ns
                ended = self.finish()
                if ended:
                    finished += ended
            now_ns = engine.now_ns
            # Most of `has_work` is inlined, because this runs before every step.
            if now_ns >= until_ns:
                return now_ns
            if not (running.num_running or waiting.num_waiting or self.has_work):
                return until_ns if self._tiers is not None else NEVER_NS
            self.start(now_ns, until_ns)

    def run_towards(self, until_ns: int, finished: list[Request], is_watched: bool) -> int:
        """Do steps as `run_until` does, but they may be left for later if nothing ends in them by `until_ns`.

        Return the time until which no request ends and no prompt is computed, and if `is_watched` no page becomes
        findable or is evicted; NEVER_NS without work.
        """
        while True:
            now_ns = self.engine.now_ns
            if self._is_under_way:
                if now_ns > until_ns:
                    return now_ns
                finished += self.finish()
            if now_ns >= until_ns:
                return now_ns if self.has_work else NEVER_NS
            if not self.has_work:
                return NEVER_NS
            if self._leaps and not self.num_joining:
                quiet_ns = self._quiet_until(now_ns, 2 * until_ns - now_ns + FAR_NS, is_watched)
                if quiet_ns is not None and quiet_ns > until_ns:
                    return quiet_ns
            self.start(now_ns, until_ns)

    def _quiet_until(self, now_ns: int, far_ns: int, is_watched: bool) -> int | None:
        """Return the end of the identical steps that could start now, or a time about `far_ns` if that is sooner.

        None if they cannot. `is_watched`: the time must also be before a page may be evicted, and before the last of
        the steps, which may fill a page.
        """
        num_steps = min(
            self.scheduler.horizon(now_ns),
            self.scheduler.cache.most_certain_steps,
            (far_ns - now_ns) // self._last_decode_ns + 1,
            MOST_STEPS,
        )
        next_ns = self.next_ns(now_ns)
        if num_steps < 1 or next_ns <= now_ns:
            return None
        if is_watched:
            scheduler = self.scheduler
            num_pages = (num_steps // scheduler.wheel.page_size + 1) * scheduler.wheel.num_decoding
            if scheduler.cache.frees_skipped or not scheduler.cache.has_empty(num_pages * scheduler.cache.page_blocks):
                return None
            num_steps -= 1
        return min(now_ns + self.decode_times(num_steps).total_ns, next_ns)

    def quiet_until(self, now_ns: int) -> int | None:
        """Return a time before which no request ends, if identical steps could start now; None if they cannot."""
        if not self._leaps or self.num_joining:
            return None
        return self._quiet_until(now_ns, now_ns + FAR_NS, is_watched=False)

    def next_ns(self, now_ns: int) -> int:
        """Return when the next transfer ends, or another request may become the head of the waiting queue."""
        next_ns = NEVER_NS if self._tiers is None else self._tiers.next_ns
        if self.scheduler.waiting.num_waiting:
            next_ns = min(next_ns, self.scheduler.waiting.holds_until_ns(now_ns))
        return next_ns

    def with_loads_ns(self, now_ns: int, duration_ns: int) -> int:
        """Return the duration of the planned step, which starts at `now_ns` and would take `duration_ns` alone."""
        return duration_ns if self._tiers is None else self._tiers.step_ns(now_ns, duration_ns)

    @property
    def decodes_by_rule(self) -> bool:
        """Whether `decode_times` gives a rule, which takes no more memory for many steps than for few."""
        return self._decode_times is not None

    def decode_times(self, num_steps: int) -> LeapTimes:
        """Return the durations of the next `num_steps` steps, if they are identical."""
        wheel = self.scheduler.wheel
        if self._decode_times is not None:
            by_rule: LeapTimes = self._decode_times(
                wheel.num_decoding, wheel.known_tokens, self._pool_tokens, num_steps
            )
            return by_rule
        durations_ns = self._executor.decode_ns(wheel.num_decoding, wheel.known_tokens, self._pool_tokens, num_steps)
        return LeapTimes(durations_ns)

    def pause(self, until_ns: int) -> int:
        """Compute nothing until `until_ns`, and return it; `finish` must follow then."""
        assert until_ns < NEVER_NS, "L8: there is work, nothing can be computed, and no transfer is under way"
        self.is_pausing = True
        self.engine.now_ns = until_ns
        return until_ns

    def _leap(self, now_ns: int, until_ns: int, num_steps: int) -> int:
        # Ask for no more durations than reach `until_ns`, estimated from the last one.
        num_wanted = (until_ns - now_ns) // self._last_decode_ns + 2
        if num_wanted < num_steps:
            num_steps = num_wanted
        if num_steps > MOST_STEPS:
            num_steps = MOST_STEPS
        times = self.decode_times(num_steps)
        times.end_before(until_ns - now_ns)
        return self.leap(now_ns, times)

    def leap(self, now_ns: int, times: LeapTimes) -> int:
        """Start identical steps of these durations at `now_ns`; return when the last one ends.

        If the cache ends the leap early, the remaining durations are dropped.
        """
        scheduler = self.scheduler
        wheel = scheduler.wheel
        cache, log = scheduler.cache, self.engine.log
        num_used, num_cached, num_released = cache.num_used, cache.num_cached, cache.num_released
        side_counts = scheduler.side_counts() if self.engine.has_sides else ()
        num_empty = cache.pool.num_empty
        mark, starts_ns = 0, NO_TIMES
        if log.emit_details is not None:
            mark = log.mark
            if cache.decodes is not None:
                starts_ns = list(accumulate(times.for_event, initial=now_ns))
        done = scheduler.advance(times.num_steps, starts_ns=starts_ns)
        pages_taken = done.taken
        num_steps = len(pages_taken)
        times.keep(num_steps)
        end_ns = now_ns + times.total_ns
        if end_ns > LATEST_NS:
            raise TooLateError
        self._last_decode_ns = times.last_ns or 1
        durations_ns = times.for_event
        if log.emit_details is not None and cache.decodes is None:
            last_ns = end_ns - times.last_ns
            happened = log.take_from(mark)
            for event in tell_by_step(happened, wheel.num_steps, now_ns, last_ns, durations_ns, pages_taken, num_empty):
                log.emit_details(event)
        if log.emit is not None:
            log.emit(
                LeapDone(
                    wheel.num_steps,
                    now_ns,
                    durations_ns,
                    pages_taken,
                    num_used,
                    num_cached,
                    num_released,
                    scheduler.running.num_running,
                    scheduler.num_waiting,
                    scheduler.blocked,
                    side_counts,
                    num_reserved=cache.num_reserved,
                    num_loading=0 if scheduler.loads is None else scheduler.loads.num_waiting,
                    parts=done.parts,
                )
            )
            self.engine.num_reserved_told = cache.num_reserved
        self._num_leapt = num_steps
        self.engine.now_ns = end_ns
        return end_ns


def tell_by_step(
    happened: list[Event],
    step: int,
    start_ns: int,
    last_ns: int,
    durations_ns: PerStep,
    pages_taken: PerStep,
    num_empty: int,
) -> list[Event]:
    """Return the events of a leap in the order of its steps. `start_ns`, `last_ns`: the starts of the first and last.

    A leap evicts only the pages that it needs beyond the empty ones, and makes pages findable only in its last step.
    """
    evicted: list[PagesRemoved | CopiesRemoved] = []
    rest: list[Event] = []
    for event in happened:
        if isinstance(event, PagesRemoved | CopiesRemoved):
            evicted.append(event)
        else:
            rest.append(event)
    last = len(durations_ns) - 1
    num_pages = pages_taken.total if isinstance(pages_taken, PagesDue) else sum(pages_taken)
    if not evicted and num_pages <= num_empty:  # its steps are not listed
        return [StepStarted(step + last, last_ns), *rest]
    told: list[Event] = []
    evicted.reverse()
    for index, (duration_ns, num_taken) in enumerate(zip(durations_ns, pages_taken, strict=True)):
        num_empty -= num_taken
        if num_empty < 0 or index == last:
            told.append(StepStarted(step + index, start_ns))
        while num_empty < 0 and evicted:
            run = evicted.pop()
            if isinstance(run, PagesRemoved) and run.is_held:
                told.append(run)  # it makes no page empty
                continue
            size = run.end_page - run.start_page
            cut = max(run.start_page, run.end_page + num_empty)
            told.append(msgspec.structs.replace(run, start_page=cut))
            if cut > run.start_page:
                evicted.append(msgspec.structs.replace(run, end_page=cut))
            num_empty = min(0, num_empty + size)
        start_ns += duration_ns
    return told + evicted + rest


class Door(ABC):
    """Requests that have arrived and that the scheduler does not know yet, in order of arrival.

    `coming`: the same requests, for a scheduler that has to have room for them.
    """

    __slots__ = ("_arrived", "_coming", "_due")

    def __init__(self, coming: set[Request]) -> None:
        self._coming = coming
        self._arrived: list[Request] = []
        self._due: list[Request] = []
        """Requests that had arrived when the last step was planned."""

    @property
    def num_requests(self) -> int:
        """The number of requests here."""
        return len(self._arrived) + len(self._due)

    def add(self, request: Request) -> None:
        """Let `request` wait here."""
        self._arrived.append(request)
        self._coming.add(request)

    @abstractmethod
    def enter(self, *, is_late: bool) -> list[Request]:
        """Return the requests that the step planned now knows. `is_late`: no step is under way."""

    def take_due(self) -> list[Request]:
        """Return the requests that the plan made last knows, and that are not in the queue yet."""
        due, self._due = self._due, []
        self._coming.difference_update(due)
        return due

    def end(self, num_steps: int, *, has_prompts: bool) -> None:  # noqa: B027  (only some doors count steps)
        """Note that a step, or so many identical ones, has ended."""

    def _take_all(self) -> list[Request]:
        self._due += self._arrived
        self._arrived = []
        return self.take_due()

    def has(self, request: Request) -> bool:
        """Return whether `request` waits here."""
        return request in self._arrived or request in self._due

    def drop(self, request: Request) -> bool:
        """Remove `request`; return whether it was waiting here."""
        for requests in (self._arrived, self._due):
            if request in requests:
                requests.remove(request)
                self._coming.remove(request)
                return True
        return False


class Joining(Door):
    """Requests that arrived while steps were planned ahead. Owner of the step that each joins.

    An engine that plans step n + 1 while step n runs, as vLLM does since 0.14, has already made that plan when a
    request arrives during step n. The request joins step n + 2. An idle engine has made no plan, and loses no step; nor
    does one whose plan was empty.
    """

    __slots__ = ()

    def enter(self, *, is_late: bool) -> list[Request]:
        """Return all if no step is under way; else let those that have arrived be known to the next plan."""
        if is_late:
            return self._take_all()
        if self._arrived:
            self._due += self._arrived
            self._arrived = []
        return []


class Receiving(Door):
    """Requests that a server receives before some of its steps only: SGLang's `scheduler_recv_interval`.

    A step of decodes, or without work, counts as 1, and one of prompts as 1,000. The server receives when the steps
    since the last time count as `interval`. One without requests goes through steps without work in no time.
    """

    __slots__ = ("_count", "_interval", "_last")

    def __init__(self, coming: set[Request], interval: int) -> None:
        super().__init__(coming)
        self._interval = interval
        self._count = 0
        self._last = 0
        """What the last step counts as."""

    def enter(self, *, is_late: bool) -> list[Request]:
        """Return all if the server receives before this step."""
        self._count += self._last
        if self._count < self._interval and not is_late:
            return []
        self._count = 0
        return self._take_all()

    def end(self, num_steps: int, *, has_prompts: bool) -> None:
        """Note that a step, or so many identical ones, has ended."""
        self._last = OF_PROMPTS if has_prompts else 1
        if num_steps > 1:  # of decodes, while no request arrived
            self._count = (self._count + num_steps - 1) % self._interval

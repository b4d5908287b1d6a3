"""The loop of a replay: a virtual clock, the engines, and the arrival of requests.

At any time, in this order: steps that end now are finished, requests that their clients give up now are dropped,
requests that arrive now are routed, and engines without a step under way start one. An engine may do many steps at
once, but never past a time at which an event could reach it.

An engine drops a request between steps. If a step is under way when a client gives up, the request is dropped at its
end, after the ends of requests in all steps that end at that time; whatever the result of that step, the request is
cancelled.

An engine lags behind, and catches up once something can end there or reach it. If requests arrive at known times, each
engine runs independently from arrival to arrival. If requests wait for others to end, the loop goes from end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Protocol

from mypy_extensions import mypyc_attr

from kvarts.core.request import Request, RequestState
from kvarts.sim.arrivals import Arrivals
from kvarts.sim.replica import NEVER_NS
from kvarts.sim.router import Routed
from kvarts.sim.traffic.trace import TraceRequest

__all__ = ["Driver", "Runner"]


class Runner(Protocol):
    """Something that advances independently on a device: one engine, or the engines of several models in turns.

    A step, or several, is under way from `start` until `run_until` reaches its end; a pause is under way as well.
    """

    @property
    def is_pausing(self) -> bool:
        """Whether it waits: nothing can be computed before something ends or a request arrives."""

    @property
    def has_work(self) -> bool:
        """Whether there is something to do or to wait for."""

    def wake(self, now_ns: int) -> None:
        """End a pause at `now_ns`, because a request arrives."""

    def start(self, now_ns: int, until_ns: int = NEVER_NS) -> int:
        """Start a step at `now_ns`, and all that are certain to follow and start before `until_ns`.

        Return when the last one ends, or the pause; NEVER_NS if there is nothing to start or to wait for.
        """

    def drop(self, request: Request, routed: Routed, now_ns: int) -> bool:
        """Drop `request` of `routed`, one of this runner's engines; the runner must not be pausing.

        Return False if a step is under way: then the request is dropped, and is among the finished, at its end.
        """

    def run_until(self, until_ns: int, finished: list[Request]) -> int:
        """Do steps as long as there is work and the next one starts before `until_ns`.

        Add the requests that finished to `finished`. Return a time before which another call would do nothing, unless
        a request arrives or is dropped.
        """

    def run_towards(self, until_ns: int, finished: list[Request], is_watched: bool) -> int:
        """Do steps as `run_until` does, but they may be left for later if nothing ends in them by `until_ns`.

        Return the time until which no request ends and no prompt is computed, and if `is_watched` no page becomes
        findable or is evicted; NEVER_NS without work.
        """

    def quiet_until(self, now_ns: int) -> int | None:
        """Return the time before which no request can end, if many steps could start now; None if only one could."""

    def flush(self) -> None:
        """Hand all waiting events to their readers."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Driver:
    """Runs one replay. `on_progress`, if given, is called with the number of requests that ended since its last call.

    `arrivals`: one per model; of requests that arrive at the same time, the first model's are taken first. `runners`
    advance the engines: runner i advances engine i of every model, or, if `ranks` is above 1, the `ranks` engines from
    i * ranks on.
    """

    def __init__(
        self,
        arrivals: Sequence[Arrivals],
        runners: Sequence[Runner],
        *,
        ranks: int = 1,
        on_progress: Callable[[int], object] | None = None,
    ) -> None:
        self._arrivals = arrivals
        self._runners = runners
        self._num_ranks = ranks
        self._all = range(len(runners) * ranks)
        # The engine of a request, and its arrival time, may depend on the end of any other.
        self._is_reactive = any(each.source.is_reactive or each.router.holds_requests for each in arrivals)
        self._tells_apart = ranks == 1 and len(arrivals) == 1 and arrivals[0].router.is_told and not self._is_reactive
        """Whether the router is updated only about the engines that moved, instead of about all."""
        self._is_told = any(each.router.is_told for each in arrivals) and not self._is_reactive
        """Whether runners are run as far as a router must know, for which they are `_due`."""
        self._on_progress = on_progress
        self._holding = [each for each in arrivals if each.router.holds_requests]
        self._polled = [each for each in arrivals if each.router.reads_metrics and each.router.staleness_ns]
        self._arriving = arrivals[0]
        """The model with the next arrival, as of `_look_ahead`."""
        self._in_engines: dict[Request, tuple[Arrivals, TraceRequest, int]] = {}
        """Requests that are in an engine, each with its model's arrivals, its row, and the number of the engine."""
        self._deadlines: list[tuple[int, int, int, Request]] = []
        """When clients give up, with the numbers of the model and of the request; ended requests are skipped."""
        self._given_up: set[Request] = set()
        """Requests that were given up while a step was under way."""
        self._num_refused = 0
        """Requests that an engine refused as they reached it, or that failed in one."""
        self._finished: list[Request] = []
        self._due: list[tuple[int, int]] = []
        """A heap of runners that lag behind, each with the time until which nothing ends there."""
        self._due_ns = [NEVER_NS] * len(runners)
        """That time of each runner, if no request arrives or is dropped there; NEVER_NS for one that is idle."""
        self._since_ns = [-1] * len(runners)
        """When each runner last began to lag behind, if the loop goes from end to end."""
        self._still_ns = [0] * len(runners)
        """For each runner, a time before which it does nothing, if no request arrives or is dropped there."""
        self._ran: list[int] = []
        """Runners that moved since the router was last updated, in no order."""
        self._roused = set(range(len(runners)))
        """Runners with an arrival or an end since their last start was attempted; the others have nothing to start."""

    def run(self) -> None:
        """Run until every request has ended."""
        if self._is_reactive:
            self._run_by_end()
        else:
            self._run_by_arrival()
        self._settle()
        for runner in self._runners:
            runner.flush()
        assert not (
            self._in_engines
            or any(runner.has_work for runner in self._runners)
            or any(of_model.router.num_held for of_model in self._holding)
        ), "L8: the replay ended with requests left over"

    def _run_by_arrival(self) -> None:
        deadlines = self._deadlines
        while (now_ns := self._next_ns() if deadlines else self._look_ahead()) != NEVER_NS:
            for of_model in self._polled:
                self._poll(of_model, now_ns)
            if deadlines and deadlines[0][0] <= now_ns:
                self._give_up(now_ns)
                continue
            if self._arriving.is_reported:
                self._inform(self._arriving, now_ns)
            self._arrive(now_ns)
        for index in range(len(self._runners)):
            self._run_alone(index, NEVER_NS)

    def _inform(self, of_model: Arrivals, now_ns: int) -> None:
        """Report to the router all that it may know at `now_ns`."""
        self._poll(of_model, now_ns)
        if not of_model.is_told:
            return
        if not self._is_reactive:
            self._run_due(now_ns, is_watched=of_model.router.reads_events)
        elif of_model.router.reads_events:
            self._run_all(now_ns)
        of_model.emit(now_ns, self._ran if self._tells_apart else self._all)
        self._ran.clear()

    def _poll(self, of_model: Arrivals, now_ns: int) -> None:
        poll_ns = of_model.poll_ns(now_ns)
        if poll_ns != NEVER_NS:
            self._run_all(poll_ns)
            # Where metrics are read at every arrival, those of a runner that did nothing are as they were.
            is_often = self._tells_apart and not of_model.router.staleness_ns
            of_model.poll(poll_ns, set(self._ran) or (0,) if is_often else self._all)

    def _run_all(self, until_ns: int) -> None:
        for index, still_ns in enumerate(self._still_ns):
            if still_ns <= until_ns:
                self._run_alone(index, until_ns)

    def _run_due(self, until_ns: int, *, is_watched: bool) -> None:
        """Run until everything that ends by `until_ns` has ended; a runner without an end may lag behind.

        `is_watched`: only if the contents of its cache do not change either.
        """
        due, due_ns, finished = self._due, self._due_ns, self._finished
        while due and due[0][0] <= until_ns:
            at_ns, index = heappop(due)
            if due_ns[index] != at_ns:
                continue  # it was updated since
            next_ns = due_ns[index] = self._runners[index].run_towards(until_ns, finished, is_watched)
            self._still_ns[index] = 0
            if self._tells_apart:
                self._ran.append(index)
            if next_ns <= until_ns:
                next_ns = due_ns[index] = until_ns + 1
            if next_ns != NEVER_NS:
                heappush(due, (next_ns, index))
            if finished:
                self._end(index, finished)
                finished.clear()

    def _run_alone(self, index: int, until_ns: int) -> None:
        finished = self._finished
        if self._tells_apart:
            self._ran.append(index)
        if self._is_reactive:
            self._catch_up(index, until_ns)
        else:
            self._still_ns[index] = self._runners[index].run_until(until_ns, finished)
        if finished:
            self._end(index, finished)
            finished.clear()

    def _run_by_end(self) -> None:
        self._start(0, self._next_ns())
        while True:
            now_ns = min(self._next_due_ns(), self._next_ns())
            if now_ns == NEVER_NS:
                break
            for of_model in self._polled:
                if of_model.poll_ns(now_ns) < now_ns:
                    self._poll(of_model, now_ns)
            self._end_due(now_ns)
            for of_model in self._polled:
                self._poll(of_model, now_ns)
            if self._holding:
                self._take_placed(now_ns)
            num_refused = self._num_refused
            while (next_ns := self._next_ns()) <= now_ns:
                if self._is_given_up_at(now_ns):
                    self._give_up(now_ns)
                    if self._holding:
                        self._take_placed(now_ns)
                    continue
                if self._arriving.is_reported:
                    self._inform(self._arriving, now_ns)
                self._arrive(now_ns)
            if self._holding and self._num_refused > num_refused:  # they have made room for others
                self._take_placed(now_ns)
            self._start(now_ns, next_ns)

    def _next_due_ns(self) -> int:
        """Return the first time at which a request may end; NEVER_NS if no runner has work."""
        due = self._due
        while due and self._due_ns[due[0][1]] != due[0][0]:
            heappop(due)  # it was updated since
        return due[0][0] if due else NEVER_NS

    def _end_due(self, now_ns: int) -> None:
        """Process all ends at `now_ns`. Clients and router receive dropped requests after all finished ones."""
        dropped: list[tuple[int, list[Request]]] = []
        finished = self._finished
        while self._next_due_ns() <= now_ns:
            index = heappop(self._due)[1]
            self._catch_up(index, now_ns)
            if self._given_up:
                are_dropped = [request for request in finished if request.state is not RequestState.FINISHED]
                if are_dropped:
                    dropped.append((index, are_dropped))
                    finished[:] = [request for request in finished if request not in are_dropped]
            self._end(index, finished)
            finished.clear()
        for index, are_dropped in dropped:
            self._end(index, are_dropped)

    def _catch_up(self, index: int, now_ns: int) -> None:
        """Run a runner until `now_ns`, and note the requests that finished, and when the step under way ends."""
        runner = self._runners[index]
        end_ns = self._still_ns[index] = runner.run_until(now_ns, self._finished)
        if end_ns <= now_ns:
            if self._since_ns[index] == now_ns < self._due_ns[index]:
                end_ns = runner.start(now_ns, now_ns + 1)  # before what happens after a step that took no time
            else:
                self._roused.add(index)
                end_ns = NEVER_NS
        self._set_due(index, end_ns)

    def _set_due(self, index: int, due_ns: int) -> None:
        if self._due_ns[index] != due_ns:
            self._due_ns[index] = due_ns
            if due_ns != NEVER_NS:
                heappush(self._due, (due_ns, index))

    def _next_ns(self) -> int:
        """Return when the next request arrives or is given up; NEVER_NS if neither is known to happen."""
        arrival_ns = self._look_ahead()
        deadlines = self._deadlines
        while deadlines:
            deadline_ns, number, _, request = deadlines[0]
            if request in self._in_engines or self._arrivals[number].holds(request):
                return min(arrival_ns, deadline_ns)
            heappop(deadlines)
        return arrival_ns

    def _is_given_up_at(self, now_ns: int) -> bool:
        return bool(self._deadlines) and self._deadlines[0][0] <= now_ns

    def _look_ahead(self) -> int:
        """Find the model with the next arrival; return the time of that arrival, NEVER_NS if none is known."""
        arrival_ns = NEVER_NS
        for of_model in self._arrivals:
            next_ns = of_model.source.next_ns()
            if next_ns is not None and next_ns < arrival_ns:
                arrival_ns = next_ns
                self._arriving = of_model
        return arrival_ns

    def _end(self, index: int, finished: list[Request]) -> None:
        for request in finished:
            of_model, row, engine = self._in_engines.pop(request)
            if request in self._given_up:
                self._given_up.remove(request)
                of_model.cancel(request, row, engine)
            else:
                of_model.end(request, row, engine)
        if finished:
            self._emit(len(finished))

    def _give_up(self, now_ns: int) -> None:
        """Drop the request with the next deadline, at `now_ns`."""
        _, number, _, request = heappop(self._deadlines)
        if self._arrivals[number].holds(request):
            self._arrivals[number].withdraw(request, now_ns)
            self._emit(1)
        if request not in self._in_engines:
            return
        of_model, _, engine = self._in_engines[request]
        index = engine // self._num_ranks
        self._run_alone(index, now_ns)
        if request not in self._in_engines:
            return
        runner = self._rouse(index, now_ns)
        self._given_up.add(request)
        if runner.drop(request, of_model.engines[engine], now_ns):
            self._end(index, [request])

    def _arrive(self, now_ns: int) -> None:
        """Send the request that arrives next, at `now_ns`, to an engine."""
        of_model = self._arriving
        request, row = of_model.pop(now_ns)
        if of_model.expires(now_ns):
            self._run_all(now_ns)  # what sessions leave is not free in steps before
        engine = of_model.choose(request, row, now_ns)
        if engine is not None:
            self._enter(of_model, request, row, engine, now_ns)
        elif of_model.has_timeout or row.cancel_after_ns is not None:
            self._expect(of_model, request, row, now_ns)

    def _take_placed(self, now_ns: int) -> None:
        """Send the requests that the router held and has now placed to their engines."""
        for of_model in self._holding:
            self._inform(of_model, now_ns)
            while placed := of_model.take_placed(now_ns):  # an engine that refuses one makes room for the next
                for request, row, engine in placed:
                    self._enter(of_model, request, row, engine, now_ns)

    def _enter(self, of_model: Arrivals, request: Request, row: TraceRequest, engine: int, now_ns: int) -> None:
        index = engine // self._num_ranks
        self._run_alone(index, now_ns)
        self._rouse(index, now_ns)
        reason = of_model.submit(request, row, engine, now_ns)
        if reason is None:
            self._in_engines[request] = of_model, row, engine
            if of_model.has_timeout or row.cancel_after_ns is not None:
                self._expect(of_model, request, row, now_ns)
        else:
            of_model.reject(request, row, engine, reason, now_ns)
            self._num_refused += 1
            self._emit(1)

    def _rouse(self, index: int, now_ns: int) -> Runner:
        """Wake the runner with this index at `now_ns`, mark it for the next start, and return it."""
        runner = self._runners[index]
        if self._is_told:
            self._set_due(index, now_ns)
        elif self._is_reactive:
            if runner.is_pausing:
                self._set_due(index, NEVER_NS)
            self._roused.add(index)
        runner.wake(now_ns)
        self._still_ns[index] = 0
        return runner

    def _expect(self, of_model: Arrivals, request: Request, row: TraceRequest, now_ns: int) -> None:
        deadline_ns = of_model.gives_up_ns(request, row)
        if deadline_ns is not None:
            number = self._arrivals.index(of_model)
            heappush(self._deadlines, (max(deadline_ns, now_ns), number, request.index, request))

    def _emit(self, num_ended: int) -> None:
        if self._on_progress is not None:
            self._on_progress(num_ended)

    def _settle(self) -> None:
        """End requests that are left when no runner can continue and no arrival is known; engines leave none."""

    def _start(self, now_ns: int, arrival_ns: int) -> None:
        """Start a step wherever there is work and no step under way, if a request may end in it.

        A runner with many certain steps lags behind until the last of them, since a request that ends on another may
        cause an arrival there. A runner that is alone starts them: nothing reaches it before `arrival_ns`.
        """
        is_alone = len(self._runners) == 1 and not (self._holding or self._polled)
        started, self._roused = sorted(self._roused), set()
        for index in started:
            runner = self._runners[index]
            if self._due_ns[index] == NEVER_NS and runner.has_work:
                due_ns = None if is_alone else runner.quiet_until(now_ns)
                if due_ns is None:
                    due_ns = runner.start(now_ns, arrival_ns if is_alone else now_ns + 1)
                else:
                    self._since_ns[index] = now_ns
                self._still_ns[index] = 0
                self._set_due(index, due_ns)
                if due_ns == NEVER_NS:
                    self._roused.add(index)  # it waits for something, which may happen without a notification

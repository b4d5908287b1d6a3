"""Arrival of a trace's requests: at their times (open loop), or as others complete (closed loop).

A source gives the time of the next arrival and hands out the request. It must be notified when a request is done, since
that may admit another. In both loops a turn waits for the previous turn of its session, and a request for those in its
`after`.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Protocol

import msgspec

from kvarts.base.errors import InputError
from kvarts.base.limits import LATEST_NS, TooLateError
from kvarts.sim.traffic.trace import Trace, TraceRequest

__all__ = ["ClosedLoop", "OpenLoop", "Source", "source_of", "with_pauses"]


class Source(Protocol):
    """Requests in the order in which they arrive.

    Promises: times never decrease, and a request reported as done at t causes no arrival before t.
    """

    is_reactive: bool
    """Whether the end of a request can cause an arrival."""

    def next_ns(self) -> int | None:
        """Return the time of the next arrival; None if none is known."""

    def pop(self) -> TraceRequest:
        """Remove and return the request that arrives next."""

    def done(self, request: TraceRequest, now_ns: int) -> None:
        """Record that `request` ended or was rejected at `now_ns`."""

    def again(self, request: TraceRequest, now_ns: int) -> bool:
        """Record that the client abandoned `request` at `now_ns`; return whether it will send it again."""

    def has_turns_after(self, request: TraceRequest) -> bool:
        """Return whether a later turn of its session waits for `request`."""


class _Waits:
    """Requests that wait for others. Owner of how many each still waits for, and its earliest possible arrival.

    Raises InputError for a duplicate row, for a wait for a missing row, and for cyclic waits.
    """

    def __init__(self, trace: Trace) -> None:
        self.requests = list(trace)
        self.roots: list[TraceRequest] = []
        """Requests that wait for none, in trace order."""
        self.places: dict[int, int] = {}
        """By row: order of simultaneous arrivals, which is that of their sessions in the trace."""
        self._waiting: dict[int, TraceRequest] = {}
        self._num_left: dict[int, int] = {}
        self._ready_ns: dict[int, int] = {}
        self._on_end: dict[int, list[tuple[int, int]]] = {}
        self._on_arrival: dict[int, list[tuple[int, int]]] = {}
        self._turns_left: dict[str, int] = {}
        last_turns: dict[str, int] = {}
        first_turns: dict[str, int] = {}
        rows = {request.row for request in self.requests}
        if len(rows) < len(self.requests):
            raise InputError("has two requests of one row, and some wait for others", path=trace.name, field="row")
        for place, request in enumerate(self.requests):
            row, name = request.row, request.session_id
            self.places[row] = place if name is None else first_turns.setdefault(name, place)
            before = None if name is None else last_turns.get(name)
            if name is not None:
                last_turns[name] = row
                self._turns_left[name] = self._turns_left.get(name, 0) + 1
            num_left = len(request.after)
            for each in request.after:
                if each.row not in rows:
                    raise InputError(
                        f"row {row + 1} waits for row {each.row + 1}, which is not there",
                        path=trace.name,
                        field="after",
                    )
                edges = self._on_arrival if each.of_arrival else self._on_end
                edges.setdefault(each.row, []).append((row, each.delay_ns))
            if not num_left and before is not None:
                num_left = 1
                self._on_end.setdefault(before, []).append((row, request.delay_ns or 0))
            if num_left:
                self._waiting[row] = request
                self._num_left[row] = num_left
                self._ready_ns[row] = 0
            else:
                self.roots.append(request)
        self._check(trace)

    def _check(self, trace: Trace) -> None:
        """Raise InputError for requests that can never arrive, because they wait for each other in a cycle."""
        left = dict(self._num_left)
        ready = [request.row for request in self.roots]
        while ready:
            row = ready.pop()
            for waiter, _ in (*self._on_end.get(row, ()), *self._on_arrival.get(row, ())):
                left[waiter] -= 1
                if not left[waiter]:
                    del left[waiter]
                    ready.append(waiter)
        if left:
            raise InputError(
                f"row {min(left) + 1} waits for a request that waits for it", path=trace.name, field="after"
            )

    def arrived(
        self, request: TraceRequest, now_ns: int, scaled: Callable[[int], int]
    ) -> list[tuple[int, TraceRequest]]:
        """Record an arrival; return the requests that now wait for nothing, each with its earliest arrival."""
        if request.session_id is not None:
            self._turns_left[request.session_id] -= 1
        return self._released(self._on_arrival.pop(request.row, None), now_ns, scaled)

    def ended(self, request: TraceRequest, now_ns: int, scaled: Callable[[int], int]) -> list[tuple[int, TraceRequest]]:
        """Record an end; return as `arrived` does."""
        return self._released(self._on_end.pop(request.row, None), now_ns, scaled)

    def has_turns_after(self, request: TraceRequest) -> bool:
        """Return whether later turns of its session have yet to arrive."""
        return request.session_id is not None and self._turns_left[request.session_id] > 0

    def _released(
        self, edges: list[tuple[int, int]] | None, now_ns: int, scaled: Callable[[int], int]
    ) -> list[tuple[int, TraceRequest]]:
        released = []
        for row, delay_ns in edges or ():
            ready_ns = max(self._ready_ns[row], now_ns + scaled(delay_ns))
            self._ready_ns[row] = ready_ns
            self._num_left[row] -= 1
            if not self._num_left[row]:
                released.append((max(ready_ns, now_ns), self._waiting.pop(row)))
                del self._num_left[row], self._ready_ns[row]
        return released


class _Loop:
    """Common part of both loops: the next request of the trace, and requests whose waits are over.

    Among simultaneous arrivals, those that waited are first, in the order of their sessions in the trace.
    """

    def __init__(self, trace: Trace) -> None:
        self._waits = _Waits(trace) if trace.has_sessions else None
        # A turn may be due long before its row in the file, so with sessions all rows are read first.
        self._rows = iter(trace if self._waits is None else self._waits.roots)
        self._later: list[tuple[int, int, int, TraceRequest]] = []  # (arrival, place, row, request)
        self._is_stream = trace.requests is None
        self._upcoming: TraceRequest | None = None
        self._upcoming_ns = 0
        self._read_ns = 0
        """The time in the trace of the request that was read last."""

    def next_ns(self) -> int | None:
        """Return the time of the next turn or the next request of the trace."""
        if self._later and self._is_turn_next():
            return self._later[0][0]
        return None if self._upcoming is None else self._upcoming_ns

    def pop(self) -> TraceRequest:
        """Remove and return the next due turn, or else the next request of the trace."""
        arrival_ns, request = self._take()
        if self._waits is not None:
            for ready_ns, waiter in self._waits.arrived(request, arrival_ns, self._scaled):
                self._push(self._no_earlier(ready_ns, waiter), waiter)
        return request

    def _take(self) -> tuple[int, TraceRequest]:
        if self._later and self._is_turn_next():
            arrival_ns, _, _, request = heappop(self._later)
            return arrival_ns, request
        assert self._upcoming is not None
        request, arrival_ns = self._upcoming, self._upcoming_ns
        self._advance()
        return arrival_ns, request

    def again(self, request: TraceRequest, now_ns: int) -> bool:
        """Return False: an abandoned request is not sent again."""
        return False

    def has_turns_after(self, request: TraceRequest) -> bool:
        """Return whether a later turn of its session waits for `request`."""
        return self._waits is not None and self._waits.has_turns_after(request)

    def _release(self, request: TraceRequest, now_ns: int) -> None:
        """Schedule the requests whose last wait was for `request`."""
        if self._waits is not None:
            for ready_ns, waiter in self._waits.ended(request, now_ns, self._scaled):
                self._push(self._no_earlier(ready_ns, waiter), waiter)

    def _no_earlier(self, ready_ns: int, request: TraceRequest) -> int:
        """Return the arrival of a request whose waits end at `ready_ns`, taking its own time into account."""
        raise NotImplementedError

    def _scaled(self, time_ns: int) -> int:
        """Return a delay of the trace at the replay's speed."""
        return time_ns

    def _is_turn_next(self) -> bool:
        """Return whether the first due turn is next. There must be one."""
        return self._upcoming is None or self._later[0][0] <= self._upcoming_ns

    def _advance(self) -> None:
        """Read the next request of the trace."""
        request = self._upcoming = next(self._rows, None)
        if request is None:
            return
        before_ns, arrival_ns = self._read_ns, request.arrival_ns
        self._read_ns = arrival_ns
        if self._waits is None:
            if self._is_stream and (request.session_id is not None or request.after):
                raise InputError(
                    f"row {request.row + 1} belongs to a session, or waits for others",
                    field="session_id" if request.session_id is not None else "after",
                    hint="Make the Trace with has_sessions=True, or pass its requests as a list.",
                )
            if arrival_ns < before_ns:
                raise InputError(
                    f"row {request.row + 1} arrives before the row before it",
                    field="arrival_ns",
                    hint="Sort the requests by time.",
                )

    def _push(self, arrival_ns: int, request: TraceRequest) -> None:
        assert self._waits is not None
        if arrival_ns > LATEST_NS:
            raise TooLateError
        heappush(self._later, (arrival_ns, self._waits.places[request.row], request.row, request))


class OpenLoop(_Loop):
    """Requests arrive at their times. Times and delays are divided by `speedup`."""

    def __init__(self, trace: Trace, *, speedup: float = 1.0) -> None:
        super().__init__(trace)
        self.is_reactive = trace.has_sessions
        self._speedup = speedup
        self._advance()

    def done(self, request: TraceRequest, now_ns: int) -> None:
        """Schedule the requests that waited for `request`."""
        if self._waits is not None:
            self._release(request, now_ns)

    def _no_earlier(self, ready_ns: int, request: TraceRequest) -> int:
        return max(ready_ns, self._scaled(request.arrival_ns)) if request.delay_ns is None else ready_ns

    def _scaled(self, time_ns: int) -> int:
        if self._speedup == 1.0:
            return time_ns
        scaled_ns = time_ns / self._speedup
        if scaled_ns > LATEST_NS:
            raise TooLateError
        return round(scaled_ns)

    def _advance(self) -> None:
        super()._advance()
        if self._upcoming is not None:
            self._upcoming_ns = self._read_ns if self._speedup == 1.0 else self._scaled(self._read_ns)


class ClosedLoop(_Loop):
    """`concurrency` plays are active at any time; when one ends, the next in order begins.

    A play is a session, a set of requests that depend on each other, or a single request. Its start time in the trace
    is ignored. A turn arrives its delay after the requests it waits for; meanwhile the play keeps its slot.
    """

    is_reactive = True

    def __init__(self, trace: Trace, *, concurrency: int) -> None:
        super().__init__(trace)
        self._num_free = concurrency
        self._play_of: dict[int, int] = {}
        self._num_left: dict[int, int] = {}
        """Number of requests of each play that have not ended."""
        self._other_roots: dict[int, list[TraceRequest]] = {}
        self._first_ns: dict[int, int] = {}
        self._begun_ns: dict[int, int] = {}
        if self._waits is not None:
            self._rows = iter(self._plays(self._waits))
        self._advance()

    def _plays(self, waits: _Waits) -> list[TraceRequest]:
        """Return the first request of each play, which triggers the others."""
        from kvarts.sim.traffic.graph import components

        begin: dict[int, TraceRequest] = {}
        for request, play in zip(waits.requests, components(waits.requests), strict=True):
            self._play_of[request.row] = play
            self._num_left[play] = self._num_left.get(play, 0) + 1
        for root in waits.roots:
            play = self._play_of[root.row]
            if begin.setdefault(play, root) is root:
                self._first_ns[play] = root.arrival_ns
            else:
                self._other_roots.setdefault(play, []).append(root)
        return list(begin.values())

    def next_ns(self) -> int | None:
        """Return the time of the next arrival; a new play may begin at once if a slot is free."""
        if not self._num_free:
            return self._later[0][0] if self._later else None
        return super().next_ns()

    def _take(self) -> tuple[int, TraceRequest]:
        """Take the next request. If it begins a play, it takes a slot, and the play's other roots are scheduled."""
        is_turn = bool(self._later) and self._is_turn_next()
        arrival_ns, request = super()._take()
        if not is_turn:
            self._num_free -= 1
            if self._waits is not None:
                play = self._play_of[request.row]
                self._begun_ns[play] = arrival_ns
                for root in self._other_roots.pop(play, ()):
                    self._push(arrival_ns + root.arrival_ns - self._first_ns[play], root)
        return arrival_ns, request

    def done(self, request: TraceRequest, now_ns: int) -> None:
        """Schedule the requests that waited for `request`; if it was the last of its play, free the slot."""
        self._release(request, now_ns)
        if self._waits is not None:
            play = self._play_of[request.row]
            self._num_left[play] -= 1
            if self._num_left[play]:
                return
        self._num_free += 1
        self._upcoming_ns = now_ns

    def _no_earlier(self, ready_ns: int, request: TraceRequest) -> int:
        if request.delay_ns is not None or not request.after:
            return ready_ns
        play = self._play_of[request.row]
        return max(ready_ns, self._begun_ns[play] + request.arrival_ns - self._first_ns[play])

    def _is_turn_next(self) -> bool:
        return not self._num_free or super()._is_turn_next()


class Retrying:
    """A source whose clients send abandoned requests again, `after_ns` later, at most `most` times each."""

    is_reactive = True

    def __init__(self, source: Source, *, most: int, after_ns: int) -> None:
        self._source = source
        self._most = most
        self._after_ns = after_ns
        self._num_sent: dict[int, int] = {}
        self._later: list[tuple[int, int, TraceRequest]] = []
        self._num_later = 0
        self.done = source.done
        self.has_turns_after = source.has_turns_after

    def next_ns(self) -> int | None:
        """Return the time at which the next request is sent, first or again."""
        next_ns = self._source.next_ns()
        if self._later and (next_ns is None or self._later[0][0] <= next_ns):
            return self._later[0][0]
        return next_ns

    def pop(self) -> TraceRequest:
        """Remove and return the next request to be sent."""
        next_ns = self._source.next_ns()
        if self._later and (next_ns is None or self._later[0][0] <= next_ns):
            return heappop(self._later)[-1]
        return self._source.pop()

    def again(self, request: TraceRequest, now_ns: int) -> bool:
        """Schedule `request` again, unless it was retried `most` times."""
        num_sent = self._num_sent.get(request.row, 0)
        if num_sent == self._most:
            return False
        self._num_sent[request.row] = num_sent + 1
        if now_ns + self._after_ns > LATEST_NS:
            raise TooLateError
        self._num_later += 1
        heappush(self._later, (now_ns + self._after_ns, self._num_later, request))
        return True


class Delayed:
    """A source whose requests reach an engine `delay_ns` after they were sent.

    `is_closed`: a client sends the next request while the last tokens of the one before pass the front end, so that the
    engine always has the stated number in flight. With a gap of constant length instead, requests that end within it
    would be admitted together from then on.
    """

    def __init__(self, source: Source, delay_ns: int, *, is_closed: bool) -> None:
        self._source = source
        self._delay_ns = delay_ns
        self._is_closed = is_closed
        self.is_reactive = source.is_reactive
        self.pop = source.pop
        self.done = source.done
        self.again = source.again
        self.has_turns_after = source.has_turns_after

    def next_ns(self) -> int | None:
        """Return the time at which the next request reaches an engine."""
        next_ns = self._source.next_ns()
        if next_ns is None:
            return None
        return max(next_ns, self._delay_ns) if self._is_closed else next_ns + self._delay_ns


def with_pauses(trace: Trace) -> Trace:
    """Return `trace` as Dynamo reads it: a turn with a time of its own, but no delay, has one.

    It is the time between the stamps of the turn and of the one before it, and begins when that one is done.
    """
    if not trace.has_sessions:
        return trace
    stamps: dict[str, int] = {}
    requests = []
    for request in trace:
        name = request.session_id
        if name is not None and name in stamps and request.delay_ns is None and not request.after:
            request = msgspec.structs.replace(request, delay_ns=request.arrival_ns - stamps[name])  # noqa: PLW2901
        if name is not None:
            stamps[name] = request.arrival_ns
        requests.append(request)
    return Trace(requests, name=trace.name)


def source_of(
    trace: Trace,
    *,
    concurrency: int | None,
    speedup: float,
    delay_ns: int = 0,
    retries: int = 0,
    retry_after_ns: int = 0,
) -> Source:
    """Return the trace's own source, else a closed loop if `concurrency` is given, or an open one.

    Requests arrive `delay_ns` after being sent.

    `retries`: how often clients repeat abandoned requests, each `retry_after_ns` later.
    """
    source: Source
    if trace.source_of is not None:
        source = trace.source_of(trace)
    else:
        source = OpenLoop(trace, speedup=speedup) if concurrency is None else ClosedLoop(trace, concurrency=concurrency)
    if retries:
        source = Retrying(source, most=retries, after_ns=retry_after_ns)
    return Delayed(source, delay_ns, is_closed=concurrency is not None) if delay_ns else source

"""When the requests of a trace arrive: at their times (open loop), or when others are done (closed loop).

A source answers when the next request arrives and hands it out; it is told when one is done, because that may let
another one in. A session's turn waits for the turn before it in either loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Protocol

from kvarts.errors import InputError
from kvarts.replayer.trace import Trace, TraceRequest

__all__ = ["ClosedLoop", "OpenLoop", "Source"]


class Source(Protocol):
    """Promises: times never go back, and a request told done at t brings no arrival before t."""

    is_reactive: bool
    """Whether being told that a request is done can bring an arrival."""

    def next_ns(self) -> int | None:
        """When the next request arrives; None if none is known to come."""

    def pop(self) -> TraceRequest:
        """Hands out the request that arrives next."""

    def done(self, request: TraceRequest, now_ns: int) -> None:
        """`request` ended, or was rejected, at `now_ns`."""


class _Sessions:
    """Turns that wait for the turn before them."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[TraceRequest]] = {}

    def hold(self, request: TraceRequest) -> bool:
        """Keeps `request` back if an earlier turn of its session is not done."""
        session_id = request.session_id
        if session_id is None:
            return False
        waiting = self._waiting.get(session_id)
        if waiting is None:
            self._waiting[session_id] = deque()
            return False
        waiting.append(request)
        return True

    def done(self, request: TraceRequest) -> TraceRequest | None:
        """The turn that `request` kept waiting."""
        if request.session_id is None:
            return None
        waiting = self._waiting[request.session_id]
        if waiting:
            return waiting.popleft()
        del self._waiting[request.session_id]
        return None


class OpenLoop:
    """Requests arrive at their times, divided by `speedup`; so are the delays between a session's turns."""

    def __init__(self, trace: Trace, *, speedup: float = 1.0) -> None:
        self.is_reactive = trace.has_sessions
        self._speedup = speedup
        self._sessions = _Sessions()
        self._later: list[tuple[int, int, TraceRequest]] = []  # (arrival, row, turn whose predecessor is done)
        # A turn may arrive long before its row would be read, so with sessions all rows are read first.
        self._rows = iter(list(trace) if self.is_reactive else trace)
        self._upcoming: TraceRequest | None = None
        self._upcoming_ns = 0
        self._advance()

    def next_ns(self) -> int | None:
        """See Source."""
        if self._later and (self._upcoming is None or self._later[0][0] < self._upcoming_ns):
            return self._later[0][0]
        return None if self._upcoming is None else self._upcoming_ns

    def pop(self) -> TraceRequest:
        """See Source."""
        if self._later and (self._upcoming is None or self._later[0][0] < self._upcoming_ns):
            return heappop(self._later)[2]
        request = self._upcoming
        assert request is not None
        self._advance()
        return request

    def done(self, request: TraceRequest, now_ns: int) -> None:
        """See Source."""
        turn = self._sessions.done(request)
        if turn is not None:
            if turn.delay_ns is not None:
                arrival_ns = now_ns + self._scaled(turn.delay_ns)
            else:
                arrival_ns = max(now_ns, self._scaled(turn.arrival_ns))
            heappush(self._later, (arrival_ns, turn.row, turn))

    def _scaled(self, time_ns: int) -> int:
        return time_ns if self._speedup == 1.0 else round(time_ns / self._speedup)

    def _advance(self) -> None:
        """Reads on to the next request that does not wait for another."""
        last_ns = 0 if self._upcoming is None else self._upcoming.arrival_ns
        for request in self._rows:
            if request.arrival_ns < last_ns and request.delay_ns is None:
                raise InputError(
                    f"row {request.row + 1} arrives before the row before it",
                    field="arrival_ns",
                    hint="Sort the requests by time.",
                )
            if request.session_id is not None:
                if not self.is_reactive:
                    raise InputError(
                        f"row {request.row + 1} belongs to a session",
                        field="session_id",
                        hint="Say has_sessions=True where the Trace is made, or pass its requests as a list.",
                    )
                if self._sessions.hold(request):
                    continue
            self._upcoming = request
            self._upcoming_ns = self._scaled(request.arrival_ns)
            return
        self._upcoming = None


class ClosedLoop:
    """`concurrency` requests are in flight at any time; when one is done, the next in order arrives.

    Times of the trace do not matter; a session's turn is let in no earlier than its delay after the turn before it.
    """

    is_reactive = True

    def __init__(self, trace: Trace, *, concurrency: int) -> None:
        self._requests = iter(trace)
        self._num_free = concurrency
        self._sessions = _Sessions()
        self._later: list[tuple[int, int, TraceRequest]] = []
        self._upcoming: TraceRequest | None = None
        self._now_ns = 0
        self._advance()

    def next_ns(self) -> int | None:
        """See Source."""
        if not self._num_free:
            return None
        if self._later and (self._upcoming is None or self._later[0][0] <= self._now_ns):
            return max(self._now_ns, self._later[0][0])
        return None if self._upcoming is None else self._now_ns

    def pop(self) -> TraceRequest:
        """See Source."""
        self._num_free -= 1
        if self._later and (self._upcoming is None or self._later[0][0] <= self._now_ns):
            return heappop(self._later)[2]
        request = self._upcoming
        assert request is not None
        self._advance()
        return request

    def done(self, request: TraceRequest, now_ns: int) -> None:
        """See Source."""
        self._now_ns = now_ns
        self._num_free += 1
        turn = self._sessions.done(request)
        if turn is not None:
            heappush(self._later, (now_ns + (turn.delay_ns or 0), turn.row, turn))

    def _advance(self) -> None:
        requests: Iterator[TraceRequest] = self._requests
        for request in requests:
            if not self._sessions.hold(request):
                self._upcoming = request
                return
        self._upcoming = None

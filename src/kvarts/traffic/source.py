"""When the requests of a trace arrive: at their times (open loop), or when others are done (closed loop).

A source answers when the next request arrives and hands it out; it is told when one is done, because that may let
another one in. A session's turn waits for the turn before it in either loop.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import Protocol

from kvarts.errors import InputError
from kvarts.limits import LATEST_NS, TooLateError
from kvarts.traffic.trace import Trace, TraceRequest

__all__ = ["ClosedLoop", "OpenLoop", "Source", "source_of"]


class Source(Protocol):
    """Requests in the order in which they arrive.

    Promises: times never go back, and a request reported as done at t brings no arrival before t.
    """

    is_reactive: bool
    """Whether the end of a request can bring an arrival."""

    def next_ns(self) -> int | None:
        """Return when the next request arrives; None if none is known to come."""

    def pop(self) -> TraceRequest:
        """Remove and return the request that arrives next."""

    def done(self, request: TraceRequest, now_ns: int) -> None:
        """Take note that `request` ended, or was rejected, at `now_ns`."""

    def has_turns_after(self, request: TraceRequest) -> bool:
        """Return whether a turn of its session waits for `request`."""


class _Loop:
    """What both loops share: the next request of the trace, and turns that are due since the turn before them is done.

    At one time, turns go first, in the order in which their sessions appear in the trace.
    """

    def __init__(self, trace: Trace) -> None:
        self._has_sessions = trace.has_sessions
        self._turns: dict[str, deque[TraceRequest]] = {}
        """For each session, the turns that wait for the turn before them."""
        # A turn may be due long before its row would be read, so with sessions all rows are read first.
        self._rows = iter([row for row in trace if not self._wait_for_turn(row)] if self._has_sessions else trace)
        self._places = {session_id: place for place, session_id in enumerate(self._turns)}
        self._later: list[tuple[int, int, TraceRequest]] = []  # (arrival, place of the session in the trace, turn)
        self._upcoming: TraceRequest | None = None
        self._upcoming_ns = 0

    def next_ns(self) -> int | None:
        """Return when the next turn or the next request of the trace arrives."""
        if self._later and self._is_turn_next():
            return self._later[0][0]
        return None if self._upcoming is None else self._upcoming_ns

    def pop(self) -> TraceRequest:
        """Remove and return the turn that is due, or else the next request of the trace."""
        if self._later and self._is_turn_next():
            return heappop(self._later)[2]
        request = self._upcoming
        assert request is not None
        self._advance()
        return request

    def has_turns_after(self, request: TraceRequest) -> bool:
        """Return whether a turn of its session waits for `request`."""
        return request.session_id is not None and bool(self._turns.get(request.session_id))

    def _is_turn_next(self) -> bool:
        """Return whether the first of the turns that are due, of which there are some, comes next."""
        return self._upcoming is None or self._later[0][0] <= self._upcoming_ns

    def _advance(self) -> None:
        """Read the next request of the trace."""
        before = self._upcoming
        request = self._upcoming = next(self._rows, None)
        if request is not None and not self._has_sessions:
            if request.session_id is not None:
                raise InputError(
                    f"row {request.row + 1} belongs to a session",
                    field="session_id",
                    hint="Say has_sessions=True where the Trace is made, or pass its requests as a list.",
                )
            if before is not None and request.arrival_ns < before.arrival_ns:
                raise InputError(
                    f"row {request.row + 1} arrives before the row before it",
                    field="arrival_ns",
                    hint="Sort the requests by time.",
                )

    def _wait_for_turn(self, request: TraceRequest) -> bool:
        """Keep `request` back if it is not the first turn of its session; return whether it is kept."""
        if request.session_id is None:
            return False
        turns = self._turns.get(request.session_id)
        if turns is None:
            self._turns[request.session_id] = deque()
            return False
        turns.append(request)
        return True

    def _push_turn(self, arrival_ns: int, turn: TraceRequest) -> None:
        assert turn.session_id is not None
        if arrival_ns > LATEST_NS:
            raise TooLateError
        heappush(self._later, (arrival_ns, self._places[turn.session_id], turn))

    def _turn_after(self, request: TraceRequest) -> TraceRequest | None:
        """Return the turn that waited for `request`; None if there is none."""
        turns = self._turns.get(request.session_id) if request.session_id is not None else None
        return turns.popleft() if turns else None


class OpenLoop(_Loop):
    """Requests arrive at their times, divided by `speedup`; so are the delays between a session's turns."""

    def __init__(self, trace: Trace, *, speedup: float = 1.0) -> None:
        super().__init__(trace)
        self.is_reactive = trace.has_sessions
        self._speedup = speedup
        self._advance()

    def done(self, request: TraceRequest, now_ns: int) -> None:
        """Let the session's next turn arrive at its time, or after its delay."""
        turn = self._turn_after(request)
        if turn is not None:
            if turn.delay_ns is not None:
                arrival_ns = now_ns + self._scaled(turn.delay_ns)
            else:
                arrival_ns = max(now_ns, self._scaled(turn.arrival_ns))
            self._push_turn(arrival_ns, turn)

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
            self._upcoming_ns = self._scaled(self._upcoming.arrival_ns)


class ClosedLoop(_Loop):
    """`concurrency` sessions are open at any time; when one is through, the next in order begins.

    A request without a session is a session of one turn. Times of the trace do not matter; a session's next turn comes
    its delay after the turn before it, and the session keeps its place meanwhile.
    """

    is_reactive = True

    def __init__(self, trace: Trace, *, concurrency: int) -> None:
        super().__init__(trace)
        self._num_free = concurrency
        self._advance()

    def next_ns(self) -> int | None:
        """Return when the next request arrives: a turn's time, or at once while a session may begin."""
        if not self._num_free:
            return self._later[0][0] if self._later else None
        return super().next_ns()

    def pop(self) -> TraceRequest:
        """Remove and return the next request; one that begins a session takes a place."""
        is_turn = bool(self._later) and self._is_turn_next()
        request = super().pop()
        if not is_turn:
            self._num_free -= 1
        return request

    def done(self, request: TraceRequest, now_ns: int) -> None:
        """Let the session's next turn arrive after its delay, or give back the place of its session."""
        turn = self._turn_after(request)
        if turn is None:
            self._num_free += 1
            self._upcoming_ns = now_ns
        else:
            self._push_turn(now_ns + (turn.delay_ns or 0), turn)

    def _is_turn_next(self) -> bool:
        return not self._num_free or super()._is_turn_next()


class Delayed:
    """Another source, of which every request reaches an engine `delay_ns` after it was sent."""

    def __init__(self, source: Source, delay_ns: int) -> None:
        self._source = source
        self._delay_ns = delay_ns
        self.is_reactive = source.is_reactive
        self.pop = source.pop
        self.done = source.done
        self.has_turns_after = source.has_turns_after

    def next_ns(self) -> int | None:
        """Return when the next request reaches an engine."""
        next_ns = self._source.next_ns()
        return None if next_ns is None else next_ns + self._delay_ns


def source_of(trace: Trace, *, concurrency: int | None, speedup: float, delay_ns: int = 0) -> Source:
    """Return a closed loop if a `concurrency` is given, else an open one; requests are `delay_ns` under way."""
    source: Source
    source = OpenLoop(trace, speedup=speedup) if concurrency is None else ClosedLoop(trace, concurrency=concurrency)
    return Delayed(source, delay_ns) if delay_ns else source

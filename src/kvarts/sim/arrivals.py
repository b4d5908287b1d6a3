"""The incoming requests of one model: their source, the engine that each is sent to, and their outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from kvarts.core.request import Request, RequestState
from kvarts.sim.report.requests import NO_REPLICA, REJECTED, RequestLog
from kvarts.sim.router import Informed, Routed, Router
from kvarts.sim.traffic.source import Source
from kvarts.sim.traffic.trace import Trace, TraceRequest

if TYPE_CHECKING:
    from kvarts.sim.config import ReplayConfig

__all__ = ["Arrivals", "SessionsKept"]


class SessionsKept(Protocol):
    """The state that engines keep of a trace's sessions between turns.

    Promises: it changes only its own state, and requests before they are submitted.
    """

    @property
    def totals(self) -> Mapping[str, int]:
        """Counts over all sessions, for the report."""

    def replica_of(self, row: TraceRequest, now_ns: int) -> int | None:
        """Return the replica that has the session of `row`; None if none has: the router then chooses."""

    def expired(self, now_ns: int) -> list[str]:
        """Return the sessions that the next arrival, at `now_ns`, removes."""

    def begin(self, request: Request, row: TraceRequest, replica: int) -> str | None:
        """Make `request` the next turn of its session; return the reason if it cannot be, else None."""

    def end(
        self, request: Request, row: TraceRequest, now_ns: int, *, is_refused: bool, is_sent_again: bool = False
    ) -> None:
        """Record that a turn has ended, or was refused, before the turns that wait for it may come.

        `is_sent_again`: its client gave it up, and will send it again.
        """


class Arrivals(Informed):
    """The traffic of one model. Its `engines`, all of one configuration, are behind `router`.

    Owner of the numbers that requests get in arrival order. `priority` is added to the priority of each request.
    `sessions`: their state between turns; without it, a turn is a request like any other. `config`: what clients and
    the front end do: when a request that was sent arrives at an engine, after which time its client gives it up, and
    sends it again if the source retries, and whether it ends with a stop token. A row may name an earlier time, after
    which its client does not retry.
    """

    def __init__(
        self,
        trace: Trace,
        source: Source,
        router: Router,
        engines: Sequence[Routed],
        log: RequestLog,
        *,
        priority: int = 0,
        sessions: SessionsKept | None = None,
        config: ReplayConfig | None = None,
    ) -> None:
        super().__init__(router, engines)
        self.source = source
        self.log = log
        # Constants of the router, which every request would look up by name.
        self.is_told = router.is_told
        self.is_reported = router.is_told or router.reads_metrics
        """Whether the router must be up to date when a request arrives."""
        self._may_hold = router.holds_requests
        self._trace = trace
        self._priority = priority
        self._sessions = sessions
        self._page_size = engines[0].config.page_size
        # In the mocker profile, every generated token differs from all others.
        self._know_output = engines[0].config.profile != "mocker"
        self._lookahead = engines[0].scheduler.lookahead
        self._num_arrived = 0
        self._delay_ns = 0 if config is None else config.frontend_ns
        """Time from the sending of a request to its arrival at an engine."""
        self._timeout_ns = None if config is None else config.client_timeout_ns
        self.has_timeout = self._timeout_ns is not None
        """Whether clients give up requests of which no row says when."""
        self._stops = config is not None and config.stop_tokens
        self._plans_ahead = engines[0].scheduler.ahead is not None
        self._held: dict[Request, TraceRequest] = {}
        """Requests that wait in the router, and their rows."""

    def pop(self, now_ns: int) -> tuple[Request, TraceRequest]:
        """Return the request that arrives next, at `now_ns`, and its row of the trace."""
        row = self.source.pop()
        index = self._num_arrived
        self._num_arrived += 1
        request = Request(
            index,
            self._trace.content(
                row,
                page_size=self._page_size,
                owner=index,
                know_output=self._know_output,
                lookahead=self._lookahead,
            ),
            num_prompt_tokens=row.num_prompt_tokens,
            max_tokens=row.num_output_tokens,
            arrival_ns=now_ns - self._delay_ns,
            priority=row.priority + self._priority,
            request_id=row.request_id or str(row.row),
        )
        request.stops = self._stops or (row.stops and self._plans_ahead)
        return request, row

    def expires(self, now_ns: int) -> bool:
        """Return whether the next arrival, at `now_ns`, ends sessions that were idle for too long, on any engine."""
        return self._sessions is not None and bool(self._sessions.expired(now_ns))

    def choose(self, request: Request, row: TraceRequest, now_ns: int) -> int | None:
        """Return the number of the engine for `request`, which arrives at `now_ns`.

        None: the request waits in the router until `take_placed` returns it.
        """
        router = self.router
        if self._sessions is not None:
            replica = self._sessions.replica_of(row, now_ns)
            if replica is not None:
                if self.is_told:
                    router.placed(request, row.session_id, replica, now_ns)
                return replica
        if not self._may_hold and len(self.engines) == 1:
            return 0
        index = router.place(request, row.session_id, now_ns)
        if index is None:
            self._held[request] = row
        return index

    def take_placed(self, now_ns: int) -> list[tuple[Request, TraceRequest, int]]:
        """Return the requests that waited in the router and are now placed, each with its row and its engine."""
        return [(request, self._held.pop(request), index) for request, index in self.router.take_placed(now_ns)]

    def holds(self, request: Request) -> bool:
        """Return whether `request` waits in the router."""
        return request in self._held

    def withdraw(self, request: Request, now_ns: int) -> None:
        """Drop `request`, which waits in the router: its client gives it up at `now_ns`."""
        row = self._held.pop(request)
        self.router.withdraw(request)
        request.become(RequestState.CANCELLED)
        request.cancelled_ns = now_ns
        self.note_cancelled(request, row, NO_REPLICA)

    def submit(self, request: Request, row: TraceRequest, index: int, now_ns: int) -> str | None:
        """Queue `request` in an engine at `now_ns`, or return the reason why it can never run."""
        if self._sessions is not None:
            reason = self._sessions.begin(request, row, index)
            if reason is not None:
                self.engines[index].refuse(request, reason, now_ns)
                return reason
        return self.engines[index].submit(request, now_ns)

    def end(self, request: Request, row: TraceRequest, index: int) -> None:
        """Record that `request` ended in an engine."""
        self.log.end(request, row, index)
        if self.is_told:
            self.router.ended(request.index)
        if self._sessions is not None:
            self._sessions.end(request, row, request.last_token_ns, is_refused=False)
        self.source.done(row, request.last_token_ns)

    def gives_up_ns(self, request: Request, row: TraceRequest) -> int | None:
        """Return when the client of `request` gives it up if it has not ended by then; None for never."""
        after_ns = row.cancel_after_ns
        if after_ns is None or (self._timeout_ns is not None and self._timeout_ns < after_ns):
            after_ns = self._timeout_ns
        return None if after_ns is None else request.arrival_ns + after_ns

    def cancel(self, request: Request, row: TraceRequest, index: int) -> None:
        """Record that an engine dropped `request`, because its client gave it up."""
        if self.is_told:
            self.router.ended(request.index)
        self.note_cancelled(request, row, index)

    def note_cancelled(self, request: Request, row: TraceRequest, index: int, more: Sequence[int] = ()) -> None:
        """Log the dropped `request`, and let its client send it again. `more`: as in RequestLog."""
        end_ns = request.last_token_ns if request.cancelled_ns < 0 else request.cancelled_ns
        self.log.cancel(request, row, index, end_ns, more)
        timeout_ns = self._timeout_ns
        is_late = timeout_ns is not None and (row.cancel_after_ns is None or timeout_ns < row.cancel_after_ns)
        is_sent_again = is_late and self.source.again(row, end_ns)
        if self._sessions is not None:
            self._sessions.end(request, row, end_ns, is_refused=True, is_sent_again=is_sent_again)
        if not is_sent_again:
            self.source.done(row, end_ns)

    def reject(
        self, request: Request, row: TraceRequest, index: int, reason: str, now_ns: int, status: int = REJECTED
    ) -> None:
        """Record that `request` was refused at `now_ns`, or with FAILED that it ended early, because of `reason`."""
        self.log.reject(request, row, index, reason, status)
        if self.is_told:
            self.router.ended(request.index)
        if self._sessions is not None:
            self._sessions.end(request, row, now_ns, is_refused=True)
        self.source.done(row, now_ns)

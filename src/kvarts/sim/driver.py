"""The loop of a replay: a virtual clock, the engines, and the arrival of requests.

At any time, in this order: steps that end now are finished, requests that arrive now are routed, and engines without
a step under way start one. An engine may do many steps at once, but never past a time at which an event could reach it.

If requests arrive at known times, each engine runs by itself from arrival to arrival. If requests wait for others to
end, the engines move together from event to event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvarts.report.requests import RequestLog
from kvarts.request import Request
from kvarts.sim.replica import NEVER_NS, Replica
from kvarts.sim.router import Router
from kvarts.traffic.source import Source
from kvarts.traffic.trace import Trace, TraceRequest

__all__ = ["Driver"]


class Driver:
    """Runs one replay. `on_progress`, if given, is called with the number of further requests that have ended."""

    def __init__(
        self,
        trace: Trace,
        source: Source,
        replicas: Sequence[Replica],
        router: Router,
        log: RequestLog,
        *,
        on_progress: Callable[[int], object] | None = None,
    ) -> None:
        self._trace = trace
        self._source = source
        self._replicas = replicas
        self._router = router
        self._log = log
        self._on_progress = on_progress
        self._page_size = replicas[0].config.page_size
        # In the profile of the mocker, every generated token differs from all others.
        self._know_output = replicas[0].config.profile != "mocker"
        self._rows: dict[int, TraceRequest] = {}
        """Requests that are in an engine, by index."""
        self._num_arrived = 0
        self._finished: list[Request] = []
        self._ends_ns = [NEVER_NS] * len(replicas)
        self._quiet_ns = [NEVER_NS] * len(replicas)
        """For each engine with a step under way: the time until which no request ends there, if none arrives there."""

    def run(self) -> None:
        """Run until every request has ended."""
        if self._source.is_reactive:
            self._run_by_event()
        else:
            self._run_by_arrival()
        for replica in self._replicas:
            replica.flush()
        assert not any(replica.has_work for replica in self._replicas), "L8: the replay ended with requests left over"

    def _run_by_arrival(self) -> None:
        source, replicas, router = self._source, self._replicas, self._router
        while (now_ns := source.next_ns()) is not None:
            if router.looks_at_engines:
                for index in range(len(replicas)):
                    self._run_engine(index, now_ns)
            self._arrive(source.pop(), now_ns)
        for index in range(len(replicas)):
            self._run_engine(index, NEVER_NS)

    def _run_engine(self, index: int, until_ns: int) -> None:
        finished = self._finished
        self._replicas[index].run_until(until_ns, finished)
        if finished:
            self._end(index, finished)
            finished.clear()

    def _run_by_event(self) -> None:
        source, ends_ns = self._source, self._ends_ns
        while True:
            arrival_ns = source.next_ns()
            now_ns = min(ends_ns)
            if arrival_ns is not None and arrival_ns < now_ns:
                now_ns = arrival_ns
            if now_ns == NEVER_NS:
                break
            for index, end_ns in enumerate(ends_ns):
                if end_ns == now_ns:
                    ends_ns[index] = self._quiet_ns[index] = NEVER_NS
                    self._end(index, self._replicas[index].finish())
            while (arrival_ns := source.next_ns()) is not None and arrival_ns <= now_ns:
                self._arrive(source.pop(), now_ns)
            self._start(now_ns, NEVER_NS if arrival_ns is None else arrival_ns)

    def _end(self, index: int, finished: list[Request]) -> None:
        for request in finished:
            row = self._rows.pop(request.index)
            self._log.end(request, row, index)
            self._source.done(row, request.last_token_ns)
        if finished and self._on_progress is not None:
            self._on_progress(len(finished))

    def _arrive(self, row: TraceRequest, now_ns: int) -> None:
        index = self._num_arrived
        self._num_arrived += 1
        request = Request(
            index,
            self._trace.content(row, page_size=self._page_size, owner=index, know_output=self._know_output),
            num_prompt_tokens=row.num_prompt_tokens,
            max_tokens=row.num_output_tokens,
            arrival_ns=now_ns,
            priority=row.priority,
            request_id=row.request_id or str(row.row),
        )
        replicas = self._replicas
        replica = self._router.choose(request, replicas) if len(replicas) > 1 else 0
        if not self._source.is_reactive:
            self._run_engine(replica, now_ns)
        if replicas[replica].is_pausing:
            self._ends_ns[replica] = NEVER_NS
        reason = replicas[replica].submit(request, now_ns)
        if reason is None:
            self._rows[index] = row
            # It may be admitted in the next step of this engine, and end before all others.
            self._quiet_ns[replica] = self._ends_ns[replica]
        else:
            self._log.reject(request, row, replica, reason)
            self._source.done(row, now_ns)
            if self._on_progress is not None:
                self._on_progress(1)

    def _start(self, now_ns: int, arrival_ns: int) -> None:
        """Start a step on every engine that has work and none under way.

        A request that ends on one engine may send one to another. So engines that do a single step come first: the end
        of that step is then known. Then come engines that could do many, up to the first possible end of a request in
        any other engine.
        """
        replicas, ends_ns, quiet_ns = self._replicas, self._ends_ns, self._quiet_ns
        if len(replicas) == 1:
            if ends_ns[0] == NEVER_NS and replicas[0].has_work:
                ends_ns[0] = replicas[0].start(now_ns, arrival_ns)
            return
        leaping = []
        for index, replica in enumerate(replicas):
            if ends_ns[index] == NEVER_NS and replica.has_work:
                quiet_until_ns = replica.quiet_until(now_ns)
                if quiet_until_ns is None:
                    ends_ns[index] = quiet_ns[index] = replica.start(now_ns)
                else:
                    quiet_ns[index] = quiet_until_ns
                    leaping.append(index)
        for index in leaping:
            until_ns = min(arrival_ns, *quiet_ns[:index], *quiet_ns[index + 1 :])
            ends_ns[index] = replicas[index].start(now_ns, until_ns)
            if ends_ns[index] > quiet_ns[index]:
                quiet_ns[index] = ends_ns[index]  # a transfer ends while the last of its steps is under way

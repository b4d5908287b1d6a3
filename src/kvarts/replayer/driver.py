"""The loop of a replay: a virtual clock, the engines, and the requests that come to them.

At any time, in this order: steps that end now are finished, requests that arrive now are routed, and engines without
a step under way start one. An engine may do many steps at once, but never past a moment at which something could
reach it: the next arrival, or, where requests wait for others, the next possible end of one in another engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvarts.engine import Engine
from kvarts.replayer.columns import RequestLog
from kvarts.replayer.router import Router
from kvarts.replayer.source import Source
from kvarts.replayer.trace import Trace, TraceRequest
from kvarts.request import Request

__all__ = ["Driver"]

NEVER_NS = 1 << 62


class Driver:
    """Owner of the virtual clock, `now_ns`. `on_progress`, where given, is told of every request that ended."""

    def __init__(
        self,
        trace: Trace,
        source: Source,
        engines: Sequence[Engine],
        router: Router,
        log: RequestLog,
        *,
        on_progress: Callable[[int], object] | None = None,
    ) -> None:
        self.now_ns = 0
        self._trace = trace
        self._source = source
        self._engines = engines
        self._router = router
        self._log = log
        self._on_progress = on_progress
        self._page_size = engines[0].config.page_size
        self._rows: dict[int, TraceRequest] = {}
        """Requests that are in an engine, by index."""
        self._num_arrived = 0
        self._ends_ns = [NEVER_NS] * len(engines)
        self._quiet_ns = [NEVER_NS] * len(engines)
        """Until when no request ends, for engines with a step under way."""

    def run(self) -> None:
        """Runs until every request has ended."""
        source, engines, ends_ns = self._source, self._engines, self._ends_ns
        while True:
            arrival_ns = source.next_ns()
            now_ns = min(ends_ns)
            if arrival_ns is not None and arrival_ns < now_ns:
                now_ns = arrival_ns
            if now_ns == NEVER_NS:
                break
            self.now_ns = now_ns
            for index, end_ns in enumerate(ends_ns):
                if end_ns == now_ns:
                    ends_ns[index] = self._quiet_ns[index] = NEVER_NS
                    self._finish(index, now_ns)
            while (arrival_ns := source.next_ns()) is not None and arrival_ns <= now_ns:
                self._arrive(source.pop(), now_ns)
            self._start(now_ns, arrival_ns)
        assert not any(engine.has_work for engine in engines), "L8: the replay ended with requests left over"

    def _finish(self, index: int, now_ns: int) -> None:
        finished = self._engines[index].finish()
        for request in finished:
            row = self._rows.pop(request.index)
            self._log.complete(request, row, index)
            self._source.done(row, now_ns)
        if finished and self._on_progress is not None:
            self._on_progress(len(finished))

    def _arrive(self, row: TraceRequest, now_ns: int) -> None:
        index = self._num_arrived
        self._num_arrived += 1
        request = Request(
            index,
            self._trace.content(row, page_size=self._page_size, owner=index),
            num_prompt_tokens=row.num_prompt_tokens,
            num_output_tokens=row.num_output_tokens,
            arrival_ns=now_ns,
            priority=row.priority,
        )
        engines = self._engines
        replica = self._router.choose(request, engines) if len(engines) > 1 else 0
        reason = engines[replica].submit(request)
        if reason is None:
            self._rows[index] = row
        else:
            self._log.reject(request, row, replica, reason)
            self._source.done(row, now_ns)
            if self._on_progress is not None:
                self._on_progress(1)

    def _start(self, now_ns: int, arrival_ns: int | None) -> None:
        """Starts a step on every engine that has work and none under way."""
        engines, ends_ns = self._engines, self._ends_ns
        if len(engines) == 1:
            if ends_ns[0] == NEVER_NS and engines[0].has_work:
                ends_ns[0] = engines[0].start(now_ns, arrival_ns)
            return
        starting = [i for i, engine in enumerate(engines) if ends_ns[i] == NEVER_NS and engine.has_work]
        if not self._source.is_reactive:
            for index in starting:
                ends_ns[index] = engines[index].start(now_ns, arrival_ns)
            return
        # A request that ends elsewhere may send one here. First those that do a single step, whose end is then
        # known; then those that could do many, up to the first possible end of a request in any of the others.
        quiet_ns = self._quiet_ns
        leaping = []
        for index in starting:
            quiet_until_ns = engines[index].quiet_until(now_ns)
            if quiet_until_ns is None:
                ends_ns[index] = quiet_ns[index] = engines[index].start(now_ns)
            else:
                quiet_ns[index] = quiet_until_ns
                leaping.append(index)
        for index in leaping:
            others_ns = min(quiet_ns[:index] + quiet_ns[index + 1 :])
            until_ns = others_ns if arrival_ns is None else min(others_ns, arrival_ns)
            ends_ns[index] = engines[index].start(now_ns, until_ns)

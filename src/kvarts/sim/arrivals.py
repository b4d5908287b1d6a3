"""The requests of one model on their way in: where they come from, which engine they go to, what became of them."""

from __future__ import annotations

from collections.abc import Sequence

from kvarts.report.requests import RequestLog
from kvarts.request import Request
from kvarts.sim.router import Routed, Router
from kvarts.traffic.source import Source
from kvarts.traffic.trace import Trace, TraceRequest

__all__ = ["Arrivals"]


class Arrivals:
    """The traffic of one model. Its `engines`, all of one configuration, stand behind `router`.

    Owner of the numbers that requests get in arrival order. `priority` is added to that of each request.
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
    ) -> None:
        self.source = source
        self.router = router
        self.engines = engines
        self.log = log
        self._trace = trace
        self._priority = priority
        self._page_size = engines[0].config.page_size
        # In the profile of the mocker, every generated token differs from all others.
        self._know_output = engines[0].config.profile != "mocker"
        self._num_arrived = 0

    def pop(self, now_ns: int) -> tuple[Request, TraceRequest]:
        """Return the request that arrives next, at `now_ns`, and its row of the trace."""
        row = self.source.pop()
        index = self._num_arrived
        self._num_arrived += 1
        request = Request(
            index,
            self._trace.content(row, page_size=self._page_size, owner=index, know_output=self._know_output),
            num_prompt_tokens=row.num_prompt_tokens,
            max_tokens=row.num_output_tokens,
            arrival_ns=now_ns,
            priority=row.priority + self._priority,
            request_id=row.request_id or str(row.row),
        )
        return request, row

    def choose(self, request: Request) -> int:
        """Return the number of the engine that `request` goes to."""
        return self.router.choose(request, self.engines) if len(self.engines) > 1 else 0

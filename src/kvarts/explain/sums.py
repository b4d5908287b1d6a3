"""The time of a request as a sum: TTFT = queue + load + prefill; and the slowest requests of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvarts.explain.reading import Journal
from kvarts.explain.waits import Blockers
from kvarts.journal import AdmittedLine, FinishedLine, LoadedLine, LoadingLine
from kvarts.units import as_duration

__all__ = ["RequestTimes", "Sums", "slowest", "sum_of", "times_in"]

CAUSES = {"pages": "KV pages", "token_budget": "token budget", "sequence_cap": "sequence cap"}
LEAST_MS = 0.1
"""The cause of a shorter wait is omitted."""


class RequestTimes(msgspec.Struct, frozen=True, kw_only=True):
    """A request by its outside name, with its times in ms of the run; None for an event that is absent or unknown."""

    name: str
    arrival_ms: float
    first_admitted_ms: float | None = None
    first_token_ms: float | None = None
    last_token_ms: float | None = None
    num_output_tokens: int = 0
    num_preemptions: int = 0

    @property
    def slowness_ms(self) -> float:
        """Time to the first token, or to the last if the first is not known; below 0 for a request without tokens."""
        end_ms = self.last_token_ms if self.first_token_ms is None else self.first_token_ms
        return -1.0 if end_ms is None else end_ms - self.arrival_ms


def slowest(requests: Sequence[RequestTimes], count: int) -> list[RequestTimes]:
    """Return up to `count` requests, the slowest first; ties stay in the order given."""
    return sorted((each for each in requests if each.slowness_ms >= 0), key=lambda each: -each.slowness_ms)[:count]


def times_in(journal: Journal) -> list[RequestTimes]:
    """Return the times that a journal alone contains: ends of requests, but not the step of each first token."""
    admitted: dict[int, float] = {}
    finished: dict[int, float] = {}
    for line in journal.lines:
        if isinstance(line, AdmittedLine):
            admitted.setdefault(line.request, line.t_ms)
        elif isinstance(line, FinishedLine):
            finished[line.request] = line.t_ms
    return [
        RequestTimes(
            name=journal.names[request],
            arrival_ms=line.t_ms,
            first_admitted_ms=admitted.get(request),
            last_token_ms=finished.get(request),
        )
        for request, line in journal.arrivals.items()
    ]


class Sums:
    """Sums of the requests of one journal; None for a run without a journal."""

    def __init__(self, journal: Journal | None) -> None:
        self._blockers = None if journal is None else Blockers(journal)
        self._loads = {} if journal is None else _loads(journal)

    def text(self, request: RequestTimes) -> str:
        """Return the sum of a request: `TTFT 680.0 ms = 486.0 ms queue (token budget) + 194.0 ms prefill; ...`."""
        start, admitted = request.arrival_ms, request.first_admitted_ms
        if admitted is None:
            return "never admitted"
        load_ms = min(self._loads.get(request.name, 0.0), admitted - start)
        queue_ms = admitted - start - load_ms
        parts = [f"{as_duration(queue_ms)} queue{self._cause(start, admitted) if queue_ms >= LEAST_MS else ''}"]
        if load_ms:
            parts.append(f"{as_duration(load_ms)} load")
        if request.first_token_ms is None:
            if request.last_token_ms is None:
                return f"{' + '.join(parts)}, then no token"
            return f"E2E {as_duration(request.last_token_ms - start)}, of which {' + '.join(parts)}"
        parts.append(f"{as_duration(request.first_token_ms - admitted)} prefill")
        text = f"TTFT {as_duration(request.first_token_ms - start)} = {' + '.join(parts)}"
        num_more = request.num_output_tokens - 1
        if num_more > 0 and request.last_token_ms is not None:
            each = as_duration((request.last_token_ms - request.first_token_ms) / num_more)
            text += f"; then {num_more:,} token{'s' if num_more > 1 else ''} at {each}"
        if request.num_preemptions:
            text += f"; preempted {'once' if request.num_preemptions == 1 else f'{request.num_preemptions:,} times'}"
        return text

    def _cause(self, begin_ms: float, end_ms: float) -> str:
        if self._blockers is None:
            return ""
        reason, _ = self._blockers.reason(begin_ms, end_ms)
        return f" ({CAUSES[reason]})" if reason in CAUSES else ""


def sum_of(request: RequestTimes, journal: Journal | None) -> str:
    """Return the sum of one request."""
    return Sums(journal).text(request)


def _loads(journal: Journal) -> Mapping[str, float]:
    """Return the time that requests waited for loads before their first admission, by name."""
    began: dict[int, float] = {}
    loads: dict[str, float] = {}
    for line in journal.lines:
        if isinstance(line, LoadingLine):
            began[line.request] = line.t_ms
        elif isinstance(line, LoadedLine | AdmittedLine) and line.request in began:
            # A request may be admitted while the last layers of its load are under way.
            name = journal.names[line.request]
            loads.setdefault(name, line.t_ms - began.pop(line.request))
    return loads

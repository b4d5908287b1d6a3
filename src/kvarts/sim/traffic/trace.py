"""Traces: recorded traffic, independent of the file format.

A trace is a sequence of requests in arrival order. Prompts are sequences of units, which are either hash ids that stand
for `unit_tokens` tokens each, or single tokens. This module is independent of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import le
from typing import Any

import numpy as np

from kvarts.base.units import as_duration
from kvarts.core.content import UNIT_BYTES, Content
from kvarts.sim.traffic.request_columns import RequestColumns
from kvarts.sim.traffic.trace_request import TraceRequest, Units

__all__ = ["NO_PREFIXES", "Trace", "TraceRequest"]

NO_PREFIXES = (
    "hits are unknown: the trace does not identify prefixes that prompts share, so each is computed whole. Hash ids, "
    "token ids or the messages of the requests do, see docs/guide-replay.md"
)


def _made_again(
    requests: Iterable[TraceRequest],
    facts: dict[str, Any],
    concurrency: int | None,
    source_of: Callable[[Trace], Any] | None,
    names_models: bool,
) -> Trace:
    trace = Trace(requests, **facts)
    trace.concurrency, trace.source_of, trace.names_models = concurrency, source_of, names_models
    return trace


class Trace:
    """Requests in arrival order, and the meaning of their units.

    `requests` may be any iterable. If it is neither a list nor RequestColumns, it is read on demand and must be in
    arrival order. `has_output_tokens`: some requests have `output_units`, so prompts must be compared token by token.
    `has_sessions`: some requests have a `session_id` or wait for others; determined automatically for a list.
    `knows_prefixes`: the trace records which prefixes prompts share; if not, no prompts share any.
    `left_out`: number of rows of the file that are not requests here, by reason. `warnings`: notes on how the file was
    read, which reports repeat.

    >>> from kvarts import Trace, TraceRequest, load_trace
    >>> len(list(load_trace("sample:mooncake")))
    1000
    >>> prompt = TraceRequest(0, arrival_ns=0, units=(range(600),), num_prompt_tokens=600, num_output_tokens=8)
    >>> print(Trace([prompt], unit_tokens=1, name="mine"))
    <Trace mine: 1 request...>
    """

    def __init__(
        self,
        requests: Iterable[TraceRequest],
        *,
        unit_tokens: int = 1,
        has_output_tokens: bool = False,
        has_sessions: bool = False,
        knows_prefixes: bool = True,
        name: str = "trace",
        num_skipped_lines: int = 0,
        left_out: Mapping[str, int] | None = None,
        warnings: Sequence[str] = (),
    ) -> None:
        self._requests = requests
        self._known: Sequence[TraceRequest] | None = requests if isinstance(requests, list | RequestColumns) else None
        self.unit_tokens = unit_tokens
        self.has_output_tokens = has_output_tokens
        self.names_models = False
        """Whether some requests name the model that they ask for. To be set where they are read on demand."""
        if isinstance(requests, list):
            has_sessions = any(request.session_id is not None or request.after for request in requests)
            self.names_models = any(request.model is not None for request in requests)
        self.has_sessions = has_sessions
        self.knows_prefixes = knows_prefixes
        self.name = name
        self.num_skipped_lines = num_skipped_lines
        self.left_out = dict(left_out or {})
        self.warnings = list(warnings)
        self.concurrency: int | None = None
        """How many requests are sent at once, one as another ends, if the recording has no times but this."""
        self.source_of: Callable[[Trace], Any] | None = None
        """What makes the Source of a load that is neither at its times nor of a constant number in flight."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how another process makes the trace: `pickle` does not find the state of native objects."""
        facts = {
            "unit_tokens": self.unit_tokens,
            "has_output_tokens": self.has_output_tokens,
            "has_sessions": self.has_sessions,
            "knows_prefixes": self.knows_prefixes,
            "name": self.name,
            "num_skipped_lines": self.num_skipped_lines,
            "left_out": self.left_out,
            "warnings": self.warnings,
        }
        return _made_again, (self._requests, facts, self.concurrency, self.source_of, self.names_models)

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self._requests)

    @property
    def requests(self) -> Sequence[TraceRequest] | None:
        """All requests, if they are known beforehand; None for a stream."""
        return self._known

    @property
    def is_in_order(self) -> bool:
        """Whether all requests are known, and none arrives before the one before it."""
        known = self._known
        if known is None:
            return False
        times_ns = known.arrivals_ns if isinstance(known, RequestColumns) else [each.arrival_ns for each in known]
        return all(map(le, times_ns, islice(times_ns, 1, None)))

    @property
    def tells_hits(self) -> bool:
        """Whether hit ratios are exact: shared prefixes are known, and every answer that a later turn could contain."""
        if not self.knows_prefixes or self._known is None:
            return False
        lasts = {request.session_id: request.row for request in self._known} if self.has_sessions else {}
        return all(
            request.output_units is not None
            or request.answered_units is not None
            or (request.session_id is not None and lasts[request.session_id] == request.row)
            for request in self._known
        )

    def __repr__(self) -> str:
        return f"<Trace {self.name}: {', '.join(text for _, text in self._facts())}>"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{name}</th><td>{text}</td></tr>" for name, text in self._facts())
        from html import escape

        return f"<h4>Trace {escape(self.name)}</h4><table>{rows}</table>"

    def _facts(self) -> list[tuple[str, str]]:
        """Return a summary of the trace as names and texts."""
        requests = self.requests
        if requests is None:
            return [("requests", "read as they are needed")]
        facts = [("requests", f"{len(requests):,} requests")]
        if self.has_sessions:
            num_sessions = len({request.session_id for request in requests if request.session_id is not None})
            facts.append(("sessions", f"{num_sessions:,} sessions"))
        last_ns = max((request.arrival_ns for request in requests), default=0)
        facts.append(("arrivals", f"arrivals over {as_duration(last_ns / 1e6)}"))
        for name, tokens in (
            ("prompts", [request.num_prompt_tokens for request in requests]),
            ("outputs", [request.num_output_tokens for request in requests]),
        ):
            facts.append((name, f"{sum(tokens):,} tokens of {name}, the longest {max(tokens, default=0):,}"))
        if not self.knows_prefixes:
            facts.append(("prefixes", "prefixes not known: no two prompts share any"))
        if self.num_skipped_lines:
            facts.append(("skipped", f"{self.num_skipped_lines:,} lines skipped"))
        return facts

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame, one row per request; times in seconds from the first arrival."""
        from kvarts.base.columns import to_frame

        requests = list(self)
        return to_frame(
            {
                "request_id": [request.request_id for request in requests],
                "arrival_s": [request.arrival_ns / 1e9 for request in requests],
                "input_tokens": [request.num_prompt_tokens for request in requests],
                "output_tokens": [request.num_output_tokens for request in requests],
                "session_id": [request.session_id for request in requests],
                "delay_s": [None if request.delay_ns is None else request.delay_ns / 1e9 for request in requests],
                "priority": [request.priority for request in requests],
                "tenant": [request.tenant for request in requests],
                **({"model": [request.model for request in requests]} if self.names_models else {}),
            }
        )

    def said(self) -> list[str]:
        """Return the warnings for a report, with a note on the accuracy of hit ratios."""
        if self.knows_prefixes:
            return self.warnings
        return [*self.warnings, NO_PREFIXES]

    def content(
        self, request: TraceRequest, *, page_size: int, owner: int, know_output: bool = True, lookahead: int = 0
    ) -> Content:
        """Return the content of the pages of `request`.

        `know_output`: include its generated tokens, if the trace has them. `lookahead`: as of Content.
        """
        num_tokens = request.num_prompt_tokens
        units, unit_tokens = request.units, self.unit_tokens
        if not isinstance(units, bytes):
            units = spell(units)
        if request.answered_units is not None and know_output and not self.has_output_tokens:
            units = request.answered_units
            num_tokens += request.num_output_tokens
        if self.has_output_tokens:
            if unit_tokens > 1:
                # The last unit stands only for as many tokens as the prompt has left.
                num_each = min(unit_tokens, num_tokens)
                each = (units[place : place + UNIT_BYTES] * num_each for place in range(0, len(units), UNIT_BYTES))
                units = b"".join(each)[: num_tokens * UNIT_BYTES]
                unit_tokens = 1
            output = request.output_units
            if output is not None and know_output:
                units += spell(output)
                num_tokens += request.num_output_tokens
        return Content(
            units,
            num_tokens=num_tokens,
            page_size=page_size,
            unit_tokens=unit_tokens,
            owner=owner,
            salt=request.tenant,
            hints=None if request.hints is None else request.hints.for_prompt(request.num_prompt_tokens),
            lookahead=lookahead,
        )


def spell(units: Units) -> bytes:
    """Return the ids of `units`, 8 bytes each."""
    if isinstance(units, bytes):
        return units
    return b"".join(map(_spelled, units))


def _spelled(ids: range) -> bytes:
    return np.arange(ids.start, ids.stop, dtype=np.uint64).tobytes()

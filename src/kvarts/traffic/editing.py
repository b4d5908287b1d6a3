"""Traces made from traces: parts, mixtures, other rates, other names. Every one in arrival order, from time 0."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvarts.content import pack_units
from kvarts.errors import ConfigError, InputError
from kvarts.limits import LATEST_NS, MOST_REQUESTS, MOST_SECONDS, check_number, check_whole
from kvarts.traffic.trace import Trace, TraceRequest, spell
from kvarts.traffic.trace_request import Units

__all__ = ["anonymized", "merged", "repeated", "scaled", "sliced", "spread"]


def sliced(
    trace: Trace,
    *,
    begin_ns: int = 0,
    end_ns: int | None = None,
    first: int = 0,
    count: int | None = None,
) -> Trace:
    """Return the requests that arrive in [begin, end), and of these `count` from the place `first` on.

    A session of which the first turns are cut off begins with the first one that is left. Raise ConfigError where
    nothing is left.
    """
    found = [
        request
        for request in known(trace)
        if begin_ns <= request.arrival_ns and (end_ns is None or request.arrival_ns < end_ns)
    ]
    found = found[first:] if count is None else found[first : first + count]
    if not found:
        raise ConfigError("has no request there", field="slice", hint="`kvarts trace info` says how long it is.")
    return _like(trace, found)


def merged(traces: Sequence[Trace], *, same_ids: bool = False) -> Trace:
    """Return all requests of `traces`, each at its time. `same_ids`: equal ids of two traces stand for equal tokens.

    Raise ConfigError for traces of which the ids stand for different numbers of tokens.
    """
    first = traces[0]
    requests: list[TraceRequest] = []
    numbers = _Numbers()
    for number, trace in enumerate(traces):
        if trace.unit_tokens != first.unit_tokens:
            raise ConfigError(
                f"ids of {trace.name} stand for {trace.unit_tokens} tokens, those of {first.name} for "
                f"{first.unit_tokens}",
                field="merge",
                hint="Merge traces of one block size.",
            )
        requests += [request if same_ids else _apart(request, number, numbers) for request in known(trace)]
    return _like(
        first,
        requests,
        has_output_tokens=any(trace.has_output_tokens for trace in traces),
        knows_prefixes=all(trace.knows_prefixes for trace in traces),
        warnings=[f"{trace.name}: {warning}" for trace in traces for warning in trace.warnings],
    )


def scaled(trace: Trace, rate: float) -> Trace:
    """Return the same requests at `rate` times their rate: times and delays are divided by it."""
    check_number(rate, "rate", least=0.0, most=MOST_SECONDS, above=True)
    latest_ns = max(max(request.arrival_ns, request.delay_ns or 0) for request in known(trace))
    if latest_ns / rate > LATEST_NS:
        raise ConfigError(f"{rate:g} makes the trace last longer than {LATEST_NS / 1e9:g} s", field="rate")
    return _like(
        trace,
        [
            msgspec.structs.replace(
                request,
                arrival_ns=round(request.arrival_ns / rate),
                delay_ns=None if request.delay_ns is None else round(request.delay_ns / rate),
            )
            for request in known(trace)
        ],
    )


def repeated(trace: Trace, copies: int) -> Trace:
    """Return `copies` of each request at its time, with ids and sessions of their own: users that share nothing."""
    check_whole(copies, "copies", most=max(1, MOST_REQUESTS // max(1, len(known(trace)))))
    numbers = _Numbers()
    requests = [_apart(request, number, numbers) for number in range(copies) for request in known(trace)]
    return _like(trace, requests)


def spread(trace: Trace, duration_ns: int) -> Trace:
    """Return the same with sessions that begin evenly over `duration_ns`, in the order in which they begin now.

    Requests without a session keep their times. A session named PARENT/CHILD keeps its distance from its parent.
    """
    requests = known(trace)
    begins: dict[str, int] = {}
    for request in requests:
        if request.session_id is not None:
            begins.setdefault(request.session_id.partition("/")[0], request.arrival_ns)
    places = {name: place for place, name in enumerate(begins)}
    moved = []
    for request in requests:
        if request.session_id is None:
            moved.append(request)
            continue
        name = request.session_id.partition("/")[0]
        begin_ns = places[name] * duration_ns // len(begins)
        moved.append(msgspec.structs.replace(request, arrival_ns=request.arrival_ns - begins[name] + begin_ns))
    return _like(trace, moved)


def anonymized(trace: Trace) -> Trace:
    """Return the same with ids, sessions, tenants and requests numbered in the order in which they first appear.

    Times begin at 0, lengths stay, and what is the same as what stays, so every replay and every plan stays the same.
    """
    numbers = _Numbers()
    sessions: dict[str, str] = {}
    tenants: dict[str, str] = {}

    requests = [
        msgspec.structs.replace(
            request,
            row=row,
            units=numbers.of(0, request.units),
            output_units=None if request.output_units is None else numbers.of(0, request.output_units),
            session_id=_name(sessions, request.session_id, "session"),
            tenant=_name(tenants, request.tenant, "tenant"),
            request_id=None,
        )
        for row, request in enumerate(known(trace))
    ]
    return _like(trace, requests, name="anonymized")


def known(trace: Trace) -> list[TraceRequest]:
    """Return the requests of a trace. Raise InputError for one that is read as it is needed."""
    requests = trace.requests
    if requests is None:
        raise InputError("must be known as a whole", path=trace.name)
    return requests


class _Numbers:
    """Numbers ids in the order in which they first appear; those of one trace or copy are unlike those of any other."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def of(self, source: int, units: Units) -> bytes:
        """Return the numbers of the ids of `source`, 8 bytes each."""
        numbers = self._numbers
        ids = np.frombuffer(spell(units), np.uint64).tolist()
        return pack_units(numbers.setdefault((source, name), len(numbers)) for name in ids)


def _apart(request: TraceRequest, source: int, numbers: _Numbers) -> TraceRequest:
    """Return `request` with ids, a session and a name that only `source` has."""
    return msgspec.structs.replace(
        request,
        units=numbers.of(source, request.units),
        output_units=None if request.output_units is None else numbers.of(source, request.output_units),
        session_id=None if request.session_id is None else f"{source}:{request.session_id}",
        request_id=None if request.request_id is None else f"{source}:{request.request_id}",
    )


def _name(names: dict[str, str], name: str | None, kind: str) -> str | None:
    return None if name is None else names.setdefault(name, f"{kind}-{len(names)}")


def _like(
    trace: Trace,
    requests: list[TraceRequest],
    *,
    has_output_tokens: bool | None = None,
    knows_prefixes: bool | None = None,
    name: str | None = None,
    warnings: Sequence[str] | None = None,
) -> Trace:
    """Return `requests` as a trace like `trace`: in arrival order, the first at 0, and first turns without a delay."""
    first_ns = min(request.arrival_ns for request in requests)
    requests = sorted(requests, key=lambda request: request.arrival_ns)
    begun: set[str] = set()
    placed = []
    for row, request in enumerate(requests):
        delay_ns = request.delay_ns
        if request.session_id is not None and request.session_id not in begun:
            begun.add(request.session_id)
            delay_ns = None
        placed.append(
            msgspec.structs.replace(request, row=row, arrival_ns=request.arrival_ns - first_ns, delay_ns=delay_ns)
        )
    return Trace(
        placed,
        unit_tokens=trace.unit_tokens,
        has_output_tokens=trace.has_output_tokens if has_output_tokens is None else has_output_tokens,
        knows_prefixes=trace.knows_prefixes if knows_prefixes is None else knows_prefixes,
        name=trace.name if name is None else name,
        left_out=trace.left_out,
        warnings=trace.warnings if warnings is None else warnings,
    )

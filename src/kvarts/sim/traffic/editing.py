"""Traces made from traces: slices, merges, other rates, other names; and any trace written as JSON lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from kvarts.base.errors import ConfigError, InputError
from kvarts.base.limits import LATEST_NS, MOST_REQUESTS, MOST_SECONDS, check_number, check_whole
from kvarts.core.content import pack_units
from kvarts.core.hints import Hints
from kvarts.sim.traffic.dynamo import agentic_lines
from kvarts.sim.traffic.graph import components
from kvarts.sim.traffic.trace import Trace, TraceRequest, spell
from kvarts.sim.traffic.trace_request import Units

__all__ = [
    "anonymized",
    "can_lengthen",
    "lengthened",
    "merged",
    "mooncake_lines",
    "repeated",
    "scaled",
    "share_of_agents",
    "sliced",
    "spread",
    "tool_lines",
    "trace_lines",
    "with_share_of_agents",
]

NS_PER_MS = 1_000_000
LEAST_UNIT = 8
"""Tokens of a unit that can be a little larger."""


def sliced(
    trace: Trace,
    *,
    begin_ns: int = 0,
    end_ns: int | None = None,
    first: int = 0,
    count: int | None = None,
) -> Trace:
    """Return the requests that arrive in [begin, end), limited to `count` requests from the one at `first` on.

    A session whose first turns are cut off begins with its first remaining turn. Raise ConfigError if no request
    remains.
    """
    found = [
        request
        for request in known(trace)
        if begin_ns <= request.arrival_ns and (end_ns is None or request.arrival_ns < end_ns)
    ]
    found = found[first:] if count is None else found[first : first + count]
    if not found:
        raise ConfigError("has no request there", field="slice", hint="`kvarts trace info` prints its duration.")
    return _like(trace, found)


def merged(traces: Sequence[Trace], *, same_ids: bool = False, models: Sequence[str] = ()) -> Trace:
    """Return all requests of `traces` at their own times. `same_ids`: equal ids in different traces mean equal tokens.

    `models`: the names that the requests of each trace ask for from now on. Raise ConfigError for traces whose ids
    stand for different numbers of tokens, and for another number of models.
    """
    if models and len(models) != len(traces):
        what = f"{len(models)} models, and {len(traces)} traces"
        raise ConfigError(what, field="models", hint="Give the name of a model for each trace.")
    first = traces[0]
    requests: list[TraceRequest] = []
    numbers = _Numbers()
    first_row = 0
    for number, trace in enumerate(traces):
        if trace.unit_tokens != first.unit_tokens:
            raise ConfigError(
                f"ids of {trace.name} stand for {trace.unit_tokens} tokens, those of {first.name} for "
                f"{first.unit_tokens}",
                field="merge",
                hint="Merge traces of one block size.",
            )
        of_trace = known(trace)
        if not same_ids:
            of_trace = [_apart(request, number, numbers) for request in of_trace]
        if models:
            of_trace = [msgspec.structs.replace(request, model=models[number]) for request in of_trace]
        requests += [_moved(request, first_row) for request in of_trace]
        first_row += 1 + max(request.row for request in of_trace)
    return _like(
        first,
        requests,
        has_output_tokens=any(trace.has_output_tokens for trace in traces),
        knows_prefixes=all(trace.knows_prefixes for trace in traces),
        warnings=[f"{trace.name}: {warning}" for trace in traces for warning in trace.warnings],
    )


def scaled(trace: Trace, rate: float) -> Trace:
    """Return the same requests at `rate` times their rate: times and delays are divided by `rate`."""
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
                after=tuple(
                    msgspec.structs.replace(each, delay_ns=round(each.delay_ns / rate)) for each in request.after
                ),
            )
            for request in known(trace)
        ],
    )


def can_lengthen(trace: Trace) -> bool:
    """Return whether prompts can be lengthened: their units stand for enough tokens to be larger by a tenth."""
    return trace.requests is not None and trace.unit_tokens >= LEAST_UNIT and not trace.has_output_tokens


def lengthened(trace: Trace, factor: float) -> Trace:
    """Return the trace with prompts, and the parts that they share, `factor` times as long, to a token per unit."""
    unit_tokens = max(1, round(trace.unit_tokens * factor))
    requests = [
        msgspec.structs.replace(
            request, num_prompt_tokens=max(1, request.num_prompt_tokens * unit_tokens // trace.unit_tokens)
        )
        for request in trace
    ]
    return Trace(requests, unit_tokens=unit_tokens, knows_prefixes=trace.knows_prefixes, name=trace.name)


def share_of_agents(trace: Trace) -> float | None:
    """Return the share of requests that are of agents; None if the trace does not tell sessions apart.

    An agent is a session of several requests, with the sub-agents that are named after it or that it waits for.
    """
    if trace.requests is None or not trace.has_sessions:
        return None
    plays = components(trace.requests, by_name=True)
    num_of = Counter(plays)
    return sum(num for num in num_of.values() if num > 1) / max(1, len(plays))


def with_share_of_agents(trace: Trace, share: float) -> Trace:
    """Return the trace with as many requests, of which about `share` are of agents.

    Agents and single requests are left out, or repeated, evenly. Copies share no content with others, and begin apart:
    of two copies, the second begins half a trace later, those past the end at the beginning. Raise ConfigError for a
    trace without agents or without single requests.
    """
    now = share_of_agents(trace)
    if now is None or not 0 < now < 1:
        what = "needs sessions of several requests, and requests that are of none"
        raise ConfigError(what, field="share_of_agents", hint="`kvarts trace info` prints the sessions.")
    requests = known(trace)
    of_play: dict[int, list[TraceRequest]] = {}
    for request, play in zip(requests, components(requests, by_name=True), strict=True):
        of_play.setdefault(play, []).append(request)
    numbers = _Numbers()
    num_rows = 1 + max(request.row for request in requests)
    last_ns = 1 + max(request.arrival_ns for request in requests)
    found: list[TraceRequest] = []
    factors = {True: share / now, False: (1 - share) / (1 - now)}
    wanted, made = {True: 0.0, False: 0.0}, {True: 0, False: 0}
    for turns in of_play.values():
        is_agent = len(turns) > 1
        wanted[is_agent] += factors[is_agent] * len(turns)
        copies = max(0, round((wanted[is_agent] - made[is_agent]) / len(turns)))
        made[is_agent] += copies * len(turns)
        begin_ns = min(request.arrival_ns for request in turns)
        for copy in range(copies):
            later_ns = (begin_ns + copy * last_ns // copies) % last_ns - begin_ns
            for request in turns:
                moved = _moved(_apart(request, copy, numbers), copy * num_rows)
                found.append(msgspec.structs.replace(moved, arrival_ns=request.arrival_ns + later_ns))
    return _like(trace, found)


def repeated(trace: Trace, copies: int) -> Trace:
    """Return `copies` of each request at its time, with separate ids and sessions, like users that share nothing."""
    check_whole(copies, "copies", most=max(1, MOST_REQUESTS // max(1, len(known(trace)))))
    numbers = _Numbers()
    num_rows = 1 + max(request.row for request in known(trace))
    return _like(
        trace,
        [
            _moved(_apart(request, number, numbers), number * num_rows)
            for number in range(copies)
            for request in known(trace)
        ],
    )


def spread(trace: Trace, duration_ns: int) -> Trace:
    """Return the trace with session starts spread evenly over `duration_ns`, in their present order.

    Requests without a session keep their times. A session named PARENT/CHILD, and one that waits for another session,
    keeps its distance from that session.
    """
    requests = known(trace)
    plays = components(requests, by_name=True)
    begins: dict[int, int] = {}
    for request, play in zip(requests, plays, strict=True):
        if request.session_id is not None:
            begins.setdefault(play, request.arrival_ns)
    places = {play: place for place, play in enumerate(begins)}
    moved = []
    for request, play in zip(requests, plays, strict=True):
        if play not in begins:
            moved.append(request)
            continue
        begin_ns = places[play] * duration_ns // len(begins)
        moved.append(msgspec.structs.replace(request, arrival_ns=request.arrival_ns - begins[play] + begin_ns))
    return _like(trace, moved)


def anonymized(trace: Trace) -> Trace:
    """Return the trace with names and ids numbered by first appearance, and no request names.

    Times begin at 0. Lengths and equality of contents are preserved, so replays and plans give the same results.
    """
    numbers = _Numbers()
    sessions: dict[str, str] = {}
    tenants: dict[str, str] = {}
    models: dict[str, str] = {}
    tools: dict[str, str] = {}

    def hidden(request: TraceRequest) -> TraceRequest:
        """Return `request` made of what is renumbered, and of fields that are known to be numbers."""
        hints = request.hints
        return TraceRequest(
            row=request.row,
            arrival_ns=request.arrival_ns,
            units=numbers.of(0, request.units),
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            output_units=None if request.output_units is None else numbers.of(0, request.output_units),
            priority=request.priority,
            session_id=_name(sessions, request.session_id, "session"),
            delay_ns=request.delay_ns,
            tenant=_name(tenants, request.tenant, "tenant"),
            after=request.after,
            cancel_after_ns=request.cancel_after_ns,
            answered_units=None if request.answered_units is None else numbers.of(0, request.answered_units),
            hints=hints
            and Hints(
                priority=hints.priority,
                ttl_ms=hints.ttl_ms,
                pause_ms=hints.pause_ms,
                tool=_name(tools, hints.tool, "tool"),
                retain=hints.retain,
            ),
            direct=request.direct,
            model=_name(models, request.model, "model"),
        )

    return _like(trace, [hidden(request) for request in known(trace)], name="anonymized")


def known(trace: Trace) -> Sequence[TraceRequest]:
    """Return the requests of a trace. Raise InputError for a stream."""
    requests = trace.requests
    if requests is None:
        raise InputError("must be known as a whole", path=trace.name)
    return requests


class _Numbers:
    """Numbers ids by first appearance. Equal ids from different sources get different numbers."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def of(self, source: int, units: Units) -> bytes:
        """Return the numbers of the ids of `source`, in 8 bytes each."""
        numbers = self._numbers
        ids = np.frombuffer(spell(units), np.uint64).tolist()
        return pack_units(numbers.setdefault((source, name), len(numbers)) for name in ids)


def _apart(request: TraceRequest, source: int, numbers: _Numbers) -> TraceRequest:
    """Return `request` with ids, session and name that are unique to `source`."""
    return msgspec.structs.replace(
        request,
        units=numbers.of(source, request.units),
        answered_units=None if request.answered_units is None else numbers.of(source, request.answered_units),
        output_units=None if request.output_units is None else numbers.of(source, request.output_units),
        session_id=None if request.session_id is None else f"{source}:{request.session_id}",
        request_id=None if request.request_id is None else f"{source}:{request.request_id}",
    )


def _moved(request: TraceRequest, num_rows: int) -> TraceRequest:
    """Return `request` with its row, and the rows it waits for, shifted by `num_rows`."""
    after = tuple(msgspec.structs.replace(each, row=each.row + num_rows) for each in request.after)
    return msgspec.structs.replace(request, row=request.row + num_rows, after=after)


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
    """Return `requests` as a trace like `trace`: in arrival order, starting at 0, first turns without a delay.

    A request whose dependencies were all removed arrives at its own time.
    """
    first_ns = min(request.arrival_ns for request in requests)
    requests = sorted(requests, key=lambda request: request.arrival_ns)
    begun: set[str] = set()
    placed = []
    new_rows = {request.row: row for row, request in enumerate(requests)}
    for row, request in enumerate(requests):
        delay_ns = request.delay_ns
        after = tuple(
            msgspec.structs.replace(each, row=new_rows[each.row]) for each in request.after if each.row in new_rows
        )
        is_first = request.session_id is not None and request.session_id not in begun
        if (is_first and not after) or (request.after and not after):
            delay_ns = None
        if request.session_id is not None:
            begun.add(request.session_id)
        placed.append(
            msgspec.structs.replace(
                request, row=row, arrival_ns=request.arrival_ns - first_ns, delay_ns=delay_ns, after=after
            )
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


def trace_lines(trace: Trace) -> Iterator[bytes]:
    """Return the lines of a trace, in a form that can express its dependencies."""
    if any(request.after for request in trace.requests or ()):
        return agentic_lines(trace)
    return mooncake_lines(trace)


def mooncake_lines(trace: Trace) -> Iterator[bytes]:
    """Return one line per request.

    A hash id stands for `trace.unit_tokens` tokens, which the form does not record. A trace without prefixes has none.
    """
    encoder = msgspec.json.Encoder()
    for request in trace:
        row: dict[str, Any] = {
            "timestamp": _ms(request.arrival_ns),
            "input_length": request.num_prompt_tokens,
            "output_length": request.num_output_tokens,
        }
        if trace.knows_prefixes:
            row["hash_ids"] = _ids(request.units)[: -(-request.num_prompt_tokens // trace.unit_tokens)]
        if request.session_id is not None:
            row["session_id"] = request.session_id
        if request.delay_ns is not None:
            row["delay"] = _ms(request.delay_ns)
        if request.priority:
            row["priority"] = request.priority
        if request.output_units is not None:
            row["output_token_ids"] = _ids(request.output_units)
        if request.request_id is not None:
            row["request_id"] = request.request_id
        if request.tenant is not None:
            row["tenant"] = request.tenant
        if request.model is not None:
            row["model"] = request.model
        if request.cancel_after_ns is not None:
            row["cancel_after_ms"] = _ms(request.cancel_after_ns)
        if request.hints is not None:
            row["hints"] = request.hints
        yield encoder.encode(row) + b"\n"


class Tool(msgspec.Struct, frozen=True):
    """How a tool reads rows in Mooncake's form. `reading`: its options, for ids of {} tokens."""

    reading: str
    in_seconds: bool = False
    has_sessions: bool = False


TOOLS = {
    "aiperf": Tool("--custom-dataset-type mooncake_trace --fixed-schedule --isl-block-size {}"),
    "guidellm": Tool(
        "--profile kind=replay --data kind=mooncake,hash_id_block_size={},source.kind=json_file,source.path=FILE",
        in_seconds=True,
    ),
    "dynamo": Tool("trace_block_size={}", has_sessions=True),
}
"""AIPerf 0.13, GuideLLM 0.8.1 and Dynamo 1.6.1."""
UNREAD = {
    "priority": "priority", "tenant": "tenant", "model": "model", "output_units": "output_token_ids",
    "cancel_after_ns": "cancel_after_ms", "hints": "hints",
}  # fmt: skip
"""Fields of a request that no tool reads, and their names in a trace."""
PLAIN = TraceRequest(0, 0, b"", 1, 1)
"""A request without any of these."""


def tool_lines(trace: Trace, name: str) -> tuple[list[bytes], list[str]]:
    """Return the lines of a trace as the tool `name` of TOOLS reads them alike, and what it reads otherwise.

    AIPerf and GuideLLM keep the tokens of an id from its first use on: the last id of a prompt that ends within it gets
    a number of its own. AIPerf takes a turn of a session as what is added to the turn before, and GuideLLM knows none:
    turns become requests at their own times, or without one, their delay after the turn before. GuideLLM counts time in
    seconds. Ids are numbered by first appearance.
    """
    tool, size, requests = TOOLS[name], trace.unit_tokens, known(trace)
    numbers: dict[tuple[int, int], int] = {}
    lengths: dict[int, set[int]] = {}
    sent_ns: dict[str, int] = {}
    num_moved = 0
    encoder = msgspec.json.Encoder()
    lines = []
    for request in requests:
        num_whole, rest = divmod(request.num_prompt_tokens, size)
        ids = _ids(request.units)[: num_whole + bool(rest)]
        used = [size] * num_whole + [rest] * bool(rest)
        for each, length in zip(ids, used, strict=True):
            lengths.setdefault(each, set()).add(length)
        if tool.has_sessions:
            used = [size] * len(ids)
        is_turn = request.session_id is not None and request.session_id in sent_ns
        keeps = tool.has_sessions and not request.after and (not is_turn or request.delay_ns is not None)
        num_moved += bool(request.after) or (is_turn and not keeps)
        at_ns = request.arrival_ns
        if request.session_id is not None:
            if is_turn:
                at_ns = max(at_ns, sent_ns[request.session_id] + (request.delay_ns or 0))
            sent_ns[request.session_id] = at_ns
        row: dict[str, Any] = {
            "timestamp": at_ns / 1e9 if tool.in_seconds else _ms(at_ns),
            "input_length": request.num_prompt_tokens,
            "output_length": request.num_output_tokens,
            "hash_ids": [numbers.setdefault(each, len(numbers)) for each in zip(ids, used, strict=True)],
        }
        if request.session_id is not None and keeps:
            row["session_id"] = request.session_id
            if is_turn:
                row["delay"] = _ms(request.delay_ns or 0)
                del row["timestamp"]
        lines.append(encoder.encode(row) + b"\n")
    num_split = 0 if tool.has_sessions else sum(len(each) > 1 for each in lengths.values())
    unread = [
        name
        for field, name in UNREAD.items()
        if any(getattr(each, field) != getattr(PLAIN, field) for each in requests)
    ]
    warnings = [
        f"{name} reads these lines with {tool.reading.format(size)}",
        f"{num_moved:,} requests wait for none: they are sent at their times, or their delay after the turn before"
        if num_moved
        else "",
        f"prompts end within {num_split:,} hash ids that others use whole: they do not share their last tokens"
        if num_split
        else "",
        f"{name} does not read {', '.join(unread)}: left out" if unread else "",
        "time counts from the first request" if tool.in_seconds and requests and requests[0].arrival_ns else "",
    ]
    return lines, [text for text in warnings if text]


def _ms(time_ns: int) -> int | float:
    whole, rest = divmod(time_ns, NS_PER_MS)
    return time_ns / NS_PER_MS if rest else whole


def _ids(units: Units) -> list[int]:
    ids: list[int] = np.frombuffer(spell(units), np.uint64).tolist()
    return ids

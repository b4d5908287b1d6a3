"""Dynamo's agentic traces, `dynamo.agentic_mooncake`, in and out.

In agentic traces, version 2, requests wait for requests. The first line is a header with `block_size` and
`hash_id_scope`. A row has `request_id`, `play_id`, `session_id`, `input_length`, `output_length`, `hash_ids`,
`not_before_ms`, and `dependencies`. Each dependency has a `request_id`, a `trigger` (its `dispatch` or its
`completion`) and a `delay_ms` after that. A request is sent when all of its dependencies have passed, and not before
`not_before_ms`. Ids of scope `local` are only valid within their play. With `cancel_after_ms`, the client abandons a
request that long after sending it. Other fields are ignored. A row with an `output_length` of 0 is left out; rows that
wait for it wait for what it waits for.

The first version lacks a header: its rows are Mooncake's, with a `wait_for` (sim/traffic/mooncake.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from kvarts.base.errors import InputError, parts_of
from kvarts.base.units import to_ns
from kvarts.core.content import UNIT_BYTES, pack_units
from kvarts.core.hints import Hints
from kvarts.sim.traffic.bounds import Count, Priority, SpanMs, Tokens
from kvarts.sim.traffic.graph import components, with_output
from kvarts.sim.traffic.trace import Trace, TraceRequest, spell
from kvarts.sim.traffic.trace_file import TraceFile, by_arrival, nothing_left, unlike_any_other
from kvarts.sim.traffic.trace_request import After

__all__ = ["agentic_lines", "load_agentic"]

NS_PER_MS = 1_000_000

SCHEMA, VERSION = "dynamo.agentic_mooncake", 2

HashId = Annotated[int, msgspec.Meta(ge=0)]


class _Header(msgspec.Struct, gc=False):
    schema: Literal["dynamo.agentic_mooncake"]
    version: Literal[2]
    block_size: Tokens
    hash_id_scope: Literal["local", "global"] = "local"


class _Dependency(msgspec.Struct, gc=False):
    request_id: str
    trigger: Literal["dispatch", "completion"]
    delay_ms: SpanMs = 0.0


class _Row(msgspec.Struct, gc=False):
    request_id: str
    play_id: str
    session_id: str
    input_length: Tokens
    output_length: Count
    not_before_ms: SpanMs
    hash_ids: list[HashId] | None = None
    output_token_ids: list[HashId] | None = None
    priority: Priority | None = None
    dependencies: list[_Dependency] = []
    cancel_after_ms: SpanMs | None = None
    hints: Hints | None = None
    model: str | None = None


def load_agentic(path: Path | str | TraceFile) -> Trace:
    """Read a whole file. Raise MissingFileError; InputError, with line and field, for malformed input."""
    file = TraceFile.of(path)
    records = file.records()
    header_line, data = next(records, (1, b""))
    header: _Header = _decoded(file, header_line, data, _Header)
    rows = [(line, _decoded(file, line, data, _Row)) for line, data in records]
    if not rows:
        raise nothing_left(file)
    number_of = {row.request_id: number for number, (_, row) in enumerate(rows)}
    if len(number_of) < len(rows):
        seen: set[str] = set()
        line = next(line for line, row in rows if row.request_id in seen or seen.add(row.request_id))  # type: ignore[func-returns-value]
        raise InputError("is that of another row", path=file.path, line=line, field="request_id")
    names: dict[tuple[str, int], int] = {}
    requests = [_request(file, line, number, row, header, names, number_of) for number, (line, row) in enumerate(rows)]
    num_without_ids = sum(row.hash_ids is None for _, row in rows)
    warnings = []
    if 0 < num_without_ids < len(rows):
        warnings.append(f"{num_without_ids:,} of {len(rows):,} rows have no hash_ids: their prompts share nothing")
    left_out: Counter[str] = Counter()
    requests = with_output(by_arrival(_placed(requests), file), left_out)
    if not requests:
        raise nothing_left(file, left_out)
    return Trace(
        requests,
        unit_tokens=header.block_size,
        has_output_tokens=any(row.output_token_ids is not None for _, row in rows),
        knows_prefixes=num_without_ids < len(rows),
        name=file.name,
        left_out=left_out,
        warnings=warnings,
    )


def _decoded(file: TraceFile, line: int, data: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        what, field = parts_of(error)
        hint = "A play without one of its requests is another play." if kind is _Row else "The first line is a header."
        raise InputError(what, path=file.path, line=line, field=field, hint=hint) from error
    except RecursionError:
        raise InputError("is nested too deeply", path=file.path, line=line) from None


def _request(
    file: TraceFile,
    line: int,
    number: int,
    row: _Row,
    header: _Header,
    names: dict[tuple[str, int], int],
    number_of: dict[str, int],
) -> TraceRequest:
    for place, each in enumerate(row.dependencies):
        if each.request_id not in number_of:
            raise InputError(
                f"{each.request_id[:40]!r} is not the request_id of a row",
                path=file.path,
                line=line,
                field=f"dependencies[{place}].request_id",
            )
    num_ids = -(-row.input_length // header.block_size)
    if row.hash_ids is not None and len(row.hash_ids) != num_ids:
        raise InputError(
            f"{len(row.hash_ids)} ids, and {row.input_length} tokens have {num_ids} blocks of {header.block_size}",
            path=file.path,
            line=line,
            field="hash_ids",
        )
    if row.output_token_ids is not None and len(row.output_token_ids) != row.output_length:
        raise InputError(
            f"has {len(row.output_token_ids)} ids, but output_length is {row.output_length}",
            path=file.path,
            line=line,
            field="output_token_ids",
        )
    if row.hash_ids is None:
        units = unlike_any_other(number, row.input_length, header.block_size, beside_ids=True)
    else:
        play = row.play_id if header.hash_id_scope == "local" else ""
        units = pack_units(names.setdefault((play, name), len(names)) for name in row.hash_ids)
    return TraceRequest(
        number,
        to_ns(row.not_before_ms, NS_PER_MS),
        units,
        row.input_length,
        row.output_length,
        output_units=None if row.output_token_ids is None else pack_units(row.output_token_ids),
        priority=row.priority or 0,
        session_id=f"{row.play_id}/{row.session_id}",
        request_id=row.request_id,
        cancel_after_ns=None if row.cancel_after_ms is None else to_ns(row.cancel_after_ms, NS_PER_MS),
        hints=row.hints,
        after=tuple(
            After(number_of[each.request_id], to_ns(each.delay_ms, NS_PER_MS), each.trigger == "dispatch")
            for each in row.dependencies
        ),
        model=row.model or None,
    )


def _placed(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Return the requests sorted by arrival, after delaying each to no earlier than those it waits for.

    A request without dependencies loses its session unless it is the session's first, since it does not wait for the
    turn before it.
    """
    arrivals = [request.arrival_ns for request in requests]
    waiters: dict[int, list[int]] = {}
    for request in requests:
        for each in request.after:
            waiters.setdefault(each.row, []).append(request.row)
    moved = list(range(len(requests)))
    for _ in requests:  # no chain of dependencies is longer than this
        moved = [waiter for row in moved for waiter in waiters.get(row, ()) if arrivals[waiter] < arrivals[row]]
        if not moved:
            break
        for waiter in moved:
            arrivals[waiter] = max(arrivals[each.row] for each in requests[waiter].after)
    begun: set[str | None] = set()
    placed = []
    for request, arrival_ns in sorted(zip(requests, arrivals, strict=True), key=lambda each: each[1]):
        session_id = None if not request.after and request.session_id in begun else request.session_id
        begun.add(session_id)
        placed.append(msgspec.structs.replace(request, arrival_ns=arrival_ns, session_id=session_id))
    return placed


def agentic_lines(trace: Trace) -> Iterator[bytes]:
    """Return a header, then a line per request. Ids have scope `local`, unless plays share some of them.

    A turn that waits for the previous turn depends on it. An arrival time without effect is written as 0.
    """
    requests = trace.requests or list(trace)
    plays = components(requests)
    scope = "global" if _share_ids(trace, requests, plays) else "local"
    encoder = msgspec.json.Encoder()
    source = {"format": "kvarts", "digest": trace.name}
    header = {"schema": SCHEMA, "version": VERSION, "block_size": trace.unit_tokens, "hash_id_scope": scope}
    yield encoder.encode({**header, "source": source}) + b"\n"
    before: dict[str, int] = {}
    for request, play in zip(requests, plays, strict=True):
        waits = list(request.after)
        if not waits and request.session_id in before:
            waits = [After(before[request.session_id], request.delay_ns or 0)]
        if request.session_id is not None:
            before[request.session_id] = request.row
        yield encoder.encode(_line(trace, request, play, waits)) + b"\n"


def _line(trace: Trace, request: TraceRequest, play: int, waits: list[After]) -> dict[str, Any]:
    num_ids = -(-request.num_prompt_tokens // trace.unit_tokens)
    ids = np.frombuffer(spell(request.units)[: num_ids * UNIT_BYTES], np.uint64).tolist()
    row: dict[str, Any] = {
        "request_id": str(request.row),
        "play_id": f"play-{play}",
        "session_id": request.session_id or str(request.row),
        "model": request.model or "",
        "input_length": request.num_prompt_tokens,
        "output_length": request.num_output_tokens,
        "hash_ids": ids,
        "not_before_ms": request.arrival_ns / NS_PER_MS if not waits or request.delay_ns is None else 0.0,
    }
    if request.output_units is not None:
        row["output_token_ids"] = np.frombuffer(spell(request.output_units), np.uint64).tolist()
    if request.priority:
        row["priority"] = request.priority
    if request.cancel_after_ns is not None:
        row["cancel_after_ms"] = request.cancel_after_ns / NS_PER_MS
    if request.hints is not None:
        row["hints"] = request.hints
    if waits:
        row["dependencies"] = [
            {
                "request_id": str(each.row),
                "relation": "sequence",
                "trigger": "dispatch" if each.of_arrival else "completion",
                "delay_ms": each.delay_ns / NS_PER_MS,
            }
            for each in waits
        ]
    return row


def _share_ids(trace: Trace, requests: Sequence[TraceRequest], plays: list[int]) -> bool:
    """Return whether two plays share an id, so that ids must be global."""
    play_of: dict[int, int] = {}
    for request, play in zip(requests, plays, strict=True):
        for name in np.unique(np.frombuffer(spell(request.units), np.uint64)).tolist():
            if play_of.setdefault(name, play) != play:
                return True
    return False

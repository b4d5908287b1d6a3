"""Readers for workloads of simulators and generators: LLMServingSim's, and requests made by ServeGen.

LLMServingSim: a line is a request with `input_toks`, `output_toks`, `arrival_time_ns` and optional `input_tok_ids` and
`output_tok_ids`, or a session with `arrival_time_ns` and `sub_requests`, each of which begins `tool_duration_ns` after
the end of the previous one. Requests without ids share nothing.

ServeGen: `request_id`, `timestamp` in seconds, and `data` with `input_tokens` (or `text_tokens`, and lists of
`image_tokens`, `audio_tokens`, `video_tokens`) and `output_tokens`. Prompts share nothing.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import msgspec

from kvarts.content import pack_units
from kvarts.errors import ConfigError, InputError, parts_of
from kvarts.traffic.trace import Trace, TraceRequest
from kvarts.traffic.trace_file import SKIP_HINT, TraceFile, by_arrival, load_rows, nothing_left, unlike_any_other

__all__ = ["load_llmservingsim", "load_servegen"]

Tokens = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Nanoseconds = Annotated[int, msgspec.Meta(ge=0, lt=1 << 61)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e10)]


class _Call(msgspec.Struct, gc=False):
    input_toks: Tokens
    output_toks: Tokens
    tool_duration_ns: Nanoseconds = 0
    input_tok_ids: list[int] | None = None
    output_tok_ids: list[int] | None = None


class _Line(msgspec.Struct, gc=False):
    arrival_time_ns: Nanoseconds
    sub_requests: list[_Call] | None = None
    session_id: str | None = None
    input_toks: Tokens | None = None
    output_toks: Tokens | None = None
    input_tok_ids: list[int] | None = None
    output_tok_ids: list[int] | None = None


class _Data(msgspec.Struct, gc=False):
    output_tokens: Count
    input_tokens: Count | None = None
    text_tokens: Count = 0
    image_tokens: list[Count] = []
    audio_tokens: list[Count] = []
    video_tokens: list[Count] = []


class _Made(msgspec.Struct, gc=False):
    timestamp: Seconds
    data: _Data
    request_id: int | str | None = None


def load_llmservingsim(path: Path | str | TraceFile, *, skip_bad_lines: bool = False) -> Trace:
    """Read a whole file. Raise MissingFileError; InputError, with line and field, for malformed input."""
    file = TraceFile.of(path)
    requests: list[TraceRequest] = []
    left_out: Counter[str] = Counter()
    names: set[str] = set()
    num_skipped = 0
    num_with_ids = 0
    decoder = msgspec.json.Decoder(_Line)
    for number, data in file.records():
        try:
            line, calls = _calls(decoder, data)
            if not calls:
                left_out["sessions without requests"] += 1
                continue
            name = None
            if line.sub_requests is not None:
                name = line.session_id or f"session_{number}"
                if name in names:
                    raise InputError(f"{name[:40]!r} is the session of another line", field="session_id")
                names.add(name)
            made = _requests(line, calls, name, len(requests))
        except InputError as error:
            if not skip_bad_lines:
                raise InputError(error.what, path=file.path, line=number, field=error.field, hint=SKIP_HINT) from error
            num_skipped += 1
            continue
        num_with_ids += sum(call.input_tok_ids is not None for call in calls)
        requests += made
    if not requests:
        raise nothing_left(file, left_out, num_skipped)
    warnings = []
    if 0 < num_with_ids < len(requests):
        warnings.append(
            f"{len(requests) - num_with_ids:,} of {len(requests):,} requests have no input_tok_ids: they share nothing"
        )
    return Trace(
        by_arrival(requests, file),
        unit_tokens=1,
        has_output_tokens=True,
        knows_prefixes=num_with_ids > 0,
        name=file.name,
        num_skipped_lines=num_skipped,
        left_out=left_out,
        warnings=warnings,
    )


def _calls(decoder: msgspec.json.Decoder[_Line], data: bytes) -> tuple[_Line, list[_Call]]:
    try:
        line = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        what, field = parts_of(error)
        raise InputError(what, field=field) from error
    except RecursionError:
        raise InputError("is nested too deeply") from None
    if line.sub_requests is not None:
        return line, line.sub_requests
    if line.input_toks is None or line.output_toks is None:
        raise InputError("is missing", field="input_toks" if line.input_toks is None else "output_toks")
    return line, [_Call(line.input_toks, line.output_toks, 0, line.input_tok_ids, line.output_tok_ids)]


def _requests(line: _Line, calls: list[_Call], name: str | None, first: int) -> list[TraceRequest]:
    requests = []
    delay_ns: int | None = None
    for place, call in enumerate(calls):
        at = f"sub_requests[{place}]." if line.sub_requests is not None else ""
        row = first + place
        for ids, count, field in (
            (call.input_tok_ids, call.input_toks, "input_tok"),
            (call.output_tok_ids, call.output_toks, "output_tok"),
        ):
            if ids is not None and len(ids) != count:
                raise InputError(f"has {len(ids)} ids, and {field}s is {count}", field=f"{at}{field}_ids")
        requests.append(
            TraceRequest(
                row,
                line.arrival_time_ns,
                _own_tokens(row, call.input_toks) if call.input_tok_ids is None else _packed(call.input_tok_ids, at),
                call.input_toks,
                call.output_toks,
                output_units=None if call.output_tok_ids is None else _packed(call.output_tok_ids, at),
                session_id=name,
                delay_ns=delay_ns,
            )
        )
        delay_ns = call.tool_duration_ns
    return requests


def _own_tokens(row: int, num_tokens: int) -> tuple[range, ...]:
    first = (1 << 62) + (row << 31)
    return (range(first, first + num_tokens),)


def _packed(ids: list[int], at: str) -> bytes:
    try:
        return pack_units(ids)
    except ConfigError:
        raise InputError("ids must be from 0 to 2**64 - 1", field=f"{at}tok_ids") from None


def load_servegen(path: Path | str | TraceFile, *, skip_bad_lines: bool = False) -> Trace:
    """Read a whole file. Raise MissingFileError; InputError, with line and field, for malformed input."""

    def request(row: int, made: _Made) -> TraceRequest | str:
        data = made.data
        parts = sum(data.image_tokens) + sum(data.audio_tokens) + sum(data.video_tokens)
        num_prompt = data.text_tokens + parts if data.input_tokens is None else data.input_tokens
        if not data.output_tokens or not num_prompt:
            return "without output tokens" if num_prompt else "without a prompt"
        return TraceRequest(
            row,
            round(made.timestamp * 1e9),
            unlike_any_other(row, num_prompt),
            num_prompt,
            data.output_tokens,
            request_id=None if made.request_id is None else str(made.request_id),
        )

    return load_rows(TraceFile.of(path), _Made, request, skip_bad_lines=skip_bad_lines, knows_prefixes=False)

"""Writes any trace as JSON lines: Mooncake's form, or Dynamo's agentic form if requests wait for others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from kvarts.traffic.dynamo import agentic_lines
from kvarts.traffic.trace import Trace, spell
from kvarts.traffic.trace_request import Units

__all__ = ["mooncake_lines", "trace_lines"]

NS_PER_MS = 1_000_000


def trace_lines(trace: Trace) -> Iterator[bytes]:
    """Return the lines of a trace, in a form that can express its dependencies."""
    if any(request.after for request in trace.requests or ()):
        return agentic_lines(trace)
    return mooncake_lines(trace)


def mooncake_lines(trace: Trace) -> Iterator[bytes]:
    """Return one line per request.

    A hash id stands for `trace.unit_tokens` tokens, which the form does not record.
    """
    encoder = msgspec.json.Encoder()
    for request in trace:
        row: dict[str, Any] = {
            "timestamp": _ms(request.arrival_ns),
            "input_length": request.num_prompt_tokens,
            "output_length": request.num_output_tokens,
            "hash_ids": _ids(request.units)[: -(-request.num_prompt_tokens // trace.unit_tokens)],
        }
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
        if request.cancel_after_ns is not None:
            row["cancel_after_ms"] = _ms(request.cancel_after_ns)
        if request.hints is not None:
            row["hints"] = request.hints
        yield encoder.encode(row) + b"\n"


def _ms(time_ns: int) -> int | float:
    whole, rest = divmod(time_ns, NS_PER_MS)
    return time_ns / NS_PER_MS if rest else whole


def _ids(units: Units) -> list[int]:
    ids: list[int] = np.frombuffer(spell(units), np.uint64).tolist()
    return ids

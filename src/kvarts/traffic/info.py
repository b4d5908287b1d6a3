"""`kvarts.trace_info`: the contents of a trace, and whether it records prefixes and answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvarts.errors import ConfigError
from kvarts.traffic.formats import load_trace
from kvarts.traffic.trace import Trace, TraceRequest
from kvarts.traffic.working_set import working_set_pages
from kvarts.traffic.workload import Workload
from kvarts.units import as_number

__all__ = ["TraceInfo", "trace_info"]

PAGE_SIZE = 16


class TraceInfo(msgspec.Struct, frozen=True):
    """Contents of a trace: `values` by name, JSON-able, and `warnings` for the reader."""

    values: dict[str, Any]
    warnings: list[str]

    def to_text(self) -> str:
        """Return the table that `kvarts trace info` prints, with a line end."""
        return "".join(f"{name:<24}{text}\n" for name, text in self._rows())

    def to_json(self) -> bytes:
        """Return `values` as indented JSON, with a line end."""
        return msgspec.json.format(msgspec.json.encode(self.values), indent=2) + b"\n"

    def __repr__(self) -> str:
        return f"<TraceInfo {', '.join(f'{name} {text}' for name, text in self._rows())}>"

    def _repr_html_(self) -> str:
        from html import escape

        rows = "".join(f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in self._rows())
        said = "".join(f"<p>{escape(warning)}</p>" for warning in self.warnings)
        return f"<table>{rows}</table>{said}"

    def _rows(self) -> list[tuple[str, str]]:
        return [(name, _text(value)) for name, value in self.values.items()]


def trace_info(traffic: Trace | Workload | Path | str) -> TraceInfo:
    """Return statistics of `traffic`: requests, tokens, sessions, working set, and whether prefixes are known.

    Raise ConfigError for a trace without requests or a stream; InputError for a file.
    """
    import numpy as np

    if isinstance(traffic, Workload):
        trace = traffic.trace()
    else:
        trace = traffic if isinstance(traffic, Trace) else load_trace(traffic)
    requests = trace.requests
    if not requests:
        raise ConfigError("has no requests that are known beforehand", field="traffic", hint="Give a list of them.")
    prompts = np.array([request.num_prompt_tokens for request in requests])
    outputs = np.array([request.num_output_tokens for request in requests])
    duration_s = _duration_s(requests)
    values = {
        "trace": trace.name,
        "num_requests": len(requests),
        "duration_s": duration_s,
        "requests_per_s": len(requests) / duration_s if duration_s else None,
        "num_prompt_tokens": int(prompts.sum()),
        "mean_prompt_tokens": float(prompts.mean()),
        "max_prompt_tokens": int(prompts.max()),
        "num_output_tokens": int(outputs.sum()),
        "mean_output_tokens": float(outputs.mean()),
        "max_output_tokens": int(outputs.max()),
        "num_sessions": len({request.session_id for request in requests} - {None}),
        "num_tenants": len({request.tenant for request in requests} - {None}),
        "tokens_per_id": trace.unit_tokens,
        "knows_prefixes": trace.knows_prefixes,
        "knows_outputs": trace.has_output_tokens,
        "working_set_tokens": (working_set_pages(trace, PAGE_SIZE) or 0) * PAGE_SIZE,
        "num_skipped_lines": trace.num_skipped_lines,
        **{f"left_out_{reason.replace(' ', '_')}": count for reason, count in trace.left_out.items()},
    }
    return TraceInfo(values, trace.said())


def _duration_s(requests: Sequence[TraceRequest]) -> float:
    """Return the time from first to last arrival; a lower bound for turns that only have delays."""
    ends: dict[str, int] = {}
    last_ns = 0
    for request in requests:
        arrival_ns = request.arrival_ns
        if request.session_id is not None and request.delay_ns is not None and request.session_id in ends:
            arrival_ns = max(arrival_ns, ends[request.session_id] + request.delay_ns)
        if request.session_id is not None:
            ends[request.session_id] = arrival_ns
        last_ns = max(last_ns, arrival_ns)
    return last_ns / 1e9


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return value if isinstance(value, str) else as_number(value)

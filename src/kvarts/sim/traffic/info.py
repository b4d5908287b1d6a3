"""`kvarts.trace_info`: the contents of a trace, and whether it records prefixes and answers.

The distinct pages of a trace are those that would hold everything it computes, once.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby, islice, repeat
from operator import floordiv, mul
from sys import byteorder
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvarts.base.errors import ConfigError
from kvarts.base.units import as_number
from kvarts.core.content import UNIT_BYTES
from kvarts.sim.traffic.request_columns import RequestColumns
from kvarts.sim.traffic.trace import Trace, TraceRequest, spell
from kvarts.sim.traffic.trace_request import Units

if TYPE_CHECKING:
    from pathlib import Path

    from kvarts.sim.traffic.workload import Workload

__all__ = ["TraceInfo", "distinct_pages", "trace_info"]

PAGE_SIZE = 16
SLAB = 20_000
"""Number of prompts compared at once, to bound memory."""
MOST_SPARSE = 4
"""Ids that are this many times as large as there are ids are not used as places of a table."""
NO_ID, UNSEEN = -1, -2


def distinct_pages(trace: Trace, page_size: int) -> int | None:
    """Return the number of distinct full pages of all prompts, plus the pages of outputs; None for a stream.

    In order of content and length, a prompt shares exactly as much with all prompts before it as with its direct
    predecessor.
    """
    requests = trace.requests
    if not requests:
        return None
    num_by_id = _pages_by_id(requests, trace.unit_tokens, page_size)
    if num_by_id is not None:
        return num_by_id
    # A sequence's last token is never computed.
    if isinstance(requests, RequestColumns):
        lengths = zip(requests.prompts, requests.outputs, strict=True)
        num_pages = sum((prompt + output - 1) // page_size for prompt, output in lengths)
        units, prompts, unit_bytes = requests.packed_ids(), requests.prompts.tolist(), requests.ids.itemsize
        return num_pages - _num_shared(units, prompts, unit_bytes, trace.unit_tokens, page_size)
    num_pages = sum((request.num_prompt_tokens + request.num_output_tokens - 1) // page_size for request in requests)
    firsts = array("Q", (_first_unit(request.units) for request in requests))
    for members in _alike(firsts, [request.tenant for request in requests]):
        units = [spell(requests[index].units) for index in members]
        prompts = [requests[index].num_prompt_tokens for index in members]
        num_pages -= _num_shared(units, prompts, UNIT_BYTES, trace.unit_tokens, page_size)
    return num_pages


def _num_shared(units: list[bytes], lengths: list[int], unit_bytes: int, unit_tokens: int, page_size: int) -> int:
    """Return how many pages prompts share with those before them, in order of content and length."""
    # The last unit may be partial, so equal units can be prompts of different lengths. Sorting is stable, so two sorts
    # suffice, and neither compares contents twice.
    order = sorted(range(len(units)), key=lengths.__getitem__)
    order.sort(key=units.__getitem__)
    num_shared = 0
    for start in range(1, len(order), SLAB):
        slab = order[start - 1 : start + SLAB]
        prompts, pages = [units[place] for place in slab], [lengths[place] // page_size for place in slab]
        common = _common(prompts, unit_bytes)
        in_common = map(floordiv, map(mul, common, repeat(unit_tokens)), repeat(page_size))
        num_shared += sum(map(min, in_common, pages, islice(pages, 1, None)))
    return num_shared


def _pages_by_id(requests: Sequence[TraceRequest], unit_tokens: int, page_size: int) -> int | None:
    """Return the distinct pages if every id always follows the same id, or always none: then it stands for a prefix.

    It has the pages that end in its last unit, as far as any of its prompts fills them. Return None for other ids.
    """
    if isinstance(requests, RequestColumns):
        ids, ends = np.frombuffer(requests.ids, requests.ids.typecode), np.frombuffer(requests.ends, np.int64)
        prompts, outputs = (np.array(column, np.int64) for column in (requests.prompts, requests.outputs))
    else:
        prompts = np.array([request.num_prompt_tokens for request in requests])
        outputs = np.array([request.num_output_tokens for request in requests])
        counts = -(-prompts // unit_tokens)
        if _first_unit(requests[0].units) > MOST_SPARSE * int(counts.sum()):
            return None
        packed = _packed_ids(requests, (counts * UNIT_BYTES).tolist())
        if packed is None:
            return None
        ids, ends = np.frombuffer(packed, np.uint64), np.cumsum(counts)
    num_ids = int(ids.max()) + 1
    if num_ids > MOST_SPARSE * len(ids) or num_ids > np.iinfo(np.int32).max:
        return None
    before, num_new = np.full(num_ids, UNSEEN, np.int32), np.zeros(num_ids, np.int32)
    start = 0
    for first in range(0, len(ends), SLAB):
        lasts = ends[first : first + SLAB] - start - 1
        part = ids[start : start + int(lasts[-1]) + 1].astype(np.int32)
        start += len(part)
        firsts = np.concatenate(([0], lasts[:-1] + 1))
        follows = np.empty(len(part), np.int32)
        follows[1:] = part[:-1]
        follows[firsts] = NO_ID
        known = before[part]
        before[part] = follows
        if ((known != follows) & (known != UNSEEN)).any() or (before[part] != follows).any():
            return None
        lengths = lasts - firsts + 1
        edges = np.arange(int(lengths.max()) + 1) * unit_tokens // page_size  # pages before each place
        place = np.arange(len(part), dtype=np.int32) - np.repeat(firsts.astype(np.int32), lengths)
        pages_here = np.diff(edges).astype(np.int32)[place]
        is_inner = np.ones(len(part), bool)
        is_inner[lasts] = False
        num_new[part[is_inner]] = pages_here[is_inner]
        np.maximum.at(num_new, part[lasts], prompts[first : first + SLAB] // page_size - edges[lengths - 1])
    # A sequence's last token is never computed.
    num_private = int(((prompts + outputs - 1) // page_size - prompts // page_size).sum())
    return num_private + int(num_new.sum(dtype=np.int64))


def _packed_ids(requests: Sequence[TraceRequest], sizes: Sequence[int]) -> bytes | None:
    """Return the ids of all prompts, of which those of each have that size; None for several tenants, or ranges."""
    packed: list[bytes] = []
    tenant = requests[0].tenant
    for request, size in zip(requests, sizes, strict=True):
        units = request.units
        if not isinstance(units, bytes) or request.tenant != tenant:
            return None
        packed.append(units if len(units) == size else units[:size])
    return b"".join(packed)


def _first_unit(units: Units) -> int:
    """Return the first unit; units are not empty."""
    return int.from_bytes(units[:UNIT_BYTES], byteorder) if isinstance(units, bytes) else next(filter(None, units))[0]


def _alike(firsts: array[int], tenants: Sequence[str | None]) -> Iterator[list[int]]:
    """Return the indices of requests that may share pages: several of one tenant whose first units are equal."""
    by_tenant: dict[str | None, list[int]] = {}
    for index, tenant in enumerate(tenants):
        by_tenant.setdefault(tenant, []).append(index)
    for members in by_tenant.values():
        members.sort(key=firsts.__getitem__)
        for _, group in groupby(members, key=firsts.__getitem__):
            alike = list(group)
            if len(alike) > 1:
                yield alike


def _common(prompts: list[bytes], unit_bytes: int) -> list[int]:
    """Return the number of units that each prompt shares with the one before it."""
    units = np.frombuffer(b"".join(prompts), f"u{unit_bytes}")
    num_units = np.fromiter(map(len, prompts), np.int64, len(prompts)) // unit_bytes
    # Align each prompt with the one before it, over their common length, and find the first difference.
    starts = np.cumsum(num_units) - num_units
    compared = np.minimum(num_units[1:], num_units[:-1])
    offsets = np.cumsum(compared) - compared
    within = np.arange(compared.sum()) - np.repeat(offsets, compared)
    differs = units[np.repeat(starts[1:], compared) + within] != units[np.repeat(starts[:-1], compared) + within]
    common = compared.copy()
    where = np.flatnonzero(differs)[::-1]  # reversed, so the first difference of a prompt is written last
    pair = np.searchsorted(offsets, where, side="right") - 1
    common[pair] = within[where]
    shared: list[int] = common.tolist()
    return shared


class TraceInfo(msgspec.Struct, frozen=True):
    """Contents of a trace: `values` by name, JSON-able, and `warnings` for the reader."""

    values: dict[str, Any]
    warnings: list[str]

    def to_text(self) -> str:
        """Return the table that `kvarts trace info` prints, with a line end."""
        width = max(24, *(len(name) + 2 for name in self.values))
        return "".join(f"{name:<{width}}{text}\n" for name, text in self._rows())

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
    """Return statistics of `traffic`: requests, tokens, sessions, distinct tokens, and whether prefixes are known.

    Raise ConfigError for a trace without requests or a stream; InputError for a file.

    >>> from kvarts import trace_info
    >>> trace_info("sample:mooncake").values["num_requests"]
    1000
    """
    if isinstance(traffic, Trace):
        trace = traffic
    elif isinstance(traffic, str | os.PathLike):
        from kvarts.sim.traffic.formats import load_trace

        trace = load_trace(traffic)
    else:
        trace = traffic.trace()
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
        "distinct_tokens": (distinct_pages(trace, PAGE_SIZE) or 0) * PAGE_SIZE,
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

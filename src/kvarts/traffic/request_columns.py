"""Requests of a trace as columns, for requests with nothing but a time, lengths and ids."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from operator import le
from sys import byteorder
from typing import overload

from kvarts.content import UNIT_BYTES
from kvarts.limits import LATEST_NS
from kvarts.traffic.mooncake_row import MooncakeRow
from kvarts.traffic.trace_request import TraceRequest

__all__ = ["RequestColumns", "add_plain", "requests_of"]

NS_PER_MS = 1_000_000
CHUNK = 1024
"""Number of requests made at once: their objects fit in a core's cache."""


def add_plain(rows: list[MooncakeRow], first_row: int, trace_block_size: int, columns: RequestColumns) -> int:
    """Add the requests of the first of `rows` to `columns`, up to one that is not valid or not plain.

    Return how many were added. A plain row has a time in whole milliseconds, lengths, ids, and nothing else. The first
    of `rows` is row `first_row` of its file. An id that is not valid prevents all of them from being added.
    """
    arrivals_ns: list[int] = []
    prompts: list[int] = []
    outputs: list[int] = []
    ends: list[int] = []
    ids: list[int] = []
    before = len(columns.ids)
    for row in rows:
        hash_ids, timestamp = row.hash_ids, row.timestamp
        input_length, output_length = row.input_length, row.output_length
        if (
            hash_ids is None
            or type(timestamp) is not int
            or output_length is None
            or not 0 <= timestamp <= LATEST_NS // NS_PER_MS
            or output_length < 1
            or input_length < 1
            or not 0 <= len(hash_ids) * trace_block_size - input_length < trace_block_size
            or row.delay is not None
            or row.session_id is not None
            or row.output_token_ids is not None
            or row.request_id is not None
            or row.tenant is not None
            or row.priority != 0
            or row.cancel_after_ms is not None
            or row.hints is not None
            or row.wait_for is not None
        ):
            break
        arrivals_ns.append(timestamp * NS_PER_MS)
        prompts.append(input_length)
        outputs.append(output_length)
        ids += hash_ids
        ends.append(before + len(ids))
    try:
        columns.ids.frombytes(struct.pack(f"{len(ids)}{columns.ids.typecode}", *ids))
    except struct.error:
        if columns.ids.typecode == "Q" or (ids and not 0 <= min(ids) <= max(ids) < 1 << 64):
            return 0
        columns.ids = array("Q", columns.ids)
        columns.ids.frombytes(struct.pack(f"{len(ids)}Q", *ids))
    num_added = len(ends)
    columns.rows.extend(range(first_row, first_row + num_added))
    columns.arrivals_ns.fromlist(arrivals_ns)
    columns.prompts.fromlist(prompts)
    columns.outputs.fromlist(outputs)
    columns.ends.fromlist(ends)
    return num_added


def requests_of(
    rows: Sequence[int],
    arrivals_ns: Sequence[int],
    prompts: Sequence[int],
    outputs: Sequence[int],
    ends: Sequence[int],
    ids: bytes,
    first: int,
) -> list[TraceRequest]:
    """Return the requests of some plain rows, of which `ids` are all ids; `first`: how many ids are before these."""
    found: list[TraceRequest] = []
    start = 0
    for row, arrival_ns, prompt, output, end in zip(rows, arrivals_ns, prompts, outputs, ends, strict=True):
        stop = (end - first) * UNIT_BYTES
        found.append(TraceRequest(row, arrival_ns, ids[start:stop], prompt, output))
        start = stop
    return found


class RequestColumns(Sequence[TraceRequest]):
    """A sequence of requests that are made when they are read; a request is 24 bytes and its ids.

    Ids have 4 bytes each, or 8 once one of them needs that.
    """

    def __init__(self) -> None:
        self.rows = array("I")
        self.arrivals_ns = array("q")
        self.prompts = array("i")
        self.outputs = array("i")
        self.ends = array("q")
        """For each request, the number of ids up to its last one."""
        self.ids = array("I")

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> TraceRequest: ...
    @overload
    def __getitem__(self, index: slice) -> list[TraceRequest]: ...
    def __getitem__(self, index: int | slice) -> TraceRequest | list[TraceRequest]:
        if isinstance(index, slice):
            start, end, step = index.indices(len(self))
            return (
                self._made(start, max(start, end)) if step == 1 else [self[place] for place in range(start, end, step)]
            )
        place = range(len(self))[index]
        return self._made(place, place + 1)[0]

    def __iter__(self) -> Iterator[TraceRequest]:
        for start in range(0, len(self), CHUNK):
            yield from self._made(start, min(start + CHUNK, len(self)))

    def __eq__(self, other: object) -> bool:
        return list(self) == (list(other) if isinstance(other, RequestColumns) else other)

    __hash__ = None  # type: ignore[assignment]

    def first_ids(self) -> array[int]:
        """Return the first id of each request."""
        starts = islice(chain((0,), self.ends), len(self))
        return array("Q", map(self.ids.__getitem__, starts))

    def _made(self, start: int, end: int) -> list[TraceRequest]:
        first = self.ends[start - 1] if start else 0
        last = self.ends[end - 1] if end else 0
        ids = _in_8_bytes(self.ids[first:last])
        return requests_of(
            self.rows[start:end],
            self.arrivals_ns[start:end],
            self.prompts[start:end],
            self.outputs[start:end],
            self.ends[start:end],
            ids,
            first,
        )

    def in_arrival_order(self) -> RequestColumns:
        """Return the requests sorted by time, and in the order of their rows if that is equal; the first time is 0."""
        times_ns = self.arrivals_ns
        first_ns = min(times_ns)
        if not first_ns and all(map(le, times_ns, times_ns[1:])):
            return self
        order = sorted(range(len(self)), key=times_ns.__getitem__)
        found = RequestColumns()
        found.rows.extend(map(self.rows.__getitem__, order))
        found.arrivals_ns.extend(times_ns[place] - first_ns for place in order)
        found.prompts.extend(map(self.prompts.__getitem__, order))
        found.outputs.extend(map(self.outputs.__getitem__, order))
        found.ids = array(self.ids.typecode)
        for place in order:
            found.ids += self.ids[self.ends[place - 1] if place else 0 : self.ends[place]]
            found.ends.append(len(found.ids))
        return found


def _in_8_bytes(ids: array[int]) -> bytes:
    """Return ids in 8 bytes each."""
    if ids.itemsize == UNIT_BYTES:
        return ids.tobytes()
    halves = array("I", bytes(UNIT_BYTES * len(ids)))
    halves[byteorder == "big" :: 2] = ids
    return halves.tobytes()

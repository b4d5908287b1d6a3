"""Requests of a trace as columns, for requests with nothing but a time, lengths and ids."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import le
from sys import byteorder
from typing import overload

from kvarts.core.content import UNIT_BYTES
from kvarts.sim.traffic.plain_rows import plain_columns, requests_of
from kvarts.sim.traffic.trace_request import PlainRow, TraceRequest

__all__ = ["RequestColumns"]

CHUNK = 1024
"""Number of requests made at once: their objects fit in a core's cache."""


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

    def add(self, rows: list[PlainRow], first_row: int, trace_block_size: int) -> int:
        """Add the requests of the first of `rows`, up to one with too many or too few ids; return how many.

        The first of `rows` is row `first_row` of its file. An id that is not valid prevents all of them from being
        added.
        """
        num_ids = len(self.ids)
        try:
            arrivals_ns, prompts, outputs, ends = plain_columns(rows, trace_block_size, self.ids)
        except OverflowError:
            del self.ids[num_ids:]
            if self.ids.typecode == "Q":
                return 0
            larger = array("Q", self.ids)
            try:
                arrivals_ns, prompts, outputs, ends = plain_columns(rows, trace_block_size, larger)
            except OverflowError:
                return 0
            self.ids = larger
        num_added = len(ends)
        self.rows.fromlist(list(range(first_row, first_row + num_added)))
        self.arrivals_ns.fromlist(arrivals_ns)
        self.prompts.fromlist(prompts)
        self.outputs.fromlist(outputs)
        self.ends.fromlist(ends)
        return num_added

    def packed_ids(self) -> list[bytes]:
        """Return the ids of each request, in as many bytes each as an item of `ids` has."""
        packed, size = self.ids.tobytes(), self.ids.itemsize
        ends = [end * size for end in self.ends]
        return [packed[start:end] for start, end in zip(chain((0,), ends), ends, strict=False)]

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
    if ids.itemsize == UNIT_BYTES:
        return ids.tobytes()
    halves = array("I", bytes(UNIT_BYTES * len(ids)))
    halves[byteorder == "big" :: 2] = ids
    return halves.tobytes()

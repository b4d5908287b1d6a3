"""Plain rows of a Mooncake trace, many at once: to columns, and from columns to requests."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvarts.content import UNIT_BYTES
from kvarts.traffic.trace_request import NS_PER_MS, PlainRow, TraceRequest

if TYPE_CHECKING:
    from kvarts.traffic.request_columns import RequestColumns

__all__ = ["add_plain", "requests_of"]


def add_plain(rows: list[PlainRow], first_row: int, trace_block_size: int, columns: RequestColumns) -> int:
    """Add the requests of the first of `rows` to `columns`, up to one with too many or too few ids for its prompt.

    Return how many were added. The first of `rows` is row `first_row` of its file. An id that is not valid prevents all
    of them from being added.
    """
    arrivals_ns: list[int] = []
    prompts: list[int] = []
    outputs: list[int] = []
    ends: list[int] = []
    ids: list[int] = []
    before = len(columns.ids)
    for row in rows:
        hash_ids: list[int] = row.hash_ids
        prompt: int = row.input_length
        if not 0 <= len(hash_ids) * trace_block_size - prompt < trace_block_size:
            break
        arrivals_ns.append(row.timestamp * NS_PER_MS)
        prompts.append(prompt)
        outputs.append(row.output_length)
        ids.extend(hash_ids)
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

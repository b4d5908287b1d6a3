"""Plain rows of a Mooncake trace, many at once: to columns, and from columns to requests."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvarts.content import UNIT_BYTES
from kvarts.limits import LATEST_NS
from kvarts.traffic.trace_request import MooncakeRow, TraceRequest

if TYPE_CHECKING:
    from kvarts.traffic.request_columns import RequestColumns

__all__ = ["add_plain", "requests_of"]

NS_PER_MS = 1_000_000


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

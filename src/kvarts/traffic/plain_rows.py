"""Plain rows of a Mooncake trace, many at once: to columns, and from columns to requests."""

from __future__ import annotations

from collections.abc import Sequence

from kvarts.content import UNIT_BYTES
from kvarts.limits import LATEST_NS
from kvarts.traffic.trace_request import MooncakeRow, TraceRequest

__all__ = ["plain_columns", "requests_of"]

NS_PER_MS = 1_000_000


def plain_columns(
    rows: list[MooncakeRow], trace_block_size: int, num_ids: int
) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    """Return times in ns, prompts, outputs, ends and ids of the first of `rows`, up to one not valid or not plain.

    A plain row has a time in whole milliseconds, lengths, ids, and nothing else. Its end is the number of ids up to
    its last one, with `num_ids` before all of these. Ids are not checked.
    """
    arrivals_ns: list[int] = []
    prompts: list[int] = []
    outputs: list[int] = []
    ends: list[int] = []
    ids: list[int] = []
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
        ends.append(num_ids + len(ids))
    return arrivals_ns, prompts, outputs, ends, ids


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

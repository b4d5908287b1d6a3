"""Plain rows of a Mooncake trace, many at once: to columns, and from columns to requests."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvarts.core.content import UNIT_BYTES
from kvarts.sim.traffic.trace_request import NS_PER_MS, PlainRow, TraceRequest

__all__ = ["plain_columns", "requests_of"]


def plain_columns(
    rows: list[PlainRow], trace_block_size: int, ids: array[int]
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return times in ns, prompts, outputs and ends of `rows`, up to one with too many or too few ids.

    Their ids are appended to `ids`; the end of a row is the number of these up to its last one. Raise OverflowError for
    an id that has no room in `ids`, of which some are appended then.
    """
    arrivals_ns: list[int] = []
    prompts: list[int] = []
    outputs: list[int] = []
    ends: list[int] = []
    for row in rows:
        hash_ids: list[int] = row.hash_ids
        prompt: int = row.input_length
        if not 0 <= len(hash_ids) * trace_block_size - prompt < trace_block_size:
            break
        arrivals_ns.append(row.timestamp * NS_PER_MS)
        prompts.append(prompt)
        outputs.append(row.output_length)
        ids.fromlist(hash_ids)
        ends.append(len(ids))
    return arrivals_ns, prompts, outputs, ends


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

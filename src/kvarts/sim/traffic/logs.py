"""Reader for a run that a live engine recorded: JSON lines, one request with its tokens per line, by arrival."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from kvarts.base.decoders import UNDECODED
from kvarts.base.errors import ENDS_EARLY, ConfigError, InputError, parts_of
from kvarts.base.limits import LATEST_NS
from kvarts.core.content import pack_units
from kvarts.core.hints import Hints
from kvarts.sim.traffic.bounds import Count, DateNs, Priority, SpanNs
from kvarts.sim.traffic.trace import Trace, TraceRequest
from kvarts.sim.traffic.trace_file import TraceFile, nothing_left
from kvarts.sim.traffic.trace_request import DirectRequest

__all__ = ["RecordedRow", "load_recorded", "recorded_trace"]


class RecordedRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request. `output`: the tokens it generated. `ended`: its state when the record was written.

    A request that was refused because its pages could never fit generated nothing; its `num_output_tokens` is the
    number it asked for, so that a replay refuses it too. `began_ns`: start of the run, in runs that have other records.
    `cancel_after_ns`: time after arrival at which its client gave it up, of a run on a fleet: `output` then has the
    tokens that would have followed, too. `worker`, `is_left`, `fetches`: see DirectRequest; the last is a line, from 0.
    `model`: the name by which it asked for one of several.
    """

    arrival_ns: DateNs
    prompt: Annotated[list[int], msgspec.Meta(min_length=1)]
    num_output_tokens: Count
    output: list[int] = []
    max_tokens: int = 0
    priority: Priority = 0
    tenant: str | None = None
    model: str | msgspec.UnsetType = msgspec.UNSET
    hints: Hints | msgspec.UnsetType = msgspec.UNSET
    request_id: str | None = None
    ended: str = "finished"
    began_ns: DateNs | msgspec.UnsetType = msgspec.UNSET
    cancel_after_ns: SpanNs | msgspec.UnsetType = msgspec.UNSET
    worker: Count | msgspec.UnsetType = msgspec.UNSET
    is_left: bool | msgspec.UnsetType = msgspec.UNSET
    fetches: Count | msgspec.UnsetType = msgspec.UNSET


def load_recorded(path: Path | str | TraceFile, *, skip_bad_lines: bool = False) -> Trace:
    """Read a recorded run. Raise MissingFileError, or InputError with file and line.

    A last line that ends early is counted as skipped.
    """
    file = TraceFile.of(path)
    rows: list[RecordedRow] = []
    num_skipped = 0
    decoder = msgspec.json.Decoder(RecordedRow)
    began_ns: int | None = None
    torn: InputError | None = None
    """The error of a line that ends early: only the last one may, as of a writer that was killed."""
    for number, line in file.records():
        if torn is not None:
            raise torn
        try:
            row = decoder.decode(line)
            if began_ns is None:
                began_ns = row.began_ns if isinstance(row.began_ns, int) else row.arrival_ns
            _request(0, row, began_ns, {})
        except (*UNDECODED, ConfigError) as error:
            num_skipped += 1
            if not skip_bad_lines:
                what, field = parts_of(error)
                torn = InputError(what, path=file.path, line=number, field=field)
                if what != ENDS_EARLY:
                    raise torn from error
        else:
            rows.append(row)
    trace = recorded_trace(rows, name=file.name, num_skipped_lines=num_skipped)
    if not trace.requests:
        raise nothing_left(file, trace.left_out, num_skipped)
    return trace


def recorded_trace(
    rows: list[RecordedRow], *, name: str = "recorded", num_skipped_lines: int = 0, began_ns: int | None = None
) -> Trace:
    """Return recorded rows as a trace, without requests that were cancelled before their first token.

    `began_ns`: start of the trace; default: that given in the rows, else the first arrival.
    """
    first_ns = min((row.arrival_ns for row in rows), default=0) if began_ns is None else began_ns
    if began_ns is None and rows and isinstance(rows[0].began_ns, int):
        first_ns = min(first_ns, rows[0].began_ns)
    kept = [row for row in rows if row.num_output_tokens]
    places = {line: index for index, line in enumerate(line for line, row in enumerate(rows) if row.num_output_tokens)}
    requests = [_request(index, row, first_ns, places) for index, row in enumerate(kept)]
    requests.sort(key=lambda request: request.arrival_ns)
    return Trace(
        requests,
        has_output_tokens=True,
        name=name,
        num_skipped_lines=num_skipped_lines,
        left_out={"cancelled before a token": len(rows) - len(kept)} if len(kept) < len(rows) else None,
    )


def _request(index: int, row: RecordedRow, first_ns: int, places: Mapping[int, int]) -> TraceRequest:
    """Return row `index` of a trace. `places`: the rows of the lines of the file."""
    if abs(row.arrival_ns - first_ns) > LATEST_NS:
        raise InputError("is more than 73 years from the start of the run", field="arrival_ns")
    is_whole = len(row.output) == row.num_output_tokens
    direct = None
    if isinstance(row.worker, int):
        fetches = places.get(row.fetches) if isinstance(row.fetches, int) else None
        direct = DirectRequest(row.worker, row.is_left is True, fetches)
    return TraceRequest(
        index,
        row.arrival_ns - first_ns,
        pack_units(row.prompt),
        len(row.prompt),
        row.num_output_tokens,
        pack_units(row.output) if is_whole else None,
        row.priority,
        request_id=row.request_id,
        tenant=row.tenant,
        cancel_after_ns=row.cancel_after_ns if isinstance(row.cancel_after_ns, int) else None,
        hints=row.hints if isinstance(row.hints, Hints) else None,
        direct=direct,
        model=row.model if isinstance(row.model, str) else None,
        stops=row.ended == "finished" and row.num_output_tokens < row.max_tokens,
    )

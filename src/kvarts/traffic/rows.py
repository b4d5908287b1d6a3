"""Shared by all row readers: JSON records to requests, prompts of unknown content, and arrival order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import TypeVar

import msgspec

from kvarts.content import pack_units
from kvarts.errors import InputError, parts_of
from kvarts.limits import LATEST_NS, brief
from kvarts.traffic.trace import Trace, TraceRequest
from kvarts.traffic.trace_file import TraceFile

__all__ = [
    "NO_ID",
    "SKIP_HINT",
    "UNIT_TOKENS",
    "by_arrival",
    "date_ns",
    "load_rows",
    "nothing_left",
    "unlike_any_other",
]

UNIT_TOKENS = 512
NO_ID = 1 << 63
"""NO_ID plus the row number is a unit that no other prompt has."""
SKIP_HINT = "Mend the line, or pass --skip-bad-lines to leave such lines out and count them."

TIME = r"(?a)(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9})\d*)?(Z|[+-]\d\d:?\d\d)?"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

RowT = TypeVar("RowT")


def load_rows(
    files: TraceFile | Sequence[TraceFile],
    kind: type[RowT],
    request_of: Callable[[int, RowT], TraceRequest | str | None],
    *,
    unit_tokens: int = UNIT_TOKENS,
    skip_bad_lines: bool,
    knows_prefixes: bool = True,
) -> Trace:
    """Read the JSON records of one or several files, decoded as `kind`; the first arrival becomes 0.

    `request_of` returns a request; a reason to leave a record out, which is counted; or None for an unrelated record.
    Raise InputError, with line and field, for malformed input, unless `skip_bad_lines`, which skips and counts it.
    """
    requests: list[TraceRequest] = []
    left_out: Counter[str] = Counter()
    num_skipped = 0
    decoder = msgspec.json.Decoder(kind)
    files = [files] if isinstance(files, TraceFile) else files
    for file in files:
        for line, row in file.records():
            try:
                request = _decoded(decoder, row, request_of, len(requests))
            except InputError as error:
                if not skip_bad_lines:
                    raise InputError(
                        error.what, path=file.path, line=line, field=error.field, hint=error.hint or SKIP_HINT
                    ) from error
                num_skipped += 1
                continue
            if isinstance(request, str):
                left_out[request] += 1
            elif request is not None:
                requests.append(request)
    if not requests:
        raise nothing_left(files[0], left_out, num_skipped)
    return Trace(
        by_arrival(requests, files[0]),
        unit_tokens=unit_tokens,
        knows_prefixes=knows_prefixes,
        name=files[0].name,
        num_skipped_lines=num_skipped,
        left_out=left_out,
    )


def _decoded(
    decoder: msgspec.json.Decoder[RowT],
    row: bytes,
    request_of: Callable[[int, RowT], TraceRequest | str | None],
    index: int,
) -> TraceRequest | str | None:
    try:
        return request_of(index, decoder.decode(row))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        what, field = parts_of(error)
        raise InputError(what, field=field) from error
    except RecursionError:
        raise InputError("is nested too deeply") from None


def nothing_left(
    file: TraceFile, left_out: Mapping[str, int] = MappingProxyType({}), num_skipped: int = 0
) -> InputError:
    """Return the error for a file without requests, with the numbers of records left out."""
    counts = [f"{count:,} {reason}" for reason, count in left_out.items()]
    if num_skipped:
        counts.append(f"{num_skipped:,} that cannot be read")
    why = f": {', '.join(counts)}" if counts else ""
    return InputError(
        f"has no requests{why}",
        path=file.path,
        hint="A trace has one request per line or row.",
    )


def by_arrival(requests: Sequence[TraceRequest], file: TraceFile) -> list[TraceRequest]:
    """Return requests stably sorted by arrival, the first at 0. Raise InputError if they span more than 73 years."""
    first_ns = min(request.arrival_ns for request in requests)
    if max(request.arrival_ns for request in requests) - first_ns > LATEST_NS:
        raise InputError("has times more than 73 years apart", path=file.path)
    moved = [msgspec.structs.replace(request, arrival_ns=request.arrival_ns - first_ns) for request in requests]
    moved.sort(key=lambda request: request.arrival_ns)
    return moved


def date_ns(text: str, field: str) -> int:
    """Return nanoseconds since 1970 for a date and time, in UTC unless it has an offset. Raise InputError."""
    match = re.fullmatch(TIME, text)
    try:
        if match is None:
            raise ValueError
        whole, fraction, offset = match.groups()
        since = datetime.fromisoformat(whole + (offset or "+00:00").replace("Z", "+00:00")) - EPOCH
    except (ValueError, OverflowError):
        raise InputError(f"{brief(text)} is not a time such as 2024-05-10 00:00:00.01+00:00", field=field) from None
    return since // timedelta(seconds=1) * 1_000_000_000 + int((fraction or "").ljust(9, "0"))


def unlike_any_other(index: int, num_tokens: int, unit_tokens: int = UNIT_TOKENS, *, beside_ids: bool = False) -> bytes:
    """Return units of `unit_tokens` tokens that only row `index` has. `beside_ids`: other rows have hash ids."""
    first = (NO_ID if beside_ids else 0) + (index << 32)
    return pack_units(range(first, first - (-num_tokens // unit_tokens)))

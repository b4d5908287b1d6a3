"""Readers for CSV files with a column of times and two of lengths.

They say how long prompts and answers were, and nothing of what was in them: every prompt is unlike any other. Rows
with no output tokens are requests that failed: they are left out and counted. Other columns are left alone.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path

import msgspec

from kvarts.errors import InputError
from kvarts.limits import MOST_COUNT, brief
from kvarts.traffic.rows import SKIP_HINT, UNIT_TOKENS, by_arrival, nothing_left, unlike_any_other
from kvarts.traffic.trace import Trace, TraceRequest
from kvarts.traffic.trace_file import TraceFile

__all__ = ["load_azure", "load_burstgpt", "load_splitwise", "load_vidur"]

MOST_S = 1e10
TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9})\d*)?(Z|[+-]\d\d:?\d\d)?", re.ASCII)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class _Columns(msgspec.Struct, frozen=True, kw_only=True):
    """Names of the columns of one form."""

    time: str | None
    prompt: str
    output: str
    read_time: Callable[[str, str], int]
    """Returns nanoseconds for the text of a time and the name of its column."""
    session: str | None = None
    request: str | None = None
    one: str | None = None
    """A column that has to be 1."""


def load_azure(path: Path | str | TraceFile, *, skip_bad_lines: bool = False) -> Trace:
    """Read an LLM inference trace of Azure: `TIMESTAMP`, of 2024 with an offset, `ContextTokens`, `GeneratedTokens`.

    The first arrival becomes 0, rows are sorted by time, equals in the order of the file. Raise MissingFileError, and
    InputError with file, line and field for a row that cannot be read, or count it with `skip_bad_lines`.
    """
    columns = _Columns(time="TIMESTAMP", prompt="ContextTokens", output="GeneratedTokens", read_time=_date_ns)
    return _load(TraceFile.of(path), columns, skip_bad_lines=skip_bad_lines)


def load_burstgpt(path: Path | str | TraceFile, *, skip_bad_lines: bool = False) -> Trace:
    """Read BurstGPT: `Timestamp` in seconds, `Request tokens`, `Response tokens`, and `Session ID` in later releases.

    Requests with one `Session ID` are turns of a session: each arrives at its time, or when the one before is done.
    Raises as `load_azure` does.
    """
    columns = _Columns(
        time="Timestamp",
        prompt="Request tokens",
        output="Response tokens",
        read_time=_seconds_ns,
        session="Session ID",
    )
    return _load(TraceFile.of(path), columns, skip_bad_lines=skip_bad_lines)


def load_vidur(path: Path | str | TraceFile, *, skip_bad_lines: bool = False) -> Trace:
    """Read Vidur's traces: `arrived_at` in seconds, `num_prefill_tokens`, `num_decode_tokens`.

    Without `arrived_at`, which its traces of lengths do not have, all requests arrive at 0, and a warning says so.
    Raises as `load_azure` does.
    """
    file = TraceFile.of(path)
    columns = _Columns(
        time="arrived_at" if "arrived_at" in file.header else None,
        prompt="num_prefill_tokens",
        output="num_decode_tokens",
        read_time=_seconds_ns,
    )
    return _load(file, columns, skip_bad_lines=skip_bad_lines)


def load_splitwise(path: Path | str | TraceFile, *, skip_bad_lines: bool = False) -> Trace:
    """Read the traces of splitwise-sim: `arrival_timestamp` in seconds, `prompt_size`, `token_size`, `batch_size` 1.

    Raises as `load_azure` does.
    """
    columns = _Columns(
        time="arrival_timestamp",
        prompt="prompt_size",
        output="token_size",
        read_time=_seconds_ns,
        request="request_id",
        one="batch_size",
    )
    return _load(TraceFile.of(path), columns, skip_bad_lines=skip_bad_lines)


def _load(file: TraceFile, columns: _Columns, *, skip_bad_lines: bool) -> Trace:
    # Lines end in \n, as in an editor that shows the line of an error; str.splitlines knows more ends.
    lines = csv.reader(StringIO(file.text()))
    requests: list[TraceRequest] = []
    left_out: Counter[str] = Counter()
    num_skipped = 0
    try:
        read = _Rows(file, columns, [name.strip() for name in next(lines, [])])
        for row in lines:
            if not row:
                continue
            try:
                request = read.request(len(requests), row)
            except InputError as error:
                if not skip_bad_lines:
                    raise InputError(
                        error.what, path=file.path, line=lines.line_num, field=error.field, hint=SKIP_HINT
                    ) from error
                num_skipped += 1
                continue
            if request is None:
                left_out["without output tokens"] += 1
            else:
                requests.append(request)
    except csv.Error as error:
        raise InputError(f"is not CSV: {error}", path=file.path, line=lines.line_num) from error
    if not requests:
        raise nothing_left(file, left_out, num_skipped)
    warnings = [] if columns.time else ["the trace has no times: all requests arrive at 0, or as --concurrency says"]
    return Trace(
        by_arrival(requests, file),
        unit_tokens=UNIT_TOKENS,
        knows_prefixes=False,
        name=file.name,
        num_skipped_lines=num_skipped,
        left_out=left_out,
        warnings=warnings,
    )


class _Rows:
    """Reads the rows below one header. Raises InputError for a column that is not there."""

    def __init__(self, file: TraceFile, columns: _Columns, header: list[str]) -> None:
        self._columns = columns
        self._width = len(header)
        names = (columns.time, columns.prompt, columns.output, columns.session, columns.request, columns.one)
        self._places = {name: header.index(name) for name in names if name is not None and name in header}
        for name in (columns.time, columns.prompt, columns.output):
            if name is not None and name not in self._places:
                raise InputError(
                    "is missing",
                    path=file.path,
                    line=1,
                    field=name,
                    hint="The first line has the names of the columns.",
                )

    def request(self, index: int, row: list[str]) -> TraceRequest | None:
        """Return the request of a row; None for one without output tokens."""
        columns = self._columns
        if len(row) != self._width:
            raise InputError(f"has {len(row)} columns instead of {self._width}")
        text = {name: row[place].strip() for name, place in self._places.items()}
        time_ns = 0 if columns.time is None else columns.read_time(text[columns.time], columns.time)
        num_prompt = _count(text[columns.prompt].removesuffix(".0"), columns.prompt, least=1)
        num_output = _count(text[columns.output].removesuffix(".0"), columns.output, least=0)
        if columns.one in text and text[columns.one] not in {"1", "1.0"}:
            raise InputError(f"must be 1, got {brief(text[columns.one])}", field=columns.one)
        if not num_output:
            return None
        return TraceRequest(
            index,
            time_ns,
            unlike_any_other(index, num_prompt),
            num_prompt,
            num_output,
            session_id=(text.get(columns.session) or None) if columns.session else None,
            request_id=text.get(columns.request) if columns.request else None,
        )


def _date_ns(text: str, column: str) -> int:
    """Return nanoseconds since 1970 for a date and time; an offset is taken into account."""
    match = TIME.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        whole, fraction, offset = match.groups()
        since = datetime.fromisoformat(whole + (offset or "+00:00").replace("Z", "+00:00")) - EPOCH
    except (ValueError, OverflowError):
        raise InputError(f"{brief(text)} is not a time such as 2024-05-10 00:00:00.01+00:00", field=column) from None
    return since // timedelta(seconds=1) * 1_000_000_000 + int((fraction or "").ljust(9, "0"))


def _seconds_ns(text: str, column: str) -> int:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < MOST_S:
        raise InputError(f"must be a number of seconds of at least 0, got {brief(text)}", field=column)
    return round(seconds * 1e9)


def _count(text: str, name: str, *, least: int) -> int:
    """Return a number of tokens."""
    if not (text.isascii() and text.isdecimal()) or len(text) > 10 or not least <= int(text) <= MOST_COUNT:
        raise InputError(f"must be a whole number from {least} to {MOST_COUNT:,}, got {brief(text)}", field=name)
    return int(text)

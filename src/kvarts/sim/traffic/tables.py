"""Readers for CSV files with a column of times and two of lengths.

They record the lengths of prompts and answers but not the contents, so no two prompts share a prefix. Rows without
output tokens are failed requests: they are left out and counted. Other columns are ignored.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import msgspec

from kvarts.base.errors import InputError
from kvarts.base.limits import MOST_COUNT, brief
from kvarts.base.units import to_ns
from kvarts.sim.traffic.graph import NO_OUTPUT
from kvarts.sim.traffic.trace import Trace, TraceRequest
from kvarts.sim.traffic.trace_file import (
    SKIP_HINT,
    UNIT_TOKENS,
    TraceFile,
    by_arrival,
    date_ns,
    nothing_left,
    unlike_any_other,
)

__all__ = ["load_azure", "load_burstgpt"]

MOST_S = 1e10


class _Columns(msgspec.Struct, frozen=True, kw_only=True):
    """Column names of one form."""

    time: str
    prompt: str
    output: str
    read_time: Callable[[str, str], int]
    """Returns nanoseconds for the text of a time and the name of its column."""
    session: str | None = None


def load_azure(path: Path | str | TraceFile, *, skip_bad_lines: bool = False) -> Trace:
    """Read an LLM inference trace of Azure: `TIMESTAMP` (with an offset in 2024), `ContextTokens`, `GeneratedTokens`.

    The first arrival becomes 0, and rows are stably sorted by time. Raise MissingFileError; InputError, with file, line
    and field, for a malformed row, which `skip_bad_lines` skips and counts instead.
    """
    columns = _Columns(time="TIMESTAMP", prompt="ContextTokens", output="GeneratedTokens", read_time=date_ns)
    return _load(TraceFile.of(path), columns, skip_bad_lines=skip_bad_lines)


def load_burstgpt(path: Path | str | TraceFile, *, skip_bad_lines: bool = False) -> Trace:
    """Read BurstGPT: `Timestamp` in seconds, `Request tokens`, `Response tokens`, and `Session ID` in later releases.

    Requests with one `Session ID` are turns of a session: each arrives at its time, or when the previous one is done.
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


def _load(file: TraceFile, columns: _Columns, *, skip_bad_lines: bool) -> Trace:
    # Lines end only in \n, as in the editor that shows an error's line; str.splitlines accepts other ends too.
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
                left_out[NO_OUTPUT] += 1
            else:
                requests.append(request)
    except csv.Error as error:
        raise InputError(f"is not CSV: {error}", path=file.path, line=lines.line_num) from error
    if not requests:
        raise nothing_left(file, left_out, num_skipped)
    return Trace(
        by_arrival(requests, file),
        unit_tokens=UNIT_TOKENS,
        knows_prefixes=False,
        name=file.name,
        num_skipped_lines=num_skipped,
        left_out=left_out,
    )


class _Rows:
    """Reads the rows below one header. Raises InputError for a missing column."""

    def __init__(self, file: TraceFile, columns: _Columns, header: list[str]) -> None:
        self._columns = columns
        self._width = len(header)
        names = (columns.time, columns.prompt, columns.output, columns.session)
        self._places = {name: header.index(name) for name in names if name is not None and name in header}
        for name in (columns.time, columns.prompt, columns.output):
            if name not in self._places:
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
        time_ns = columns.read_time(text[columns.time], columns.time)
        num_prompt = _count(text[columns.prompt].removesuffix(".0"), columns.prompt, least=1)
        num_output = _count(text[columns.output].removesuffix(".0"), columns.output, least=0)
        if not num_output:
            return None
        return TraceRequest(
            index,
            time_ns,
            unlike_any_other(index, num_prompt),
            num_prompt,
            num_output,
            session_id=(text.get(columns.session) or None) if columns.session else None,
        )


def _seconds_ns(text: str, column: str) -> int:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < MOST_S:
        raise InputError(f"must be a number of seconds of at least 0, got {brief(text)}", field=column)
    return to_ns(seconds, 10**9)


def _count(text: str, name: str, *, least: int) -> int:
    """Return a validated number of tokens."""
    if not (text.isascii() and text.isdecimal()) or len(text) > 10 or not least <= int(text) <= MOST_COUNT:
        raise InputError(f"must be a whole number from {least} to {MOST_COUNT:,}, got {brief(text)}", field=name)
    return int(text)

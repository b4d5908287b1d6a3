"""Readers for CSV files of the Azure LLM inference traces of 2023, and of BurstGPT.

Azure: `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`. BurstGPT: `Timestamp` (seconds), `Model`, `Request tokens`,
`Response tokens`, `Total tokens`, `Log Type`, and in later releases `Session ID` and `Elapsed time`, which are left
alone.

They say how long prompts and answers were, and nothing of what was in them: every prompt is unlike any other.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from datetime import datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

from kvarts.content import pack_units
from kvarts.errors import InputError
from kvarts.files import read_text
from kvarts.limits import LATEST_NS, MOST_COUNT, brief
from kvarts.traffic.trace import Trace, TraceRequest

__all__ = ["load_azure", "unlike_any_other"]

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURST_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
UNIT_TOKENS = 512


def load_azure(path: Path | str, *, skip_bad_lines: bool = False) -> Trace:
    """Read a whole file; the first arrival becomes 0, rows are sorted by time, equals in the order of the file.

    Raise MissingFileError, and InputError with file, line and field for a row that cannot be read, or count it with
    `skip_bad_lines`.
    """
    path = Path(path)
    # Lines end in \n, as in an editor that shows the line of an error; str.splitlines knows more ends.
    lines = csv.reader(StringIO(read_text(path, hint="Check the path of the trace.")))
    try:
        return _trace(path, lines, skip_bad_lines=skip_bad_lines)
    except csv.Error as error:
        raise InputError(f"is no CSV: {error}", path=path, line=lines.line_num) from error


def _trace(path: Path, lines: Any, *, skip_bad_lines: bool) -> Trace:
    header = tuple(name.strip() for name in next(lines, []))
    read: Callable[[list[str]], tuple[int, int, int] | None]
    if header == COLUMNS:
        read = _row
    elif set(BURST_COLUMNS) <= set(header):
        read = _BurstRows(header).read
    else:
        raise InputError(
            f"begins with {brief(','.join(header))}",
            path=path,
            line=1,
            hint=f"The first line must be {','.join(COLUMNS)}, or have the columns {', '.join(BURST_COLUMNS)}.",
        )
    rows: list[tuple[int, int, int]] = []
    num_skipped = 0
    for row in lines:
        if not row:
            continue
        try:
            read_row = read(row)
        except InputError as error:
            if not skip_bad_lines:
                hint = "Mend the line, or pass --skip-bad-lines to leave such lines out and count them."
                raise InputError(error.what, path=path, line=lines.line_num, field=error.field, hint=hint) from error
            num_skipped += 1
        else:
            if read_row is not None:
                rows.append(read_row)
    if not rows:
        raise InputError("has no requests", path=path, hint="A line has a time and two numbers of tokens.")
    first_ns = min(time_ns for time_ns, _, _ in rows)
    if max(time_ns for time_ns, _, _ in rows) - first_ns > LATEST_NS:
        raise InputError("has times more than 73 years apart", path=path, field="TIMESTAMP")
    requests = [
        TraceRequest(index, time_ns - first_ns, unlike_any_other(index, num_prompt), num_prompt, num_output)
        for index, (time_ns, num_prompt, num_output) in enumerate(rows)
    ]
    requests.sort(key=lambda request: request.arrival_ns)
    return Trace(requests, unit_tokens=UNIT_TOKENS, knows_prefixes=False, name=path.name, num_skipped_lines=num_skipped)


def _row(row: list[str]) -> tuple[int, int, int]:
    """Return nanoseconds, prompt tokens and output tokens."""
    if len(row) != len(COLUMNS):
        raise InputError(f"has {len(row)} columns instead of {len(COLUMNS)}")
    whole, _, fraction = row[0].strip().partition(".")
    try:
        since = datetime.fromisoformat(whole) - datetime(1970, 1, 1)
    except ValueError:
        raise InputError(f"{brief(row[0])} is no time", field="TIMESTAMP") from None
    digits = fraction[:9]
    if digits and not (digits.isascii() and digits.isdecimal()):
        raise InputError(f"{brief(row[0])} is no time", field="TIMESTAMP")
    time_ns = since // timedelta(seconds=1) * 1_000_000_000 + int(digits.ljust(9, "0"))
    num_prompt, num_output = (
        _count(text.strip(), name, least=1) for name, text in zip(COLUMNS[1:], row[1:], strict=True)
    )
    return time_ns, num_prompt, num_output


def _count(text: str, name: str, *, least: int) -> int:
    """Return a number of tokens."""
    if not (text.isascii() and text.isdecimal()) or len(text) > 10 or not least <= int(text) <= MOST_COUNT:
        raise InputError(f"must be a whole number from {least} to {MOST_COUNT:,}, got {brief(text)}", field=name)
    return int(text)


class _BurstRows:
    """Reads rows of BurstGPT."""

    def __init__(self, header: tuple[str, ...]) -> None:
        self._width = len(header)
        self._places = [header.index(name) for name in BURST_COLUMNS]

    def read(self, row: list[str]) -> tuple[int, int, int] | None:
        """Return nanoseconds, prompt tokens and output tokens; None for a request that failed, with no answer."""
        if len(row) != self._width:
            raise InputError(f"has {len(row)} columns instead of {self._width}")
        time, *counts = (row[place].strip() for place in self._places)
        try:
            seconds = float(time)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < 1e10:
            raise InputError(f"must be a number of seconds of at least 0, got {brief(time)}", field=BURST_COLUMNS[0])
        num_prompt = _count(counts[0].removesuffix(".0"), BURST_COLUMNS[1], least=1)
        num_output = _count(counts[1].removesuffix(".0"), BURST_COLUMNS[2], least=0)
        return (round(seconds * 1e9), num_prompt, num_output) if num_output else None


def unlike_any_other(index: int, num_tokens: int) -> bytes:
    """Return units of `UNIT_TOKENS` tokens that no other row has."""
    first = index << 32
    return pack_units(list(range(first, first + -(-num_tokens // UNIT_TOKENS))))

"""What the converters of this folder share: records of a file in, rows of Mooncake's form out."""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["Record", "Row", "main", "seconds_ns", "whole_ids"]

Record = dict[str, Any]
Row = dict[str, Any]
"""A row of Mooncake's form, but for `arrival_ns` in place of `timestamp`."""

UNSHARED = 1 << 63
"""The first of the ids that stand for tokens of which nothing is known: no two are equal."""


def main(convert: Callable[[Record], Iterable[Row]], note: str = "") -> None:
    """Convert the files of the command line to rows on stdout, by arrival, the first at 0.

    `convert` returns the rows of a record. Rows without a prompt or output tokens are left out and counted. `note`:
    what to tell about the result, on stderr.
    """
    if len(sys.argv) < 2:
        sys.exit(f"{sys.argv[0]}: give the files to convert; the rows are written to stdout")
    rows: list[Row] = []
    for path in map(Path, sys.argv[1:]):
        try:
            for number, record in _records(path):
                try:
                    rows += convert(record)
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    what = f"{error} is missing" if isinstance(error, KeyError) else error
                    sys.exit(f"{path}:{number}: {what}")
        except (OSError, ValueError, csv.Error) as error:
            sys.exit(f"{path}: {error}")
    kept = [row for row in rows if row["input_length"] and row["output_length"]]
    if len(kept) < len(rows):
        print(f"left out: {len(rows) - len(kept)} without a prompt or output tokens", file=sys.stderr)
    if not kept:
        sys.exit(f"{sys.argv[1]}: has no requests")
    first_ns = min(row["arrival_ns"] for row in kept)
    for row in sorted(kept, key=lambda row: row["arrival_ns"]):
        print(json.dumps({"timestamp": (row.pop("arrival_ns") - first_ns) / 1e6, **row}))
    if note:
        print(note, file=sys.stderr)


def _records(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield the records of JSON lines, of a JSON array or of CSV with a header, with their lines or places from 1."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data).decode("utf-8-sig")
    if text.lstrip().startswith("["):
        yield from enumerate(json.loads(text), 1)
    elif text.lstrip().startswith("{"):
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield number, json.loads(line)
    else:
        for number, row in enumerate(csv.DictReader(text.splitlines()), 2):
            yield number, row


def seconds_ns(seconds: float | str) -> int:
    """Return seconds as whole nanoseconds. Raise ValueError unless they are at least 0."""
    if float(seconds) < 0:
        raise ValueError(f"{seconds} is before 0")
    return round(float(seconds) * 1e9)


def whole_ids(ids: list[int], num_tokens: int, size: int, row: int) -> list[int]:
    """Return ids of `size` tokens that cover `num_tokens`, of which `ids` are the whole ones, maybe with the rest.

    An id is added for a rest without one, which is equal to no other. Raise ValueError if the numbers do not fit.
    """
    num_whole, num_rest = divmod(num_tokens, size)
    if len(ids) not in (num_whole, num_whole + bool(num_rest)):
        raise ValueError(f"{len(ids)} ids, and {num_tokens} tokens have {num_whole} whole blocks of {size}")
    return ids + [UNSHARED + row] * (num_whole + bool(num_rest) - len(ids))

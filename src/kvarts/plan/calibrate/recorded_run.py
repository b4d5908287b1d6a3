"""Measurements of an engine: for each request, its arrival, its first and last token, and its numbers of tokens.

Three forms are read: JSON lines with vLLM's per-request timings, CSV with named columns, and result files of load
generators. Rows are never skipped silently: an inconsistent row is an error with its line and field.

A series has samples of a running engine over time: running and waiting requests, and KV use.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvarts.base.decoders import UNDECODED
from kvarts.base.errors import ConfigError, InputError, problem_of
from kvarts.base.files import read_text
from kvarts.base.limits import LATEST_NS, MOST_COUNT, brief
from kvarts.sim.traffic.results import RESULT_FIELDS, Results, read_results
from kvarts.sim.traffic.trace import Trace, TraceRequest
from kvarts.sim.traffic.trace_file import TraceFile

__all__ = ["FIELDS", "Measured", "Series", "load_measured", "load_series"]

TIMES = ("arrival", "scheduled", "first_token", "last_token")
COUNTS = ("prompt_tokens", "output_tokens")
FIELDS = ("request_id", *TIMES, *COUNTS)
OPTIONAL = ("request_id", "scheduled")
UNITS_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
# Field names of vLLM's per-request output. Its `arrival_time` is from a different clock than the rest, so the time at
# which a request was queued is used as its arrival.
VLLM_COLUMNS = {
    "request_id": "request_id",
    "arrival": "queued_ts",
    "scheduled": "scheduled_ts",
    "first_token": "first_token_ts",
    "last_token": "last_token_ts",
    "prompt_tokens": "input_toks",
    "output_tokens": "output_toks",
}

Times = npt.NDArray[np.int64]
KV = "kv_cache_pct"
COLUMNS = {"t": "time_s", "running": "running", "waiting": "waiting", "kv_cache_pct": "kv_pct"}

Values = npt.NDArray[np.float64]


class Measured(msgspec.Struct, frozen=True):
    """Requests in order of arrival. Times are in nanoseconds since the first arrival; all arrays have shape [n].

    `rows`: row of each request in the file, from 0. `scheduled_ns` is None if it was not recorded.
    """

    name: str
    request_ids: list[str]
    rows: Times
    arrival_ns: Times
    scheduled_ns: Times | None
    first_token_ns: Times
    last_token_ns: Times
    prompt_tokens: Times
    output_tokens: Times
    notes: tuple[str, ...] = ()
    """How a load generator defines the times of its file, what is read instead, and what cannot be trusted."""

    def __len__(self) -> int:
        return len(self.request_ids)

    def trace(self, prompts: Trace | None = None) -> Trace:
        """Return the traffic, with prompts from the same rows of `prompts`; without it, no prompts share a prefix.

        Raise InputError if the rows of `prompts` differ.
        """
        requests = [
            TraceRequest(
                row=index,
                arrival_ns=int(self.arrival_ns[index]),
                units=(range(index << 32, (index << 32) + num_prompt),),
                num_prompt_tokens=num_prompt,
                num_output_tokens=int(self.output_tokens[index]),
                request_id=self.request_ids[index],
            )
            for index, num_prompt in enumerate(self.prompt_tokens.tolist())
        ]
        if prompts is None:
            return Trace(requests, name=self.name)
        known = {request.row: request for request in prompts}
        if len(known) != len(self):
            raise InputError(f"has {len(known)} rows for {len(self)} measured requests", path=prompts.name)
        for index, row in enumerate(self.rows.tolist()):
            theirs = known.get(row)
            if theirs is None or theirs.num_prompt_tokens != requests[index].num_prompt_tokens:
                says = "nothing" if theirs is None else f"{theirs.num_prompt_tokens} prompt tokens"
                raise InputError(
                    f"says {says}; measured were {requests[index].num_prompt_tokens} prompt tokens",
                    path=prompts.name,
                    line=row + 1,
                    field="input_length",
                    hint="The rows of both files must be the same requests in the same order.",
                )
            requests[index] = msgspec.structs.replace(requests[index], units=theirs.units)
        return Trace(requests, unit_tokens=prompts.unit_tokens, name=self.name)


def load_measured(path: Path | str, *, columns: Mapping[str, str] | None = None, time_unit: str = "s") -> Measured:
    """Read a measured run. `columns`: names used in the file, for those of FIELDS that it names differently.

    JSON lines with `queued_ts` are read in vLLM's format, and result files of load generators in theirs. The latter
    have times of the client, so network time counts as time of the engine. Raise MissingFileError; ConfigError for an
    unknown column; InputError, with line and field, for a missing, non-numeric or inconsistent value.
    """
    path = Path(path)
    if time_unit not in UNITS_NS:
        raise ConfigError(f"{time_unit!r} is not known", field="time_unit", hint=f"Use one of {', '.join(UNITS_NS)}.")
    names = {field: field for field in FIELDS}
    for field, name in (columns or {}).items():
        if field not in names:
            raise ConfigError(f"{field!r} is not a field", field="columns", hint=f"There are {', '.join(FIELDS)}.")
        names[field] = name
    file = TraceFile(path)
    if columns is None and (
        file.is_sqlite or any(fields <= first for fields in RESULT_FIELDS for first in file.first_fields[:1])
    ):
        results = read_results(file)
        left_out = (f"{count:,} requests are left out: {why}" for why, count in sorted(results.left_out.items()))
        measured = _measured(path, _result_rows(file, results), names, UNITS_NS["ns"])
        return replace(measured, notes=(*dict.fromkeys(results.notes), *results.warnings, *left_out))
    text = read_text(path, hint="Check the path of the measured run.")
    rows = list(_json_rows(path, text) if text.lstrip().startswith("{") else _csv_rows(path, text))
    if not rows:
        raise InputError("holds no request", path=path)
    if columns is None and "queued_ts" in rows[0][1]:
        names = VLLM_COLUMNS
    for field, name in names.items():
        if field not in OPTIONAL and name not in rows[0][1]:
            raise InputError(
                "is missing",
                path=path,
                line=rows[0][0],
                field=name,
                hint=f"Give --set column={field}=NAME; there are {_names(rows[0][1])}.",
            )
    return _measured(path, rows, names, UNITS_NS[time_unit])


def _result_rows(file: TraceFile, found: Results) -> list[tuple[int, dict[str, Any]]]:
    """Return the rows of a result file, keyed by FIELDS; times are in nanoseconds since the first."""
    results = found.rows
    if not results:
        why = ", ".join(f"{count:,} {why}" for why, count in sorted(found.left_out.items()))
        raise InputError("has no request that succeeded" + (f": {why}" if why else ""), path=file.path)
    first_ns = min(row.start_ns or 0 for row in results)
    rows = []
    for row in results:
        if row.start_ns is None or row.first_token_ns is None or row.last_token_ns is None:
            raise InputError("is missing", path=file.path, line=row.line, field=row.token_field)
        times = (row.start_ns, row.first_token_ns, row.last_token_ns)
        named = dict(zip(("arrival", "first_token", "last_token"), (ns - first_ns for ns in times), strict=True))
        lengths = {"prompt_tokens": row.num_prompt_tokens, "output_tokens": row.num_output_tokens}
        rows.append((row.line, {**named, **lengths}))
    return rows


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(str(name)[:40] for name in list(row)[:20])


def _json_rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, row in enumerate(text.splitlines(), 1):
        if not row.strip():
            continue
        try:
            values = msgspec.json.decode(row)
        except UNDECODED as error:
            raise InputError(f"is not JSON: {problem_of(error)}", path=path, line=line) from error
        if not isinstance(values, dict):
            raise InputError("is not an object", path=path, line=line)
        yield line, values


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(text.splitlines(), strict=True)
    try:
        for row in reader:
            if None in row or None in row.values():
                raise InputError("has another number of columns than the head", path=path, line=reader.line_num)
            yield reader.line_num, row
    except csv.Error as error:
        raise InputError(f"is not a CSV file: {error}", path=path, line=reader.line_num) from error


def _measured(path: Path, rows: list[tuple[int, dict[str, Any]]], names: dict[str, str], unit_ns: int) -> Measured:
    has_scheduled = names["scheduled"] in rows[0][1]
    times = [field for field in TIMES if field != "scheduled" or has_scheduled]
    values: dict[str, list[float]] = {field: [] for field in (*times, *COUNTS)}
    request_ids: list[str] = []
    seen: dict[str, int] = {}
    for number, (line, row) in enumerate(rows):
        request_id = str(row.get(names["request_id"], number))
        if request_id in seen:
            raise InputError(
                f"{brief(request_id)} is in line {seen[request_id]} already",
                path=path,
                line=line,
                field=names["request_id"],
            )
        seen[request_id] = line
        request_ids.append(request_id)
        for field, column in values.items():
            column.append(_number(path, line, names[field], row.get(names[field])))
        for field in COUNTS:
            if values[field][-1] < 1 or values[field][-1] % 1 or values[field][-1] > MOST_COUNT:
                raise InputError(
                    f"must be a whole number, at least 1 and at most {MOST_COUNT:,}, got {values[field][-1]:g}",
                    path=path,
                    line=line,
                    field=names[field],
                )
        for before, after in pairwise(times):
            if values[after][-1] < values[before][-1]:
                raise InputError(
                    f"is {values[before][-1] - values[after][-1]:g} before {names[before]}: the clock runs backwards",
                    path=path,
                    line=line,
                    field=names[after],
                )
    span_ns = (max(values["last_token"]) - min(values["arrival"])) * unit_ns
    if not span_ns <= LATEST_NS:
        raise InputError(
            "has times more than 73 years apart", path=path, field=names["arrival"], hint="Check --time-unit."
        )
    if values["arrival"] == values["last_token"]:
        raise InputError(
            f"is when {'each request' if len(rows) > 1 else 'the request'} arrived: it took no time",
            path=path,
            field=names["last_token"],
            hint="Check the columns.",
        )
    order = sorted(range(len(rows)), key=lambda index: (values["arrival"][index], index))
    start = values["arrival"][order[0]]

    def ns(field: str) -> Times:
        return np.array([round((values[field][index] - start) * unit_ns) for index in order], np.int64)

    def count(field: str) -> Times:
        return np.array([int(values[field][index]) for index in order], np.int64)

    return Measured(
        name=path.name,
        request_ids=[request_ids[index] for index in order],
        rows=np.array(order, np.int64),
        arrival_ns=ns("arrival"),
        scheduled_ns=ns("scheduled") if has_scheduled else None,
        first_token_ns=ns("first_token"),
        last_token_ns=ns("last_token"),
        prompt_tokens=count("prompt_tokens"),
        output_tokens=count("output_tokens"),
    )


def _number(path: Path, line: int, field: str, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        what = "is missing" if value in (None, "") else f"{brief(value)} is not a number"
        raise InputError(what, path=path, line=line, field=field) from None
    if not isfinite(number):
        raise InputError(f"{brief(value)} is not a number", path=path, line=line, field=field)
    return number


class Series(msgspec.Struct, frozen=True):
    """Samples in order of time; all arrays have shape [n]. `time_s`: since the first arrival.

    `kv_pct`: in per cent; None if it was not recorded, for the reason in `left_out`.
    """

    time_s: Values
    running: Values
    waiting: Values
    kv_pct: Values | None
    left_out: str | None = None

    def until(self, time_s: float) -> Series | None:
        """Return the samples up to `time_s`; None without any."""
        last = int(np.searchsorted(self.time_s, time_s, side="right"))
        if not last:
            return None
        kv_pct = None if self.kv_pct is None else self.kv_pct[:last]
        return Series(self.time_s[:last], self.running[:last], self.waiting[:last], kv_pct, self.left_out)

    def kv_distance(self, other: Series) -> float | None:
        """Return the mean absolute difference between the KV use of `other` and this one, in percentage points.

        It is taken at the samples of this one. None if either was not recorded.
        """
        if self.kv_pct is None or other.kv_pct is None:
            return None
        at = np.searchsorted(other.time_s, self.time_s, side="right") - 1
        theirs = np.where(at >= 0, other.kv_pct[np.maximum(at, 0)], 0.0)
        return float(np.abs(theirs - self.kv_pct).mean())


def load_series(path: Path | str) -> Series:
    """Read CSV with the columns `t` (seconds), `running`, `waiting` and `kv_cache_pct`; other columns are ignored.

    KV use counts as not recorded, and is left out, if it is missing or is 0 although requests run. Raise
    MissingFileError; InputError, with line and field, for a value that is missing, not a number, or back in time.
    """
    path = Path(path)
    text = read_text(path, hint="Check the path of the series.")
    reader = csv.DictReader(text.splitlines())
    values: dict[str, list[float]] = {name: [] for name in COLUMNS}
    try:
        rows = [(reader.line_num, row) for row in reader]
        names = reader.fieldnames or ()
    except csv.Error as error:
        raise InputError(f"is not a CSV file: {error}", path=path, line=reader.line_num) from error
    has_kv = KV in names
    if not has_kv:
        del values[KV]
    for name in values:
        if name not in names:
            raise InputError("is missing", path=path, line=1, field=name)
    for line, row in rows:
        for name, column in values.items():
            try:
                number = float(row[name])
            except (TypeError, ValueError):
                raise InputError(f"{brief(row[name])} is not a number", path=path, line=line, field=name) from None
            if not isfinite(number) or number < 0:
                raise InputError(f"{brief(row[name])} is out of range", path=path, line=line, field=name)
            column.append(number)
        if len(values["t"]) > 1 and values["t"][-1] <= values["t"][-2]:
            raise InputError("the clock runs backwards", path=path, line=line, field="t")
    if not values["t"]:
        raise InputError("holds no samples", path=path)
    arrays: dict[str, Values | None] = {COLUMNS[name]: np.array(column) for name, column in values.items()}
    left_out = None
    if not has_kv:
        left_out = f"{path.name} has no column {KV}: KV use is left out"
    elif not any(values[KV]) and any(values["running"]):
        left_out = f"{KV} of {path.name} is 0 in all {len(values[KV])} samples: KV use is left out"
    if left_out is not None:
        arrays["kv_pct"] = None
    return Series(**arrays, left_out=left_out)  # type: ignore[arg-type]

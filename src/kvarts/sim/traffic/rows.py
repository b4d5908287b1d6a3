"""Where the rows of a form hold what a request needs, as data; and the one reader of all forms that are declared so.

Rows are JSON records, lines of CSV, or rows of Parquet. A *place* is a path of keys separated by `/`; `|` separates
alternatives, of which the first that is present counts; `+` adds lengths; `*` in a last key stands for any characters,
and adds what it finds; `..` is the record that a row was taken out of. A place of a time may end in `:s`, `:ms`, `:us`
or `:ns`; without a unit, a time is a date, or a number whose unit is told by its name or its size.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from io import StringIO
from itertools import islice
from typing import Any

import msgspec

from kvarts.base.decoders import decode_json
from kvarts.base.errors import ConfigError, InputError, did_you_mean, parts_of
from kvarts.base.limits import MOST_COUNT, brief, whole_number
from kvarts.base.units import to_ns
from kvarts.core.content import pack_units
from kvarts.sim.traffic.bounds import MOST_DATE_NS
from kvarts.sim.traffic.graph import NO_OUTPUT, with_output
from kvarts.sim.traffic.inferred import INFERRED, Call, inferred_requests
from kvarts.sim.traffic.trace import Trace, TraceRequest
from kvarts.sim.traffic.trace_file import (
    NO_ID,
    REPEATED,
    SKIP_HINT,
    UNIT_TOKENS,
    TraceFile,
    by_arrival,
    date_ns,
    no_output_length,
    nothing_left,
    unlike_any_other,
)

__all__ = ["COLUMNS", "Omit", "Rows", "columns_in", "load_rows_of", "parse_columns"]

UNITS_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
COLUMNS = ("time", "input_tokens", "output_tokens", "cached_tokens", "session_id", "request_id", "hash_ids")
"""What a column can be named for."""
MOST_RECORDS, MOST_NAMES, MOST_NAME = 20, 24, 40
MISSING = "is missing"


class Omit(msgspec.Struct, frozen=True):
    """Rows that are no load: those whose value at `place` matches `pattern` as a whole, counted as `reason`."""

    place: str
    pattern: str
    reason: str


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """Places of the facts of a request, see the module.

    `each`: lists in a record whose items are the rows; a record without them is a row itself. `attributes`: fields that
    are lists of OpenTelemetry's keys and values. `required`: what all rows have. `only`: places and patterns of rows
    that are requests; others are ignored. `omits`: rows that are counted, not read. `key`: rows with an equal value are
    lines of one request, of which the last has its lengths, and the first its time. `parent`: the `request_id` of the
    turn before; both then only tell sessions. `has_whole_blocks`: the id of a last, partial block is not that of the
    same tokens in a whole one. `asked`: a place and a pattern of the rows that a request answers, which give the time
    at which it was sent. `infers`: a file or a session id is a conversation that each prompt has from its beginning,
    see sim/traffic/inferred.py.
    """

    time: str = ""
    input_tokens: str = ""
    output_tokens: str = ""
    cached_tokens: str = ""
    session_id: str = ""
    request_id: str = ""
    hash_ids: str = ""
    block_size: str = ""
    unit_tokens: int = UNIT_TOKENS
    has_whole_blocks: bool = False
    parent: str = ""
    each: str = ""
    attributes: tuple[str, ...] = ()
    required: str = ""
    only: tuple[tuple[str, str], ...] = ()
    omits: tuple[Omit, ...] = ()
    key: str = ""
    asked: tuple[str, str] | None = None
    infers: bool = False


# Places --------------------------------------------------------------------------------------------------


Keys = tuple[str, ...]


class _Path:
    """Keys to a value. `name`: as errors spell it."""

    __slots__ = ("is_wild", "keys", "name")

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.name = _spelled(keys)
        self.is_wild = "*" in keys[-1]

    def at(self, row: dict[str, Any]) -> Any:
        """Return the value here; None if there is none, or nothing in it."""
        value: Any = row
        for key in self.keys:
            if type(value) is str and value.startswith("{"):  # in a table, objects are text
                with suppress(msgspec.DecodeError):
                    value = msgspec.json.decode(value)
            if type(value) is not dict:
                return None
            value = value.get(key)
        return value or (None if value in ("", {}) else value)

    def all(self, row: dict[str, Any]) -> list[tuple[Any, str]]:
        """Return the values that are here, with their names."""
        if not self.is_wild:
            value = self.at(row)
            return [] if value is None else [(value, self.name)]
        *before, pattern = self.keys
        inside = _Path(tuple(before)).at(row) if before else row
        return [
            (value, _spelled((*before, name)))
            for name, value in (inside.items() if isinstance(inside, dict) else ())
            if isinstance(value, int | float | str) and fnmatchcase(name, pattern)
        ]


class _Place:
    """A place, ready to look up: alternatives of paths that are added, and the unit of a time or "".

    `name`: of its first alternative, for errors.
    """

    def __init__(self, alternatives: list[tuple[list[Keys], str]]) -> None:
        self._alternatives = [([_Path(keys) for keys in terms], unit) for terms, unit in alternatives]
        self.name = self._alternatives[0][0][0].name if alternatives else ""

    @classmethod
    def of(cls, text: str) -> _Place:
        """Return the place that a declaration spells."""
        alternatives = []
        for alternative in text.split("|") if text else ():
            path, unit = _without_unit(alternative)
            alternatives.append(([tuple(each.split("/")) for each in path.split("+")], unit))
        return cls(alternatives)

    def find(self, row: dict[str, Any]) -> tuple[list[tuple[Any, str]], str]:
        """Return the values of the first alternative that has any, with their names; and its unit."""
        for terms, unit in self._alternatives:
            found = terms[0].all(row) if len(terms) == 1 else [each for path in terms for each in path.all(row)]
            if found:
                return found, unit
        return [], ""

    def text(self, row: dict[str, Any]) -> str | None:
        """Return the value as text; None if there is none."""
        found, _ = self.find(row)
        return _text(found[0][0]) if found else None

    def count(self, row: dict[str, Any], *, least: int = 0) -> int | None:
        """Return the sum of the lengths here; None if there is none. Raise InputError for another value."""
        found, _ = self.find(row)
        if len(found) == 1:
            return _count(*found[0], least)
        return sum(_count(value, name, least) for value, name in found) if found else None

    def unit(self, row: dict[str, Any]) -> str:
        """Return the unit of the time here, or that it is a date."""
        ((value, name), *_), unit = self.find(row)
        with suppress(ValueError, TypeError):
            return unit or _unit_of(name, float(value))
        return "dates"

    def time_ns(self, row: dict[str, Any]) -> int:
        """Return the time here. Raise InputError."""
        found, unit = self.find(row)
        if not found:
            raise InputError(MISSING, field=self.name)
        return _time_ns(*found[0], unit)


def _without_unit(text: str) -> tuple[str, str]:
    path, colon, unit = text.rpartition(":")
    return (path, unit) if colon and unit in UNITS_NS else (text, "")


def _spelled(keys: Sequence[str]) -> str:
    return ".".join(key for key in keys if key != "..")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value, order="sorted").decode()


def _count(value: Any, name: str, least: int) -> int:
    number: Any = value
    if type(value) is int and least <= value <= MOST_COUNT:
        return value
    if isinstance(value, str):
        number = whole_number(value.strip().removesuffix(".0"))
    elif isinstance(value, float):
        number = int(value) if value == value // 1 else None
    if not isinstance(number, int) or isinstance(value, bool) or not least <= number <= MOST_COUNT:
        raise InputError(f"must be a whole number from {least} to {MOST_COUNT:,}, got {brief(value)}", field=name)
    return number


def _time_ns(value: Any, name: str, unit: str) -> int:
    number: Any = value
    if isinstance(value, str):
        if value[4:5] == "-" and not unit:
            return date_ns(value, name)
        try:
            whole = whole_number(value.strip())
            number = float(value) if whole is None else whole
        except ValueError:
            if unit:
                raise _no_time(value, name, unit) from None
            return date_ns(value, name)
    elif hasattr(value, "isoformat"):  # of Parquet
        return date_ns(str(value), name)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise _no_time(value, name, unit)
    scale = UNITS_NS[unit or _unit_of(name, number)]
    if not 0 <= number * scale < MOST_DATE_NS:
        raise _no_time(value, name, unit)
    return number * scale if isinstance(number, int) else to_ns(number, scale)


def _no_time(value: Any, name: str, unit: str) -> InputError:
    what = f"in {unit}" if unit and unit != "s" else "of seconds"
    return InputError(f"must be a number {what} of at least 0, or a date, got {brief(value)}", field=name)


def _unit_of(name: str, number: float) -> str:
    """Return the unit of a time: that in its name, or that in which it would be a date from 2001 on."""
    found = re.search(r"(?i)(?:_|\b)(ns|us|ms|s)$|(?<=[a-z])(Ns|Us|Ms)$|(?i:unix)_?(nano|ms)$", name)
    named = next((each for each in found.groups() if each), "").lower() if found else ""
    if named:
        return "ns" if named == "nano" else named
    return next((unit for unit, least in (("ns", 1e18), ("us", 1e15), ("ms", 1e12)) if number >= least), "s")


# Names that people use ----------------------------------------------------------------------------------

_COUNTS = ("{}tokens", "num{}tokens", "{}tokencount", "{}len", "{}length", "{}toks", "ntokens{}", "tokens{}")
NAMES: dict[str, tuple[str, ...]] = {
    "time": tuple(
        f"{name}{unit}"
        for name in (
            *("timestamp", "time", "ts", "requestts", "requesttime", "requesttimestamp", "arrivaltime", "arrivalts"),
            *("arrivaltimestamp", "arrival", "arrivedat", "starttime", "startts", "starttimestamp", "requeststart"),
            *("requeststarttime", "requestcreatedat", "requestedat", "requestat", "sentat", "createdat", "created"),
            *("datetime", "date", "begin", "start", "receivedat", "queuedts", "eventtime"),
        )
        for unit in ("", "ms", "us", "ns", "s", "unix", "unixms", "unixnano")
    ),
    "input_tokens": tuple(form.format(kind) for kind in ("input", "prompt", "request", "in") for form in _COUNTS),
    "output_tokens": tuple(
        form.format(kind)
        for kind in ("output", "completion", "generated", "generation", "response", "candidates", "out")
        for form in _COUNTS
    ),
    "cached_tokens": (
        *("cachedtokens", "cachereadtokens", "cachedinputtokens", "cachedprompttokens", "cachereadinputtokens"),
        *("promptcachehittokens", "numcachedtokens", "cachedtokencount", "cachehittokens", "inputcachedtokens"),
    ),
    "session_id": ("sessionid", "conversationid", "session", "conversation", "chatid", "threadid"),
    "request_id": ("requestid", "reqid", "xrequestid", "id"),
    "hash_ids": ("hashids", "totalhashes", "blockhashes", "prefixhashes"),
}
"""What each column may be called, in small letters and figures alone; of several that are there, the first counts."""


def columns_in(names: Sequence[str]) -> dict[str, str]:
    """Return which of `names`, paths separated by dots, stand for what; outer names before inner ones."""
    places: dict[str, str] = {}
    for name in sorted(names, key=lambda name: name.count(".")):
        places.setdefault(re.sub(r"[^a-z0-9]", "", name.rpartition(".")[2].lower()), name)
    return {
        column: next(places[known] for known in spellings if known in places)
        for column, spellings in NAMES.items()
        if any(known in places for known in spellings)
    }


def parse_columns(column: str | Mapping[str, str]) -> dict[str, str]:
    """Return the names given as `input_tokens=prompt_tokens,time=ts`. Raise ConfigError for an unknown column."""
    given = column
    if isinstance(column, str):
        pairs = [pair.partition("=") for pair in column.split(",") if pair.strip()]
        if not pairs or any(not name.strip() or not equals for _, equals, name in pairs):
            raise ConfigError(
                f"{brief(column)} is not FIELD=NAME,...",
                field="column",
                hint="Such as --column input_tokens=prompt_tokens,time=ts.",
            )
        given = {field.strip(): name.strip() for field, _, name in pairs}
    assert isinstance(given, Mapping)
    for field in given:
        if field not in COLUMNS:
            raise ConfigError(
                f"{field!r} is not a field",
                field="column",
                hint=did_you_mean(field, COLUMNS) or f"There are {', '.join(COLUMNS)}.",
            )
    return dict(given)


# Rows ----------------------------------------------------------------------------------------------------


def load_rows_of(
    file: TraceFile,
    rows: Rows,
    *,
    skip_bad_lines: bool = False,
    output_tokens: int | None = None,
    column: Mapping[str, str] | None = None,
    trace_block_size: int | None = None,
) -> Trace:
    """Read a file, or the files of a directory, as `rows` declares it; without lengths in it, by names in use.

    `output_tokens`: of rows that do not record it. `column`: names that replace what is declared. Raise
    MissingFileError; InputError, with line and field, for malformed input.
    """
    reader = _Reader(file, rows, column or {}, output_tokens, trace_block_size)
    num_skipped = 0
    for each in file.files():
        reader.begin(each)
        for line, row in ((line, row) for line, record in records_of(each) for row in rows_in(record, reader.rows)):
            try:
                if isinstance(row, InputError):
                    raise row
                reader.read(row)
            except InputError as error:
                is_of_output = error.what == MISSING and error.field in (reader.output.name, "output_tokens")
                if is_of_output and not reader.has_outputs(each):
                    raise no_output_length(each) from error
                if not skip_bad_lines:
                    raise InputError(
                        error.what, path=each.path, line=line, field=error.field, hint=error.hint or SKIP_HINT
                    ) from error
                num_skipped += 1
    trace = reader.trace(num_skipped)
    trace.name = file.name
    return trace


def records_of(file: TraceFile) -> Iterator[tuple[int, dict[str, Any] | InputError]]:
    """Iterate over the rows of a table, or the records of JSON, with their lines; errors stand for malformed ones."""
    if file.is_parquet:
        yield from file.parquet_rows()
    elif file.header:
        # Lines end only in \n, as in the editor that shows an error's line; str.splitlines accepts other ends too.
        lines = csv.reader(StringIO(file.text()))
        header = [name.strip() for name in next(lines, [])]
        try:
            for cells in lines:
                if len(cells) == len(header):
                    yield lines.line_num, dict(zip(header, map(str.strip, cells), strict=True))
                elif cells:
                    yield lines.line_num, InputError(f"has {len(cells)} columns instead of {len(header)}")
        except csv.Error as error:
            raise InputError(f"is not CSV: {error}", path=file.path, line=lines.line_num) from error
    else:
        decode = msgspec.json.Decoder(dict[str, Any]).decode
        for line, data in file.records():
            try:
                yield line, decode(data)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                with suppress(ValueError, RecursionError):
                    if isinstance(value := decode_json(data), dict):
                        yield line, value
                        continue
                what, field = parts_of(error)
                yield line, InputError(what, field=field)
            except RecursionError:
                yield line, InputError("is nested too deeply")


def rows_in(record: dict[str, Any] | InputError, rows: Rows) -> Iterator[dict[str, Any] | InputError]:
    """Iterate over the rows in a record; one that is malformed is what it is."""
    if isinstance(record, InputError) or not (rows.each or rows.attributes):
        yield record
        return
    found = [record]
    for key in rows.each.split("/") if rows.each else ():
        found = [
            {**item, "..": row} if isinstance(row.get(key), list) else row
            for row in found
            for item in (row[key] if isinstance(row.get(key), list) else (row,))
            if isinstance(item, dict)
        ]
    for row in found:
        for name in rows.attributes:
            if isinstance(row.get(name), list):
                row[name] = {
                    str(each.get("key")): next(iter(each["value"].values()), None)
                    for each in row[name]
                    if isinstance(each, dict) and isinstance(each.get("value"), dict)
                }
        yield row


class _Row(msgspec.Struct):
    """One request, before those of all files are put together."""

    start_ns: int
    end_ns: int
    num_prompt: int
    num_output: int
    num_cached: int | None
    session_id: str | None
    request_id: str | None
    units: bytes | None


class _Reader:
    """Collects the requests of one form. Owner of what is left out, and of which rows are lines of one request."""

    def __init__(
        self,
        file: TraceFile,
        rows: Rows,
        column: Mapping[str, str],
        output_tokens: int | None,
        trace_block_size: int | None,
    ) -> None:
        self._file, self._output_tokens = file, output_tokens
        self.rows = rows
        known = names_in(file, rows) if column or not rows.input_tokens else {}
        taken = {**({} if rows.input_tokens else columns_in(list(known))), **column}
        self._warnings: list[str] = []
        self._taken, self._time_unit = taken, ""
        places = {field: _Place.of(getattr(self.rows, field)) for field in COLUMNS}
        places.update((field, _named(name, known, file)) for field, name in taken.items())
        self._time, self._input, self.output = places["time"], places["input_tokens"], places["output_tokens"]
        self._cached, self._session, self._id = places["cached_tokens"], places["session_id"], places["request_id"]
        self._hashes, self._block_size = places["hash_ids"], _Place.of(self.rows.block_size)
        self._key, self._parent = _Place.of(self.rows.key), _Place.of(self.rows.parent)
        self._required = _Place.of(rows.required)
        self._only = [(_Place.of(place), re.compile(pattern)) for place, pattern in self.rows.only]
        self._omits = [(_Place.of(omit.place), re.compile(omit.pattern), omit.reason) for omit in self.rows.omits]
        self._asked = None if self.rows.asked is None else (_Place.of(self.rows.asked[0]), self.rows.asked[1])
        self._given_unit, self._unit_tokens = trace_block_size, 0
        self._found: list[_Row] = []
        self._left_out: Counter[str] = Counter()
        self._by_key: dict[str, _Row] = {}
        self._roots: dict[str, str] = {}
        self._asked_ns: int | None = None
        if not self._input.name:
            raise InputError(
                "has no column with the length of a prompt",
                path=file.path,
                hint=f"Give --column input_tokens=NAME; there are {_listed(known)}.",
            )

    def begin(self, file: TraceFile) -> None:
        """Start a file."""
        self._file, self._asked_ns = file, None

    def read(self, row: dict[str, Any]) -> None:
        """Add the request of a row, unless it has none. Raise InputError."""
        if self._asked is not None and re.fullmatch(self._asked[1], self._asked[0].text(row) or ""):
            self._asked_ns = self._time.time_ns(row)
        if self._required.name and not self._required.find(row)[0]:
            raise InputError(MISSING, field=self._required.name)
        for place, pattern in self._only:
            if not pattern.fullmatch(place.text(row) or ""):
                return
        for place, pattern, reason in self._omits:
            text = place.text(row)
            if text is not None and pattern.fullmatch(text):
                self._left_out[reason] += 1
                return
        num_prompt = self._input.count(row)
        if num_prompt is None:
            raise InputError(MISSING, field=self._input.name)
        time_ns = self._time.time_ns(row) if self._time.name else 0
        if self._taken and self._time.name and not self._time_unit:
            self._time_unit = self._time.unit(row)
        num_output = self.output.count(row)
        if num_output is None:
            if self._output_tokens is None:
                raise InputError(MISSING, field=self.output.name or "output_tokens")
            num_output = self._output_tokens
        request = _Row(
            self._asked_ns if self._asked_ns is not None else time_ns,
            time_ns,
            num_prompt,
            num_output,
            self._cached.count(row) if self._cached.name else None,
            self._session_of(row),
            self._id.text(row) if self._id.name and not self._parent.name else None,
            self._units(row, num_prompt) if self._hashes.name else None,
        )
        self._asked_ns = None
        before = (
            self._by_key.setdefault(f"{self._file.place}\n{key}", request) if (key := self._key.text(row)) else request
        )
        if before is not request:
            self._left_out[REPEATED] += 1
            before.num_prompt, before.num_output = request.num_prompt, request.num_output
        else:
            self._found.append(request)

    def _session_of(self, row: dict[str, Any]) -> str | None:
        if self._parent.name:
            name = self._id.text(row) or ""
            root = self._roots[name] = self._roots.get(self._parent.text(row) or "", name)
            return root
        return self._session.text(row) or (self._file.path.stem if self.rows.infers else None)

    def _units(self, row: dict[str, Any], num_prompt: int) -> bytes | None:
        """Return the hash ids of a row; None if it has none. Raise InputError for too few."""
        found, _ = self._hashes.find(row)
        if not found or not num_prompt:
            return None
        ids, name = found[0]
        if isinstance(ids, str):  # of a table
            with suppress(msgspec.DecodeError):
                ids = msgspec.json.decode(ids)
        size = self._given_unit or self._block_size.count(row, least=1) or self.rows.unit_tokens
        if self._unit_tokens not in (0, size):
            raise InputError(f"is {size}, and {self._unit_tokens} before", field=self._block_size.name)
        self._unit_tokens = size
        num_whole, num_rest = divmod(num_prompt, size)
        if not isinstance(ids, list) or not all(isinstance(each, int) and 0 <= each < 1 << 64 for each in ids):
            raise InputError("ids must be from 0 to 2**64 - 1", field=name)
        if len(ids) > num_whole + bool(num_rest) and self._given_unit is None:
            raise InputError(
                f"{len(ids)} ids of {size} tokens are more than the {num_prompt} tokens of {self._input.name} have",
                field=name,
                hint=None if self._block_size.name else "Give the tokens of an id: --trace-block-size N.",
            )
        if len(ids) < num_whole:
            raise InputError(
                f"{len(ids)} ids of {size} tokens cover {len(ids) * size} of the {num_prompt} tokens of "
                f"{self._input.name}",
                field=name,
            )
        if num_rest and (self.rows.has_whole_blocks or len(ids) == num_whole):
            return pack_units([*ids[:num_whole], NO_ID + len(self._found)])
        return pack_units(ids[: num_whole + bool(num_rest)])

    def has_outputs(self, file: TraceFile) -> bool:
        """Return whether any row of the file has an output length."""
        found = (row for _, record in records_of(file) for row in rows_in(record, self.rows))
        return any(self.output.find(row)[0] for row in found if isinstance(row, dict))

    def trace(self, num_skipped: int) -> Trace:
        """Return what was read. Raise InputError if there is no request."""
        num_all = len(self._found)
        self._found = [each for each in self._found if each.num_prompt]
        self._left_out["without prompt tokens"] += num_all - len(self._found)
        if not self.rows.infers:
            num_all = len(self._found)
            self._found = [each for each in self._found if each.num_output]
            self._left_out[NO_OUTPUT] += num_all - len(self._found)
        self._left_out = +self._left_out
        if not self._found:
            raise nothing_left(self._file, self._left_out, num_skipped)
        warnings = self._warnings
        if self._taken:
            said = [
                f"{field} is {name}" + f" ({self._time_unit})" * (field == "time")
                for field, name in self._taken.items()
            ]
            warnings.append(f"columns: {', '.join(said)}")
        if not self._time.name:
            warnings.append("no column is a time: all requests arrive at once, in the order of the file")
        cached = [each.num_cached for each in self._found if each.num_cached is not None]
        if any(cached):
            num_prompt = sum(each.num_prompt for each in self._found)
            warnings.append(
                f"the file has {sum(cached):,} of {num_prompt:,} prompt tokens as read from a cache "
                f"({100 * sum(cached) / num_prompt:.1f} %)"
            )
        requests = self._inferred() if self.rows.infers else self._requests()
        requests = by_arrival(requests, self._file)
        if self.rows.infers:
            requests = with_output(requests, self._left_out)
            if not requests:
                raise nothing_left(self._file, self._left_out, num_skipped)
        knows_ids = any(each.units is not None for each in self._found)
        return Trace(
            requests,
            unit_tokens=1 if self.rows.infers else self._unit_tokens or UNIT_TOKENS,
            has_output_tokens=self.rows.infers,
            knows_prefixes=self.rows.infers or knows_ids,
            num_skipped_lines=num_skipped,
            left_out=self._left_out,
            warnings=warnings,
        )

    def _requests(self) -> list[TraceRequest]:
        unit_tokens = self._unit_tokens or UNIT_TOKENS
        has_ids = bool(self._unit_tokens)
        return [
            TraceRequest(
                row,
                each.start_ns,
                each.units or unlike_any_other(row, each.num_prompt, unit_tokens, beside_ids=has_ids),
                each.num_prompt,
                each.num_output,
                session_id=each.session_id,
                request_id=each.request_id,
            )
            for row, each in enumerate(self._found)
        ]

    def _inferred(self) -> list[TraceRequest]:
        self._warnings.append(INFERRED)
        return inferred_requests(
            [
                Call(
                    start_ns=min(each.start_ns, each.end_ns),
                    end_ns=each.end_ns,
                    num_prompt_tokens=each.num_prompt,
                    num_output_tokens=each.num_output,
                    num_read_tokens=each.num_cached or 0,
                    chain=(each.session_id or "", "", ""),
                )
                for each in self._found
            ]
        )


def names_in(file: TraceFile, rows: Rows) -> dict[str, Keys]:
    """Return the names in a header, or in the first records with those inside them, and their paths."""
    if file.header and not file.is_parquet:
        return {name: (name,) for name in file.header}
    names: dict[str, Keys] = {}
    for _, record in islice(records_of(file), MOST_RECORDS):
        for row in rows_in(record, rows):
            if isinstance(row, InputError):
                continue
            open_: list[tuple[Keys, dict[str, Any]]] = [((), row)]
            while open_:
                keys, value = open_.pop(0)
                for name, inner in value.items():
                    names.setdefault(_spelled((*keys, name)), (*keys, name))
                    if isinstance(inner, dict) and name != "..":
                        open_.append(((*keys, name), inner))
    return names


def _named(name: str, known: Mapping[str, Keys], file: TraceFile) -> _Place:
    """Return the place of a column that a user names. Raise InputError if no row has it."""
    path, unit = (name, "") if name in known else _without_unit(name)
    if path not in known:
        raise InputError(
            f"there is no {brief(path)}", path=file.path, field="column", hint=f"There are {_listed(known)}."
        )
    return _Place([([known[path]], unit)])


def _listed(known: Mapping[str, Keys]) -> str:
    names = [name[:MOST_NAME] for name in known]
    return ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")

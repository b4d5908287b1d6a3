"""Reader for Mooncake traces: JSON lines with `timestamp`, `input_length`, `output_length`, `hash_ids`.

Optional fields: `session_id` and `delay` (ms after the session's previous turn), `priority`, `output_token_ids`,
`request_id`, `tenant` (tenants share no pages), `cancel_after_ms` (time after sending at which the client abandons a
request), `hints` (how long its KV is worth keeping, see Hints), `model` (the name of the one that a request asks for,
of several in a fleet), and `wait_for` with `tool_wait_ms`, as in the first version of Dynamo's agentic traces. Other
fields are ignored. A hash id stands for `trace_block_size` equal tokens. A
row without `hash_ids` shares nothing with any other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, islice, pairwise
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from kvarts.base.errors import InputError, parts_of
from kvarts.base.files import sample_of
from kvarts.base.limits import check_whole
from kvarts.base.units import to_ns
from kvarts.sim.traffic.graph import with_output
from kvarts.sim.traffic.mooncake_request import has_too_many_ids, request_of
from kvarts.sim.traffic.request_columns import RequestColumns
from kvarts.sim.traffic.trace import Trace, TraceRequest
from kvarts.sim.traffic.trace_file import SKIP_HINT, TraceFile, no_output_length, nothing_left
from kvarts.sim.traffic.trace_request import NS_PER_MS, After, MooncakeRow, PlainRow

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["BLOCK_TOKENS", "MooncakeReader", "Turns", "load_mooncake"]

Row = TypeVar("Row")

BLOCK_BYTES = 1 << 17
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BLOCK_TOKENS = 512
"""Tokens per hash id in Mooncake's own traces."""

Turns = Literal["whole", "deltas"]
"""Whether a later turn of a session has its whole prompt, or only its new tokens."""


class MooncakeReader:
    """Iterates over the rows of one file as TraceRequests, a block of lines at a time, in file order.

    Times are those of the file, in nanoseconds; a row with a `delay` and no `timestamp` has -1. A malformed row raises
    InputError with file, line and field, or is counted in `num_skipped` with `skip_bad_lines`. A row with more ids than
    its prompt has room for is malformed, unless `trace_block_size` is given; then its surplus ids are dropped and it is
    counted. Rows without output tokens are left out; `read` returns them, for the rows that wait for them.
    """

    def __init__(
        self,
        path: Path | str | TraceFile,
        *,
        trace_block_size: int | None = None,
        skip_bad_lines: bool = False,
        output_tokens: int | None = None,
    ) -> None:
        self.trace_block_size = BLOCK_TOKENS if trace_block_size is None else trace_block_size
        check_whole(self.trace_block_size, "trace_block_size")
        self._file = TraceFile.of(path)
        self.skip_bad_lines = skip_bad_lines
        self._output_tokens = output_tokens
        self.num_skipped = 0
        self.num_rows = 0
        self.num_without_ids = 0
        self.num_too_many_ids = 0
        self.has_output_tokens = False
        self.has_sessions = False
        self.waits: dict[int, MooncakeRow] = {}
        """Rows with a `wait_for`, by row number; `load_mooncake` resolves the names."""
        self._refuse_too_many = trace_block_size is None
        self._plain_decoder = msgspec.json.Decoder(PlainRow)

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    @cached_property
    def _decoder(self) -> msgspec.json.Decoder[MooncakeRow]:
        return msgspec.json.Decoder(MooncakeRow)

    def __iter__(self) -> Iterator[TraceRequest]:
        row_number, first_line = 0, 1
        for block in self._blocks():
            for line, row in self._decode(first_line, block):
                request = self._request(line, row, row_number)
                if request is not None and request.num_output_tokens:
                    yield request
                row_number += 1
            first_line += block.count(b"\n")

    def read(self) -> Sequence[TraceRequest]:
        """Return all requests: as columns if all rows are plain, else as a list."""
        columns = RequestColumns()
        requests: list[TraceRequest] | None = None
        row_number, first_line = 0, 1
        for block in self._blocks():
            num_added = 0
            plain = self._decode_plain(block) if requests is None else None
            if plain is not None:
                num_added = columns.add(plain, row_number, self.trace_block_size)
                row_number += num_added
                self.num_rows += num_added
                if num_added == len(plain):
                    first_line += num_added
                    continue
            for line, row in islice(self._decode(first_line, block), num_added, None):
                request = self._request(line, row, row_number)
                row_number += 1
                if request is None:
                    continue
                if requests is None:
                    requests = list(columns)
                    columns = RequestColumns()
                requests.append(request)
            first_line += block.count(b"\n")
        return columns if requests is None else requests

    def _request(self, line: int, row: MooncakeRow, row_number: int) -> TraceRequest | None:
        """Return the request of a row; None if it is skipped."""
        if row.output_length is None and row.output_token_ids is None:
            if self._output_tokens is None and not self._has_outputs():
                raise no_output_length(self._file)
            row.output_length = self._output_tokens
        try:
            request = request_of(row, row_number, self.trace_block_size, refuse_too_many=self._refuse_too_many)
        except InputError as error:
            self._skip_or_raise(error, line)
            return None
        self._count(row, row_number)
        return request

    def _count(self, row: MooncakeRow, row_number: int) -> None:
        self.num_rows += 1
        self.num_without_ids += row.hash_ids is None
        self.num_too_many_ids += not self._refuse_too_many and has_too_many_ids(row, self.trace_block_size)
        self.has_output_tokens |= row.output_token_ids is not None
        self.has_sessions |= row.session_id is not None
        if row.wait_for is not None:
            self.waits[row_number] = row

    def _has_outputs(self) -> bool:
        """Return whether any row has an output length."""
        rows = chain.from_iterable(_decoded(self._decoder, block) or () for block in self._blocks())
        return any(row.output_length is not None or row.output_token_ids is not None for row in rows)

    def _blocks(self) -> Iterator[bytes]:
        """Iterate over blocks of whole lines.

        Of an array, or a record over several lines, the lines are its records.
        """
        if self._file.is_json and not self._file.is_json_lines:
            yield b"\n".join(record.replace(b"\n", b" ") for _, record in self._file.records())
            return
        rest = b""
        for place, data in enumerate(self._file.blocks(BLOCK_BYTES)):
            if not place:
                data = data.removeprefix(BYTE_ORDER_MARK)  # noqa: PLW2901
            cut = data.rfind(b"\n") + 1
            if cut:
                yield rest + data[:cut]
                rest = data[cut:]
            else:
                rest += data
        if rest.strip():
            yield rest

    def _decode(self, first_line: int, block: bytes) -> Iterable[tuple[int, MooncakeRow]]:
        rows = self._decode_whole(block)
        return self._decode_by_line(first_line, block) if rows is None else enumerate(rows, first_line)

    def _decode_whole(self, block: bytes) -> list[MooncakeRow] | None:
        """Return the rows of a block; None if one is malformed or blank, and rows must be decoded line by line."""
        return _decoded(self._decoder, block)

    def _decode_plain(self, block: bytes) -> list[PlainRow] | None:
        """Return the rows of a block if all are plain, else None."""
        return _decoded(self._plain_decoder, block)

    def _decode_by_line(self, first_line: int, block: bytes) -> Iterator[tuple[int, MooncakeRow]]:
        """Decode line by line, to find the malformed ones."""
        for line, text in enumerate(block.split(b"\n"), first_line):
            if not text.strip():
                continue
            try:
                row = self._decoder.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self._skip_or_raise(self._explain(error), line)
                continue
            except RecursionError:
                self._skip_or_raise(InputError("is nested too deeply"), line)
                continue
            yield line, row

    def _explain(self, error: Exception) -> InputError:
        what, field = parts_of(error)
        if missing := re.search(r"missing required field `(\w+)`", what):
            field, what = missing[1], "is missing"
        return InputError(what, field=field)

    def _skip_or_raise(self, error: InputError, line: int) -> None:
        if self.skip_bad_lines:
            self.num_skipped += 1
            return
        raise InputError(
            error.what, path=self.path, line=line, field=error.field, hint=error.hint or SKIP_HINT
        ) from error


def _decoded(decoder: msgspec.json.Decoder[Row], block: bytes) -> list[Row] | None:
    """Return what each line of a block is; None if there are blank lines, or one cannot be decoded."""
    try:
        rows = decoder.decode_lines(block)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    # With blank lines, line numbers cannot be taken from positions in `rows`.
    return rows if len(rows) == block.count(b"\n") + (not block.endswith(b"\n")) else None


def load_mooncake(
    path: Path | str | TraceFile,
    *,
    trace_block_size: int | None = None,
    skip_bad_lines: bool = False,
    session_turns: Turns | None = None,
    output_tokens: int | None = None,
) -> Trace:
    """Read a whole file, or a bundled one (`sample:mooncake`). Every line is checked before any is replayed.

    `session_turns`: `whole` if later turns of a session have their whole prompts, `deltas` if they have only the tokens
    after the previous turn and its answer. If omitted, a file is refused if later turns are shorter than earlier ones
    and share no first id with them. `output_tokens`: length of answers that are not recorded. Rows are stably sorted by
    time, and the first arrival becomes 0. Raise InputError, also for a file without rows.
    """
    sample = None if isinstance(path, TraceFile) else sample_of(path)
    if sample is not None:
        trace_block_size = trace_block_size or sample.trace_block_size
    file = TraceFile.of(path)
    reader = MooncakeReader(
        file, trace_block_size=trace_block_size, skip_bad_lines=skip_bad_lines, output_tokens=output_tokens
    )
    requests = reader.read()
    if not requests:
        what = "has no requests" if not reader.num_skipped else f"has no readable line in {reader.num_skipped}"
        raise InputError(what, path=file.path, hint="A trace has one JSON object per line.")
    if reader.waits:
        requests = _with_waits(requests, reader.waits, file.path)
    knows_prefixes = reader.num_without_ids < reader.num_rows
    warnings = []
    if knows_prefixes and reader.num_without_ids:
        warnings.append(
            f"{reader.num_without_ids:,} of {reader.num_rows:,} rows have no hash_ids: their prompts share nothing"
        )
    if reader.num_too_many_ids:
        warnings.append(
            f"{reader.num_too_many_ids:,} of {reader.num_rows:,} rows have more hash_ids than their prompts have room "
            f"for, in ids of {reader.trace_block_size} tokens: those that are too many are left out"
        )
    unit_tokens, has_output_tokens = reader.trace_block_size, reader.has_output_tokens
    if session_turns == "deltas":
        from kvarts.sim.traffic.implied import accumulated

        requests = accumulated(requests, unit_tokens, file.path)
        unit_tokens, has_output_tokens = 1, True
    elif session_turns is None and knows_prefixes and reader.has_sessions:
        _refuse_deltas(requests, file.path)
    requests = _in_arrival_order(requests, file.path)
    left_out: Counter[str] = Counter()
    if isinstance(requests, list):
        requests = with_output(requests, left_out)
        if not requests:
            raise nothing_left(file, left_out, reader.num_skipped)
    return Trace(
        requests,
        unit_tokens=unit_tokens,
        has_output_tokens=has_output_tokens,
        knows_prefixes=knows_prefixes,
        name=file.name,
        num_skipped_lines=reader.num_skipped,
        left_out=left_out,
        warnings=warnings,
    )


def _refuse_deltas(requests: Sequence[TraceRequest], path: Path) -> None:
    """Raise InputError if the later turns of sessions appear to be deltas."""
    from kvarts.sim.traffic.implied import broken_sessions

    broken, num_sessions = broken_sessions(requests)
    if len(broken) < num_sessions or not any(session.shrinks for session in broken):
        return
    raise InputError(
        f"the turns of session {broken[0].session_id!r} share no first id with the turn before them, and later ones "
        f"are shorter; so it is in {'all of ' if num_sessions > 1 else ''}{num_sessions:,} session"
        f"{'s' if num_sessions > 1 else ''} with several turns",
        path=path,
        field="hash_ids",
        hint="Pass --set session_turns=deltas if a later turn has only the part after the turn before it, or "
        "--set session_turns=whole if it has its whole prompt.",
    )


def _with_waits(requests: Sequence[TraceRequest], waits: dict[int, MooncakeRow], path: Path) -> list[TraceRequest]:
    """Return `requests` with dependencies set from `wait_for`. Raise InputError for an unknown name."""
    row_of = {request.request_id: request.row for request in requests if request.request_id is not None}
    waiting = []
    for request in requests:
        row = waits.get(request.row)
        if row is None or row.wait_for is None:
            waiting.append(request)
            continue
        delay_ns = to_ns((row.delay or 0) + (row.tool_wait_ms or 0), NS_PER_MS)
        after = []
        for name in row.wait_for:
            if str(name) not in row_of:
                raise InputError(
                    f"row {request.row + 1} waits for {str(name)[:40]!r}, and no row has this request_id",
                    path=path,
                    field="wait_for",
                )
            after.append(After(row_of[str(name)], delay_ns))
        waiting.append(
            msgspec.structs.replace(
                request,
                after=tuple(after),
                delay_ns=None if request.arrival_ns >= 0 else 0,
            )
        )
    return waiting


def _in_arrival_order(requests: Sequence[TraceRequest], path: Path) -> Sequence[TraceRequest]:
    """Return requests sorted by time; a request without a time is placed directly after the one it waits for."""
    if isinstance(requests, RequestColumns):
        return requests.in_arrival_order()
    last_of_session: dict[str, int] = {}
    time_of_row: dict[int, int] = {}
    times = []
    has_delays = False
    for request in requests:
        time_ns = request.arrival_ns
        if time_ns < 0:
            known = [time_of_row[after.row] for after in request.after if after.row in time_of_row]
            before = max(known) if known else None
            if not request.after:
                assert request.session_id is not None
                before = last_of_session.get(request.session_id)
            if before is None:
                what = f"the first turn of session {request.session_id!r}, has no time"
                if request.after:
                    what = "waits for later rows, and has no time"
                raise InputError(
                    f"row {request.row + 1}, {what}",
                    path=path,
                    field="timestamp",
                    hint="Give the first turn of each session a timestamp.",
                )
            time_ns = before
            has_delays = True
        if request.session_id is not None:
            last_of_session[request.session_id] = time_ns
        time_of_row[request.row] = time_ns
        times.append(time_ns)
    first_ns = min(times)
    if not has_delays and first_ns == 0 and all(a <= b for a, b in pairwise(times)):
        return requests
    order = sorted(range(len(times)), key=times.__getitem__)
    return [msgspec.structs.replace(requests[i], arrival_ns=times[i] - first_ns) for i in order]

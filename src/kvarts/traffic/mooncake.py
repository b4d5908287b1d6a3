"""Reader for Mooncake traces: JSON lines with `timestamp`, `input_length`, `output_length`, `hash_ids`.

Read as well, where a row has them: `session_id` and `delay` (ms after the session's turn before), `priority`,
`output_token_ids`, `request_id`, `tenant` (tenants share no page). Other fields are left alone. A hash id stands for
`trace_block_size` equal tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec

from kvarts.errors import InputError, parts_of
from kvarts.files import reading
from kvarts.limits import check_whole
from kvarts.samples import located, sample_of, where_samples_are
from kvarts.traffic.mooncake_request import request_of
from kvarts.traffic.mooncake_row import MooncakeRow
from kvarts.traffic.trace import Trace, TraceRequest

__all__ = ["MooncakeReader", "load_mooncake"]

BLOCK_BYTES = 1 << 20


class MooncakeReader:
    """Iterates over the rows of one file as TraceRequests, a block of lines at a time, in the order of the file.

    Times are as in the file, in nanoseconds; a row with a `delay` and no `timestamp` has -1. Raises InputError with
    file, line and field for a row that cannot be read, or counts it in `num_skipped` with `skip_bad_lines`.
    """

    def __init__(self, path: Path | str, *, trace_block_size: int = 512, skip_bad_lines: bool = False) -> None:
        check_whole(trace_block_size, "trace_block_size")
        self.path = located(path)
        self.trace_block_size = trace_block_size
        self.skip_bad_lines = skip_bad_lines
        self.num_skipped = 0
        self.has_output_tokens = False
        self.has_sessions = False
        self._decoder = msgspec.json.Decoder(MooncakeRow)

    def __iter__(self) -> Iterator[TraceRequest]:
        row_number = 0
        for first_line, block in self._blocks():
            for line, row in self._decode(first_line, block):
                try:
                    request = request_of(row, row_number, self.trace_block_size)
                except InputError as error:
                    self._skip_or_raise(error, line)
                else:
                    self.has_output_tokens |= row.output_token_ids is not None
                    self.has_sessions |= row.session_id is not None
                    yield request
                row_number += 1

    def _blocks(self) -> Iterator[tuple[int, bytes]]:
        """Iterate over blocks of whole lines, each with the number of its first line."""
        with reading(self.path, hint=where_samples_are(self.path)):
            file = self.path.open("rb")
        with file:
            line = 1
            rest = b""
            while True:
                with reading(self.path):
                    data = file.read(BLOCK_BYTES)
                if not data:
                    break
                cut = data.rfind(b"\n") + 1
                if cut:
                    block = rest + data[:cut]
                    yield line, block
                    line += block.count(b"\n")
                    rest = data[cut:]
                else:
                    rest += data
            if rest.strip():
                yield line, rest

    def _decode(self, first_line: int, block: bytes) -> Iterable[tuple[int, MooncakeRow]]:
        try:
            rows = self._decoder.decode_lines(block)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._decode_by_line(first_line, block)
        # Blank lines shift the count of lines.
        if len(rows) == block.count(b"\n") + (not block.endswith(b"\n")):
            return enumerate(rows, first_line)
        return self._decode_by_line(first_line, block)

    def _decode_by_line(self, first_line: int, block: bytes) -> Iterator[tuple[int, MooncakeRow]]:
        """Return what the good lines say, and find the bad ones."""
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
        hint = "Mend the line, or pass --skip-bad-lines to leave such lines out and count them."
        raise InputError(error.what, path=self.path, line=line, field=error.field, hint=hint) from error


def load_mooncake(path: Path | str, *, trace_block_size: int | None = None, skip_bad_lines: bool = False) -> Trace:
    """Read a whole file, or a bundled one (`sample:mooncake`): every line is checked before anything is replayed.

    `trace_block_size`: tokens per hash id, 512 unless given or known of a bundled file.

    Rows are sorted by time, equals in the order of the file, and the first arrival becomes 0. Raise InputError, also
    for a file without rows.
    """
    sample = sample_of(path)
    trace_block_size = trace_block_size or (sample and sample.trace_block_size) or 512
    path = located(path)
    reader = MooncakeReader(path, trace_block_size=trace_block_size, skip_bad_lines=skip_bad_lines)
    requests = list(reader)
    if not requests:
        what = "has no requests" if not reader.num_skipped else f"has no readable line in {reader.num_skipped}"
        raise InputError(what, path=path, hint="A trace has one JSON object a line.")
    requests = _in_arrival_order(requests, path)
    return Trace(
        requests,
        unit_tokens=trace_block_size,
        has_output_tokens=reader.has_output_tokens,
        name=path.name,
        num_skipped_lines=reader.num_skipped,
    )


def _in_arrival_order(requests: list[TraceRequest], path: Path) -> list[TraceRequest]:
    """Return requests sorted by time; a turn without a time stands right behind the turn before it."""
    last_of_session: dict[str, int] = {}
    times = []
    has_delays = False
    for request in requests:
        time_ns = request.arrival_ns
        if time_ns < 0:
            assert request.session_id is not None
            before = last_of_session.get(request.session_id)
            if before is None:
                raise InputError(
                    f"row {request.row + 1}, the first turn of session {request.session_id!r}, has no time",
                    path=path,
                    field="timestamp",
                    hint="Give the first turn of each session a timestamp.",
                )
            time_ns = before
            has_delays = True
        if request.session_id is not None:
            last_of_session[request.session_id] = time_ns
        times.append(time_ns)
    first_ns = min(times)
    if not has_delays and first_ns == 0 and all(a <= b for a, b in pairwise(times)):
        return requests
    order = sorted(range(len(times)), key=times.__getitem__)
    return [msgspec.structs.replace(requests[i], arrival_ns=times[i] - first_ns) for i in order]

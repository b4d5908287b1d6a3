"""Readers for logs: of served requests, and of KV caches, some without answers.

Qwen-Bailian (usage traces of Alibaba): `chat_id`, `parent_chat_id` (-1 for a first turn), `timestamp` in seconds,
`input_length`, `output_length`, `hash_ids` of 16 tokens each. A chat with a parent is a later turn of its session.

A log of responses: `created` (seconds) and `usage` with `prompt_tokens` and `completion_tokens`, as in responses of the
OpenAI API. A spend log: `startTime`, `prompt_tokens`, `completion_tokens`, `status`, `session_id`. Neither records the
contents of prompts, so no two prompts share a prefix; `prompt_tokens_details` is ignored.

Other fields are ignored. KV caches:

- LMCache (`lmcache server --lookup-hash-log-dir`), a file or a directory of them: `timestamp` in seconds, `seq_len`,
  `chunk_size`, `chunk_hashes` of the whole chunks.
- Tair's tokenizer (`tokenids_*.jsonl`): `timestamp` in seconds, `token_ids`.
- Tair's optimizer: `timestamp_us`, `keys` of blocks, `input_len`, `output_len`.

Records of caches without a number of generated tokens, or with 0, are read as requests for one token, with a warning.

A run recorded by a live engine is JSON lines, one request with its tokens per line, by arrival.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from kvarts.content import pack_units
from kvarts.errors import ConfigError, InputError, parts_of
from kvarts.files import reading
from kvarts.hints import Hints
from kvarts.traffic.trace import Trace, TraceRequest
from kvarts.traffic.trace_file import NO_ID, TraceFile, date_ns, load_rows, unlike_any_other
from kvarts.traffic.trace_request import DirectRequest

__all__ = [
    "RecordedRow",
    "load_bailian",
    "load_lmcache",
    "load_recorded",
    "load_spend_log",
    "load_tair",
    "load_token_ids",
    "load_usage_log",
    "recorded_trace",
]

BAILIAN_TOKENS = 16

Tokens = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e10)]
NS_PER_US = 1_000
TAIR_TOKENS = 16
NO_OUTPUTS = "the log has no numbers of generated tokens: each request generates one"


class _Chat(msgspec.Struct, gc=False):
    chat_id: int
    timestamp: Seconds
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[int]
    parent_chat_id: int = -1


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: Tokens
    completion_tokens: Count


class _Response(msgspec.Struct, gc=False):
    created: Seconds
    usage: _Usage


class _Spend(msgspec.Struct, gc=False):
    start: str = msgspec.field(name="startTime")
    prompt_tokens: Count
    completion_tokens: Count
    request_id: str | None = None
    status: str | None = None


def load_bailian(
    path: Path | str | TraceFile, *, trace_block_size: int | None = None, skip_bad_lines: bool = False
) -> Trace:
    """Read a whole file. Raise MissingFileError; InputError, with line and field, for malformed input."""
    unit_tokens = trace_block_size or BAILIAN_TOKENS
    first_turns: dict[int, int] = {}

    def request(row: int, chat: _Chat) -> TraceRequest:
        if len(chat.hash_ids) * unit_tokens < chat.input_length:
            raise InputError(
                f"{len(chat.hash_ids)} ids of {unit_tokens} tokens cover {len(chat.hash_ids) * unit_tokens} of the "
                f"{chat.input_length} tokens of input_length",
                field="hash_ids",
            )
        try:
            units = pack_units(chat.hash_ids)
        except ConfigError:
            raise InputError("ids must be from 0 to 2**64 - 1", field="hash_ids") from None
        first = first_turns[chat.chat_id] = first_turns.get(chat.parent_chat_id, chat.chat_id)
        return TraceRequest(
            row,
            round(chat.timestamp * 1e9),
            units,
            chat.input_length,
            chat.output_length,
            session_id=str(first),
        )

    return load_rows(TraceFile.of(path), _Chat, request, unit_tokens=unit_tokens, skip_bad_lines=skip_bad_lines)


def load_usage_log(path: Path | str | TraceFile, *, skip_bad_lines: bool = False) -> Trace:
    """Read a whole file. Raise MissingFileError; InputError, with line and field, for malformed input."""

    def request(row: int, response: _Response) -> TraceRequest:
        usage = response.usage
        units = unlike_any_other(row, usage.prompt_tokens)
        # The prompt of an aborted request was computed, which yields a token.
        num_output = max(1, usage.completion_tokens)
        return TraceRequest(row, round(response.created * 1e9), units, usage.prompt_tokens, num_output)

    return load_rows(TraceFile.of(path), _Response, request, skip_bad_lines=skip_bad_lines, knows_prefixes=False)


def load_spend_log(path: Path | str | TraceFile, *, skip_bad_lines: bool = False) -> Trace:
    """Read a whole file. Raise MissingFileError; InputError, with line and field, for malformed input.

    Rows with the `status` `failure`, and rows without prompt tokens (images, audio), are left out and counted.
    """

    def request(row: int, spend: _Spend) -> TraceRequest | str:
        start_ns = date_ns(spend.start, "startTime")
        if spend.status == "failure":
            return "failed"
        if not spend.prompt_tokens:
            return "without prompt tokens"
        units = unlike_any_other(row, spend.prompt_tokens)
        num_output = max(1, spend.completion_tokens)
        return TraceRequest(row, start_ns, units, spend.prompt_tokens, num_output, request_id=spend.request_id)

    return load_rows(TraceFile.of(path), _Spend, request, skip_bad_lines=skip_bad_lines, knows_prefixes=False)


class _Lookup(msgspec.Struct, gc=False):
    timestamp: Seconds
    seq_len: Tokens
    chunk_size: Tokens
    chunk_hashes: list[str]
    request_id: str | None = None
    model_name: str | None = None


class _Tokens(msgspec.Struct, gc=False):
    timestamp: Seconds
    token_ids: Annotated[list[int], msgspec.Meta(min_length=1)]


class _Dialog(msgspec.Struct, gc=False):
    timestamp_us: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
    keys: list[int]
    input_len: Count | None = None
    output_len: Count = 0
    trace_id: str | None = None
    instance_id: str | None = None


def load_lmcache(path: Path | str | TraceFile, *, skip_bad_lines: bool = False) -> Trace:
    """Read one log of lookups, or all `.jsonl` files of a directory. Requests to different models share nothing.

    Raise MissingFileError, or InputError with line and field.
    """
    file = TraceFile.of(path)
    files = [file]
    if file.is_directory:
        with reading(file.path):
            files = [TraceFile(each) for each in sorted(file.path.glob("*.jsonl*"))]
    numbers: dict[str, int] = {}
    chunk_size = 0

    def request(row: int, lookup: _Lookup) -> TraceRequest:
        nonlocal chunk_size
        if chunk_size and lookup.chunk_size != chunk_size:
            raise InputError(f"is {lookup.chunk_size}, and {chunk_size} before", field="chunk_size")
        chunk_size = lookup.chunk_size
        num_whole, num_rest = divmod(lookup.seq_len, chunk_size)
        if len(lookup.chunk_hashes) != num_whole:
            raise InputError(
                f"{len(lookup.chunk_hashes)} hashes, and {lookup.seq_len} tokens have {num_whole} whole chunks of "
                f"{chunk_size}",
                field="chunk_hashes",
            )
        units = pack_units(numbers.setdefault(name, len(numbers)) for name in lookup.chunk_hashes)
        if num_rest:
            units += pack_units([NO_ID + row])
        return TraceRequest(
            row,
            round(lookup.timestamp * 1e9),
            units,
            lookup.seq_len,
            1,
            request_id=lookup.request_id,
            tenant=lookup.model_name,
        )

    trace = load_rows(files, _Lookup, request, skip_bad_lines=skip_bad_lines)
    trace.name, trace.unit_tokens = file.name, chunk_size
    trace.warnings.append(NO_OUTPUTS)
    return trace


def load_token_ids(path: Path | str | TraceFile, *, skip_bad_lines: bool = False) -> Trace:
    """Read the output of Tair's tokenizer. Raise MissingFileError, or InputError with line and field."""

    def request(row: int, tokens: _Tokens) -> TraceRequest:
        units = _packed(tokens.token_ids, "token_ids")
        return TraceRequest(row, round(tokens.timestamp * 1e9), units, len(tokens.token_ids), 1)

    trace = load_rows(TraceFile.of(path), _Tokens, request, unit_tokens=1, skip_bad_lines=skip_bad_lines)
    trace.warnings.append(NO_OUTPUTS)
    return trace


def load_tair(
    path: Path | str | TraceFile, *, trace_block_size: int | None = None, skip_bad_lines: bool = False
) -> Trace:
    """Read a trace of Tair's optimizer. Raise MissingFileError, or InputError with line and field.

    `trace_block_size`: tokens per key, 16 by default.
    """
    unit_tokens = trace_block_size or TAIR_TOKENS
    num_without_output = 0

    def request(row: int, dialog: _Dialog) -> TraceRequest | str:
        nonlocal num_without_output
        num_prompt = len(dialog.keys) * unit_tokens if dialog.input_len is None else dialog.input_len
        if not num_prompt:
            return "without a prompt"
        units = _packed(dialog.keys, "keys")
        num_whole, num_rest = divmod(num_prompt, unit_tokens)
        if len(dialog.keys) not in {num_whole, num_whole + bool(num_rest)}:
            raise InputError(
                f"{len(dialog.keys)} keys, and {num_prompt} tokens have {num_whole} whole blocks of {unit_tokens}",
                field="keys",
                hint="Pass --trace-block-size with the tokens of a key.",
            )
        if num_rest and len(dialog.keys) == num_whole:
            units += pack_units([NO_ID + row])
        num_without_output += not dialog.output_len
        return TraceRequest(
            row,
            dialog.timestamp_us * NS_PER_US,
            units,
            num_prompt,
            max(1, dialog.output_len),
            request_id=dialog.trace_id,
        )

    file = TraceFile.of(path)
    trace = load_rows(file, _Dialog, request, unit_tokens=unit_tokens, skip_bad_lines=skip_bad_lines)
    if num_without_output:
        trace.warnings.append(
            f"{num_without_output:,} of {len(trace.requests or []):,} records have no generated tokens: each generates "
            "one"
        )
    return trace


def _packed(ids: list[int], field: str) -> bytes:
    try:
        return np.array(ids, np.int64).astype(np.uint64).tobytes()  # keys are signed in the file
    except (OverflowError, ConfigError):
        raise InputError("ids must be from -2**63 to 2**63 - 1", field=field) from None


class RecordedRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request. `output`: the tokens it generated. `ended`: its state when the record was written.

    A request that was refused because its pages could never fit generated nothing; its `num_output_tokens` is the
    number it asked for, so that a replay refuses it too. `began_ns`: start of the run, in runs that have other records.
    `cancel_after_ns`: time after arrival at which its client gave it up, of a run on a fleet: `output` then has the
    tokens that would have followed, too. `worker`, `is_left`, `fetches`: see DirectRequest; the last is a line, from 0.
    `model`: the name by which it asked for one of several.
    """

    arrival_ns: int
    prompt: list[int]
    num_output_tokens: int
    output: list[int] = []
    max_tokens: int = 0
    priority: int = 0
    tenant: str | None = None
    model: str | msgspec.UnsetType = msgspec.UNSET
    hints: Hints | msgspec.UnsetType = msgspec.UNSET
    request_id: str | None = None
    ended: str = "finished"
    began_ns: int | msgspec.UnsetType = msgspec.UNSET
    cancel_after_ns: int | msgspec.UnsetType = msgspec.UNSET
    worker: int | msgspec.UnsetType = msgspec.UNSET
    is_left: bool | msgspec.UnsetType = msgspec.UNSET
    fetches: int | msgspec.UnsetType = msgspec.UNSET


def load_recorded(path: Path | str | TraceFile, *, skip_bad_lines: bool = False) -> Trace:
    """Read a recorded run. Raise MissingFileError, or InputError with file and line."""
    file = TraceFile.of(path)
    rows: list[RecordedRow] = []
    num_skipped = 0
    decoder = msgspec.json.Decoder(RecordedRow)
    for number, line in file.records():
        try:
            row = decoder.decode(line)
            _request(0, row, 0, {})
        except (msgspec.DecodeError, ConfigError) as error:
            if not skip_bad_lines:
                what, field = parts_of(error)
                raise InputError(what, path=file.path, line=number, field=field) from error
            num_skipped += 1
        else:
            rows.append(row)
    if not rows:
        raise InputError("has no requests", path=file.path, hint="A line is a request of a recorded run.")
    return recorded_trace(rows, name=file.name, num_skipped_lines=num_skipped)


def recorded_trace(
    rows: list[RecordedRow], *, name: str = "recorded", num_skipped_lines: int = 0, began_ns: int | None = None
) -> Trace:
    """Return recorded rows as a trace, without requests that were cancelled before their first token.

    `began_ns`: start of the trace; default: that given in the rows, else the first arrival.
    """
    first_ns = min((row.arrival_ns for row in rows), default=0) if began_ns is None else began_ns
    if began_ns is None and rows and isinstance(rows[0].began_ns, int):
        first_ns = rows[0].began_ns
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
    )

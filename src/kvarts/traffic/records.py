"""Readers for records of requests that served or tested models: Dynamo's request traces, and AIPerf's exports.

Dynamo (`dynamo.request.trace.v1`, JSON lines, packed or not): of `request_end` records, `request.request_received_ms`,
`request.output_tokens` and `request.replay` with `trace_block_size`, `input_length` and `input_sequence_hashes`, one
hash for each block and all before it; `agent_context.session_id` where there is one. Other records are passed over.

AIPerf (`profile_export.jsonl`): `metadata.request_start_ns`, and of `metrics` the values of `input_sequence_length` and
`output_sequence_length`. It does not say what was in a prompt. Requests that failed and those of a warm-up are passed
over.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from kvarts.content import pack_units
from kvarts.errors import InputError, MissingFileError, parts_of
from kvarts.files import read_text
from kvarts.traffic.azure import UNIT_TOKENS, unlike_any_other
from kvarts.traffic.logs import load_rows
from kvarts.traffic.trace import Trace, TraceRequest

__all__ = ["load_aiperf", "load_dynamo"]

NO_ID = 1 << 63
"""Added to the number of a row: the unit of the tokens after its last whole block."""
NS_PER_MS = 1_000_000

Tokens = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Hash = Annotated[int, msgspec.Meta(ge=0)]


class _Replay(msgspec.Struct, gc=False):
    trace_block_size: Tokens
    input_length: Tokens
    input_sequence_hashes: list[Hash]


class _Ended(msgspec.Struct, gc=False):
    request_received_ms: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
    replay: _Replay
    output_tokens: Count
    request_id: str | None = None


class _Agent(msgspec.Struct, gc=False):
    session_id: str | None = None


class _Record(msgspec.Struct, gc=False):
    event_type: str
    request: msgspec.Raw = msgspec.Raw()
    agent_context: _Agent | None = None


class _Value(msgspec.Struct, gc=False):
    value: Annotated[float, msgspec.Meta(ge=0, lt=1 << 31)]


class _Metrics(msgspec.Struct, gc=False):
    input_sequence_length: _Value | None = None
    output_sequence_length: _Value | None = None


class _Metadata(msgspec.Struct, gc=False):
    request_start_ns: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    benchmark_phase: str = "profiling"


class _Profile(msgspec.Struct, gc=False):
    metadata: _Metadata
    metrics: _Metrics | None = None
    error: msgspec.Raw = msgspec.Raw()


def load_dynamo(path: Path | str, *, skip_bad_lines: bool = False) -> Trace:
    """Read a whole file. Raise MissingFileError, and InputError with line and field for what cannot be read."""
    path = Path(path)
    block_size = 0
    decoder = msgspec.json.Decoder(_Ended)

    def request(row: int, record: _Record) -> TraceRequest | None:
        nonlocal block_size
        if record.event_type != "request_end":
            return None
        if not bytes(record.request):
            raise InputError("is missing", field="request")
        try:
            ended = decoder.decode(record.request)
        except msgspec.ValidationError as error:
            raise _within(error) from error
        replay = ended.replay
        if block_size and replay.trace_block_size != block_size:
            raise InputError(
                f"is {replay.trace_block_size}, and {block_size} before", field="request.replay.trace_block_size"
            )
        block_size = replay.trace_block_size
        num_whole, num_rest = divmod(replay.input_length, block_size)
        hashes = replay.input_sequence_hashes
        if len(hashes) not in {num_whole, num_whole + bool(num_rest)}:
            raise InputError(
                f"{len(hashes)} hashes, and {replay.input_length} tokens have {num_whole} whole blocks of {block_size}",
                field="request.replay.input_sequence_hashes",
            )
        if any(each >= 1 << 64 for each in hashes):
            raise InputError("hashes must be below 2**64", field="request.replay.input_sequence_hashes")
        units = pack_units(hashes[:num_whole])
        if num_rest:
            units += np.array([NO_ID + row], np.uint64).tobytes()
        return TraceRequest(
            row,
            ended.request_received_ms * NS_PER_MS,
            units,
            replay.input_length,
            max(1, ended.output_tokens),
            session_id=None if record.agent_context is None else record.agent_context.session_id,
            request_id=ended.request_id,
        )

    trace = load_rows(path, _text(path), _Record, request, skip_bad_lines=skip_bad_lines)
    return Trace(
        trace.requests or [], unit_tokens=block_size, name=path.name, num_skipped_lines=trace.num_skipped_lines
    )


def load_aiperf(path: Path | str, *, skip_bad_lines: bool = False) -> Trace:
    """Read a whole file. Raise MissingFileError, and InputError with line and field for what cannot be read."""
    path = Path(path)

    def request(row: int, profile: _Profile) -> TraceRequest | None:
        is_failed = bytes(profile.error) not in {b"", b"null"}
        if is_failed or profile.metadata.benchmark_phase != "profiling" or profile.metrics is None:
            return None
        lengths = profile.metrics
        if lengths.input_sequence_length is None or lengths.output_sequence_length is None:
            name = "input" if lengths.input_sequence_length is None else "output"
            raise InputError("is missing", field=f"metrics.{name}_sequence_length")
        num_prompt = int(lengths.input_sequence_length.value)
        if num_prompt < 1:
            raise InputError("must be at least 1, got 0", field="metrics.input_sequence_length.value")
        return TraceRequest(
            row,
            profile.metadata.request_start_ns,
            unlike_any_other(row, num_prompt),
            num_prompt,
            max(1, int(lengths.output_sequence_length.value)),
        )

    text = read_text(path, hint="Check the path of the trace.")
    return load_rows(
        path, text, _Profile, request, unit_tokens=UNIT_TOKENS, skip_bad_lines=skip_bad_lines, knows_prefixes=False
    )


def _within(error: msgspec.ValidationError) -> InputError:
    what, field = parts_of(error)
    return InputError(what, field=f"request.{field}" if field else "request")


def _text(path: Path) -> str:
    if path.suffix != ".gz":
        return read_text(path, hint="Check the path of the trace.")
    try:
        return gzip.decompress(path.read_bytes()).decode()
    except FileNotFoundError:
        raise MissingFileError("no such file", path=path, hint="Check the path of the trace.") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}", path=path) from error

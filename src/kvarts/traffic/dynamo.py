"""Reader for Dynamo's request traces, `dynamo.request.trace.v1`.

They are JSON lines. The reader uses `request_end` records: `request.request_received_ms`, `request.output_tokens`, and
`request.replay` with `trace_block_size`, `input_length` and `input_sequence_hashes`, one hash per block that covers all
blocks before it; also `agent_context.session_id` if present. Other records are ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from kvarts.content import pack_units
from kvarts.errors import InputError, parts_of
from kvarts.traffic.rows import NO_ID, load_rows
from kvarts.traffic.trace import Trace, TraceRequest
from kvarts.traffic.trace_file import TraceFile

__all__ = ["load_dynamo"]

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


def load_dynamo(path: Path | str | TraceFile, *, skip_bad_lines: bool = False) -> Trace:
    """Read a whole file. Raise MissingFileError; InputError, with line and field, for malformed input."""
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

    trace = load_rows(TraceFile.of(path), _Record, request, skip_bad_lines=skip_bad_lines)
    trace.unit_tokens = block_size
    return trace


def _within(error: msgspec.ValidationError) -> InputError:
    what, field = parts_of(error)
    return InputError(what, field=f"request.{field}" if field else "request")

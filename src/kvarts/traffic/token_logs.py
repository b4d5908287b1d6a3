"""Readers for logs of KV caches, some without answers: LMCache's lookups, and traces of Tair KVCache.

- LMCache (`lmcache server --lookup-hash-log-dir`), a file or a directory of them: `timestamp` in seconds, `seq_len`,
  `chunk_size`, `chunk_hashes` of the whole chunks.
- Tair's tokenizer (`tokenids_*.jsonl`): `timestamp` in seconds, `token_ids`.
- Tair's optimizer: `timestamp_us`, `keys` of blocks, `input_len`, `output_len`.

Records without a number of generated tokens, or with 0, are read as requests for one token, with a warning.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from kvarts.content import pack_units
from kvarts.errors import ConfigError, InputError
from kvarts.files import reading
from kvarts.traffic.rows import NO_ID, load_rows
from kvarts.traffic.trace import Trace, TraceRequest
from kvarts.traffic.trace_file import TraceFile

__all__ = ["load_lmcache", "load_tair", "load_token_ids"]

NS_PER_US = 1_000
TAIR_TOKENS = 16
NO_OUTPUTS = "the log has no numbers of generated tokens: each request generates one"

Tokens = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e10)]


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

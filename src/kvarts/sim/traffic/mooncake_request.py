"""Validates rows of a Mooncake trace and converts them to requests."""

from __future__ import annotations

from kvarts.base.errors import ConfigError, InputError
from kvarts.base.limits import LATEST_NS, brief
from kvarts.base.units import to_ns
from kvarts.core.content import pack_units
from kvarts.sim.traffic.trace_file import unlike_any_other
from kvarts.sim.traffic.trace_request import NS_PER_MS, MooncakeRow, TraceRequest

__all__ = ["has_too_many_ids", "request_of"]

SIZES = tuple(1 << power for power in range(13))
"""Numbers of tokens per id in published traces."""


def has_too_many_ids(row: MooncakeRow, trace_block_size: int) -> bool:
    """Return whether `row` has more hash ids than its prompt has blocks."""
    return row.hash_ids is not None and (len(row.hash_ids) - 1) * trace_block_size >= row.input_length


def request_of(
    row: MooncakeRow, row_number: int, trace_block_size: int, *, refuse_too_many: bool = False
) -> TraceRequest:
    """Return the request of `row`, with its time as in the file; -1 if it only has a delay.

    Raise InputError, with the field, for invalid values. `refuse_too_many`: more ids than the prompt has blocks are an
    error too; otherwise the surplus is ignored.
    """
    input_length = row.input_length
    output_length = row.output_length
    output_token_ids = row.output_token_ids
    if output_token_ids is not None:
        if output_length is None:
            output_length = len(output_token_ids)
        elif output_length != len(output_token_ids):
            raise InputError(
                f"has {len(output_token_ids)} ids, but output_length is {output_length}",
                field="output_token_ids",
            )
    elif output_length is None:
        raise InputError("is missing", field="output_length")
    if input_length < 1:
        raise InputError(f"must be at least 1, got {input_length}", field="input_length")
    if output_length < 0:
        raise InputError(f"must be at least 0, got {output_length}", field="output_length")
    hash_ids = row.hash_ids
    if hash_ids is not None:
        covered = len(hash_ids) * trace_block_size
        if covered < input_length:
            raise InputError(
                f"{len(hash_ids)} ids of {trace_block_size} tokens cover {covered} of the "
                f"{input_length} tokens of input_length",
                field="hash_ids",
            )
        if refuse_too_many and covered - input_length >= trace_block_size:
            raise _too_many(len(hash_ids), input_length, trace_block_size)
    timestamp, delay = row.timestamp, row.delay
    if type(timestamp) is int and timestamp >= 0:
        if timestamp > LATEST_NS // NS_PER_MS:
            raise InputError(f"must be at most {LATEST_NS // NS_PER_MS}, got {brief(timestamp)}", field="timestamp")
        arrival_ns = timestamp * NS_PER_MS
    elif timestamp is None:
        if row.wait_for is None and (delay is None or row.session_id is None):
            raise InputError("is missing; only a session's later turn may have a delay instead", field="timestamp")
        arrival_ns = -1
    else:
        if not 0 <= timestamp <= LATEST_NS // NS_PER_MS:
            what = f"must be from 0 to {LATEST_NS // NS_PER_MS}, got {brief(timestamp)}"
            raise InputError(what if timestamp > 0 else f"must be at least 0, got {timestamp}", field="timestamp")
        arrival_ns = to_ns(timestamp, NS_PER_MS)
    if delay is not None and delay < 0:
        raise InputError(f"must be at least 0, got {delay}", field="delay")
    if delay is not None and delay > LATEST_NS // NS_PER_MS:
        raise InputError(f"must be at most {LATEST_NS // NS_PER_MS}, got {brief(delay)}", field="delay")
    if hash_ids is None:
        units = unlike_any_other(row_number, input_length, trace_block_size, beside_ids=True)
    else:
        units = _packed(hash_ids, "hash_ids")
    if (
        delay is None
        and row.session_id is None
        and output_token_ids is None
        and row.request_id is None
        and row.tenant is None
        and row.priority == 0
        and row.cancel_after_ms is None
        and row.hints is None
        and row.model is None
    ):
        return TraceRequest(row_number, arrival_ns, units, input_length, output_length)
    output_units = None if output_token_ids is None else _packed(output_token_ids, "output_token_ids")
    return TraceRequest(
        row_number,
        arrival_ns,
        units,
        input_length,
        output_length,
        output_units=output_units,
        priority=row.priority,
        session_id=None if row.session_id is None else str(row.session_id),
        delay_ns=None if delay is None else to_ns(delay, NS_PER_MS),
        request_id=None if row.request_id is None else str(row.request_id),
        tenant=None if row.tenant is None else str(row.tenant),
        cancel_after_ns=None if row.cancel_after_ms is None else to_ns(row.cancel_after_ms, NS_PER_MS),
        hints=row.hints,
        model=None if row.model in (None, "") else str(row.model),
    )


def _too_many(num_ids: int, input_length: int, trace_block_size: int) -> InputError:
    """Return the error for surplus ids, with the block sizes that would fit."""
    fits = [size for size in SIZES if num_ids == -(-input_length // size)]
    sizes = " or ".join(map(str, fits))
    hint = f"Ids of {sizes} tokens would fit: pass --trace-block-size {fits[0]}" if fits else "Pass --trace-block-size"
    return InputError(
        f"{num_ids} ids of {trace_block_size} tokens stand for {num_ids * trace_block_size} tokens, and input_length "
        f"is {input_length}",
        field="hash_ids",
        hint=f"{hint}, or --trace-block-size {trace_block_size} to leave out those that are too many.",
    )


def _packed(ids: list[int], field: str) -> bytes:
    try:
        return pack_units(ids)
    except ConfigError:
        raise InputError("ids must be from 0 to 2**64 - 1", field=field) from None

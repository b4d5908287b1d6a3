"""Recovers answers that are missing from a trace from the prompt of the next turn.

This works where the next prompt begins with the whole blocks of this turn's prompt and is at least as long as this
prompt and its answer: the tokens after the prompt are then the answer. The last id of a prompt, which stands for a
partial block, is replaced by the id of that block in the next prompt, unless several prompts contain it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvarts.content import UNIT_BYTES
from kvarts.traffic.trace import Trace, TraceRequest

__all__ = ["with_implied_answers"]


def with_implied_answers(trace: Trace) -> Trace:
    """Return `trace` with missing answers taken from later turns of sessions; unchanged if it does not apply."""
    requests = trace.requests
    if requests is None or trace.has_output_tokens or not trace.has_sessions or not trace.knows_prefixes:
        return trace
    shared = _shared_ids(requests)
    next_turns: dict[str, TraceRequest] = {}
    answered = []
    for request in reversed(requests):
        units = None
        if request.session_id is not None:
            following = next_turns.get(request.session_id)
            units = None if following is None else _answered(request, following, trace.unit_tokens, shared)
        turn = request if units is None else msgspec.structs.replace(request, answered_units=units)
        answered.append(turn)
        if turn.session_id is not None:
            next_turns[turn.session_id] = turn
    return Trace(
        answered[::-1],
        unit_tokens=trace.unit_tokens,
        name=trace.name,
        num_skipped_lines=trace.num_skipped_lines,
        left_out=trace.left_out,
        warnings=trace.warnings,
    )


def _answered(request: TraceRequest, following: TraceRequest, unit_tokens: int, shared: set[int]) -> bytes | None:
    """Return the units of a prompt and its answer, taken from the next turn's prompt; None if that does not match."""
    num_tokens = request.num_prompt_tokens + request.num_output_tokens
    mine, theirs = request.units, following.answered_units or following.units
    if not isinstance(mine, bytes) or not isinstance(theirs, bytes) or following.num_prompt_tokens < num_tokens:
        return None
    num_whole, num_rest = divmod(request.num_prompt_tokens, unit_tokens)
    if mine[: num_whole * UNIT_BYTES] != theirs[: num_whole * UNIT_BYTES]:
        return None
    last = mine[num_whole * UNIT_BYTES : (num_whole + 1) * UNIT_BYTES]
    is_replaced = num_rest and last != theirs[num_whole * UNIT_BYTES : (num_whole + 1) * UNIT_BYTES]
    if is_replaced and int.from_bytes(last, "little") in shared:
        return None
    return theirs[: -(-num_tokens // unit_tokens) * UNIT_BYTES]


def _shared_ids(requests: Sequence[TraceRequest]) -> set[int]:
    """Return the last ids of prompts that occur more than once in the trace."""
    lasts = np.array([_last_id(request) for request in requests], np.uint64)
    ids = [request.units for request in requests if isinstance(request.units, bytes)]
    every = np.frombuffer(b"".join(ids), np.uint64)
    names, counts = np.unique(every, return_counts=True)
    several: set[int] = set(names[counts > 1].tolist())
    return several & set(lasts.tolist())


def _last_id(request: TraceRequest) -> int:
    return int.from_bytes(request.units[-UNIT_BYTES:], "little") if isinstance(request.units, bytes) else 0

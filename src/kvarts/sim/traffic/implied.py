"""What a trace implies: whole prompts of turns that have only deltas, and answers that are missing.

An answer is known where the next prompt begins with the whole blocks of this turn's prompt and is at least as long as
this prompt and its answer: the tokens after the prompt are then the answer. The last id of a prompt, which stands for a
partial block, is replaced by the id of that block in the next prompt, unless several prompts contain it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from kvarts.base.errors import InputError
from kvarts.base.limits import MOST_COUNT
from kvarts.core.content import UNIT_BYTES
from kvarts.sim.traffic.trace import Trace
from kvarts.sim.traffic.trace_request import TraceRequest, Units

__all__ = ["BrokenSession", "accumulated", "broken_sessions", "with_implied_answers"]

KNOWN_OUTPUT, FIRST_OUTPUT = 1 << 61, 1 << 62
"""First ids of answers: with token ids from the file, and without. Ids of prompts are far below both."""


SLAB = 1024
"""Requests whose ids are counted at once."""
NOTHING: tuple[tuple[range, ...], int] = ((), 0)


class BrokenSession(msgspec.Struct, frozen=True):
    """A session in which no turn shares its first id with the turn before. `shrinks`: some prompt is shorter."""

    session_id: str
    shrinks: bool


def broken_sessions(requests: Iterable[TraceRequest]) -> tuple[list[BrokenSession], int]:
    """Return the broken sessions, and the number of sessions with several turns. `requests` must be in turn order."""
    turns: dict[str, list[TraceRequest]] = {}
    for request in requests:
        if request.session_id is not None:
            turns.setdefault(request.session_id, []).append(request)
    several = {name: of_session for name, of_session in turns.items() if len(of_session) > 1}
    broken = []
    for name, of_session in several.items():
        pairs = list(pairwise(of_session))
        if not any(_first_id(before.units) == _first_id(turn.units) for before, turn in pairs):
            shrinks = any(turn.num_prompt_tokens < before.num_prompt_tokens for before, turn in pairs)
            broken.append(BrokenSession(name, shrinks))
    return broken, len(several)


def _first_id(units: Units) -> object:
    return units[:UNIT_BYTES] if isinstance(units, bytes) else (units[0].start if units else None)


def accumulated(requests: Sequence[TraceRequest], unit_tokens: int, path: Path) -> list[TraceRequest]:
    """Return `requests` with whole prompts, token by token, given later turns that contain only new tokens.

    The prompt of a turn is the previous prompt, its answer, and then the turn's own tokens. Answers are therefore known
    too. Raise InputError for a prompt that becomes too long.
    """
    numbers: dict[int, int] = {}
    known: dict[str, tuple[tuple[range, ...], int]] = {}
    whole = []
    for request in requests:
        prompt, num_tokens = known.get(request.session_id, NOTHING) if request.session_id is not None else NOTHING
        prompt = (*prompt, *_tokens(request, unit_tokens, numbers))
        num_tokens += request.num_prompt_tokens
        if num_tokens + request.num_output_tokens > MOST_COUNT:
            raise InputError(
                f"the prompt of row {request.row + 1} has {num_tokens:,} tokens with all turns before it",
                path=path,
                field="input_length",
            )
        answer = _answer(request)
        whole.append(msgspec.structs.replace(request, units=prompt, num_prompt_tokens=num_tokens, output_units=answer))
        if request.session_id is not None:
            known[request.session_id] = (*prompt, *answer), num_tokens + request.num_output_tokens
    return whole


def _answer(request: TraceRequest) -> tuple[range, ...]:
    """Return the tokens of an answer: those of the file, or else unique ones."""
    if isinstance(request.output_units, bytes):
        ids = memoryview(request.output_units).cast("Q").tolist()
        return tuple(range(KNOWN_OUTPUT + token, KNOWN_OUTPUT + token + 1) for token in ids)
    first = FIRST_OUTPUT + (request.row << 31)
    return (range(first, first + request.num_output_tokens),) if request.num_output_tokens else ()


def _tokens(request: TraceRequest, unit_tokens: int, numbers: dict[int, int]) -> tuple[range, ...]:
    """Return the tokens of a row's own ids; equal ids stand for equal tokens."""
    assert isinstance(request.units, bytes)
    ids = memoryview(request.units).cast("Q").tolist()
    runs: list[range] = []
    left = request.num_prompt_tokens
    for name in ids:
        first = numbers.setdefault(name, len(numbers)) * unit_tokens
        size = min(unit_tokens, left)
        if runs and runs[-1].stop == first and size:
            runs[-1] = range(runs[-1].start, first + size)
        elif size:
            runs.append(range(first, first + size))
        left -= size
    return tuple(runs)


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
        if request.session_id is not None and request.answered_units is None:
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
    lasts = np.unique(np.array([_last_id(request) for request in requests], np.uint64))
    counts = np.zeros(len(lasts), np.int64)
    for start in range(0, len(requests), SLAB):
        slab = (request.units for request in requests[start : start + SLAB])
        every = np.frombuffer(b"".join(units for units in slab if isinstance(units, bytes)), np.uint64)
        places = np.minimum(np.searchsorted(lasts, every), len(lasts) - 1)
        counts += np.bincount(places[lasts[places] == every], minlength=len(lasts))
    return set(lasts[counts > 1].tolist())


def _last_id(request: TraceRequest) -> int:
    return int.from_bytes(request.units[-UNIT_BYTES:], "little") if isinstance(request.units, bytes) else 0

"""Whether turns of sessions have whole prompts or only deltas, and conversion of deltas to whole prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from kvarts.content import UNIT_BYTES
from kvarts.errors import InputError
from kvarts.limits import MOST_COUNT
from kvarts.traffic.trace_request import TraceRequest, Units

__all__ = ["BrokenSession", "accumulated", "broken_sessions"]

KNOWN_OUTPUT, FIRST_OUTPUT = 1 << 61, 1 << 62
"""First ids of answers: with token ids from the file, and without. Ids of prompts are far below both."""


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
    return (range(first, first + request.num_output_tokens),)


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

"""Reader for the traces of kv-cache-tester and AgentX: real sessions of coding agents, a JSON object each.

A session has `id`, `block_size`, `hash_id_scope` and `requests`. kv-cache-tester writes it to a file of its own, AgentX
has one per line. A request has `t` (seconds
from the start of the session), `type` (`s` or `n`: streamed or not), `in`, `out` and `hash_ids`, one for each whole
block of `block_size` prompt tokens, and may have `api_time` and `think_time`. An entry of type `subagent` holds the
requests of an agent that ran beside the session. Other fields are left alone.

How this becomes requests of a trace:

- A session's requests are its turns: each waits for the one before it, and then for as long as the client took.
- A sub-agent is a session of its own. Its `t` is when it was done, so it begins `duration_ms` before that.
- Ids of scope `local` mean something in their session only, and get its number: two sessions share nothing.
- The prompt tokens after the last whole block have no id: no other prompt can hit them. Generated tokens can be hit
  only after they have come back as part of a prompt.
- An `out` of 0 (the request was broken off) is read as 1: a prompt that is computed yields a token.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

from kvarts.errors import InputError, parts_of
from kvarts.files import reading
from kvarts.traffic.rows import NO_ID
from kvarts.traffic.trace import Trace, TraceRequest
from kvarts.traffic.trace_file import TraceFile

__all__ = ["load_kv_cache_tester"]

SUFFIXES = (".json", ".json.gz", ".jsonl", ".jsonl.gz")
NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
ID_BITS = 40
"""Ids of a session are below 2**40; the number of the session stands above them."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e9)]
HashId = Annotated[int, msgspec.Meta(ge=0, lt=1 << ID_BITS)]


class _Turn(msgspec.Struct, gc=False, tag_field="type", tag="s"):
    t: Seconds
    num_input: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] = msgspec.field(name="in")
    num_output: Count = msgspec.field(name="out")
    hash_ids: list[HashId]
    api_time: Seconds | None = None
    think_time: Seconds | None = None


class _TurnNotStreamed(_Turn, gc=False, tag_field="type", tag="n"):
    pass


_Turns = list[_Turn | _TurnNotStreamed]


class _SubAgent(msgspec.Struct, gc=False, tag_field="type", tag="subagent"):
    t: Seconds
    agent_id: str
    requests: _Turns
    duration_ms: Annotated[int, msgspec.Meta(ge=0, lt=10**12)] = 0


class _Play(msgspec.Struct, gc=False):
    id: str
    block_size: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    hash_id_scope: Literal["local", "global"]
    requests: list[_Turn | _TurnNotStreamed | _SubAgent]


def load_kv_cache_tester(path: Path | str | TraceFile) -> Trace:
    """Read one session or several, a JSON object each, of a file or of every .json and .jsonl of a directory, by name.

    All sessions begin at 0: the files do not say when one began beside another. Raise MissingFileError, and InputError
    with file, line and field for what cannot be read.
    """
    file = TraceFile.of(path)
    files = [TraceFile(each) for each in sorted(_files(file.path))] if file.is_directory else [file]
    if not files:
        raise InputError("has no .json file", path=file.path, hint="Give the directory that holds the traces.")
    decoder = msgspec.json.Decoder(_Play)
    requests: list[TraceRequest] = []
    place_of_session: dict[str, str] = {}
    block_size, first, number = 0, "", 0
    for each in files:
        for line, data in each.records():
            number += 1
            place = f"{each.path.name}:{line}" if line > 1 else each.path.name
            read = _decoded(each, line if each.is_json_lines else None, data, decoder)
            if block_size and read.block_size != block_size:
                raise InputError(
                    f"is {read.block_size}, and {block_size} in {first}",
                    path=each.path,
                    line=line if each.is_json_lines else None,
                    field="block_size",
                    hint="Replay sessions of one block size at a time.",
                )
            block_size, first = read.block_size, first or place
            session = _Session(
                each.path,
                line if each.is_json_lines else None,
                block_size,
                first_id=number << ID_BITS if read.hash_id_scope == "local" else 0,
            )
            for session_id in session.read(read, requests):
                if session_id in place_of_session:
                    raise InputError(
                        f"{session_id!r} is in {place_of_session[session_id]} as well",
                        path=each.path,
                        line=line if each.is_json_lines else None,
                        field="id",
                        hint="Keep one of them, or give each session its own id.",
                    )
                place_of_session[session_id] = place
    if not requests:
        raise InputError("has no requests", path=file.path)
    requests.sort(key=lambda request: request.arrival_ns)
    return Trace(requests, unit_tokens=block_size, name=file.name)


def _files(directory: Path) -> list[Path]:
    with reading(directory):
        return [file for file in directory.iterdir() if file.name.endswith(SUFFIXES)]


def _decoded(file: TraceFile, line: int | None, data: bytes, decoder: msgspec.json.Decoder[_Play]) -> _Play:
    hint = "A session is one JSON object with id, block_size, hash_id_scope and requests."
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        what, field = parts_of(error)
        if missing := re.search(r"missing required field `(\w+)`", what):
            field, what = f"{field}.{missing[1]}" if field else missing[1], "is missing"
        place = re.search(r"\(byte (\d+)\)", what)
        if line is None and place is not None:
            line = data.count(b"\n", 0, int(place[1])) + 1
        raise InputError(what, path=file.path, line=line, field=field, hint=hint) from error
    except RecursionError:
        raise InputError("is nested too deeply", path=file.path, line=line, hint=hint) from None


class _Session:
    """Turns what one JSON object says into requests."""

    def __init__(self, path: Path, line: int | None, block_size: int, *, first_id: int) -> None:
        self._path = path
        self._line = line
        self._block_size = block_size
        self._first_id = first_id

    def read(self, play: _Play, requests: list[TraceRequest]) -> list[str]:
        """Append all requests of `play`, and return the ids of its sessions: its own, and one a sub-agent."""
        own: list[tuple[str, _Turn]] = []
        session_ids = [play.id]
        agents: list[tuple[str, _SubAgent]] = []
        for index, entry in enumerate(play.requests):
            if isinstance(entry, _SubAgent):
                agents.append((f"requests[{index}]", entry))
            else:
                own.append((f"requests[{index}]", entry))
        if not own:
            raise InputError(
                "has no request", path=self._path, line=self._line, field="requests", hint="Leave such a file out."
            )
        self._append(requests, play.id, own, begin_ns=_ns(own[0][1].t))
        for field, agent in agents:
            begin_ns = _ns(agent.t) - agent.duration_ms * NS_PER_MS
            if begin_ns < 0:
                raise InputError(
                    f"is {agent.duration_ms}, and it was done {agent.t} s after the session began",
                    path=self._path,
                    line=self._line,
                    field=f"{field}.duration_ms",
                    hint="A sub-agent's t is when it was done.",
                )
            turns = [(f"{field}.requests[{place}]", turn) for place, turn in enumerate(agent.requests)]
            session_ids.append(f"{play.id}/{agent.agent_id}")
            self._append(requests, session_ids[-1], turns, begin_ns=begin_ns)
        return session_ids

    def _append(
        self, requests: list[TraceRequest], session_id: str, turns: list[tuple[str, _Turn]], *, begin_ns: int
    ) -> None:
        """Append one session that begins at `begin_ns`. Each turn has the field that it stands in, for errors."""
        before: _Turn | None = None
        for field, turn in turns:
            delay_ns = None
            if before is not None:
                if turn.t < before.t:
                    raise InputError(
                        f"is {turn.t}, before the request before it ({before.t})",
                        path=self._path,
                        line=self._line,
                        field=f"{field}.t",
                        hint="Requests stand in the order in which they were sent.",
                    )
                delay_ns = _delay_ns(before, turn)
            row = len(requests)
            requests.append(
                TraceRequest(
                    row,
                    begin_ns + _ns(turn.t) - _ns(turns[0][1].t),
                    self._units(row, field, turn),
                    turn.num_input,
                    max(turn.num_output, 1),
                    session_id=session_id,
                    delay_ns=delay_ns,
                )
            )
            before = turn

    def _units(self, row: int, field: str, turn: _Turn) -> bytes:
        """Return the ids of the whole blocks, and one of its own for the tokens after them."""
        num_whole, num_rest = divmod(turn.num_input, self._block_size)
        if len(turn.hash_ids) != num_whole:
            raise InputError(
                f"{len(turn.hash_ids)} ids, and {turn.num_input} tokens have {num_whole} whole blocks of "
                f"{self._block_size}",
                path=self._path,
                line=self._line,
                field=f"{field}.hash_ids",
                hint="There is one id for each whole block of the prompt.",
            )
        units = np.array(turn.hash_ids, np.uint64) + np.uint64(self._first_id)
        if num_rest:
            units = np.append(units, np.uint64(NO_ID + row))
        return units.tobytes()


def _delay_ns(before: _Turn, turn: _Turn) -> int:
    """Return how long the client took from the end of `before` until it sent `turn`.

    That is `think_time`, where `before` has a recorded end. Where it has none, `think_time` counts from the last end
    that is known, an earlier turn's: then the time since `before` was sent is the best there is, and too long by what
    `before` took.
    """
    if before.api_time is None:
        return _ns(turn.t) - _ns(before.t)
    if turn.think_time is not None:
        return _ns(turn.think_time)
    return max(0, _ns(turn.t) - _ns(before.t) - _ns(before.api_time))


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)

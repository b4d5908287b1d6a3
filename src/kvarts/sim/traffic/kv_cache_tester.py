"""Reader for the traces of kv-cache-tester and AgentX: real sessions of coding agents, one JSON object each.

A session has `id`, `block_size`, `hash_id_scope` and `requests`. kv-cache-tester writes one file per session, AgentX
one line. A request has `t` (seconds from the start of the session), `type` (`s` or `n`: streamed or not), `in`, `out`
and `hash_ids`, one for each whole block of `block_size` prompt tokens, and may have `api_time`, `think_time` and
`stop`. An entry of type `subagent` contains the requests of an agent that ran concurrently with the session. Other
fields are ignored.

Conversion to requests of a trace:

- A session's requests are its turns: each waits for the one before it, and then for the delay of the client.
- A sub-agent is a separate session, `ID/AGENT_ID`. Its first request waits for the latest request of its parent sent
  before it, and the parent's first request after its end waits for it; delays are those of the recording.
- Times in a sub-agent count from the start of the session (AgentX) or of the sub-agent (kv-cache-tester). In the second
  case its own `t` is its end, and its start is `duration_ms` earlier. The first case is assumed if no sub-agent of the
  input would then begin before the request that it follows.
- Ids of scope `local` are only valid in their session. They are prefixed with its number: sessions share nothing.
- The prompt tokens after the last whole block have no id, so no other prompt can hit them. Generated tokens can be hit
  only once they are part of a later prompt.
- A request with the `stop` `tool_use` has the hint `tool`: the client runs a tool, whose name the files do not hold.
- A request with an `out` of 0 is left out; requests that wait for it wait for what it waits for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from sys import byteorder
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec

from kvarts.base.errors import InputError, parts_of
from kvarts.base.files import reading
from kvarts.base.units import to_ns
from kvarts.core.content import UNIT_BYTES, pack_units
from kvarts.core.hints import Hints
from kvarts.sim.traffic.bounds import Count, SpanSeconds, Tokens
from kvarts.sim.traffic.graph import RecordedTimes, linked, with_output
from kvarts.sim.traffic.trace import Trace, TraceRequest
from kvarts.sim.traffic.trace_file import NO_ID, TraceFile, nothing_left
from kvarts.sim.traffic.trace_request import After

__all__ = ["load_kv_cache_tester"]

SUFFIXES = (".json", ".json.gz", ".jsonl", ".jsonl.gz")
NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
ID_BITS = 40
"""Ids in the file are below 2**40; the session's number is put in the bits above."""
HIGH_BYTES = range(ID_BITS // 8, UNIT_BYTES) if byteorder == "little" else range(UNIT_BYTES - ID_BITS // 8)
"""The places of these bits in an id."""

TOOL_USE = "tool_use"
RUNS_TOOL = Hints(tool=TOOL_USE)

IDS, OPEN, CLOSE = b'"hash_ids":', b"[", b"]"
NO_TEXT = b"none"
"""No text of ids begins with it."""
AT_ONCE = 256
"""Bytes of texts that are compared at once where they differ."""

HashId = Annotated[int, msgspec.Meta(ge=0, lt=1 << ID_BITS)]


PlayT = TypeVar("PlayT")
IdsT = TypeVar("IdsT")
"""The ids of a turn: the place of their text among all texts of the session; the text; or the ids, to explain what is
wrong."""


class _Turn(msgspec.Struct, Generic[IdsT], gc=False, tag_field="type", tag="s"):
    t: SpanSeconds
    num_input: Tokens = msgspec.field(name="in")
    num_output: Count = msgspec.field(name="out")
    hash_ids: IdsT
    api_time: SpanSeconds | None = None
    think_time: SpanSeconds | None = None
    stop: str | None = None


class _TurnNotStreamed(_Turn[IdsT], gc=False, tag_field="type", tag="n"):
    pass


class _SubAgent(msgspec.Struct, Generic[IdsT], gc=False, tag_field="type", tag="subagent"):
    t: SpanSeconds
    agent_id: str
    requests: list[_Turn[IdsT] | _TurnNotStreamed[IdsT]]
    duration_ms: Annotated[int, msgspec.Meta(ge=0, lt=10**12)] | None = None


class _Play(msgspec.Struct, Generic[IdsT], gc=False):
    id: str
    block_size: Tokens
    hash_id_scope: Literal["local", "global"]
    requests: list[_Turn[IdsT] | _TurnNotStreamed[IdsT] | _SubAgent[IdsT]]


class _Ids(msgspec.Struct, frozen=True, gc=False):
    """The ids of a turn: so many of the turn before, and then `new`, which are packed."""

    num_kept: int
    new: bytes


_AnyTurn = _Turn[Any]
_AnyPlay = _Play[Any]
_Turns = list[tuple[str, _AnyTurn, _Ids]]
"""Turns with their names in errors."""


def load_kv_cache_tester(path: Path | str | TraceFile) -> Trace:
    """Read sessions from a file, or from all .json and .jsonl files of a directory in order of name.

    All sessions begin at 0, because the files do not record when they began relative to each other. Raise
    MissingFileError; InputError, with file, line and field, for malformed input.
    """
    file = TraceFile.of(path)
    paths = sorted(_files(file.path)) if file.is_directory else [file]
    if not paths:
        raise InputError("has no .json file", path=file.path, hint="Give the directory that holds the traces.")
    plays = list(_plays(map(TraceFile.of, paths)))  # each file is released before the next one is read
    if not plays:
        raise InputError("has no requests", path=file.path)
    has_session_times = _has_session_times(play for _, play, _ in plays)
    requests: list[TraceRequest] = []
    place_of_session: dict[str, _Place] = {}
    left_out: Counter[str] = Counter()
    for place, play, ids in plays:
        first, block_size = plays[0][0], plays[0][1].block_size
        if play.block_size != block_size:
            raise place.error(
                f"is {play.block_size}, and {block_size} in {first.name}",
                "block_size",
                hint="Replay sessions of one block size at a time.",
            )
        session = _Session(place, block_size, ids, has_session_times=has_session_times)
        for session_id in session.read(play, requests):
            if session_id in place_of_session:
                raise place.error(
                    f"{session_id!r} is in {place_of_session[session_id].name} as well",
                    "id",
                    hint="Keep one of them, or give each session its own id.",
                )
            place_of_session[session_id] = place
        left_out["sub-agents without requests"] += session.num_empty
    requests.sort(key=lambda request: request.arrival_ns)
    requests = with_output(requests, left_out)
    if not requests:
        raise nothing_left(file, +left_out)
    return Trace(requests, unit_tokens=plays[0][1].block_size, name=file.name, left_out=+left_out)


class _Place(msgspec.Struct, frozen=True):
    """Location of a session: a file, and the line if the file has one session per line."""

    path: Path
    line: int | None
    name: str

    def error(self, what: str, field: str, *, hint: str) -> InputError:
        return InputError(what, path=self.path, line=self.line, field=field, hint=hint)


def _plays(files: Iterable[TraceFile]) -> Iterator[tuple[_Place, _AnyPlay, list[_Ids]]]:
    """Yield the sessions of `files`, and the ids of all their turns, in the order of the file."""
    short, raw = msgspec.json.Decoder(_Play[int]), msgspec.json.Decoder(_Play[msgspec.Raw])
    numbers = count(1)
    for file in files:
        for line, data in file.records():
            place = _Place(
                file.path,
                line if file.is_json_lines else None,
                f"{file.path.name}:{line}" if line > 1 else file.path.name,
            )
            found = _cut(data, short)
            if found is None:
                whole = _decoded(file, place.line, data, raw)
                found = whole, [bytes(turn.hash_ids)[:-1] for turn in _turns_of(whole)]
            play, texts = found
            number = next(numbers)
            try:
                ids = _ids_of(play, texts, number << ID_BITS if play.hash_id_scope == "local" else 0)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                _decoded(file, place.line, data, raw)
                # As a part of the whole, the value that is wrong is named with its place.
                _decoded(file, place.line, data, msgspec.json.Decoder(_Play[list[HashId]]))
                raise
            yield place, play, ids


def _cut(data: bytes, decoder: msgspec.json.Decoder[_Play[int]]) -> tuple[_AnyPlay, list[bytes]] | None:
    """Return a session without its lists of ids, and their texts, each up to its last bracket.

    Texts of ids are nearly all of a session, and a search for their ends is much faster than to decode them. None for a
    session that is not written as they usually are, or is malformed: its lists are where JSON says.
    """
    parts: list[bytes] = []
    texts: list[bytes] = []
    end = 0
    while (begin := data.find(IDS, end)) >= 0:
        begin += len(IDS)
        parts.append(data[end:begin])
        parts.append(b"%d" % len(texts))
        begin += data.startswith(b" ", begin)
        close = data.find(CLOSE, begin)
        if close < 0 or not data.startswith(OPEN, begin):
            return None
        texts.append(data[begin:close])
        end = close + 1
    parts.append(data[end:])
    try:
        play = decoder.decode(b"".join(parts))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    # A list elsewhere, or twice in a turn, was not one of its ids.
    is_as_usual = [turn.hash_ids for turn in _turns_of(play)] == list(range(len(texts)))
    return (play, texts) if is_as_usual else None


def _turns_of(play: _Play[IdsT]) -> list[_Turn[IdsT]]:
    """Return all turns, those of sub-agents included, in the order of the file."""
    turns: list[_Turn[IdsT]] = []
    for entry in play.requests:
        if isinstance(entry, _SubAgent):
            turns.extend(entry.requests)
        else:
            turns.append(entry)
    return turns


def _ids_of(play: _AnyPlay, texts: Sequence[bytes], first_id: int) -> list[_Ids]:
    """Return `first_id` plus the ids of all turns. What begins the turn before is not decoded again.

    Raise msgspec.DecodeError for other values than lists of ids.
    """
    left = iter(texts)
    found: list[_Ids] = []
    own = _Chain(first_id)
    for entry in play.requests:
        if isinstance(entry, _SubAgent):
            of_agent = _Chain(first_id)
            found.extend(of_agent.next(next(left)) for _ in entry.requests)
        else:
            found.append(own.next(next(left)))
    return found


class _Chain:
    """The ids of turns one after the other, from their texts without the last brackets. `first_id` is added to each."""

    def __init__(self, first_id: int) -> None:
        self._first_id = first_id.to_bytes(UNIT_BYTES, byteorder)
        self._decoder = msgspec.json.Decoder(list[HashId])
        self._before = NO_TEXT
        self._num_before = 0

    def next(self, text: bytes) -> _Ids:
        """Return the ids of the next turn. Raise msgspec.DecodeError for other values than a list of ids."""
        num_kept, end = self._kept(text)
        new: list[int] = []
        if end < len(text):
            new = self._decoder.decode(b"[%b]" % text[end + 1 :] if num_kept else text + CLOSE)
            if not new and num_kept:
                self._decoder.decode(text + CLOSE)  # raises: nothing is after the comma
        self._num_before = num_kept + len(new)
        self._before = text if self._num_before else NO_TEXT
        return _Ids(num_kept, self._packed(new))

    def _kept(self, text: bytes) -> tuple[int, int]:
        """Return how many ids `text` has from the turn before, and where their text ends."""
        before, end = self._before, len(self._before)
        if text.startswith(before) and text[end : end + 1] in {b"", b","}:
            return self._num_before, end
        same = 0
        while same < end and text.startswith(before[same : same + AT_ONCE], same):
            same += AT_ONCE
        end = text.rfind(b",", 0, min(same, end))
        return (before.count(b",", 0, end) + 1, end) if end > 0 else (0, 0)

    def _packed(self, ids: list[int]) -> bytes:
        if not any(self._first_id):
            return pack_units(ids)
        packed = bytearray(pack_units(ids))
        for place in HIGH_BYTES:
            packed[place::UNIT_BYTES] = self._first_id[place : place + 1] * len(ids)
        return bytes(packed)


def _has_session_times(plays: Iterable[_AnyPlay]) -> bool:
    """Return whether sub-agents' times count from the start of their session; one answer for the whole input."""
    is_later = False
    for play in plays:
        before_s = 0.0
        for entry in play.requests:
            if not isinstance(entry, _SubAgent):
                before_s = entry.t
            elif entry.requests:
                if entry.requests[0].t < before_s:
                    return False
                is_later |= entry.requests[0].t > 0
    return is_later


def _files(directory: Path) -> list[Path]:
    with reading(directory):
        return [file for file in directory.iterdir() if file.name.endswith(SUFFIXES)]


def _decoded(file: TraceFile, line: int | None, data: bytes, decoder: msgspec.json.Decoder[PlayT]) -> PlayT:
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
    """Converts one JSON object to requests. `ids`: of its turns. `num_empty`: number of sub-agents without requests."""

    def __init__(self, place: _Place, block_size: int, ids: Sequence[_Ids], *, has_session_times: bool) -> None:
        self._place = place
        self._block_size = block_size
        self._ids = ids
        self._has_session_times = has_session_times
        self.num_empty = 0

    def read(self, play: _AnyPlay, requests: list[TraceRequest]) -> list[str]:
        """Append all requests of `play`; return its session ids: the main session's, and one per sub-agent."""
        own: _Turns = []
        session_ids = [play.id]
        agents: list[tuple[str, _SubAgent[Any], _Turns]] = []
        ids = iter(self._ids)
        for index, entry in enumerate(play.requests):
            field = f"requests[{index}]"
            if isinstance(entry, _SubAgent):
                turns = [(f"{field}.requests[{place}]", turn, next(ids)) for place, turn in enumerate(entry.requests)]
                agents.append((field, entry, turns))
            else:
                own.append((field, entry, next(ids)))
        if not own:
            raise self._place.error("has no request", "requests", hint="Leave such a session out.")
        first_row = len(requests)
        main = self._append(requests, play.id, own, begin_ns=_ns(own[0][1].t))
        children = []
        for field, agent, turns in agents:
            session_ids.append(f"{play.id}/{agent.agent_id}")
            if turns:
                begin_ns = self._begin_ns(field, agent)
                children.append(self._append(requests, session_ids[-1], turns, begin_ns=begin_ns))
            else:
                self.num_empty += 1
        if children:
            self._link(requests, first_row, linked(main, children))
        return session_ids

    def _begin_ns(self, field: str, agent: _SubAgent[Any]) -> int:
        if self._has_session_times:
            return _ns(agent.requests[0].t)
        begin_ns = _ns(agent.t) - (agent.duration_ms or 0) * NS_PER_MS
        if begin_ns < 0:
            raise self._place.error(
                f"is {agent.duration_ms}, and it was done {agent.t} s after the session began",
                f"{field}.duration_ms",
                hint="A sub-agent's t is when it was done.",
            )
        return begin_ns

    @staticmethod
    def _link(requests: list[TraceRequest], first_row: int, after: dict[int, tuple[After, ...]]) -> None:
        """Set the dependencies of requests that do not simply wait for the previous turn."""
        for row in range(first_row, len(requests)):
            request, waits = requests[row], after.get(row, ())
            is_next_turn = row > first_row and requests[row - 1].session_id == request.session_id
            if waits and not (is_next_turn and len(waits) == 1):
                requests[row] = msgspec.structs.replace(request, after=waits, delay_ns=0)

    def _append(
        self, requests: list[TraceRequest], session_id: str, turns: _Turns, *, begin_ns: int
    ) -> list[RecordedTimes]:
        """Append a session that begins at `begin_ns`; return its recorded times."""
        before: _AnyTurn | None = None
        units = b""
        recorded = []
        for field, turn, ids in turns:
            delay_ns = None
            if before is not None:
                if turn.t < before.t:
                    raise self._place.error(
                        f"is {turn.t}, before the request before it ({before.t})",
                        f"{field}.t",
                        hint="Requests stand in the order in which they were sent.",
                    )
                delay_ns = _delay_ns(before, turn)
            row = len(requests)
            units = self._units(row, field, turn.num_input, memoryview(units)[: ids.num_kept * UNIT_BYTES], ids.new)
            start_ns = begin_ns + _ns(turn.t) - _ns(turns[0][1].t)
            requests.append(
                TraceRequest(
                    row,
                    start_ns,
                    units,
                    turn.num_input,
                    turn.num_output,
                    session_id=session_id,
                    delay_ns=delay_ns,
                    hints=RUNS_TOOL if turn.stop == TOOL_USE else None,
                )
            )
            end_ns = None if turn.api_time is None else start_ns + _ns(turn.api_time)
            recorded.append(RecordedTimes(row, start_ns, end_ns, delay_ns))
            before = turn
        return recorded

    def _units(self, row: int, field: str, num_tokens: int, kept: memoryview, new: bytes) -> bytes:
        """Return the ids of the whole blocks, first those `kept`, and a unique id for the tokens after them."""
        num_whole, num_rest = divmod(num_tokens, self._block_size)
        num_ids = (len(kept) + len(new)) // UNIT_BYTES
        if num_ids != num_whole:
            raise self._place.error(
                f"{num_ids} ids, and {num_tokens} tokens have {num_whole} whole blocks of {self._block_size}",
                f"{field}.hash_ids",
                hint="There is one id for each whole block of the prompt.",
            )
        return b"".join((kept, new, pack_units([NO_ID + row]) if num_rest else b""))


def _delay_ns(before: _AnyTurn, turn: _AnyTurn) -> int:
    """Return the client's delay between the end of `before` and the sending of `turn`.

    If `before` has a recorded end, this is `think_time`. Otherwise `think_time` counts from the last known end, that of
    an earlier turn, so the time since `before` was sent is used instead. It is too long by the duration of `before`.
    """
    if before.api_time is None:
        return _ns(turn.t) - _ns(before.t)
    if turn.think_time is not None:
        return _ns(turn.think_time)
    return max(0, _ns(turn.t) - _ns(before.t) - _ns(before.api_time))


def _ns(seconds: float) -> int:
    return to_ns(seconds, NS_PER_S)

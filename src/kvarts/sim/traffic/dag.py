"""Reader for AIPerf's `dag_jsonl`: conversations that branch, one per line, authored as messages.

A line has `session_id` and `turns`; a turn has `messages`, `max_tokens`, and a `delay` in ms. Each turn's prompt is the
conversation so far with its answers, then its messages, unless `context_mode` is `message_array_with_responses`, where
a turn's messages are all there is. When a turn is done, its `forks` begin with all that was sent and answered, and its
`spawns` with nothing. A fork ends its parent unless it is in the `background`; the turn `join_at`, or else the next
one, waits for all that was spawned. `pre_session_spawns` begin with the first turn. Conversations that no other one
names begin at once.

Tokens are counted as words and punctuation, and compared by their hashes: enough to tell which prompts share what.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvarts.base.errors import InputError, parts_of
from kvarts.base.units import to_ns
from kvarts.core.content import UNIT_BYTES
from kvarts.sim.traffic.bounds import Count, SpanMs, Tokens
from kvarts.sim.traffic.trace import Trace
from kvarts.sim.traffic.trace_file import TraceFile, no_output_length, nothing_left
from kvarts.sim.traffic.trace_request import NS_PER_MS, After, TraceRequest

__all__ = ["load_dag"]

MOST_ANSWER, MOST_TOKENS = 1 << 20, 1 << 26
FIRST_ANSWER = 1 << 63
"""First id of tokens of answers; those of prompts are hashes below."""
WORD = re.compile(r"\w+|[^\w\s]")
ALONE = "message_array_with_responses"
NOTES = (
    "tokens are words and punctuation: lengths differ from those of a tokenizer, and which prompts share what does not",
    "the file has no times: conversations begin at once, and turns when those before are done",
)


class _Fork(msgspec.Struct, forbid_unknown_fields=True):
    child: str
    background: bool = False


class _Spawn(msgspec.Struct, forbid_unknown_fields=True):
    children: list[str]
    join_at: Count | None = None


class _Turn(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[dict[str, Any]]
    model: str | None = None
    max_tokens: Tokens | None = None
    tools: list[dict[str, Any]] | None = None
    extra: dict[str, Any] | None = None
    forks: list[str | _Fork] = []
    spawns: list[str | _Spawn] = []
    delay: SpanMs = 0.0


class _Conversation(msgspec.Struct, forbid_unknown_fields=True):
    session_id: str
    turns: list[_Turn]
    context_mode: str | None = None
    pre_session_spawns: list[str] = []

    def children(self) -> Iterator[str]:
        """Iterate over the names of the conversations that this one begins."""
        yield from self.pre_session_spawns
        for turn in self.turns:
            yield from (fork if isinstance(fork, str) else fork.child for fork in turn.forks)
            for spawn in turn.spawns:
                yield from [spawn] if isinstance(spawn, str) else spawn.children


def load_dag(path: Path | str | TraceFile, *, output_tokens: int | None = None) -> Trace:
    """Read a whole file. Raise MissingFileError; InputError, with line and field, for malformed input.

    `output_tokens`: length of answers of turns without `max_tokens`.
    """
    file = TraceFile.of(path)
    known: dict[str, _Conversation] = {}
    lines: dict[str, int] = {}
    decoder = msgspec.json.Decoder(_Conversation)
    for line, data in file.records():
        try:
            conversation = decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            what, field = parts_of(error)
            hint = (
                None
                if b'"orchestrator"' not in data
                else "Conversations of an orchestrator are not read: leave them out."
            )
            raise InputError(what, path=file.path, line=line, field=field, hint=hint) from error
        except RecursionError:
            raise InputError("is nested too deeply", path=file.path, line=line) from None
        lines[conversation.session_id] = line
        if known.setdefault(conversation.session_id, conversation) is not conversation:
            raise InputError("is that of another conversation", path=file.path, line=line, field="session_id")
    named = {child for conversation in known.values() for child in conversation.children()}
    plan = _Plan(known, lines, file, output_tokens)
    try:
        for name, conversation in known.items():
            if name not in named:
                plan.begin(conversation, (), b"", ())
    except RecursionError:
        raise InputError("is nested too deeply", path=file.path, field="turns") from None
    if known and not plan.requests:
        raise InputError("has no conversation that no other one begins", path=file.path, field="turns")
    if not known:
        raise nothing_left(file)
    return Trace(plan.requests, unit_tokens=1, has_output_tokens=True, name=file.name, warnings=NOTES)


class _Plan:
    """The requests of all conversations, each as often as it is begun."""

    def __init__(
        self, known: dict[str, _Conversation], lines: dict[str, int], file: TraceFile, output_tokens: int | None
    ) -> None:
        self.requests: list[TraceRequest] = []
        self._known, self._lines, self._file, self._output_tokens = known, lines, file, output_tokens
        self._num_tokens = 0
        self._num_begun: dict[str, int] = {}

    def begin(
        self, conversation: _Conversation, after: tuple[After, ...], history: bytes, above: tuple[str, ...]
    ) -> int:
        """Add the requests of a conversation and of those that it begins; return the row of its last one.

        `history`: tokens that it begins with. `above`: names of the conversations that led to it.
        """
        name = conversation.session_id
        if name in above:
            raise self._error(conversation, "turns", "is begun by a conversation that it begins")
        if not conversation.turns:
            raise self._error(conversation, "turns", "is empty")
        number = self._num_begun[name] = self._num_begun.get(name, 0) + 1
        session = name if number == 1 else f"{name}#{number}"
        joins: dict[int, list[int]] = {}
        row, path = -1, (*above, name)
        for place, turn in enumerate(conversation.turns):
            if place:
                after = tuple(After(each) for each in (row, *joins.pop(place, ())))
            row, history = self._add(conversation, place, session, after, history)
            if not place:
                for child in conversation.pre_session_spawns:
                    self.begin(self._child(conversation, child), (After(row, of_arrival=True),), b"", path)
            is_over = False
            for fork in turn.forks:
                entry = _Fork(fork) if isinstance(fork, str) else fork
                self.begin(self._child(conversation, entry.child), (After(row),), history, path)
                is_over |= not entry.background
            for spawn in turn.spawns:
                entries = _Spawn([spawn]) if isinstance(spawn, str) else spawn
                lasts = [
                    self.begin(self._child(conversation, child), (After(row),), b"", path) for child in entries.children
                ]
                joins.setdefault(place + 1 if entries.join_at is None else entries.join_at, []).extend(lasts)
            if is_over:
                break
        return row

    def _add(
        self, conversation: _Conversation, place: int, session: str, after: tuple[After, ...], history: bytes
    ) -> tuple[int, bytes]:
        """Add the request of a turn; return its row, and all that is then known of the conversation."""
        turn, row = conversation.turns[place], len(self.requests)
        if conversation.context_mode == ALONE:
            history = b""
        prompt = history + b"".join(_spelled(msgspec.json.encode(each, order="sorted")) for each in turn.tools or ())
        prompt += b"".join(_words(message) for message in turn.messages)
        num_output = turn.max_tokens or self._output_tokens
        if num_output is None:
            if all(each.max_tokens is None for one in self._known.values() for each in one.turns):
                raise no_output_length(self._file)
            raise self._error(conversation, f"turns[{place}].max_tokens", "is missing")
        num_prompt = len(prompt) // UNIT_BYTES
        self._num_tokens += num_prompt + num_output
        if not num_prompt or num_output > MOST_ANSWER or self._num_tokens > MOST_TOKENS:
            raise self._error(
                conversation,
                f"turns[{place}]",
                f"has no text, or an answer of more than {MOST_ANSWER:,} tokens, or makes the prompts of the file "
                f"longer than {MOST_TOKENS:,} tokens in all",
            )
        first = FIRST_ANSWER + (row << 31)
        answer = np.arange(first, first + num_output, dtype=np.uint64).tobytes()
        delay_ns = to_ns(turn.delay, NS_PER_MS)
        self.requests.append(
            TraceRequest(
                row,
                0 if after else delay_ns,
                prompt,
                num_prompt,
                num_output,
                output_units=(range(first, first + num_output),),
                session_id=session,
                delay_ns=0 if after else None,
                after=tuple(msgspec.structs.replace(each, delay_ns=delay_ns) for each in after),
            )
        )
        return row, prompt + answer

    def _child(self, conversation: _Conversation, name: str) -> _Conversation:
        child = self._known.get(name)
        if child is None:
            raise self._error(conversation, "turns", f"begins {name[:40]!r}, and no line has this session_id")
        return child

    def _error(self, conversation: _Conversation, field: str, what: str) -> InputError:
        return InputError(what, path=self._file.path, line=self._lines[conversation.session_id], field=field)


@lru_cache(1 << 12)
def _spelled(text: bytes) -> bytes:
    """Return the hash of each word of a text, 8 bytes each."""
    words = WORD.findall(text.decode("utf-8", "replace"))
    hashes = [int.from_bytes(blake2b(word.encode(), digest_size=UNIT_BYTES).digest(), "little") >> 1 for word in words]
    return np.array(hashes, np.uint64).tobytes()


def _words(message: dict[str, Any]) -> bytes:
    """Return the tokens of a message: its role, its text or its parts, and what it calls."""
    content = message.get("content")
    rest = {name: each for name, each in message.items() if name not in ("role", "content")}
    text = content.encode() if isinstance(content, str) else msgspec.json.encode(content or "", order="sorted")
    more = _spelled(msgspec.json.encode(rest, order="sorted")) if rest else b""
    return _spelled(f"<{message.get('role', '')}>".encode()) + _spelled(text) + more

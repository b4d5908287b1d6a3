"""Reader for files of messages: request bodies, request logs, batches and conversations become requests with prefixes.

What a row is, `kvarts.sim.traffic.chats` says; how its prompt is made, `kvarts.sim.traffic.prompts`. Of texts, only ids
of blocks of 16 tokens are kept.

A request whose messages begin with all messages of an earlier one and an answer is the next turn of that session,
whatever their system messages are; the answer is then known too, if the log does not have it. A request without an
output length has that answer's, else the median of the others'. Rows without times all arrive at 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import blake2b
from heapq import merge
from itertools import chain
from operator import itemgetter
from statistics import median_low
from typing import Any

import msgspec

from kvarts.base.decoders import decode_json
from kvarts.base.errors import InputError, parts_of
from kvarts.base.files import reading
from kvarts.sim.traffic.chats import chats_of
from kvarts.sim.traffic.graph import NO_OUTPUT
from kvarts.sim.traffic.implied import with_implied_answers
from kvarts.sim.traffic.prompts import BLOCK_TOKENS, Chat, Prompts, reasoning_of
from kvarts.sim.traffic.trace import Trace, TraceRequest
from kvarts.sim.traffic.trace_file import SKIP_HINT, TraceFile, by_arrival, nothing_left

__all__ = ["Watch", "chats_in", "load_messages"]

ANSWERS = frozenset({"custom_id", "response"})
MOST_OPEN = 64
"""Files that are read side by side."""
SUFFIXES = (".json", ".jsonl", ".ndjson", ".gz")
Watch = Callable[[Chat, bytes, int], None]
"""Receives each request as it is read, the ids of its prompt, and the row whose next turn it is, -1 for none."""
encode = msgspec.json.encode


def load_messages(
    file: TraceFile,
    *more: TraceFile,
    tokenizer: str = "words",
    chat_template: str | None = None,
    trace_block_size: int | None = None,
    skip_bad_lines: bool = False,
    output_tokens: int | None = None,
    prompts: Prompts | None = None,
    watch: Watch | None = None,
) -> Trace:
    """Read files or directories. `prompts`: in place of a tokenizer and a template.

    `output_tokens`: of requests whose output length is not known.

    Raise MissingFileError; InputError, with line and field; ConfigError for a tokenizer or template.
    """
    if prompts is None:
        prompts = Prompts(tokenizer, chat_template, block_tokens=trace_block_size or BLOCK_TOKENS)
    rows = _Rows(prompts, watch)
    left_out: Counter[str] = Counter()
    num_skipped = 0
    for chat in chain.from_iterable(map(chats_in, (file, *more))):
        if isinstance(chat, str):
            left_out[chat] += 1
            continue
        try:
            if isinstance(chat, InputError):
                raise chat
            rows.add(chat)
        except InputError as error:
            if not skip_bad_lines:
                raise _placed(error, chat, file) from error
            num_skipped += 1
    if not rows.requests:
        raise nothing_left(file, left_out, num_skipped)
    requests = rows.finished(file, output_tokens, left_out)
    if not requests:
        raise nothing_left(file, left_out, num_skipped)
    trace = Trace(
        by_arrival(requests, file),
        unit_tokens=prompts.block_tokens,
        name=file.name,
        num_skipped_lines=num_skipped,
        left_out=left_out,
        warnings=[*rows.notes(), f"prefixes are by blocks of {prompts.block_tokens} tokens: {prompts.described}"],
    )
    return with_implied_answers(trace) if any(request.answered_units is None for request in requests) else trace


def _placed(error: InputError, chat: Chat | InputError, file: TraceFile) -> InputError:
    path, line = (error.path, error.line) if isinstance(chat, InputError) else (chat.file, chat.line)
    return InputError(error.what, path=path or file.path, line=line, field=error.field, hint=error.hint or SKIP_HINT)


def chats_in(file: TraceFile) -> Iterator[Chat | str | InputError]:
    """Yield the requests of a file or directory, reasons for rows that are none, and errors, with their places."""
    files = [file]
    if file.is_directory:
        with reading(file.path):
            paths = sorted(path for path in file.path.rglob("*") if path.name.endswith(SUFFIXES) and path.is_file())
        files = [file.beside(path) for path in paths]
    outputs = [each for each in files if any(fields >= ANSWERS for fields in each.first_fields)]
    answers: dict[str, Any] = {}
    for each in outputs if len(files) > 1 else ():
        for line, answer in _rows_in(each):
            if isinstance(answer, dict):
                answers[str(answer.get("custom_id"))] = answer.get("response") or {"error": True}
            elif isinstance(answer, InputError):
                yield answer
            else:
                yield InputError("is not an object", path=each.path, line=line)
    if outputs and len(files) == 1:
        raise InputError(
            "has the answers of a batch, not its prompts",
            path=files[0].path,
            hint="Give a directory with this file and the batch's input file.",
        )
    rows = [_timed(_chats_of_file(each, answers)) for each in files if each not in outputs]
    # In the order of time, as far as each file is: workers of a server write a file each.
    merged = merge(*rows, key=itemgetter(0)) if len(rows) <= MOST_OPEN else chain.from_iterable(rows)
    for _, chat in merged:
        yield chat


def _timed(chats: Iterator[Chat | str | InputError]) -> Iterator[tuple[int, Chat | str | InputError]]:
    """Yield each with the latest time so far."""
    latest_ns = 0
    for chat in chats:
        if isinstance(chat, Chat) and chat.time_ns is not None:
            latest_ns = max(latest_ns, chat.time_ns)
        yield latest_ns, chat


def _chats_of_file(file: TraceFile, answers: dict[str, Any]) -> Iterator[Chat | str | InputError]:
    for line, row in _rows_in(file):
        if isinstance(row, InputError):
            yield row
            continue
        try:
            yield from chats_of(row, file.place, line, answers)
        except InputError as error:
            yield InputError(error.what, path=file.path, line=line, field=error.field, hint=error.hint)
        except RecursionError:
            yield InputError("is nested too deeply", path=file.path, line=line)


def _rows_in(file: TraceFile) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file with their lines; errors stand for malformed ones."""
    decoder = msgspec.json.Decoder()
    for line, data in file.lines():
        try:
            yield line, decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            yield line, _as_written(data) or InputError(parts_of(error)[0], path=file.path, line=line)
        except RecursionError:
            yield line, InputError("is nested too deeply", path=file.path, line=line)


def _as_written(data: bytes) -> Any:
    """Return a row that is JSON as programs write it, such as with a text that was cut; None if it is not JSON."""
    with suppress(ValueError, RecursionError):
        return decode_json(data)
    return None


class _Rows:
    """The requests read so far. Owner of which turn follows which, by the messages that they begin with."""

    def __init__(self, prompts: Prompts, watch: Watch | None) -> None:
        self.requests: list[TraceRequest] = []
        self._prompts = prompts
        self._watch = watch
        self._rows: dict[bytes, int] = {}
        """By the hash of all messages of a request: its row."""
        self._sessions: dict[int, int] = {}
        """By row: the row of the first turn of its session, for sessions that the log does not name."""
        self._followed: set[int] = set()
        self._timeless: list[tuple[str, int]] = []
        self._is_timed = False
        self._recorded = [0, 0]
        self._num_guessed = self._guess = 0
        self._models: set[str | None] = set()

    def add(self, chat: Chat) -> None:
        """Add a request. Raise InputError if the template does not take it."""
        row = len(self.requests)
        ids = self._prompts.ids_of(chat)
        if not ids.num_tokens:
            raise InputError("has an empty prompt", field="prompt" if chat.prompt is not None else "messages")
        before = self._turn_before(chat, row)
        answered, num_output = None, chat.num_output_tokens
        if chat.answer is not None and num_output != 0:
            whole = None
            if not isinstance(chat.prompt, list):
                whole = self._prompts.ids(self._prompts.answered(chat, chat.answer), chat.model)
            num_said = self._count(chat.answer) if whole is None else whole.num_tokens - ids.num_tokens
            if whole is not None and num_said > 0:
                answered, num_output = whole.units, num_said
            elif num_output is None:
                num_output = num_said
        if chat.num_prompt_tokens is not None:
            self._recorded[0] += chat.num_prompt_tokens
            self._recorded[1] += ids.num_tokens
        self._models.add(chat.model)
        if chat.time_ns is None:
            self._timeless.append((chat.file, chat.line))
        self._is_timed = self._is_timed or chat.time_ns is not None
        self.requests.append(
            TraceRequest(
                row,
                chat.time_ns or 0,
                ids.units,
                ids.num_tokens,
                -1 if num_output is None else num_output,
                session_id=chat.session,
                request_id=chat.request_id,
                tenant=chat.salt,
                answered_units=answered,
            )
        )
        if self._watch is not None:
            self._watch(chat, ids.units, before)

    def finished(self, file: TraceFile, output_tokens: int | None, left_out: Counter[str]) -> list[TraceRequest]:
        """Return the requests with sessions and output lengths. Raise InputError if lengths or times are missing."""
        if self._is_timed and self._timeless:
            path, line = self._timeless[0]
            raise InputError("has no time, and other rows have one", path=path, line=line, hint=SKIP_HINT)
        known = [request.num_output_tokens for request in self.requests if request.num_output_tokens > 0]
        unknown = sum(request.num_output_tokens < 0 for request in self.requests)
        if unknown and output_tokens is None and not known:
            raise InputError(
                "has no answers and no usage: in no row is the output length known",
                path=file.path,
                hint="Give --set output_tokens=N, for how many tokens each answer counts.",
            )
        if unknown and output_tokens is None:
            self._num_guessed, output_tokens = unknown, median_low(known)
        self._guess = output_tokens or 0
        found, requests = [], self.requests
        self.requests = []  # one copy at a time
        for request in requests:
            if not request.num_output_tokens:
                left_out[NO_OUTPUT] += 1
                continue
            num_output = request.num_output_tokens if request.num_output_tokens > 0 else self._guess
            session = request.session_id
            if session is None and request.row in self._sessions:
                session = f"turns of row {self._sessions[request.row] + 1}"
            found.append(msgspec.structs.replace(request, num_output_tokens=num_output, session_id=session))
        return found

    def notes(self) -> list[str]:
        """Return what a report says of how the rows were read."""
        notes = []
        if not self._is_timed:
            notes.append("no row has a time: all requests arrive at 0, turns after one another; give --concurrency N")
        if self._num_guessed:
            notes.append(
                f"{self._num_guessed:,} requests have no answer and no usage: each counts as {self._guess} output "
                f"tokens, the median of the others"
            )
        if len(self._models) > 1:
            notes.append(f"rows ask for {len(self._models)} models, and prompts to different models share nothing")
        recorded, counted = self._recorded
        if counted and abs(recorded / counted - 1) > 0.02:
            notes.append(
                f"usage records {recorded:,} prompt tokens where {counted:,} were counted ({recorded / counted:.2f} "
                f"times): give the tokenizer and the chat template of the model for its lengths"
            )
        return notes

    def _count(self, answer: dict[str, Any]) -> int:
        return self._prompts.count(f"{reasoning_of(answer)}{answer['content']}")

    def _turn_before(self, chat: Chat, row: int) -> int:
        """Return the row whose next turn `chat` is, -1 for none, and record its session and its answer's length."""
        if chat.prompt is not None:
            return -1
        digest = blake2b(encode((chat.model, chat.salt)), digest_size=16).digest()
        digests = []
        for message in chat.messages:
            if message["role"] != "system":  # which often has the time
                said = (message["role"], message["content"], message.get("tool_calls"))
                digest = blake2b(digest + encode(said), digest_size=16).digest()
            digests.append(digest)
        before, answer = -1, {}
        for place in range(len(digests) - 2, -1, -1):
            found = self._rows.get(digests[place], -1)
            if found >= 0 and chat.messages[place + 1]["role"] == "assistant":
                before, answer = found, chat.messages[place + 1]
                break
        self._rows[digests[-1]] = row
        if before < 0:
            return -1
        request = self.requests[before]
        if request.num_output_tokens < 0:
            num_output = self._count(answer) or -1
            self.requests[before] = msgspec.structs.replace(request, num_output_tokens=num_output)
        if chat.session is None and request.session_id is None and before not in self._followed:
            self._followed.add(before)
            first = self._sessions.setdefault(before, before)
            self._sessions[row] = first
        return before

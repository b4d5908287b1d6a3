"""Answers of a mock that are known beforehand, and records of a live engine.

The engine generates the tokens of a scripted answer one by one, like words: the answer takes the time of its tokens, is
cut by `max_tokens`, and its KV is a cache hit of the next turn. Answers of a real server are requested once, kept in a
file by a digest of the request, and played back.

Recorded arrivals are a trace that `kvarts replay` reads. Their times are those of the engine, whose clock does not
move between two steps. A replay of the record therefore places every request before the same step.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

import msgspec

from kvarts.decoders import decoder_of
from kvarts.errors import ConfigError, InputError, OutputError, parts_of
from kvarts.files import append_whole, check_writable, read_bytes, write_whole, writing
from kvarts.limits import MOST_COUNT, brief, check_whole
from kvarts.openai_api.errors import ApiError
from kvarts.openai_api.failures import MAX_STALL_S, NO_FAILURE, Failure, parse_failure
from kvarts.openai_api.prompts import CLOSE, OPEN, Thinking
from kvarts.openai_api.shapes import TextSegment
from kvarts.openai_api.tool_calls import call_text
from kvarts.request import Request
from kvarts.sampling import SamplingParams
from kvarts.traffic.logs import RecordedRow

if TYPE_CHECKING:
    from kvarts.openai_api.prompts import TextModel

__all__ = [
    "CHAT_PATH",
    "COMPLETION_PATH",
    "ArrivalRecorder",
    "RealServer",
    "RecordedAnswer",
    "RecordedAnswers",
    "ScriptedAnswer",
    "ScriptedCall",
    "ScriptedUsage",
    "Sent",
    "Unrecorded",
    "open_recordings",
]

encode = msgspec.json.encode


class ArrivalRecorder:
    """Records requests, in the engine's thread. Owner of the rows, in arrival order.

    A row's `ended` is the state of its request when the rows are made. A request that was ended from outside is
    replayed with the tokens that it had received.
    """

    def __init__(self) -> None:
        self._arrived: list[tuple[Request, SamplingParams]] = []

    def arrived(self, request: Request, params: SamplingParams) -> None:
        """Record a request that was queued."""
        self._arrived.append((request, params))

    def rejected(self, request: Request, params: SamplingParams) -> None:
        """Record a request that could never run."""
        self._arrived.append((request, params))

    def rows(self) -> list[RecordedRow]:
        """Return the arrivals so far, with the generated tokens."""
        return [_row(request) for request, _ in self._arrived]

    @property
    def began_ns(self) -> int | None:
        """When the first request arrived."""
        return min((request.arrival_ns for request, _ in self._arrived), default=None)

    def write(self, path: Path, *, began_ns: int | None = None) -> None:
        """Write the rows to a file, one per line. Raise OutputError.

        `began_ns`: start of the run, if other models of the same run are recorded as well.
        """
        encoder = msgspec.json.Encoder()
        rows = self.rows()
        if began_ns is not None:
            rows = [msgspec.structs.replace(row, began_ns=began_ns) for row in rows]
        write_whole(path, b"".join(encoder.encode(row) + b"\n" for row in rows))


def _row(request: Request) -> RecordedRow:
    content, num_prompt = request.content, request.num_prompt_tokens
    was_rejected = request.state.name == "REJECTED"
    num_output = request.max_tokens if was_rejected else request.num_output_tokens
    known = content.num_known_tokens
    return RecordedRow(
        arrival_ns=request.arrival_ns,
        prompt=content.tokens(0, num_prompt).tolist(),
        num_output_tokens=num_output,
        output=content.tokens(num_prompt, min(known, num_prompt + num_output)).tolist(),
        max_tokens=request.max_tokens,
        priority=request.priority,
        tenant=content.salt,
        hints=msgspec.UNSET if content.hints is None else content.hints,
        request_id=request.request_id,
        ended=request.state.name.lower(),
    )


MOST_BYTES = 64 * 1024 * 1024
"""Size limit of a file of recorded answers, which is kept in memory."""
MOST_ANSWER_BYTES = 8 * 1024 * 1024
MOST_AT_ONCE = 32
"""Requests to the real server at a time."""
MOST_WAITING = 1024
"""Requests that wait for an answer of the real server, those at a time included."""
TIMEOUT_S = 600.0
SEEN_CHARS = 200

LEFT_OUT = frozenset(
    (
        "cache_control", "cache_salt", "echo", "kv_hints", "kv_transfer_params", "kvarts_answer", "kvarts_hints",
        "metadata", "nvext", "priority", "prompt_cache_key", "request_id", "return_token_ids", "safety_identifier",
        "session_id", "store", "stream", "stream_options", "user",
    )
)  # fmt: skip
"""Fields that leave the text of an answer as it is, or that the mock itself carries out."""
LOGPROBS = ("logprobs", "top_logprobs", "prompt_logprobs")

_URL = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")
COMPLETION_PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"


class ScriptedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call. `arguments`: an object, or text, which need not be valid JSON."""

    name: str
    arguments: dict[str, Any] | str = msgspec.field(default_factory=dict)

    @property
    def written(self) -> str:
        """The arguments as text."""
        return self.arguments if isinstance(self.arguments, str) else encode(self.arguments).decode()


class ScriptedUsage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Token counts that replace the real ones in `usage`. Raises ConfigError for a count below 0."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if (count := getattr(self, name)) is not None:
                check_whole(count, f"usage.{name}", least=0)


class ScriptedAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An answer. `text`: a text, or a value to encode as JSON. `finish_reason`: used unless `max_tokens` cuts it.

    `latency_s`: delay before the first byte. `fail`: a failure, in the syntax of failure scripts.
    Raises ConfigError for a value out of range.
    """

    text: str | dict[str, Any] | list[Any] = ""
    calls: tuple[ScriptedCall, ...] = ()
    reasoning: str = ""
    refusal: str = ""
    usage: ScriptedUsage = ScriptedUsage()
    finish_reason: str = ""
    latency_s: float = 0.0
    fail: str = ""

    is_as_long_as_asked: ClassVar[bool] = False
    """Whether `max_tokens` leave the answer whole."""

    def __post_init__(self) -> None:
        if self.refusal and (self.text or self.calls):
            raise ConfigError("is instead of a text and calls", field="refusal")
        if not 0.0 <= self.latency_s <= MAX_STALL_S:
            raise ConfigError(f"must be from 0 to {MAX_STALL_S:g}, got {self.latency_s}", field="latency_s")
        if self.fail and parse_failure(self.fail).stall_s and self.latency_s:
            raise ConfigError("is a second delay beside that of fail", field="latency_s", hint="Give one of them.")

    @property
    def failure(self) -> Failure:
        """The failure to apply, with `latency_s` as a stall."""
        failure = parse_failure(self.fail) if self.fail else NO_FAILURE
        return msgspec.structs.replace(failure, stall_s=self.latency_s) if self.latency_s else failure

    def segments(self) -> tuple[TextSegment, ...]:
        """Return the text to generate, in the format of Qwen models, as segments."""
        parts: list[TextSegment] = []
        if self.reasoning:
            parts += [
                TextSegment("unseen", OPEN),
                TextSegment("reasoning", self.reasoning),
                TextSegment("unseen", CLOSE),
            ]
        text = self.text if isinstance(self.text, str) else encode(self.text).decode()
        if text or self.refusal:
            parts.append(TextSegment("refusal" if self.refusal else "content", self.refusal or text))
        for index, call in enumerate(self.calls):
            before, after = call_text(call.name, is_first=not (index or text))
            parts += [
                TextSegment("unseen", before),
                TextSegment("arguments", call.written, call.name),
                TextSegment("unseen", after),
            ]
        return tuple(parts)

    def limited(self, thinking: Thinking, text: TextModel) -> ScriptedAnswer:
        """Return the answer with the reasoning that `thinking` allows."""
        if not self.reasoning or (thinking.budget is None and not thinking.is_off):
            return self
        kept = ""
        if not thinking.is_off:
            assert thinking.budget is not None
            tokens = text.encode(self.reasoning, add_special_tokens=False, most=thinking.budget)
            if len(tokens) <= thinking.budget:
                return self
            kept = text.decode(tokens[: thinking.budget])
        return msgspec.structs.replace(self, reasoning=kept)


class Unrecorded(Exception):  # noqa: N818  # not an error: its answer is recorded, and the request read again
    """A request without a recorded answer. `record`: asks the real server; raises ApiError."""

    def __init__(self, record: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self.record = record


class RecordedAnswer(ScriptedAnswer, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One choice of a recorded answer. The digest includes `max_tokens`, so the text is as long as they allow."""

    is_as_long_as_asked: ClassVar[bool] = True


class Sent(msgspec.Struct, frozen=True):
    """A request for the real server. `path`: CHAT_PATH or COMPLETION_PATH. `given`: the fields of its client."""

    path: str
    given: Mapping[str, Any]
    num_choices: int

    @property
    def body(self) -> dict[str, Any]:
        """The fields to send. Raise ApiError if the answer cannot be recorded."""
        for name in LOGPROBS:
            if self.given.get(name) not in (None, False):
                raise ApiError(400, "is not part of recorded answers: omit it", param=name)
        prompt = self.given.get("prompt")
        if isinstance(prompt, list) and not all(type(token) is int for token in prompt):
            raise ApiError(400, "recorded answers are of one prompt per request", param="prompt")
        return {name: value for name, value in self.given.items() if value is not None and name not in LEFT_OUT}

    @property
    def digest(self) -> str:
        """The digest of the request. Ids of tool calls differ in each run, so they count by their order."""
        body = self.body
        if isinstance(messages := body.get("messages"), list):
            body["messages"] = _with_numbers(messages)
        return sha256(encode([self.path, body], order="deterministic")).hexdigest()

    @property
    def last_text(self) -> str:
        """The beginning of the last message or the prompt, for readers of the file."""
        # A completion may have messages too, which are ignored and can be anything.
        last = self.given["messages"][-1].get("content") if self.path == CHAT_PATH else self.given.get("prompt")
        return (last if isinstance(last, str) else encode(last).decode())[:SEEN_CHARS]


def _with_numbers(messages: Sequence[Any]) -> list[Any]:
    """Return messages with the ids of tool calls replaced by their numbers."""
    numbers: dict[str, int] = {}

    def number(call_id: Any) -> int:
        return numbers.setdefault(str(call_id), len(numbers))

    told: list[Any] = []
    for message in messages:
        changes: dict[str, Any] = {}
        if isinstance(message, dict):
            if isinstance(calls := message.get("tool_calls"), list):
                changes["tool_calls"] = [
                    {**call, "id": number(call.get("id"))} if isinstance(call, dict) else call for call in calls
                ]
            if "tool_call_id" in message:
                changes["tool_call_id"] = number(message["tool_call_id"])
        told.append({**message, **changes} if changes else message)
    return told


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the file. `asked`: the beginning of the last message, for its readers."""

    digest: str
    asked: str
    choices: tuple[RecordedAnswer, ...]


class RecordedAnswers:
    """Recorded answers. Owner of their file, a JSON object per line.

    `server`: answers requests without a record; None: they are refused. Raises MissingFileError, InputError and
    OutputError for the file.
    """

    def __init__(self, path: Path, server: RealServer | None = None) -> None:
        self._path = path
        self._server = server
        self._choices: dict[str, tuple[RecordedAnswer, ...]] = {}
        self._num_bytes = 0
        self._num_waiting = 0
        self._places = asyncio.Semaphore(MOST_AT_ONCE)
        if server is not None:
            check_writable(path)
        if server is None or path.exists():
            self._load()

    def _load(self) -> None:
        hint = "Record the answers again with --record-from URL, into a new file."
        payload = read_bytes(self._path, hint="Record it first, with --record-from URL.")
        if len(payload) > MOST_BYTES:
            raise InputError(f"has more than {MOST_BYTES:,} bytes", path=self._path, hint=hint)
        self._num_bytes = len(payload)
        for number, line in enumerate(payload.splitlines(), 1):
            try:
                record = msgspec.json.decode(line, type=_Record)
            except ConfigError as error:
                raise InputError(error.what, path=self._path, line=number, field=error.field, hint=hint) from error
            except msgspec.ValidationError as error:
                what, field = parts_of(error)
                raise InputError(what, path=self._path, line=number, field=field, hint=hint) from error
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise InputError(f"is not JSON: {error}", path=self._path, line=number, hint=hint) from error
            self._choices[record.digest] = record.choices
        if payload and not payload.endswith(b"\n") and self._server is not None:
            raise InputError("does not end", path=self._path, line=number, hint=hint)

    def find(self, path: str, given: Mapping[str, Any], num_choices: int) -> tuple[RecordedAnswer, ...]:
        """Return the recorded choices of the request `given`. Raise Unrecorded if the real server is to be asked, else
        ApiError.
        """
        sent = Sent(path, given, num_choices)
        choices = self._choices.get(digest := sent.digest)
        if choices is not None:
            return choices
        if self._server is not None:
            raise Unrecorded(partial(self.record, sent))
        raise ApiError(
            404,
            f"{self._path.name} has no answer to this request (digest {digest[:12]}): record it with --record-from "
            "URL, or write a rule for --answers",
        )

    async def record(self, sent: Sent) -> None:
        """Ask the real server, and record its answer. Raise its error, or ApiError if there is no room."""
        assert self._server is not None
        if self._num_waiting >= MOST_WAITING:
            raise ApiError(429, "too many requests wait for the real server", retry_after_s=1.0)
        self._num_waiting += 1
        try:
            async with self._places:
                choices = await self._server.ask(sent)
        finally:
            self._num_waiting -= 1
        digest = sent.digest
        if digest in self._choices:
            return  # of the same request at the same time: the first answer counts
        line = encode(_Record(digest, sent.last_text, choices)) + b"\n"
        if self._num_bytes + len(line) > MOST_BYTES:
            raise ApiError(503, f"{self._path.name} is full: recorded answers have {MOST_BYTES:,} bytes at most")
        try:
            with writing(self._path), self._path.open("ab", buffering=0) as file:
                append_whole(file, line)
        except OutputError as error:
            raise ApiError(500, f"the answer could not be recorded: {error.what}") from error
        self._num_bytes += len(line)
        self._choices[digest] = choices


def open_recordings(path: str | Path | None, url: str | None) -> RecordedAnswers | None:
    """Return the recorded answers in `path`, extended from the server at `url` with the key $KVARTS_RECORD_KEY.

    Raise ConfigError, or the errors of RecordedAnswers.
    """
    if path is None:
        if url is not None:
            raise ConfigError("needs a file for the answers", field="record_from", hint="Give --recordings FILE.")
        return None
    server = None if url is None else RealServer(url, os.environ.get("KVARTS_RECORD_KEY"))
    return RecordedAnswers(Path(path), server)


# The real server --------------------------------------------------------------------------------------------


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class _Call(msgspec.Struct):
    function: _Function


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    message: _Message | None = None
    text: str = ""
    index: int = 0
    finish_reason: str | None = None
    stop_reason: Any = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class _ErrorReply(msgspec.Struct):
    error: dict[str, Any] = {}


class RealServer:
    """A server of OpenAI's API. `url`: with or without `/v1`. `key`: its API key. Raises ConfigError."""

    def __init__(self, url: str, key: str | None = None) -> None:
        try:
            is_url = _URL.fullmatch(url) is not None and urlsplit(url).port != 0
        except ValueError:
            is_url = False
        if not is_url:
            raise ConfigError(f"is not a URL of HTTP: {brief(url)}", field="record_from", hint="Give http://HOST:PORT.")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ConfigError("has characters that a header cannot have", field="KVARTS_RECORD_KEY")
        self._url = urlsplit(url.rstrip("/").removesuffix("/v1"))
        self._key = key

    async def ask(self, sent: Sent) -> tuple[RecordedAnswer, ...]:
        """Return the choices of the answer to a request. Raise ApiError: the server's, or 502 without one."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status, retry_after, payload = await self._post(sent.path, encode(sent.body))
        except (OSError, EOFError, ValueError) as error:
            what = "it did not answer in time" if isinstance(error, TimeoutError) else f"{error}"
            raise ApiError(502, f"the real server at {self._url.netloc} cannot be asked: {what}") from error
        if status != 200:
            raise ApiError(
                status if 400 <= status < 600 else 502,
                f"the real server answered {status}: {_message(payload)}",
                retry_after_s=float(retry_after) if retry_after.isdecimal() else None,
            )
        try:
            reply = decoder_of(_Reply).decode(payload)
            choices = sorted(reply.choices, key=lambda choice: choice.index)
            answers = [_answer(choice, sent.body) for choice in choices]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ConfigError) as error:
            raise ApiError(502, f"the answer of the real server cannot be recorded: {error}") from error
        if len(answers) != sent.num_choices:
            raise ApiError(502, f"the real server answered {len(answers)} choices in place of {sent.num_choices}")
        if reply.usage is not None:
            answers[0] = msgspec.structs.replace(answers[0], usage=_usage(reply.usage))
        return tuple(answers)

    async def _post(self, path: str, body: bytes) -> tuple[int, str, bytes]:
        """Return the status, the Retry-After header and the body of an answer."""
        import httptools

        url, answer = self._url, _Answer()
        is_encrypted = url.scheme == "https"
        port = url.port or (443 if is_encrypted else 80)
        reader, writer = await asyncio.open_connection(url.hostname, port, ssl=is_encrypted or None)
        try:
            head = [f"POST {url.path}{path} HTTP/1.1", f"host: {url.netloc}", "content-type: application/json",
                    f"content-length: {len(body)}", "connection: close"]  # fmt: skip
            if self._key is not None:
                head.append(f"authorization: Bearer {self._key}")
            writer.write("\r\n".join((*head, "", "")).encode() + body)
            await writer.drain()
            parser = httptools.HttpResponseParser(answer)
            while not answer.is_whole:
                data = await reader.read(1 << 16)
                if not data:
                    if not answer.ends_with_connection:
                        raise EOFError("it closed the connection")
                    break
                try:
                    parser.feed_data(data)
                except httptools.HttpParserError as error:
                    raise ValueError(f"its answer is not HTTP: {error}") from error
                if answer.num_bytes > MOST_ANSWER_BYTES:
                    raise ValueError(f"its answer has more than {MOST_ANSWER_BYTES:,} bytes")
            return parser.get_status_code(), answer.headers.get("retry-after", ""), b"".join(answer.parts)
        finally:
            writer.close()


class _Answer:
    """Receives the events of the parser."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.parts: list[bytes] = []
        self.num_bytes = 0
        self.is_whole = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)
        self.num_bytes += len(body)

    def on_message_complete(self) -> None:
        self.is_whole = True

    @property
    def ends_with_connection(self) -> bool:
        """Whether the length of the body is that of the connection."""
        return bool(self.parts) and self.headers.keys().isdisjoint(("content-length", "transfer-encoding"))


def _message(payload: bytes) -> str:
    """Return the message in the body of an error."""
    try:
        told = decoder_of(_ErrorReply).decode(payload).error.get("message")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        told = None
    return str(told or payload[:SEEN_CHARS].decode(errors="replace"))[: 5 * SEEN_CHARS]


def _answer(choice: _Choice, body: Mapping[str, Any]) -> RecordedAnswer:
    message = choice.message or _Message(content=choice.text)
    text = message.content or ""
    calls = tuple(ScriptedCall(call.function.name, call.function.arguments) for call in message.tool_calls or ())
    if isinstance(choice.stop_reason, str) and not body.get("include_stop_str_in_output"):
        text += choice.stop_reason  # the mock stops there as well, and tells the reason
    reason = choice.finish_reason or ""
    return RecordedAnswer(
        text="" if message.refusal else text,
        calls=() if message.refusal else calls,
        reasoning=message.reasoning_content or message.reasoning or "",
        refusal=message.refusal or "",
        finish_reason="" if reason == "stop" or (calls and reason == "tool_calls") else reason,
    )


def _usage(usage: _Usage) -> ScriptedUsage:
    of_prompt, of_answer = usage.prompt_tokens_details or _Details(), usage.completion_tokens_details or _Details()
    counts = (usage.prompt_tokens, usage.completion_tokens, of_prompt.cached_tokens, of_answer.reasoning_tokens)
    return ScriptedUsage(*(count if count is None or 0 <= count <= MOST_COUNT else None for count in counts))

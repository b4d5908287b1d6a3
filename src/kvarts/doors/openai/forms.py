"""Wire formats of answers: chunks of a stream, made by joining texts, and whole answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from time import time
from typing import Any

import msgspec

from kvarts.core.sampling import Logprobs
from kvarts.doors.openai.answer import Choice, TokenLogprob
from kvarts.doors.openai.errors import ApiError
from kvarts.doors.openai.http import new_id
from kvarts.doors.openai.prompts import TextModel
from kvarts.doors.openai.shapes import CallPart, Part, Plain, Reader, Shape, read_whole
from kvarts.run.text import Completion, TextOffsets

__all__ = ["CALL", "Blocks", "ChatForm", "CompletionForm", "Echo", "Form", "Whole", "WholeForm", "event", "usage_of"]

encode = msgspec.json.encode
MOST_TEXTS = 256
DONE = b"data: [DONE]\n\n"


class Whole:
    """A complete choice: its text, tokens, log-probabilities and finish reason."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: Logprobs | None = None
        self.completion: Completion | None = None
        self.finish_reason = ""

    def add(self, text: str) -> None:
        """Add text. Pieces are joined now and then, because a short string takes ten times the memory of its text."""
        self.texts.append(text)
        if len(self.texts) > MOST_TEXTS:
            self.texts = ["".join(self.texts)]

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(self.texts)

    @property
    def num_bytes(self) -> int:
        """Approximate bytes on the wire."""
        if not self.logprobs and self.prompt_logprobs is None:
            return sum(map(len, self.texts))
        num_values = sum(1 + len(top) for _, _, top in self.logprobs)
        if self.prompt_logprobs is not None:
            num_values += sum(1 + len(top) for top in self.prompt_logprobs.top)
        return sum(map(len, self.texts)) + 64 * num_values


class WholeForm(ABC):
    """The format of the answers of a dialect without streams."""

    num_bytes: int = 0
    """Approximate bytes of a whole answer besides those of its choices."""

    @abstractmethod
    def whole(self, choices: Sequence[Whole], usage: Mapping[str, Any], extra: Mapping[str, Any]) -> bytes:
        """Return the body of an answer that is not streamed."""


class Form(WholeForm):
    """The format of the answers of a dialect."""

    tells_ids: bool = False
    """Whether the answer contains the ids of its tokens."""

    @abstractmethod
    def first(self, number: int, prompt_logprobs: Logprobs | None) -> bytes:
        """Return the chunk before the first text of a choice, or nothing."""

    @abstractmethod
    def piece(
        self,
        number: int,
        text: str,
        finish_reason: str | None,
        logprobs: Sequence[TokenLogprob],
        usage: Mapping[str, Any] | None,
        more: bytes = b"",
    ) -> bytes:
        """Return the chunk of a piece of a choice. `more`: further members, each after a comma."""

    @abstractmethod
    def end(self, usage: Mapping[str, Any], choices: Sequence[Choice], *, tells_usage: bool) -> bytes:
        """Return the bytes after the last choice. `tells_usage`: whether the client asked for the usage."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """Return the end of an answer that fails after its beginning."""


class Chunks(Form):
    """The common part of streams of completions and chat completions. `facts`: members of each chunk."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._chunk_facts = facts
        self._head = b""
        """The beginning of each chunk of a stream, once it has begun."""

    def _begin(self) -> None:
        """Begin a stream, before its first chunk."""
        if not self._head:
            self._head = b"data: " + encode(self._chunk_facts)[:-1] + b',"choices":[{"index":'

    def end(self, usage: Mapping[str, Any], choices: Sequence[Choice], *, tells_usage: bool) -> bytes:
        """Return the usage chunk without choices, if requested, and the end."""
        last = encode({**self._chunk_facts, "choices": [], "usage": usage}) if tells_usage else None
        return DONE if last is None else b"data: %b\n\n%b" % (last, DONE)

    def failed(self, error: ApiError) -> bytes:
        """Return the error, and the end."""
        return b"data: %b\n\n%b" % (encode({"error": error.content}), DONE)


def event(kind: str, payload: Mapping[str, Any]) -> bytes:
    """Return an event of a stream that names its kind."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode(payload))


class Blocks(Form):
    """The common part of answers that are a list of blocks, each of one kind, which events open, extend and close.

    A block is a part of the body; `shape`: the conversion of its only choice to a message.
    """

    def __init__(self, answer_id: str, shape: Shape | None) -> None:
        self.answer_id = answer_id
        self._reader = (Plain() if shape is None else shape)(0)
        self._reason = "stop"
        self._blocks: list[dict[str, Any]] = []
        self._kind = ""
        """Of the last block; that of a call is `CALL`."""
        self._texts: list[str] = []
        """Of the last block, until it is closed."""

    def piece(
        self,
        number: int,
        text: str,
        finish_reason: str | None,
        logprobs: Sequence[TokenLogprob],
        usage: Mapping[str, Any] | None,
        more: bytes = b"",
    ) -> bytes:
        """Return the events of a piece of text."""
        if finish_reason is not None:
            self._reason = finish_reason
        return b"".join(self._take(self._reader.add(text)))

    def _take(self, part: Part) -> list[bytes]:
        """Add a part to the blocks. Return its events."""
        events: list[bytes] = []
        for kind, text in self._texts_of(part):
            if text:
                if kind != self._kind:
                    events += [*self._close(), *self._open(kind, None)]
                events.append(self._extend(text))
        for call in part.calls:
            if call.call_id:
                events += [*self._close(), *self._open(CALL, call)]
            events.append(self._extend(call.arguments))
        return events

    @abstractmethod
    def _texts_of(self, part: Part) -> Sequence[tuple[str, str]]:
        """Return the texts of a part, each with its kind."""

    @abstractmethod
    def _open(self, kind: str, call: CallPart | None) -> list[bytes]:
        """Add a block. Return its events."""

    @abstractmethod
    def _extend(self, text: str) -> bytes:
        """Add text to the last block. Return its event."""

    @abstractmethod
    def _close(self) -> list[bytes]:
        """Complete the last block, if there is one. Return its events."""


CALL = "call"


def usage_of(num_prompt_tokens: int, num_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Return the usage of an answer."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "completion_tokens": num_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class Echo(msgspec.Struct, frozen=True):
    """A prompt that is echoed."""

    text: str
    tokens: Sequence[int]


class CompletionForm(Chunks):
    """/v1/completions. `echoes`: the prompt before each choice, if prompts are echoed.

    `prompts`: the tokens of each choice's prompt, if the answer contains their log-probabilities. `has_logprobs`: the
    log-probabilities of an echo precede those of the text. `ids_of`: the tokens of each choice's prompt, if the answer
    contains the ids of prompt and text. `skips_special_tokens`: omit the text of special tokens.
    """

    def __init__(
        self,
        model: str,
        text: TextModel,
        echoes: Sequence[Echo] = (),
        *,
        prompts: Sequence[Sequence[int]] = (),
        has_logprobs: bool = False,
        ids_of: Sequence[Sequence[int]] = (),
        skips_special_tokens: bool = True,
    ) -> None:
        self.tells_ids = bool(ids_of)
        self.answer_id = f"cmpl-{new_id()}"
        self._text = text
        self._echoes = echoes
        self._prompts = prompts
        self._has_logprobs = has_logprobs
        self._ids_of = ids_of
        self._skips_special_tokens = skips_special_tokens
        self._facts = {"id": self.answer_id, "object": "text_completion", "created": int(time()), "model": model}
        super().__init__(self._facts)
        self._places: dict[int, TextOffsets] = {}
        """Positions in the text, by choice."""
        self._told_prompts: set[int] = set()
        """Choices of a stream whose prompt ids were sent."""

    def first(self, number: int, prompt_logprobs: Logprobs | None) -> bytes:
        """Return a chunk with the prompt, if it is echoed."""
        self._begin()
        if not self._echoes:
            return b""
        told = self._echoed(number, prompt_logprobs)
        return self._piece(number, self._echoes[number].text, None, encode(told), None)

    def piece(
        self,
        number: int,
        text: str,
        finish_reason: str | None,
        logprobs: Sequence[TokenLogprob],
        usage: Mapping[str, Any] | None,
        more: bytes = b"",
    ) -> bytes:
        """Return the chunk of a piece. The first one of a choice contains the ids of its prompt, if requested."""
        if self._ids_of and number not in self._told_prompts:
            self._told_prompts.add(number)
            more += b',"prompt_token_ids":' + encode(list(self._ids_of[number]))
        if finish_reason is None and usage is None and not logprobs and not more:  # the most frequent case
            return b'%b%d,"text":%b,"logprobs":null,"finish_reason":null}]}\n\n' % (self._head, number, encode(text))
        told = encode(self._logprobs(number, logprobs)) if logprobs else b"null"
        return self._piece(number, text, finish_reason, told, usage, more)

    def _piece(
        self,
        number: int,
        text: str,
        finish_reason: str | None,
        logprobs: bytes,
        usage: Mapping[str, Any] | None,
        more: bytes = b"",
    ) -> bytes:
        reason = b"null" if finish_reason is None else encode(finish_reason)
        tail = b"}]}\n\n" if usage is None else b'}],"usage":' + encode(usage) + b"}\n\n"
        return b'%b%d,"text":%b,"logprobs":%b,"finish_reason":%b%b%b' % (
            self._head, number, encode(text), logprobs, reason, more, tail
        )  # fmt: skip

    def whole(self, choices: Sequence[Whole], usage: Mapping[str, Any], extra: Mapping[str, Any]) -> bytes:
        """Return the body."""
        told = []
        for number, choice in enumerate(choices):
            before = self._echoed(number, choice.prompt_logprobs) if self._echoes else None
            after = self._logprobs(number, choice.logprobs) if choice.logprobs else None
            both = [part for part in (before, after) if part is not None]
            merged = {name: [each for part in both for each in part[name]] for name in both[0]} if both else None
            one = {
                "index": number,
                "text": (self._echoes[number].text if self._echoes else "") + choice.text,
                "logprobs": merged,
                "finish_reason": choice.finish_reason,
                "stop_reason": None if choice.completion is None else choice.completion.stop_reason,
            }
            if self._ids_of and choice.completion is not None:
                one["token_ids"] = choice.completion.tokens
                one["prompt_token_ids"] = list(self._ids_of[number])
            if self._prompts and choice.prompt_logprobs is not None:
                one["prompt_logprobs"] = _prompt_entries(self._text, self._prompts[number], choice.prompt_logprobs)
            told.append(one)
        return encode({**self._facts, "choices": told, "usage": usage, **extra})

    def _echoed(self, number: int, logprobs: Logprobs | None) -> dict[str, Any] | None:
        """Return the log-probabilities of an echoed prompt."""
        if logprobs is None or not self._has_logprobs:
            return None
        echo, text = self._echoes[number], self._text
        for skips in (True, False):  # a prompt given as ids is echoed with its special tokens
            places = text.offsets(start=0, skip_special_tokens=skips)
            offsets = places.add(echo.tokens)
            if places.end == len(echo.text):
                break
        told = zip(echo.tokens, logprobs.values, logprobs.top, strict=True)
        return self._entries(list(told), [min(offset, len(echo.text)) for offset in offsets])

    def _logprobs(self, number: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        places = self._places.get(number)
        if places is None:
            start = len(self._echoes[number].text) if self._echoes else 0
            places = self._text.offsets(start=start, skip_special_tokens=self._skips_special_tokens)
            self._places[number] = places
        return self._entries(logprobs, places.add(token for token, _, _ in logprobs))

    def _entries(self, logprobs: Sequence[TokenLogprob], offsets: Sequence[int]) -> dict[str, Any]:
        return {
            "tokens": [_token_text(self._text, token) for token, _, _ in logprobs],
            "token_logprobs": [logprob for _, logprob, _ in logprobs],
            "top_logprobs": [
                None
                if logprob is None
                else {_token_text(self._text, other): value for other, value in (top or ((token, logprob),))}
                for token, logprob, top in logprobs
            ],
            "text_offset": list(offsets),
        }


class ChatForm(Chunks):
    """/v1/chat/completions. `shape`: the conversion of each choice; None: its text is the content.

    `prompt`: its tokens, if the answer contains their log-probabilities. `ids_of`: its tokens, if the answer contains
    the ids of prompt and text.
    """

    def __init__(
        self,
        model: str,
        text: TextModel,
        *,
        shape: Shape | None = None,
        prompt: Sequence[int] = (),
        ids_of: Sequence[int] = (),
    ) -> None:
        self.tells_ids = bool(ids_of)
        self._prompt = prompt
        self._ids_of = ids_of
        self.answer_id = f"chatcmpl-{new_id()}"
        self._text = text
        self._shape = shape
        self._facts = {"id": self.answer_id, "created": int(time()), "model": model}
        chunk = {**self._facts, "object": "chat.completion.chunk"}
        super().__init__(chunk)
        self._readers: dict[int, Reader] = {}
        """Readers by choice, with a shape."""
        self._held: dict[int, list[TokenLogprob]] = {}
        """Log-probabilities of tokens that were not sent yet, by choice, with a shape."""

    def first(self, number: int, prompt_logprobs: Logprobs | None) -> bytes:
        """Return the chunk with the role, and with the ids of the prompt if requested."""
        self._begin()
        ids = b',"prompt_token_ids":' + encode(list(self._ids_of)) if self._ids_of else b""
        return b'%b%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]%b}\n\n' % (
            self._head, number, ids
        )  # fmt: skip

    def piece(
        self,
        number: int,
        text: str,
        finish_reason: str | None,
        logprobs: Sequence[TokenLogprob],
        usage: Mapping[str, Any] | None,
        more: bytes = b"",
    ) -> bytes:
        """Return the chunk of a piece; empty if the piece does not complete anything yet."""
        if self._shape is None:
            if finish_reason is None and usage is None and not logprobs and not more:  # the most frequent case
                return b'%b%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}]}\n\n' % (
                    self._head, number, encode(text)
                )  # fmt: skip
            delta = b'{"content":' + encode(text) + b"}"
        else:
            change, reason_now = self._shaped(self._shape, number, text, is_last=finish_reason is not None)
            if not change and finish_reason is None and not more:
                if logprobs:
                    self._held.setdefault(number, []).extend(logprobs)
                return b""
            logprobs = [*self._held.pop(number, ()), *logprobs]
            delta = encode(change)
            finish_reason = reason_now or finish_reason
        reason = b"null" if finish_reason is None else encode(finish_reason)
        told = encode({"content": self._logprobs(logprobs)}) if logprobs else b"null"
        tail = b"}]}\n\n" if usage is None else b'}],"usage":' + encode(usage) + b"}\n\n"
        return b'%b%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b%b' % (
            self._head, number, delta, told, reason, more, tail
        )  # fmt: skip

    def _shaped(self, shape: Shape, number: int, text: str, *, is_last: bool) -> tuple[dict[str, Any], str | None]:
        """Return the change of the message by a piece, and the finish reason if the shape changes it."""
        reader = self._readers.get(number)
        if reader is None:
            reader = self._readers[number] = shape(number)
        part, reason = reader.add(text), None
        change = _delta(part)
        if is_last:
            rest, reason = reader.end()
            for name, value in _delta(rest).items():
                change[name] = change[name] + value if name in change else value
        return change, reason

    def whole(self, choices: Sequence[Whole], usage: Mapping[str, Any], extra: Mapping[str, Any]) -> bytes:
        """Return the body."""
        told = []
        for number, choice in enumerate(choices):
            message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None, "tool_calls": []}
            reason = choice.finish_reason
            if self._shape is not None:
                made = read_whole(self._shape, number, choice.text)
                message |= {
                    "content": made.content or (None if made.calls or made.refusal else ""),
                    "refusal": made.refusal or None,
                    "tool_calls": [_call(call) for call in made.calls],
                }
                if made.reasoning:
                    message |= {"reasoning": made.reasoning, "reasoning_content": made.reasoning}
                reason = made.reason or reason
            one = {
                "index": number,
                "message": message,
                "logprobs": {"content": self._logprobs(choice.logprobs)} if choice.logprobs else None,
                "finish_reason": reason,
                "stop_reason": None if choice.completion is None else choice.completion.stop_reason,
            }
            if self._ids_of and choice.completion is not None:
                one["token_ids"] = choice.completion.tokens
            told.append(one)
        if self._ids_of:
            extra = {**extra, "prompt_token_ids": list(self._ids_of)}
        body = {**self._facts, "object": "chat.completion", "choices": told, "usage": usage, **extra}
        if self._prompt and choices[0].prompt_logprobs is not None:
            body["prompt_logprobs"] = _prompt_entries(self._text, self._prompt, choices[0].prompt_logprobs)
        return encode(body)

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return [
            {
                **self._token(token, logprob),
                "top_logprobs": [self._token(other, value) for other, value in top],
            }
            for token, logprob, top in logprobs
        ]

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        own = self._text.bytes_of(token)
        return {"token": own.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(own)}


def _delta(part: Part) -> dict[str, Any]:
    """Return the delta of a stream for a part of a message."""
    delta: dict[str, Any] = {"content": part.content} if part.content else {}
    if part.reasoning:
        delta |= {"reasoning": part.reasoning, "reasoning_content": part.reasoning}
    if part.refusal:
        delta["refusal"] = part.refusal
    if part.calls:
        delta["tool_calls"] = [
            {"index": call.index, **(_call(call) if call.call_id else {"function": {"arguments": call.arguments}})}
            for call in part.calls
        ]
    return delta


def _call(call: CallPart) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _token_text(text: TextModel, token: int) -> str:
    """Return the text of one token; for a part of a character its bytes, in the notation of OpenAI's API."""
    own = text.bytes_of(token)
    try:
        return own.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


def _prompt_entries(text: TextModel, tokens: Sequence[int], logprobs: Logprobs) -> list[dict[str, Any] | None]:
    """Return the log-probabilities of a prompt in vLLM's format: per position by token id; None at the first."""
    told: list[dict[str, Any] | None] = []
    for token, value, top, rank in zip(tokens, logprobs.values, logprobs.top, logprobs.ranks, strict=True):
        if value is None:
            told.append(None)
            continue
        ranked = {token: (value, rank)} | {other: (one, place) for place, (other, one) in enumerate(top, 1)}
        told.append(
            {
                str(other): {"logprob": one, "rank": place, "decoded_token": _token_text(text, other)}
                for other, (one, place) in ranked.items()
            }
        )
    return told

"""What answers look like on the wire: chunks of a stream, made by putting texts together, and whole answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import time
from typing import Any, Protocol
from uuid import uuid4

import msgspec

from kvarts.openai_api.answer import Choice, TokenLogprob
from kvarts.openai_api.prompts import TextModel

__all__ = ["ChatForm", "CompletionForm", "Form", "Whole", "usage_of"]

encode = msgspec.json.encode


class Whole:
    """A choice that is complete: its text, tokens and log-probabilities, and why it ended."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason = ""

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(self.texts)


class Form(Protocol):
    """The form of one endpoint's answers."""

    @property
    def answer_id(self) -> str:
        """The id of the answer."""

    def first(self, number: int) -> bytes:
        """Return the chunk before the first text of a choice, or nothing."""

    def piece(
        self,
        number: int,
        text: str,
        finish_reason: str | None,
        logprobs: Sequence[TokenLogprob],
        usage: Mapping[str, Any] | None,
    ) -> bytes:
        """Return the chunk of a piece of a choice."""

    def last(self, usage: Mapping[str, Any]) -> bytes:
        """Return the chunk that has the usage and no choice."""

    def whole(self, choices: Sequence[Whole], usage: Mapping[str, Any], extra: Mapping[str, Any]) -> bytes:
        """Return the body of an answer that is not streamed."""


def usage_of(num_prompt_tokens: int, num_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Return the usage of an answer."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "completion_tokens": num_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class CompletionForm:
    """/v1/completions. `echoes`: the text before each choice, where prompts are echoed."""

    def __init__(self, model: str, text: TextModel, echoes: Sequence[str] = ()) -> None:
        self.answer_id = f"cmpl-{uuid4().hex}"
        self._text = text
        self._echoes = echoes
        self._facts = {"id": self.answer_id, "object": "text_completion", "created": int(time()), "model": model}
        self._head = b"data: " + encode(self._facts)[:-1] + b',"choices":[{"index":'
        self._offsets: dict[int, int] = {}

    def first(self, number: int) -> bytes:
        """Return a chunk with the prompt, if that is echoed."""
        if not self._echoes:
            return b""
        return self.piece(number, self._echoes[number], None, (), None)

    def piece(
        self,
        number: int,
        text: str,
        finish_reason: str | None,
        logprobs: Sequence[TokenLogprob],
        usage: Mapping[str, Any] | None,
    ) -> bytes:
        """Return the chunk of a piece."""
        reason = b"null" if finish_reason is None else encode(finish_reason)
        told = encode(self._logprobs(number, logprobs)) if logprobs else b"null"
        tail = b"}]}\n\n" if usage is None else b'}],"usage":' + encode(usage) + b"}\n\n"
        return b'%b%d,"text":%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._head, number, encode(text), told, reason, tail
        )  # fmt: skip

    def last(self, usage: Mapping[str, Any]) -> bytes:
        """Return the chunk with the usage."""
        return b"data: " + encode({**self._facts, "choices": [], "usage": usage}) + b"\n\n"

    def whole(self, choices: Sequence[Whole], usage: Mapping[str, Any], extra: Mapping[str, Any]) -> bytes:
        """Return the body."""
        told = [
            {
                "index": number,
                "text": (self._echoes[number] if self._echoes else "") + choice.text,
                "logprobs": self._logprobs(number, choice.logprobs) if choice.logprobs else None,
                "finish_reason": choice.finish_reason,
                "stop_reason": None,
            }
            for number, choice in enumerate(choices)
        ]
        return encode({**self._facts, "choices": told, "usage": usage, **extra})

    def _logprobs(self, number: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        tokens = [self._text.decode([token]) for token, _, _ in logprobs]
        offset = self._offsets.get(number, 0)
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[number] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [logprob for _, logprob, _ in logprobs],
            "top_logprobs": [
                {self._text.decode([other]): value for other, value in (top or ((token, logprob),))}
                for token, logprob, top in logprobs
            ],
            "text_offset": offsets,
        }


class ChatForm:
    """/v1/chat/completions. `call`: the name of the tool that every choice calls, with its text as arguments."""

    def __init__(self, model: str, text: TextModel, *, call: ToolCall | None = None) -> None:
        self.answer_id = f"chatcmpl-{uuid4().hex}"
        self._text = text
        self._call = call
        self._facts = {"id": self.answer_id, "created": int(time()), "model": model}
        chunk = {**self._facts, "object": "chat.completion.chunk"}
        self._chunk = chunk
        self._head = b"data: " + encode(chunk)[:-1] + b',"choices":[{"index":'
        self._texts: dict[int, list[str]] = {}

    def first(self, number: int) -> bytes:
        """Return the chunk that says the role."""
        return b'%b%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n' % (
            self._head,
            number,
        )

    def piece(
        self,
        number: int,
        text: str,
        finish_reason: str | None,
        logprobs: Sequence[TokenLogprob],
        usage: Mapping[str, Any] | None,
    ) -> bytes:
        """Return the chunk of a piece. The text of a call comes at its end, all at once: before, it is no JSON."""
        if self._call is not None:
            texts = self._texts.setdefault(number, [])
            texts.append(text)
            if finish_reason is None:
                return b""
            delta = encode({"tool_calls": [{"index": 0, **self._call.made_of("".join(texts))}]})
            finish_reason = "tool_calls"
        else:
            delta = b'{"content":' + encode(text) + b"}"
        reason = b"null" if finish_reason is None else encode(finish_reason)
        told = encode({"content": self._logprobs(logprobs)}) if logprobs else b"null"
        tail = b"}]}\n\n" if usage is None else b'}],"usage":' + encode(usage) + b"}\n\n"
        return b'%b%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b' % (self._head, number, delta, told, reason, tail)

    def last(self, usage: Mapping[str, Any]) -> bytes:
        """Return the chunk with the usage."""
        return b"data: " + encode({**self._chunk, "choices": [], "usage": usage}) + b"\n\n"

    def whole(self, choices: Sequence[Whole], usage: Mapping[str, Any], extra: Mapping[str, Any]) -> bytes:
        """Return the body."""
        told = []
        for number, choice in enumerate(choices):
            message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None, "tool_calls": []}
            reason = choice.finish_reason
            if self._call is not None:
                message |= {"content": None, "tool_calls": [self._call.made_of(choice.text)]}
                reason = "tool_calls"
            told.append(
                {
                    "index": number,
                    "message": message,
                    "logprobs": {"content": self._logprobs(choice.logprobs)} if choice.logprobs else None,
                    "finish_reason": reason,
                    "stop_reason": None,
                }
            )
        return encode({**self._facts, "object": "chat.completion", "choices": told, "usage": usage, **extra})

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return [
            {
                **self._token(token, logprob),
                "top_logprobs": [self._token(other, value) for other, value in top],
            }
            for token, logprob, top in logprobs
        ]

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class ToolCall(msgspec.Struct, frozen=True):
    """A call that a mock makes: of the tool `name`, with every required parameter of `schema`."""

    name: str
    schema: dict[str, Any]

    def made_of(self, text: str) -> dict[str, Any]:
        """Return a call with `text` where a text is asked for."""
        arguments = encode(_value_of(self.schema, text.strip())).decode()
        call_id = f"chatcmpl-tool-{uuid4().hex}"
        return {"id": call_id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


def _value_of(schema: Any, text: str, depth: int = 0) -> Any:
    """Return the simplest value that a JSON schema allows, of what kinds there are."""
    if not isinstance(schema, dict) or depth > 8:
        return None
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "object":
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        names = schema.get("required")
        names = names if isinstance(names, list) else list(properties)
        return {str(name): _value_of(properties.get(name, {}), text, depth + 1) for name in names}
    if kind == "array":
        return [_value_of(schema.get("items", {}), text, depth + 1)]
    return {"integer": 0, "number": 0.0, "boolean": False, "null": None}.get(str(kind), text)


def cached_tokens(choices: Sequence[Choice]) -> int:
    """Return the prompt tokens of all choices that were found in the cache."""
    return sum(choice.cached_tokens for choice in choices)

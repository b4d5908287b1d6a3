"""/v1/messages: Anthropic's API, translated to and from chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvarts.base.limits import brief
from kvarts.core.sampling import Logprobs
from kvarts.doors.openai.answer import Choice
from kvarts.doors.openai.bodies import ChatBody, TranslatedBody
from kvarts.doors.openai.errors import ApiError
from kvarts.doors.openai.forms import CALL, Blocks, Whole, event
from kvarts.doors.openai.generation import Dialect, Exchange, Reading, asks_of
from kvarts.doors.openai.http import new_id
from kvarts.doors.openai.kv_hints import hints_of_parts, with_control
from kvarts.doors.openai.prompts import budget_of_messages
from kvarts.doors.openai.served import Models
from kvarts.doors.openai.shapes import CallPart, Part, Shape
from kvarts.run.text import Completion

__all__ = ["MESSAGES", "MessageForm", "MessagesBody", "count_tokens", "error_body"]

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
encode = msgspec.json.encode


def error_body(error: ApiError) -> bytes:
    """Return the body of an error response."""
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return encode({"type": "error", "error": {"type": kind, "message": error.message}})


class MessagesBody(TranslatedBody, kw_only=True):
    """POST /v1/messages."""

    messages: list[dict[str, Any]] | None = None
    system: str | list[Any] | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    top_k: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None

    @property
    def is_costly(self) -> bool:
        """Whether it may have a JSON schema."""
        return bool(self.tools) or self.output_config is not None

    def chat(self) -> ChatBody:
        """Convert to a chat. Raise ApiError for unsupported values."""
        form = (self.output_config or {}).get("format")
        if not isinstance(form, dict | None):
            raise ApiError(400, "is an object with a type and a schema", param="output_config.format")
        if form is not None:
            form = {"type": form.get("type"), "json_schema": {"schema": form.get("schema")}}
        choice = self.tool_choice or {}
        budget, is_off = budget_of_messages(self.thinking, self.max_tokens)
        return self.as_chat(
            thinking_budget_tokens=budget,
            chat_template_kwargs={"enable_thinking": False} if is_off else None,
            messages=self._messages(),
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            top_k=self.top_k,
            response_format=form,
            # A tool with a type is run by Anthropic's servers: here it is never called.
            tools=[_function(tool) for tool in self.tools or () if tool.get("type", "custom") == "custom"] or None,
            tool_choice=_choice(choice),
            parallel_tool_calls=not choice.get("disable_parallel_tool_use"),
        )

    def _messages(self) -> list[dict[str, Any]]:
        if not self.messages:
            raise ApiError(400, "at least one message is needed", param="messages")
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        for index, message in enumerate(self.messages):
            messages += _chat_messages(message, f"messages[{index}]")
        # Blocks of calls and their results lose what a chat has no place for, and a template would print it in a tool.
        longest = hints_of_parts(system=self.system, messages=self.messages, tools=self.tools)
        if messages:
            messages[0] = with_control(messages[0], longest)
        return messages


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if "description" in tool:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _choice(choice: dict[str, Any]) -> str | dict[str, Any] | None:
    kind = choice.get("type", "auto")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    names = {"auto": "auto", "none": "none", "any": "required"}
    if not isinstance(kind, str) or kind not in names:
        raise ApiError(400, f"must be of type auto, any, tool or none, got {brief(kind)}", param="tool_choice")
    return names[kind]


def _chat_messages(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Convert a message to those of a chat. Tool results become separate messages before the text."""
    content, role = message.get("content"), message.get("role")
    if role not in ("user", "assistant", "system"):
        raise ApiError(400, f"the role is user or assistant, got {brief(role)}", param=f"{where}.role")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    texts: list[dict[str, Any]] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            function = {"name": str(block.get("name")), "arguments": encode(block.get("input") or {}).decode()}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            result = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content") or ""}
            results.append(result)
        elif kind in ("text", "image"):
            texts.append(block)
        elif kind == "thinking":
            reasoning.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":
            raise ApiError(400, f"blocks of type {brief(kind)} are not read: give text", param=f"{where}.content")
    own: dict[str, Any] = {"role": role, "content": texts}
    if any(reasoning):
        own["reasoning_content"] = "".join(reasoning)
    if calls:
        own["tool_calls"] = calls
    return [*results, *([own] if len(own) > 2 or texts or not results else [])]


class MessageForm(Blocks):
    """A Form: /v1/messages."""

    def __init__(self, model: str, shape: Shape | None, num_prompt_tokens: int) -> None:
        super().__init__(f"msg_{new_id()}", shape)
        self._num_prompt_tokens = num_prompt_tokens
        self._body = {"id": self.answer_id, "type": "message", "role": "assistant", "model": model}

    def first(self, number: int, prompt_logprobs: Logprobs | None) -> bytes:
        """Return the first event."""
        usage = {"input_tokens": self._num_prompt_tokens, "output_tokens": 0}
        told: dict[str, Any] = {**self._body, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message=told)

    def end(self, usage: Mapping[str, Any], choices: Sequence[Choice], *, tells_usage: bool) -> bytes:
        """Return the last events."""
        events = self._finish()
        delta = self._stop(choices[0].completion)
        return b"".join([*events, _event("message_delta", delta=delta, usage=_usage(usage)), _event("message_stop")])

    def failed(self, error: ApiError) -> bytes:
        """Return an error as an event."""
        return b"event: error\ndata: %b\n\n" % error_body(error)

    def whole(self, choices: Sequence[Whole], usage: Mapping[str, Any], extra: Mapping[str, Any]) -> bytes:
        """Return the message."""
        (choice,) = choices
        self.piece(0, choice.text, choice.finish_reason, (), None)
        self._finish()
        return encode({**self._body, "content": self._blocks, **self._stop(choice.completion), "usage": _usage(usage)})

    def _stop(self, completion: Completion | None) -> dict[str, Any]:
        """Return the stop fields."""
        stop_reason = None if completion is None else completion.stop_reason
        if self._reason == "stop" and isinstance(stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
        return {"stop_reason": REASONS.get(self._reason, self._reason), "stop_sequence": None}

    def _take(self, part: Part) -> list[bytes]:
        events = super()._take(part)
        if part.refusal:
            self._reason = "content_filter"
        return events

    def _texts_of(self, part: Part) -> Sequence[tuple[str, str]]:
        return (("thinking", part.reasoning), ("text", part.content or part.refusal))

    def _open(self, kind: str, call: CallPart | None) -> list[bytes]:
        self._kind = kind
        block: dict[str, Any] = {"type": kind, kind: ""}
        if call is not None:
            block = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
        self._blocks.append(block)
        signature = {"signature": ""} if kind == "thinking" else {}
        return [_event("content_block_start", index=len(self._blocks) - 1, content_block=block | signature)]

    def _extend(self, text: str) -> bytes:
        self._texts.append(text)
        kind, field = ("input_json", "partial_json") if self._kind == CALL else (self._kind, self._kind)
        delta = {"type": f"{kind}_delta", field: text}
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> list[bytes]:
        if not self._blocks:
            return []
        block, text, events = self._blocks[-1], "".join(self._texts), []
        self._texts = []
        index = len(self._blocks) - 1
        if self._kind == CALL:
            block["input"] = _object(text)
        else:
            block[self._kind] = text
        if self._kind == "thinking":
            block["signature"] = self.answer_id
            delta = {"type": "signature_delta", "signature": self.answer_id}
            events.append(_event("content_block_delta", index=index, delta=delta))
        return [*events, _event("content_block_stop", index=index)]

    def _finish(self) -> list[bytes]:
        """Complete the message. Return the events."""
        rest, reason = self._reader.end()
        events = [*self._take(rest), *self._close()]
        self._reason = reason or self._reason
        return events


def _object(arguments: str) -> Any:
    """Decode the arguments of a call. Return {} for invalid JSON, such as arguments that were cut."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return {}


def _event(kind: str, **fields: Any) -> bytes:
    return event(kind, {"type": kind, **fields})


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
    }


def _created(body: MessagesBody, exchange: Exchange, models: Models) -> ChatBody:
    if body.max_tokens is None:
        raise ApiError(400, "is needed", param="max_tokens")
    return body.chat()


def _form(_: MessagesBody, read: Reading) -> MessageForm:
    return MessageForm(read.body.model or read.served.names[0], read.wanted.shape, len(read.asks[0].tokens))


MESSAGES = Dialect(
    path="/v1/messages",
    about="Answer a conversation, as Anthropic's API.",
    body=MessagesBody,
    read=_created,
    form=_form,
    params={"response_format": "output_config", "stop": "stop_sequences"},
    schema_param="output_config.format",
    error_body=error_body,
)


async def count_tokens(models: Models, exchange: Exchange) -> None:
    """Answer POST /v1/messages/count_tokens."""

    def read() -> bytes:
        body = exchange.take_body(MessagesBody).chat()
        (ask,) = asks_of(models.of(body.model), body, exchange)
        return encode({"input_tokens": len(ask.tokens)})

    await exchange.response.whole(await exchange.apart(read))

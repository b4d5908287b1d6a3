"""/v1/responses: conversations that the server keeps; a request continues one by the id of its last response."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from sys import getsizeof
from time import time
from typing import Any
from uuid import uuid4

import msgspec

from kvarts.base.limits import brief
from kvarts.base.tenants import Owner, Shares
from kvarts.core.sampling import Logprobs
from kvarts.doors.openai.answer import Choice
from kvarts.doors.openai.bodies import ChatBody, TranslatedBody, messages_of
from kvarts.doors.openai.errors import ApiError
from kvarts.doors.openai.forms import CALL, Blocks, Whole, event
from kvarts.doors.openai.generation import Dialect, Exchange
from kvarts.doors.openai.kv_hints import hints_of_parts, longest_of, with_control
from kvarts.doors.openai.served import Models
from kvarts.doors.openai.shapes import CallPart, Part, Shape

__all__ = ["Responses"]

MAX_STORED = 10_000
MAX_STORED_BYTES = 32 * 1024 * 1024
"""Limits of the stored responses, by count and memory. Beyond them, the oldest response is dropped, of the owner that
exceeds its share by most.
"""

PREFIX = "resp_"
OVERHEAD_BYTES = 8 * 1024
"""Memory of a stored response in addition to its content."""

encode = msgspec.json.encode


class _Stored(msgspec.Struct):
    messages: list[dict[str, Any]]
    body: dict[str, Any]
    num_bytes: int
    """Memory of its request and answer. Earlier messages count for their own response, which may be dropped first.
    """


class Responses:
    """Owner of the stored responses, with the conversation that led to each. Owners of keys see only their own."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        self._stored: dict[str, OrderedDict[str, _Stored]] = {}
        """By owner and id, oldest first."""
        self._num_stored = Shares(MAX_STORED, shares)
        self._num_bytes = Shares(MAX_STORED_BYTES, shares)
        self.dialect = Dialect(
            path="/v1/responses",
            about="Answer an input, as OpenAI's responses API; it is stored unless `store` is false.",
            body=ResponsesBody,
            read=self._read,
            form=lambda body, read: ResponseForm(body, read.served.names[0], read.wanted.shape),
            params={"max_tokens": "max_output_tokens", "prompt": "input", "response_format": "text.format"},
            schema_param="text.format",
            sent=self._keep,
        )

    async def find(self, exchange: Exchange) -> None:
        """Return a stored response."""
        stored = self._find(exchange)
        await exchange.response.whole(await exchange.work(partial(encode, stored.body), num_bytes=stored.num_bytes))

    async def delete(self, exchange: Exchange) -> None:
        """Delete a stored response."""
        response_id = self._find(exchange).body["id"]
        self._forget(exchange.owner.name, response_id)
        await exchange.response.whole(encode({"id": response_id, "object": "response", "deleted": True}))

    def _read(self, body: ResponsesBody, exchange: Exchange, models: Models) -> ChatBody:
        before: list[dict[str, Any]] = []
        if body.previous_response_id is not None:
            before = self._of(exchange.owner, body.previous_response_id, "previous_response_id").messages
        added = _messages_of(body)
        messages = [*before, *added]
        exchange.budget.draw_values(len(before), "previous_response_id")
        media = models.of(body.model).media()
        instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
        of_parts = longest_of(hints_of_parts(input=body.input, tools=body.tools), hints_of_parts(input=before))
        joined = messages_of([*instructions, *messages], media, param="input")
        joined[0] = with_control(joined[0], of_parts)  # joined parts have lost theirs
        chat = body.chat(joined)
        if body.store is not False:
            exchange.kept = messages, size_of([added, body.instructions, body.metadata, body.tools]) + 8 * len(before)
        return chat

    def _keep(self, exchange: Exchange, form: ResponseForm) -> None:
        if exchange.kept is not None:
            messages, num_bytes = exchange.kept
            num_more = 2 * size_of(form.body["output"]) + OVERHEAD_BYTES
            self._store(exchange.owner.name, _Stored([*messages, form.message], form.body, num_bytes + num_more))

    def _store(self, owner: str, stored: _Stored) -> None:
        of_owner = self._stored.setdefault(owner, OrderedDict())
        of_owner[stored.body["id"]] = stored
        self._num_stored.force(owner)
        self._num_bytes.force(owner, stored.num_bytes)
        for shares in (self._num_stored, self._num_bytes):
            while shares.num_used > shares.total:
                gives_way = shares.most_over(self._stored)
                assert gives_way is not None
                self._forget(gives_way, next(iter(self._stored[gives_way])))

    def _forget(self, owner: str, response_id: str) -> None:
        of_owner = self._stored[owner]
        self._num_bytes.give(owner, of_owner.pop(response_id).num_bytes)
        self._num_stored.give(owner)
        if not of_owner:
            del self._stored[owner]

    def _find(self, exchange: Exchange) -> _Stored:
        response_id = exchange.request.path.removeprefix("/v1/responses/")
        return self._of(exchange.owner, response_id, "response_id")

    def _of(self, owner: Owner, response_id: str, param: str) -> _Stored:
        of_owner = self._stored.get(owner.name)
        stored = None if of_owner is None else of_owner.get(response_id)
        if stored is None:
            raise ApiError(404, f"there is no response {brief(response_id)}", param=param)
        return stored


def size_of(value: Any) -> int:
    """Return the bytes of memory of JSON values."""
    num_bytes, left = 0, [value]
    while left:
        each = left.pop()
        num_bytes += getsizeof(each)
        if isinstance(each, dict):
            left.extend(each)
            left.extend(each.values())
        elif isinstance(each, list):
            left.extend(each)
    return num_bytes


def _messages_of(body: ResponsesBody) -> list[dict[str, Any]]:
    """Return the new messages of a body. Consecutive calls share a message."""
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    if not body.input:
        raise ApiError(400, "an input is needed: text, or a list of items", param="input")
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for index, item in enumerate(body.input):
        message = _message(item, index)
        if message is None:
            reasoning += _reasoning(item)
            continue
        if reasoning and message.get("role") == "assistant":
            message["reasoning_content"], reasoning = reasoning, ""
        last = messages[-1] if messages else {}
        if "tool_calls" in message and last.get("role") == "assistant" and "reasoning_content" not in message:
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            messages.append(message)
    return messages


def _reasoning(item: dict[str, Any]) -> str:
    """Return the text of an item of reasoning, which belongs to the message or the call after it."""
    parts = item.get("content")
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "".join(text for text in texts if isinstance(text, str))


def _message(item: Any, index: int) -> dict[str, Any] | None:
    """Convert an item to a message. Return None for an item of reasoning."""
    if not isinstance(item, dict):
        raise ApiError(400, "an item is an object", param=f"input[{index}]")
    kind = item.get("type", "message")
    control = {"cache_control": item["cache_control"]} if item.get("cache_control") is not None else {}
    if kind == "message":
        return {"role": item.get("role", "user"), "content": item.get("content"), **control}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output"), **control}
    if kind == "function_call":
        function = {"name": str(item.get("name")), "arguments": str(item.get("arguments", "{}"))}
        calls = [{"id": item.get("call_id"), "type": "function", "function": function}]
        return {"role": "assistant", "content": "", "tool_calls": calls}
    if kind == "reasoning":
        return None
    raise ApiError(400, f"items of type {brief(kind)} are not read", param=f"input[{index}].type")


class ResponsesBody(TranslatedBody, kw_only=True):
    """POST /v1/responses."""

    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    store: bool | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    text: dict[str, Any] | None = None
    background: bool | None = None
    conversation: Any = None
    include: list[Any] | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None

    @property
    def is_costly(self) -> bool:
        """Whether it may have a JSON schema, or continues a conversation, which can be as long as a context."""
        return self.previous_response_id is not None or bool(self.tools) or self.text is not None

    def chat(self, messages: list[dict[str, Any]]) -> ChatBody:
        """Convert to a chat. Raise ApiError for unsupported values."""
        if self.top_logprobs or "message.output_text.logprobs" in (self.include or ()):
            raise ApiError(400, "log-probabilities are of chat completions", param="top_logprobs")
        for name in ("background", "conversation"):
            if getattr(self, name):
                raise ApiError(400, f"{name} is not supported: omit it", param=name)
        form = (self.text or {}).get("format")
        if not isinstance(form, dict | None):
            raise ApiError(400, "is an object with a type: text, json_object or json_schema", param="text.format")
        if form is not None and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": {"name": form.get("name"), "schema": form.get("schema")}}
        choice = self.tool_choice
        if isinstance(choice, dict):
            if choice.get("type") != "function":
                raise ApiError(400, "must be none, auto, required or a function", param="tool_choice")
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        # Other tools are run by OpenAI's servers: here they are never called.
        functions = [
            {name: value for name, value in tool.items() if name not in ("type", "cache_control")}
            for tool in self.tools or ()
            if tool.get("type") == "function"
        ]
        return self.as_chat(
            messages=messages,
            max_tokens=self.max_output_tokens,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            response_format=form,
            tools=[{"type": "function", "function": tool} for tool in functions] or None,
            reasoning_effort=(self.reasoning or {}).get("effort"),
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
        )


class ResponseForm(Blocks):
    """A Form: /v1/responses. `body`: the response, complete after the end."""

    def __init__(self, body: ResponsesBody, model: str, shape: Shape | None) -> None:
        super().__init__(f"{PREFIX}{uuid4().hex}", shape)
        self._number = 0
        self.body: dict[str, Any] = {
            "id": self.answer_id,
            "object": "response",
            "created_at": int(time()),
            "status": "in_progress",
            "model": body.model or model,
            "output": [],
            "previous_response_id": body.previous_response_id,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a chat message."""
        parts = [part for item in self._blocks if item["type"] == "message" for part in item["content"]]
        calls = [
            {
                "id": item["call_id"],
                "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            }
            for item in self._blocks
            if item["type"] == "function_call"
        ]
        text = "".join(part.get("text") or part.get("refusal") or "" for part in parts)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if reasoning := "".join(_reasoning(item) for item in self._blocks if item["type"] == "reasoning"):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def first(self, number: int, prompt_logprobs: Logprobs | None) -> bytes:
        """Return the first events."""
        return self._event("created", response=self.body) + self._event("in_progress", response=self.body)

    def end(self, usage: Mapping[str, Any], choices: Sequence[Choice], *, tells_usage: bool) -> bytes:
        """Return the last events."""
        events = self._finish(usage)
        return b"".join([*events, self._event(self.body["status"], response=self.body)])

    def failed(self, error: ApiError) -> bytes:
        """Return an error as an event."""
        content = error.content
        payload = {"type": "error", "code": str(content["code"]), "message": content["message"], "param": None}
        return b"event: error\ndata: %b\n\n" % encode({**payload, "sequence_number": self._number})

    def whole(self, choices: Sequence[Whole], usage: Mapping[str, Any], extra: Mapping[str, Any]) -> bytes:
        """Return the response."""
        (choice,) = choices
        self.piece(0, choice.text, choice.finish_reason, (), None)
        self._finish(usage)
        return encode(self.body)

    def _event(self, kind: str, **fields: Any) -> bytes:
        kind = f"response.{kind}"
        number, self._number = self._number, self._number + 1
        return event(kind, {"type": kind, "sequence_number": number, **fields})

    def _texts_of(self, part: Part) -> Sequence[tuple[str, str]]:
        return (("reasoning_text", part.reasoning), ("output_text", part.content), ("refusal", part.refusal))

    @property
    def _of_item(self) -> dict[str, Any]:
        return {"output_index": len(self._blocks) - 1, "item_id": self._blocks[-1]["id"]}

    @property
    def _place(self) -> dict[str, Any]:
        return {**self._of_item, "content_index": 0}

    def _open(self, kind: str, call: CallPart | None) -> list[bytes]:
        self._kind = kind
        item: dict[str, Any]
        if call is not None:
            item = {"type": "function_call", "id": f"fc_{uuid4().hex}", "call_id": call.call_id, "name": call.name,
                    "arguments": "", "status": "in_progress"}  # fmt: skip
        elif kind == "reasoning_text":
            item = {"type": "reasoning", "id": f"rs_{uuid4().hex}", "summary": [], "status": "in_progress"}
        else:
            item = {"type": "message", "id": f"msg_{uuid4().hex}", "role": "assistant", "status": "in_progress"}
        if call is None:
            item["content"] = []
        self._blocks.append(item)
        events = [self._event("output_item.added", output_index=len(self._blocks) - 1, item=item)]
        if call is None:
            item["content"] = [_part(kind, "")]
            events.append(self._event("content_part.added", **self._place, part=item["content"][0]))
        return events

    def _extend(self, text: str) -> bytes:
        self._texts.append(text)
        if self._kind == CALL:
            return self._event("function_call_arguments.delta", **self._of_item, delta=text)
        return self._event(f"{self._kind}.delta", **self._place, delta=text, **LOGPROBS.get(self._kind, {}))

    def _close(self, status: str = "completed") -> list[bytes]:
        if not self._blocks or self._blocks[-1]["status"] != "in_progress":
            return []
        item, text, events, kind = self._blocks[-1], "".join(self._texts), [], self._kind
        self._texts = []
        item["status"] = status
        if kind == CALL:
            item["arguments"] = text
            done = {"name": item["name"], "arguments": text}
            events.append(self._event("function_call_arguments.done", **self._of_item, **done))
        else:
            item["content"] = [_part(kind, text)]
            done = {"refusal": text} if kind == "refusal" else {"text": text, **LOGPROBS.get(kind, {})}
            events.append(self._event(f"{kind}.done", **self._place, **done))
            events.append(self._event("content_part.done", **self._place, part=item["content"][0]))
        events.append(self._event("output_item.done", output_index=len(self._blocks) - 1, item=item))
        return events

    def _finish(self, usage: Mapping[str, Any]) -> list[bytes]:
        """Complete the response. Return the events."""
        rest, _ = self._reader.end()
        events = self._take(rest)
        is_whole = self._reason not in ("length", "content_filter", "abort")
        status = "completed" if is_whole else "incomplete"
        if not self._blocks:
            events += self._open("output_text", None)
        events += self._close(status)
        reason = "content_filter" if self._reason == "content_filter" else "max_output_tokens"
        details = usage.get("completion_tokens_details", {"reasoning_tokens": 0})
        self.body |= {
            "status": status,
            "output": self._blocks,
            "incomplete_details": None if is_whole else {"reason": reason},
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": details,
                "total_tokens": usage["total_tokens"],
            },
        }
        return events


LOGPROBS: dict[str, dict[str, Any]] = {"output_text": {"logprobs": []}}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "output_text":
        return {"type": kind, "text": text, "annotations": [], "logprobs": None}
    return {"type": kind, "refusal" if kind == "refusal" else "text": text}

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
from kvarts.core.hints import Hints
from kvarts.core.sampling import Logprobs
from kvarts.doors.openai.answer import Choice, TokenLogprob
from kvarts.doors.openai.bodies import ChatBody, messages_of
from kvarts.doors.openai.budget import INLINE_BYTES
from kvarts.doors.openai.errors import ApiError
from kvarts.doors.openai.forms import Whole
from kvarts.doors.openai.generation import Exchange, Generating, MakeForm
from kvarts.doors.openai.kv_hints import (
    CacheControl,
    KvHints,
    NvExt,
    hints_of_parts,
    longest_of,
    with_control,
)
from kvarts.doors.openai.served import Ask, Served
from kvarts.doors.openai.shapes import Part, Plain, Shape

__all__ = ["Responses"]

MAX_STORED = 10_000
MAX_STORED_BYTES = 32 * 1024 * 1024
"""Limits of the stored responses, by count and memory. Beyond them, the oldest response is dropped, of the owner that
exceeds its share by most.
"""

PREFIX = "resp_"
OVERHEAD_BYTES = 8 * 1024
"""Memory of a stored response in addition to its content."""

PARAMS = {"max_tokens": "max_output_tokens", "prompt": "input", "response_format": "text.format"}
"""Fields whose names differ from those of completions."""

encode = msgspec.json.encode


class _Stored(msgspec.Struct):
    messages: list[dict[str, Any]]
    body: dict[str, Any]
    num_bytes: int
    """Memory of its request and answer. Earlier messages count for their own response, which may be dropped first.
    """


class Responses:
    """Owner of the stored responses, with the conversation that led to each. Owners of keys see only their own."""

    def __init__(self, generating: Generating, shares: Mapping[str, float]) -> None:
        self._generating = generating
        self._stored: dict[str, OrderedDict[str, _Stored]] = {}
        """By owner and id, oldest first."""
        self._num_stored = Shares(MAX_STORED, shares)
        self._num_bytes = Shares(MAX_STORED_BYTES, shares)

    async def find(self, exchange: Exchange) -> None:
        """Answer GET /v1/responses/ID."""
        stored = self._find(exchange)
        await exchange.response.whole(await exchange.work(partial(encode, stored.body), num_bytes=stored.num_bytes))

    async def delete(self, exchange: Exchange) -> None:
        """Answer DELETE /v1/responses/ID."""
        response_id = self._find(exchange).body["id"]
        self._forget(exchange.owner.name, response_id)
        await exchange.response.whole(encode({"id": response_id, "object": "response", "deleted": True}))

    async def create(self, exchange: Exchange) -> None:
        """Answer POST /v1/responses."""
        kept: list[tuple[list[dict[str, Any]], int]] = []

        def read() -> tuple[ChatBody, MakeForm]:
            body = exchange.take_body(ResponsesBody)
            before = self._before(body, exchange.owner)
            added = _messages_of(body)
            messages = [*before, *added]
            exchange.budget.draw_values(len(before), "previous_response_id")
            media = self._generating.media_of(body.model)
            instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
            of_parts = longest_of(hints_of_parts(input=body.input, tools=body.tools), hints_of_parts(input=before))
            joined = messages_of([*instructions, *messages], media, param="input")
            joined[0] = with_control(joined[0], of_parts)  # joined parts have lost theirs
            chat = body.chat(joined)
            if body.store is not False:
                num_bytes = size_of([added, body.instructions, body.metadata, body.tools]) + 8 * len(before)
                kept.append((messages, num_bytes))
            return chat, partial(_form, body)

        try:
            # A continued conversation can be as long as a context.
            form = await self._generating.converse(
                exchange, read, num_bytes=INLINE_BYTES if self._may_be_much(exchange) else 0
            )
        except ApiError as error:
            error.param = PARAMS.get(error.param or "", error.param)
            raise
        assert isinstance(form, ResponseForm)
        for messages, num_bytes in kept:
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

    def _before(self, body: ResponsesBody, owner: Owner) -> list[dict[str, Any]]:
        """Return the conversation before this request."""
        if body.previous_response_id is None:
            return []
        return self._of(owner, body.previous_response_id, "previous_response_id").messages

    @staticmethod
    def _may_be_much(exchange: Exchange) -> bool:
        return any(name in exchange.payload for name in (b"previous_response_id", b"schema", b"parameters"))


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


class ResponsesBody(msgspec.Struct, kw_only=True):
    """POST /v1/responses."""

    model: str | None = None
    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    store: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    seed: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    kvarts_answer: Any = None
    kvarts_hints: Hints | None = None
    kv_hints: KvHints | None = None
    nvext: NvExt | None = None
    cache_control: CacheControl | None = None
    text: dict[str, Any] | None = None
    background: bool | None = None
    conversation: Any = None
    include: list[Any] | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None

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
        return ChatBody(
            model=self.model,
            messages=messages,
            max_tokens=self.max_output_tokens,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            seed=self.seed,
            priority=self.priority,
            cache_salt=self.cache_salt,
            session_id=self.session_id,
            kvarts_answer=self.kvarts_answer,
            kvarts_hints=self.kvarts_hints,
            kv_hints=self.kv_hints,
            nvext=self.nvext,
            cache_control=self.cache_control,
            response_format=form,
            tools=[{"type": "function", "function": tool} for tool in functions] or None,
            reasoning_effort=(self.reasoning or {}).get("effort"),
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
        )


def _form(
    body: ResponsesBody, served: Served, chat: ChatBody, asks: Sequence[Ask], shape: Shape | None
) -> ResponseForm:
    return ResponseForm(body, served.names[0], Plain() if shape is None else shape)


class ResponseForm:
    """A Form: /v1/responses. `body`: the response, complete after the end. `message`: the answer as a chat message."""

    tells_ids = False

    def __init__(self, body: ResponsesBody, model: str, shape: Shape) -> None:
        self._reader = shape(0)
        self._reason = "stop"
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._texts: list[str] = []
        """Of the last item, until it is complete."""
        self.answer_id = f"{PREFIX}{uuid4().hex}"
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
        parts = [part for item in self._items if item["type"] == "message" for part in item["content"]]
        calls = [
            {
                "id": item["call_id"],
                "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            }
            for item in self._items
            if item["type"] == "function_call"
        ]
        text = "".join(part.get("text") or part.get("refusal") or "" for part in parts)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if reasoning := "".join(_reasoning(item) for item in self._items if item["type"] == "reasoning"):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def first(self, number: int, prompt_logprobs: Logprobs | None) -> bytes:
        """Return the first events."""
        return self._event("created", response=self.body) + self._event("in_progress", response=self.body)

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
        payload = encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), payload)

    def _take(self, part: Part) -> list[bytes]:
        """Add a part to the output items. Return its events."""
        events: list[bytes] = []
        texts = {"reasoning_text": part.reasoning, "output_text": part.content, "refusal": part.refusal}
        for kind, text in texts.items():
            if not text:
                continue
            if not self._items or self._kind_of(self._items[-1]) != kind:
                events += self._close("completed")
                events += self._open_text(kind)
            self._texts.append(text)
            events.append(self._event(f"{kind}.delta", **self._place, delta=text, **LOGPROBS.get(kind, {})))
        for call in part.calls:
            if call.call_id:
                events += self._close("completed")
                events += self._open({"type": "function_call", "id": f"fc_{uuid4().hex}", "call_id": call.call_id,
                                      "name": call.name, "arguments": "", "status": "in_progress"})  # fmt: skip
            self._texts.append(call.arguments)
            events.append(self._event("function_call_arguments.delta", **self._of_item, delta=call.arguments))
        return events

    @staticmethod
    def _kind_of(item: Mapping[str, Any]) -> str:
        """Return the type of an item's content part, or of the item if it has no content."""
        return str(item["content"][0]["type"] if "content" in item else item["type"])

    @property
    def _of_item(self) -> dict[str, Any]:
        return {"output_index": len(self._items) - 1, "item_id": self._items[-1]["id"]}

    @property
    def _place(self) -> dict[str, Any]:
        return {**self._of_item, "content_index": 0}

    def _open(self, item: dict[str, Any]) -> list[bytes]:
        self._items.append(item)
        return [self._event("output_item.added", output_index=len(self._items) - 1, item=item)]

    def _open_text(self, kind: str) -> list[bytes]:
        item: dict[str, Any]
        if kind == "reasoning_text":
            item = {"type": "reasoning", "id": f"rs_{uuid4().hex}", "summary": []}
        else:
            item = {"type": "message", "id": f"msg_{uuid4().hex}", "role": "assistant"}
        events = self._open({**item, "status": "in_progress", "content": []})
        self._items[-1]["content"] = [_part(kind, "")]
        return [*events, self._event("content_part.added", **self._place, part=self._items[-1]["content"][0])]

    def _close(self, status: str) -> list[bytes]:
        """Complete the last item."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return []
        item, text, events = self._items[-1], "".join(self._texts), []
        self._texts = []
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            done = {"name": item["name"], "arguments": text}
            events.append(self._event("function_call_arguments.done", **self._of_item, **done))
        else:
            kind = self._kind_of(item)
            item["content"] = [_part(kind, text)]
            done = {"refusal": text} if kind == "refusal" else {"text": text, **LOGPROBS.get(kind, {})}
            events.append(self._event(f"{kind}.done", **self._place, **done))
            events.append(self._event("content_part.done", **self._place, part=item["content"][0]))
        events.append(self._event("output_item.done", output_index=len(self._items) - 1, item=item))
        return events

    def _finish(self, usage: Mapping[str, Any]) -> list[bytes]:
        """Complete the response. Return the events."""
        rest, _ = self._reader.end()
        events = self._take(rest)
        is_whole = self._reason not in ("length", "content_filter", "abort")
        status = "completed" if is_whole else "incomplete"
        if not self._items:
            events += self._open_text("output_text")
        events += self._close(status)
        reason = "content_filter" if self._reason == "content_filter" else "max_output_tokens"
        details = usage.get("completion_tokens_details", {"reasoning_tokens": 0})
        self.body |= {
            "status": status,
            "output": self._items,
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

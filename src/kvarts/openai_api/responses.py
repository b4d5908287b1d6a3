"""/v1/responses: a conversation that is kept here, and gone on with by the id of its last answer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from sys import getsizeof
from time import time
from typing import Any
from uuid import uuid4

import msgspec

from kvarts.limits import brief
from kvarts.openai_api.answer import Choice
from kvarts.openai_api.bodies import GenerationBody, ResponsesBody, check_response, messages_of
from kvarts.openai_api.budget import INLINE_BYTES
from kvarts.openai_api.errors import ApiError, api_error
from kvarts.openai_api.failures import Cut
from kvarts.openai_api.generation import Exchange, asks_of, begin
from kvarts.openai_api.http import ClientGone
from kvarts.openai_api.models import Models
from kvarts.openai_api.served import Ask, Served
from kvarts.owners.keys import Owner
from kvarts.owners.shares import Shares

__all__ = ["Responses"]

MAX_STORED = 10_000
MAX_STORED_BYTES = 64 * 1024 * 1024
"""So many responses are kept, of so many bytes of memory. The oldest go first, of the owner that has most beyond its
share.
"""

OVERHEAD_BYTES = 8 * 1024
"""Of a stored response, whatever it holds."""

PARAMS = {"max_tokens": "max_output_tokens", "prompt": "input"}
"""What is called otherwise in completions."""

encode = msgspec.json.encode


class _Stored(msgspec.Struct):
    messages: list[dict[str, Any]]
    body: dict[str, Any]
    num_bytes: int
    """Of memory, for the request and the answer. Those before it are counted with theirs, and may go before it."""


class Responses:
    """Owner of the responses that were given, with the conversation that led to each. Owners see their own alone."""

    def __init__(self, models: Models, shares: Mapping[str, float]) -> None:
        self._models = models
        self._stored: dict[str, OrderedDict[str, _Stored]] = {}
        """By owner and id, the oldest first."""
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

        def read() -> tuple[Served, ResponsesBody, list[dict[str, Any]], int, list[Ask]]:
            body = exchange.take_body(ResponsesBody)
            check_response(body)
            served = self._models.of(body.model)
            before = self._before(body, exchange.owner)
            added = _messages_of(body)
            messages = [*before, *added]
            exchange.budget.draw_values(len(before), "previous_response_id")
            instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
            prompt = served.conversation(messages_of([*instructions, *messages], param="input"), {})
            tokens = served.encode(prompt, exchange.budget, add_special_tokens=False)
            asked = GenerationBody(
                model=body.model,
                temperature=body.temperature,
                top_p=body.top_p,
                ignore_eos=body.ignore_eos,
                min_tokens=body.min_tokens,
                seed=body.seed,
                priority=body.priority,
                cache_salt=body.cache_salt,
            )
            try:
                asks = asks_of(
                    served, asked, [tokens], body.max_output_tokens, exchange, top_logprobs=None, has_end=True
                )
            except ApiError as error:
                error.param = PARAMS.get(error.param or "", error.param)
                raise
            num_bytes = 0
            if body.store is not False:
                num_bytes = size_of([added, body.instructions, body.metadata, body.tools]) + 8 * len(before)
            return served, body, messages, num_bytes, asks

        # A conversation that goes on is as long as a context may be.
        served, body, messages, num_bytes, asks = await exchange.apart(
            read, num_bytes=INLINE_BYTES if self._is_long(exchange) else 0
        )
        num_prompt_tokens = len(asks[0].tokens)
        told = _Told(body, served.names[0])
        under_way = begin(served, exchange, asks, body.session_id)
        asks.clear()  # the engine has the tokens
        answer, choices = under_way.answer, under_way.choices
        try:
            if body.stream:
                await _stream(exchange, told, answer.take, choices, num_prompt_tokens)
            else:
                texts: list[str] = []
                reason = None
                while reason is None:
                    for _, text, _, reason, _ in await answer.take():  # noqa: B007  # the last one decides
                        texts.append(text)
                told.complete("".join(texts), str(reason), choices[0], num_prompt_tokens)
                exchange.failure.before_answer()
                await exchange.failure.write_whole(exchange.response, encode(told.body))
        finally:
            await under_way.end()
        if body.store is not False:
            said = {"role": "assistant", "content": told.text}
            num_bytes += 2 * size_of(told.text) + OVERHEAD_BYTES
            self._store(exchange.owner.name, _Stored([*messages, said], told.body, num_bytes))

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
        """Return the conversation so far."""
        if body.previous_response_id is None:
            return []
        return self._of(owner, body.previous_response_id, "previous_response_id").messages

    @staticmethod
    def _is_long(exchange: Exchange) -> bool:
        return b"previous_response_id" in exchange.payload


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
    """Return what a body adds to its conversation."""
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    if not body.input:
        raise ApiError(400, "an input is needed: text, or a list of items", param="input")
    return [_message(item, index) for index, item in enumerate(body.input)]


def _message(item: Any, index: int) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise ApiError(400, "an item is an object", param=f"input[{index}]")
    kind = item.get("type", "message")
    if kind == "message":
        return {"role": item.get("role", "user"), "content": item.get("content")}
    if kind == "function_call_output":
        return {"role": "tool", "content": item.get("output")}
    if kind == "function_call":
        return {"role": "assistant", "content": f"{item.get('name')}({item.get('arguments')})"}
    raise ApiError(400, f"items of type {brief(kind)} are not read", param=f"input[{index}].type")


class _Told:
    """A response as it is told, from its beginning to its end."""

    def __init__(self, body: ResponsesBody, model: str) -> None:
        self.text = ""
        self.item_id = f"msg_{uuid4().hex}"
        self.body: dict[str, Any] = {
            "id": f"resp_{uuid4().hex}",
            "object": "response",
            "created_at": int(time()),
            "status": "in_progress",
            "model": body.model or model,
            "output": [],
            "previous_response_id": body.previous_response_id,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": True,
            "temperature": body.temperature,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }

    def part(self, text: str) -> dict[str, Any]:
        """Return the part of the output that is text."""
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}

    def item(self, status: str, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the item of the output."""
        return {
            "id": self.item_id, "type": "message", "role": "assistant", "status": status, "content": list(parts)
        }  # fmt: skip

    def complete(self, text: str, finish_reason: str, choice: Choice, num_prompt_tokens: int) -> None:
        """Note the end."""
        self.text = text
        is_whole = finish_reason == "stop"
        status = "completed" if is_whole else "incomplete"
        num_tokens = 0 if choice.completion is None else len(choice.completion.tokens)
        self.body |= {
            "status": status,
            "output": [self.item(status, [self.part(text)])],
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "usage": {
                "input_tokens": num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": choice.cached_tokens},
                "output_tokens": num_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": num_prompt_tokens + num_tokens,
            },
        }


async def _stream(
    exchange: Exchange, told: _Told, take: Any, choices: Sequence[Choice], num_prompt_tokens: int
) -> None:
    response, failure = exchange.response, exchange.failure
    number = 0

    def event(kind: str, **fields: Any) -> bytes:
        nonlocal number
        payload = encode({"type": kind, "sequence_number": number, **fields})
        number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), payload)

    pieces = await take()
    await failure.stall()
    await response.begin_stream()
    place = {"output_index": 0}
    within = {**place, "content_index": 0, "item_id": told.item_id}
    parts = [
        event("response.created", response=told.body),
        event("response.in_progress", response=told.body),
        event("response.output_item.added", **place, item=told.item("in_progress", [])),
        event("response.content_part.added", **within, part=told.part("")),
    ]
    texts: list[str] = []
    reason: str | None = None
    try:
        while True:
            for _, text, _, reason, _ in pieces:  # noqa: B007  # the last one decides
                texts.append(text)
                parts.append(event("response.output_text.delta", **within, delta=text, logprobs=[]))
            await failure.write(response, parts)
            if reason is not None:
                break
            parts = []
            pieces = await take()
    except (ClientGone, Cut):
        raise
    except Exception as error:
        content = api_error(error).content
        await response.more(event("error", code=str(content["code"]), message=content["message"], param=None))
        await response.end_stream()
        return
    whole = "".join(texts)
    told.complete(whole, reason, choices[0], num_prompt_tokens)
    part, item = told.part(whole), told.body["output"][0]
    kind = "response.completed" if told.body["status"] == "completed" else "response.incomplete"
    await failure.write(
        response,
        [
            event("response.output_text.done", **within, text=whole, logprobs=[]),
            event("response.content_part.done", **within, part=part),
            event("response.output_item.done", **place, item=item),
            event(kind, response=told.body),
        ],
    )
    await response.end_stream()

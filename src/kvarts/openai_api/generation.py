"""Completions and chat completions: from a body to requests, and from pieces to an answer."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import msgspec

from kvarts.openai_api.answer import Choice, Piece
from kvarts.openai_api.bodies import ChatBody, CompletionBody, GenerationBody, StreamOptions, decoded, messages_of
from kvarts.openai_api.errors import ApiError, api_error
from kvarts.openai_api.failures import Cut, Failure
from kvarts.openai_api.forms import ChatForm, CompletionForm, Form, ToolCall, Whole, usage_of
from kvarts.openai_api.http import ClientGone, HttpRequest, HttpResponse
from kvarts.openai_api.served import Ask, Served

__all__ = ["Exchange", "Generating", "chat_asks", "completion_asks"]

DEFAULT_COMPLETION_TOKENS = 16
"""As of OpenAI's API, where nothing is said; a chat ends by itself."""


class Exchange(msgspec.Struct, kw_only=True):
    """One HTTP request on its way: what came, what goes out, and what is to go wrong."""

    request: HttpRequest
    response: HttpResponse
    payload: bytes
    request_id: str
    started_s: float
    failure: Failure


def natural_length(served: Served, tokens: Sequence[int], seed: int | None) -> int:
    """Return how many tokens an answer has that ends by itself: around the default, by the prompt and the seed."""
    most = served.limits.default_tokens
    assert most is not None
    tail = b"".join(token.to_bytes(8, "little") for token in tokens[-64:])
    drawn = int.from_bytes(sha256(tail + str((len(tokens), seed)).encode()).digest()[:8], "little")
    return max(1, most // 2 + drawn % (most + 1))


def asks_of(
    served: Served,
    body: GenerationBody,
    prompts: Sequence[list[int]],
    max_tokens: int | None,
    *,
    top_logprobs: int | None,
    request_id: str,
    has_end: bool,
) -> list[Ask]:
    """Return a request for every choice of every prompt. Raise ApiError for what cannot be done.

    `has_end`: without a number of tokens, the answer goes on to its own end.
    """
    adapter = served.adapter_of(body.model)
    parts = [part for part in (adapter, body.cache_salt) if part]
    salt = "/".join(parts) or None
    limit = served.limits.max_model_len
    vocabulary = served.host.vocab_size
    asks: list[Ask] = []
    for tokens in prompts:
        if not tokens:
            raise ApiError(400, "a prompt must have at least one token", param="prompt")
        if max(tokens) >= vocabulary or min(tokens) < 0:
            raise ApiError(400, f"token ids must be from 0 to {vocabulary - 1}", param="prompt")
        room = limit - len(tokens)
        if room < 1 or (max_tokens is not None and max_tokens > room):
            asked = "" if max_tokens is None else f" and {max_tokens} to generate"
            raise ApiError(
                400, f"the model has a context of {limit} tokens, and {len(tokens)} in the prompt{asked} are more",
                param="max_tokens" if room >= 1 else "prompt",
            )  # fmt: skip
        for copy in range(body.num_choices):
            seed = body.seed if copy == 0 else (body.seed or 0) + copy
            most, ends_itself = max_tokens, False
            if most is None and not has_end:
                most = min(DEFAULT_COMPLETION_TOKENS, room)
            elif most is None:
                most = room
                if served.limits.default_tokens is not None and not body.ignore_eos:
                    natural = max(body.min_tokens or 0, natural_length(served, tokens, seed))
                    most, ends_itself = min(room, natural), natural <= room
            if most < 1:
                raise ApiError(400, f"must be at least 1, got {most}", param="max_tokens")
            params = body.params(most, top_logprobs=top_logprobs)
            if seed is not None and copy:
                params = msgspec.structs.replace(params, seed=seed % 2**63)
            asks.append(
                Ask(
                    tokens=tokens,
                    params=params,
                    priority=-(body.priority or 0),  # of vLLM: the lower, the earlier
                    salt=salt,
                    request_id=request_id if len(prompts) * body.num_choices == 1 else f"{request_id}-{len(asks)}",
                    ends_itself=ends_itself,
                )
            )
    return asks


def completion_asks(served: Served, body: CompletionBody, request_id: str) -> tuple[list[Ask], list[str]]:
    """Return the requests of a completion, and the text that goes before each choice, if prompts are echoed."""
    adds = body.add_special_tokens is not False
    prompts = [
        served.text.encode(prompt, add_special_tokens=adds) if isinstance(prompt, str) else prompt
        for prompt in body.prompts()
    ]
    asks = asks_of(
        served, body, prompts, body.max_tokens, top_logprobs=body.top_logprobs, request_id=request_id, has_end=False
    )
    echoes = []
    if body.echo:
        texts = [prompt if isinstance(prompt, str) else served.text.decode(prompt) for prompt in body.prompts()]
        echoes = [text for text in texts for _ in range(body.num_choices)]
    return asks, echoes


def chat_asks(served: Served, body: ChatBody, request_id: str) -> list[Ask]:
    """Return the requests of a chat completion."""
    messages = messages_of(body.messages)
    prompt = served.text.conversation(messages, body.template_options())
    tokens = served.text.encode(prompt, add_special_tokens=bool(body.add_special_tokens))
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return asks_of(
        served, body, [tokens], max_tokens, top_logprobs=body.asked_logprobs, request_id=request_id, has_end=True
    )


def tool_call(served: Served, body: ChatBody) -> ToolCall | None:
    """Return the call that has to be made: the tool that is named, or the first, if one is required."""
    choice, tools = body.tool_choice, body.tools or []
    if choice in (None, "auto", "none"):
        return None
    if not served.text.has_any_tool:
        raise ApiError(400, "calls of tools cannot be enforced: ask for 'auto' or 'none'", param="tool_choice")
    functions = [tool.get("function") for tool in tools]
    known = [function for function in functions if isinstance(function, dict) and "name" in function]
    if isinstance(choice, dict):
        asked = choice.get("function") or {}
        name = asked.get("name") if isinstance(asked, dict) else None
        known = [function for function in known if function["name"] == name]
    if not known:
        raise ApiError(400, "names no tool that is there", param="tool_choice")
    schema = known[0].get("parameters")
    return ToolCall(str(known[0]["name"]), schema if isinstance(schema, dict) else {})


class Generating:
    """Answers completions and chat completions of one served model."""

    def __init__(self, served: Served) -> None:
        self._served = served

    async def completion(self, exchange: Exchange) -> None:
        """Answer POST /v1/completions."""
        body = decoded(exchange.payload, CompletionBody)
        asks, echoes = completion_asks(self._served, body, exchange.request_id)
        form = CompletionForm(body.model or self._served.names[0], self._served.text, echoes)
        await self._answer(exchange, body, asks, form)

    async def chat(self, exchange: Exchange) -> None:
        """Answer POST /v1/chat/completions."""
        body = decoded(exchange.payload, ChatBody)
        asks = chat_asks(self._served, body, exchange.request_id)
        call = tool_call(self._served, body)
        form = ChatForm(body.model or self._served.names[0], self._served.text, call=call)
        await self._answer(exchange, body, asks, form)

    async def _answer(self, exchange: Exchange, body: GenerationBody, asks: list[Ask], form: Form) -> None:
        served = self._served
        answer, choices = served.start(asks, started_s=exchange.started_s)
        served.meter.num_choices.add(body.num_choices)

        def gone() -> None:
            answer.pieces.append(ClientGone())
            answer.wake()

        exchange.request.when_gone(gone)
        num_prompt_tokens = sum(len(ask.tokens) for ask in asks[:: body.num_choices])
        try:
            if body.stream:
                options = body.stream_options or StreamOptions()
                stream = _Stream(exchange, form, choices, options, [len(ask.tokens) for ask in asks], body.num_choices)
                await stream.write(answer.take, num_prompt_tokens)
            else:
                wholes = [Whole() for _ in choices]
                await _collect(answer.take, wholes)
                exchange.failure.before_answer()
                extra = {"kv_transfer_params": body.kv_transfer_params}
                usage = usage_of(num_prompt_tokens, _num_tokens(choices), _cached_tokens(choices, body.num_choices))
                payload = form.whole(wholes, usage, extra)
                await exchange.failure.write_whole(exchange.response, payload)
        finally:
            served.finish(choices)
            await exchange.request.settle()


async def _collect(take: Any, wholes: list[Whole]) -> None:
    """Wait for all pieces."""
    num_open = len(wholes)
    while num_open:
        for choice, text, _, finish_reason, logprobs in await take():
            whole = wholes[choice.number]
            whole.texts.append(text)
            whole.logprobs += logprobs
            if finish_reason is not None:
                whole.finish_reason = _told_reason(finish_reason)
                num_open -= 1


def _num_tokens(choices: Sequence[Choice]) -> int:
    return sum(len(choice.completion.tokens) for choice in choices if choice.completion is not None)


def _cached_tokens(choices: Sequence[Choice], copies: int) -> int:
    """Return the cached tokens of each prompt once, although each of its copies may have found more."""
    return sum(choice.cached_tokens for choice in choices[::copies])


def _told_reason(finish_reason: str) -> str:
    return "abort" if finish_reason == "cancelled" else finish_reason


class _Stream:
    """Writes an answer as server-sent events."""

    def __init__(
        self,
        exchange: Exchange,
        form: Form,
        choices: Sequence[Choice],
        options: StreamOptions,
        prompt_lengths: Sequence[int],
        copies: int,
    ) -> None:
        self._exchange = exchange
        self._form = form
        self._choices = choices
        self._tells_usage = bool(options.include_usage)
        self._tells_usage_always = bool(options.include_usage and options.continuous_usage_stats)
        self._prompt_lengths = prompt_lengths
        self._copies = copies
        self._begun: set[int] = set()
        self._num_open = len(choices)

    async def write(self, take: Any, num_prompt_tokens: int) -> None:
        """Write everything. What goes wrong after the first byte is told as an event."""
        response, failure = self._exchange.response, self._exchange.failure
        pieces = await take()  # what is refused is refused before the first byte
        await failure.stall()
        await response.begin_stream()
        try:
            while True:
                parts: list[bytes] = []
                for piece in pieces:
                    self._put(piece, parts)
                if failure.has_any:
                    await failure.write(response, parts)
                else:
                    await response.more(b"".join(parts))
                if not self._num_open:
                    break
                pieces = await take()
        except (ClientGone, Cut):
            raise
        except Exception as error:
            told = msgspec.json.encode({"error": api_error(error).content})
            await response.more(b"data: " + told + b"\n\ndata: [DONE]\n\n")
        else:
            end = b""
            if self._tells_usage:
                cached = _cached_tokens(self._choices, self._copies)
                end = self._form.last(usage_of(num_prompt_tokens, _num_tokens(self._choices), cached))
            await failure.write(response, [end, b"data: [DONE]\n\n"])
        await response.end_stream()

    def _put(self, piece: Piece, parts: list[bytes]) -> None:
        """Add the chunks of a piece."""
        choice, text, num_tokens, finish_reason, logprobs = piece
        number = choice.number
        if number not in self._begun:
            self._begun.add(number)
            parts.append(self._form.first(number))
        if finish_reason is not None:
            self._num_open -= 1
            finish_reason = _told_reason(finish_reason)
            if self._exchange.failure.drops_finish_reason:
                finish_reason = None
        usage = None
        if self._tells_usage_always:
            usage = usage_of(self._prompt_lengths[number], num_tokens, choice.cached_tokens)
        parts.append(self._form.piece(number, text, finish_reason, logprobs, usage))

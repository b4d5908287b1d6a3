"""Completions and chat completions: from a body to requests, and from pieces to an answer."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from kvarts.base.errors import KvartsError
from kvarts.base.limits import brief
from kvarts.base.tenants import PARTED, Owner
from kvarts.core.keys import salt_of_adapter
from kvarts.core.sampling import SamplingParams, StructuredOutputs
from kvarts.doors.openai.answer import Answer, Choice, Piece, size_of
from kvarts.doors.openai.answers import Answers, Question
from kvarts.doors.openai.bodies import (
    BodyT,
    ChatBody,
    CompletionBody,
    GenerationBody,
    StreamOptions,
    decoded,
    messages_of,
)
from kvarts.doors.openai.budget import INLINE_BYTES, Budget, Workbench
from kvarts.doors.openai.errors import ApiError, api_error, too_long
from kvarts.doors.openai.failures import NO_FAILURE, Cut, Failure
from kvarts.doors.openai.forms import ChatForm, CompletionForm, Echo, Form, Whole, usage_of
from kvarts.doors.openai.http import ClientGone, Direct, HttpRequest, HttpResponse
from kvarts.doors.openai.kv_hints import NO_PRIORITY
from kvarts.doors.openai.prompts import NO_LIMIT, Thinking
from kvarts.doors.openai.scripted import ScriptedAnswer, ScriptedUsage
from kvarts.doors.openai.served import Ask, InSessions, Models, Served
from kvarts.doors.openai.shapes import Segments, Shape, schema_of_format
from kvarts.doors.openai.tool_calls import NamedCall, RequiredCalls, ToolCallsInText, calls_schema
from kvarts.run.llm_engine import RequestFailedError

if TYPE_CHECKING:
    from kvarts.doors.openai.media import Media

__all__ = ["AnswerUnderWay", "Exchange", "Generating", "MakeForm", "asks_of", "begin", "chat_asks", "completion_asks"]

DEFAULT_COMPLETION_TOKENS = 16
"""The default of OpenAI's API for completions; a chat generates to its end."""

T = TypeVar("T")
SESSION_HEADERS = ("x-session-id", "x-session-affinity", "x-dynamo-session-id")
MAX_SESSION_CHARS = 256
ANSWER_HEADER = "x-kvarts-answer"


class Exchange(msgspec.Struct, kw_only=True):
    """One HTTP request with its response, its owner and budget, and a failure on purpose."""

    request: HttpRequest
    response: HttpResponse
    payload: bytes
    request_id: str
    started_s: float
    failure: Failure
    owner: Owner
    """The owner of the key in the request."""
    budget: Budget
    workbench: Workbench
    read: Callable[[], object]
    """Called once the payload is no longer needed."""

    def take_body(self, kind: type[BodyT]) -> BodyT:
        """Return the body, within the budget. Raise ApiError as `decoded` does."""
        return decoded(self.payload, kind, self.budget)

    async def apart(self, work: Callable[[], T], *, num_bytes: int = 0) -> T:
        """Return the result of `work` on the payload, which is dropped afterwards; large work runs off the event loop.

        `num_bytes`: bytes that `work` reads in addition to the payload.
        """
        try:
            return await self.work(work, num_bytes=num_bytes + len(self.payload))
        finally:
            self.payload = b""
            self.read()

    async def work(self, work: Callable[[], T], *, num_bytes: int) -> T:
        """Return the result of `work`, which processes `num_bytes`; above INLINE_BYTES it runs off the event loop."""
        return work() if num_bytes <= INLINE_BYTES else await self.workbench.run(self.owner.name, work)


def may_end(served: Served, body: GenerationBody, most: int) -> bool:
    """Return whether an answer of at most `most` tokens may end by itself before: the shortest has half the default."""
    default = served.limits.default_tokens
    return default is not None and not body.ignore_eos and most >= max(1, default // 2)


def natural_length(served: Served, tokens: Sequence[int], seed: int | None) -> int:
    """Return the length of an answer without a requested length: around the default, drawn from prompt and seed."""
    most = served.limits.default_tokens
    assert most is not None
    tail = b"".join(token.to_bytes(8, "little") for token in tokens[-64:])
    drawn = int.from_bytes(sha256(tail + str((len(tokens), seed)).encode()).digest()[:8], "little")
    return max(1, most // 2 + drawn % (most + 1))


def salt_of(served: Served, body: GenerationBody, owner: Owner) -> tuple[str | None, str | None]:
    """Return the salts that separate the KV of a request: from all other requests, and among those of its owner."""
    adapter = served.adapter_of(body.model)
    tenant = body.cache_salt or None
    if adapter is not None:
        tenant = salt_of_adapter(adapter, tenant)
    if not served.sets_owners_apart:
        return tenant, tenant
    return f"{tenant or ''}{PARTED}{owner.name}", tenant


def asks_of(
    served: Served,
    body: GenerationBody,
    prompts: Sequence[array[int]],
    max_tokens: int | None,
    exchange: Exchange,
    *,
    top_logprobs: int | None,
    has_end: bool,
    scripted: Sequence[ScriptedAnswer] = (),
) -> list[Ask]:
    """Return a request for every choice of every prompt. Raise ApiError for unsupported values.

    `has_end`: without a number of tokens, the answer goes on to its own end. `scripted`: the answer to each choice of a
    prompt, if a mock knows it beforehand.
    """
    hints = None
    if not body.is_plain:
        body.check()
        if body.priority and not exchange.owner.may_prioritize:
            raise ApiError(403, NO_PRIORITY, param="priority")
        hints = body.hints(may_prioritize=exchange.owner.may_prioritize)
    if body.asked_prompt_logprobs is not None:
        num_values = (1 + body.asked_prompt_logprobs) * body.num_choices * sum(map(len, prompts))
        exchange.budget.draw_values(num_values, "prompt_logprobs")
    salt, tenant = salt_of(served, body, exchange.owner)
    if max_tokens is not None and 0 <= max_tokens < (body.min_tokens or 0):
        raise ApiError(400, f"must be at most max_tokens, {max_tokens}, got {body.min_tokens}", param="min_tokens")
    limit = served.limits.max_model_len
    num_choices, num_asks = body.num_choices, len(prompts) * body.num_choices
    params_of: dict[tuple[int, int | None, int], SamplingParams] = {}
    """Shared by requests with the same: a body may ask for many tokens or texts as ends."""
    written = {id(each): served.written(each, exchange.budget) for each in _distinct(scripted)} if scripted else {}
    forced: dict[tuple[int, int], tuple[int, ...]] = {}
    asks: list[Ask] = []
    for tokens in prompts:
        if not tokens:
            raise ApiError(400, "a prompt must have at least one token", param="prompt")
        room = limit - len(tokens)
        if room < 1 or (max_tokens is not None and max_tokens > room):
            raise too_long(limit, len(tokens), max_tokens or 0, param="max_tokens" if room >= 1 else "prompt")
        for copy in range(num_choices):
            seed = body.seed if copy == 0 else (body.seed or 0) + copy
            most, own_end = max_tokens, None
            if most is None:
                most = room if has_end else min(DEFAULT_COMPLETION_TOKENS, room)
            natural = None
            answer = id(scripted[copy]) if scripted else 0
            if answer:
                natural = len(written[answer])
            elif may_end(served, body, most):
                natural = max(body.min_tokens or 0, natural_length(served, tokens, seed))
            if natural is not None and natural <= most:
                most, own_end = natural, (scripted[copy].finish_reason if scripted else "") or "stop"
            if most < 0 or (most == 0 and body.asked_prompt_logprobs is None):
                raise ApiError(400, f"must be at least 1, got {most}", param="max_tokens")
            key = (most, seed, answer)
            params = params_of.get(key)
            if params is None:
                params = body.params(most, top_logprobs=top_logprobs)
                if seed is not None and copy:
                    params = msgspec.structs.replace(params, seed=seed % 2**63)
                if answer:
                    if (answer, most) not in forced:
                        forced[answer, most] = written[answer][:most]
                    params = msgspec.structs.replace(params, forced_tokens=forced[answer, most])
                params_of[key] = params
            asks.append(
                Ask(
                    tokens=tokens,
                    params=params,
                    priority=-(body.priority or 0),  # of vLLM: the lower, the earlier
                    hints=hints,
                    salt=salt,
                    tenant=tenant,
                    request_id=exchange.request_id if num_asks == 1 else f"{exchange.request_id}-{len(asks)}",
                    own_end=own_end,
                    kv_transfer_params=body.kv_transfer_params,
                )
            )
    return asks


def completion_asks(
    served: Served, body: CompletionBody, exchange: Exchange, scripted: Sequence[ScriptedAnswer] = ()
) -> tuple[list[Ask], list[Echo]]:
    """Return the requests of a completion, and the echo of each choice if prompts are echoed."""
    adds = body.add_special_tokens is not False
    given = body.prompts()
    exchange.budget.draw_sequences(len(given), body.num_choices)
    prompts = [
        served.encode(prompt, exchange.budget, add_special_tokens=adds)
        if isinstance(prompt, str)
        else served.checked(prompt)
        for prompt in given
    ]
    asks = asks_of(
        served,
        body,
        prompts,
        body.max_tokens,
        exchange,
        top_logprobs=body.top_logprobs,
        has_end=False,
        scripted=scripted,
    )
    echoes = []
    if body.echo:
        texts = [prompt if isinstance(prompt, str) else served.text.decode(prompt) for prompt in given]
        exchange.budget.draw_made(0, body.num_choices * sum(map(len, texts)), "echo")
        pairs = zip(texts, prompts, strict=True)
        echoes = [Echo(text, tokens) for text, tokens in pairs for _ in range(body.num_choices)]
    return asks, echoes


def chat_asks(served: Served, body: ChatBody, exchange: Exchange, scripted: Sequence[ScriptedAnswer] = ()) -> list[Ask]:
    """Return the requests of a chat completion."""
    exchange.budget.draw_sequences(1, body.num_choices)
    prompt = served.conversation(messages_of(body.messages, served.media()), body.template_options())
    tokens = served.encode(prompt, exchange.budget, add_special_tokens=bool(body.add_special_tokens))
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return asks_of(
        served, body, [tokens], max_tokens, exchange, top_logprobs=body.asked_logprobs, has_end=True, scripted=scripted
    )


class Wanted(msgspec.Struct, frozen=True):
    """Constraints on the text of an answer, and the shape of its message; each None for plain text.

    `scripted`: the choices of a mock, if it knows them beforehand.
    """

    structured: StructuredOutputs | None = None
    shape: Shape | None = None
    keeps_special_tokens: bool = False
    scripted: Sequence[ScriptedAnswer] = ()

    def of(self, asks: Sequence[Ask]) -> list[Ask]:
        """Return `asks` changed accordingly."""
        if self is IN_WORDS:
            return list(asks)
        changes: dict[str, Any] = {}
        if self.structured is not None:
            changes["structured_outputs"] = self.structured
        if self.keeps_special_tokens:
            changes["skip_special_tokens"] = False
        if not changes:
            return list(asks)
        replace = msgspec.structs.replace
        params = {id(ask.params): ask.params for ask in asks}  # requests with equal parameters share one object
        changed = {key: replace(each, **changes) for key, each in params.items()}
        return [replace(ask, params=changed[id(ask.params)]) for ask in asks]


IN_WORDS = Wanted()


def wanted_completion(served: Served, body: CompletionBody, exchange: Exchange) -> Wanted:
    """Return the form of a completion. Raise ApiError if it is not available."""
    schema = schema_of_format(body.response_format)
    is_plain, answers = body.is_plain, served.answers
    structured = None if is_plain and schema is None else _structured(served, body, schema)
    asked = None if is_plain and not exchange.request.has_header(ANSWER_HEADER) else _asked(served, body, exchange)
    if answers is None:
        _check_model_thinks(body)
        return Wanted(structured)
    if asked is None and is_plain and schema is None and answers.has_words_alone:
        return IN_WORDS
    question = None
    if isinstance(body.prompt, str):
        question = Question(model=body.model or served.names[0], message=body.prompt, seed=body.seed or 0)
        asked = asked or answers.find(question)
    thinking = NO_LIMIT if is_plain else Thinking.of([body.thinking_token_budget], None, None)
    if asked is not None:
        asked = asked.limited(thinking, served.text)
    if question is not None:
        if asked is None and schema is not None:
            return _scripted(
                [answers.json(schema, question, copy, exchange.budget) for copy in range(body.num_choices)]
            )
    elif schema is not None:
        raise ApiError(400, "of a mock, it is of prompts that are one text", param="response_format")
    return IN_WORDS if asked is None else _scripted([asked] * body.num_choices)


def _check_model_thinks(body: GenerationBody) -> None:
    """Raise ApiError for a budget of a real model's reasoning, which is not bounded."""
    if body.thinking_token_budget is not None:
        raise ApiError(400, "is of mocks: the reasoning of a model is not bounded; omit it",
                       param="thinking_token_budget")  # fmt: skip


def _asked(served: Served, body: GenerationBody, exchange: Exchange) -> ScriptedAnswer | None:
    """Return the answer in the request's own `kvarts_answer` field or header, or None."""
    value, param = body.kvarts_answer, "kvarts_answer"
    header = exchange.request.header(ANSWER_HEADER)
    if value is None and header is not None:
        param = ANSWER_HEADER
        try:
            value = msgspec.json.decode(header.encode("latin-1"))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"is not JSON: {error}", param=param) from error
    if value is None:
        return None
    if served.answers is None:
        raise ApiError(400, "is of mocks: a model writes its own answers", param=param)
    return served.answers.asked(value, param)


def _scripted(scripted: Sequence[ScriptedAnswer]) -> Wanted:
    segments = {id(each): each.segments() for each in _distinct(scripted)}
    return Wanted(None, Segments([segments[id(each)] for each in scripted]), scripted=scripted)


def _distinct(scripted: Sequence[ScriptedAnswer]) -> Iterable[ScriptedAnswer]:
    """Return each object once: the answer that a request brings is the same for all of its choices."""
    return {id(each): each for each in scripted}.values()


def _structured(served: Served, body: GenerationBody, schema: dict[str, Any] | None) -> StructuredOutputs | None:
    structured = body.structured(schema)
    if structured is not None and served.answers is not None:
        if schema is None:
            raise ApiError(400, "a mock keeps to no grammar: omit it, or ask for response_format", param=_named(body))
        return None
    return structured


CONSTRAINTS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
               "response_format", "tools")  # fmt: skip
FORMATS = {"/v1/responses": "text.format", "/v1/messages": "output_config.format"}
"""The field of other APIs that is translated to `response_format`."""


def _named(body: GenerationBody) -> str:
    return next((name for name in CONSTRAINTS if getattr(body, name, None) is not None), "tools")


def _blamed(error: BaseException, body: GenerationBody, path: str) -> ApiError:
    """Return the error that the client receives. An error about a constraint names the field of the request."""
    told = api_error(error)
    if told.param != CONSTRAINTS[0] or body.structured_outputs is not None:
        return told
    field = _named(body)
    if field == "response_format":
        field = FORMATS.get(path, field)
    what = told.what.removeprefix(f"{told.param}: ")
    return ApiError(told.status, what, param=field, retry_after_s=told.retry_after_s)


def wanted_chat(served: Served, body: ChatBody, exchange: Exchange) -> Wanted:
    """Return the form of a chat completion. Raise ApiError if it is not available."""
    choice, tools = body.tool_choice, body.tools or []
    answers = served.answers
    if (
        answers is not None
        and answers.has_words_alone
        and not tools
        and choice in (None, "auto", "none")
        and body.response_format is None
        and body.thinking_budget_tokens is None
        and body.is_plain
        and not exchange.request.has_header(ANSWER_HEADER)
    ):
        return IN_WORDS
    functions = [tool.get("function") for tool in tools]
    known = [function for function in functions if isinstance(function, dict) and isinstance(function.get("name"), str)]
    if len(known) < len(tools):
        raise ApiError(400, "a tool is a function with a name", param="tools")
    for index, function in enumerate(known):
        if not isinstance(function.get("parameters"), dict | None):
            raise ApiError(400, "is a JSON schema, as an object", param=f"tools[{index}].function.parameters")
    is_free = choice in (None, "auto", "none")
    allowed = [] if choice == "none" else known
    if isinstance(choice, dict):
        named = choice.get("function") or {}
        name = named.get("name") if isinstance(named, dict) else None
        allowed = [function for function in known if function["name"] == name]
    elif not is_free and choice != "required":
        raise ApiError(400, f"must be none, auto, required or a function, got {brief(choice)}", param="tool_choice")
    if not is_free and not allowed:
        raise ApiError(400, "names no tool that is there", param="tool_choice")
    schema = schema_of_format(body.response_format)
    if not is_free:
        if body.structured(None) is not None:
            raise ApiError(400, "calls of tools have a form already", param=_named(body))
        schema = None  # a format applies to texts, and this answer is a call
    structured = _structured(served, body, schema)
    asked = _asked(served, body, exchange)
    if answers is not None:
        question = _question(served, body, known)
        asked = asked or answers.find(question)
        budgets = [body.thinking_token_budget, body.thinking_budget_tokens]
        thinking = Thinking.of(budgets, body.reasoning_effort, body.chat_template_kwargs)
        if asked is not None:
            asked = asked.limited(thinking, served.text)
        scripted = [
            one
            for copy in range(body.num_choices)
            if (one := asked or _drawn(answers, question, copy, schema, allowed, exchange.budget, is_free=is_free))
        ]
        return _scripted(scripted) if scripted else IN_WORDS
    _check_model_thinks(body)
    if is_free:
        if structured is not None or not allowed:
            return Wanted(structured)
        form = served.text.call_format
        return Wanted(None, ToolCallsInText(form, [one["name"] for one in allowed]), form.has_special_tokens)
    if isinstance(choice, dict):
        parameters = allowed[0].get("parameters") or {"type": "object"}
        return Wanted(StructuredOutputs(json=parameters), NamedCall(allowed[0]["name"]))
    calls = calls_schema(allowed, in_parallel=body.parallel_tool_calls is not False)
    return Wanted(StructuredOutputs(json=calls), RequiredCalls())


def _question(served: Served, body: ChatBody, tools: Sequence[dict[str, Any]]) -> Question:
    """Return the properties of a conversation that rules match. Replaces the content of messages by text."""
    body.messages = messages_of(body.messages, served.media())
    roles = Counter(message["role"] for message in body.messages)
    last = next((message["content"] for message in reversed(body.messages) if message["role"] == "user"), "")
    return Question(
        model=body.model or served.names[0],
        message=last,
        tools={tool["name"]: tool for tool in tools},
        turn=1 + roles["assistant"],
        num_results=roles["tool"],
        seed=body.seed or 0,
    )


def _drawn(
    answers: Answers,
    question: Question,
    copy: int,
    schema: dict[str, Any] | None,
    allowed: Sequence[dict[str, Any]],
    budget: Budget,
    *,
    is_free: bool,
) -> ScriptedAnswer | None:
    """Return a drawn tool call or JSON answer, or None for an answer in words."""
    names = [tool["name"] for tool in allowed]
    if not is_free:
        return answers.call(names, question, copy, budget)
    scripted = answers.call_or_text(names, question, copy, budget) if names else None
    return scripted if scripted is not None or schema is None else answers.json(schema, question, copy, budget)


async def checked(exchange: Exchange, served: Served, asks: Sequence[Ask]) -> None:
    """Compile the grammar of requests off the event loop, because it may take long. Raise ConfigError for a bad one."""
    check = served.host.check_params
    if check is not None and asks and asks[0].params.structured_outputs is not None:
        await exchange.workbench.run(exchange.owner.name, partial(check, asks[0].params))


class AnswerUnderWay:
    """The answer to one HTTP request, while it is made."""

    def __init__(self, served: Served, exchange: Exchange, asks: Sequence[Ask], session: str | None) -> None:
        self._served = served
        self._request = exchange.request
        self._in_session: asyncio.Task[None] | None = None
        if session is None or served.sessions is None:
            self.answer, self.choices = served.start(asks, exchange.owner, started_s=exchange.started_s)
        else:
            if len(asks) > 1:
                raise ApiError(400, "in a session there is one prompt, and one choice", param="n")
            if asks[0].hints is not None:
                raise ApiError(400, "in a session its own retention and ttl decide: omit hints", param="session_id")
            self.answer, self.choices = served.start(
                asks,
                exchange.owner,
                started_s=exchange.started_s,
                begin=partial(self._begin_in_session, served.sessions, exchange.owner, session),
            )
        exchange.request.when_gone(self._gone)

    def _begin_in_session(self, sessions: InSessions, owner: Owner, name: str, ask: Ask, choice: Choice) -> None:
        self._in_session = sessions.begin(owner.name, name, ask, choice)

    def _gone(self) -> None:
        self.answer.pieces.append(ClientGone())
        self.answer.wake()

    async def end(self) -> None:
        """End the answer, whether it was written or abandoned. Requests under way end, which frees their pages."""
        self._served.finish(self.choices)
        self.answer.close()
        if self._in_session is not None:
            self._in_session.cancel()
            with suppress(asyncio.CancelledError):
                await self._in_session
        await self._request.settle()


def begin(served: Served, exchange: Exchange, asks: Sequence[Ask], session_id: str | None) -> AnswerUnderWay:
    """Begin requests, in the session that they name, if any. Raise ApiError if they are not admitted.

    A session header is a hint, which load generators and routers add to any request: a request that a session cannot
    answer is then answered without one. The body's field is binding: such a request is refused.
    """
    if session_id and served.why_no_sessions:
        raise ApiError(400, served.why_no_sessions, param="session_id")
    name = session_id
    if not name and len(asks) == 1 and asks[0].hints is None and exchange.request.has_header(*SESSION_HEADERS):
        name = next((told for header in SESSION_HEADERS if (told := exchange.request.header(header))), None)
    if name is not None and len(name) > MAX_SESSION_CHARS:
        raise ApiError(400, f"the name of a session has at most {MAX_SESSION_CHARS} characters", param="session_id")
    return AnswerUnderWay(served, exchange, asks, name or None)


class _Read(NamedTuple):
    """A parsed body."""

    served: Served
    body: GenerationBody
    asks: list[Ask]
    form: Form
    scripted: Sequence[ScriptedAnswer] = ()
    """The choices of a mock that knows them beforehand."""


MakeForm = Callable[[Served, ChatBody, Sequence[Ask], Shape | None], Form]


class Generating:
    """Answers completions and chat completions."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def media_of(self, model: str | None) -> Media | None:
        """Return the reader of images and audio for one request to `model`, as Served.media does."""
        return self._models.of(model).media()

    async def completion(self, exchange: Exchange) -> None:
        """Answer POST /v1/completions."""

        def read() -> _Read:
            body = exchange.take_body(CompletionBody)
            served = self._models.of(body.model)
            wanted = wanted_completion(served, body, exchange)
            asks, echoes = completion_asks(served, body, exchange, wanted.scripted)
            asks = wanted.of(asks)
            form = CompletionForm(
                body.model or served.names[0],
                served.text,
                echoes,
                prompts=[ask.tokens for ask in asks] if body.prompt_logprobs is not None else (),
                has_logprobs=body.top_logprobs is not None,
                ids_of=[ask.tokens for ask in asks] if body.return_token_ids else (),
                skips_special_tokens=body.skip_special_tokens is not False,
                names_ids=bool(body.return_tokens_as_token_ids),
            )
            body.prompt = None
            return _Read(served, body, asks, form, wanted.scripted)

        await self._answer(exchange, await exchange.apart(read))

    async def chat(self, exchange: Exchange) -> None:
        """Answer POST /v1/chat/completions."""
        is_short = len(exchange.payload) <= INLINE_BYTES
        read_before = exchange.take_body(ChatBody) if is_short else None

        def read() -> tuple[ChatBody, MakeForm]:
            body = exchange.take_body(ChatBody) if read_before is None else read_before
            return body, _chat_form

        # Compiling a short schema may take much longer than its bytes suggest.
        num_bytes = INLINE_BYTES if read_before is not None and read_before.has_schema else 0
        await self.converse(exchange, read, num_bytes=num_bytes)

    async def converse(
        self, exchange: Exchange, read: Callable[[], tuple[ChatBody, MakeForm]], *, num_bytes: int = 0
    ) -> Form:
        """Answer a conversation, and return the form of the answer.

        `read` returns the request as a chat, and the constructor of its form. `num_bytes`: see Exchange.apart.
        """

        def read_all() -> _Read:
            body, make = read()
            served = self._models.of(body.model)
            of_parts = body.hints_of_parts()  # before the texts of parts are joined
            wanted = wanted_chat(served, body, exchange)
            asks = wanted.of(chat_asks(served, body, exchange, wanted.scripted))
            if of_parts is not None:
                asks = [msgspec.structs.replace(ask, hints_of_parts=of_parts) for ask in asks]
            form = make(served, body, asks, wanted.shape)
            body.messages = body.tools = None
            return _Read(served, body, asks, form, wanted.scripted)

        return await self._answer(exchange, await exchange.apart(read_all, num_bytes=num_bytes))

    async def _answer(self, exchange: Exchange, read: _Read) -> Form:
        served, body, form = read.served, read.body, read.form
        if read.scripted:
            _fail_as(read.scripted[0], exchange, served)
        blamed = partial(_blamed, body=body, path=exchange.request.path)
        try:
            await checked(exchange, served, read.asks)
        except KvartsError as error:
            raise blamed(error) from None
        under_way = begin(served, exchange, read.asks, body.session_id)
        answer, choices = under_way.answer, under_way.choices
        served.meter.num_choices.add(body.num_choices)
        spans: list[tuple[int, int]] = []
        if read.scripted:
            span_of = {id(each): served.reasoning_span(each) for each in _distinct(read.scripted)}
            spans = [span_of[id(each)] for each in read.scripted]
        usage = _Usage(choices, [len(ask.tokens) for ask in read.asks], body.num_choices, read.scripted, spans)
        read.asks.clear()  # the engine has the tokens
        try:
            if body.stream:
                stream = _Stream(exchange, form, choices, body.stream_options or StreamOptions(), usage, blamed)
                answer.is_read = True
                await stream.write(answer)
            else:
                wholes = [Whole() for _ in choices]
                await _collect(answer, wholes)
                exchange.failure.before_answer()
                extra = {"kv_transfer_params": served.kv_transfer_params(body.kv_transfer_params, choices)}
                num_bytes = sum([whole.num_bytes for whole in wholes])
                if num_bytes <= INLINE_BYTES:
                    payload = form.whole(wholes, usage.of_all, extra)
                else:
                    payload = await exchange.work(lambda: form.whole(wholes, usage.of_all, extra), num_bytes=num_bytes)
                if exchange.failure is NO_FAILURE:
                    await exchange.response.whole(payload)
                else:
                    await exchange.failure.write_whole(exchange.response, payload)
        except RequestFailedError as error:
            raise blamed(error) from None
        finally:
            await under_way.end()
        return form


def _chat_form(served: Served, body: ChatBody, asks: Sequence[Ask], shape: Shape | None) -> Form:
    return ChatForm(
        body.model or served.names[0],
        served.text,
        shape=shape,
        prompt=asks[0].tokens if body.prompt_logprobs is not None else (),
        ids_of=asks[0].tokens if body.return_token_ids else (),
        names_ids=bool(body.return_tokens_as_token_ids),
    )


def _fail_as(scripted: ScriptedAnswer, exchange: Exchange, served: Served) -> None:
    """Apply the failure and the latency of a scripted answer. Raise ApiError or Cut if the request fails at once."""
    if scripted.fail or scripted.latency_s:
        exchange.failure = scripted.failure
        if exchange.failure.kills_engine:
            served.kill()
        exchange.failure.before_request()


async def _collect(answer: Answer, wholes: list[Whole]) -> None:
    """Collect all pieces until every choice has ended."""
    num_open = len(wholes)
    num_bytes = 0
    while num_open:
        for choice, text, _, finish_reason, logprobs in await answer.take():
            whole = wholes[choice.number]
            whole.prompt_logprobs, whole.completion = choice.prompt_logprobs, choice.completion
            whole.add(text)
            num_bytes += len(text)
            if logprobs:
                whole.logprobs += logprobs
                num_bytes += size_of(logprobs)
            if finish_reason is not None:
                whole.finish_reason = _told_reason(finish_reason)
                num_open -= 1
        answer.keep(num_bytes)


class _Usage:
    """Token counts of an answer. `copies`: choices of each prompt. `scripted`: the choices, the first of which may
    override some counts. `spans`: the first token of reasoning in each, and the one after the last.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        prompt_lengths: Sequence[int],
        copies: int,
        scripted: Sequence[ScriptedAnswer],
        spans: Sequence[tuple[int, int]],
    ) -> None:
        self._choices = choices
        self._prompt_lengths = prompt_lengths
        self._copies = copies
        self._scripted = scripted[0].usage if scripted and scripted[0].usage != ScriptedUsage() else None
        self._spans = spans

    @property
    def of_all(self) -> dict[str, Any]:
        """The usage of all choices, once they have ended."""
        lengths = [0 if choice.completion is None else len(choice.completion.tokens) for choice in self._choices]
        # The cached tokens of each prompt are counted once, although each of its copies may have hit more.
        cached = sum([choice.cached_tokens for choice in self._choices[:: self._copies]])
        usage = usage_of(sum(self._prompt_lengths[:: self._copies]), sum(lengths), cached)
        self._add_reasoning(usage, lengths)
        return self._overridden(usage)

    def of_one(self, choice: Choice, num_tokens: int) -> dict[str, Any]:
        """Return the usage of a choice under way."""
        usage = usage_of(self._prompt_lengths[choice.number], num_tokens, choice.cached_tokens)
        self._add_reasoning(usage, [num_tokens], choice.number)
        return usage

    def _add_reasoning(self, usage: dict[str, Any], lengths: Sequence[int], first: int = 0) -> None:
        """Add the tokens of reasoning of choices from `first` on, which have so many tokens, if there is reasoning."""
        spans = self._spans
        if spans and any(end for _, end in spans):
            places = [spans[number % self._copies] for number in range(first, first + len(lengths))]
            counts = [max(0, min(length, end) - start) for length, (start, end) in zip(lengths, places, strict=True)]
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(counts)}

    def _overridden(self, usage: dict[str, Any]) -> dict[str, Any]:
        scripted = self._scripted
        if scripted is None:
            return usage
        prompt = usage["prompt_tokens"] if scripted.prompt_tokens is None else scripted.prompt_tokens
        completion = usage["completion_tokens"] if scripted.completion_tokens is None else scripted.completion_tokens
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        details = usage.get("completion_tokens_details")
        usage = usage_of(prompt, completion, cached if scripted.cached_tokens is None else scripted.cached_tokens)
        if details is not None:
            usage["completion_tokens_details"] = details
        if scripted.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": scripted.reasoning_tokens}
        return usage


def _told_reason(finish_reason: str) -> str:
    return "abort" if finish_reason == "cancelled" else finish_reason


class _Stream:
    """Writes an answer as server-sent events. `told`: converts an error to the one that the client receives."""

    def __init__(
        self,
        exchange: Exchange,
        form: Form,
        choices: Sequence[Choice],
        options: StreamOptions,
        usage: _Usage,
        told: Callable[[BaseException], ApiError],
    ) -> None:
        self._exchange = exchange
        self._told = told
        self._form = form
        self._choices = choices
        self._usage = usage
        self._tells_usage = bool(options.include_usage)
        self._tells_usage_always = bool(options.include_usage and options.continuous_usage_stats)
        self._begun: set[int] = set()
        self._num_ids: Counter[int] = Counter()
        """Number of token ids sent so far by choice, if ids are sent."""
        self._num_open = len(choices)

    async def write(self, answer: Answer) -> None:
        """Write the whole stream. An error after the first byte is sent as an event."""
        response, failure, take = self._exchange.response, self._exchange.failure, answer.take
        pieces = await take()  # a refusal is raised here, before the first byte
        await failure.stall()
        await response.begin_stream()
        if response.direct is not None and not failure.has_any:
            answer.write_now = partial(self._write_now, answer, response.direct)
        try:
            while True:
                parts = self._parts(pieces)
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
            await response.more(self._form.failed(self._told(error)))
        else:
            end = self._form.end(self._usage.of_all, self._choices, tells_usage=self._tells_usage)
            await failure.write(response, [end])
        finally:
            answer.write_now = None  # it holds the answer
        await response.end_stream()

    def _write_now(self, answer: Answer, direct: Direct) -> bool:
        """Write pieces as they arrive, because waking the task that waits for them is most of the cost of a token.

        Return whether all were written. Errors and last pieces are left to the task.
        """
        if not direct.is_ready:
            return False
        parts: list[bytes] = []
        pieces = answer.pieces
        answer.num_bytes = 0
        try:
            while pieces:
                piece = pieces[0]
                if isinstance(piece, BaseException) or piece[3] is not None:
                    return False
                pieces.popleft()
                self._put(piece, parts)
        except Exception as error:
            pieces.appendleft(error)
            return False
        finally:
            if payload := b"".join(parts):
                direct.write(payload)
        return True

    def _parts(self, pieces: Sequence[Piece]) -> list[bytes]:
        parts: list[bytes] = []
        for piece in pieces:
            self._put(piece, parts)
        return parts

    def _put(self, piece: Piece, parts: list[bytes]) -> None:
        """Add the chunks of a piece."""
        choice, text, num_tokens, finish_reason, logprobs = piece
        number = choice.number
        if number not in self._begun:
            self._begun.add(number)
            parts.append(self._form.first(number, choice.prompt_logprobs))
        more = b""
        if self._form.tells_ids:
            more = b',"token_ids":' + msgspec.json.encode(choice.tokens[self._num_ids[number] : num_tokens])
            self._num_ids[number] = num_tokens
        if finish_reason is not None:
            self._num_open -= 1
            finish_reason = _told_reason(finish_reason)
            if self._exchange.failure.drops_finish_reason:
                finish_reason = None
            elif choice.completion is not None:
                more += b',"stop_reason":' + msgspec.json.encode(choice.completion.stop_reason)
        usage = None
        if self._tells_usage_always:
            usage = self._usage.of_one(choice, num_tokens)
        parts.append(self._form.piece(number, text, finish_reason, logprobs, usage, more))

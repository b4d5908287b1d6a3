"""The way of a request in any dialect: from a body to requests, and from pieces to an answer."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from kvarts.base.errors import KvartsError
from kvarts.base.tenants import PARTED, Owner
from kvarts.core.hints import Hints
from kvarts.core.keys import salt_of_adapter
from kvarts.core.sampling import SamplingParams
from kvarts.doors.openai.answer import Answer, Choice, Piece, size_of
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
from kvarts.doors.openai.forms import Form, Whole, WholeForm, usage_of
from kvarts.doors.openai.http import ClientGone, HttpRequest, HttpResponse
from kvarts.doors.openai.kv_hints import NO_PRIORITY
from kvarts.doors.openai.scripted import ScriptedAnswer, ScriptedUsage
from kvarts.doors.openai.served import Ask, InSessions, Models, Served
from kvarts.doors.openai.wanted import IN_WORDS, Wanted, constraint_of, distinct, wanted_of
from kvarts.run.llm_engine import RequestFailedError
from kvarts.run.mock import natural_length

__all__ = ["Dialect", "Exchange", "Generating", "Reading", "asks_of"]

DEFAULT_COMPLETION_TOKENS = 16
"""The default of OpenAI's API for completions; a chat generates to its end."""

T = TypeVar("T")
SESSION_HEADERS = ("x-session-id", "x-session-affinity", "x-dynamo-session-id")
MAX_SESSION_CHARS = 256


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
    kept: Any = None
    """What its dialect keeps until the answer was sent."""
    warnings: list[str] = []
    """What the client should know of its answer: in the header x-kvarts-warning, and in whole answers in a field."""

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


def salt_of(served: Served, body: GenerationBody, owner: Owner) -> tuple[str | None, str | None]:
    """Return the salts that separate the KV of a request: from all other requests, and among those of its owner."""
    adapter = served.adapter_of(body.model)
    tenant = body.cache_salt
    if adapter is not None:
        tenant = salt_of_adapter(adapter, tenant)
    if not served.sets_owners_apart:
        return tenant, tenant
    return f"{tenant or ''}{PARTED}{owner.name}", tenant


class Reading(NamedTuple):
    """A request that was read. `body`: as a completion or a chat. `asks`: one for every choice of every prompt."""

    exchange: Exchange
    served: Served
    body: GenerationBody
    wanted: Wanted
    asks: list[Ask]


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """An API over the engine: what it reads, and what it writes. Everything between is the same for all.

    `body`: the type of its bodies. `read` returns one as a completion or a chat, and `form` the format of its answer;
    both may raise ApiError. `params`: fields in errors, by those of completions and chats. `schema_param`: the field
    that an error about a JSON schema names. `error_body`: the format of its errors. `samples`: it generates, rather
    than only computing prompts, so that sessions and counts of choices concern it. `sent`: called after an answer.
    `about`: what a request to it does.
    """

    path: str
    about: str
    body: type[Any]
    read: Callable[[Any, Exchange, Models], GenerationBody]
    form: Callable[[Any, Reading], WholeForm]
    params: Mapping[str, str] = {}
    schema_param: str = "response_format"
    error_body: Callable[[ApiError], bytes] = attrgetter("body")
    samples: bool = True
    sent: Callable[[Exchange, Any], object] = lambda exchange, form: None


def _prompts_of(served: Served, body: GenerationBody, exchange: Exchange) -> list[array[int]]:
    """Return the tokens of each prompt. Raise ApiError for invalid ones."""
    budget = exchange.budget
    if isinstance(body, ChatBody):
        budget.draw_sequences(1, body.num_choices)
        options = {**body.template_options(), "warn": exchange.warnings.append}
        text = served.conversation(messages_of(body.messages, served.media()), options)
        return [served.encode(text, budget, add_special_tokens=bool(body.add_special_tokens))]
    assert isinstance(body, CompletionBody)
    given, adds = body.prompts(), body.add_special_tokens is not False
    budget.draw_sequences(len(given), body.num_choices)
    return [
        served.encode(each, budget, add_special_tokens=adds) if isinstance(each, str) else served.checked(each)
        for each in given
    ]


def asks_of(
    served: Served,
    body: GenerationBody,
    exchange: Exchange,
    wanted: Wanted = IN_WORDS,
    *,
    hints_of_parts: Hints | None = None,
) -> list[Ask]:
    """Return a request for every choice of every prompt. Raise ApiError for unsupported values."""
    prompts = _prompts_of(served, body, exchange)
    max_tokens, top_logprobs, scripted = body.asked_max_tokens, body.asked_logprobs, wanted.scripted
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
    written = {id(each): served.written(each, exchange.budget) for each in distinct(scripted)} if scripted else {}
    forced: dict[tuple[int, int], tuple[int, ...]] = {}
    changes = wanted.sampling
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
                most = room if body.HAS_END else min(DEFAULT_COMPLETION_TOKENS, room)
            natural = None
            answer = id(scripted[copy]) if scripted else 0
            if answer:
                natural = len(written[answer])
            elif may_end(served, body, most):
                natural = max(body.min_tokens or 0, natural_length(served.limits.default_tokens or 0, tokens, seed))
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
                if changes:
                    params = msgspec.structs.replace(params, **changes)
                params_of[key] = params
            asks.append(
                Ask(
                    tokens=tokens,
                    params=params,
                    priority=served.priority_of(body.priority),
                    hints=hints,
                    hints_of_parts=hints_of_parts,
                    salt=salt,
                    tenant=tenant,
                    request_id=exchange.request_id if num_asks == 1 else f"{exchange.request_id}-{len(asks)}",
                    own_end=own_end,
                    kv_transfer_params=body.kv_transfer_params,
                )
            )
    return asks


def _blamed(error: BaseException, body: GenerationBody, dialect: Dialect) -> ApiError:
    """Return the error that the client receives. An error about a constraint names the field of the request."""
    told = api_error(error)
    if told.param != "structured_outputs" or body.structured_outputs is not None:
        return told
    field = constraint_of(body)
    if field == "response_format":
        field = dialect.schema_param
    what = told.what.removeprefix(f"{told.param}: ")
    return ApiError(told.status, what, param=field, retry_after_s=told.retry_after_s)


async def _check(exchange: Exchange, served: Served, asks: Sequence[Ask]) -> None:
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
        self._request.when_gone(None)


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


class Generating:
    """Answers the requests of every dialect."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def answer(self, dialect: Dialect, exchange: Exchange) -> None:
        """Answer a request."""
        is_short = len(exchange.payload) <= INLINE_BYTES
        try:
            sent = exchange.take_body(dialect.body) if is_short else None
            num_bytes = INLINE_BYTES if sent is not None and sent.is_costly else 0
            reading, form = await exchange.apart(partial(self._read, dialect, exchange, sent), num_bytes=num_bytes)
            del sent
            await self._answer(dialect, reading, form)
        except ApiError as error:
            error.param = dialect.params.get(error.param or "", error.param)
            raise
        dialect.sent(exchange, form)

    def _read(self, dialect: Dialect, exchange: Exchange, sent: Any) -> tuple[Reading, WholeForm]:
        """Return what a body asks for, and the format of the answer. `sent`: the body, if it was parsed."""
        sent = exchange.take_body(dialect.body) if sent is None else sent
        body = dialect.read(sent, exchange, self._models)
        served = self._models.of(body.model)
        of_parts = body.hints_of_parts()  # before the texts of parts are joined
        wanted = wanted_of(served, body, exchange.request, exchange.budget) if dialect.samples else IN_WORDS
        asks = asks_of(served, body, exchange, wanted, hints_of_parts=of_parts)
        reading = Reading(exchange, served, body, wanted, asks)
        form = dialect.form(sent, reading)
        body.drop_prompt()
        return reading, form

    async def _answer(self, dialect: Dialect, reading: Reading, form: WholeForm) -> None:
        exchange, served, body, wanted, asks = reading
        exchange.response.extra_headers += [(b"x-kvarts-warning", each.encode()) for each in exchange.warnings]
        if wanted.scripted:
            _fail_as(wanted.scripted[0], exchange, served)
        blamed = partial(_blamed, body=body, dialect=dialect)
        try:
            await _check(exchange, served, asks)
        except KvartsError as error:
            raise blamed(error) from None
        if dialect.samples:
            under_way = begin(served, exchange, asks, body.session_id)
        else:
            under_way = AnswerUnderWay(served, exchange, asks, None)
        answer, choices = under_way.answer, under_way.choices
        usage = Usage(served, choices, [len(ask.tokens) for ask in asks], body.num_choices, wanted.scripted)
        asks.clear()  # the engine has the tokens
        try:
            if body.stream:
                streamed = cast("Form", form)  # bodies of dialects without streams ask for none
                stream = _Stream(exchange, streamed, choices, body.stream_options or StreamOptions(), usage, blamed)
                answer.is_read = True
                await stream.write(answer)
                return
            wholes = [Whole() for _ in choices]
            await _collect(answer, wholes)
            exchange.failure.before_answer()
            extra: dict[str, Any] = {"kv_transfer_params": served.kv_transfer_params(body.kv_transfer_params, choices)}
            if exchange.warnings:
                extra["warnings"] = exchange.warnings
            num_bytes = form.num_bytes + sum([whole.num_bytes for whole in wholes])
            payload = await exchange.work(lambda: form.whole(wholes, usage.of_all, extra), num_bytes=num_bytes)
            if exchange.failure is NO_FAILURE:
                await exchange.response.whole(payload)
            else:
                await exchange.failure.write_whole(exchange.response, payload)
        except RequestFailedError as error:
            raise blamed(error) from None
        finally:
            await under_way.end()


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


class Usage:
    """Token counts of an answer. `copies`: choices of each prompt. `scripted`: the choices, the first of which may
    override some counts.
    """

    def __init__(
        self,
        served: Served,
        choices: Sequence[Choice],
        prompt_lengths: Sequence[int],
        copies: int,
        scripted: Sequence[ScriptedAnswer],
    ) -> None:
        self._choices = choices
        self._prompt_lengths = prompt_lengths
        self._copies = copies
        self._scripted = scripted[0].usage if scripted and scripted[0].usage != ScriptedUsage() else None
        span_of = {id(each): served.reasoning_span(each) for each in distinct(scripted)} if scripted else {}
        self._spans = [span_of[id(each)] for each in scripted]
        """The first token of reasoning in each scripted choice, and the one after the last."""

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
        usage: Usage,
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
        if not failure.has_any:
            answer.write_now = partial(self._write_now, answer, response)
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

    def _write_now(self, answer: Answer, response: HttpResponse) -> bool:
        """Write pieces as they arrive, because waking the task that waits for them is most of the cost of a token.

        Return whether all were written. Errors and last pieces are left to the task.
        """
        if not response.is_ready:
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
                response.write(payload)
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

"""Requests that name a session: a conversation whose history and KV are kept between turns.

A client sends its whole conversation, as to any other server. The part that the session already has is kept, history
beyond that is rolled back, and the rest is appended. A client that edits its past is therefore answered correctly, and
one that only continues pays only for the new part.

A server over HTTP is opened beside a session runtime, with its model and sessions, or with a runtime of its own.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from kvarts.base.clock import Clock, PacedClock
from kvarts.base.errors import ConfigError, KvartsError
from kvarts.base.tenants import PARTED
from kvarts.core.content import Content
from kvarts.core.request import Request
from kvarts.core.sampling import Logprobs
from kvarts.cost.roofline import RooflineCost
from kvarts.doors.openai.answer import Choice
from kvarts.doors.openai.errors import ApiError
from kvarts.doors.openai.meter import Meter
from kvarts.doors.openai.opening import DEFAULT_TOKENS, Door, Opened, mock_model, open_app
from kvarts.doors.openai.prompts import HubText, TextModel, WordText
from kvarts.doors.openai.served import Ask, CountsOfSessions, Served
from kvarts.run.llm_engine import EngineDeadError, Gone
from kvarts.run.sessions.opening import mock_host, sessions_on
from kvarts.run.sessions.sessions import Sessions
from kvarts.run.sessions.table import memory_of
from kvarts.run.sessions.values import (
    Done,
    SessionBusyError,
    SessionNotReadyError,
    SessionsConfig,
    SessionsExhaustedError,
    StopReason,
    Token,
    UnknownSessionError,
)
from kvarts.run.text import Generation

__all__ = ["SessionsDoor", "open_beside", "open_own", "word_mock"]

STATUSES: dict[type[KvartsError], int] = {
    SessionsExhaustedError: 429,
    SessionBusyError: 409,
    UnknownSessionError: 429,
}
REASONS = {
    StopReason.MAX_TOKENS: "length",
    StopReason.EOS: "stop",
    StopReason.CANCELLED: "cancelled",
    StopReason.TRUNCATED: "length",
}


MAX_ATTEMPTS = 4
"""Attempts to create a session that is evicted for another before its first token; after that, there is no room."""

MAX_NAMES = 4096
"""Names whose session ids are remembered; others are looked up again."""


class SessionsDoor:
    """The sessions of one served model, by the names that clients use. For one event loop.

    A name is the id of a session, as in gRPC, or its label. An unknown session is created, with the default settings of
    sessions and the name as its label. A request with a salt belongs to a separate owner: tenants do not share
    sessions. `is_own`: the store is used only here, so it is shut down with this object.
    """

    def __init__(self, store: Sessions, served: Served, *, is_own: bool = False) -> None:
        self._store = store
        self._served = served
        self._is_own = is_own
        self._ids: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._turns: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    def begin(self, owner: str, name: str, ask: Ask, choice: Choice) -> asyncio.Task[None]:
        """Run `ask` in session `name` and stream the answer to `choice`. Cancelling the task keeps the session."""
        if ask.tenant is not None:
            owner = f"{owner}{PARTED}{ask.tenant}"
        page_size = self._served.host.config.page_size
        request = Request(
            0,
            Content.from_tokens(ask.tokens[-1:], page_size=page_size, owner=0),
            num_prompt_tokens=len(ask.tokens),
            max_tokens=max(1, ask.params.max_tokens),
        )
        text = self._served.text
        own_ends = () if ask.params.ignore_eos else text.end_ids
        generation = Generation(request, ask.params, text.generation_tokenizer, own_ends=own_ends)
        choice.request = request
        task = asyncio.ensure_future(self._answer(owner, name, ask, choice, generation))

        def ended(_: object) -> None:
            """End the choice if the task did not: its client disconnected, or it was ended here or over gRPC.

            A task may be cancelled before it has begun.
            """
            if not choice.is_over:
                generation.finish("cancelled")
                with suppress(Gone):
                    choice.end(generation.completion())

        task.add_done_callback(ended)
        choice.in_session = task.cancel
        return task

    def counts(self) -> CountsOfSessions:
        """Return the counts of the sessions now."""
        return msgspec.convert(self._store.counts(), CountsOfSessions, from_attributes=True)

    async def close(self) -> None:
        """End requests under way and write durable state, if this object owns the store."""
        if self._is_own:
            with suppress(EngineDeadError):
                await self._store.shut_down()

    async def _answer(self, owner: str, name: str, ask: Ask, choice: Choice, generation: Generation) -> None:
        turn = self._turns.setdefault((owner, name), asyncio.Lock())
        try:
            async with turn:  # in order of arrival
                for attempt in range(MAX_ATTEMPTS):
                    session_id, num_common = await self._brought_to(owner, name, ask.tokens)
                    try:
                        await self._generate(owner, session_id, ask, choice, generation, num_common)
                        break
                    except UnknownSessionError:
                        # It was idle for a moment, and was evicted for another session; its tokens so far are kept.
                        if generation.tokens or attempt + 1 == MAX_ATTEMPTS:
                            raise
        except KvartsError as error:
            choice.fail(_told(error))
        except Exception as error:
            choice.fail(error)

    async def _brought_to(self, owner: str, name: str, tokens: Sequence[int]) -> tuple[str, int]:
        """Make the session's history a prefix of `tokens`; return the session's id, and the length of the history."""
        session_id = await self._found(owner, name)
        if session_id is not None:
            try:
                num_common, length = await self._store.num_common(owner, session_id, tokens)
                if num_common < length:
                    await self._store.rollback(owner, session_id, num_common, queue=True)
            except UnknownSessionError:
                pass  # it was closed meanwhile
            except SessionNotReadyError:
                # KV that the changed conversation would need was dropped, so the session begins again.
                await self._store.close(owner, session_id)
            else:
                return session_id, num_common
        settings = msgspec.structs.replace(self._store.defaults, label=name)
        session_id = await self._store.create(owner, settings)
        self._remember(owner, name, session_id)
        return session_id, 0

    async def _found(self, owner: str, name: str) -> str | None:
        session_id = self._ids.get((owner, name))
        if session_id is None:
            session_id = await self._store.named(owner, name)
        if session_id is not None:
            self._remember(owner, name, session_id)
        return session_id

    def _remember(self, owner: str, name: str, session_id: str) -> None:
        self._ids[owner, name] = session_id
        self._ids.move_to_end((owner, name))
        if len(self._ids) > MAX_NAMES:
            self._ids.popitem(last=False)

    async def _generate(
        self, owner: str, session_id: str, ask: Ask, choice: Choice, generation: Generation, num_common: int
    ) -> None:
        under_way: list[Request] = []
        updates = self._store.generate(
            owner,
            session_id,
            ask.params,
            queue=True,
            tokens=list(ask.tokens[num_common:]),
            expected_length=num_common,
            priority=ask.priority,
            begun=under_way.append,
        )
        told = Logprobs()
        choice.logprobs = lambda: told
        held: int | None = None  # a token that may be an end, whose text is not part of the answer
        async with aclosing(updates):
            async for update in updates:
                if under_way:
                    _copy(under_way[0], generation.request)
                if isinstance(update, Token):
                    if update.logprob is not None:
                        told.values.append(update.logprob)
                        told.top.append(update.top_logprobs)
                    if held is not None and generation.take(held):
                        break
                    held = update.token_id
                    if not self._may_end(held, ask):
                        token, held = held, None
                        if generation.take(token):
                            break
                    choice.update(generation)
                elif isinstance(update, Done):
                    if held is not None:
                        generation.take(held, is_end=update.stop_reason is StopReason.EOS)
                    generation.finish(REASONS[update.stop_reason])
        choice.end(generation.completion(told.until(len(generation.tokens))))

    def _may_end(self, token: int, ask: Ask) -> bool:
        return token in ask.params.stop_token_ids or token in self._served.text.end_ids


def _copy(under_way: Request, told: Request) -> None:
    """Copy the hits and the times of a request in the engine."""
    # a session with reserved pages resumes from its own position
    told.cached_tokens = under_way.cached_tokens if under_way.own is None else under_way.start
    told.cached_tokens_below = under_way.cached_tokens_below
    told.arrival_ns = under_way.arrival_ns
    told.first_admitted_ns = under_way.first_admitted_ns
    told.first_token_ns = under_way.first_token_ns
    told.last_token_ns = under_way.last_token_ns


def _told(error: KvartsError) -> KvartsError | ApiError:
    status = next((STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES), None)
    if status is None:
        return error
    return ApiError(status, str(error), param="session_id", retry_after_s=1.0 if status == 429 else None)


def word_mock(config: Any, *, clock: Clock | None, speedup: float) -> Any:
    """Return a model for `open_sessions` that writes words; the bytes per token are those of the sessions' mock."""
    of_mock = mock_host(config)
    cost = RooflineCost(llm="llama-3.1-8b", device="h100-80gb")
    clock = PacedClock(speedup=speedup) if clock is None else clock
    return mock_model(config, cost, token_bytes=of_mock.token_bytes, clock=clock)


def open_beside(sessions: Sessions, door: Door, *, model: str) -> Opened:
    """Return a server of the model of `sessions`; requests can name a session, and continue it."""
    host = sessions.host
    is_mock = host.tokenizer is None and host.fingerprint().startswith("mock")
    most = host.core.scheduler.most_tokens(min(door.limits.max_model_len, host.max_positions or 1 << 62))
    limits = msgspec.structs.replace(
        door.limits,
        max_model_len=most,
        default_tokens=DEFAULT_TOKENS if is_mock and door.limits.default_tokens is None else door.limits.default_tokens,
    )
    meter = Meter(max_model_len=limits.max_model_len)
    host.core.log.add_reader(meter)
    text: TextModel = WordText() if is_mock else HubText(host.tokenizer, host.eos_ids)
    served = Served(
        host, text, door.names or (model,), door, limits=limits, meter=meter, facts={"mock": is_mock, "sessions": True}
    )
    served.sessions = SessionsDoor(sessions, served)
    return open_app([served], door)


def open_own(
    served: Served,
    config: SessionsConfig,
    *,
    shares: Mapping[str, float] | None = None,
    state_dir: Path | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> SessionsDoor:
    """Return sessions of a served model, in memory or in `state_dir`. Raise ConfigError.

    Sessions that reserve pages get at most half of the pages, unless `config` sets a limit, so that requests without a
    session can run as well.
    """
    host = served.host
    if host.why_no_sessions:
        raise ConfigError(f"there are none here: {host.why_no_sessions}", field="sessions", hint="Leave them out.")
    if config.memory_bytes is None and config.max_pages is None:
        config = msgspec.structs.replace(config, max_pages=max(1, memory_of(host).total // 2))
    return SessionsDoor(sessions_on(host, config, shares=shares, state_dir=state_dir, say=say), served, is_own=True)

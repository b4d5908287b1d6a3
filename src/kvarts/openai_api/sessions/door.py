"""Requests that name a session: a conversation of which the history and the KV stay here between turns.

A client sends its whole conversation, as to any other server. What the session has of it already is kept; what it has
beyond that is rolled back; the rest is appended. So a client that edits its past is answered as it should be, and one
that only goes on pays for what is new.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Protocol
from weakref import WeakValueDictionary

import msgspec

from kvarts.content import Content
from kvarts.errors import KvartsError
from kvarts.llm.text import Generation
from kvarts.openai_api.answer import Choice
from kvarts.openai_api.errors import ApiError
from kvarts.openai_api.served import Ask, Served
from kvarts.request import Request
from kvarts.session.errors import (
    SessionBusyError,
    SessionNotReadyError,
    SessionsExhaustedError,
    UnknownSessionError,
)
from kvarts.session.runtime import SessionRuntime
from kvarts.session.values import Done, StopReason, Token

__all__ = ["SessionsDoor", "Store"]

STATUSES: dict[type[KvartsError], int] = {
    SessionsExhaustedError: 429,
    SessionBusyError: 409,
    UnknownSessionError: 404,
}
REASONS = {
    StopReason.MAX_TOKENS: "length",
    StopReason.EOS: "stop",
    StopReason.CANCELLED: "cancelled",
    StopReason.TRUNCATED: "length",
}


class Store(SessionRuntime, Protocol):
    """A SessionRuntime that can be asked for what it has of a conversation."""

    async def num_common(self, owner: str, session_id: str, tokens: Sequence[int]) -> int:
        """Return how many of `tokens`, from the first, the history of a session begins with."""


class SessionsDoor:
    """The sessions of one served model, by the names that clients have for them. For one event loop.

    A name is the id of a session, as it is known over gRPC, or the label of one. A session that there is not is made,
    with the settings that sessions have by default and the name as its label.
    """

    def __init__(self, store: Store, served: Served) -> None:
        self._store = store
        self._served = served
        self._ids: dict[tuple[str, str], str] = {}
        self._turns: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    def begin(self, owner: str, name: str, ask: Ask, choice: Choice) -> asyncio.Task[None]:
        """Have `choice` told what the session says to `ask`; cancelling the task ends it, and keeps the session."""
        return asyncio.ensure_future(self._answer(owner, name, ask, choice))

    async def _answer(self, owner: str, name: str, ask: Ask, choice: Choice) -> None:
        turn = self._turns.setdefault((owner, name), asyncio.Lock())
        try:
            async with turn:  # in the order in which they came
                session_id, num_kept = await self._brought_to(owner, name, ask.tokens)
                await self._generate(owner, session_id, ask, choice, num_kept)
        except KvartsError as error:
            choice.fail(_told(error))
        except Exception as error:
            choice.fail(error)

    async def _brought_to(self, owner: str, name: str, tokens: Sequence[int]) -> tuple[str, int]:
        """Bring the history of the session to be `tokens`; return its id, and how many tokens need not be computed."""
        session_id = await self._found(owner, name)
        if session_id is not None:
            try:
                return session_id, await self._go_on(owner, session_id, tokens)
            except UnknownSessionError:
                pass  # it has gone meanwhile
            except SessionNotReadyError:
                # What the changed conversation would need of its past was dropped: it begins again.
                await self._store.close(owner, session_id)
        settings = msgspec.structs.replace(self._store.defaults, label=name)
        session_id = await self._store.create(owner, settings)
        self._ids[owner, name] = session_id
        return session_id, await self._go_on(owner, session_id, tokens)

    async def _go_on(self, owner: str, session_id: str, tokens: Sequence[int]) -> int:
        store = self._store
        before = await store.info(owner, session_id)
        num_common = await store.num_common(owner, session_id, tokens)
        if num_common < before.history_length:
            await store.rollback(owner, session_id, num_common, queue=True)
        if num_common < len(tokens):
            await store.append(owner, session_id, tokens[num_common:], expected_length=num_common, queue=True)
        after = await store.info(owner, session_id)
        return max(0, len(tokens) - (after.num_computed_tokens - before.num_computed_tokens))

    async def _found(self, owner: str, name: str) -> str | None:
        known = self._ids.get((owner, name))
        if known is not None:
            return known
        for info in await self._store.list(owner):
            if name in (info.session_id, info.label):
                self._ids[owner, name] = info.session_id
                return info.session_id
        return None

    async def _generate(self, owner: str, session_id: str, ask: Ask, choice: Choice, num_kept: int) -> None:
        page_size = self._served.host.config.page_size
        request = Request(
            0,
            Content.from_tokens(ask.tokens[-1:], page_size=page_size, owner=0),
            num_prompt_tokens=len(ask.tokens),
            max_tokens=ask.params.max_tokens,
        )
        request.cached_tokens = num_kept
        choice.request = request
        generation = Generation(request, ask.params, self._served.text.generation_tokenizer)
        held: int | None = None  # a token that may be an end, of which the text is no part of the answer
        updates = self._store.generate(owner, session_id, ask.params, queue=True)
        async with aclosing(updates):
            async for update in updates:
                if isinstance(update, Token):
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
        choice.end(generation.completion())

    def _may_end(self, token: int, ask: Ask) -> bool:
        return token in ask.params.stop_token_ids or token in self._served.text.end_ids


def _told(error: KvartsError) -> KvartsError | ApiError:
    status = next((STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES), None)
    if status is None:
        return error
    return ApiError(status, str(error), param="session_id", retry_after_s=1.0 if status == 429 else None)

"""Turns of sessions: requests of the engine, and their progress from its tokens to the updates of a stream."""

from __future__ import annotations

import asyncio
from asyncio import CancelledError
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec

from kvarts.core.request import Request
from kvarts.core.sampling import Logprobs, SamplingParams
from kvarts.run.engine_loop import EngineLoop, ModelHost
from kvarts.run.llm_engine import Gone, LLMEngine, Outbox, RequestFailedError
from kvarts.run.sessions.table import Session, SessionTable
from kvarts.run.sessions.values import (
    Done,
    SessionBusyError,
    SessionNotReadyError,
    StopReason,
    Token,
    Truncated,
    Update,
)
from kvarts.run.text import Completion, Generation

__all__ = ["AppendTurn", "GenerationTurn", "SessionTurns", "UpdateStream"]

MakeRequest = Callable[[int, int], Request]

COMPUTE_ONLY = SamplingParams(max_tokens=1)


class SessionTurns:
    """Begins and ends the requests of sessions. For the engine's thread.

    Between turns, the KV of the whole history of a bounded session is computed. A generation computes the last token
    again, for its logits, which are not kept; the pages still contain everything that this token sees. With a state,
    the last token is computed by the generation only.
    """

    def __init__(self, table: SessionTable) -> None:
        self._table = table

    def begin_append(self, engine: LLMEngine, session: Session) -> Request | None:
        """Begin to compute the rest of the history; return the request, or None if that is computed."""
        self._take(session, "appending")
        length = session.num_to_compute
        if session.num_computed >= length:
            session.state = "idle"
            return None

        def make(index: int, now_ns: int) -> Request:
            request = Request(
                index,
                session.content,
                num_prompt_tokens=length,
                max_tokens=0,
                arrival_ns=now_ns,
                own=session.pages,
                start=0 if session.pages is None else session.num_computed,
            )
            request.computes_only = True
            return request

        return self._start(engine, session, make_request=make, params=COMPUTE_ONLY)

    def begin_generation(
        self, engine: LLMEngine, session: Session, params: SamplingParams, max_tokens: int, *, priority: int = 0
    ) -> Request:
        """Begin to generate at most `max_tokens` tokens; return the request."""
        self._take(session, "generating")
        length = session.history_length

        def make(index: int, now_ns: int) -> Request:
            return Request(
                index,
                session.content,
                num_prompt_tokens=length,
                max_tokens=max_tokens,
                arrival_ns=now_ns,
                priority=priority,
                own=session.pages,
                start=0 if session.pages is None else min(session.num_computed, length - 1),
            )

        params = msgspec.structs.replace(params, max_tokens=max_tokens)
        request = self._start(engine, session, make_request=make, params=params)
        session.num_turns += 1
        return request

    def end(self, session: Session, request: Request) -> None:
        """Record the work of a request that has ended, and check the pages that it left."""
        session.request = None
        session.state = "idle"
        session.touched_ns = self._table.now_ns()
        session.content.trim()  # the session may be idle for long
        self._table.capacity.recount(session)
        if session.pages is not None:
            start, end = request.start, max(request.num_computed, request.start)
            session.num_computed = max(session.num_computed, end)
            session.num_computed_tokens += end - start
        else:
            # A preempted or never admitted request may end with fewer computed tokens than before.
            session.num_computed = max(session.num_computed, request.num_computed, request.furthest_computed)
            self._table.pin(session)
            session.num_computed_tokens += max(0, request.num_computed - request.cached_tokens)
        self._table.look(session)

    def take_back(self, session: Session, length: int) -> None:
        """Shorten the history of an idle session, unless it was evicted, to the `length` tokens that are on disk."""
        if self._table.has(session) and session.history_length > length:
            self._table.take_back(session, length)

    # Inside -----------------------------------------------------------------------------------------------

    def _take(self, session: Session, state: str) -> None:
        if session.request is not None:
            raise SessionBusyError(
                f"session {session.session_id} is {session.state}", field="session_id", hint="Wait, or queue."
            )
        self._table.look(session)
        session.state = state
        session.touched_ns = self._table.now_ns()

    def _start(
        self, engine: LLMEngine, session: Session, *, make_request: MakeRequest, params: SamplingParams
    ) -> Request:
        try:
            session.request = engine.start(make_request, params, stop_ids=session.settings.eos_token_ids)
        except BaseException:
            session.state = "idle"
            raise
        generation = engine.generation(session.request)
        assert generation is not None, "a request that was just begun is under way"
        return generation.request


class UpdateStream:
    """The updates of one generation, in the event loop. An error is raised in place of the next update.

    `on_end` is called when Done or an error arrives, whether it is read or not.
    """

    def __init__(self, outbox: Outbox, on_end: Callable[[], None]) -> None:
        self.is_marked = False
        """Owned by the outbox."""
        self._outbox = outbox
        self._on_end = on_end
        self._has_ended = False
        self._arrived: deque[Update | BaseException] = deque()
        self._items: deque[Update | BaseException] = deque()
        self._wakes: asyncio.Future[None] | None = None

    def put(self, *items: Update | BaseException) -> None:
        """Send updates, or an error. From any thread. Raise Gone if the event loop is closed."""
        self._arrived.extend(items)
        if items and not self.is_marked:
            self._outbox.mark(self)

    def wake(self) -> None:
        """Move arrived updates to the reader, in the event loop."""
        while self._arrived:
            item = self._arrived.popleft()
            self._items.append(item)
            if isinstance(item, Done | BaseException) and not self._has_ended:
                self._has_ended = True
                self._on_end()
        if self._items and self._wakes is not None and not self._wakes.done():
            self._wakes.set_result(None)

    async def next(self) -> Update:
        """Return the next update, or raise the error that arrived instead."""
        while not self._items:
            self._wakes = asyncio.get_running_loop().create_future()
            try:
                await self._wakes
            finally:
                self._wakes = None
        item = self._items.popleft()
        if isinstance(item, BaseException):
            raise item
        return item


class AppendTurn:
    """A Listener of a request that only computes. `done` is called at its end, with an error or None."""

    def __init__(
        self, turns: SessionTurns, session: Session, loop: EngineLoop, done: Callable[[BaseException | None], object]
    ) -> None:
        self._turns = turns
        self._session = session
        self._loop = loop
        self._done = done
        self._request: Request | None = None

    def begin(self, engine: LLMEngine) -> int | None:
        """Begin the request, between steps; None if everything is computed already."""
        self._request = self._turns.begin_append(engine, self._session)
        if self._request is None:
            self._done(None)
            return None
        return self._request.index

    def cancel(self, engine: LLMEngine) -> None:
        """End the request at a token boundary, between steps. The tokens stay, some of them not computed."""
        _end(self._loop, self._session, self._request)

    def update(self, generation: Generation) -> None:
        """Do nothing: only the end matters."""

    def end(self, completion: Completion) -> None:
        """Record the end."""
        assert self._request is not None
        self._turns.end(self._session, self._request)
        if completion.error is not None:
            self._done(RequestFailedError(completion.error, asked=completion.error_field))
        else:
            self._done(CancelledError() if completion.finish_reason == "cancelled" else None)

    def fail(self, error: BaseException) -> None:
        """Report an error that prevents the end."""
        self._done(error)


class GenerationTurn:
    """A Listener of a generation that sends Truncated, tokens and Done to `stream`.

    `max_positions`: maximum length of the history; None: unlimited. `priority`: the request's. `write`: writes tokens
    to disk, given the previous length of the history; they are sent once they are written. `begun` is called with the
    request. After the last token is sampled, its KV is computed before the end is sent.
    """

    def __init__(
        self,
        turns: SessionTurns,
        session: Session,
        params: SamplingParams,
        stream: UpdateStream,
        host: ModelHost,
        *,
        max_positions: int | None,
        priority: int = 0,
        write: Callable[[int, list[int]], Future[Any]] | None = None,
        begun: Callable[[Request], object] = lambda _: None,
    ) -> None:
        self._turns = turns
        self._session = session
        self._params = params
        self._stream = stream
        self._loop = host.loop
        self._now_ns = host.clock.now_ns
        self._max_positions = max_positions
        self._priority = priority
        self._write = write
        self._begun = begun
        self._written: Future[Any] | None = None
        self._write_error: BaseException | None = None
        self._num_written = 0
        """Tokens that are on disk."""
        self._engine: LLMEngine | None = None
        self._request: Request | None = None
        self._num_sent = 0
        self._began_ns = 0
        self._first_ns = 0
        self._ends_truncated = False

    def begin(self, engine: LLMEngine) -> int | None:
        """Begin the request, between steps; None if the history cannot take another token."""
        session = self._session
        if not session.history_length:
            raise SessionNotReadyError("nothing was appended yet", field="session_id", hint="Append tokens first.")
        self._began_ns = self._now_ns()
        num_dropped = session.num_computed - session.num_retained
        if num_dropped:
            self._stream.put(Truncated(num_dropped))
        max_tokens = self._params.max_tokens
        if self._max_positions is not None and max_tokens > self._max_positions - session.history_length:
            max_tokens = max(0, self._max_positions - session.history_length)
            self._ends_truncated = True
        if not max_tokens:
            self._stream.put(Done(StopReason.TRUNCATED, 0, 0.0, 0.0))
            return None
        self._engine = engine
        self._request = self._turns.begin_generation(engine, session, self._params, max_tokens, priority=self._priority)
        self._begun(self._request)
        return self._request.index

    def cancel(self, engine: LLMEngine) -> None:
        """End the request at a token boundary, between steps. Generated tokens stay."""
        _end(self._loop, self._session, self._request)

    def update(self, generation: Generation) -> None:
        """Send the new tokens of a step."""
        logprobs: Logprobs | None = None
        if self._params.logprobs:
            assert self._engine is not None
            logprobs = self._engine.logprobs(generation.request.index)
        self._send(generation.tokens, logprobs)

    def end(self, completion: Completion) -> None:
        """Send the remaining tokens, and compute the KV of the last one."""
        assert self._request is not None
        session, tokens = self._session, completion.tokens
        self._turns.end(session, self._request)
        logprobs = None
        if completion.logprobs is not None:
            logprobs = Logprobs(list(completion.logprobs), list(completion.top_logprobs))
        self._send(list(tokens), logprobs)
        if completion.error is not None:
            self._finish(RequestFailedError(completion.error, asked=completion.error_field))
            return
        reason = {"stop": StopReason.EOS, "length": StopReason.MAX_TOKENS, "cancelled": StopReason.CANCELLED}[
            completion.finish_reason
        ]
        if reason is StopReason.MAX_TOKENS and self._ends_truncated:
            reason = StopReason.TRUNCATED
        now_ns = self._now_ns()
        first_ns = self._first_ns or now_ns
        done = Done(reason, len(tokens), (first_ns - self._began_ns) / 1e9, (now_ns - self._began_ns) / 1e9)
        num_left = session.num_to_compute - session.num_computed
        # If cancelled before its first token, the prompt is not computed; that is left to the next operation.
        if session.pages is None or num_left <= 0 or (num_left > 1 and reason is StopReason.CANCELLED):
            self._finish(done)
            return
        session.state = "generating"  # not idle, or it could be evicted before its last token is computed
        last = AppendTurn(
            self._turns, session, self._loop, lambda error: self._finish(done if error is None else error)
        )
        self._loop.start(last.begin, last)

    def fail(self, error: BaseException) -> None:
        """Send an error."""
        self._finish(error)

    def _finish(self, last: Done | BaseException) -> None:
        """Send the end, after all tokens."""
        if self._written is None:
            self._stream.put(last)
        else:
            self._written.add_done_callback(lambda _: self._finish_written(last))

    def _finish_written(self, last: Done | BaseException) -> None:
        """Send the end after all writes. Tokens that were not written leave the history first: no client has them."""
        error = self._write_error
        if error is None:
            _put(self._stream, last)
            return

        assert self._request is not None
        length = self._request.num_prompt_tokens + self._num_written
        taken_back = self._loop.post(lambda _: self._turns.take_back(self._session, length))
        taken_back.add_done_callback(lambda _: _put(self._stream, error))

    def _send(self, tokens: list[int], logprobs: Logprobs | None) -> None:
        start = self._num_sent
        if len(tokens) <= start:
            return
        if not start:
            self._first_ns = self._now_ns()
        new = tokens[start:]
        if logprobs is None:
            told = [Token(token) for token in new]
        else:
            of_tokens = zip(new, logprobs.values[start : len(tokens)], logprobs.top[start : len(tokens)], strict=True)
            told = [Token(*of_token) for of_token in of_tokens]
        if self._write is None:
            self._stream.put(*told)
        else:
            assert self._request is not None
            self._written = self._write(self._request.num_prompt_tokens + start, new)
            self._written.add_done_callback(lambda future: self._sent(future, told))
        self._num_sent = len(tokens)

    def _sent(self, future: Future[Any], tokens: list[Token]) -> None:
        """Send tokens that are on disk. If the write failed, end the generation with that error."""
        error = future.exception()
        if error is None and self._write_error is not None:
            return  # it was written after all, but tokens before it were not sent
        if error is None:
            self._num_written += len(tokens)
            _put(self._stream, *tokens)
        elif self._write_error is None:
            self._write_error = error
            self._session.is_written = False
            self._loop.post(self.cancel)


def _put(stream: UpdateStream, *items: Update | BaseException) -> None:
    """Send updates from a thread that must not raise."""
    with suppress(Gone):
        stream.put(*items)


def _end(loop: EngineLoop, session: Session, request: Request | None) -> None:
    if request is not None and session.request == request.index:
        loop.end(request.index)

"""Turns of sessions as requests of the engine: appends and generations."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvarts.llm.llm_engine import LLMEngine
from kvarts.request import Request
from kvarts.sampling import SamplingParams
from kvarts.session.session import Session
from kvarts.session.table import SessionTable
from kvarts.session.values import SessionBusyError

__all__ = ["Turns"]

MakeRequest = Callable[[int, int], Request]

COMPUTE_ONLY = SamplingParams(max_tokens=1)


class Turns:
    """Begins and ends the requests of sessions. For the engine's thread.

    Between turns, the KV of the whole history of a bounded session is computed. A generation computes the last token
    again, for its logits, which are not kept; the pages still contain everything that this token sees.
    """

    def __init__(self, table: SessionTable) -> None:
        self._table = table

    def begin_append(self, engine: LLMEngine, session: Session) -> Request | None:
        """Begin to compute the rest of the history; return the request, or None if all is computed."""
        self._take(session, "appending")
        length = session.history_length
        if session.num_computed >= length:
            session.state = "idle"
            return None

        def make(index: int, now_ns: int) -> Request:
            return Request(
                index,
                session.content,
                num_prompt_tokens=length,
                max_tokens=0,
                arrival_ns=now_ns,
                own=session.pages,
                start=0 if session.pages is None else session.num_computed,
                computes_only=True,
            )

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

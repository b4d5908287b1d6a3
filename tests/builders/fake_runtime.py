"""A session runtime without an engine: histories in memory, and tokens by a rule."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import msgspec

from kvarts.core.sampling import SamplingParams
from kvarts.run.sessions.values import (
    Done,
    SessionBusyError,
    SessionGoneError,
    SessionInfo,
    SessionNotReadyError,
    SessionSettings,
    SessionsExhaustedError,
    SessionValueError,
    StopReason,
    Token,
    Truncated,
    UnknownSessionError,
    Update,
)

__all__ = ["BYTES_PER_TOKEN", "VOCABULARY", "FakeRuntime", "next_token"]

VOCABULARY = 256
BYTES_PER_TOKEN = 1000
EOS = 255
"""The model's own end."""


def next_token(history: Sequence[int]) -> int:
    """The token that follows: a letter, or the model's end after a 7."""
    return EOS if history[-1] == 7 else 97 + (history[-1] * 31 + len(history)) % 26


@dataclass
class Session:
    """One session of the fake."""

    settings: SessionSettings
    label: str
    history: list[int] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    state: str = "idle"
    running: asyncio.Event | None = None
    num_turns: int = 0


class FakeRuntime:
    """Sessions as SessionRuntime promises them; a token takes `step_s`, and so does an append.

    `fault`: raised by the next call, as a bug would be. `asked`: the parameters of each generation.
    """

    def __init__(
        self, *, defaults: SessionSettings | None = None, max_sessions: int = 100_000, step_s: float = 0.0
    ) -> None:
        self._defaults = defaults if defaults is not None else SessionSettings()
        self.max_sessions = max_sessions
        self.step_s = step_s
        self.sessions: dict[tuple[str, str], Session] = {}
        self.gone: set[tuple[str, str]] = set()
        self.asked: list[SamplingParams] = []
        self.fault: Exception | None = None
        self.num_generating = 0
        self.num_made = 0
        self.is_shut_down = False

    @property
    def defaults(self) -> SessionSettings:
        return self._defaults

    async def create(self, owner: str, settings: SessionSettings | None = None) -> str:
        self._raise_fault()
        if len(self.sessions) >= self.max_sessions:
            raise SessionsExhaustedError(f"{len(self.sessions)} of {self.max_sessions} sessions are there")
        settings = settings if settings is not None else self._defaults
        self.num_made += 1
        session_id = f"{self.num_made:032x}"
        self.sessions[owner, session_id] = Session(settings, settings.label)
        return session_id

    async def append(
        self,
        owner: str,
        session_id: str,
        tokens: Sequence[int],
        *,
        expected_length: int | None = None,
        queue: bool = False,
    ) -> int:
        session = self._find(owner, session_id)
        if any(token >= VOCABULARY for token in tokens):
            raise SessionValueError(f"the vocabulary has {VOCABULARY} tokens, got {max(tokens)}", field="token_ids")
        async with self._operation(session, "appending", queue) as cancelled:
            if expected_length is not None and expected_length != len(session.history):
                raise SessionNotReadyError(f"the history has {len(session.history)} tokens, not {expected_length}")
            if await self._step_is_cancelled(cancelled):
                raise asyncio.CancelledError
            session.history += tokens
        return len(session.history)

    async def generate(
        self, owner: str, session_id: str, params: SamplingParams, *, queue: bool = False
    ) -> AsyncGenerator[Update, None]:
        session = self._find(owner, session_id)
        if not session.history:
            raise SessionNotReadyError("nothing was appended yet", hint="Append tokens first.")
        self.asked.append(params)
        async with self._operation(session, "generating", queue) as cancelled:
            self.num_generating += 1
            try:
                num_dropped = len(session.history) - session.settings.num_retained(len(session.history))
                if num_dropped:
                    yield Truncated(num_dropped)
                ends = {*session.settings.eos_token_ids, *params.stop_token_ids}
                if not params.ignore_eos:
                    ends.add(EOS)
                reason, num_tokens = StopReason.MAX_TOKENS, 0
                while num_tokens < params.max_tokens:
                    if await self._step_is_cancelled(cancelled):
                        reason = StopReason.CANCELLED
                        break
                    self._raise_fault()
                    token = next_token(session.history)
                    session.history.append(token)
                    num_tokens += 1
                    yield Token(token)
                    if token in ends:
                        reason = StopReason.EOS
                        break
                session.num_turns += 1
                yield Done(reason, num_tokens, self.step_s, num_tokens * self.step_s)
            finally:
                self.num_generating -= 1

    async def cancel(self, owner: str, session_id: str) -> bool:
        session = self._find(owner, session_id)
        if session.running is None:
            return False
        session.running.set()
        return True

    async def info(self, owner: str, session_id: str) -> SessionInfo:
        session = self._find(owner, session_id)
        num_retained = session.settings.num_retained(len(session.history))
        window = session.settings.window
        return SessionInfo(
            session_id=session_id,
            label=session.label,
            settings=session.settings,
            state=session.state,
            history_length=len(session.history),
            num_retained=num_retained,
            num_dropped=len(session.history) - num_retained,
            kv_live_bytes=num_retained * BYTES_PER_TOKEN,
            kv_allocated_bytes=(num_retained + 1) * BYTES_PER_TOKEN,
            kv_peak_bytes=(num_retained + 2) * BYTES_PER_TOKEN,
            kv_bound_bytes=None if window is None else (session.settings.sink + window + 3) * BYTES_PER_TOKEN,
            inv1_violations=0,
            inv2_violations=0,
            idle_s=0.5,
            num_turns=session.num_turns,
            num_computed_tokens=len(session.history),
            restored=None,
        )

    async def close(self, owner: str, session_id: str) -> int:
        session = self._find(owner, session_id)
        if session.running is not None:
            session.running.set()
        self.gone.add((owner, session_id))
        del self.sessions[owner, session_id]
        return len(session.history)

    async def fork(self, owner: str, session_id: str, *, label: str = "", queue: bool = False) -> str:
        session = self._find(owner, session_id)
        async with self._operation(session, "appending", queue):
            new = await self.create(owner, msgspec.structs.replace(session.settings, label=label))
            self.sessions[owner, new].history = list(session.history)
        return new

    async def rollback(self, owner: str, session_id: str, length: int, *, queue: bool = False) -> int:
        session = self._find(owner, session_id)
        async with self._operation(session, "appending", queue):
            if length > len(session.history):
                raise SessionValueError(f"the history has {len(session.history)} tokens", field="length")
            del session.history[length:]
        return length

    async def list(self, owner: str) -> list[SessionInfo]:
        return [await self.info(owner, session_id) for of, session_id in self.sessions if of == owner]

    async def shut_down(self) -> None:
        self.is_shut_down = True
        for session in self.sessions.values():
            if session.running is not None:
                session.running.set()

    def _find(self, owner: str, session_id: str) -> Session:
        self._raise_fault()
        if (owner, session_id) in self.gone:
            raise SessionGoneError(f"session {session_id} was closed")
        if (owner, session_id) not in self.sessions:
            raise UnknownSessionError(f"there is no session {session_id!r}")
        return self.sessions[owner, session_id]

    def _raise_fault(self) -> None:
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault

    @asynccontextmanager
    async def _operation(self, session: Session, state: str, queue: bool) -> AsyncIterator[asyncio.Event]:
        if session.lock.locked() and not queue:
            raise SessionBusyError(f"the session is {session.state}", hint="Cancel that, or wait for it.")
        async with session.lock:
            session.state, session.running = state, asyncio.Event()
            try:
                yield session.running
            finally:
                session.state, session.running = "idle", None

    async def _step_is_cancelled(self, cancelled: asyncio.Event) -> bool:
        if self.step_s:
            with suppress(TimeoutError):
                await asyncio.wait_for(cancelled.wait(), self.step_s)
        else:
            await asyncio.sleep(0)
        return cancelled.is_set()

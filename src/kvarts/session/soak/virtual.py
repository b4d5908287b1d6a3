"""Sessions of this process as a target, on a virtual clock that makes waiting free."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from kvarts.clock import VirtualClock
from kvarts.sampling import SamplingParams
from kvarts.session.runtime import SessionRuntime
from kvarts.session.values import Done, SessionInfo, SessionSettings, Token, Update

__all__ = ["OneOwner", "VirtualSoakClock"]


class VirtualSoakClock:
    """A SoakClock over the clock of the engine.

    The engine does not wait until its updates are read. So while an answer is read, the time is that of the token being
    read, not that of the engine, which may be ahead.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._read_at_s: float | None = None

    def now_s(self) -> float:
        """Return the time."""
        return self._clock.now_ns() / 1e9 if self._read_at_s is None else self._read_at_s

    async def replay(self, updates: AsyncGenerator[Update, None]) -> AsyncGenerator[Update, None]:
        """Yield the updates of a whole generation, each at its time."""
        began_s = self.now_s()
        known = [update async for update in updates]
        done = known[-1]
        assert isinstance(done, Done)
        step_s = (done.total_s - done.prefill_s) / max(1, done.num_tokens - 1)
        num_tokens = 0
        try:
            for update in known:
                if isinstance(update, Token):
                    self._read_at_s = began_s + done.prefill_s + num_tokens * step_s
                    num_tokens += 1
                yield update
        finally:
            self._read_at_s = None

    async def sleep_s(self, duration_s: float) -> None:
        """Advance the time, between steps."""
        self._clock.wait_until_ns(self._clock.now_ns() + round(duration_s * 1e9))


class OneOwner:
    """The methods of a SessionRuntime, for one owner on a virtual clock."""

    def __init__(self, sessions: SessionRuntime, clock: VirtualSoakClock, owner: str = "soak") -> None:
        self._sessions = sessions
        self._clock = clock
        self._owner = owner

    async def create(self, settings: SessionSettings) -> str:
        """Return the id of a new session."""
        return await self._sessions.create(self._owner, settings)

    async def append(self, session_id: str, tokens: Sequence[int], *, expected_length: int) -> int:
        """Append tokens; return the length of the history."""
        return await self._sessions.append(self._owner, session_id, tokens, expected_length=expected_length)

    def generate(self, session_id: str, params: SamplingParams) -> AsyncGenerator[Update, None]:
        """Yield the updates of a generation."""
        return self._clock.replay(self._sessions.generate(self._owner, session_id, params))

    async def info(self, session_id: str) -> SessionInfo:
        """Return the current state of a session."""
        return await self._sessions.info(self._owner, session_id)

    async def close(self, session_id: str) -> int:
        """End a session."""
        return await self._sessions.close(self._owner, session_id)

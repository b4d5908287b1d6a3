"""The target of a soak, and sessions of this process on a virtual clock."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

import msgspec

from kvarts.clock import VirtualClock
from kvarts.sampling import SamplingParams
from kvarts.session.values import Done, SessionInfo, SessionRuntime, SessionSettings, Token, Update

__all__ = ["OneOwner", "Reading", "SessionsTarget", "VirtualSoakClock", "rss_of"]


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A server's report on a session. None: not reported."""

    history_length: int | None = None
    kv_live_bytes: int | None = None
    kv_allocated_bytes: int | None = None
    kv_bound_bytes: int | None = None
    inv1_violations: int | None = None
    inv2_violations: int | None = None


class SessionsTarget:
    """The target of a soak: any object with the methods of SessionRuntime without an owner, such as a client.

    `now_s` and `sleep_s`: a monotonic clock in seconds. `rss_bytes`: returns the resident memory of the server; None if
    it is unknown. For one event loop; raises KvartsError.
    """

    def __init__(
        self,
        sessions: Any,
        now_s: Callable[[], float],
        sleep_s: Callable[[float], Coroutine[Any, Any, None]],
        rss_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._sessions = sessions
        self.now_s = now_s
        self.sleep_s = sleep_s
        self.rss_bytes = rss_bytes

    async def create(self, settings: SessionSettings) -> str:
        """Return the id of a new session."""
        session_id: str = await self._sessions.create(settings)
        return session_id

    async def append(self, session_id: str, tokens: Sequence[int], expected_length: int) -> int:
        """Append to a history of `expected_length` tokens; return its length once the KV of all tokens is in pages."""
        length: int = await self._sessions.append(session_id, tokens, expected_length=expected_length)
        return length

    def generate(self, session_id: str, max_tokens: int) -> AsyncGenerator[Update, None]:
        """Generate greedily, ignoring the model's end token."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        updates: AsyncGenerator[Update, None] = self._sessions.generate(session_id, params)
        return updates

    async def read(self, session_id: str) -> Reading:
        """Return the server's report on a session; missing values are None."""
        info = await self._sessions.info(session_id)
        return Reading(**{name: getattr(info, name, None) for name in Reading.__struct_fields__})

    async def close(self, session_id: str) -> int:
        """End a session; return the length of its history."""
        length: int = await self._sessions.close(session_id)
        return length


def rss_of(pid: int) -> int | None:
    """Return the resident memory in bytes of a process on this machine; None if Linux does not report it."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as lines:  # noqa: PTH123
            for line in lines:
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


class VirtualSoakClock:
    """Time in seconds, by the clock of the engine.

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

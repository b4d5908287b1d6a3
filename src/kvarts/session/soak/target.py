"""What a long run is driven against, and the sessions of kvarts as that."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

import msgspec

from kvarts.sampling import SamplingParams
from kvarts.session.values import SessionSettings, Update

__all__ = ["Reading", "SessionsTarget", "SoakClock", "SoakTarget", "rss_of"]


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says of a session. None: it does not say."""

    history_length: int | None = None
    kv_live_bytes: int | None = None
    kv_allocated_bytes: int | None = None
    kv_bound_bytes: int | None = None
    inv1_violations: int | None = None
    inv2_violations: int | None = None


class SoakClock(Protocol):
    """Time in seconds, which never goes back."""

    def now_s(self) -> float:
        """Return the time."""

    async def sleep_s(self, duration_s: float) -> None:
        """Return after `duration_s` seconds of this clock."""


class SoakTarget(SoakClock, Protocol):
    """Sessions on a server, and the time on its clock. For one event loop; raises KvartsError."""

    async def create(self, settings: SessionSettings) -> str:
        """Return the id of a new session."""

    async def append(self, session_id: str, tokens: Sequence[int], expected_length: int) -> int:
        """Append to a history of `expected_length` tokens; return its length when the KV of all tokens is in pages."""

    def generate(self, session_id: str, max_tokens: int) -> AsyncGenerator[Update, None]:
        """Yield `max_tokens` tokens as they come, and what else a generation says. Closing it cancels it."""

    async def read(self, session_id: str) -> Reading:
        """Return what the server says of a session."""

    async def close(self, session_id: str) -> int:
        """End a session; return the length of its history."""

    def rss_bytes(self) -> int | None:
        """Return the resident memory of the server; None if that is not known."""


class SessionsTarget:
    """A SoakTarget of anything with the methods of SessionRuntime without an owner, such as a client."""

    def __init__(self, sessions: Any, clock: SoakClock, rss_bytes: Callable[[], int | None] = lambda: None) -> None:
        self._sessions = sessions
        self.now_s = clock.now_s
        self.sleep_s = clock.sleep_s
        self.rss_bytes = rss_bytes

    async def create(self, settings: SessionSettings) -> str:
        """Return the id of a new session."""
        session_id: str = await self._sessions.create(settings)
        return session_id

    async def append(self, session_id: str, tokens: Sequence[int], expected_length: int) -> int:
        """Append to a history of `expected_length` tokens; return its length."""
        length: int = await self._sessions.append(session_id, tokens, expected_length=expected_length)
        return length

    def generate(self, session_id: str, max_tokens: int) -> AsyncGenerator[Update, None]:
        """Generate greedily, whatever the model says of an end."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        updates: AsyncGenerator[Update, None] = self._sessions.generate(session_id, params)
        return updates

    async def read(self, session_id: str) -> Reading:
        """Return what the server says of a session; what it lacks is None."""
        info = await self._sessions.info(session_id)
        return Reading(**{name: getattr(info, name, None) for name in Reading.__struct_fields__})

    async def close(self, session_id: str) -> int:
        """End a session; return the length of its history."""
        length: int = await self._sessions.close(session_id)
        return length


def rss_of(pid: int) -> int | None:
    """Return the resident memory of a process on this machine in bytes; None where Linux does not tell."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as lines:  # noqa: PTH123
            for line in lines:
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None

"""What doors ask of a session runtime."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from kvarts.sampling import SamplingParams
from kvarts.session.values import SessionInfo, SessionSettings, Update

__all__ = ["SessionRuntime"]


class SessionRuntime(Protocol):
    """Sessions of many owners on one engine. For one event loop.

    Promises: an owner knows of no session of another, and gets UnknownSessionError for one. One operation at a time is
    under way on a session: another raises SessionBusyError, or waits for its turn if `queue` is set. What raises has
    changed nothing. A call that is cancelled leaves the session as it is at a token boundary, and idle; but an append
    goes on, once its tokens are there, and the session is busy until their KV is. An operation is over when it has
    ended, whether its last update was read or not.
    """

    @property
    def defaults(self) -> SessionSettings:
        """The settings of a session for which none are given."""

    async def create(self, owner: str, settings: SessionSettings | None = None) -> str:
        """Return the id of a new session: 32 hexadecimal digits. Raise SessionsExhaustedError where it does not fit."""

    async def append(
        self,
        owner: str,
        session_id: str,
        tokens: Sequence[int],
        *,
        expected_length: int | None = None,
        queue: bool = False,
    ) -> int:
        """Append tokens; return the length of the history when their KV is in pages.

        Raise asyncio.CancelledError if `cancel` or `close` ended it: the tokens are there, and what is not computed of
        them is computed by the next operation.

        `expected_length`: the length of the history before; raise SessionNotReadyError if it has another. Raise
        SessionValueError for ids that the vocabulary lacks.
        """

    def generate(
        self, owner: str, session_id: str, params: SamplingParams, *, queue: bool = False
    ) -> AsyncGenerator[Update, None]:
        """Yield Truncated, if tokens were dropped, then every token, then Done. Closing it cancels the generation.

        Raise SessionNotReadyError if nothing was appended yet.
        """

    async def cancel(self, owner: str, session_id: str) -> bool:
        """End the operation under way at a token boundary, and keep the session; return whether there was one."""

    async def info(self, owner: str, session_id: str) -> SessionInfo:
        """Return a session as it is now, also while it generates."""

    async def close(self, owner: str, session_id: str) -> int:
        """End a session, and what is under way on it; return the length of its history."""

    async def fork(self, owner: str, session_id: str, *, label: str = "", queue: bool = False) -> str:
        """Return the id of a new session with the same history and settings; pages are shared until they differ."""

    async def rollback(self, owner: str, session_id: str, length: int, *, queue: bool = False) -> int:
        """Shorten the history to `length`, and return it. Raise SessionNotReadyError if KV for it was dropped."""

    async def list(self, owner: str) -> list[SessionInfo]:
        """Return the sessions of `owner`, the oldest first."""

    async def shut_down(self) -> None:
        """End what is under way, at token boundaries, and write what is to be kept."""

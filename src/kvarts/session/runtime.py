"""The interface of a session runtime, used by doors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from kvarts.sampling import SamplingParams
from kvarts.session.values import SessionInfo, SessionSettings, Update

__all__ = ["SessionRuntime"]


class SessionRuntime(Protocol):
    """Sessions of many owners on one engine. For one event loop.

    Promises: sessions of other owners are invisible and raise UnknownSessionError. One operation at a time is in
    progress on a session; a second one raises SessionBusyError, or waits if `queue` is set. A call that raises has
    changed nothing. A cancelled call leaves the session at a token boundary, and idle. The exception is an append: once
    its tokens are in the history it continues, and the session is busy until their KV is computed. An operation ends
    regardless of whether its last update was read.
    """

    @property
    def defaults(self) -> SessionSettings:
        """The settings of sessions created without any."""

    async def create(self, owner: str, settings: SessionSettings | None = None) -> str:
        """Return the id of a new session: 32 hexadecimal digits. Raise SessionsExhaustedError if it does not fit."""

    async def append(
        self,
        owner: str,
        session_id: str,
        tokens: Sequence[int],
        *,
        expected_length: int | None = None,
        queue: bool = False,
    ) -> int:
        """Append tokens; return the length of the history once their KV is in pages.

        Raise asyncio.CancelledError if `cancel` or `close` ended it: the tokens are in the history then, and those not
        yet computed are computed by the next operation.

        `expected_length`: the length of the history before; raise SessionNotReadyError if it differs. Raise
        SessionValueError for ids outside the vocabulary.
        """

    def generate(
        self, owner: str, session_id: str, params: SamplingParams, *, queue: bool = False
    ) -> AsyncGenerator[Update, None]:
        """Yield Truncated, if tokens were dropped, then every token, then Done. Closing it cancels the generation.

        Raise SessionNotReadyError if nothing was appended yet.
        """

    async def cancel(self, owner: str, session_id: str) -> bool:
        """End the current operation at a token boundary, and keep the session; return whether there was one."""

    async def info(self, owner: str, session_id: str) -> SessionInfo:
        """Return the current state of a session, even while it generates."""

    async def close(self, owner: str, session_id: str) -> int:
        """End a session and its current operation; return the length of its history."""

    async def fork(self, owner: str, session_id: str, *, label: str = "", queue: bool = False) -> str:
        """Return the id of a new session with the same history and settings; pages are shared until they differ."""

    async def rollback(self, owner: str, session_id: str, length: int, *, queue: bool = False) -> int:
        """Shorten the history to `length`, and return it. Raise SessionNotReadyError if KV for it was dropped."""

    async def list(self, owner: str) -> list[SessionInfo]:
        """Return the sessions of `owner`, the oldest first."""

    async def shut_down(self) -> None:
        """End all operations at token boundaries, and write everything that is to be kept."""

"""One operation at a time on each session: others are refused, or wait in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvarts.session.errors import SessionBusyError

__all__ = ["Exclusive"]


class Exclusive:
    """Owner of the turns at each session. For one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By session with an operation under way: the operations that wait for its end."""

    def is_busy(self, session_id: str) -> bool:
        """Return whether an operation is under way."""
        return session_id in self._waiting

    @asynccontextmanager
    async def hold(self, session_id: str, *, queue: bool, ahead: bool = False) -> AsyncIterator[None]:
        """Have the session to oneself. Raise SessionBusyError if it is busy, unless `queue` is set.

        `ahead`: before all that wait.
        """
        waiting = self._waiting.get(session_id)
        if waiting is None:
            self._waiting[session_id] = deque()
        elif not queue:
            raise SessionBusyError(
                f"session {session_id} is busy", field="session_id", hint="Wait for its operation, or ask to queue."
            )
        else:
            turn = asyncio.get_running_loop().create_future()
            if ahead:
                waiting.appendleft(turn)
            else:
                waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on(session_id)  # the turn had come
                else:
                    waiting.remove(turn)
                raise
        try:
            yield
        finally:
            self._pass_on(session_id)

    def _pass_on(self, session_id: str) -> None:
        waiting = self._waiting[session_id]
        while waiting:
            turn = waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        del self._waiting[session_id]

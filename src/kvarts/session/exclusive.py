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

    @property
    def num_busy(self) -> int:
        """The number of sessions with an operation under way."""
        return len(self._waiting)

    async def take(self, session_id: str, *, queue: bool, ahead: bool = False) -> None:
        """Have the session to oneself until `pass_on`. Raise SessionBusyError if it is busy, unless `queue` is set.

        `ahead`: before all that wait.
        """
        waiting = self._waiting.get(session_id)
        if waiting is None:
            self._waiting[session_id] = deque()
            return
        if not queue:
            raise SessionBusyError(
                f"session {session_id} is busy", field="session_id", hint="Wait for its operation, or ask to queue."
            )
        turn = asyncio.get_running_loop().create_future()
        if ahead:
            waiting.appendleft(turn)
        else:
            waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.pass_on(session_id)  # the turn had come
            elif turn in waiting:  # else it was passed over already
                waiting.remove(turn)
            raise

    def pass_on(self, session_id: str) -> None:
        """Let the next that waits have the session."""
        waiting = self._waiting[session_id]
        while waiting:
            turn = waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        del self._waiting[session_id]

    @asynccontextmanager
    async def hold(self, session_id: str, *, queue: bool, ahead: bool = False) -> AsyncIterator[None]:
        """Have the session to oneself, as with `take`, and pass it on."""
        await self.take(session_id, queue=queue, ahead=ahead)
        try:
            yield
        finally:
            self.pass_on(session_id)

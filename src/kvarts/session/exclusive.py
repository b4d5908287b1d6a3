"""Mutual exclusion per session: concurrent operations are refused, or wait in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvarts.session.values import SessionBusyError

__all__ = ["Exclusive"]


class Exclusive:
    """Owner of the locks of sessions. For one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """For each busy session, the operations that wait for it."""

    @property
    def num_busy(self) -> int:
        """The number of sessions with an operation in progress."""
        return len(self._waiting)

    async def take(self, session_id: str, *, queue: bool, ahead: bool = False) -> None:
        """Lock the session until `pass_on`. Raise SessionBusyError if it is busy, unless `queue` is set.

        `ahead`: wait in front of all others.
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
                self.pass_on(session_id)  # the lock was granted before the cancellation
            elif turn in waiting:  # else `pass_on` has removed it already
                waiting.remove(turn)
            raise

    def pass_on(self, session_id: str) -> None:
        """Hand the lock to the next waiting operation, or release it."""
        waiting = self._waiting[session_id]
        while waiting:
            turn = waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        del self._waiting[session_id]

    @asynccontextmanager
    async def hold(self, session_id: str, *, queue: bool, ahead: bool = False) -> AsyncIterator[None]:
        """Lock the session as `take` does, and pass it on at the end."""
        await self.take(session_id, queue=queue, ahead=ahead)
        try:
            yield
        finally:
            self.pass_on(session_id)

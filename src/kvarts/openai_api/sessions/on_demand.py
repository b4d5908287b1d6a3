"""Sessions that are opened when a request names the first one, so that a server without them pays nothing for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvarts.openai_api.answer import Choice
from kvarts.openai_api.served import Ask, CountsOfSessions, InSessions

__all__ = ["SessionsOnDemand"]


class SessionsOnDemand:
    """An InSessions that calls `open_now` on first use. For one event loop."""

    def __init__(self, open_now: Callable[[], InSessions]) -> None:
        self._open_now = open_now
        self._opened: InSessions | None = None

    def begin(self, owner: str, name: str, ask: Ask, choice: Choice) -> asyncio.Task[None]:
        """Run `ask` in session `name` and stream the answer to `choice`. Cancelling the task ends the request."""
        if self._opened is None:
            self._opened = self._open_now()
        return self._opened.begin(owner, name, ask, choice)

    def counts(self) -> CountsOfSessions | None:
        """Return the counts of the sessions now; None until a request has named one."""
        return None if self._opened is None else self._opened.counts()

    async def close(self) -> None:
        """Close the sessions if they were opened."""
        if self._opened is not None:
            await self._opened.close()

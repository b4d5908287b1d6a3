"""Sessions that are there when a request names the first: until then a server imports and holds nothing for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvarts.openai_api.answer import Choice
from kvarts.openai_api.served import Ask, CountsOfSessions, InSessions

__all__ = ["SessionsLater"]


class SessionsLater:
    """An InSessions that `open_now` returns when it is needed. For one event loop."""

    def __init__(self, open_now: Callable[[], InSessions]) -> None:
        self._open_now = open_now
        self._opened: InSessions | None = None

    def begin(self, owner: str, name: str, ask: Ask, choice: Choice) -> asyncio.Task[None]:
        """Have `choice` told what the session `name` of `owner` says to `ask`. Cancelling the task ends that."""
        if self._opened is None:
            self._opened = self._open_now()
        return self._opened.begin(owner, name, ask, choice)

    def counts(self) -> CountsOfSessions | None:
        """Return what they hold now; None as long as no request has named one."""
        return None if self._opened is None else self._opened.counts()

    async def close(self) -> None:
        """Close what was opened."""
        if self._opened is not None:
            await self._opened.close()

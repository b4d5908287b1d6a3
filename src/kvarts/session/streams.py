"""Streams of updates from an engine's thread to coroutines of one event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from kvarts.llm.outbox import Outbox
from kvarts.session.values import Done, Update

__all__ = ["UpdateStream"]


class UpdateStream:
    """The updates of one generation, in the event loop. An error is raised in place of the next update.

    `on_end` is called when Done or an error arrives, whether it is read or not.
    """

    def __init__(self, outbox: Outbox, on_end: Callable[[], None]) -> None:
        self.is_marked = False
        """Owned by the outbox."""
        self._outbox = outbox
        self._on_end = on_end
        self._has_ended = False
        self._arrived: deque[Update | BaseException] = deque()
        self._items: deque[Update | BaseException] = deque()
        self._wakes: asyncio.Future[None] | None = None

    def put(self, *items: Update | BaseException) -> None:
        """Send updates, or an error. From any thread. Raise Gone if the event loop is closed."""
        self._arrived.extend(items)
        if items and not self.is_marked:
            self._outbox.mark(self)

    def wake(self) -> None:
        """Move arrived updates to the reader, in the event loop."""
        while self._arrived:
            item = self._arrived.popleft()
            self._items.append(item)
            if isinstance(item, Done | BaseException) and not self._has_ended:
                self._has_ended = True
                self._on_end()
        if self._items and self._wakes is not None and not self._wakes.done():
            self._wakes.set_result(None)

    async def next(self) -> Update:
        """Return the next update, or raise the error that arrived instead."""
        while not self._items:
            self._wakes = asyncio.get_running_loop().create_future()
            try:
                await self._wakes
            finally:
                self._wakes = None
        item = self._items.popleft()
        if isinstance(item, BaseException):
            raise item
        return item

"""Updates that go from the thread of an engine to the coroutines of one event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from threading import Lock

from kvarts.llm.listener import Gone
from kvarts.session.values import Done, Update

__all__ = ["Outbox", "UpdateStream"]


class Outbox:
    """Wakes coroutines of `loop`: once for all that came in the meantime, however many streams that was for."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = Lock()
        self._waiting: list[tuple[UpdateStream, Update | BaseException]] = []

    def put(self, stream: UpdateStream, items: Iterable[Update | BaseException]) -> None:
        """Have `stream` receive `items`, in order. From any thread. Raise Gone if the event loop is closed."""
        with self._lock:
            is_first = not self._waiting
            self._waiting += [(stream, item) for item in items]
            if not (is_first and self._waiting):
                return
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError as error:
            self._waiting.clear()  # so that the next learns of it as well
            raise Gone from error

    def _deliver(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for stream, item in waiting:
            stream.receive(item)


class UpdateStream:
    """The updates of one generation, in the event loop. An error is raised where the next update would be.

    `on_end` is called when Done or an error has come, whether it is read or not.
    """

    def __init__(self, outbox: Outbox, on_end: Callable[[], None]) -> None:
        self._outbox = outbox
        self._on_end = on_end
        self._has_ended = False
        self._items: deque[Update | BaseException] = deque()
        self._wakes: asyncio.Future[None] | None = None

    def put(self, *items: Update | BaseException) -> None:
        """Send updates, or an error. From any thread."""
        self._outbox.put(self, items)

    def receive(self, item: Update | BaseException) -> None:
        """Take an update, in the event loop."""
        self._items.append(item)
        if isinstance(item, Done | BaseException) and not self._has_ended:
            self._has_ended = True
            self._on_end()
        if self._wakes is not None and not self._wakes.done():
            self._wakes.set_result(None)

    async def next(self) -> Update:
        """Return the next update, or raise the error that came instead."""
        while not self._items:
            self._wakes = self._outbox.loop.create_future()
            try:
                await self._wakes
            finally:
                self._wakes = None
        item = self._items.popleft()
        if isinstance(item, BaseException):
            raise item
        return item

"""Contract between a loop and the listeners of its requests, and the outbox that wakes listeners in an event loop.

An outbox wakes coroutines of one event loop from an engine's thread, with one call per batch of updates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock
from time import monotonic, thread_time
from typing import Protocol

from kvarts.errors import KvartsError
from kvarts.llm.text import Completion, Generation

__all__ = ["EngineDeadError", "Gone", "Listener", "Outbox", "RequestFailedError", "Woken"]

TIMER_S = 0.001
"""The shortest timer: uvloop rounds to whole milliseconds, and its timers may fire early."""


class EngineDeadError(KvartsError):
    """An error in an earlier step has left the engine in an unknown state."""

    exit_code = 1


class RequestFailedError(KvartsError):
    """An error ended one request; the engine and all other requests continue. `asked`: the field of the request that
    asked for what could not be done; None if the request is not at fault.
    """

    exit_code = 1

    def __init__(self, what: str, *, asked: str | None = None) -> None:
        super().__init__(what)
        self.asked = asked


class Listener(Protocol):
    """Receives the progress of one request, in the thread that has the engine. Raises Gone if nothing listens any more.

    Any other exception that it raises ends its request, and `fail` receives the error.
    """

    def update(self, generation: Generation) -> None:
        """Receive the state of the request after a step in which it did not end."""

    def end(self, completion: Completion) -> None:
        """Receive the end of the request, perhaps with an error."""

    def fail(self, error: BaseException) -> None:
        """Receive an error that replaces the completion of the request."""


class Gone(Exception):  # noqa: N818  # not an error: nothing listens any more
    """Raised by a listener after its event loop was closed."""


class Woken(Protocol):
    """An object that a coroutine waits for. `is_marked`: owned by the outbox, False at first."""

    is_marked: bool

    def wake(self) -> None:
        """Wake the coroutine if it waits. Called in the event loop."""


class Outbox:
    """Wakes marked objects in the event loop, in order."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = Lock()
        self._marked: list[Woken] = []
        self._is_holding = False
        self._not_before_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        """Wakes the postponed objects, unless a later step does so first."""
        self._due_s: float | None = None
        self.due_s: Callable[[], float] | None = None
        """Returns when the last step should have ended, on the monotonic clock; None if that is not known."""
        self.on_late: Callable[[Sequence[float]], None] | None = None
        """Receives the delays of wake-ups after that time, in seconds, in ascending order."""

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake coroutines of `loop` from now on."""
        self._loop = loop

    def call_soon(self, call: Callable[[], object]) -> None:
        """Schedule `call` in the event loop, from any thread, if the loop is still open."""
        with suppress(RuntimeError):
            assert self._loop is not None
            self._loop.call_soon_threadsafe(call)

    def mark(self, woken: Woken) -> None:
        """Schedule a wake-up of `woken`, from any thread. Raise Gone if the event loop is closed."""
        with self._lock:
            if woken.is_marked:
                return
            woken.is_marked = True
            self._marked.append(woken)
            if self._is_holding or len(self._marked) > 1:
                return
        self._wake_soon()

    def hold(self) -> None:
        """Wake nothing until `release`: a step has ended."""
        with self._lock:
            self._is_holding = True
            if self.due_s is not None and not self._marked:  # else keep the earlier time
                self._due_s = self.due_s()

    def release(self) -> None:
        """Schedule the wake-ups of everything marked meanwhile."""
        with self._lock:
            self._is_holding = False
            if not self._marked:
                return
        with suppress(Gone):
            self._wake_soon()

    def _wake_soon(self) -> None:
        try:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError as error:
            self._take_marked()  # so that the next `mark` raises as well
            raise Gone from error

    def _take_marked(self) -> list[Woken]:
        with self._lock:
            marked, self._marked = self._marked, []
            for woken in marked:
                woken.is_marked = False
        return marked

    def _wake(self) -> None:
        """Wake all marked objects, but spend at most half of the time on it: under load, each call wakes more of
        them.
        """
        early_s = self._not_before_s - monotonic()
        if early_s > 0.0:
            if self._timer is None:
                assert self._loop is not None
                self._timer = self._loop.call_later(max(early_s, TIMER_S), self._wake_later)
            return
        began_s = thread_time()
        due_s, on_late = self._due_s, self.on_late
        if due_s is None or on_late is None:
            for woken in self._take_marked():
                woken.wake()
        else:
            late_s: list[float] = []
            for woken in self._take_marked():
                woken.wake()
                late_s.append(monotonic() - due_s)
            on_late(late_s)
        self._not_before_s = monotonic() + thread_time() - began_s

    def _wake_later(self) -> None:
        self._timer = None
        self._wake()

"""The log of one engine: every event once, in order, numbered without gaps, and handed to the readers.

Journal, timeline, audit and metrics read the same log. Page and request events cost time to make, so they are made only
if a reader wants details; events of steps go to every reader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvarts.events import Event

__all__ = ["EventLog", "EventReader", "Tell"]

Tell = Callable[[Event], object]
"""A function that adds one event to a log."""


class EventReader(Protocol):
    """Reads events. Promises to change nothing in the engine.

    A reader with an attribute `wants_details` that is False needs StepDone, LeapDone and AtRest only; any other gets
    every event.
    """

    def observe(self, events: Sequence[Event]) -> None:
        """Read the events since the last call, in order."""


class EventLog:
    """Owner of the events of one engine that were not yet handed to its readers.

    `num_waiting`: how many events may wait before `emit` hands them out; 1 hands them out after every step.
    """

    __slots__ = ("_events", "_num_waiting", "_readers", "num_events", "tell", "tell_details")

    def __init__(self, readers: Sequence[EventReader] = (), *, num_waiting: int = 1) -> None:
        self._readers = tuple(readers)
        self._num_waiting = num_waiting
        self._events: list[Event] = []
        self.num_events = 0
        """The number of events handed out so far, which is also the number of the first that waits."""
        self.tell: Tell | None = self._events.append if self._readers else None
        """Adds an event; None if there is no reader."""
        has_details = any(getattr(reader, "wants_details", True) for reader in self._readers)
        self.tell_details: Tell | None = self.tell if has_details else None
        """Adds a page or request event; None if no reader wants details."""

    @property
    def mark(self) -> int:
        """The place of the next event among those that wait."""
        return len(self._events)

    def take_from(self, mark: int) -> list[Event]:
        """Remove and return the events added since `mark`, to be added again in another order."""
        events = self._events[mark:]
        del self._events[mark:]
        return events

    def emit(self) -> None:
        """Hand the waiting events to the readers if there are at least `num_waiting`."""
        if len(self._events) >= self._num_waiting:
            self.flush()

    def flush(self) -> None:
        """Hand all waiting events to the readers. Raise what a reader raises, such as AuditError."""
        events = self._events
        if not events:
            return
        for reader in self._readers:
            reader.observe(events)
        self.num_events += len(events)
        events.clear()

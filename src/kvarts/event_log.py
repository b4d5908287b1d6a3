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

    `num_waiting`: so many events wait before an engine hands them out; 1: they are handed out after every step.
    """

    __slots__ = ("_readers", "num_events", "num_waiting", "tell", "tell_details", "waiting")

    def __init__(self, readers: Sequence[EventReader] = (), *, num_waiting: int = 1) -> None:
        self._readers = tuple(readers)
        self.num_waiting = num_waiting
        self.waiting: list[Event] = []
        """Events that the readers have not been given yet."""
        self.num_events = 0
        """The number of events handed out so far, which is also the number of the first that waits."""
        self.tell: Tell | None = self.waiting.append if self._readers else None
        """Adds an event; None if there is no reader."""
        has_details = any(getattr(reader, "wants_details", True) for reader in self._readers)
        self.tell_details: Tell | None = self.tell if has_details else None
        """Adds a page or request event; None if no reader wants details."""

    def add_reader(self, reader: EventReader) -> None:
        """Hand events to one reader more from now on; it must do without details."""
        assert getattr(reader, "wants_details", True) is False, "details are made for readers that were there first"
        self._readers += (reader,)
        self.tell = self.waiting.append

    @property
    def mark(self) -> int:
        """The place of the next event among those that wait."""
        return len(self.waiting)

    def take_from(self, mark: int) -> list[Event]:
        """Remove and return the events added since `mark`, to be added again in another order."""
        events = self.waiting[mark:]
        del self.waiting[mark:]
        return events

    def flush(self) -> None:
        """Hand all waiting events to the readers. Raise what a reader raises, such as AuditError."""
        events = self.waiting
        if not events:
            return
        for reader in self._readers:
            reader.observe(events)
        self.num_events += len(events)
        events.clear()

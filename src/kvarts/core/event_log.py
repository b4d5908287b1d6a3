"""The log of one engine: every event once, in order, numbered without gaps, and passed to the readers.

Journal, timeline, audit and metrics read the same log. Page and request events are expensive, so they are created only
if a reader wants details; events of steps are passed to every reader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

from kvarts.core.events import Event
from kvarts.core.events.steps import StepRow

__all__ = ["Emit", "EventLog", "EventReader"]

Emit = Callable[[Event], object]
"""A function that adds one event to a log."""


class EventReader(Protocol):
    """Reads events. Promises to change nothing in the engine.

    A reader with an attribute `wants_details` that is False needs only StepDone, LeapDone and AtRest; any other reader
    receives every event. One with an attribute `takes_rows` that is True may get a StepRow instead of a StepDone.
    """

    def observe(self, events: Sequence[Event]) -> None:
        """Read the events since the last call, in order."""


class EventLog:
    """Owner of the events of one engine that have not been passed to its readers.

    `num_waiting`: number of waiting events at which an engine passes them on; 1: after every step.
    """

    __slots__ = ("_readers", "emit", "emit_details", "emit_row", "num_events", "num_waiting", "waiting")

    def __init__(self, readers: Sequence[EventReader] = (), *, num_waiting: int = 1) -> None:
        self._readers = tuple(readers)
        self.num_waiting = num_waiting
        self.waiting: list[Event | StepRow] = []
        """Events not yet passed to the readers."""
        self.num_events = 0
        """Number of events passed on so far, which is also the number of the first waiting event."""
        self.emit: Emit | None = self.waiting.append if self._readers else None
        """Adds an event; None without readers."""
        has_details = any(getattr(reader, "wants_details", True) for reader in self._readers)
        self.emit_details: Emit | None = self.emit if has_details else None
        """Adds a page or request event; None if no reader wants details."""
        takes_rows = all(getattr(reader, "takes_rows", False) for reader in self._readers)
        self.emit_row: Callable[[StepRow], object] | None = self.waiting.append if takes_rows else None
        """Adds a step as a row; None if a reader needs the event."""

    def add_reader(self, reader: EventReader) -> None:
        """Add a reader of all events from now on. It must not want details."""
        assert getattr(reader, "wants_details", True) is False, "details are made for readers that were there first"
        if self.emit_row is not None:
            self.flush()
            self.emit_row = None
        self._readers += (reader,)
        self.emit = self.waiting.append

    @property
    def mark(self) -> int:
        """The position of the next event among those waiting."""
        return len(self.waiting)

    def take_from(self, mark: int) -> list[Event]:
        """Remove and return the events added since `mark`, so that the caller can add them again in another order."""
        events = cast("list[Event]", self.waiting[mark:])  # a log with details has no rows
        del self.waiting[mark:]
        return events

    def flush(self) -> None:
        """Pass all waiting events to the readers. Their exceptions, such as AuditError, propagate."""
        events = cast("list[Event]", self.waiting)  # rows are among them only if all readers take rows
        if not events:
            return
        for reader in self._readers:
            reader.observe(events)
        self.num_events += len(events)
        events.clear()

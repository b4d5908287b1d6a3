"""Cache events of one worker, as a router receives them: each with the time at which the worker sent it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvarts.event_log import EventLog
from kvarts.events import (
    Event,
    LeapDone,
    PagesRemoved,
    PagesStored,
    StepDone,
    StepEnded,
    StepStarted,
    TransferEnded,
)

__all__ = ["CacheFeed"]

Changed = PagesStored | PagesRemoved


class CacheFeed:
    """An EventReader that forwards, with times, which pages can be found and which no longer can.

    `at_end`: changes of a step are sent when the step ends; otherwise when it is scheduled. The feed also reads events
    that wait in the log, because its reader may be queried during a step.
    """

    wants_details = True

    def __init__(self, tell: Callable[[Changed, int], object], *, at_end: bool) -> None:
        self._tell = tell
        self._at_end = at_end
        self._log: EventLog | None = None
        self._num_read = 0
        self._time_ns = 0
        self._in_step: list[tuple[int, Changed]] = []
        """Changes of the step or leap in progress, with the number of the step."""
        self._step = -1

    def follow(self, log: EventLog) -> None:
        """Also read events that wait in `log`."""
        self._log = log

    def observe(self, events: Sequence[Event]) -> None:
        """Read events passed on by the log."""
        self._read(events, 0 if self._log is None else self._log.num_events)

    def read(self) -> None:
        """Read events that wait in the log."""
        if self._log is not None:
            self._read(self._log.waiting, self._log.num_events)

    def _read(self, events: Sequence[Event], num_before: int) -> None:
        """Read the new ones of `events`, which `num_before` others precede."""
        start = self._num_read - num_before
        if start >= len(events):
            return
        self._num_read = num_before + len(events)
        for event in events[start:] if start else events:
            if isinstance(event, Changed):
                if self._step >= 0 and self._at_end:
                    self._in_step.append((self._step, event))
                else:
                    self._tell(event, self._time_ns)
            elif isinstance(event, StepStarted):
                if event.step < self._step or self._step < 0:
                    self._end_steps({}, self._time_ns)
                self._step, self._time_ns = event.step, event.start_ns
            elif isinstance(event, StepDone):
                self._end_steps({}, event.start_ns + event.duration_ns)
            elif isinstance(event, LeapDone):
                self._end_leap(event)
            elif isinstance(event, StepEnded):
                self._step, self._time_ns = -1, event.end_ns
            elif isinstance(event, TransferEnded):
                self._step, self._time_ns = -1, event.time_ns

    def _end_leap(self, leap: LeapDone) -> None:
        if not self._in_step:
            return
        ends_ns: dict[int, int] = {}
        end_ns = leap.start_ns
        for index, duration_ns in enumerate(leap.durations_ns):
            end_ns += duration_ns
            ends_ns[leap.step + index] = end_ns
        self._end_steps(ends_ns, end_ns)

    def _end_steps(self, ends_ns: dict[int, int], last_ns: int) -> None:
        for step, event in self._in_step:
            self._tell(event, ends_ns.get(step, last_ns))
        self._in_step.clear()

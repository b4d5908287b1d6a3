"""Bytes of batches that ZMQ holds for subscribers that have not read them."""

from __future__ import annotations

from collections import deque
from typing import Protocol

__all__ = ["MARK_BYTES", "Unread"]

MARK_BYTES = 1 << 20


class Tracker(Protocol):
    """Tracks whether ZMQ still holds a message."""

    @property
    def done(self) -> bool:
        """Whether ZMQ has sent or dropped the message, for all subscribers."""


class Unread:
    """Upper bound of the waiting bytes, from one tracked message per MARK_BYTES.

    Messages of a subscriber wait in order: all waiting messages were sent after the last mark that no longer waits.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[Tracker, int]] = deque()
        """Marks that may wait, each with the number of bytes sent up to it."""
        self._num_sent_bytes = 0
        self._next_mark = 0

    def add(self, num_bytes: int) -> bool:
        """Count a message; return whether it must be tracked as a mark."""
        self._num_sent_bytes += num_bytes
        if self._num_sent_bytes <= self._next_mark:
            return False
        self._next_mark = self._num_sent_bytes + MARK_BYTES
        return True

    def mark(self, tracker: Tracker) -> None:
        """Record the tracker of the last counted message."""
        self._marks.append((tracker, self._num_sent_bytes))

    def update(self) -> int:
        """Drop marks that no longer wait; return the bytes that may wait, to within MARK_BYTES."""
        marks = self._marks
        while marks and marks[0][0].done:
            marks.popleft()
        return self._num_sent_bytes - marks[0][1] if marks else 0

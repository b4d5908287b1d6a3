"""Bytes of batches that ZMQ holds for subscribers that have not read them."""

from __future__ import annotations

from collections import deque
from typing import Protocol

__all__ = ["MARK_BYTES", "Unread"]

MARK_BYTES = 1 << 20


class Tracker(Protocol):
    """Of a message: whether ZMQ holds it."""

    @property
    def done(self) -> bool:
        """Whether ZMQ has sent or dropped it, for all subscribers."""


class Unread:
    """Upper bound of the bytes that wait, from one message per MARK_BYTES that ZMQ tracks.

    Messages of a subscriber wait in order: whatever waits was sent after the last mark that does not.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[Tracker, int]] = deque()
        """Marks that may wait, each with the bytes that were sent before it."""
        self._num_sent_bytes = 0
        self._next_mark = 0

    def add(self, num_bytes: int) -> bool:
        """Count a message; return whether it is to be a mark."""
        self._num_sent_bytes += num_bytes
        if self._num_sent_bytes <= self._next_mark:
            return False
        self._next_mark = self._num_sent_bytes + MARK_BYTES
        return True

    def mark(self, tracker: Tracker) -> None:
        """Note the tracker of the message that was counted last."""
        self._marks.append((tracker, self._num_sent_bytes))

    def update(self) -> int:
        """Drop the marks of which nothing waits; return the bytes that may wait, but for MARK_BYTES."""
        marks = self._marks
        while marks and marks[0][0].done:
            marks.popleft()
        return self._num_sent_bytes - marks[0][1] if marks else 0

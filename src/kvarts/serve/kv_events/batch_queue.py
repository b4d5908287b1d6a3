"""A queue between the thread of an engine and that of a publisher, which can wait for it and for sockets at once."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from threading import Condition

from kvarts.serve.kv_events.told import Batch

__all__ = ["BatchQueue"]

MAX_WAITING = 100_000
AT_ONCE = 1000
"""Batches that are sent before the sender looks at what is asked of it."""


class BatchQueue:
    """Batches that were told and not yet sent, in order. What is put after `close` is dropped."""

    def __init__(self) -> None:
        self._waiting: deque[Batch] = deque()
        self._has_room = Condition()
        self._is_closed = False
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def put(self, batch: Batch) -> None:
        """Add a batch, and wake what waits for it. Never waits."""
        if not self._is_closed:
            self._waiting.append(batch)
            self.wake()

    def pace(self) -> None:
        """Wait while there is too much to send: for what puts, where it holds nothing that the sender needs."""
        if len(self._waiting) > MAX_WAITING:
            with self._has_room:
                self._has_room.wait_for(lambda: len(self._waiting) <= MAX_WAITING or self._is_closed)

    def wake(self) -> None:
        """Make the descriptor readable."""
        with suppress(BlockingIOError):  # it is readable already
            self._write.send(b"\0")

    def fileno(self) -> int:
        """Return a descriptor that is readable when there may be something."""
        return self._read.fileno()

    def take(self) -> Iterator[Batch]:
        """Take batches, AT_ONCE at most: until none is left would never end beside a fast engine."""
        with suppress(BlockingIOError):
            while self._read.recv(4096):
                pass
        for _ in range(min(len(self._waiting), AT_ONCE)):
            yield self._waiting.popleft()
        if self._waiting:
            self.wake()
        with self._has_room:
            self._has_room.notify_all()

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting

    def close(self) -> None:
        """Close the descriptors, and let go what waits for room."""
        with self._has_room:
            self._is_closed = True
            self._has_room.notify_all()
        self._read.close()
        self._write.close()

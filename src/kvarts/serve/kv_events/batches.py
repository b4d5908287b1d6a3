"""KV events before encoding: runs of blocks with their names, in numbered batches; the queue of these."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from threading import Condition

import msgspec

from kvarts.content import Content
from kvarts.keys import BlockKey

__all__ = ["MAX_WAITING", "Batch", "BatchQueue", "BlocksCleared", "BlocksRemoved", "BlocksStored", "Told"]


class BlocksStored(msgspec.Struct, frozen=True, gc=False):
    """Pages of `content` from `start_page` on, one for each of `keys`, can be found.

    `parent`: the block before them. `group`: with KV groups, the group of these parts.
    """

    content: Content
    start_page: int
    keys: Sequence[BlockKey]
    parent: BlockKey | None
    medium: str
    group: int | None = None


class BlocksRemoved(msgspec.Struct, frozen=True, gc=False):
    """Blocks, or their parts in `group`, can no longer be found in `medium`."""

    keys: Sequence[BlockKey]
    medium: str
    group: int | None = None


class BlocksCleared(msgspec.Struct, frozen=True, gc=False):
    """All blocks were removed from all media."""


Told = BlocksStored | BlocksRemoved | BlocksCleared


class Batch(msgspec.Struct, frozen=True, gc=False):
    """The events emitted together at `time_s`, with number `seq`."""

    seq: int
    time_s: float
    told: Sequence[Told]


MAX_WAITING = 100_000
AT_ONCE = 1000
"""Batches sent before the sender checks for requests."""


class BatchQueue:
    """Batches that are emitted and not yet sent, in order. Batches put after `close` are dropped."""

    def __init__(self) -> None:
        self._waiting: deque[Batch] = deque()
        self._has_room = Condition()
        self._is_closed = False
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def put(self, batch: Batch) -> None:
        """Add a batch, and wake the sender. Never waits."""
        if not self._is_closed:
            self._waiting.append(batch)
            self.wake()

    def pace(self) -> None:
        """Wait while too many batches are queued. The caller must not hold locks that the sender needs."""
        if len(self._waiting) > MAX_WAITING:
            with self._has_room:
                self._has_room.wait_for(lambda: len(self._waiting) <= MAX_WAITING or self._is_closed)

    def wake(self) -> None:
        """Make the descriptor readable."""
        with suppress(BlockingIOError):  # it is readable already
            self._write.send(b"\0")

    def fileno(self) -> int:
        """Return a descriptor that is readable when batches may be queued."""
        return self._read.fileno()

    def take(self) -> Iterator[Batch]:
        """Take at most AT_ONCE batches: with a fast engine, the queue might never be empty."""
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
        """Whether the queue is empty."""
        return not self._waiting

    def close(self) -> None:
        """Close the descriptors, and release threads that wait for room."""
        with self._has_room:
            self._is_closed = True
            self._has_room.notify_all()
        self._read.close()
        self._write.close()

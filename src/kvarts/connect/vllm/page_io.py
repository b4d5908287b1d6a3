"""Files below host memory: a thread that writes, reads and deletes pages, and the results of its operations."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread
from typing import Protocol

import msgspec

from kvarts.offload.pagefiles import PageFiles

__all__ = ["Ended", "PageIo", "Places"]


class Places(Protocol):
    """Places of `place_bytes` bytes in host memory."""

    @property
    def place_bytes(self) -> int:
        """Bytes of a place."""

    def read(self, place: int) -> bytes:
        """Return the bytes of a place."""

    def write(self, place: int, payload: bytes) -> None:
        """Set the bytes of a place; `payload` must have exactly as many."""


class Ended(msgspec.Struct, frozen=True):
    """A completed write or read. `is_good`: the page is in its file, or in its place in host memory."""

    key: bytes
    is_write: bool
    is_good: bool
    seconds: float


class PageIo:
    """Moves pages between `region` and `files` in a separate thread. Reads are served before writes and deletions."""

    def __init__(self, files: PageFiles, region: Places) -> None:
        self._files = files
        self._region = region
        self._condition = Condition()
        self._reads: deque[tuple[bytes, int]] = deque()
        self._others: deque[Callable[[], object]] = deque()
        self._ended: deque[Ended] = deque()
        self._num_open = 0
        self._is_closed = False
        self._thread = Thread(target=self._run, name="kvarts-files", daemon=True)
        self._thread.start()

    @property
    def num_open(self) -> int:
        """Operations that have begun and not ended."""
        return self._num_open

    def write(self, key: bytes, place: int) -> None:
        """Begin to write the page in `place`, which must not change until the write has ended."""
        self._begin(lambda: self._write(key, place))

    def delete(self, key: bytes) -> None:
        """Begin to delete a page."""
        self._begin(lambda: self._files.delete(key))

    def read(self, key: bytes, place: int) -> None:
        """Begin to read a page into `place`, which must not be used otherwise until the read has ended."""
        with self._condition:
            self._reads.append((key, place))
            self._num_open += 1
            self._condition.notify_all()

    def take_ended(self) -> list[Ended]:
        """Return the writes and reads that have ended since the last call."""
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def drain(self) -> None:
        """Wait until all operations have ended."""
        with self._condition:
            self._condition.wait_for(lambda: not self._num_open)

    def close(self) -> None:
        """Complete all operations, then end the thread."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        self._thread.join()

    def _begin(self, operation: Callable[[], object]) -> None:
        with self._condition:
            self._others.append(operation)
            self._num_open += 1
            self._condition.notify_all()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._reads or self._others or self._is_closed)
                read = self._reads.popleft() if self._reads else None
                if read is None and not self._others:
                    return
                operation = None if read is not None else self._others.popleft()
            if read is not None:
                self._read(*read)
            elif operation is not None:
                operation()
            with self._condition:
                self._num_open -= 1
                self._condition.notify_all()

    def _write(self, key: bytes, place: int) -> None:
        began = time.monotonic()
        is_good = self._files.write(key, self._region.read(place))
        self._ended.append(Ended(key, is_write=True, is_good=is_good, seconds=time.monotonic() - began))

    def _read(self, key: bytes, place: int) -> None:
        began = time.monotonic()
        payload = self._files.read(key)
        is_good = payload is not None and len(payload) == self._region.place_bytes
        if is_good and payload is not None:
            self._region.write(place, payload)
        self._ended.append(Ended(key, is_write=False, is_good=is_good, seconds=time.monotonic() - began))

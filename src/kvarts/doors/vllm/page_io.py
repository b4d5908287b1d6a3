"""Host memory that processes share, and files below it: the directory of one model, and a thread for its pages."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from threading import Condition, Thread
from typing import Any

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.base.files import make_directory, open_private, own_directory
from kvarts.base.units import parse_bytes
from kvarts.core.tiers.keyed import KeyedTier
from kvarts.core.tiers.pagefiles import PageFiles, file_bytes

__all__ = ["Ended", "ModelFolder", "PageIo", "Places", "bytes_of"]

KEY_BYTES = 36
"""The hash of a block, and its KV group."""


class Places:
    """`num_places` places of `place_bytes` bytes in `memory`."""

    def __init__(self, memory: mmap.mmap | memoryview, place_bytes: int) -> None:
        self.memory = memory
        self.place_bytes = place_bytes
        self.num_places = len(memory) // place_bytes

    def read(self, place: int) -> bytes:
        """Return the bytes of a place."""
        return bytes(self.memory[place * self.place_bytes : (place + 1) * self.place_bytes])

    def write(self, place: int, payload: bytes) -> None:
        """Set the bytes of a place; `payload` must have exactly as many."""
        self.memory[place * self.place_bytes : (place + 1) * self.place_bytes] = payload


class HostRegion(Places):
    """`num_places` places of `place_bytes` bytes, each divided equally among the workers, in the order of their ranks.

    The first process that opens the region creates its file. `unlink` removes the file's name once every process has
    opened it, so that an engine that is killed leaves no file behind.
    """

    def __init__(self, engine_id: str, num_places: int, place_bytes: int) -> None:
        shared = Path("/dev/shm")
        folder = shared if shared.is_dir() else Path(tempfile.gettempdir())
        self._path = folder / f"kvarts-{hashlib.sha256(engine_id.encode()).hexdigest()[:24]}"
        number = open_private(self._path, os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(number, num_places * place_bytes)
            super().__init__(mmap.mmap(number, num_places * place_bytes), place_bytes)
        finally:
            os.close(number)
        self._has_name = True

    def unlink(self) -> None:
        """Remove the name of the file: no further process can open it."""
        if self._has_name:
            self._has_name = False
            self._path.unlink(missing_ok=True)


class ModelFolder:
    """Owner of a folder in `directory`, named by everything except their tokens that pages of `page_bytes` depend on.

    `config`: vLLM's configuration of offloading. `most_bytes`: the most bytes of files. Raises ConfigError and
    OutputError, also for a folder that another engine uses.
    """

    def __init__(self, directory: str, config: Any, *, most_bytes: int, page_bytes: int) -> None:
        parent = Path(directory)
        make_directory(parent)
        folder = parent / _fingerprint(config)
        self._owned = ExitStack()
        self._owned.enter_context(own_directory(folder))
        self.pages = PageFiles(folder, max_bytes=most_bytes)
        self.tier = KeyedTier(most_bytes // file_bytes(KEY_BYTES, page_bytes))
        """Which pages are there, and the order in which they are deleted."""
        places, _ = self.tier.place(self.pages.keys())
        for key in self.pages.keys()[len(places) :]:
            self.pages.delete(key)
        self.tier.settle(places)

    def close(self) -> None:
        """Let other engines use the folder."""
        self._owned.close()


def _fingerprint(config: Any) -> str:
    parallel = config.parallel
    facts = [
        *(config.model.name, config.model.dtype, config.cache.tokens_per_hash, config.cache.blocks_per_chunk),
        *(config.worker_kv_bytes_per_block, config.kv_cache_layout, parallel.tp_size, parallel.pp_size),
        *(parallel.pcp_size, parallel.dcp_size),
        [[group.tokens_per_block, list(group.layer_names)] for group in config.groups],
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def bytes_of(value: Any, field: str) -> int:
    """Return a number of bytes, given as a number or as in "4GiB". Raise ConfigError for `field` if it is neither."""
    if isinstance(value, int):
        return value
    try:
        return parse_bytes(str(value))
    except ValueError as error:
        raise ConfigError(str(error), field=field) from None


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

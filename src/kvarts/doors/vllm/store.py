"""The tiers of one engine, for its scheduler: host memory, and files below it. Does not depend on vLLM."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from kvarts.core.tiers.keyed import KeyedTier, KeyState

if TYPE_CHECKING:
    from kvarts.doors.vllm.page_io import PageIo

__all__ = ["KeyStore", "Reads", "StoreCounts", "TierChange"]

RATE_WEIGHT = 0.1
"""The weight of the last read in the mean time per read."""


class StoreCounts(msgspec.Struct):
    """Totals of the tiers since they were opened, in pages."""

    stored: int = 0
    loaded: int = 0
    evicted: int = 0
    refused: int = 0
    """Pages that found no room in host memory."""
    promoted: int = 0
    """Pages that were read from files into host memory."""
    broken: int = 0
    """Files that could not be read, or whose bytes differ from those written."""
    written: int = 0
    unwritten: int = 0
    """Pages that were not written to files, because the disk was too slow, or failed."""
    computed_instead: int = 0
    """Pages in files that were not read because computing them is faster."""


class TierChange(msgspec.Struct, frozen=True):
    """Pages that can be found in a tier from now on, or no longer."""

    keys: list[bytes]
    tier: Literal["host", "files"]
    is_removed: bool


class Reads:
    """The pages read from files for one request: `asked`, and those `held` in host memory until it loads them."""

    def __init__(self) -> None:
        self.asked: set[bytes] = set()
        self.held: list[bytes] = []
        self.is_over = False


class KeyStore:
    """Pages by key. `host`: places in host memory. `files`: places in files; `page_io` moves their pages.

    `most_writes`: pages that may wait to be written; further pages are not written. `compute_s`: the time to compute a
    page; pages that take longer to read are not read. `most_read_s`: how long a request waits for a page to be read. A
    page in a file is read into host memory before it can be loaded. `tells`: keep changes for `take_changes`.
    """

    def __init__(
        self,
        host: KeyedTier,
        *,
        files: KeyedTier | None = None,
        page_io: PageIo | None = None,
        most_writes: int = 256,
        compute_s: float | None = None,
        most_read_s: float = 10.0,
        tells: bool = False,
    ) -> None:
        assert (files is None) == (page_io is None)
        self.host = host
        self.files = files
        self.counts = StoreCounts()
        self._page_io = page_io
        self._most_writes = most_writes
        self._compute_s = compute_s
        self._read_s = 0.0
        self._most_read_s = most_read_s
        self.num_writing = 0
        """Pages that wait to be written to files."""
        self._reading: dict[bytes, tuple[float, Reads]] = {}
        """Keys that are being read, with the start and the reads of their request."""
        self._changes: list[TierChange] | None = [] if tells else None
        if files is not None:
            self._note(list(files), "files")

    @property
    def has_work(self) -> bool:
        """Whether a page is being read for a request that waits."""
        return bool(self._reading)

    @property
    def num_reading(self) -> int:
        """Pages that wait to be read from files."""
        return len(self._reading)

    def lookup(self, key: bytes, path: Container[bytes], reads: Reads) -> KeyState:
        """Return whether `key` can be loaded; COMING if it will be, or may be. Begins to read a page that is in a file.

        `path`: the known keys of the sequence, which are not evicted for it. `reads`: the pages read for this request.
        No page is read twice for one request, so that every request makes progress.
        """
        self.poll()
        state = self.host.state(key)
        if state is KeyState.COMING and key in self._reading:
            is_late = time.monotonic() - self._reading[key][0] > self._most_read_s
            return KeyState.MISSING if is_late else state
        if state is not KeyState.MISSING or self.files is None or self._page_io is None:
            return state
        if key in reads.asked or self.files.state(key) is not KeyState.STORED:
            return state
        if self._compute_s is not None and self._read_s > self._compute_s:
            self.counts.computed_instead += 1
            return state
        places, evicted = self.host.place([key], path)
        self.counts.evicted += len(evicted)
        self._note(evicted, "host", is_removed=True)
        if key not in places:
            self.counts.refused += 1
            return state
        self.files.pin([key])
        reads.asked.add(key)
        self._reading[key] = time.monotonic(), reads
        self._page_io.read(key, places[key])
        return KeyState.COMING

    def prepare_store(
        self, keys: Sequence[bytes], path: Sequence[bytes], known: Container[bytes]
    ) -> tuple[dict[bytes, int], list[bytes]] | None:
        """Allocate places for those of `keys` that are not stored; return these, and the evicted keys. None: no room.

        `path`: the known keys of the sequence, in the order of its prefix. `known`: the same keys, to look them up.
        """
        host = self.host
        if self.files is not None:
            self.poll()
            self.files.touch(path)
        num_refused = host.num_refused
        places, evicted = host.place(keys, known, path)
        self.counts.evicted += len(evicted)
        self._note(evicted, "host", is_removed=True)
        num_refused = host.num_refused - num_refused
        self.counts.refused += num_refused
        return None if num_refused and not places else (places, evicted)

    def complete_store(
        self, keys: Iterable[bytes], path: Sequence[bytes], known: Container[bytes], *, is_stored: bool = True
    ) -> list[bytes]:
        """End a store, and begin to write its pages to files; return the keys that are now stored.

        `keys`: in the order of their prefix. `path`, `known`: as of `prepare_store`.
        """
        if self._reading:
            keys = [key for key in keys if key not in self._reading]
        done = self.host.settle(keys, is_stored=is_stored)
        if not is_stored:
            return []
        self.counts.stored += len(done)
        self._note(done, "host")
        if self.files is not None:
            for key in done:
                self._write(key, known)
            self.files.touch(path)
        return done

    def prepare_load(self, keys: Sequence[bytes], reads: Reads) -> list[int]:
        """Pin `keys`, which `lookup` found in this step; return their places."""
        places = self.host.pin(keys)
        self.host.unpin(reads.held)
        reads.held = []
        return places

    def end_reads(self, reads: Reads) -> None:
        """Release the pages held for the request of `reads`, which loads no more of them."""
        reads.is_over = True
        self.host.unpin(reads.held)
        reads.held = []

    def complete_load(self, keys: Iterable[bytes]) -> None:
        """End a load."""
        loaded = list(keys)
        self.host.unpin(loaded)
        self.counts.loaded += len(loaded)

    def touch(self, path: Sequence[bytes]) -> None:
        """Make a prefix the most recent, in host memory and in files."""
        self.host.touch(path)
        if self.files is not None:
            self.files.touch(path)

    def poll(self) -> None:
        """Process reads and writes that have ended."""
        if self._page_io is None:
            return
        assert self.files is not None
        for ended in self._page_io.take_ended():
            key = ended.key
            if ended.is_write:
                self.num_writing -= 1
                self.host.unpin([key])
                self.counts.written += ended.is_good
                self.counts.unwritten += not ended.is_good
                self.files.settle([key], is_stored=ended.is_good)
                if ended.is_good:
                    self._note([key], "files")
                continue
            _, reads = self._reading.pop(key)
            self.files.unpin([key])
            self.host.settle([key], is_stored=ended.is_good)
            if ended.is_good:
                if not reads.is_over:
                    self.host.pin([key])
                    reads.held.append(key)
                self.counts.promoted += 1
                self._note([key], "host")
                self._read_s += (ended.seconds - self._read_s) * (RATE_WEIGHT if self._read_s else 1.0)
            else:
                self.counts.broken += 1
                self.files.drop(key)
                self._page_io.delete(key)
                self._note([key], "files", is_removed=True)

    def take_changes(self) -> list[TierChange]:
        """Return the changes since the last call, in their order."""
        if not self._changes:
            return []
        changes, self._changes = self._changes, []
        return changes

    def reset(self) -> None:
        """Drop all pages, and delete the files."""
        if self._page_io is not None:
            assert self.files is not None
            self._page_io.drain()
            self.poll()
            for key in self.files:
                self._page_io.delete(key)
            self._note(list(self.files), "files", is_removed=True)
            self.files.reset()
        stored = [key for key in self.host if self.host.state(key) is KeyState.STORED]
        self._note(stored, "host", is_removed=True)
        self.host.reset()

    def close(self) -> None:
        """Complete all reads and writes, and end the thread."""
        if self._page_io is not None:
            self._page_io.close()
            self.poll()

    def _write(self, key: bytes, path: Container[bytes]) -> None:
        if self.files is None or self._page_io is None or self.files.state(key) is not KeyState.MISSING:
            return
        if self.num_writing >= self._most_writes:
            self.counts.unwritten += 1
            return
        places, evicted = self.files.place([key], path)
        for each in evicted:
            self._page_io.delete(each)
        self._note(evicted, "files", is_removed=True)
        if key not in places:
            self.counts.unwritten += 1
            return
        (place,) = self.host.pin([key])
        self.num_writing += 1
        self._page_io.write(key, place)

    def _note(self, keys: list[bytes], tier: Literal["host", "files"], *, is_removed: bool = False) -> None:
        if keys and self._changes is not None:
            self._changes.append(TierChange(keys, tier, is_removed))

"""kvarts' files below vLLM's own host memory: a secondary tier that vLLM loads by the name of this package.

"secondary_tiers": [{"type": "KvartsFiles", "module_path": "kvarts.doors.vllm",
                     "directory": "/var/cache/kvarts", "disk": "500GiB"}]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import Any, ClassVar

import msgspec
from typing_extensions import override
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, OffloadingEvent, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvarts.base.errors import ConfigError
from kvarts.core.tiers.keyed import KeyState
from kvarts.doors.vllm.page_io import ModelFolder, PageIo, Places, bytes_of

__all__ = ["KvartsFiles"]

RATE_WEIGHT = 0.1
"""The weight of the last read in the mean time per read."""
RESULTS = {
    KeyState.MISSING: LookupResult.MISS,
    KeyState.COMING: LookupResult.RETRY,
    KeyState.STORED: LookupResult.HIT,
}


class FileCounts(msgspec.Struct):
    """Totals of the tier since it was opened, in pages."""

    written: int = 0
    unwritten: int = 0
    """Pages that could not be written."""
    refused: int = 0
    """Pages that found no room, because too many were being written or read."""
    read: int = 0
    broken: int = 0
    """Files that could not be read, or whose bytes differ from those written."""
    evicted: int = 0
    computed_instead: int = 0
    """Lookups of pages that were not read because computing them is faster."""


class _Job:
    """A job of vLLM's. `keys`: those that are read or written. `num_bad`: keys that failed."""

    __slots__ = ("good", "is_load", "job_id", "keys", "num_bad", "num_open", "seconds")

    def __init__(self, job_id: int, keys: list[bytes], num_bad: int, *, is_load: bool) -> None:
        self.job_id = job_id
        self.keys = keys
        self.num_open = len(keys)
        self.is_load = is_load
        self.num_bad = num_bad
        self.good: set[bytes] = set()
        self.seconds = 0.0


class KvartsFiles(SecondaryTierManager):  # type: ignore[misc]
    """Files of at most `disk` bytes in `directory`, which survive a restart: checksummed, the deepest evicted first.

    `prefill_tokens_per_s`: tokens that the device computes per second; files that are slower are not read. A page that
    cannot be read is a miss. Raises ConfigError for invalid options.
    """

    medium: ClassVar[Any] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        directory: str,
        disk: int | str,
        prefill_tokens_per_s: float | None = None,
        enable_kv_events: bool = False,
        locality: str | None = None,
        backpressure_detector: Any = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        config, page_bytes = offloading_spec.config, self.block_size_bytes
        most_bytes = bytes_of(disk, "secondary_tiers.disk")
        folder = self._folder = ModelFolder(directory, config, most_bytes=most_bytes, page_bytes=page_bytes)
        if not folder.tier.num_places:
            folder.close()
            raise ConfigError(
                f"{most_bytes:,} bytes do not hold one page of {page_bytes:,}", field="secondary_tiers.disk"
            )
        self.locality = None if locality is None else Locality(locality)
        self.tier = folder.tier
        self.counts = FileCounts()
        self._primary = Places(primary_kv_view.cast("B"), page_bytes)
        self._page_io = PageIo(folder.pages, self._primary)
        self._compute_s: float | None = None
        if prefill_tokens_per_s is not None:
            num_tokens = max(group.tokens_per_block for group in config.groups) * offloading_spec.blocks_per_chunk
            self._compute_s = num_tokens / prefill_tokens_per_s
        self._read_s = 0.0
        has_events = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[Any] | None = [] if has_events else None
        self._waiting: dict[tuple[bytes, bool], deque[_Job]] = {}
        """The jobs of each key, with whether they write it, in the order of their operations."""
        self._finished: list[Any] = []

    @override
    def on_new_request(self, req_context: Any) -> Any:
        return RequestOffloadingContext()

    @override
    def lookup(self, key: bytes, req_context: Any) -> Any:
        state = self.tier.state(key)
        if state is KeyState.STORED and self._compute_s is not None and self._read_s > self._compute_s:
            self.counts.computed_instead += 1
            return LookupResult.MISS
        return RESULTS[state]

    @override
    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        self.tier.touch(list(keys))

    @override
    def submit_store(self, job_metadata: Any) -> None:
        slots, num_bad = self._slots_of(job_metadata)
        keys = list(slots)
        missing = [key for key in keys if self.tier.state(key) is KeyState.MISSING]
        places, evicted = self.tier.place(missing, frozenset(keys))
        self.counts.evicted += len(evicted)
        self.counts.refused += len(missing) - len(places)
        for key in evicted:
            self._page_io.delete(key)
        self._note(evicted, removed=True)
        job = _Job(job_metadata.job_id, list(places), num_bad, is_load=False)
        for key in places:
            self._waiting.setdefault((key, True), deque()).append(job)
            self._page_io.write(key, slots[key])
        self._end_if_done(job)

    @override
    def submit_load(self, job_metadata: Any) -> None:
        slots, num_bad = self._slots_of(job_metadata)
        stored = [key for key in slots if self.tier.state(key) is KeyState.STORED]
        self.tier.pin(stored)
        self.tier.touch(stored)
        job = _Job(job_metadata.job_id, stored, num_bad + len(slots) - len(stored), is_load=True)
        for key in stored:
            self._waiting.setdefault((key, False), deque()).append(job)
            self._page_io.read(key, slots[key])
        self._end_if_done(job)

    @override
    def get_finished_jobs(self) -> Iterable[Any]:
        counts = self.counts
        for ended in self._page_io.take_ended():
            key = ended.key
            jobs = self._waiting[key, ended.is_write]
            job = jobs.popleft()
            if not jobs:
                del self._waiting[key, ended.is_write]
            job.num_open -= 1
            job.num_bad += not ended.is_good
            job.seconds += ended.seconds
            if ended.is_good:
                job.good.add(key)
            if ended.is_write:
                counts.written += ended.is_good
                counts.unwritten += not ended.is_good
                self.tier.settle([key], is_stored=ended.is_good)
            else:
                self.tier.unpin([key])
                counts.read += ended.is_good
                if ended.is_good:
                    self._read_s += (ended.seconds - self._read_s) * (RATE_WEIGHT if self._read_s else 1.0)
                elif self.tier.state(key) is KeyState.STORED and not jobs:
                    counts.broken += 1
                    self.tier.drop(key)
                    self._page_io.delete(key)
                    self._note([key], removed=True)
            self._end_if_done(job)
        finished, self._finished = self._finished, []
        return finished

    @override
    def has_pending_work(self) -> bool:
        return bool(self._waiting or self._finished)

    @override
    def take_events(self) -> Iterable[Any]:
        events, self._events = self._events, None if self._events is None else []
        return events or ()

    @override
    def drain_jobs(self) -> None:
        self._page_io.drain()

    @override
    def shutdown(self) -> None:
        self._page_io.close()
        self._folder.close()

    def _slots_of(self, job: Any) -> tuple[dict[bytes, int], int]:
        """Return the place in host memory of each key of `job`, and how many keys name a place that is not there."""
        slots = {key: int(place) for key, place in zip(job.keys, job.chunk_ids, strict=True)}
        known = {key: place for key, place in slots.items() if 0 <= place < self._primary.num_places}
        return known, len(slots) - len(known)

    def _end_if_done(self, job: _Job) -> None:
        if job.num_open:
            return
        stored = [key for key in job.keys if key in job.good]
        if not job.is_load:
            self._note(stored, removed=False)
        self._finished.append(
            JobResult(
                job_id=job.job_id,
                success=not job.num_bad,
                successful_keys=tuple(stored) if job.is_load and job.num_bad and stored else None,
                transfer_time=job.seconds,
                transfer_bytes=len(stored) * self.block_size_bytes,
            )
        )

    def _note(self, keys: list[bytes], *, removed: bool) -> None:
        if self._events is not None and keys:
            self._events.append(OffloadingEvent(keys=keys, medium=self.medium, removed=removed, locality=self.locality))

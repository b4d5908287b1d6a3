"""Translates the events of an engine into KV events: blocks stored, blocks removed, and on request the full state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from types import MappingProxyType
from typing import Protocol

from kvarts.content import Content
from kvarts.events import Event, PagesRemoved, PagesStored, StepEnded, StepStarted, TransferEnded
from kvarts.keys import VLLM_DEFAULT_SEED, BlockKey, KeyAlgorithm
from kvarts.serve.kv_events.batches import Batch, BlocksCleared, BlocksRemoved, BlocksStored, Told
from kvarts.serve.kv_events.names import BlockNames
from kvarts.serve.kv_events.resident import Part, Place, ResidentBlocks, runs_of

__all__ = ["MEDIA", "KvEventReader", "Sink"]

NS_PER_S = 1e9

MEDIA = MappingProxyType({"device": "GPU", "host": "CPU", "disk": "STORAGE", "store": "STORAGE"})
"""vLLM's names of the tiers, the fastest first."""


class Sink(Protocol):
    """Receives batches in the order of their numbers, in any thread."""

    def put(self, batch: Batch) -> None:
        """Receive a batch. Never waits."""

    def pace(self) -> None:
        """Wait while too many batches are queued."""


class KvEventReader:
    """An EventReader that passes batches, numbered from 0, to `sink`, and tracks which blocks can be found.

    It knows the caches only by their events. `now_s`: clock for batches; by default, the engine's. Pages of unknown
    tokens are unnamed and counted in `num_unnamed_pages`; only their own request can find them. When the last
    block is removed, one `BlocksCleared` is emitted instead, unless `clears` is False: with several ranks under one
    name, consumers may apply it to all of them.
    """

    wants_details = True

    def __init__(
        self,
        sink: Sink,
        *,
        algorithm: KeyAlgorithm = "sha256_cbor",
        seed: str = VLLM_DEFAULT_SEED,
        now_s: Callable[[], float] | None = None,
        clears: bool = True,
    ) -> None:
        self._sink = sink
        self._now_s = now_s
        self._clears = clears
        self._names = BlockNames(algorithm, seed)
        self._resident = ResidentBlocks(tuple(MEDIA.values()))
        self._lock = Lock()
        self._time_s = 0.0
        self._told: list[Told] = []
        self._removed: list[BlockKey] = []
        self._removed_from: Part = "", None
        self.num_batches = 0
        """Number of batches so far, which is the number of the next batch."""
        self.num_unnamed_pages = 0

    def observe(self, events: Sequence[Event]) -> None:
        """Emit the block changes in `events`, if any, as one batch."""
        with self._lock:
            for event in events:
                if isinstance(event, PagesStored):
                    self._store(event)
                elif isinstance(event, PagesRemoved):
                    self._remove(event)
                elif isinstance(event, StepStarted):
                    self._time_s = event.start_ns / NS_PER_S
                elif isinstance(event, StepEnded):
                    self._time_s = event.end_ns / NS_PER_S
                elif isinstance(event, TransferEnded):
                    self._time_s = event.time_ns / NS_PER_S
            self._tell_removed()
            if self._told:
                told, self._told = self._told, []
                self._batch(told)
        self._sink.pace()  # outside the lock: the sender may be calling `snapshot`

    def snapshot(self) -> Batch:
        """Return events that describe the full state after the last batch, under its number; -1 before the first.

        Any thread may call it.
        """
        with self._lock:
            seq, time_s, parts = self.num_batches - 1, self.time_s, self._resident.copy()
        return Batch(seq, time_s, _everything(parts))

    def announce(self) -> None:
        """Emit the full state as a new batch, as if all blocks had just been stored."""
        with self._lock:
            self._batch(_everything(self._resident.copy()))

    @property
    def time_s(self) -> float:
        """Time of a batch that is emitted now."""
        return self._time_s if self._now_s is None else self._now_s()

    def _batch(self, told: Sequence[Told]) -> None:
        batch = Batch(self.num_batches, self.time_s, told)
        self.num_batches += 1
        self._sink.put(batch)

    def _store(self, event: PagesStored) -> None:
        content, start = event.content, event.start_page
        end = min(event.end_page, content.num_known_pages)
        if end < event.end_page:
            self.num_unnamed_pages += event.end_page - max(end, start)
        if end <= start:
            return
        keys = self._names.of(content, start, end, event.parent)
        parent = self._parent(content, start, event.parent)
        self._tell_removed()
        run = BlocksStored(content, start, keys, parent, MEDIA.get(event.medium, event.medium), event.group)
        self._resident.add(run)
        self._told.append(run)

    def _parent(self, content: Content, start: int, before: Content | None) -> BlockKey | None:
        return self._names.of(content, start - 1, start, before)[0] if start else None

    def _remove(self, event: PagesRemoved) -> None:
        part = MEDIA.get(event.medium, event.medium), event.group
        content = event.content
        end = min(event.end_page, content.num_known_pages)
        if end <= event.start_page:
            return
        keys = self._names.of(content, event.start_page, end)
        keys.reverse()  # the last page is removed first
        if part != self._removed_from:
            self._tell_removed()
            self._removed_from = part
        self._removed += self._resident.remove(part, keys)

    def _tell_removed(self) -> None:
        if not self._removed:
            return
        if self._clears and not self._resident.num_blocks:
            self._told.append(BlocksCleared())
        else:
            self._told.append(BlocksRemoved(tuple(self._removed), *self._removed_from))
        self._removed = []


def _everything(parts: Mapping[Part, Mapping[BlockKey, Place]]) -> list[Told]:
    """Return events that clear everything, and then store the blocks of each medium."""
    told: list[Told] = [BlocksCleared()]
    for part, blocks in parts.items():
        told += runs_of(blocks, part)
    return told

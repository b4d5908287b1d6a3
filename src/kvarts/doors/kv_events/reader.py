"""Translates the events of an engine into KV events: blocks stored, blocks removed, and on request the full state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from threading import Lock
from types import MappingProxyType
from typing import Protocol

from kvarts.core.content import Content
from kvarts.core.events import CopiesRemoved, Event, PagesRemoved, PagesStored, StepEnded, StepStarted, TransferEnded
from kvarts.core.keys import VLLM_DEFAULT_SEED, BlockKey, KeyMaker, root_key
from kvarts.doors.kv_events.batches import ALGORITHM, Batch, BlocksCleared, BlocksRemoved, BlocksStored, Told

__all__ = ["MEDIA", "BlockNames", "KvEventReader", "Part", "Place", "ResidentBlocks", "Sink", "runs_of"]

Part = tuple[str, int | None]
"""A medium, and the KV group of the parts in it; None for whole blocks."""

Place = tuple[Content, int, BlockKey | None]
"""A content and page named by a block, and the block before it."""
Blocks = Mapping[Part, Mapping[BlockKey, Place]]
"""Blocks by medium and group."""
NS_PER_S = 1e9

MEDIA = MappingProxyType({"device": "GPU", "host": "CPU", "disk": "STORAGE", "store": "STORAGE"})
"""vLLM's names of the tiers, the fastest first. Other tiers have their own names, in capitals."""


class Hashes(Protocol):
    """Computes keys of blocks, one after the other."""

    def extend(self, keys: list[BlockKey], content: Content, num_pages: int) -> None:
        """Extend `keys`, the first keys of `content`, to `num_pages` keys. All tokens that they hash must be known."""


class BlockNames:
    """The keys of requested pages, cached for the life of their contents. `hashes` computes them."""

    def __init__(self, hashes: Hashes) -> None:
        self._hashes = hashes

    def of(self, content: Content, start: int, end: int, before: Content | None = None) -> list[BlockKey]:
        """Return the keys of pages [start, end) of `content`, whose tokens must be known.

        `before`: a content with the same pages up to `start`, whose keys may be cached already.
        """
        keys: list[BlockKey] | None = content.noted(self)
        if keys is None:
            known: list[BlockKey] | None = None if before is None else before.noted(self)
            keys = [] if known is None else known[:start]
            content.note(self, keys)
        self._hashes.extend(keys, content, end)
        return keys[start:end]


class ResidentBlocks:
    """Owner of the set of blocks in each of `media`, the fastest first; with KV groups, in each group."""

    def __init__(self, media: Sequence[str]) -> None:
        self._media = media
        self._parts: dict[Part, dict[BlockKey, Place]] = {}

    @property
    def num_blocks(self) -> int:
        """Number of blocks, or parts of blocks, in all media together."""
        return sum(map(len, self._parts.values()))

    def has(self, key: BlockKey) -> bool:
        """Return whether a block is in any medium."""
        return any(key in blocks for blocks in self._parts.values())

    def add(self, run: BlocksStored) -> None:
        """Record that blocks are in a medium."""
        blocks = self._parts.setdefault((run.medium, run.group), {})
        content, page, before = run.content, run.start_page, run.parent
        for key in run.keys:
            blocks[key] = content, page, before
            page += run.block_pages
            before = key

    def remove(self, part: Part, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Record that blocks left a medium, or a group in it; return those that were present."""
        blocks = self._parts.get(part, {})
        return [key for key in keys if blocks.pop(key, None) is not None]

    def parts_of(self, medium: str) -> dict[Part, dict[BlockKey, Place]]:
        """Return the blocks in a medium, by group."""
        return {part: blocks for part, blocks in self._parts.items() if part[0] == medium}

    def copy(self) -> dict[Part, dict[BlockKey, Place]]:
        """Return all blocks, by medium and group, as they are now."""
        media = [*self._media, *sorted({medium for medium, _ in self._parts}.difference(self._media))]
        order = {medium: place for place, medium in enumerate(media)}
        parts = sorted(self._parts, key=lambda part: (order[part[0]], -1 if part[1] is None else part[1]))
        return {part: self._parts[part].copy() for part in parts}


def runs_of(blocks: Mapping[BlockKey, Place], part: Part, block_pages: int = 1) -> list[BlocksStored]:
    """Return runs that store `blocks`, of so many pages, each after the runs that it follows."""
    runs: list[BlocksStored] = []
    open_runs: dict[BlockKey, list[BlockKey]] = {}
    # In order of depth, every page follows its parent, and every run the run that it continues.
    for key, (content, page, before) in sorted(blocks.items(), key=lambda item: item[1][1]):
        keys = None if before is None else open_runs.pop(before, None)
        if keys is None:
            keys = []
            runs.append(BlocksStored(content, page, keys, before, *part))
        keys.append(key)
        open_runs[key] = keys
    # The content of a run's first page may end before the run does; that of the last page covers the whole run.
    return [
        BlocksStored(blocks[run.keys[-1]][0], run.start_page, tuple(run.keys), run.parent, *part, block_pages)
        for run in runs
    ]


class Sink(Protocol):
    """Receives batches in the order of their numbers, in any thread."""

    def put(self, batch: Batch) -> None:
        """Receive a batch. Never waits."""

    def pace(self) -> None:
        """Wait while too many batches are queued."""


class KvEventReader:
    """An EventReader that passes batches, numbered from 0, to `sink`, and tracks which blocks can be found.

    It knows the caches only by their events. `hashes`: by default, those of vLLM. `now_s`: clock for batches; by
    default, the engine's. Pages of unknown tokens are unnamed and counted in `num_unnamed_pages`; only
    their own request can find them. When the last block is removed, one `BlocksCleared` is emitted instead, unless
    `clears` is False: with several ranks under one name, consumers may apply it to all of them. `block_pages`: by KV
    group, the pages of a block, whose name is that of its last page; by default 1 in each.
    """

    wants_details = True

    def __init__(
        self,
        sink: Sink,
        *,
        hashes: Hashes | None = None,
        now_s: Callable[[], float] | None = None,
        clears: bool = True,
        block_pages: Sequence[int] = (),
    ) -> None:
        self._sink = sink
        self._block_pages: dict[int | None, int] = {}
        self._block_pages.update(enumerate(block_pages))
        self._now_s = now_s
        self._clears = clears
        self._names = BlockNames(hashes or KeyMaker(ALGORITHM, root_key(ALGORITHM, VLLM_DEFAULT_SEED)))
        self._resident = ResidentBlocks(tuple(MEDIA.values()))
        self._orphans: dict[BlockKey, list[BlocksStored]] = {}
        """Whole pages that a tier has received after all others had lost the page before them, by the name of that
        page: consumers could not place them, and no request can find them."""
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
                self._note(event)
            self._emit_removed()
            if self._told:
                told, self._told = self._told, []
                self._batch(told)
        self._sink.pace()  # outside the lock: the sender may be calling `snapshot`

    def _note(self, event: Event) -> None:
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

    def snapshot(self) -> Batch:
        """Return events that describe the full state after the last batch, under its number; -1 before the first.

        Any thread may call it.
        """
        with self._lock:
            seq, time_s, layers = self.num_batches - 1, self.time_s, self._layers()
        return Batch(seq, time_s, self._everything(layers))

    def announce(self) -> None:
        """Emit the full state as a new batch, as if all blocks had just been stored."""
        with self._lock:
            self._batch(self._everything(self._layers()))

    @property
    def time_s(self) -> float:
        """Time of a batch that is emitted now."""
        return self._time_s if self._now_s is None else self._now_s()

    def _layers(self) -> list[Blocks]:
        """Return the blocks that can be found."""
        return [self._resident.copy()]

    def _everything(self, layers: Sequence[Blocks]) -> list[Told]:
        """Return events that clear everything, and then store the blocks, layer by layer.

        The block before a run may be in another medium alone: whichever begins earlier in a sequence comes first.
        """
        told: list[Told] = [BlocksCleared()]
        for parts in layers:
            runs: list[BlocksStored] = []
            for part, blocks in parts.items():
                runs += runs_of(blocks, part, self._block_pages.get(part[1], 1))
            runs.sort(key=lambda run: run.start_page)
            told += runs
        return told

    def _batch(self, told: Sequence[Told]) -> None:
        batch = Batch(self.num_batches, self.time_s, told)
        self.num_batches += 1
        self._sink.put(batch)

    def _store(self, event: PagesStored) -> None:
        content, start = event.content, event.start_page
        end = self._known_end(content, event.end_page, event.group)
        if end < event.end_page:
            self.num_unnamed_pages += event.end_page - max(end, start)
        if end <= start:
            return
        run = self._run(content, start, end, event.parent, (_medium_of(event), event.group))
        if run.group is None and run.parent is not None and not self._resident.has(run.parent):
            self._orphans.setdefault(run.parent, []).append(run)
        else:
            self._store_run(run)

    def _store_run(self, run: BlocksStored) -> None:
        """Emit a run, and after it the runs that waited for one of its blocks."""
        runs = [run]
        while runs:
            run = runs.pop()
            self._resident.add(run)
            self._emit(run)
            if self._orphans:
                following = [orphan for key in run.keys for orphan in self._orphans.pop(key, ())]
                runs += reversed(following)

    def _run(self, content: Content, start: int, end: int, before: Content | None, part: Part) -> BlocksStored:
        """Return pages [start, end) of `content` as blocks of `part`. `before`: a content with the page before them."""
        pages = self._block_pages.get(part[1], 1)
        keys = self._names.of(content, start, end, before)[pages - 1 :: pages]
        return BlocksStored(content, start, keys, self._parent(content, start, before), *part, pages)

    def _known_end(self, content: Content, end: int, group: int | None) -> int:
        """Return the last page, at most `end`, up to which the tokens of all blocks of a group are known."""
        known = min(end, content.num_known_pages)
        return known - known % self._block_pages.get(group, 1)

    def _emit(self, run: BlocksStored) -> None:
        self._emit_removed()
        self._told.append(run)

    def _parent(self, content: Content, start: int, before: Content | None) -> BlockKey | None:
        return self._names.of(content, start - 1, start, before)[0] if start else None

    def _remove(self, event: PagesRemoved) -> None:
        part = _medium_of(event), event.group
        keys = self._keys_of_removed(event, part)
        self._removed += self._resident.remove(part, keys)
        if self._orphans:
            self._drop_orphans(part, set(keys))

    def _drop_orphans(self, part: Part, keys: Collection[BlockKey]) -> None:
        orphans = [orphan for runs in self._orphans.values() for orphan in runs]
        self._orphans = {}
        for orphan in orphans:
            for left in _without(orphan, part, keys):
                assert left.parent is not None
                self._orphans.setdefault(left.parent, []).append(left)

    def _keys_of_removed(self, event: PagesRemoved | CopiesRemoved, part: Part) -> list[BlockKey]:
        """Return the names of removed pages, the last page first. Removals of another part are emitted before."""
        content = event.content
        end = self._known_end(content, event.end_page, event.group)
        if end <= event.start_page:
            return []
        pages = self._block_pages.get(event.group, 1)
        keys = self._names.of(content, event.start_page, end)[pages - 1 :: pages]
        keys.reverse()
        if part != self._removed_from:
            self._emit_removed()
            self._removed_from = part
        return keys

    def _emit_removed(self) -> None:
        if not self._removed:
            return
        if self._clears and not self._resident.num_blocks:
            self._told.append(BlocksCleared())
        else:
            self._told.append(BlocksRemoved(tuple(self._removed), *self._removed_from))
        self._removed = []


def _without(run: BlocksStored, part: Part, keys: Collection[BlockKey]) -> list[BlocksStored]:
    """Return what is left of `run` when blocks of `part` are removed: runs, each with the block before it."""
    if (run.medium, run.group) != part:
        return [run]
    left: list[BlocksStored] = []
    kept: list[BlockKey] = []
    before = run.parent
    for place, key in enumerate(run.keys):
        if key in keys:
            kept = []
        else:
            if not kept:
                left.append(BlocksStored(run.content, run.start_page + place, kept, before, *part))
            kept.append(key)
        before = key
    return left


def _medium_of(event: PagesStored | PagesRemoved) -> str:
    return MEDIA.get(event.medium) or event.medium.upper()

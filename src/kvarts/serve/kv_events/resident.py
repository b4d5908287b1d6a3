"""The blocks that can be found in each medium, derived only from emitted KV events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvarts.content import Content
from kvarts.keys import BlockKey
from kvarts.serve.kv_events.batches import BlocksStored

__all__ = ["Part", "Place", "ResidentBlocks", "runs_of"]

Part = tuple[str, int | None]
"""A medium, and the KV group of the parts in it; None for whole blocks."""

Place = tuple[Content, int, BlockKey | None]
"""A content and page named by a block, and the block before it."""


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
            page += 1
            before = key

    def remove(self, part: Part, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Record that blocks left a medium, or a group in it; return those that were present."""
        blocks = self._parts.get(part, {})
        return [key for key in keys if blocks.pop(key, None) is not None]

    def copy(self) -> dict[Part, dict[BlockKey, Place]]:
        """Return all blocks, by medium and group, as they are now."""
        order = {medium: place for place, medium in enumerate(self._media)}
        parts = sorted(self._parts, key=lambda part: (order[part[0]], -1 if part[1] is None else part[1]))
        return {part: self._parts[part].copy() for part in parts}


def runs_of(blocks: Mapping[BlockKey, Place], part: Part) -> list[BlocksStored]:
    """Return runs that store `blocks`, each after the runs that it follows."""
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
    return [BlocksStored(blocks[run.keys[-1]][0], run.start_page, tuple(run.keys), run.parent, *part) for run in runs]

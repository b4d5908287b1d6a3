"""Which blocks can be found, in which medium: known from what was told alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvarts.content import Content
from kvarts.keys import BlockKey
from kvarts.serve.kv_events.told import Stored

__all__ = ["Place", "ResidentBlocks", "runs_of"]

Place = tuple[Content, int, BlockKey | None]
"""A content and page that a block names, and the block before it."""


class ResidentBlocks:
    """Owner of the set of blocks in each of `media`, the fastest first."""

    def __init__(self, media: Sequence[str]) -> None:
        self._media: dict[str, dict[BlockKey, Place]] = {medium: {} for medium in media}

    @property
    def num_blocks(self) -> int:
        """Blocks in all media together."""
        return sum(map(len, self._media.values()))

    def has(self, key: BlockKey) -> bool:
        """Return whether a block is in any medium."""
        return any(key in blocks for blocks in self._media.values())

    def add(self, run: Stored) -> None:
        """Take note that blocks are in a medium."""
        blocks = self._media[run.medium]
        content, page, before = run.content, run.start_page, run.parent
        for key in run.keys:
            blocks[key] = content, page, before
            page += 1
            before = key

    def remove(self, medium: str, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Take note that blocks left `medium`; return those of them that were there."""
        blocks = self._media[medium]
        return [key for key in keys if blocks.pop(key, None) is not None]

    def copy(self) -> dict[str, dict[BlockKey, Place]]:
        """Return all blocks, by medium, as they are now."""
        return {medium: blocks.copy() for medium, blocks in self._media.items()}


def runs_of(blocks: Mapping[BlockKey, Place], medium: str) -> list[Stored]:
    """Return runs that store `blocks`, each after the runs that it follows."""
    runs: list[Stored] = []
    open_runs: dict[BlockKey, list[BlockKey]] = {}
    # Pages in order of their depth: a page comes after the page before it, and a run after the one that it follows.
    for key, (content, page, before) in sorted(blocks.items(), key=lambda item: item[1][1]):
        keys = None if before is None else open_runs.pop(before, None)
        if keys is None:
            keys = []
            runs.append(Stored(content, page, keys, before, medium))
        keys.append(key)
        open_runs[key] = keys
    # The content of a run's first page may end before the run does: that of the last has the tokens of all.
    return [Stored(blocks[run.keys[-1]][0], run.start_page, tuple(run.keys), run.parent, medium) for run in runs]

"""What is told of blocks, before it has a form: runs of blocks with their names."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvarts.content import Content
from kvarts.keys import BlockKey

__all__ = ["Batch", "Cleared", "Removed", "Stored", "Told"]


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Pages of `content` from `start_page` on, one for each of `keys`, can be found.

    `parent`: the block before them. `group`: of a cache with KV groups, the one that these parts of them are in.
    """

    content: Content
    start_page: int
    keys: Sequence[BlockKey]
    parent: BlockKey | None
    medium: str
    group: int | None = None


class Removed(msgspec.Struct, frozen=True, gc=False):
    """Blocks can no longer be found in `medium`, or the parts of them that are in `group`."""

    keys: Sequence[BlockKey]
    medium: str
    group: int | None = None


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """No block can be found any more, in no medium."""


Told = Stored | Removed | Cleared


class Batch(msgspec.Struct, frozen=True, gc=False):
    """What is told at once: number `seq`, at `time_s`."""

    seq: int
    time_s: float
    told: Sequence[Told]

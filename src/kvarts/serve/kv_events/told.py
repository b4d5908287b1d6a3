"""KV events before encoding: runs of blocks with their names."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvarts.content import Content
from kvarts.keys import BlockKey

__all__ = ["Batch", "Cleared", "Removed", "Stored", "Told"]


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Pages of `content` from `start_page` on, one for each of `keys`, can be found.

    `parent`: the block before them. `group`: with KV groups, the group of these parts.
    """

    content: Content
    start_page: int
    keys: Sequence[BlockKey]
    parent: BlockKey | None
    medium: str
    group: int | None = None


class Removed(msgspec.Struct, frozen=True, gc=False):
    """Blocks, or their parts in `group`, can no longer be found in `medium`."""

    keys: Sequence[BlockKey]
    medium: str
    group: int | None = None


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """All blocks were removed from all media."""


Told = Stored | Removed | Cleared


class Batch(msgspec.Struct, frozen=True, gc=False):
    """The events emitted together at `time_s`, with number `seq`."""

    seq: int
    time_s: float
    told: Sequence[Told]

"""Elements of a tier's index: runs of pages, and placements of pages that are coming."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from kvarts.content import Content, PageKey
from kvarts.kv.pool import PageId

__all__ = ["ALL", "NOTHING", "NodeState", "Placement", "Segment", "TierRun"]

ALL = 1 << 62
NOTHING = Content(b"", num_tokens=0, page_size=1, owner=-1)


class NodeState(IntEnum):
    """The state of the pages of a run."""

    HOLE = 0
    COMING = 1
    STORED = 2
    DOOMED = 3


class TierRun(msgspec.Struct, eq=False):
    """Pages [start, end) of `content`. Written by TierIndex only.

    `slots`: ids of the tier's pages; None if they are only counted, or in a hole. `placement`: the placement that a
    coming run belongs to. `writer`: the number of the engine that stored it, where several share the tier. `older` and
    `newer`: neighbours in the order of recency, for stored runs.
    """

    content: Content
    key: PageKey
    start: int
    end: int
    parent: TierRun | None
    state: NodeState
    pins: int = 0
    children: dict[PageKey, TierRun] | None = None
    slots: list[PageId] | None = None
    writer: int = 0
    placement: Placement | None = None
    older: TierRun = None  # type: ignore[assignment]
    newer: TierRun = None  # type: ignore[assignment]

    @property
    def num_pages(self) -> int:
        """The number of pages of the run."""
        return self.end - self.start

    def __repr__(self) -> str:
        return f"TierRun(pages {self.start}..{self.end}, {self.state.name}, pins {self.pins})"


class Segment(msgspec.Struct, frozen=True):
    """Pages [start, end) of a sequence, and the tier's pages that they are copied to or from, if these have ids."""

    start: int
    end: int
    slots: tuple[PageId | bytes, ...] | None


class Placement(msgspec.Struct, eq=False):
    """Pages that are coming: `num_pages` in `segments`, in order of position. `run` is the deepest; it is pinned."""

    run: TierRun
    segments: tuple[Segment, ...]
    num_pages: int

"""Parts of pages in a tier below the device, by the names that they have on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvarts.kv.pool import PageId

if TYPE_CHECKING:
    from kvarts.kv.parts import PageName

__all__ = ["BelowPart"]


class BelowPart:
    """The part of one page in one group, or a snapshot, in a tier below the device. Written by the tier only.

    `blocks`: the ids of its blocks there, where blocks have ids. `is_here`: it can be found; before that it is coming.
    `pins`: transfers and offers that keep it.
    """

    __slots__ = ("blocks", "group", "is_here", "name", "pins")

    def __init__(self, name: PageName, group: int, blocks: tuple[PageId, ...]) -> None:
        self.name = name
        self.group = group
        self.blocks = blocks
        self.is_here = False
        self.pins = 1

"""The conservation rule: used and free blocks add up to the total."""

from __future__ import annotations

from functools import partial

import numpy as np

from kvarts.verify.chunk import RowChunk
from kvarts.verify.rule import TimelineRule

__all__ = ["BlockConservation"]


class BlockConservation(TimelineRule):
    """used + free = total in every step; cached blocks are among the free, and reserved blocks among the used.

    Withheld blocks were not used before the step.

    `tiers`: blocks of each tier below the device, by name, if the body gives them. Used plus cached blocks of a tier do
    not exceed its total.
    """

    name = "block_conservation"

    def __init__(self, total: int, tiers: dict[str, int]) -> None:
        super().__init__()
        self._total = total
        self._tiers = tiers

    def feed(self, chunk: RowChunk) -> None:
        """Add up used and free blocks of each row, and compare cached blocks with free ones."""
        used, free = chunk.columns["used_blocks"], chunk.columns["free_blocks"]
        total = self._total
        self.add_where(
            used + free != total,
            chunk,
            ("used_blocks", "free_blocks"),
            lambda used_blocks, free_blocks: (
                f"used {used_blocks} + free {free_blocks} = {used_blocks + free_blocks}, not the total {total}"
            ),
        )
        # free is never negative, so used exceeds the total only where the sum is wrong too.
        self.add_where(
            chunk.columns["cached_blocks"] > free,
            chunk,
            ("cached_blocks", "free_blocks"),
            lambda cached_blocks, free_blocks: f"cached {cached_blocks} of {free_blocks} free",
        )
        withheld, allocated = chunk.columns["withheld_blocks"], chunk.columns["allocated"]
        # Blocks allocated in the step were free before it; without `allocated`, the whole pool may have been free.
        room = np.where(allocated >= 0, np.minimum(free + allocated, total), total)
        self.add_where(
            withheld > room,
            chunk,
            ("withheld_blocks",),
            lambda withheld_blocks, room: f"withheld {withheld_blocks}, and at most {room} were not used before it",
            room=room,
        )
        self.add_where(
            chunk.columns["reserved_blocks"] > used,
            chunk,
            ("reserved_blocks", "used_blocks"),
            lambda reserved_blocks, used_blocks: f"reserved {reserved_blocks} of {used_blocks} used",
        )
        for tier, tier_total in self._tiers.items():
            used_name, cached_name = f"{tier}_used_blocks", f"{tier}_cached_blocks"
            self.add_where(
                np.maximum(chunk.columns[used_name], 0) + np.maximum(chunk.columns[cached_name], 0) > tier_total,
                chunk,
                (used_name, cached_name),
                partial(_tier_overflow, tier, tier_total),
            )


def _tier_overflow(tier: str, total: int, **counts: int) -> str:
    used, cached = counts.values()
    return f"{tier}: used {max(0, used)} + cached {max(0, cached)} are more than its total {total}"

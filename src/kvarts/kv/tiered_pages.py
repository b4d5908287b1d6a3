"""The cache of a device with KV groups above a tier that holds parts of pages as well."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from kvarts.content import Content
from kvarts.kv.block_pages import BlockHolding, BlockPages
from kvarts.kv.cache import Holding
from kvarts.kv.group_memory import GroupMemory
from kvarts.kv.node import HeldPages
from kvarts.kv.parts import GroupedHolding, GroupMatch, Part
from kvarts.kv.tiered_parts import Incoming, TieredParts

__all__ = ["HeldParts", "LoadingHolding", "TieredPages"]


class HeldParts(HeldPages):
    """Parts that a transfer holds."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__([], 0)
        self.parts = parts


class LoadingHolding(BlockHolding):
    """What a request holds that waits for a load. `incoming`: parts that it fills. `num_promised`: blocks kept for it.

    What it may take to compute the rest is free when the load has ended, however long that takes.
    """

    __slots__ = ("incoming", "num_promised")

    def __init__(self, parts: GroupedHolding, num_pages: int, incoming: list[Incoming]) -> None:
        super().__init__(parts, num_pages)
        self.incoming = incoming
        self.num_promised = 0


class TieredPages(BlockPages):
    """BlockPages of `tiered` parts."""

    __slots__ = ("tiered",)

    def __init__(self, memory: GroupMemory, *, num_blocks: int, page_size: int, most_new_tokens: int) -> None:
        super().__init__(
            memory,
            num_blocks=num_blocks,
            page_size=page_size,
            most_new_tokens=most_new_tokens,
            make_parts=TieredParts,
        )
        self.tiered = cast(TieredParts, self.parts)

    def open_offered(self, content: Content, match: GroupMatch, num_wanted: int) -> LoadingHolding:
        """Hold what the device has of `match`, and take parts for the rest; of `num_wanted` blocks, promise the others.

        So many are free.
        """
        num_free = self.num_free
        held, incoming = self.tiered.begin_load(content, match)
        holding = LoadingHolding(held, match.num_pages, incoming)
        self.count()
        holding.num_promised = max(0, num_wanted - (num_free - self.num_free))
        self.num_promised += holding.num_promised
        self.count()
        return holding

    def end_promise(self, holding: Holding) -> None:
        """Let anyone take what was promised to a holding: its request is about to."""
        loading = cast(LoadingHolding, holding)
        self.num_promised -= loading.num_promised
        loading.num_promised = 0
        self.count()

    def check(self, holdings: Iterable[tuple[Holding, int]], holds: Iterable[HeldPages] = ()) -> None:
        """Assert laws L1 and L2 for every part, and that every block has one owner."""
        every = list(holdings)
        for held in holds:
            parts = self.tiered.held_by_transfer(cast(HeldParts, held).parts)
            every.append((BlockHolding(parts), 0))
        super().check(every)

"""A running transfer, its copies, and the counts of those that ended."""

from __future__ import annotations

import msgspec

from kvarts.content import Content
from kvarts.kv.pool import PageId
from kvarts.kv.transfer import Direction
from kvarts.offload.channel import Channel

__all__ = ["ALL", "Copies", "Loading", "OffloadCounts", "UnderWay"]

ALL = 1 << 62


class OffloadCounts(msgspec.Struct):
    """Counts of transfers that ended, and of their faults."""

    num_stores: int = 0
    num_loads: int = 0
    num_failed: int = 0
    num_late: int = 0
    """Failed transfers that were not reported before their deadline."""
    num_given_up: int = 0
    """Failed stores that ended early because requests wanted the pages that they held."""
    num_stray_reports: int = 0
    """Reports that were late, repeated, or about an unknown transfer."""
    num_pages_without_room: int = 0
    """Pages that were to be stored and found no room."""


Read = tuple[int, int, tuple[PageId | bytes, ...], tuple[PageId | bytes, ...]]
"""The place of a tier, the number of blocks to read from it, and the ids of these and of the device's."""


class Copies(msgspec.Struct, eq=False):
    """The `num_blocks` blocks that a store or a spill to the tier at `target` copies. Layouts add the pins.

    `source_ids` and `target_ids`: the ids of the blocks, if an executor copies them. `runs`: contents, each with
    its first page and the page after its last, and `groups`: the group of each, with KV groups. `request`: that of
    a load.
    """

    target: int = -1
    num_blocks: int = 0
    request: int = -1
    source_ids: list[PageId | bytes] = []
    target_ids: list[PageId | bytes] = []
    runs: list[tuple[Content, int, int]] = []
    groups: list[int] = []


class Loading(Copies, kw_only=True):
    """The copies of a load for `request`, whose pages from `start` on it fills, `by_tier` from each tier."""

    start: int
    by_tier: tuple[int, ...]
    reads: list[Read] = msgspec.field(default_factory=list)


class UnderWay(msgspec.Struct, eq=False):
    """A running transfer of `num_pages` blocks. `waiting_for`: workers that have not reported it."""

    direction: Direction
    num_pages: int
    waiting_for: set[int]
    copies: Copies
    num_good_pages: int = ALL
    is_given_up: bool = False
    is_early: bool = False
    """Whether its request may compute while later layers are loaded; such a load does not fail."""
    end_ns: int = ALL
    """When it ends, in virtual time."""
    hidden_ns: int = 0
    """How long before its end the request of a load can compute on."""
    deadline_ns: int = ALL
    least_ns: int = 0
    """When that part of a load ends of which it is known."""
    lane: str = ""
    """The channel that a load waits for."""
    begin_ns: int = 0
    duration_ns: int = 0
    """The duration that an executor reports: that of its slowest worker."""
    lanes: tuple[tuple[Channel, int], ...] = ()
    """The channels, with the bytes that they carry."""
    since_ns: list[int] = []
    """For each request that waits for a load, the start of its wait."""

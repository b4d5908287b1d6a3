"""A running transfer, and the counts of those that ended."""

from __future__ import annotations

import msgspec

from kvarts.kv.node import HeldPages
from kvarts.kv.transfer import Direction
from kvarts.offload.channel import Channel
from kvarts.offload.tier import Tier, TierLoad, TierStore

__all__ = ["ALL", "OffloadCounts", "UnderWay"]

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


class UnderWay(msgspec.Struct, eq=False):
    """A running transfer of `num_pages` pages. `waiting_for`: workers that have not reported it."""

    direction: Direction
    num_pages: int
    waiting_for: set[int]
    num_good_pages: int = ALL
    stores: tuple[tuple[Tier, TierStore], ...] = ()
    held: tuple[tuple[HeldPages, ...], ...] = ()
    loads: tuple[tuple[Tier, TierLoad], ...] = ()
    request: int = -1
    start_page: int = 0
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

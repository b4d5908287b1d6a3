"""A transfer of pages between the device and a tier, or between two tiers: what an executor is told, and answers."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec

from kvarts.kv.pool import PageId

__all__ = [
    "Awaited",
    "Direction",
    "Loaded",
    "Move",
    "Offer",
    "PrefillTimes",
    "Transfer",
    "TransferReport",
    "TransferTotals",
    "Weighed",
]


class PrefillTimes(Protocol):
    """How long computing takes, to weigh it against loading. Promises: the same answer until something is measured."""

    def prefill_ns(self, start: int, end: int) -> int | None:
        """Return how long tokens [start, end) of a sequence take by themselves; None if that is not known yet."""


class Direction(StrEnum):
    """The direction of a transfer."""

    STORE = "store"
    LOAD = "load"
    SPILL = "spill"
    """From host memory to files."""


class Move(msgspec.Struct, frozen=True, gc=False):
    """`source_ids[i]` goes to `target_ids[i]`. A place in files is named by its key, any other by its page.

    `tier`: the tier below that takes part; the other end is the device, or host memory if this is a spill.
    """

    tier: str
    source_ids: tuple[PageId | bytes, ...]
    target_ids: tuple[PageId | bytes, ...]


class Transfer(msgspec.Struct, frozen=True, gc=False):
    """To be begun when the step is. Both ends stay as they are until every worker has reported it."""

    transfer_id: int
    direction: Direction
    moves: tuple[Move, ...]
    num_pages: int
    dropped_keys: tuple[bytes, ...] = ()
    """Files that have to go first."""


class TransferReport(msgspec.Struct, frozen=True, gc=False):
    """Worker `worker` is done with a transfer. `num_good_pages`: how many from the first on are whole; None: all.

    `duration_ns`: how much of the step's time it took, if the executor knows; 0: it does not, or none.
    """

    transfer_id: int
    worker: int = 0
    num_good_pages: int | None = None
    duration_ns: int = 0


class Offer(msgspec.Struct, frozen=True, gc=False):
    """What the tiers below have for a request: pages from each in turn, after those of the device.

    `num_bytes`: what is moved from each, where that is not its pages as a whole.
    """

    num_pages: int
    by_tier: tuple[int, ...]
    num_bytes: tuple[int, ...] = ()


class Awaited(msgspec.Struct, frozen=True, gc=False):
    """The first `num_pages` pages of an offer are on their way to the device for another request, until `end_ns`."""

    num_pages: int
    end_ns: int


class Weighed(msgspec.Struct, frozen=True, gc=False):
    """What is loaded of an offer: its first `num_pages` pages, so many from each tier. None where computing is sooner.

    `is_awaited`: none are loaded, since the load of another request brings them sooner. `load_ns`: how long all of the
    offer would have taken; `worth_ns`: how long it could have.
    """

    num_pages: int
    by_tier: tuple[int, ...]
    is_awaited: bool = False
    load_ns: int = 0
    worth_ns: int = 0


class Loaded(msgspec.Struct, frozen=True, gc=False):
    """A load ended: the request has its first `num_pages` pages, so many of them from each tier below."""

    request: int
    num_pages: int
    by_tier: tuple[int, ...]


class TransferTotals(msgspec.Struct, frozen=True):
    """What moved between the tiers of one engine so far.

    `counts`: of what happened, by name. `num_bytes`: by channel. `num_evicted_pages`: by tier below the device.
    `waited_ns`: by channel, how long requests waited for loads, all together.
    """

    counts: dict[str, int]
    num_bytes: dict[str, int]
    num_evicted_pages: dict[str, int]
    waited_ns: dict[str, int]

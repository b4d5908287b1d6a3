"""Transfers of pages between the device and a tier, or between two tiers: requests to an executor, and its reports."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Literal

import msgspec

from kvarts.core.kv.pool import PageId

__all__ = [
    "Awaited",
    "Coming",
    "Direction",
    "LoadKv",
    "Loaded",
    "Move",
    "Offer",
    "PeersGain",
    "PrefillNs",
    "Transfer",
    "TransferReport",
    "TransferTotals",
    "Weighed",
]


LoadKv = Literal["placed", "async", "sync"]
"""How a request waits for its load: with a place among the running ones, without one, or within a step."""


PrefillNs = Callable[[int, int], int | None]
"""Returns how long tokens [start, end) of a sequence take to compute alone, to be weighed against loading them.

None: that is not known yet. Promises: the same result until a step is measured.
"""


class PeersGain(msgspec.Struct, frozen=True):
    """What workers save that read pages from the memory of other workers. `tier`: the name of that memory.

    `saved_by` has as arguments an offer, the page that it begins with, and the number of tokens of a prompt; it returns
    how many of the pages on offer the prompt saves, in time to compute. `unit_bytes`: the bytes to send for a page, or
    with KV groups for a block.
    """

    tier: str
    saved_by: Callable[[Offer, int, int], float]
    unit_bytes: int = 1

    def saved_pages(self, start: int, num_pages: int, num_tokens: int) -> float:
        """Return how many of `num_pages` pages from `start` on a prompt of `num_tokens` saves, in time to compute."""
        return self.saved_by(Offer(num_pages, (num_pages,)), start, num_tokens)


class Direction(StrEnum):
    """The direction of a transfer."""

    STORE = "store"
    LOAD = "load"
    SPILL = "spill"
    """From host memory to files."""


class Move(msgspec.Struct, frozen=True, gc=False):
    """Copies `source_ids[i]` to `target_ids[i]`. A place in files is named by its key, any other by its page.

    Several places in a row with the same key are one file. One end is a tier below, the other the device, or host
    memory for a spill.
    """

    source_ids: tuple[PageId | bytes, ...]
    target_ids: tuple[PageId | bytes, ...]


class Transfer(msgspec.Struct, frozen=True, gc=False):
    """A transfer to begin with the step. Both ends stay unchanged until every worker has reported it.

    A load may write what a store before it reads: a worker carries out the transfers of a plan in their order.
    """

    transfer_id: int
    direction: Direction
    moves: tuple[Move, ...]
    num_pages: int
    dropped_keys: tuple[bytes, ...] = ()
    """Files to delete first."""


class TransferReport(msgspec.Struct, frozen=True, gc=False):
    """Worker `worker` has finished a transfer. `num_good_pages`: the number of first pages that are intact; None: all.

    `duration_ns`: the part of the step's time that it took, if the executor knows; 0 if not, or if it took none.
    """

    transfer_id: int
    worker: int = 0
    num_good_pages: int | None = None
    duration_ns: int = 0


class Offer(msgspec.Struct, frozen=True, gc=False):
    """The pages that the tiers below have for a request: from each tier in turn, after those of the device.

    `runs`: if these are not whole pages, the runs of parts to move, by the number of tiers that are used: the first
    entry is of a load up to the pages of the first tier, which uses no other. Each run has the place of its tier, pages
    [start, end) of the sequence, and the bytes of each. `most_front`: by the same number, how many of the first pages
    may be computed while the others are loaded; any number, if it is empty.
    """

    num_pages: int
    by_tier: tuple[int, ...]
    runs: tuple[tuple[tuple[int, int, int, int], ...], ...] = ()
    most_front: tuple[int, ...] = ()


class Coming(msgspec.Struct, frozen=True, gc=False):
    """Pages that another engine is storing in a shared tier, as its `write`, and that could be here at `end_ns`.

    `num_blocks`: the number of blocks to load after that.
    """

    write: int
    num_pages: int
    end_ns: int
    num_blocks: int


class Awaited(msgspec.Struct, frozen=True, gc=False):
    """The first `num_pages` pages of an offer are on their way to the device for another request, until `end_ns`."""

    num_pages: int
    end_ns: int


class Weighed(msgspec.Struct, frozen=True, gc=False):
    """The part of an offer to load: its first `num_pages` pages. No pages if computing is faster.

    `num_front`: of these, the first that are computed meanwhile, in `front_ns`; `by_tier`: the others, to
    be loaded. `is_awaited`: no pages are loaded, since the load of another request brings them sooner. `load_ns`: the
    time that the request would wait for the load of the whole offer; `worth_ns`: the most time that it was worth.
    `wait_ns`: the time until the request can compute on: the last layers may arrive while it does; None if unknown.
    """

    num_pages: int
    by_tier: tuple[int, ...]
    is_awaited: bool = False
    load_ns: int = 0
    worth_ns: int = 0
    num_front: int = 0
    front_ns: int = 0
    wait_ns: int | None = None


class Loaded(msgspec.Struct, frozen=True, gc=False):
    """A load ended: the request has its first `num_pages` pages, `by_tier` of them from each tier below.

    `is_under_way`: it has only begun, and its layers arrive in time for a step that starts now.
    """

    request: int
    num_pages: int
    by_tier: tuple[int, ...]
    is_under_way: bool = False


class TransferTotals(msgspec.Struct, frozen=True):
    """Totals of transfers between the tiers of one engine so far.

    `counts`: events by name. `num_bytes`: by channel. `num_evicted_pages`: by tier below the device. `waited_ns`: by
    channel, the total time that requests waited for loads.
    """

    counts: dict[str, int]
    num_bytes: dict[str, int]
    num_evicted_pages: dict[str, int]
    waited_ns: dict[str, int]

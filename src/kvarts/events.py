"""What happened, as values: the product's language, made where somebody asked for it.

Page events speak of runs: pages [start_page, end_page) of a content, which keeps them as cheap as what they tell.
Requests go by `index`, their place in arrival order. Times are integer nanoseconds. Page and request events stand in
the order in which they happened, after the `StepStarted` or `StepEnded` that they belong to.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from kvarts.content import Content

__all__ = [
    "Admitted",
    "Arrived",
    "AtRest",
    "Blocked",
    "Cancelled",
    "ChunkComputed",
    "CopiesRemoved",
    "Event",
    "Finished",
    "HeadBlocked",
    "LeapDone",
    "LoadStarted",
    "PageEvent",
    "PagesRemoved",
    "PagesStored",
    "Preemption",
    "Rejected",
    "StepDone",
    "StepEnded",
    "StepStarted",
    "StoreStarted",
    "TransferEnded",
    "Turns",
]

# Pages ----------------------------------------------------------------------------------------------------


class PagesStored(msgspec.Struct, frozen=True, gc=False):
    """A run of full pages became findable, after page `start_page - 1` of `parent`; None where nothing is before it.

    Copies of what was findable already are not stored anew. `medium`: the tier.
    """

    content: Content
    start_page: int
    end_page: int
    parent: Content | None
    medium: str = "device"


class PagesRemoved(msgspec.Struct, frozen=True, gc=False):
    """A run of cached pages was evicted, the last page first; it can no longer be found. `medium`: the tier."""

    content: Content
    start_page: int
    end_page: int
    medium: str = "device"


class CopiesRemoved(msgspec.Struct, frozen=True, gc=False):
    """A run of cached pages was evicted, the last page first; another copy can still be found."""

    content: Content
    start_page: int
    end_page: int


class StoreStarted(msgspec.Struct, frozen=True, gc=False):
    """Runs of pages, as content, first page, page after the last, are on their way to the tier `medium`.

    Until `TransferEnded`, the device keeps every page up to their ends; if `medium` lies below host memory, that does.
    """

    transfer: int
    medium: str
    runs: tuple[tuple[Content, int, int], ...]


class LoadStarted(msgspec.Struct, frozen=True, gc=False):
    """Pages of a request are on their way to the device, after the `num_hit_pages` it found there.

    `by_tier`: how many from each tier, in order. It has `num_held_pages` pages from now on.
    """

    transfer: int
    request: int
    content: Content
    num_hit_pages: int
    num_held_pages: int
    by_tier: tuple[tuple[str, int], ...]


class TransferEnded(msgspec.Struct, frozen=True, gc=False):
    """A transfer ended; its first `num_good_pages` pages arrived. `request`: whose load it was, or -1.

    `time_ns`: when the engine took note, which it does between steps.
    """

    transfer: int
    request: int
    num_good_pages: int
    time_ns: int


PageEvent = PagesStored | PagesRemoved | CopiesRemoved

# Requests -------------------------------------------------------------------------------------------------


class Blocked(IntEnum):
    """Why the head of the waiting queue was not admitted."""

    NOT = 0
    BUDGET = 1
    PAGES = 2
    SEQS = 3


class Arrived(msgspec.Struct, frozen=True, gc=False):
    """A request was queued, behind or before `num_ahead` others."""

    request: int
    time_ns: int
    content: Content
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    request_id: str | None
    num_ahead: int


class Rejected(msgspec.Struct, frozen=True, gc=False):
    """A request was refused on arrival, because of `reason`."""

    request: int
    time_ns: int
    reason: str
    request_id: str | None


class HeadBlocked(msgspec.Struct, frozen=True, gc=False):
    """The request at the head of the queue was not admitted. Told when it begins, not in every step.

    `num_pages_short`: how many pages were missing, where pages were the reason; else 0.
    """

    request: int
    reason: int
    num_pages_short: int


class Admitted(msgspec.Struct, frozen=True, gc=False):
    """A request began to run, and found its first `num_hit_pages` pages.

    `by_tier`: how many of these, the last ones, had to be loaded from tiers below the device; None if none.
    """

    request: int
    content: Content
    num_hit_pages: int
    by_tier: tuple[tuple[str, int], ...] | None = None


class ChunkComputed(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, end) of a request are computed in this step, of `num_known_tokens` known ones.

    If these are all, the request makes a token, and one more in every step after it.
    """

    request: int
    start: int
    end: int
    num_known_tokens: int


class Preemption(msgspec.Struct, frozen=True, gc=False):
    """A running request lost its pages because another needed one.

    `num_pages_short` is how many pages the asker was missing, of `num_pages_asked`; `num_used_pages` what was in use at
    that moment; `num_computed_tokens` what the victim had computed and has to find again or compute again. `model`: the
    asker is a request of that model on the same device, and pages are counted in the size of the victim's; empty for
    one of its own.
    """

    victim: int
    asker: int
    num_pages_asked: int
    num_pages_short: int
    num_used_pages: int
    num_computed_tokens: int
    model: str = ""


class Finished(msgspec.Struct, frozen=True, gc=False):
    """A request made its last token."""

    request: int
    content: Content


class Cancelled(msgspec.Struct, frozen=True, gc=False):
    """A request was dropped, waiting or running."""

    request: int
    time_ns: int


# Steps ----------------------------------------------------------------------------------------------------


class StepStarted(msgspec.Struct, frozen=True, gc=False):
    """What follows happened in this step. Steps in which nothing happened but decoding may be left out."""

    step: int
    start_ns: int


class StepEnded(msgspec.Struct, frozen=True, gc=False):
    """All steps up to this one are done; what follows happened at its end."""

    step: int
    end_ns: int


class Turns(msgspec.Struct, frozen=True, gc=False):
    """What each step of a leap found, where other models had their turns between them.

    When it began; the pages cached at its mark; the pages withheld, as in StepDone.
    """

    starts_ns: list[int]
    cached: list[int]
    withheld: list[int]


class StepDone(msgspec.Struct, frozen=True, gc=False):
    """A scheduled step, for who keeps a record. Pages are counted at the step's mark: the first moment in which the
    most pages of that step were in use.

    `num_released`: pages that have gone out of use since the engine began. `blocked`: see `Blocked`. `tiers`: pages
    used and pages cached in each tier below, one pair after the other. `num_withheld`: pages that are not used and
    could not be taken before the step, since other models on the device use them or have a claim.
    """

    step: int
    start_ns: int
    duration_ns: int
    num_used: int
    num_cached: int
    num_released: int
    num_running: int
    num_waiting: int
    blocked: int
    num_decodes: int
    num_tokens: int
    num_admitted: int
    preemptions: tuple[Preemption, ...]
    tiers: tuple[int, ...] = ()
    num_withheld: int = 0


class LeapDone(msgspec.Struct, frozen=True, gc=False):
    """Steps alike, one after the other: only decodes.

    `durations_ns` and `pages_taken` are for each step; `num_used` and `num_cached` as before the first. `turns`: of an
    engine that shares a device, see Turns.
    """

    step: int
    start_ns: int
    durations_ns: list[int]
    pages_taken: list[int]
    num_used: int
    num_cached: int
    num_released: int
    num_running: int
    num_waiting: int
    blocked: int
    tiers: tuple[int, ...] = ()
    turns: Turns | None = None


class AtRest(msgspec.Struct, frozen=True, gc=False):
    """After `step` there is nobody left, running or waiting."""

    step: int
    time_ns: int
    num_used: int
    num_cached: int
    num_released: int
    tiers: tuple[int, ...] = ()


Event = (
    PageEvent
    | Arrived
    | Rejected
    | HeadBlocked
    | Admitted
    | ChunkComputed
    | Preemption
    | Finished
    | Cancelled
    | StoreStarted
    | LoadStarted
    | TransferEnded
    | StepStarted
    | StepEnded
    | StepDone
    | LeapDone
    | AtRest
)

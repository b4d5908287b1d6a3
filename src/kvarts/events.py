"""Events: what happened in an engine, as values. They are made only if a reader asked for them.

Page events are about runs, pages [start_page, end_page) of a content, so that an event costs no more than the operation
it reports. Requests are named by `index`, their place in arrival order. Times are integer nanoseconds. Page and request
events are in the order in which they happened, after the `StepStarted` or `StepEnded` that they belong to.

Of a cache with KV groups, a page event is about the parts of its pages in one `group`, counted from 0; a state is at
the page that it was taken at the end of. Numbers of pages that requests lack, or that are used, are then in blocks.
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
    "DraftJudged",
    "DraftTaken",
    "Event",
    "Finished",
    "HeadBlocked",
    "LeapDone",
    "LoadAwaited",
    "LoadStarted",
    "LoadWeighed",
    "PageEvent",
    "PagesRemoved",
    "PagesStored",
    "PartsGivenBack",
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
    """A run of full pages became findable, after page `start_page - 1` of `parent`; None if it is at the root.

    Copies of findable pages are not reported as stored. `medium`: the tier.
    """

    content: Content
    start_page: int
    end_page: int
    parent: Content | None
    medium: str = "device"
    group: int | None = None


class PagesRemoved(msgspec.Struct, frozen=True, gc=False):
    """A run of cached pages was evicted, the last page first; it can no longer be found. `medium`: the tier.

    `is_held`: transfers still hold its pages, which are empty when these end; what is before it is evicted next.
    `is_dropped`: they were not evicted to make room: nothing keeps what windows leave behind.
    """

    content: Content
    start_page: int
    end_page: int
    medium: str = "device"
    is_held: bool = False
    group: int | None = None
    is_dropped: bool = False


class CopiesRemoved(msgspec.Struct, frozen=True, gc=False):
    """A run of cached pages was evicted, the last page first; another copy can still be found.

    `copy`: which of the resident copies, counted from 0 in the order in which they were made. `is_dropped`: as in
    PagesRemoved.
    """

    content: Content
    start_page: int
    end_page: int
    copy: int
    group: int | None = None
    is_dropped: bool = False


class PartsGivenBack(msgspec.Struct, frozen=True, gc=False):
    """No later token of a running request sees these pages in this KV group: it gives its parts back, the last first.

    `content`: that of the request.
    """

    content: Content
    start_page: int
    end_page: int
    group: int


class StoreStarted(msgspec.Struct, frozen=True, gc=False):
    """A store of runs of pages, each (content, first page, page after the last), to the tier `medium` began.

    Until `TransferEnded`, the device keeps these pages; if `medium` lies below host memory, host memory keeps every
    page up to their ends. `groups`: of a cache with KV groups, that of each run.
    """

    transfer: int
    medium: str
    runs: tuple[tuple[Content, int, int], ...]
    groups: tuple[int, ...] = ()


class LoadStarted(msgspec.Struct, frozen=True, gc=False):
    """A load of pages to the device began for a request, after the `num_hit_pages` pages it found there.

    `by_tier`: the number of pages from each tier, in order. The request has `num_held_pages` pages from now on. Of a
    cache with KV groups, what is loaded is whatever the device lacks of the parts that all groups need to go on from
    there, and the request has as many blocks, or may take them when it begins to run.
    """

    transfer: int
    request: int
    content: Content
    num_hit_pages: int
    num_held_pages: int
    by_tier: tuple[tuple[str, int], ...]


class LoadWeighed(msgspec.Struct, frozen=True, gc=False):
    """Tiers below have pages for a request after the `num_hit_pages` that the device has; not all of them are loaded.

    `by_tier`: how many each has, in order. The first `num_pages` of these are loaded, in the same step: to load all
    would have taken `load_ns`, and it would have been worth `worth_ns` at most.
    """

    request: int
    content: Content
    num_hit_pages: int
    by_tier: tuple[tuple[str, int], ...]
    num_pages: int
    load_ns: int
    worth_ns: int


class LoadAwaited(msgspec.Struct, frozen=True, gc=False):
    """A request waits for the load of another, `transfer`.

    It brings what follows the first `num_hit_pages` pages of the request.
    """

    transfer: int
    request: int
    num_hit_pages: int


class TransferEnded(msgspec.Struct, frozen=True, gc=False):
    """A transfer ended; its first `num_good_pages` pages arrived. `request`: the request that the load was for, or -1.

    Of a cache with KV groups, a request can go on from all pages of a load or from none; `num_good_blocks` blocks of
    its parts arrived.

    `time_ns`: when the engine took note of it, which happens between steps.
    """

    transfer: int
    request: int
    num_good_pages: int
    time_ns: int
    num_good_blocks: int = 0


PageEvent = PagesStored | PagesRemoved | CopiesRemoved | PartsGivenBack

# Requests -------------------------------------------------------------------------------------------------


class Blocked(IntEnum):
    """Why the head of the waiting queue was not admitted."""

    NOT = 0
    BUDGET = 1
    PAGES = 2
    SEQS = 3
    HANDOFFS = 4
    """Requests that other engines have computed go first."""


class Arrived(msgspec.Struct, frozen=True, gc=False):
    """A request was queued with `num_ahead` others before it."""

    request: int
    time_ns: int
    content: Content
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    request_id: str | None
    num_ahead: int
    has_own_pages: bool = False
    """It brings its pages along, and takes no others."""


class PagesReserved(msgspec.Struct, frozen=True, gc=False):
    """Pages that requests bring along, and that are in use whether these run or not, are `num_pages` from now on."""

    num_pages: int


class PagesPinned(msgspec.Struct, frozen=True, gc=False):
    """The first `num_pages` pages of `content` are kept in use by `pin`, beside requests, until it is given up."""

    pin: int
    content: Content
    num_pages: int


class PagesUnpinned(msgspec.Struct, frozen=True, gc=False):
    """What `pin` kept in use may be evicted, unless something else uses it."""

    pin: int


class CacheCleared(msgspec.Struct, frozen=True, gc=False):
    """All cached pages of the device that no transfer holds are forgotten; their removals follow at once."""


class Rejected(msgspec.Struct, frozen=True, gc=False):
    """A request was refused on arrival, because of `reason`."""

    request: int
    time_ns: int
    reason: str
    request_id: str | None


class HeadBlocked(msgspec.Struct, frozen=True, gc=False):
    """The request at the head of the queue was not admitted. Reported when that begins, not in every step.

    `num_pages_short`: how many pages were missing, if pages were the reason; else 0.
    """

    request: int
    reason: int
    num_pages_short: int


class Admitted(msgspec.Struct, frozen=True, gc=False):
    """A request began to run, and found its first `num_hit_pages` pages.

    `by_tier`: how many of these, the last ones, had to be loaded from each tier below the device; None if none.
    `reach`: of a cache with KV groups, as far as any of them has a part of a page: from how many pages each group by
    itself could have gone on.
    """

    request: int
    content: Content
    num_hit_pages: int
    by_tier: tuple[tuple[str, int], ...] | None = None
    reach: tuple[int, ...] = ()


class ChunkComputed(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, end) of a request are computed in this step, of `num_known_tokens` known ones.

    If the chunk ends the known tokens, the request samples a token, and one more in every step after it.
    """

    request: int
    start: int
    end: int
    num_known_tokens: int


class DraftTaken(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, end) of a request are drafted ones, computed in this step after its decode.

    It has the pages for them from now on, until `DraftJudged`.
    """

    request: int
    start: int
    end: int


class DraftJudged(msgspec.Struct, frozen=True, gc=False):
    """Of the `num_drafted` tokens that were drafted for a request in this step, the first `num_accepted` are its own.

    They are computed, and count beside the token that the request samples in every step. Pages that only the others
    were in are empty again.
    """

    request: int
    num_drafted: int
    num_accepted: int


class Preemption(msgspec.Struct, frozen=True, gc=False):
    """A running request lost its pages because another request needed them.

    `num_pages_short`: how many of the `num_pages_asked` pages were missing. `num_used_pages`: pages in use at that
    moment. `num_computed_tokens`: tokens that the victim had computed and has to find or compute again. `model`: if not
    empty, the request that asked for pages is one of that model on the same device; pages are counted in the victim's
    size.
    """

    victim: int
    asker: int
    num_pages_asked: int
    num_pages_short: int
    num_used_pages: int
    num_computed_tokens: int
    model: str = ""


class Finished(msgspec.Struct, frozen=True, gc=False):
    """A request generated its last token."""

    request: int
    content: Content


class Cancelled(msgspec.Struct, frozen=True, gc=False):
    """A request was dropped, waiting or running."""

    request: int
    time_ns: int


# Steps ----------------------------------------------------------------------------------------------------


class StepStarted(msgspec.Struct, frozen=True, gc=False):
    """The events that follow happened in this step. Steps with nothing but decodes may be left out."""

    step: int
    start_ns: int


class StepEnded(msgspec.Struct, frozen=True, gc=False):
    """All steps up to this one are done; the events that follow happened at its end."""

    step: int
    end_ns: int


class Turns(msgspec.Struct, frozen=True, gc=False):
    """The state before each step of a leap of an engine that shares its device: other models ran between the steps.

    When the step began; the pages cached at its mark; the pages withheld, as in StepDone.
    """

    starts_ns: list[int]
    cached: list[int]
    withheld: list[int]


class StepDone(msgspec.Struct, frozen=True, gc=False):
    """A scheduled step. Pages are counted at the step's mark: the first moment with the most pages in use.

    `num_released`: pages that have gone out of use since the engine began. `blocked`: why the head of the queue waits.
    `tiers`: pages used and pages cached in each tier below the device, one pair a tier; of a cache with KV groups,
    parts used and parts cached in each group, and pages are counted in blocks. `num_withheld`: pages that are not used
    here and could not be taken before the step, because other models on the device use or claim them.
    `num_reserved`: pages in use that stay in use when no request runs. `num_loading`: waiting requests that wait for a
    load.
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
    num_reserved: int = 0
    num_loading: int = 0
    num_drafted: int = 0
    """Of the tokens: those that were drafted."""
    num_accepted: int = 0
    """Of the drafted ones: those that were accepted."""


class PartsMoved(msgspec.Struct, frozen=True, gc=False):
    """What the steps of a leap did to parts in KV groups, beside taking those of pages.

    For each group with windows or chunks, and each step, how many parts go out of use at its end: `listed` ones are
    cached, `emptied` ones empty; nothing, where all are cached. The last step of the leap is not over. `evicted`: a
    group and how many of its parts were evicted, again and again, in order. That happens as late as it can: when there
    are too few empty blocks.
    """

    listed: list[list[int]]
    emptied: list[list[int]]
    evicted: list[int]


class LeapDone(msgspec.Struct, frozen=True, gc=False):
    """Consecutive steps that are alike: decodes only.

    `durations_ns` and `pages_taken` are for each step; `num_used` and `num_cached` as before the first. `turns`: only
    for an engine that shares its device. `parts`: only of a cache with KV groups, of which `tiers` has the parts used
    and cached as before the first step.
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
    num_reserved: int = 0
    num_loading: int = 0
    parts: PartsMoved | None = None


class AtRest(msgspec.Struct, frozen=True, gc=False):
    """After `step` no request runs or waits."""

    step: int
    time_ns: int
    num_used: int
    num_cached: int
    num_released: int
    tiers: tuple[int, ...] = ()
    num_reserved: int = 0


Event = (
    PageEvent
    | Arrived
    | PagesReserved
    | PagesPinned
    | PagesUnpinned
    | CacheCleared
    | Rejected
    | HeadBlocked
    | Admitted
    | ChunkComputed
    | DraftTaken
    | DraftJudged
    | Preemption
    | Finished
    | Cancelled
    | StoreStarted
    | LoadAwaited
    | LoadStarted
    | LoadWeighed
    | TransferEnded
    | StepStarted
    | StepEnded
    | StepDone
    | LeapDone
    | AtRest
)

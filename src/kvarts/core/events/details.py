"""Events of requests, pages and transfers, made only if a reader wants details."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Protocol

import msgspec

from kvarts.core.content import Content

__all__ = [
    "Admitted",
    "Arrived",
    "AtRest",
    "Blocked",
    "CacheCleared",
    "Cancelled",
    "ChunkComputed",
    "ChunkPlanned",
    "CopiesRemoved",
    "CopiesStored",
    "DecodesStalled",
    "DraftJudged",
    "DraftTaken",
    "Finished",
    "HeadBlocked",
    "LoadAwaited",
    "LoadGivenUp",
    "LoadStarted",
    "LoadUsed",
    "LoadWeighed",
    "PageEvent",
    "PagesPinned",
    "PagesRemoved",
    "PagesReserved",
    "PagesStored",
    "PagesUnpinned",
    "PartsGivenBack",
    "PartsMoved",
    "PerStep",
    "Preemption",
    "PromptHeld",
    "PromptReleased",
    "Rejected",
    "StepEnded",
    "StepStarted",
    "StoreStarted",
    "TransferEnded",
    "Turns",
]

# Pages ----------------------------------------------------------------------------------------------------


class PagesStored(msgspec.Struct, frozen=True, gc=False):
    """A run of full pages became findable, after page `start_page - 1` of `parent`; None at the root.

    Copies of findable pages are another event, CopiesStored. `medium`: the tier.
    """

    content: Content
    start_page: int
    end_page: int
    parent: Content | None
    medium: str = "device"
    group: int | None = None


class PagesRemoved(msgspec.Struct, frozen=True, gc=False):
    """A run of cached pages was evicted, the last page first, and can no longer be found. `medium`: the tier.

    `is_held`: transfers still hold these pages, which become empty when the transfers end; the pages before them are
    evicted next. `is_dropped`: the pages were not evicted to make room, but because pages that leave a window are not
    kept.
    """

    content: Content
    start_page: int
    end_page: int
    medium: str = "device"
    is_held: bool = False
    group: int | None = None
    is_dropped: bool = False


class CopiesStored(msgspec.Struct, frozen=True, gc=False):
    """A run of full pages that could be found already has one more copy; the fields are those of PagesStored."""

    content: Content
    start_page: int
    end_page: int
    parent: Content | None
    group: int | None = None


class CopiesRemoved(msgspec.Struct, frozen=True, gc=False):
    """A run of cached pages was evicted, the last page first; another copy can still be found.

    `copy`: index of the resident copy, from 0 in order of creation. `is_dropped`: as in PagesRemoved.
    """

    content: Content
    start_page: int
    end_page: int
    copy: int
    group: int | None = None
    is_dropped: bool = False


class PartsGivenBack(msgspec.Struct, frozen=True, gc=False):
    """A running request released its parts of these pages, the last first: no later token sees them in this KV group.

    `content`: that of the request.
    """

    content: Content
    start_page: int
    end_page: int
    group: int


class StoreStarted(msgspec.Struct, frozen=True, gc=False):
    """A store of runs of pages, each (content, first page, page after the last), to the tier `medium` began.

    Until `TransferEnded`, the device keeps these pages; if `medium` is below host memory, host memory keeps all pages
    up to their ends. `groups`: with KV groups, the group of each run.
    """

    transfer: int
    medium: str
    runs: tuple[tuple[Content, int, int], ...]
    groups: tuple[int, ...] = ()


class LoadStarted(msgspec.Struct, frozen=True, gc=False):
    """A load of pages to the device began for a request, after the `num_hit_pages` pages that it found there.

    `by_tier`: the number of pages from each tier, in order. The request has `num_held_pages` pages from now on. With KV
    groups, a load contains all parts that the groups need to resume from there and that the device lacks. The request
    then has as many blocks, or may allocate them when it begins to run. `time_ns`: when it began, if that was between
    steps; else -1. `num_front_pages`: pages right after those found, which are computed during the load; the load
    brings the pages after them.
    """

    transfer: int
    request: int
    content: Content
    num_hit_pages: int
    num_held_pages: int
    by_tier: tuple[tuple[str, int], ...]
    time_ns: int = -1
    num_front_pages: int = 0


class LoadWeighed(msgspec.Struct, frozen=True, gc=False):
    """Lower tiers have pages for a request after the `num_hit_pages` on the device, but not all of them are loaded.

    `by_tier`: the number of pages in each, in order. The first `num_pages` of these are loaded in the same step.
    Loading all would have taken `load_ns` and been worth at most `worth_ns`.
    """

    request: int
    content: Content
    num_hit_pages: int
    by_tier: tuple[tuple[str, int], ...]
    num_pages: int
    load_ns: int
    worth_ns: int


class LoadAwaited(msgspec.Struct, frozen=True, gc=False):
    """A request waits for `transfer`, the load of another request.

    The load contains pages that follow the first `num_hit_pages` pages of this request.
    """

    transfer: int
    request: int
    num_hit_pages: int


class LoadUsed(msgspec.Struct, frozen=True, gc=False):
    """A request runs from this step on, while `transfer`, its load, is under way.

    The step computes each layer once that layer is loaded, so it ends after the load. With asynchronous loads, the load
    has ended: its pages can be found from now on, and the request runs once there is room for it.
    """

    transfer: int
    request: int


class LoadGivenUp(msgspec.Struct, frozen=True, gc=False):
    """A request whose asynchronous load had ended lost its pages, since another one needed them; it waits again."""

    request: int


class TransferEnded(msgspec.Struct, frozen=True, gc=False):
    """A transfer ended; its first `num_good_pages` pages arrived. `request`: the request of a load, or -1.

    With KV groups, a request can resume from all pages of a load or from none; `num_good_blocks` blocks of its parts
    arrived.

    `time_ns`: when the engine processed the end, which happens between steps. A store that is given up ends within a
    step, before requests take the pages that it held.
    """

    transfer: int
    request: int
    num_good_pages: int
    time_ns: int
    num_good_blocks: int = 0
    is_given_up: bool = False


PageEvent = PagesStored | PagesRemoved | CopiesStored | CopiesRemoved | PartsGivenBack

# Requests -------------------------------------------------------------------------------------------------


class Blocked(IntEnum):
    """The reason why the head of the waiting queue was not admitted."""

    NOT = 0
    BUDGET = 1
    PAGES = 2
    SEQS = 3
    HANDOFFS = 4
    """Requests computed by other engines have precedence."""
    STORAGE = 5
    """All that could be admitted wait for storage below host memory."""


class Arrived(msgspec.Struct, frozen=True, gc=False):
    """A request was queued behind `num_ahead` others."""

    request: int
    time_ns: int
    content: Content
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    request_id: str | None
    num_ahead: int
    has_session_pages: bool = False
    """It brings its own pages and takes no others."""
    stops: bool = False
    """Its last token ends it."""
    num_generated: int = 0
    """Tokens that another engine has generated before, which are known as well."""


class PagesReserved(msgspec.Struct, frozen=True, gc=False):
    """The number of reserved pages is now `num_pages`: pages that requests bring, in use whether these run or not."""

    num_pages: int


class PagesPinned(msgspec.Struct, frozen=True, gc=False):
    """The first `num_pages` pages of `content` are kept in use by `pin`, whatever requests use, until it ends."""

    pin: int
    content: Content
    num_pages: int


class PagesUnpinned(msgspec.Struct, frozen=True, gc=False):
    """The pages kept by `pin` may be evicted, unless they are otherwise in use."""

    pin: int


class CacheCleared(msgspec.Struct, frozen=True, gc=False):
    """All cached pages of the device that no transfer holds are dropped; the events of their removal follow."""


class Rejected(msgspec.Struct, frozen=True, gc=False):
    """A request was refused on arrival, for `reason`."""

    request: int
    time_ns: int
    reason: str
    request_id: str | None


class HeadBlocked(msgspec.Struct, frozen=True, gc=False):
    """The request at the head of the queue was not admitted. Reported when the wait begins, not at every step.

    `num_pages_short`: number of missing pages, if pages were the reason; else 0.
    """

    request: int
    reason: int
    num_pages_short: int


class Admitted(msgspec.Struct, frozen=True, gc=False):
    """A request began to run, and found its first `num_hit_pages` pages.

    `by_tier`: how many of these, at the end, were loaded from each tier below the device; None if none were. `reach`:
    with KV groups, per group, the longest prefix in pages that the group alone could resume from, among the pages of
    which some group has a part.
    """

    request: int
    content: Content
    num_hit_pages: int
    by_tier: tuple[tuple[str, int], ...] | None = None
    reach: tuple[int, ...] = ()


class ChunkComputed(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, end) of a request are computed in this step, of `num_known_tokens` known ones.

    If the chunk reaches the last known token, the request samples a token, and one more in every later step.
    """

    request: int
    start: int
    end: int
    num_known_tokens: int


class ChunkPlanned(msgspec.Struct, frozen=True, gc=False):
    """A request takes the pages of its tokens up to `end` at its turn, and computes these tokens later in this step.

    It can be preempted before, for a request whose turn is later. Then the pages were taken, and evicted others, for a
    chunk that is not computed. Not emitted where a chunk is computed at once.
    """

    request: int
    end: int


class DecodesStalled(msgspec.Struct, frozen=True, gc=False):
    """Decodes that were admitted after `request`, whose prefill continues, compute their token as a chunk in this step.

    Memory may be short for all of them, and those that were admitted earlier take theirs first.
    """

    request: int


class DraftTaken(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, end) of a request are drafted, and computed in this step after its decode.

    The request has the pages for them from now on, until `DraftJudged`.
    """

    request: int
    start: int
    end: int


class DraftJudged(msgspec.Struct, frozen=True, gc=False):
    """The first `num_accepted` of the `num_drafted` tokens drafted for a request in this step were accepted.

    They are computed, and count in addition to the token that the request samples in every step. Pages that contain
    only rejected tokens are empty again.
    """

    request: int
    num_drafted: int
    num_accepted: int


class Preemption(msgspec.Struct, frozen=True, gc=False):
    """A running request lost its pages because another request needed them.

    `num_pages_short`: how many of the `num_pages_asked` pages were missing. `num_used_pages`: pages in use at that
    time. `num_computed_tokens`: tokens that the victim had computed and must find or compute again. `model`: if not
    empty, the model of the asking request, another one on the same device; pages are counted in the victim's size.
    `keeps_state`: its state is kept for it, to be stored below, unless its last full page has a snapshot already.
    `num_promised`: blocks that were not in use and could not be taken, as requests that wait for loads will need them.
    """

    victim: int
    asker: int
    num_pages_asked: int
    num_pages_short: int
    num_used_pages: int
    num_computed_tokens: int
    model: str = ""
    keeps_state: bool = False
    num_promised: int = 0


class Finished(msgspec.Struct, frozen=True, gc=False):
    """A request generated its last token."""

    request: int
    content: Content


class PromptHeld(msgspec.Struct, frozen=True, gc=False):
    """A request has computed its prompt and generates nothing here: its pages stay in use until `PromptReleased`.

    Another engine copies them, and continues. There the copy is a load with the medium `worker`.
    """

    request: int


class PromptReleased(msgspec.Struct, frozen=True, gc=False):
    """The pages that were held for another engine are released: the request has ended here."""

    request: int
    time_ns: int


class Cancelled(msgspec.Struct, frozen=True, gc=False):
    """A request was dropped, while waiting or running."""

    request: int
    time_ns: int


# Steps ----------------------------------------------------------------------------------------------------


class StepStarted(msgspec.Struct, frozen=True, gc=False):
    """The following events happened in this step. Steps with only decodes may be omitted."""

    step: int
    start_ns: int


class StepEnded(msgspec.Struct, frozen=True, gc=False):
    """All steps up to this one are done; the following events happened at its end."""

    step: int
    end_ns: int


class Turns(msgspec.Struct, frozen=True, gc=False):
    """The state before each step of a leap of an engine that shares its device: other models ran between the steps.

    It contains the start of each step, the pages cached at its mark, and the pages withheld, as in StepDone.
    """

    starts_ns: list[int]
    cached: list[int]
    withheld: list[int]


class PartsMoved(msgspec.Struct, frozen=True, gc=False):
    """The effects of a leap's steps on parts in KV groups, other than allocating them with pages.

    For each group with windows or chunks, and each step, the number of parts released at its end: `listed` ones become
    cached, `emptied` ones empty; both are empty if all are cached. The last step of the leap is not over. `evicted`:
    pairs of a group and a number of evicted parts, concatenated in order. Evictions happen as late as possible: when
    there are too few empty blocks.
    """

    listed: list[list[int]]
    emptied: list[list[int]]
    evicted: list[int]


class PerStep(Protocol):
    """One integer for each step of a leap: a list, or a rule that gives them."""

    def __len__(self) -> int:
        """Return the number of steps."""

    def __iter__(self) -> Iterator[int]:
        """Return the integers, in order."""


class AtRest(msgspec.Struct, frozen=True, gc=False):
    """No request runs or waits after `step`."""

    step: int
    time_ns: int
    num_used: int
    num_cached: int
    num_released: int
    tiers: tuple[int, ...] = ()
    num_reserved: int = 0

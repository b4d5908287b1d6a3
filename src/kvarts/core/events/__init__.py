"""Events: what happened in an engine, as values. They are created only if a reader wants them.

Page events describe runs, pages [start_page, end_page) of a content, so that an event costs no more than the operation
it reports. Requests are identified by `index`, their position in arrival order. Times are integer nanoseconds. Page and
request events are in order of occurrence, after the `StepStarted` or `StepEnded` that they belong to.

With KV groups, a page event describes the parts of its pages in one `group`, counted from 0; a state belongs to the
page at whose end it was taken. Numbers of pages that requests lack, or that are used, are then in blocks.
"""

from __future__ import annotations

from kvarts.core.events.details import (
    Admitted,
    Arrived,
    AtRest,
    Blocked,
    CacheCleared,
    Cancelled,
    ChunkComputed,
    ChunkPlanned,
    CopiesRemoved,
    CopiesStored,
    DecodesStalled,
    DraftJudged,
    DraftTaken,
    Finished,
    HeadBlocked,
    LoadAwaited,
    LoadGivenUp,
    LoadStarted,
    LoadUsed,
    LoadWeighed,
    PageEvent,
    PagesPinned,
    PagesRemoved,
    PagesReserved,
    PagesStored,
    PagesUnpinned,
    PartsGivenBack,
    PartsMoved,
    PerStep,
    Preemption,
    PromptHeld,
    PromptReleased,
    Rejected,
    StepEnded,
    StepStarted,
    StoreStarted,
    TransferEnded,
    Turns,
)
from kvarts.core.events.steps import LeapDone, StepDone

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
    "Event",
    "Finished",
    "HeadBlocked",
    "LeapDone",
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
    "StepDone",
    "StepEnded",
    "StepStarted",
    "StoreStarted",
    "TransferEnded",
    "Turns",
]

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
    | ChunkPlanned
    | DecodesStalled
    | DraftTaken
    | DraftJudged
    | Preemption
    | Finished
    | Cancelled
    | PromptHeld
    | PromptReleased
    | StoreStarted
    | LoadAwaited
    | LoadGivenUp
    | LoadStarted
    | LoadUsed
    | LoadWeighed
    | TransferEnded
    | StepStarted
    | StepEnded
    | StepDone
    | LeapDone
    | AtRest
)

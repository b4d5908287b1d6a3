"""The form of a journal: every event of one engine as a line of JSON, numbered without gaps.

Page events stay runs: pages [start_page, end_page) of a request's sequence. The line of an arrival carries the sequence
itself, so a page can be named, compared and hashed from the journal alone. With KV groups, the head names them, memory
is counted in blocks, and a line about pages is about their parts in one group.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvarts.events import Blocked

__all__ = [
    "JOURNAL_VERSION",
    "REASONS",
    "AdmittedLine",
    "AnyLine",
    "ArrivedLine",
    "BlockedLine",
    "CancelledLine",
    "ComputedLine",
    "DraftedLine",
    "FinishedLine",
    "GivenBackLine",
    "Head",
    "JournalGroup",
    "Line",
    "LoadedLine",
    "LoadingLine",
    "PreemptedLine",
    "RejectedLine",
    "RemovedBelowLine",
    "RemovedLine",
    "StoreFailedLine",
    "StoredBelowLine",
    "StoredLine",
    "StoringLine",
]

JOURNAL_VERSION = 1
REASONS = {Blocked.BUDGET: "token_budget", Blocked.PAGES: "pages", Blocked.SEQS: "sequence_cap"}


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""Numbers of things, of requests and of pages, as far as a journal that is read back is believed."""


class Line(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="event", omit_defaults=True):
    """Every line: its number, the step it belongs to (-1 before the first), when it happened, and its request."""

    n: int
    step: Annotated[int, msgspec.Meta(ge=-1, le=1 << 53)]
    t_ms: Annotated[float, msgspec.Meta(ge=0, le=1e18)]
    request: Count


class ArrivedLine(Line, tag="arrived", frozen=True, kw_only=True, gc=False):
    """`units` stand for `unit_tokens` equal tokens each; `num_known_tokens` of them are known beforehand."""

    request_id: str
    prompt_tokens: Count
    output_tokens: Count
    num_ahead: Count
    unit_tokens: Count
    num_known_tokens: Count
    units: list[int]
    priority: int = 0
    tenant: str | None = None


class RejectedLine(Line, tag="rejected", frozen=True, kw_only=True, gc=False):
    """It could never run."""

    request_id: str
    reason: str


class BlockedLine(Line, tag="blocked", frozen=True, kw_only=True, gc=False):
    """From now on it is the head of the queue that is not admitted; `reason` is one of REASONS."""

    reason: str
    pages_short: Count = 0


class AdmittedLine(Line, tag="admitted", frozen=True, kw_only=True, gc=False):
    """It began to run. `loaded_pages`: those of its hit pages, the last ones, that each tier below the device had.

    `reach`: from how many pages each KV group by itself could have gone on.
    """

    hit_pages: Count
    loaded_pages: dict[str, Count] = {}
    reach: list[Count] = []

    @property
    def ended_by(self) -> list[int]:
        """The KV groups that ended a hit which others could have gone on from; empty if none did by itself."""
        least = min(self.reach, default=0)
        if max(self.reach, default=0) == least or least > self.hit_pages:
            return []
        return [group for group, reach in enumerate(self.reach) if reach == least]


class ComputedLine(Line, tag="computed", frozen=True, kw_only=True, gc=False):
    """Tokens [start, end) of `known` were computed."""

    start: Count
    end: Count
    known: Count


class DraftedLine(Line, tag="drafted", frozen=True, kw_only=True, gc=False):
    """Of `drafted` tokens that were guessed to follow its own, `accepted` were right: it has that many more."""

    drafted: Count
    accepted: Count


class PreemptedLine(Line, tag="preempted", frozen=True, kw_only=True, gc=False):
    """It lost its pages to `asker`."""

    asker: Count
    pages_asked: Count
    pages_short: Count
    used_pages: Count
    lost_tokens: Count


class FinishedLine(Line, tag="finished", frozen=True, kw_only=True, gc=False):
    """It made its last token. `units`: those generated, where they were not known when it arrived."""

    units: list[int] = []


class CancelledLine(Line, tag="cancelled", frozen=True, kw_only=True, gc=False):
    """It was dropped."""


class StoredLine(Line, tag="stored", frozen=True, kw_only=True, gc=False):
    """Pages of its sequence can be found from now on."""

    start_page: Count
    end_page: Count
    group: Count | None = None


class GivenBackLine(Line, tag="given_back", frozen=True, kw_only=True, gc=False):
    """It gave parts of its pages back, which none of its later tokens sees."""

    start_page: Count
    end_page: Count
    group: Count


class StoringLine(Line, tag="storing", frozen=True, kw_only=True, gc=False):
    """Pages of its sequence are on their way to a tier below, with transfer `transfer`."""

    transfer: Count
    tier: str
    start_page: Count
    end_page: Count
    group: Count | None = None


class StoreFailedLine(Line, tag="store_failed", frozen=True, kw_only=True, gc=False):
    """Pages of its sequence did not arrive in the tier below."""

    transfer: Count
    tier: str
    start_page: Count
    end_page: Count
    group: Count | None = None


class StoredBelowLine(Line, tag="stored_below", frozen=True, kw_only=True, gc=False):
    """Pages of its sequence can be found in a tier below from now on."""

    tier: str
    start_page: Count
    end_page: Count
    group: Count | None = None


class RemovedBelowLine(Line, tag="removed_below", frozen=True, kw_only=True, gc=False):
    """Pages of its sequence left a tier below."""

    tier: str
    start_page: Count
    end_page: Count
    group: Count | None = None


class LoadingLine(Line, tag="loading", frozen=True, kw_only=True, gc=False):
    """Pages it has in tiers below, after `hit_pages` on the device, are on their way, with transfer `transfer`."""

    transfer: Count
    hit_pages: Count
    pages: dict[str, Count]


class LoadedLine(Line, tag="loaded", frozen=True, kw_only=True, gc=False):
    """Its load ended, and `good_pages` pages arrived."""

    transfer: Count
    good_pages: Count


class RemovedLine(Line, tag="removed", frozen=True, kw_only=True, gc=False):
    """Pages of its sequence were evicted, the last first. `is_copy`: another copy can still be found.

    `is_dropped`: nothing was short: what windows leave behind is not kept.
    """

    start_page: Count
    end_page: Count
    is_copy: bool = False
    group: Count | None = None
    is_dropped: bool = False


AnyLine = (
    ArrivedLine
    | RejectedLine
    | BlockedLine
    | AdmittedLine
    | ComputedLine
    | DraftedLine
    | PreemptedLine
    | FinishedLine
    | CancelledLine
    | StoredLine
    | RemovedLine
    | GivenBackLine
    | StoringLine
    | StoreFailedLine
    | StoredBelowLine
    | RemovedBelowLine
    | LoadingLine
    | LoadedLine
)


class JournalGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A KV group: what its layers keep, how many they are, and the blocks of a part. `tokens`: of a window or chunk."""

    kind: str
    layers: Count
    part_blocks: Count
    tokens: Count | None = None
    sink: Count = 0

    def __str__(self) -> str:
        return self.kind if self.tokens is None else f"{self.kind} {self.tokens:,}"

    def needed(self, num_pages: int, page_size: int) -> tuple[range, range]:
        """Return the pages that are needed to go on from so many, at least one: of the sink, and after it.

        Of a state, that of its snapshot.
        """
        if self.kind == "state":
            return range(0), range(num_pages - 1, num_pages)
        position = num_pages * page_size
        first = 0
        if self.tokens is not None:
            first = position - position % self.tokens if self.kind == "chunk" else max(0, position + 1 - self.tokens)
        first_page = first // page_size
        return range(min(first_page, -(-self.sink // page_size))), range(first_page, num_pages)


class Head(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first line. `kv_groups`: empty where pages are whole."""

    kvarts_journal: int
    block_size_tokens: Count
    total_blocks: Count
    kv_groups: list[JournalGroup] = []
    block_bytes: Count = 0

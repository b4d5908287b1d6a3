"""The format of a journal: every event of one engine as a line of JSON, numbered without gaps.

Page events describe runs: pages [start_page, end_page) of a request's sequence. The line of an arrival contains the
sequence, so pages can be identified, compared and hashed from the journal alone. With KV groups, the head lists them,
memory is counted in blocks, and a line about pages describes their parts in one group.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvarts.core.events import Blocked

__all__ = [
    "JOURNAL_VERSION",
    "MOST_STEP",
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
    "HeldLine",
    "JournalGroup",
    "Line",
    "LoadLostLine",
    "LoadedLine",
    "LoadingLine",
    "PreemptedLine",
    "RejectedLine",
    "ReleasedLine",
    "RemovedBelowLine",
    "RemovedLine",
    "StoreFailedLine",
    "StoredBelowLine",
    "StoredLine",
    "StoringLine",
]

JOURNAL_VERSION = 1
REASONS = {
    Blocked.BUDGET: "token_budget",
    Blocked.PAGES: "pages",
    Blocked.SEQS: "sequence_cap",
    Blocked.HANDOFFS: "handoffs",
    Blocked.STORAGE: "storage",
}


MOST_STEP = 1 << 53
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_STEP)]
"""Counts and indices; the bound applies when a journal is read."""


class Line(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="event", omit_defaults=True):
    """Fields of every line: its number, its step (-1 before the first), its time, and its request."""

    n: int
    step: Annotated[int, msgspec.Meta(ge=-1, le=MOST_STEP)]
    t_ms: Annotated[float, msgspec.Meta(ge=0, le=1e18)]
    request: Count


class ArrivedLine(Line, tag="arrived", frozen=True, kw_only=True, gc=False):
    """`units` stand for `unit_tokens` equal tokens each; `num_known_tokens` of them are known in advance."""

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
    """The request was refused, because it could never run."""

    request_id: str
    reason: str


class BlockedLine(Line, tag="blocked", frozen=True, kw_only=True, gc=False):
    """The request is now the head of the queue and is not admitted. `reason` is one of REASONS."""

    reason: str
    pages_short: Count = 0


class AdmittedLine(Line, tag="admitted", frozen=True, kw_only=True, gc=False):
    """The request began to run. `loaded_pages`: how many hit pages, at the end, were loaded from each lower tier.

    `reach`: per KV group, the longest prefix in pages that the group alone could resume from.
    """

    hit_pages: Count
    loaded_pages: dict[str, Count] = {}
    reach: list[Count] = []

    @property
    def ended_by(self) -> list[int]:
        """The KV groups that limited a hit that others could have extended; empty if no single group limited it."""
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
    """`accepted` of `drafted` draft tokens were accepted: the request has that many more."""

    drafted: Count
    accepted: Count


class PreemptedLine(Line, tag="preempted", frozen=True, kw_only=True, gc=False):
    """The request lost its pages to `asker`."""

    asker: Count
    pages_asked: Count
    pages_short: Count
    used_pages: Count
    lost_tokens: Count


class FinishedLine(Line, tag="finished", frozen=True, kw_only=True, gc=False):
    """The request generated its last token. `units`: the generated ones, if they were not known at arrival."""

    units: list[int] = []


class CancelledLine(Line, tag="cancelled", frozen=True, kw_only=True, gc=False):
    """The request was dropped."""


class HeldLine(Line, tag="held", frozen=True, kw_only=True, gc=False):
    """The request's prompt is computed, and its pages stay in use until another engine, which continues, has them."""


class ReleasedLine(Line, tag="released", frozen=True, kw_only=True, gc=False):
    """The pages of the request's prompt are no longer held for another engine: it has ended here."""


class StoredLine(Line, tag="stored", frozen=True, kw_only=True, gc=False):
    """Pages of the request's sequence became findable."""

    start_page: Count
    end_page: Count
    group: Count | None = None


class GivenBackLine(Line, tag="given_back", frozen=True, kw_only=True, gc=False):
    """The request released parts of its pages that none of its later tokens sees."""

    start_page: Count
    end_page: Count
    group: Count


class StoringLine(Line, tag="storing", frozen=True, kw_only=True, gc=False):
    """A store of pages of the request's sequence to a tier below began, as `transfer`."""

    transfer: Count
    tier: str
    start_page: Count
    end_page: Count
    group: Count | None = None


class StoreFailedLine(Line, tag="store_failed", frozen=True, kw_only=True, gc=False):
    """Pages of the request's sequence failed to arrive in the tier below."""

    transfer: Count
    tier: str
    start_page: Count
    end_page: Count
    group: Count | None = None


class StoredBelowLine(Line, tag="stored_below", frozen=True, kw_only=True, gc=False):
    """Pages of the request's sequence became findable in a tier below."""

    tier: str
    start_page: Count
    end_page: Count
    group: Count | None = None


class RemovedBelowLine(Line, tag="removed_below", frozen=True, kw_only=True, gc=False):
    """Pages of the request's sequence were removed from a tier below."""

    tier: str
    start_page: Count
    end_page: Count
    group: Count | None = None


class LoadingLine(Line, tag="loading", frozen=True, kw_only=True, gc=False):
    """A load of the request's pages from tiers below began, as `transfer`.

    It brings those after `hit_pages` on the device and `front_pages` that the request computes meanwhile.
    """

    transfer: Count
    hit_pages: Count
    pages: dict[str, Count]
    front_pages: Count = 0


class LoadedLine(Line, tag="loaded", frozen=True, kw_only=True, gc=False):
    """The request's load ended, and `good_pages` pages arrived."""

    transfer: Count
    good_pages: Count


class LoadLostLine(Line, tag="load_lost", frozen=True, kw_only=True, gc=False):
    """The request, whose load had ended, lost its pages because another one needed them; it waits again."""


class RemovedLine(Line, tag="removed", frozen=True, kw_only=True, gc=False):
    """Pages of the request's sequence were evicted, the last first. `is_copy`: another copy can still be found.

    `is_dropped`: not for lack of room, but because pages that leave a window are not kept.
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
    | HeldLine
    | ReleasedLine
    | StoredLine
    | RemovedLine
    | GivenBackLine
    | StoringLine
    | StoreFailedLine
    | StoredBelowLine
    | RemovedBelowLine
    | LoadingLine
    | LoadLostLine
    | LoadedLine
)


class JournalGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A KV group: kind and number of its layers, and the blocks per part.

    `tokens`: span of a window or a chunk, and of states by page.
    """

    kind: str
    layers: Count
    part_blocks: Count
    tokens: Count | None = None
    sink: Count = 0

    def __str__(self) -> str:
        if self.kind == "state":
            return self.kind if self.tokens is None else f"{self.kind} by page"
        return self.kind if self.tokens is None else f"{self.kind} {self.tokens:,}"

    def needed(self, num_pages: int, page_size: int) -> tuple[range, range]:
        """Return the pages needed to resume after `num_pages` (at least one): those of the sink, and those after it.

        For a state, it is the page of its snapshot.
        """
        if self.kind == "state" and self.tokens is None:
            return range(0), range(num_pages - 1, num_pages)
        position = num_pages * page_size
        first = 0
        if self.tokens is not None:
            first = position - position % self.tokens if self.kind == "chunk" else max(0, position + 1 - self.tokens)
        first_page = first // page_size
        return range(min(first_page, -(-self.sink // page_size))), range(first_page, num_pages)


class Head(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first line. `kv_groups`: empty if pages are not divided into parts."""

    kvarts_journal: int
    block_size_tokens: Count
    total_blocks: Count
    kv_groups: list[JournalGroup] = []
    block_bytes: Count = 0

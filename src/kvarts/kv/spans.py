"""Runs of parts in KV groups, and the spans of pages by which they are found.

A span is a run of pages that sequences share from its first page to its last: it is split where two of them differ, and
nowhere else. In each group it has runs of parts, each with an independent start and end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvarts.content import Content, PageKey
from kvarts.kv.eviction import EvictionOrder
from kvarts.kv.node import NOTHING
from kvarts.kv.part_account import Listed, PartAccount, Spot
from kvarts.kv.pool import PageId
from kvarts.kv.streams import Stream

__all__ = ["NOWHERE", "PartRun", "RunHolding", "RunMatch", "Span", "first_list"]


def first_list(place: int, num_groups: int) -> int:
    """Return the index in `Span.parts` of the first list of the tier at `place` below the device, 0 for the fastest."""
    return (1 + 2 * place) * num_groups


class PartRun(Listed):
    """The parts of pages [start, end) in one group; a snapshot of states belongs to the last page before it.

    `span`: where it can be found; None for pages that only the sequence itself will find, once it has released
    everything. `holders`: the sequences that hold it; without any it is listed, either separately or as a piece of
    `stream`. `is_kept`: it is listed when nothing holds it any more; otherwise it becomes empty. `ids`: the ids of its
    blocks, part by part in the order of pages; empty where blocks are only counted. `keeps`: how many of its holders
    are kept for later. `list_index`: the index of its list in its span: its group for the device, or a later one for a
    tier below. `is_wanted`: it must be stored below before it is evicted. `is_passed`: the window of the last
    sequence that released it has passed it, and that sequence went on. `spot`: its place in the list, while only stores
    hold it. `listed_by`: the eviction order that lists it, unless the account's list does; `place`: that order's state
    of it (Run). `writer`: in a tier that engines share, the engine that stored it.
    """

    __slots__ = (
        "end",
        "group",
        "holders",
        "ids",
        "is_kept",
        "is_passed",
        "is_wanted",
        "keeps",
        "list_index",
        "listed_by",
        "place",
        "span",
        "spot",
        "start",
        "stream",
        "writer",
    )

    def __init__(
        self,
        group: int,
        span: Span | None,
        start: int,
        end: int,
        holders: list[RunHolding],
        *,
        is_kept: bool,
        ids: list[PageId] | None = None,
        list_index: int = -1,
    ) -> None:
        super().__init__()
        self.group = group
        self.list_index = group if list_index < 0 else list_index
        self.is_wanted = False
        self.span = span
        self.start = start
        self.end = end
        self.holders = holders
        self.is_kept = is_kept
        self.is_passed = False
        self.stream: Stream | None = None
        self.ids: list[PageId] = [] if ids is None else ids
        self.keeps = 0
        self.listed_by: EvictionOrder | None = None
        self.place: Any = None
        self.spot: Spot | None = None
        self.writer = -1

    # The interface of eviction orders: Run.

    @property
    def content(self) -> Content:
        """A content that has its pages, which can be found."""
        assert self.span is not None
        return self.span.content

    @property
    def key(self) -> PageKey:
        """The name of its first page among those that follow the same page."""
        return self.content.key(self.start)

    @property
    def parent(self) -> PartRun | None:
        """The run of its group right before it, the oldest of copies; None without one."""
        span = self.span
        assert span is not None
        before = span if self.start > span.start else span.parent
        assert before is not None
        runs = before.parts[self.group] if before.parts else []  # a root has none
        return next((run for run in runs if run.end == self.start), None)

    @property
    def children(self) -> Mapping[PageKey, Span] | None:
        """The spans that follow its last page, by key; None if it ends before its span does."""
        span = self.span
        return span.children if span is not None and span.end == self.end else None

    @property
    def holds(self) -> int:
        """0: runs that a transfer holds are not listed."""
        return 0

    @property
    def is_listed(self) -> bool:
        """Whether it is listed, separately or as a piece of `stream`."""
        return self.newer is not None or self.listed_by is not None or self.stream is not None

    def unlist(self) -> None:
        """Remove it from its list, if it is listed separately."""
        order = self.listed_by
        if order is not None:
            order.removed(self)
            self.leave_order()
        elif self.newer is not None:
            super().unlist()

    def take_spot(self) -> None:
        """List it in its place."""
        spot = self.spot
        assert spot is not None
        self.list_after(spot)
        self.leave_spot()

    def leave_spot(self) -> None:
        """Give its place up."""
        spot = self.spot
        assert spot is not None
        spot.unlist()
        self.spot = None

    def leave_order(self) -> None:
        """Record that no eviction order lists it any more, nor links it."""
        self.listed_by = self.older = self.newer = None

    @property
    def is_found(self) -> bool:
        """Whether it can be found: it was not evicted since it got a span."""
        return self.span is not None

    @property
    def blocks(self) -> tuple[PageId, ...]:
        """The ids of its blocks, as a plan names them."""
        return tuple(self.ids)

    def next_bytes(self, account: PartAccount) -> int:
        """Return the bytes of all its parts."""
        return (self.end - self.start) * account.part_bytes[self.group]

    def eat(self, account: PartAccount, num_bytes: int) -> None:
        """Evict its parts, the last first, until `num_bytes` are empty or nothing is left of it."""
        index = self.group
        part_bytes = account.part_bytes[index]
        count = self.end - self.start
        num_enough = -(-(num_bytes - account.empty_bytes) // part_bytes)
        if num_enough < count:
            count = num_enough
            if account.events is not None:
                account.events.goes(self, self.end - count, self.end, is_dropped=False)
            self.end -= count
            if self.ids:
                at = (self.end - self.start) * account.part_blocks[index]
                account.give_ids(self.ids[at:])
                del self.ids[at:]
        else:
            if account.events is not None:
                account.events.goes(self, self.start, self.end, is_dropped=False)
            if self.ids:
                account.give_ids(self.ids)
                self.ids = []
            self.unlist()
            self.forget()
        account.note_evicted(index, count, count * part_bytes)

    def forget(self) -> None:
        """Make it unfindable; it has no parts left."""
        self.start = self.end
        span = self.span
        if span is not None:
            self.span = None
            span.parts[self.list_index].remove(self)
            if not (span.num_users or span.children):
                span.prune()

    def precedes(self, run: PartRun) -> bool:
        """Return whether no copies are older than it and younger than `run`, of the same span."""
        assert self.span is not None
        runs = self.span.parts[self.list_index]
        place = runs.index(run)
        return place > 0 and runs[place - 1] is self

    def join(self, head: PartRun) -> bool:
        """Take over the parts of `head`, which would be listed right after it, if they directly precede its own.

        Return whether they do. No copies of them may be older than one and younger than the other.
        """
        if head.end != self.start or head.span is not self.span or self.span is None:
            return False
        if head.is_wanted is not self.is_wanted or head.writer != self.writer:
            return False
        if self.list_index == self.group and not head.precedes(self) and not self.precedes(head):
            return False  # a tier below has no copies
        self.span.parts[self.list_index].remove(head)
        self.start = head.start
        if head.ids:
            self.ids = head.ids + self.ids
        return True

    def join_held(self, head: PartRun) -> None:
        """Take over the parts of `head` if they precede its own and the same sequences, but no stream, hold both.

        No copies of them may be older than one and younger than the other.
        """
        span, index = self.span, self.group
        if head.end != self.start or head.span is not span or span is None:
            return
        if head.is_kept is not self.is_kept or head.is_wanted is not self.is_wanted or head.keeps != self.keeps:
            return
        if head.holders != self.holders or not head.precedes(self):
            return
        for holder in self.holders:
            holder.held[index].remove(head)
        head.holders = []
        span.parts[index].remove(head)
        self.start = head.start
        if head.ids:
            self.ids = head.ids + self.ids
        head.span = None

    def split(self, page: int) -> PartRun:
        """Split it before `page`; return the first part, a new run. The rest keeps its identity, and is evicted first.

        In a stream, the first part is evicted first.
        """
        index, span = self.group, self.span
        head = PartRun(
            index, span, self.start, page, self.holders.copy(), is_kept=self.is_kept, list_index=self.list_index
        )
        head.is_wanted, head.keeps, head.place = self.is_wanted, self.keeps, self.place
        head.is_passed, head.writer = self.is_passed, self.writer
        if self.ids:
            at = len(self.ids) // (self.end - self.start) * (page - self.start)
            head.ids = self.ids[:at]
            del self.ids[:at]
        self.start = page
        if span is not None:
            runs = span.parts[self.list_index]
            runs.insert(runs.index(self), head)
        for holder in self.holders:
            held = holder.held[index]
            held.insert(held.index(self), head)
        if self.listed_by is not None:
            head.listed_by, head.stamp = self.listed_by, self.stamp
            self.listed_by.split(head, self)
        elif self.newer is not None:
            head.list_after(self)
        elif self.stream is not None:
            self.stream.insert(head, before=self)
        elif self.spot is not None:
            head.spot = Spot()
            head.spot.list_after(self.spot)
        return head

    def cut(self, start: int, end: int) -> PartRun:
        """Split it so that one run has exactly its pages [start, end); return that run."""
        if self.start < start:
            self.split(start)
        return self if self.end == end else self.split(end)


class Span:
    """Pages [start, end) of `content`. `parts`: for each group the runs that are resident, the oldest first.

    For each tier below, a list per group follows for parts that are there, and another for parts on their way there.

    `key` names its first page among its siblings. `num_users`: the number of sequences whose last full page it has.
    `is_moving`: runs of streams may be out of date.
    """

    __slots__ = ("children", "content", "end", "is_moving", "key", "num_users", "parent", "parts", "start")

    def __init__(
        self, content: Content, key: PageKey, start: int, end: int, parent: Span | None, num_lists: int
    ) -> None:
        self.content = content
        self.key = key
        self.start = start
        self.end = end
        self.parent = parent
        self.children: dict[PageKey, Span] = {}
        self.parts: list[list[PartRun]] = [[] for _ in range(num_lists)]
        self.num_users = 0
        self.is_moving = False

    def prune(self) -> None:
        """Remove it from the tree if nothing needs it, and then its ancestors likewise."""
        span = self
        while not (span.num_users or span.children or any(span.parts)) and span.parent is not None:
            del span.parent.children[span.key]
            span = span.parent


class RunMatch:
    """The first `num_pages` pages that every group can resume from; the last of `spans` may reach beyond.

    `branch`: the page at which the content leaves another one, if that is later and the tree looks for it; else 0.
    """

    __slots__ = ("branch", "num_pages", "pieces", "root", "spans")

    def __init__(self, root: Span, spans: list[Span], num_pages: int) -> None:
        self.root = root
        self.spans = spans
        self.num_pages = num_pages
        self.branch = 0
        self.pieces: list[list[tuple[PartRun, int, int]]] | None = None
        """For each group, the parts with which a sequence begins: runs and their pages. Computed on demand."""


NOWHERE: Final = Span(NOTHING, b"", 0, 0, None, 0)
"""The span of a holding that is not a sequence."""


class RunHolding:
    """The parts that one running sequence holds. Written by RunCache and its collaborators.

    `num_tokens`: tokens that are computed, or are about to be in this step; for a decode, when it began to decode.
    `last`: the span of its last full page that can be found; `num_named` pages can. `num_taken`: pages for which parts
    were taken. `branch`: tokens before the place at which it leaves another content, where snapshots are made; 0 for
    none. `held`: for each group, runs in order of position. `first_open`: for each group, the first page after
    these that cannot be found, as far as it is held. `num_states`: for each group, its own states, 0 or 1. `given`:
    listed runs that cannot be found yet. Where blocks have ids: `open_ids`, the ids of the parts from `first_open` on,
    and `state_ids`, those of its states, by group; `snapshots`, copies of states to make in this step, each with the
    number of tokens before it. `swapped_tokens`: if not 0, it is about to be closed after so many tokens, and its state
    is kept for its own request.

    For a decode: `base` plus the number of steps done is the number of computed tokens, `admission` its place among the
    decodes, `streams` and `odd_steps` the state of each group's releases (Decodes).
    """

    __slots__ = (
        "admission",
        "base",
        "branch",
        "content",
        "first_open",
        "given",
        "has_decoded",
        "held",
        "is_decoding",
        "is_open",
        "last",
        "num_named",
        "num_states",
        "num_taken",
        "num_tokens",
        "odd_steps",
        "open_ids",
        "snapshots",
        "state_ids",
        "streams",
        "swapped_tokens",
    )

    def __init__(self, content: Content, last: Span, num_pages: int, page_size: int, num_groups: int) -> None:
        self.content = content
        self.last = last
        self.num_named = self.num_taken = num_pages
        self.num_tokens = num_pages * page_size
        self.branch = 0
        self.held: list[list[PartRun]] = [[] for _ in range(num_groups)]
        self.first_open = [num_pages] * num_groups
        self.num_states = [0] * num_groups
        self.given: list[PartRun] = []
        self.open_ids: list[list[PageId]] = [[] for _ in range(num_groups)]
        self.state_ids: list[list[PageId]] = [[] for _ in range(num_groups)]
        self.snapshots: list[tuple[int, PartRun]] = []
        self.is_open = True
        self.is_decoding = False
        self.has_decoded = False
        """Whether it has decoded: no prompt ends where its chunks do."""
        self.base = 0
        self.admission = -1
        self.streams: list[Stream | None] = [None] * num_groups
        self.odd_steps = [-1] * num_groups
        self.swapped_tokens = 0

    @property
    def is_transfer(self) -> bool:
        """Whether it is the holding of a transfer and not of a sequence."""
        return self.last is NOWHERE

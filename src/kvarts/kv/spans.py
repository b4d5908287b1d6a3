"""Runs of parts in KV groups, and the spans of pages by which they are found.

A span is a run of pages that sequences have in common from its first page to its last: it is split where two of them
differ, and nowhere else. In each group it has runs of parts, each with a beginning and an end of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvarts.content import Content, PageKey
from kvarts.kv.eviction import EvictionOrder
from kvarts.kv.part_account import Listed, PartAccount
from kvarts.kv.pool import PageId
from kvarts.kv.streams import Stream

__all__ = ["PartRun", "RunHolding", "RunMatch", "Span"]


class PartRun(Listed):
    """The parts of pages [start, end) in one group; a snapshot of states is that of the last page before it.

    `span`: where it can be found; None of pages that only the sequence itself will find, until that has given back
    everything. `holders`: the sequences that hold it; without any it is listed, by itself or as a piece of `stream`.
    `is_kept`: it is listed when nothing holds it any more; else it is empty then. `ids`: those of its blocks, part by
    part in the order of pages; none where blocks are only counted. `keeps`: how many of its holders are kept for later.
    `list_index`: which list of its span it is in: that of its group on the device, or another one of a tier below.
    `is_wanted`: it is to be stored below before it is evicted. `listed_by`: the eviction order that lists it, if not
    the list of the account does; `place`: what that keeps about it, see Run.
    """

    __slots__ = (
        "end",
        "group",
        "holders",
        "ids",
        "is_kept",
        "is_wanted",
        "keeps",
        "list_index",
        "listed_by",
        "place",
        "span",
        "start",
        "stream",
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
        self.stream: Stream | None = None
        self.ids: list[PageId] = [] if ids is None else ids
        self.keeps = 0
        self.listed_by: EvictionOrder | None = None
        self.place: Any = None

    # What an eviction order reads, see Run.

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
        """The run of its group right before it, of copies the oldest; None if there is none."""
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
        """0: what a transfer holds is not listed."""
        return 0

    @property
    def is_listed(self) -> bool:
        """Whether it is listed, by itself or as a piece of `stream`."""
        return self.newer is not None or self.listed_by is not None or self.stream is not None

    def unlist(self) -> None:
        """Take it off the list that it is in, if it is in one by itself."""
        order = self.listed_by
        if order is not None:
            order.removed(self)
            self.leave_order()
        elif self.newer is not None:
            super().unlist()

    def leave_order(self) -> None:
        """Note that no eviction order lists it any more, nor links it."""
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
        """Evict parts of it, the last first, until `num_bytes` are empty or it has none."""
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
        """Let it be found no more; it has no parts left."""
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
        """Take over the parts of `head`, which would be listed right after it, if they come before its own.

        Return whether they do. No copies of them may be older than one and younger than the other.
        """
        if head.end != self.start or head.span is not self.span or self.span is None:
            return False
        if head.is_wanted is not self.is_wanted:
            return False
        if self.list_index == self.group and not head.precedes(self) and not self.precedes(head):
            return False  # there are no copies below
        self.span.parts[self.list_index].remove(head)
        self.start = head.start
        if head.ids:
            self.ids = head.ids + self.ids
        return True

    def join_held(self, head: PartRun) -> None:
        """Take over the parts of `head` if they come before its own and the same sequences hold both, and no stream.

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

        Of a stream, that is the other way round.
        """
        index, span = self.group, self.span
        head = PartRun(
            index, span, self.start, page, self.holders.copy(), is_kept=self.is_kept, list_index=self.list_index
        )
        head.is_wanted, head.keeps, head.place = self.is_wanted, self.keeps, self.place
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
        return head

    def cut(self, start: int, end: int) -> PartRun:
        """Split it so that a run has pages [start, end) of it and no others; return that."""
        if self.start < start:
            self.split(start)
        return self if self.end == end else self.split(end)


class Span:
    """Pages [start, end) of `content`. `parts`: for each group the runs that are resident, the oldest first.

    With a tier below, as many lists follow for what is there, and as many for what is on its way there.

    `key` names its first page among its siblings. `num_users`: sequences of which it has the last full pages.
    `is_moving`: runs of streams may be behind what has happened.
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
        """Forget it if nothing needs it, and then those before it."""
        span = self
        while not (span.num_users or span.children or any(span.parts)) and span.parent is not None:
            del span.parent.children[span.key]
            span = span.parent


class RunMatch:
    """The first `num_pages` pages that every group can go on from; the last of `spans` may reach beyond."""

    __slots__ = ("num_pages", "pieces", "root", "spans")

    def __init__(self, root: Span, spans: list[Span], num_pages: int) -> None:
        self.root = root
        self.spans = spans
        self.num_pages = num_pages
        self.pieces: list[list[tuple[PartRun, int, int]]] | None = None
        """For each group, what a sequence begins with: the run and its pages. Found when it is asked for."""


class RunHolding:
    """What one running sequence holds. Written by RunCache and what belongs to it.

    `num_tokens`: tokens that are computed, or are about to be in this step; of a decode as of when it began. `last`:
    the span of its last full page that can be found, of `num_named`. `num_taken`: pages for which parts were taken.
    `held`: for each group, runs in order of position. `first_open`: for each group, the first page after these that
    cannot be found, as far as it is held. `num_states`: for each group, its own states, 0 or 1. `given`: listed runs
    that cannot be found yet. Where blocks have ids: `open_ids`, those of the parts from `first_open` on, and
    `state_ids`, those of its states, by group; `snapshots`, copies of states to be made in this step, each with the
    tokens after which.

    Of a decode: `base` and the steps done are the tokens computed, `admission` its place among the decodes, `streams`
    and `odd_steps` how each group gives back, see Decodes.
    """

    __slots__ = (
        "admission",
        "base",
        "content",
        "first_open",
        "given",
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
    )

    def __init__(self, content: Content, last: Span, num_pages: int, page_size: int, num_groups: int) -> None:
        self.content = content
        self.last = last
        self.num_named = self.num_taken = num_pages
        self.num_tokens = num_pages * page_size
        self.held: list[list[PartRun]] = [[] for _ in range(num_groups)]
        self.first_open = [num_pages] * num_groups
        self.num_states = [0] * num_groups
        self.given: list[PartRun] = []
        self.open_ids: list[list[PageId]] = [[] for _ in range(num_groups)]
        self.state_ids: list[list[PageId]] = [[] for _ in range(num_groups)]
        self.snapshots: list[tuple[int, PartRun]] = []
        self.is_open = True
        self.is_decoding = False
        self.base = 0
        self.admission = -1
        self.streams: list[Stream | None] = [None] * num_groups
        self.odd_steps = [-1] * num_groups

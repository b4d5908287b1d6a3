"""Runs of parts in KV groups, the spans of pages by which they are found, and the streams of what windows release.

A span is a run of pages that sequences share from its first page to its last: it is split where two of them differ, and
nowhere else. In each group it has runs of parts, each with an independent start and end.

A stream is of pages that the window of a decode releases, one at a time, at regular intervals of steps. The release of
a page does no work for that page: its stream is listed once more (Turns), and that entry stands for the stream's next
page. The position of a stream follows from the step, and is computed when its runs are examined.

An example: with pages of 4 tokens, the window of A passes a page at the end of steps 1, 5 and 9, that of B at the end
of steps 3 and 7. Each time the stream is listed once more, without the page:

    turns      A     B     A     B     A
    page       0     0     1     1     2     the page is not stored: it is `low` of the stream when its turn comes
               evicted----------|
                                at = 3, A.low = 2, B.low = 1

Evicting three parts takes the first three turns: pages 0 of A and of B, and page 1 of A. The turn at 3 is B's and
stands for B's page 1, its `low`. If another sequence finds A's page 2 meanwhile, the page becomes a hole of A: its turn
is skipped, and no entry has to be searched for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvarts.core.content import NOTHING, Content, PageKey
from kvarts.core.kv.cache import Match
from kvarts.core.kv.eviction import EvictionOrder
from kvarts.core.kv.groups import GroupMemory
from kvarts.core.kv.pool import NO_IDS, IdPool, PageId, PageIds

__all__ = [
    "ENDED",
    "NEVER",
    "EvictionSlot",
    "LruEntry",
    "PartCounts",
    "PartRun",
    "RunMatch",
    "RunTable",
    "Span",
    "Stream",
    "Turns",
    "first_list",
    "table_of_transfer",
]

NEVER: Final = (1 << 62) - 1
"""The largest number that compiled code compares without an object."""
NO_HOLES: Final[list[tuple[int, int]]] = []
"""Those of a stream that lists all its pages; nothing adds to it."""
MOST_ALIKE: Final = 1 << 6
"""The number of turns that are examined at once."""
MOST_EVICTED: Final = 1 << 12
"""The number of evicted turns after which their entries are deleted."""


class LruEntry:
    """An entry of the list of a RunAccount, between `older` and `newer`; both are None while it is not listed.

    `stamp`: when its parts were released, where ages are known.
    """

    __slots__ = ("newer", "older", "stamp")

    def __init__(self) -> None:
        self.older: LruEntry | None = None
        self.newer: LruEntry | None = None
        self.stamp = 0

    def next_bytes(self, account: PartCounts) -> int:
        """Return the bytes of its next part to evict, and of those evicted right after it; 0 if it has none."""
        raise AssertionError("no part is cached")

    def evict(self, account: PartCounts, missing_bytes: int) -> int:
        """Evict its parts until these have `missing_bytes` or it has none left; in that case unlist it.

        Return the bytes of the evicted parts, which `PartCounts.note_gone` counts as empty.
        """
        raise AssertionError("parts are missing, and none is cached")

    def list_after(self, older: LruEntry) -> None:
        """List it right after `older`, with the same age."""
        newer = older.newer
        assert newer is not None
        self.stamp = older.stamp
        self.older, self.newer = older, newer
        older.newer = newer.older = self

    def unlist(self) -> None:
        """Remove it from the list."""
        older, newer = self.older, self.newer
        assert older is not None and newer is not None
        older.newer, newer.older = newer, older
        self.older = self.newer = None


class EvictionSlot(LruEntry):
    """The place of an entry that is not listed for the time being. There is nothing to evict, and it stays."""

    def next_bytes(self, account: PartCounts) -> int:
        """Return 0."""
        return 0

    def evict(self, account: PartCounts, missing_bytes: int) -> int:
        """Do nothing."""
        return 0


class PartCounts:
    """Owner of the counts of all parts in `total_bytes`: used, cached and empty.

    `blocks`: the memory as blocks with ids; without it, bytes are counted.
    """

    __slots__ = (
        "_evicted",
        "_of_tokens",
        "block_bytes",
        "blocks",
        "cached_bytes",
        "emits",
        "empty_bytes",
        "evicted_bytes",
        "groups",
        "is_bounded",
        "num_bounded",
        "num_cached",
        "num_evicted",
        "num_used",
        "page_bytes",
        "part_blocks",
        "part_bytes",
        "released_bytes",
        "total_bytes",
    )

    def __init__(self, memory: GroupMemory, *, total_bytes: int, blocks: IdPool | None = None) -> None:
        groups = self.groups = memory.groups
        self.total_bytes = total_bytes
        self.empty_bytes = total_bytes
        self.cached_bytes = 0
        self.num_used = [0] * len(groups)
        """Parts in use, by group."""
        self.num_cached = [0] * len(groups)
        """Parts that can be found and are not in use, by group."""
        self.num_evicted = [0] * len(groups)
        self.evicted_bytes = self.released_bytes = 0
        """Bytes of parts that were evicted, and of those that have gone out of use, since the beginning."""
        self.part_bytes = [group.part_bytes for group in groups]
        self.page_bytes = memory.page_bytes
        """The bytes of a page with all its parts."""
        self.is_bounded = [group.is_bounded for group in groups]
        self.num_bounded = sum(self.is_bounded)
        self._of_tokens = [index for index, group in enumerate(groups) if not group.is_state]
        self.blocks = blocks
        self.block_bytes = memory.block_bytes
        self.part_blocks = [group.part_bytes // memory.block_bytes for group in groups]
        self._evicted: list[int] | None = None
        self.emits = False
        """Whether `emit_gone` has an effect."""

    @property
    def free_bytes(self) -> int:
        """Bytes that can be taken now: empty or cached."""
        return self.empty_bytes + self.cached_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of parts that sequences hold."""
        return self.total_bytes - self.free_bytes

    def note_pages_taken(self, count: int) -> None:
        """Count the parts of `count` pages that were empty as used."""
        self.empty_bytes -= count * self.page_bytes
        num_used = self.num_used
        for index in self._of_tokens:
            num_used[index] = num_used[index] + count

    def take_ids(self, index: int, count: int) -> PageIds:
        """Return block ids for `count` parts of a group that were counted as used; empty without ids."""
        return NO_IDS if self.blocks is None else self.blocks.take_runs(count * self.part_blocks[index])

    def give_ids(self, block_ids: PageIds) -> None:
        """Return the ids of parts that are now empty to the pool."""
        if self.blocks is not None:
            self.blocks.give_runs(block_ids)

    # In compiled code, `counts[index] += count` adds objects, and `counts[index] = counts[index] + count` integers.

    def note_evicted(self, index: int, count: int) -> None:
        """Count cached parts of a group as evicted; `note_gone` counts their bytes."""
        if self._evicted is not None:
            self._evicted += (index, count)
        self.num_cached[index] = self.num_cached[index] - count
        self.num_evicted[index] = self.num_evicted[index] + count

    def note_gone(self, num_bytes: int) -> None:
        """Count `num_bytes` of cached parts as empty."""
        self.evicted_bytes += num_bytes
        self.cached_bytes -= num_bytes
        self.empty_bytes += num_bytes

    def note_cached(self, index: int, count: int) -> None:
        """Count used parts of a group as cached."""
        num_bytes = count * self.part_bytes[index]
        self.num_used[index] = self.num_used[index] - count
        self.num_cached[index] = self.num_cached[index] + count
        self.released_bytes += num_bytes
        self.cached_bytes += num_bytes

    def note_empty(self, index: int, count: int) -> None:
        """Count used parts of a group as empty."""
        num_bytes = count * self.part_bytes[index]
        self.num_used[index] = self.num_used[index] - count
        self.released_bytes += num_bytes
        self.empty_bytes += num_bytes

    def note_used(self, index: int, count: int) -> None:
        """Count cached parts of a group as used."""
        num_bytes = count * self.part_bytes[index]
        self.num_used[index] = self.num_used[index] + count
        self.num_cached[index] = self.num_cached[index] - count
        self.cached_bytes -= num_bytes

    def emit_gone(self, run: PartRun, start: int, end: int, *, is_dropped: bool) -> None:
        """Emit the event that pages [start, end) of `run`, which is still findable, are evicted, the last one first."""
        raise NotImplementedError

    def emit_turn(self, stream: Stream) -> None:
        """Emit the eviction of the page of `stream` that is next in the order of eviction."""
        raise NotImplementedError


class PartRun(LruEntry):
    """The parts of pages [start, end) in one group; a snapshot of states belongs to the last page before it.

    `span`: where it can be found; None for pages that only the sequence itself will find, once it has released
    everything. `holders`: the sequences that hold it; without any it is listed, either separately or as a piece of
    `stream`. `is_kept`: it is listed when nothing holds it any more; otherwise it becomes empty. `ids`: the ids of its
    blocks, part by part in the order of pages; empty where blocks are only counted. `keeps`: how many of its holders
    are kept for later. `list_index`: the index of its list in its span: its group for the device, or a later one for a
    tier below. `is_wanted`: it must be stored below before it is evicted. `is_passed`: the window of the last
    sequence that released it has passed it, and that sequence went on. `slot`: its place in the list, while only stores
    hold it. `listed_by`: the eviction order that lists it, unless the account's list does; `place`: that order's state
    of it (Run). `writer`: in a tier that engines share, the engine that stored it; `written`: that engine's content of
    its pages, since its span may be of another engine's.
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
        "slot",
        "span",
        "start",
        "stream",
        "writer",
        "written",
    )

    def __init__(
        self,
        group: int,
        span: Span | None,
        start: int,
        end: int,
        holders: list[RunTable],
        *,
        is_kept: bool,
        ids: PageIds | None = None,
        list_index: int = -1,
    ) -> None:
        self.older = self.newer = None  # as of LruEntry: this runs for every chunk
        self.stamp = 0
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
        self.ids = NO_IDS if ids is None else ids
        self.keeps = 0
        self.listed_by: EvictionOrder | None = None
        self.place: Any = None
        self.slot: EvictionSlot | None = None
        self.writer = -1
        self.written: Content | None = None

    # The interface of eviction orders: Run.

    @property
    def content(self) -> Content:
        """A content that has its pages, which can be found; in a tier that engines share, of the one that stored it."""
        if self.written is not None:
            return self.written
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

    def take_slot(self) -> None:
        """List it in its place."""
        slot = self.slot
        assert slot is not None
        self.list_after(slot)
        self.leave_slot()

    def leave_slot(self) -> None:
        """Give its place up."""
        slot = self.slot
        assert slot is not None
        slot.unlist()
        self.slot = None

    def leave_order(self) -> None:
        """Record that no eviction order lists it any more, nor links it."""
        self.listed_by = self.older = self.newer = None

    @property
    def is_lent(self) -> bool:
        """Whether only transfers hold it."""
        holders = self.holders
        # Usually the first decides.
        return bool(holders) and holders[0].is_transfer and all(holder.is_transfer for holder in holders)

    @property
    def is_private(self) -> bool:
        """Whether it can be found, one sequence holds it, and it has neither ids nor a place."""
        return len(self.holders) == 1 and self.span is not None and not (self.ids or self.keeps or self.slot)

    @property
    def is_found(self) -> bool:
        """Whether it can be found: it was not evicted since it got a span."""
        return self.span is not None

    @property
    def blocks(self) -> tuple[PageId, ...]:
        """The ids of its blocks, as a plan names them."""
        return tuple(self.ids)

    def next_bytes(self, account: PartCounts) -> int:
        """Return the bytes of all its parts."""
        return (self.end - self.start) * account.part_bytes[self.group]

    def evict(self, account: PartCounts, missing_bytes: int) -> int:
        """Evict its parts, the last first, until these have `missing_bytes` or nothing is left of it."""
        index = self.group
        part_bytes = account.part_bytes[index]
        count = self.end - self.start
        num_enough = -(-missing_bytes // part_bytes)
        if num_enough < count:
            count = num_enough
            if account.emits:
                account.emit_gone(self, self.end - count, self.end, is_dropped=False)
            self.end -= count
            if self.ids:
                at = (self.end - self.start) * account.part_blocks[index]
                account.give_ids(self.ids.cut(at))
        else:
            if account.emits:
                account.emit_gone(self, self.start, self.end, is_dropped=False)
            if self.ids:
                account.give_ids(self.ids)
                self.ids = NO_IDS
            self.unlist()
            self.forget()
        account.note_evicted(index, count)
        return count * part_bytes

    def forget(self) -> None:
        """Make it unfindable; it has no parts left."""
        self.start = self.end
        span = self.span
        if span is not None:
            self.span = None
            runs = span.parts[self.list_index]
            if len(runs) == 1:
                runs.pop()
            elif runs[0] is self:
                del runs[0]
            else:
                runs.remove(self)
            if not (runs or span.num_users or span.children):
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
            self.ids = head.ids.with_more(self.ids)
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
            self.ids = head.ids.with_more(self.ids)
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
        head.is_passed, head.writer, head.written = self.is_passed, self.writer, self.written
        if self.ids:
            at = len(self.ids) // (self.end - self.start) * (page - self.start)
            head.ids = self.ids.take_first(at)
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
        elif self.slot is not None:
            head.slot = EvictionSlot()
            head.slot.list_after(self.slot)
        return head

    def give_head(self, page: int, table: RunTable) -> PartRun:
        """Split it before `page` as `split` does, but the first part is not among the runs held by `table`."""
        if not self.is_private:
            head = self.split(page)
            table.held[self.group].remove(head)
            return head
        return self.split_off(page, [table])

    def split_off(self, page: int, holders: list[RunTable]) -> PartRun:
        """Split it, which is private, before `page`: the first part has `holders`, but is not among their runs."""
        index, span = self.group, self.span
        assert span is not None
        head = PartRun(index, span, self.start, page, holders, is_kept=self.is_kept)
        head.is_wanted, head.place = self.is_wanted, self.place
        self.start = page
        runs = span.parts[index]
        if runs[-1] is self:
            runs[-1] = head
            runs.append(self)
        else:
            runs.insert(runs.index(self), head)
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


class RunMatch(Match):
    """The first `num_pages` pages that every group can resume from; the last of `spans` may reach beyond.

    `branch`: the page at which the content leaves another one, if that is later and the tree looks for it; else 0.
    Where chunks are aligned, or parts retained at an interval, the page up to which groups that keep all tokens have
    it, if that is later.
    """

    __slots__ = ("branch", "pieces", "root", "spans")

    def __init__(self, content: Content, root: Span, spans: list[Span], num_pages: int) -> None:
        super().__init__(content, [], num_pages, 0)
        self.root = root
        self.spans = spans
        self.branch = 0
        self.pieces: list[list[tuple[PartRun, int, int]]] | None = None
        """For each group, the parts with which a sequence begins: runs and their pages. Computed on demand."""

    def most_front(self, start: int) -> int:
        """Return how many pages from `start` on may be computed while the others are loaded.

        They end before the first page of which the device has a part, and before the last that is loaded.
        """
        assert self.pieces is not None
        most, last = self.num_pages, start
        for index, pieces in enumerate(self.pieces):
            for run, begin, end in pieces:
                if run.list_index != index:
                    last = max(last, end - 1)
                elif end > start:
                    most = min(most, max(begin, start))
        return min(most, last) - start


NOWHERE: Final = Span(NOTHING, b"", 0, 0, None, 0)
"""The span of a block table that is not a sequence."""


class RunTable:
    """The parts that one running sequence holds. Written by RunCache and its collaborators.

    `num_tokens`: tokens that are computed, or are about to be in this step; for a decode, when it began to decode.
    `last`: the span of its last full page that can be found; `num_named` pages can. `num_taken`: pages for which parts
    were taken; `num_stated`: those with states, where requests draft. `branch`: tokens before the place at which it
    leaves another content, where snapshots are made; 0 for none. `held`: for each group, runs in order of position.
    `first_open`: for each group, the first page after these that cannot be found, as far as it is held. `num_states`:
    for each group, its own states, 0 or 1, or those of a draft. `given`: listed runs that cannot be found yet. Where
    blocks have ids: `open_ids`, the ids of the parts from `first_open` on, and `state_ids`, those of its states, by
    group; `snapshots`, copies of states to make in this step, each with the number of tokens before it.
    `swapped_tokens`: if not 0, it is about to be closed after so many tokens, and its state is kept for its own
    request. `num_emitted`: the first pages whose events were emitted before they became findable: no other sequence can
    find them. `prefill_end`: the tokens after which it decodes, where chunks may keep states inside.

    For a decode: `base` plus the number of steps done is the number of computed tokens, `admission` its place among the
    decodes, `streams` and `odd_steps` the state of each group's releases (Decodes). `fills_known`: others may find the
    pages that it fills.
    """

    __slots__ = (
        "admission",
        "base",
        "branch",
        "content",
        "fills_known",
        "first_open",
        "given",
        "has_decoded",
        "held",
        "is_decoding",
        "is_open",
        "is_transfer",
        "last",
        "num_emitted",
        "num_named",
        "num_stated",
        "num_states",
        "num_taken",
        "num_tokens",
        "odd_steps",
        "open_ids",
        "prefill_end",
        "snapshots",
        "state_ids",
        "streams",
        "swapped_tokens",
    )

    def __init__(self, content: Content, last: Span, num_pages: int, page_size: int, num_groups: int) -> None:
        self.content = content
        self.last = last
        self.num_named = self.num_taken = self.num_stated = num_pages
        self.num_tokens = num_pages * page_size
        self.branch = 0
        self.prefill_end = 0
        self.held: list[list[PartRun]] = [[] for _ in range(num_groups)]
        self.first_open = [num_pages] * num_groups
        self.num_states = [0] * num_groups
        self.given: list[PartRun] = []
        self.open_ids: list[PageIds] = [NO_IDS] * num_groups
        self.state_ids: list[PageIds] = [NO_IDS] * num_groups
        self.snapshots: list[tuple[int, PartRun]] = []
        self.is_open = True
        self.is_decoding = False
        self.num_emitted = 0
        self.fills_known = False
        self.has_decoded = False
        """Whether it has decoded: no prompt ends where its chunks do."""
        self.base = 0
        self.admission = -1
        self.streams: list[Stream | None] = [None] * num_groups
        self.odd_steps = [-1] * num_groups
        self.is_transfer = last is NOWHERE
        """Whether it is the block table of a transfer and not of a sequence."""
        self.swapped_tokens = 0


class Stream:
    """Pages that `table` releases in a group, in order; ENDED once it releases no more.

    `keeps`: they are listed; otherwise they become empty at once. `begun`: the first step that it is of. `slot`: the
    slot of the steps of its releases. `low`: the page that is evicted next. `high`: the first page that is not
    released, as far as `runs` are up to date: these have the pages in between, except for the ranges of `holes`, which
    it no longer lists. `last`: no page from there on is released; NEVER while it continues. `gate`: the page at which
    the first of `runs` has nothing left, if that is known. `watch`: the same, but -1 with holes, since every page may
    be one. `seen`: the step with which it is up to date. `is_silent`: another decode holds each page when the window of
    `table` passes it, and lists it later, so nothing is listed and nothing counted.
    """

    __slots__ = (
        "admission",
        "begun",
        "gate",
        "group",
        "high",
        "holes",
        "is_silent",
        "keeps",
        "last",
        "low",
        "runs",
        "seen",
        "slot",
        "table",
        "watch",
    )

    def __init__(
        self, table: RunTable, group: int, page: int, slot: int, *, keeps: bool, is_silent: bool = False
    ) -> None:
        self.table = table
        self.admission = table.admission
        self.group = group
        self.slot = slot
        self.keeps = keeps
        self.is_silent = is_silent
        self.seen = self.begun = -1
        self.low = self.high = page
        self.last = NEVER
        self.gate = self.watch = NEVER
        self.runs: list[PartRun] = []
        self.holes: list[tuple[int, int]] = NO_HOLES

    def add(self, run: PartRun) -> None:
        """Add `run`, which follows the others."""
        run.stream = self
        run.is_passed = True
        self.runs.append(run)

    def insert(self, run: PartRun, before: PartRun) -> None:
        """Add `run`, which was split off the beginning of another."""
        run.stream = self
        self.runs.insert(self.runs.index(before), run)
        self.set_gate()

    def set_gate(self) -> None:
        """Remove runs without pages left, and set `gate` to the end of the first of the others."""
        runs = self.runs
        while runs:
            run = runs[0]
            if run.end > self.low:
                self.gate = run.end if self.last != NEVER or len(runs) > 1 else NEVER
                self.watch = -1 if self.holes else self.gate
                return
            del runs[0]
            run.stream = None
            run.forget()
        self.gate = NEVER
        self.watch = -1 if self.holes else NEVER

    def trim(self, run: PartRun) -> bool:
        """Cut evicted pages off the beginning of one of its runs; return whether any are left."""
        if run.start < self.low:
            run.start = min(self.low, run.end)
        return run.start < run.end

    def drop(self, run: PartRun) -> None:
        """Remove one of its runs, which has no pages left."""
        self.runs.remove(run)
        run.stream = None
        run.forget()
        self.set_gate()

    def take_out(self, run: PartRun) -> None:
        """Stop listing one of its runs."""
        self.holes = [*self.holes, (run.start, run.end)]
        self.runs.remove(run)
        run.stream = None
        self.set_gate()

    def is_hole(self, page: int) -> bool:
        """Return whether a page is no longer listed by it."""
        return any(start <= page < end for start, end in self.holes)

    def num_holes(self, start: int, end: int) -> int:
        """Return how many of pages [start, end) it has ceased to list."""
        return sum(max(0, min(end, last) - max(start, first)) for first, last in self.holes)


ENDED: Final = RunTable(NOTHING, NOWHERE, 0, 1, 0)
"""In place of the block table of a stream that has ended, which need not live as long as the pages are listed."""


class Turns(LruEntry):
    """Streams in the order in which each released one page; the turns before `at` are evicted."""

    __slots__ = ("at", "streams")

    def __init__(self) -> None:
        self.older = self.newer = None  # as of LruEntry
        self.stamp = 0
        self.streams: list[Stream] = []
        self.at = 0

    def next_bytes(self, account: PartCounts) -> int:
        """Return the bytes of its next part; turns without one are skipped."""
        while self.at < len(self.streams):
            stream = self.streams[self.at]
            if not stream.is_hole(stream.low):
                return account.part_bytes[stream.group]
            self.at += 1
            stream.low += 1
        return 0

    def evict(self, account: PartCounts, missing_bytes: int) -> int:
        """Evict the pages of its first turns until these have `missing_bytes` or all turns are evicted."""
        streams, at, gone_bytes = self.streams, self.at, 0
        end = len(streams)
        if account.emits:
            return self._eat_one_by_one(account, missing_bytes)
        if account.num_bounded > 1:
            return self._eat_mixed(account, missing_bytes)
        while gone_bytes < missing_bytes and at < end:
            index = streams[at].group
            part_bytes = account.part_bytes[index]
            count, num_enough = 0, -((gone_bytes - missing_bytes) // part_bytes)
            while count < num_enough and at < end:
                alike = streams[at : at + min(num_enough - count, MOST_ALIKE)]
                count += len(alike)
                at += len(alike)
                for stream in alike:
                    low = stream.low + 1
                    stream.low = low
                    if low >= stream.watch:
                        if stream.holes and stream.is_hole(low - 1):
                            count -= 1
                        if low >= stream.gate:
                            stream.set_gate()
            gone_bytes += count * part_bytes
            account.note_evicted(index, count)
        self._end_at(at)
        return gone_bytes

    def _eat_mixed(self, account: PartCounts, missing_bytes: int) -> int:
        """Do the same where the turns of several groups alternate."""
        streams, at, gone_bytes, last, part_bytes = self.streams, self.at, 0, -1, account.part_bytes
        end, num_cached, num_evicted, evicted = len(streams), account.num_cached, account.num_evicted, account._evicted
        while gone_bytes < missing_bytes and at < end:
            stream = streams[at]
            at += 1
            low = stream.low + 1
            stream.low = low
            if low >= stream.watch:
                is_hole = stream.is_hole(low - 1)
                if low >= stream.gate:
                    stream.set_gate()
                if is_hole:
                    continue
            index = stream.group
            gone_bytes += part_bytes[index]
            num_cached[index] = num_cached[index] - 1
            num_evicted[index] = num_evicted[index] + 1
            if evicted is None:
                continue
            if index == last:
                evicted[-1] += 1
            else:
                evicted.append(index)
                evicted.append(1)
                last = index
        self._end_at(at)
        return gone_bytes

    def _eat_one_by_one(self, account: PartCounts, missing_bytes: int) -> int:
        """Do the same, and emit each page before its stream loses it."""
        streams, at, gone_bytes, count, index = self.streams, self.at, 0, 0, 0
        while gone_bytes < missing_bytes and at < len(streams):
            stream = streams[at]
            at += 1
            page = stream.low
            if not (stream.holes and stream.is_hole(page)):
                account.emit_turn(stream)
                if count and stream.group != index:
                    account.note_evicted(index, count)
                    count = 0
                index = stream.group
                count += 1
                gone_bytes += account.part_bytes[index]
            stream.low = page + 1
            if page + 1 >= stream.gate:
                stream.set_gate()
        if count:
            account.note_evicted(index, count)
        self._end_at(at)
        return gone_bytes

    def _end_at(self, at: int) -> None:
        """Record that the turns before `at` are evicted."""
        streams = self.streams
        if at == len(streams):
            self.unlist()
        elif at > MOST_EVICTED:
            del streams[:at]
            at = 0
        self.at = at


def first_list(place: int, num_groups: int) -> int:
    """Return the index in `Span.parts` of the first list of the tier at `place` below the device, 0 for the fastest."""
    return (1 + 2 * place) * num_groups


def table_of_transfer(num_groups: int) -> RunTable:
    """Return an empty block table for a transfer."""
    return RunTable(NOTHING, NOWHERE, 0, 1, num_groups)

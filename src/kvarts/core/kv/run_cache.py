"""A prefix cache of a model with layers that do not keep every token: each page has a part in every KV group.

Runs of parts (PartRun) are taken, released, found and evicted, so the cost of an operation does not depend on the
number of pages. The outcome is that of single parts: the last page of a released run is first in the list, and runs
are evicted from their tails.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import cast

from kvarts.core.content import Content
from kvarts.core.kv.account import RunAccount, RunEvents
from kvarts.core.kv.decodes import Decodes
from kvarts.core.kv.eviction import EvictionOrder
from kvarts.core.kv.groups import GroupMemory
from kvarts.core.kv.pool import NO_IDS, IdPool, PageError, PageId, PageIds, are_all_once
from kvarts.core.kv.retention import Retained
from kvarts.core.kv.runs import NEVER, EvictionSlot, LruEntry, PartRun, RunMatch, RunTable, Span, Stream
from kvarts.core.kv.span_tree import SpanTree

__all__ = ["RunCache"]


class RunCache(RunAccount):
    """Owner of all parts in `total_bytes`, as a PartAccount. The caller ensures that the parts it takes are free.

    `at_branches`: snapshots of states are also made where a sequence leaves another that can be found. `lag`: as of
    Decodes.
    """

    __slots__ = (
        "_aligned",
        "_bounded",
        "_by_page",
        "_counts_pages",
        "_in_every_page",
        "_is_state",
        "_keeps_all",
        "_kept",
        "_less",
        "_memory",
        "_of_states",
        "_retained",
        "_states_by_page",
        "_stored_whole",
        "_whole",
        "computed",
        "decodes",
        "empties_open",
        "match",
        "num_published",
        "page_size",
        "sparse",
        "tree",
    )

    def __init__(
        self,
        memory: GroupMemory,
        *,
        page_size: int,
        total_bytes: int,
        blocks: IdPool | None = None,
        events: RunEvents | None = None,
        num_below: int = 0,
        eviction_order: EvictionOrder | None = None,
        at_branches: bool = False,
        lag: int = 0,
    ) -> None:
        super().__init__(memory, total_bytes=total_bytes, blocks=blocks, events=events, eviction_order=eviction_order)
        groups = self.groups
        self.page_size = page_size
        self._memory = memory
        self.num_published = 0
        """The number of times that parts of known tokens, findable by others, were published since the beginning."""
        self._keeps_all = memory.keeps == "all"
        self._is_state = [group.is_state for group in groups]
        retained = self._retained = None if memory.retention_interval is None else Retained(memory, page_size)
        self.sparse = [retained is not None and retained.of_group[index] is not None for index in range(len(groups))]
        """By group, whether it retains some parts only: the others cannot be found."""
        self.empties_open = list(self.sparse)
        """By group, whether parts that are released before they can be found become empty."""
        self._kept = [
            not is_sparse and (self._keeps_all or not group.is_bounded)
            for group, is_sparse in zip(groups, self.sparse, strict=True)
        ]
        self._of_states = [index for index, group in enumerate(groups) if group.is_state]
        self._whole = [index for index, group in enumerate(groups) if not (group.is_state or group.is_bounded)]
        self._less = [index for index, group in enumerate(groups) if group.is_state or group.is_bounded]
        self._bounded = [index for index, group in enumerate(groups) if group.is_bounded]
        by_page = [index for index, group in enumerate(groups) if group.has_states_by_page]
        self._states_by_page = by_page
        self._aligned = by_page if memory.aligns else []
        self._in_every_page = [index for index in self._of_tokens if index not in self._aligned]
        self._by_page = by_page[0] if by_page else -1
        """A group of states by page, or -1."""
        self.decodes = Decodes(memory, page_size, self, self.sparse, lag=lag)
        kept_states = by_page if self._keeps_all else []
        self._stored_whole = sorted([*self._whole, *kept_states])
        """Groups whose pages are all stored in tiers below: those that keep all tokens, or a state after each page."""
        self.computed: list[tuple[Content, int, int]] = []
        """The contents and pages that became findable since the step began, if states are kept by page."""
        self._counts_pages = not self._aligned and blocks is None
        """Whether the parts of a page are taken without their names, as many in each group."""
        tree = self.tree = self._open_tree(memory, num_below, at_branches)
        self.match = tree.match

    def empty_open(self) -> None:
        """Let all parts of bounded groups become empty that are released before they can be found."""
        self.empties_open = [group.is_bounded for group in self.groups]

    def _open_tree(self, memory: GroupMemory, num_below: int, finds_branches: bool) -> SpanTree:
        """Return the index of its parts."""
        return SpanTree(memory, self.page_size, self.decodes.look, num_below=num_below, finds_branches=finds_branches)

    # BlockTable and releasing --------------------------------------------------------------------------------

    def next_in_order(self) -> LruEntry:
        """Return the next run to evict; in groups that keep all tokens, followers are evicted first if possible."""
        order, first = self.eviction_order, self.lru.newer
        while isinstance(first, EvictionSlot):
            first = first.newer  # a store holds its run
        assert order is not None
        run: PartRun = order.next_run() if first is self.lru else cast(PartRun, first)
        return self.tree.last_after(run) if run.group in self._whole else run

    def disturb(self, run: PartRun) -> None:
        """Make the releases of decodes that hold `run` odd."""
        self.decodes.disturb(run)

    def emit_gone(self, run: PartRun, start: int, end: int, *, is_dropped: bool) -> None:
        """Emit the event that pages [start, end) of `run`, which is still findable, are evicted, the last one first."""
        span, events = run.span, self.events
        assert events is not None and span is not None
        for other in span.parts[run.group]:
            if other is not run and other.start < end and start < other.end:
                if span.is_moving:
                    self.decodes.look(span)  # a run that is out of date has all its pages, and more
                events.goes(run, start, end, is_dropped=is_dropped)
                return
        events.goes_alone(run, span, start, end, None, is_dropped=is_dropped)

    def emit_turn(self, stream: Stream) -> None:
        """Emit the eviction of the page of `stream` that is next in the order of eviction."""
        if stream.last == NEVER and not (stream.runs and stream.low < stream.runs[0].end):
            self.decodes.catch_up(stream)
        run = stream.runs[0]
        if run.span is None:
            self.name_emitted(stream.table)
            run = stream.runs[0]
        self.emit_gone(run, stream.low, stream.low + 1, is_dropped=False)

    def name_emitted(self, table: RunTable) -> None:
        """Make pages of `table` findable whose events were emitted before."""
        if table.num_emitted > table.num_named:
            self.publish_to(table, table.num_emitted)

    def lost_holder(self, run: PartRun) -> None:
        """Reserve the place of `run` in the list if only stores hold it now.

        A run that a window has passed gets no place: its release may be a turn of a stream.
        """
        if not run.is_kept or run.is_passed or run.slot is not None or self.eviction_order is not None:
            return
        if run.is_lent:
            run.slot = EvictionSlot()
            self.append(run.slot)

    # Sequences --------------------------------------------------------------------------------------------

    def begin(self, content: Content, match: RunMatch) -> RunTable:
        """Begin a sequence with `match`; the cache must not have changed since it was made. `extend` may follow."""
        if self.note_request is not None:
            self.note_begin()
        length, tree = match.num_pages, self.tree
        if not length:
            match.root.num_users += 1
            table = RunTable(content, match.root, 0, self.page_size, len(self.groups))
            table.branch = match.branch * self.page_size
            return table
        found = tree.pieces(match)
        last = match.spans[-1]
        table = RunTable(content, last, length, self.page_size, len(self.groups))
        table.branch = match.branch * self.page_size
        last.num_users += 1
        for pieces in found:
            path: list[PartRun] = []
            for run, start, end in pieces:
                path.append(run if run.start == start and run.end == end else run.cut(start, end))
            self.hold_path(path, table)
            if self.eviction_order is None and len(path) > 1:
                # Windows of others that passed them page by page have left them in pieces.
                for before, piece in pairwise(path):
                    if before.span is piece.span and before.holders == piece.holders:
                        piece.join_held(before)
        if self.wants is not None and length <= content.num_known_pages:
            for index in self._bounded:
                for run in table.held[index]:
                    self.wants.complete(content, index, run.start, run.end)
        return table

    def extend(self, table: RunTable, num_tokens: int, *, is_end: bool = False) -> None:
        """Take the parts of tokens up to `num_tokens`, and make the pages that they fill findable.

        `is_end`: other sequences may continue from here: tails of windows are kept, and snapshots are made at the last
        page ends at and before its last token, from which the same sequence resumes, during the computation, if the
        memory has room for them. The same happens at its branch. No sequence continues after a chunk of a sequence
        that has decoded.
        """
        is_end = is_end and not table.has_decoded
        if self._of_states:
            self.take_for(table, num_tokens)  # all its pages first: they evict no snapshot of its own
            branch = table.branch
            if table.num_tokens < branch <= num_tokens:
                self._grow(table, branch, is_end=True, is_midway=True)
                if branch == num_tokens:
                    return
            if is_end:
                page_end = (num_tokens - 1) // self.page_size * self.page_size
                if page_end > table.num_tokens:
                    self._grow(table, page_end, is_end, is_midway=True)
        self._grow(table, num_tokens, is_end)

    def take_for(self, table: RunTable, num_tokens: int) -> None:
        """Take the parts of tokens up to `num_tokens`, as far as `table` does not have them."""
        num_pages = -(-num_tokens // self.page_size) - table.num_taken
        if num_pages > 0:
            self.take_next(table, num_pages, num_tokens)
        self._take_states(table)

    def _take_states(self, table: RunTable) -> None:
        for index in self._of_states:
            if not table.num_states[index]:
                self.take(index, 1)
                table.num_states[index] = 1
                table.state_ids[index] = self.take_ids(index, 1)

    def take_next(self, table: RunTable, num_pages: int, end: int = 0) -> None:
        """Take the parts of the next `num_pages` pages, which cannot be found yet; none of their tokens is computed.

        `end`: the tokens of the sequence when they are, for several pages.
        """
        table.num_taken += num_pages
        num_states = self._memory.num_states(num_pages, end, table.prefill_end) if self._aligned else num_pages
        if num_pages > num_states:
            # A chunk that takes several pages begins with one, so none of the group is open.
            for index in self._in_every_page:
                self.take(index, num_pages)
            for index in self._aligned:
                self.take(index, num_states)
                table.first_open[index] = table.num_taken - num_states
        else:
            self.take_pages(num_pages)
        if self.blocks is not None:
            for index in self._of_tokens:
                ids = self.take_ids(index, min(num_states, num_pages) if index in self._aligned else num_pages)
                table.open_ids[index] = table.open_ids[index].with_more(ids)

    def drop_pages(self, table: RunTable, num_pages: int) -> None:
        """Undo `take_next` for all but the first `num_pages` pages of `table`."""
        assert num_pages >= table.num_named, "a page that can be found has no token"
        count = table.num_taken - num_pages
        if count <= 0:
            return
        table.num_taken = num_pages
        for index in self._of_tokens:
            self.note_empty(index, count)
            if self.blocks is not None:
                ids = table.open_ids[index]
                at = len(ids) - count * self.part_blocks[index]
                self.give_ids(ids.cut(max(0, at)))

    def fill_page(self, table: RunTable, num_tokens: int) -> None:
        """Make the page that ends with `num_tokens` tokens findable; `take_next` took it."""
        table.num_tokens = num_tokens
        self.publish_to(table, num_tokens // self.page_size)

    def free_skipped(self, table: RunTable, num_tokens: int, num_in_flight: int = 0) -> None:
        """Release the parts that no token from `num_tokens` on attends to; all tokens before are computed.

        `num_in_flight`: the last tokens before it, which attend to their parts in windows and chunks as well.
        """
        table.num_tokens = num_tokens
        self.name_emitted(table)
        for index in self._less:
            self.free_skipped_in(table, index, num_tokens if self._is_state[index] else num_tokens - num_in_flight)
        if table.is_decoding:
            self.decodes.begin(table)

    def free_skipped_in(self, table: RunTable, index: int, num_tokens: int) -> None:
        """Do the same in one group that does not keep all tokens."""
        held = table.held[index]
        if self._is_state[index]:
            if held and held[0].end * self.page_size < num_tokens:
                if self.events is not None:
                    self.events.given_back(table.content, index, held[0].end - 1, held[0].end)
                table.held[index] = []
                self.release(index, held, table, is_passed=True)
            return
        sink, first = self.tree.needed(index, num_tokens)
        if not first:
            return
        if not (table.first_open[index] < first or (held and held[0].start < first)):
            return
        has_silent, at = self.decodes.num_silent > 0, 0
        given: list[PartRun] = []
        while at < len(held) and held[at].start < first:
            run = held[at]
            if run.end <= sink:
                at += 1
                continue
            if run.start < sink:
                run.split(sink)
                at += 1
                continue
            if has_silent and len(run.holders) > 1:
                self.decodes.end_holds(run, table, first)
                run = held[at]
            if run.end > first:
                if given or not (self.only_counts and run.is_kept and run.is_private):
                    given.append(run.give_head(first, table))
                    break
                head = run.split_off(first, [])  # as `release` does: this runs for every chunk
                head.is_passed = True
                self.append(head)
                self.note_cached(index, first - head.start)
                return
            del held[at]
            given.append(run)
        if table.first_open[index] < first:
            self._give_open(table, index, sink, first)
        if given:
            given.reverse()
            if self.events is None:
                self.release(index, given, table, is_passed=True)
            else:
                self._give_back(self.events, table, index, given)

    def _give_back(self, events: RunEvents, table: RunTable, index: int, given: list[PartRun]) -> None:
        """Release `given`, the deepest run first, with an event for each stretch of consecutive runs.

        Stretches can be apart: those of states after chunks.
        """
        first = 0
        for end in range(1, len(given) + 1):
            if end == len(given) or given[end].end != given[end - 1].start:
                events.given_back(table.content, index, given[end - 1].start, given[first].end)
                self.release(index, given[first:end], table, is_passed=True)
                first = end

    def _give_open(self, table: RunTable, index: int, sink: int, first: int) -> None:
        """Release pages before `first` that cannot be found; they are listed if the sequence may find them again.

        Blocks with ids become empty: accepted drafts filled these pages, and the window has passed them at once. So do
        parts of groups in `empties_open`.
        """
        start = table.first_open[index]
        if self.blocks is not None or self.empties_open[index]:
            if start >= sink:  # else they are released once they can be found
                if self.events is not None and self.empties_open[index]:
                    self.events.given_back(table.content, index, start, first)
                self.note_empty(index, first - start)
                if self.blocks is not None:
                    at = (first - start) * self.part_blocks[index]
                    self.give_ids(table.open_ids[index].take_first(at))
                table.first_open[index] = first
            return
        assert self.events is None, "a page with events is findable as soon as it is full"
        if start < sink:
            run = PartRun(index, None, start, sink, [table], is_kept=self._kept[index])
            table.held[index].append(run)
            table.given.append(run)
            start = sink
        table.first_open[index] = first
        if start >= first:
            return
        if self._kept[index]:
            run = PartRun(index, None, start, first, [], is_kept=True)
            run.is_passed = True
            table.given.append(run)
            self.append(run)
            self.note_cached(index, first - start)
        else:
            self.note_empty(index, first - start)

    def held_after(self, match: RunMatch, *, only_lent: bool = False) -> int:
        """Return the bytes that a sequence that begins with `match` holds; `only_lent`: those that only stores hold."""
        num_bytes = 0
        for index, pieces in enumerate(self.tree.pieces(match)):
            for run, start, end in pieces:
                if not only_lent or (run.list_index == index and run.is_lent):
                    num_bytes += (end - start) * self.part_bytes[index]
        return num_bytes

    def keep(self, table: RunTable, change: int) -> int:
        """Record that `table` is kept for later once more (1) or less (-1).

        Return the bytes of its parts that nothing kept before, or that nothing keeps any more.
        """
        num_bytes = 0
        for index, runs in enumerate(table.held):
            for run in runs:
                least = min(run.keeps, run.keeps + change)
                assert least >= 0, "a part was kept less often"
                num_bytes += 0 if least else (run.end - run.start) * self.part_bytes[index]
                run.keeps += change
        return num_bytes

    def missing_state_bytes(self, table: RunTable) -> int:
        """Return the bytes of the states that `table` does not have yet."""
        return sum([self.part_bytes[index] for index in self._of_states if not table.num_states[index]])

    def missing_bytes(self, table: RunTable, num_new: int) -> int:
        """Return the bytes that the next `num_new` tokens need and `table` does not have."""
        end = table.num_tokens + num_new
        num_pages = -(-end // self.page_size) - table.num_taken
        num_bytes = self.page_bytes * num_pages
        if self._aligned:
            num_states = self._memory.num_states(num_pages, end, table.prefill_end)
            for index in self._aligned:
                num_bytes -= self.part_bytes[index] * max(0, num_pages - num_states)
        for index in self._of_states:
            if not table.num_states[index]:
                num_bytes += self.part_bytes[index]
        return num_bytes

    def is_of_step(self, match: RunMatch) -> bool:
        """Return whether the current step computes the last page of `match`, or a copy of it."""
        end, asked = match.num_pages, match.content
        return any(
            start < end <= stop
            and content.salt == asked.salt
            and (content is asked or content.common_pages(asked, 0, end) == end)
            for content, start, stop in self.computed
        )

    def held_bytes(self, table: RunTable) -> int:
        """Return the bytes of all parts of `table`, including those that others hold."""
        return self._freed_bytes(table, None)

    def freed_by(self, tables: Iterable[RunTable]) -> Iterator[int]:
        """Yield the number of bytes that go out of use as each of `tables` is closed in turn."""
        held: dict[int, int] = {}
        for table in tables:
            yield self._freed_bytes(table, held)

    def _freed_bytes(self, table: RunTable, held: dict[int, int] | None) -> int:
        """Return the bytes of `table`; with `held`, which counts holders, only of parts that no others hold."""
        num_bytes = 0
        for index, runs in enumerate(table.held):
            count = self._num_private(table, index)
            if held is not None and self.decodes.num_silent:
                self.decodes.catch_up_others(table, index)
            for run in runs:
                if held is not None:
                    held[id(run)] = held.get(id(run), 0) + 1
                    if held[id(run)] < len(run.holders):
                        continue
                count += run.end - run.start
            num_bytes += count * self.part_bytes[index]
        return num_bytes

    def _num_private(self, table: RunTable, index: int) -> int:
        """Return how many parts of a group `table` has outside of runs; its runs are brought up to date."""
        stream = table.streams[index]
        if stream is not None:
            self.decodes.catch_up(stream)
        if self._is_state[index]:
            return table.num_states[index]
        num_taken = table.num_taken
        if table.is_decoding:
            num_taken = -(-(table.base + self.decodes.step) // self.page_size)
        return num_taken - table.first_open[index]

    def close(self, table: RunTable, num_full_pages: int, num_taken: int | None = None) -> None:
        """Release everything, group by group, the deepest part first: findable parts become cached, the rest empty.

        `num_taken`: the pages for which a decode has taken parts. Raise PageError for a block table that is closed.
        """
        if not table.is_open:
            raise PageError("the block table is closed")
        ended: list[tuple[RunTable, int]] = []
        if table.is_decoding:
            ended = self.decodes.leave(table)
            assert num_taken is not None
            table.num_taken = num_taken
        if num_full_pages > table.num_named:
            self.publish_to(table, num_full_pages)
        table.num_tokens = num_full_pages * self.page_size
        if self._bounded and not (self._keeps_all and self.wants is None):
            self.keep_tails(table, num_full_pages)
        if table.swapped_tokens:
            self._keep_state(table)
        for index, held in enumerate(table.held):
            num_open = table.num_taken - table.first_open[index]
            num_unnamed = table.num_states[index] if self._is_state[index] else num_open
            if num_unnamed:
                self.note_empty(index, num_unnamed)
                if self.blocks is not None:
                    self.give_ids(table.open_ids[index].with_more(table.state_ids[index]))
                    table.open_ids[index] = table.state_ids[index] = NO_IDS
            if held:
                held.reverse()
                table.held[index] = []
                self.release(index, held, table)
        for other, index in ended:
            self.decodes.begin_group(other, index)
        last = table.last
        last.num_users -= 1
        if not last.num_users:
            last.prune()
        table.is_open = False

    def _grow(self, table: RunTable, num_tokens: int, is_end: bool, *, is_midway: bool = False) -> None:
        """Take the parts of tokens up to `num_tokens`. `is_end`: as of `extend`; `is_midway`: the prompt is longer."""
        page_size = self.page_size
        num_pages = -(-num_tokens // page_size) - table.num_taken
        if num_pages > 0:
            if self._counts_pages:
                table.num_taken += num_pages
                self.take_pages(num_pages)
            else:
                self.take_next(table, num_pages, num_tokens)
        if self._of_states:
            self._take_states(table)
        table.num_tokens = num_tokens
        end = num_tokens // page_size
        if end > table.num_named:
            self.publish_to(table, end)
        if is_end:
            if self._bounded and not (self._keeps_all and self.wants is None):
                self.keep_tails(table, end, is_prompt=end * page_size == num_tokens and not is_midway)
            if self._of_states and not num_tokens % page_size:
                self._keep_snapshots(table)

    def publish_to(self, table: RunTable, end: int) -> None:
        """Make parts of full pages up to `end` findable, both held and released ones."""
        start = table.num_named
        if start < table.content.num_known_pages:
            self.num_published += 1
        if self.wants is not None:
            self.wants.computes(table, start)
        if self._by_page >= 0 and not self.sparse[self._by_page]:
            self.computed.append((table.content, table.first_open[self._by_page], end))
        spans = self.tree.extend(table, end)
        if table.given:
            for given in table.given:
                self._place(given, spans, table.content, table.num_emitted)
            table.given = []
        events, has_ids = self.events, self.blocks is not None
        ids: PageIds | None = None
        first_open, num_emitted = table.first_open, table.num_emitted
        all_held, all_kept, streams = table.held, self._kept, table.streams
        last_retained = NEVER if self._retained is None else self._retained.last_page(table)
        for index in self._of_tokens:
            if self.sparse[index]:
                if first_open[index] < last_retained or index in self._states_by_page:
                    self._publish_retained(table, index, end, spans)
                continue
            held, first = all_held[index], first_open[index]
            first_open[index] = end
            for span, span_start, stop in spans:
                if first >= stop:
                    continue
                begin = first if first > span_start else span_start
                siblings = span.parts[index]
                if events is not None and stop > num_emitted:
                    untold = begin if begin > num_emitted else num_emitted
                    if untold >= self.tree.first_new:
                        events.came_new(table.content, index, span, untold, stop)
                    else:
                        events.came(table.content, index, span, untold, stop)
                if has_ids:
                    at = (stop - begin) * self.part_blocks[index]
                    ids = table.open_ids[index].take_first(at)
                if siblings and held:
                    last = held[-1]
                    # No copy of these pages may be younger than a run that is extended. Nor is the sink extended by
                    # pages that the window will pass.
                    if last.end == begin and siblings[-1] is last and begin != self.tree.sinks[index]:
                        is_alike = last.is_kept is all_kept[index] and not last.is_wanted and last.place is None
                        if is_alike and len(last.holders) == 1:
                            last.end = stop
                            if ids is not None:
                                last.ids.extend(ids)
                            continue
                run = PartRun(index, span, begin, stop, [table], is_kept=all_kept[index], ids=ids)
                siblings.append(run)
                held.append(run)
                if streams[index] is not None:
                    span.is_moving = True
        if events is not None and end > num_emitted:
            events.flush()
        if self.wants is not None and start < (known_end := min(end, table.content.num_known_pages)):
            for index in self._stored_whole:
                self.wants.complete(table.content, index, start, known_end)

    def _publish_retained(self, table: RunTable, index: int, end: int, spans: Sequence[tuple[Span, int, int]]) -> None:
        """Make those parts of full pages up to `end` findable that a group retains.

        Parts of a window after them stay open, since no later one may be retained.
        """
        retained, held, page = self._retained, table.held[index], table.first_open[index]
        assert retained is not None
        if page >= end:
            return
        ranges = retained.ranges(index, table, page, end)
        is_of_states = index in self._states_by_page
        if not (ranges or is_of_states):
            return
        for begin, stop in ranges:
            if page < begin:
                held.append(self._named_run(table, index, page, begin, is_kept=False))
            run = self._named_run(table, index, begin, stop, is_kept=True)
            held.append(run)
            self._place(run, spans, table.content, table.num_emitted)
            if index == self._by_page:
                self.computed.append((table.content, begin, stop))
            page = stop
        if is_of_states and page < end:
            held.append(self._named_run(table, index, page, end, is_kept=False))
            page = end
        table.first_open[index] = page

    def _named_run(self, table: RunTable, index: int, start: int, end: int, *, is_kept: bool) -> PartRun:
        """Return a run of the next open parts of a group, which cannot be found yet."""
        ids = NO_IDS
        if self.blocks is not None:
            ids = table.open_ids[index].take_first((end - start) * self.part_blocks[index])
        return PartRun(index, None, start, end, [table], is_kept=is_kept, ids=ids)

    def _place(
        self, run: PartRun, spans: Sequence[tuple[Span, int, int]], content: Content, num_emitted: int = 0
    ) -> None:
        """Make `run` of a sequence with `content` findable; `spans` cover its pages, each those up to its last number.

        Pages that its stream has evicted are left out. The events of its first `num_emitted` pages were emitted before.
        """
        stream = run.stream
        if stream is not None and not stream.trim(run):
            stream.drop(run)
        if run.start >= run.end:
            return
        for span, _, end in spans:
            if run.start >= end:
                continue
            piece = run if run.end <= end else run.split(end)
            if self.events is not None and piece.start >= num_emitted:
                self.events.came(content, run.group, span, piece.start, piece.end)
            piece.span = span
            span.parts[run.group].append(piece)
            if stream is not None:
                span.is_moving = True
            if piece is run:
                break

    def keep_tails(self, table: RunTable, num_pages: int, *, is_prompt: bool = False) -> None:
        """Mark the parts that the token after the last full page attends to.

        `is_prompt`: that page is the last of a prompt. The same prompt computes its last token again, so it continues
        a page earlier; the parts that it needs there are marked as well.
        """
        wants = self.wants if num_pages <= table.content.num_known_pages else None
        if self._keeps_all and wants is None:
            return
        for index in self._bounded:
            sink, first = self.tree.needed(index, num_pages * self.page_size)
            end = num_pages
            if is_prompt:
                if first == num_pages:
                    end -= 1  # neither needs the last page
                _, first = self.tree.needed(index, (num_pages - 1) * self.page_size)
                if first < sink:
                    first = sink
            held = table.held[index]
            for page in (sink, first, end):
                for run in held:
                    if run.start < page < run.end:
                        run.split(page)
                        break
            for run in held:
                if run.span is not None and (run.end <= sink or first <= run.start < end):
                    run.is_kept = True
            if wants is not None:
                # The window of the last chunk may have passed the first of these pages: others may find them still.
                if sink:
                    wants.complete(table.content, index, 0, sink)
                if first < end:
                    wants.complete(table.content, index, first, end)

    def _keep_snapshots(self, table: RunTable) -> None:
        """Copy the states to separate parts, where such parts do not exist yet and fit."""
        span, page = self.tree.last_of(table), table.num_named
        missing = [index for index in self._of_states if not any(run.end == page for run in span.parts[index])]
        if sum(self.part_bytes[index] for index in missing) > self.room_bytes:
            return
        self.num_published += 1
        for index in missing:
            self.take(index, 1)
            run = self._add_snapshot(table, index, span, self.take_ids(index, 1))
            if self.blocks is not None:
                table.snapshots.append((table.num_tokens, run))
            if self.wants is not None:
                self.wants.computes(run, page - 1)
                if page <= table.content.num_known_pages:
                    self.wants.complete(table.content, index, page - 1, page)
            self.release(index, (run,), table)  # a copy that nothing holds

    def _add_snapshot(self, table: RunTable, index: int, span: Span, ids: PageIds) -> PartRun:
        """Return a snapshot of `table` after its last full page, which is in `span`."""
        page = table.num_named
        run = PartRun(index, span, page - 1, page, [table], is_kept=True, ids=ids)
        if self.events is not None:
            self.events.came(table.content, index, span, page - 1, page)
            self.events.flush()
        span.parts[index].append(run)
        return run

    def _keep_state(self, table: RunTable) -> None:
        """Make the states of a sequence that is about to be closed findable after its last full page.

        They are of more tokens than that page ends with, `swapped_tokens` of its content, and nothing else can find
        them. With a snapshot at that page, they are not kept.
        """
        span, page = self.tree.last_of(table), table.num_named
        snapshots = [run for index in self._of_states for run in span.parts[index] if run.end == page]
        if snapshots:
            table.content.swapped_tokens = page * self.page_size
            for run in snapshots:
                run.is_kept = True  # the last preemption may have made it
            return
        table.content.swapped_tokens = table.swapped_tokens
        for index in self._of_states:
            run = self._add_snapshot(table, index, span, table.state_ids[index])
            table.num_states[index], table.state_ids[index] = 0, NO_IDS
            table.held[index].append(run)

    def drop_state(self, content: Content, page: int) -> None:
        """Drop the snapshots before `page` of a request that has resumed; those that it holds when it releases them."""
        spans, num_pages = self.tree.walk(content, page)
        for index in self._of_states if num_pages == page else ():
            for run in tuple(spans[-1].parts[index]):
                if run.end != page:
                    continue
                run.is_kept = run.is_wanted = False
                if run.slot is not None:
                    run.leave_slot()
                if run.holders:
                    continue
                if self.events is not None:
                    self.events.goes(run, run.start, run.end, is_dropped=True)
                    self.events.flush()
                run.unlist()
                self.note_used(index, 1)
                self.note_empty(index, 1)
                self.give_ids(run.ids)
                run.ids = NO_IDS
                run.forget()

    # Loads and stores ----------------------------------------------------------------------------------------

    def begin_load(self, content: Content, match: RunMatch, first: int = 0) -> RunTable:
        """Begin a sequence after `match`: hold the device's parts, and take parts for the rest, which a load fills.

        The parts must fit. They cannot be found before `arrive`. Parts before page `first` are left out: `join_front`
        adds them later.
        """
        self.note_begin()
        last = match.spans[-1] if match.spans else match.root
        table = RunTable(content, last, match.num_pages, self.page_size, len(self.groups))
        last.num_users += 1
        assert match.pieces is not None
        from_first = match.pieces
        if first:
            from_first = [
                [(run, max(start, first), end) for run, start, end in pieces if end > first] for pieces in match.pieces
            ]
        resident: list[list[PartRun]] = []
        for index, pieces in enumerate(from_first):
            self.hold_path([run.cut(start, end) for run, start, end in pieces if run.list_index == index], table)
            resident.append(table.held[index])
        if not match.spans:  # pages that only a shared tier has
            table.num_named = 0
            self.tree.extend(table, match.num_pages)
        for index, pieces in enumerate(from_first):
            num_missing = sum(end - start for run, start, end in pieces if run.list_index != index)
            if not num_missing:
                continue
            self.take(index, num_missing)
            ids = self.take_ids(index, num_missing)
            held: list[PartRun] = []
            of_device = iter(resident[index])
            for run, start, end in pieces:
                if run.list_index == index:
                    held.append(next(of_device))
                    continue
                own = ids.take_first((end - start) * self.part_blocks[index]) if ids else NO_IDS
                before = held[-1] if held else None
                if before is not None and before.span is None and before.end == start:
                    before.end = end
                    before.ids.extend(own)
                else:
                    held.append(PartRun(index, None, start, end, [table], is_kept=False, ids=own))
            table.held[index] = held
        return table

    def join_front(self, front: RunTable, loaded: RunTable) -> None:
        """Move the full pages of `front`, a sequence of the pages before, to `loaded`; its other parts become empty."""
        self.drop_pages(front, front.num_named)
        for index, held in enumerate(front.held):
            for run in held:
                run.holders[run.holders.index(front)] = loaded
            loaded.held[index] = held + loaded.held[index]
            front.held[index] = []
        front.last.num_users -= 1
        if not front.last.num_users:
            front.last.prune()
        front.is_open = False

    def arrive(self, table: RunTable, ends: Sequence[int]) -> None:
        """Make the parts of `table` findable that a load has filled: by group, those before page `ends[index]`.

        Parts that a group does not retain serve this sequence only.
        """
        spans: list[tuple[Span, int, int]] = []
        span: Span | None = self.tree.last_of(table)
        while span is not None:
            spans.append((span, span.start, span.end))
            span = span.parent
        spans.reverse()
        for index, held in enumerate(table.held):
            for run in tuple(held):
                if run.span is not None or run.start >= ends[index]:
                    continue
                if run.end > ends[index]:
                    run = run.split(ends[index])  # noqa: PLW2901
                self.num_published += 1
                for piece in self._retained_of(run, table) if self.sparse[index] else (run,):
                    piece.is_kept = True
                    self._place(piece, spans, table.content)
        if self.events is not None:
            self.events.flush()

    def note_arrived(self, table: RunTable, num_pages: int) -> None:
        """Treat the state after the first `num_pages` pages as one of this step, if others can find it."""
        if self._by_page >= 0 and any(
            run.span is not None and run.end == num_pages for run in table.held[self._by_page]
        ):
            self.computed.append((table.content, num_pages - 1, num_pages))

    def _retained_of(self, run: PartRun, table: RunTable) -> Iterator[PartRun]:
        """Yield the pieces of a run that a load has filled, and that its group retains."""
        assert self._retained is not None
        for begin, stop in self._retained.ranges(run.group, table, run.start, run.end):
            if begin > run.start:
                run.split(begin)
            yield run.split(stop) if stop < run.end else run

    def begin_to_receive(self, content: Content, match: RunMatch, num_tokens: int) -> RunTable:
        """Begin a sequence whose first `num_tokens` tokens are computed elsewhere: hold `match`, and take other parts.

        They are those with which the last token is computed again, and must fit. They cannot be found before `receive`.
        """
        table = self.begin(content, match)
        start, num_pages = match.num_pages, -(-num_tokens // self.page_size)
        seen: list[tuple[int, int]] = []
        for index, group in enumerate(self.groups):
            sink, first = self.tree.needed(index, num_tokens - 1)
            seen.append((sink, first))
            if not group.is_state:
                table.first_open[index] = max(start, first)  # nothing is taken of pages in between
            if group.is_state or group.is_bounded:
                self.free_skipped_in(table, index, num_tokens - 1)
        for index, group in enumerate(self.groups):
            if group.is_state:
                self.take(index, 1)
                table.num_states[index] = 1
                table.state_ids[index] = self.take_ids(index, 1)
                continue
            sink, first = seen[index]
            if start < sink:
                self.take(index, sink - start)
                ids = self.take_ids(index, sink - start)
                table.held[index].append(PartRun(index, None, start, sink, [table], is_kept=False, ids=ids))
            num_open = num_pages - table.first_open[index]
            self.take(index, num_open)
            table.open_ids[index] = self.take_ids(index, num_open)
        table.num_taken = num_pages
        table.num_tokens = num_tokens
        return table

    def receive(self, table: RunTable) -> None:
        """Make the full pages of `table` findable: all of its tokens have arrived."""
        num_full = table.num_tokens // self.page_size
        if num_full > table.num_named:
            self.fill_page(table, table.num_tokens)
            self.arrive(table, [num_full] * len(self.groups))
        self.keep_tails(table, num_full)

    def unhold(self, table: RunTable, *, go_first: bool) -> None:
        """End the hold of a store on one run. With `go_first`, an order's next evictions are its unused parts.

        The last page is evicted before the others. In the list, parts keep their places, as far as they had any.
        """
        if not go_first or self.eviction_order is None:
            self.release_all(table, range(len(self.groups)))
            return
        for index, held in enumerate(table.held):
            table.held[index] = []
            for run in held:
                self.release(index, (run,), table)
                if run.is_listed:  # else others hold it, or nothing keeps it, and it is empty
                    self.move_first(run)

    # Laws -------------------------------------------------------------------------------------------------

    def runs(self) -> Iterator[tuple[int, Content, int, int, int]]:
        """Yield findable parts and their copies: group, content, first page, page after the last, number of holders."""
        for span in self.tree.every():
            for index, runs in enumerate(span.parts[: len(self.groups)]):
                for run in runs:
                    yield index, span.content, run.start, run.end, len(run.holders)

    def check(self, tables: Sequence[RunTable], taken_ids: Sequence[Sequence[PageId]] = ()) -> None:
        """Assert that bytes are conserved, and that runs are held exactly as often as sequences record.

        `taken_ids`: the blocks that were taken by `take_blocks`, in several lists.
        """
        groups = self.groups
        used, cached = [0] * len(groups), self.listed_counts()
        held: dict[int, int] = {}
        private = [[self._num_private(table, index) for index in range(len(groups))] for table in tables]
        for table, of_groups in zip(tables, private, strict=True):
            for index, runs in enumerate(table.held):
                used[index] += of_groups[index]
                for run in runs:
                    count = held.get(id(run), 0)
                    held[id(run)] = count + 1
                    if not count:
                        used[index] += run.end - run.start
                    assert table in run.holders, "L2: a part is held, and does not say so"
                    assert run.span is None or run in run.span.parts[index], "L1: a part in use cannot be found"
        for span in self.tree.every():
            assert span.parent is not None and span.parent.end == span.start, (
                "L3: a span does not follow the one before"
            )
            for runs in span.parts[: len(groups)]:
                for run in runs:
                    assert run.span is span and len(run.holders) == held.get(id(run), 0), "L2: a part is held by others"
                    assert run.is_listed == (not run.holders), "L2: a part is listed, and held"
                    assert run.slot is None or run.is_lent, "L2: a part that is in use has a place in the list"
                    start = span.start - span.start % self.tree.block_pages[run.group]
                    assert start <= run.start <= run.end <= span.end, "L1: a part is not of its span"
                    if self.blocks is not None:
                        num_ids = (run.end - run.start) * self.part_blocks[run.group]
                        assert len(run.ids) == num_ids, f"L1: {num_ids} blocks, and {len(run.ids)} ids"
        assert used == self.num_used, f"L1: {used} parts used, counted {self.num_used}"
        assert cached == self.num_cached, f"L1: {cached} parts cached, counted {self.num_cached}"
        sizes = self.part_bytes
        assert sum(map(int.__mul__, cached, sizes)) == self.cached_bytes, "L1: cached bytes"
        in_use = sum(map(int.__mul__, used, sizes)) + sum(map(len, taken_ids)) * self.block_bytes
        assert in_use + self.cached_bytes + self.empty_bytes == self.total_bytes, "L1: bytes are lost"
        if self.blocks is not None and self.is_id_check_due():
            self._check_ids(self.blocks, tables, taken_ids)

    def _check_ids(self, blocks: IdPool, tables: Sequence[RunTable], taken_ids: Sequence[Sequence[PageId]]) -> None:
        """Assert that every block has one owner."""
        ids = [blocks.empty, *map(PageIds, taken_ids)]
        for span in self.tree.every():
            for runs in span.parts[: len(self.groups)]:
                ids += [run.ids for run in runs]
        for table in tables:
            ids += (*table.open_ids, *table.state_ids)
            for runs in table.held:
                ids += [run.ids for run in runs if run.span is None]  # a load fills them
        assert are_all_once(ids, blocks.total), "L1: a block is lost or has two owners"

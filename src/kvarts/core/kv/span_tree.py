"""The index of findable parts: a tree of spans per tenant, and the longest prefix that every group can resume from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import gcd

from kvarts.core.content import NOTHING, Content
from kvarts.core.kv.group_needs import FirstSeen
from kvarts.core.kv.groups import GroupMemory
from kvarts.core.kv.runs import NEVER, PartRun, RunMatch, RunTable, Span, first_list

__all__ = ["SpanTree", "common_end", "covered_end", "covered_from", "covered_to", "find"]


class SpanTree:
    """Owner of all spans. `look`: brings the runs of streams in a span up to date. `num_below`: the number of tiers
    below. `finds_branches`: matches of models with states include the branch."""

    def __init__(
        self,
        memory: GroupMemory,
        page_size: int,
        look: Callable[[Span], object],
        *,
        num_below: int = 0,
        finds_branches: bool = False,
    ) -> None:
        groups = self.groups = memory.groups
        self.num_groups = len(groups)
        self._num_lists = (1 + 2 * num_below) * len(groups)
        self.block_pages = [group.block_pages for group in groups] * (1 + 2 * num_below)
        """By list, the pages of a block, which is in the span of its last page."""
        self.page_size = page_size
        self.first_new = NEVER
        """The first page of a span that the last `extend` made or lengthened, from which on no part is of before."""
        self.roots: dict[str | None, Span] = {}
        """The roots of the tenants' trees; a root precedes the first page."""
        self._look = look
        self._whole = [index for index, group in enumerate(groups) if group.layer.kind in ("full", "latent")]
        self._keeps_all = [group.layer.kind in ("full", "latent") for group in groups]
        self._bounded = [index for index, group in enumerate(groups) if group.is_bounded]
        self._is_state = [group.is_state for group in groups]
        self._states = [index for index, group in enumerate(groups) if group.is_state]
        self._has_less = len(self._whole) < len(groups)
        """Whether some group keeps less than all tokens."""
        self._finds_branches = finds_branches and bool(self._states) and bool(self._whole)
        self._notes_branch = bool(self._whole) and (memory.aligns or memory.retention_interval is not None)
        self._first_seen = [FirstSeen(group.layer, page_size) for group in groups]
        self._lags = [first_seen.lag for first_seen in self._first_seen]
        self._chunks = [group.layer.kind == "chunk" for group in groups]
        self._lengths = [group.layer.span or 1 for group in groups]
        """The tokens of the window or chunk of each group."""
        self.sinks = [-(-group.layer.sink // page_size) for group in groups]
        """The pages of each group's sink."""

    def needed(self, index: int, num_tokens: int) -> tuple[int, int]:
        """Return (s, f): later tokens need the first s pages of `num_tokens` tokens, and those from page f on."""
        lag = self._lags[index]
        if lag >= 0:  # FirstSeen.page, inlined
            first = (num_tokens - lag) // self.page_size if num_tokens > lag else 0
        elif self._is_state[index]:
            is_page_end = num_tokens and not num_tokens % self.page_size
            return 0, num_tokens // self.page_size - 1 if is_page_end else -(-num_tokens // self.page_size)
        elif index in self._whole:
            return 0, 0
        else:
            first = self._first_seen[index].page(num_tokens)
        sink = self.sinks[index]
        return (sink if sink < first else first), first

    # Matching ---------------------------------------------------------------------------------------------

    def match(self, content: Content, limit: int, *, depth: int = 0) -> RunMatch:
        """Return the longest prefix of `content`, at most `limit` full pages, that every group can resume from.

        With the parts of the first `depth` tiers below; those that several have are taken from the fastest.
        """
        root = span = self.root(content.salt)
        spans: list[Span] = []
        found = [] if depth else spans
        """The same spans, with the parts that device and tier have of each."""
        page = 0
        child: Span | None = None
        while page < limit:
            child = span.children.get(content.key(page))
            if child is None:
                break
            if child.is_moving:
                self._look(child)
            common = end = common_end(child, content, min(limit, child.end))
            resident = self._with_below(child, depth) if depth else child
            for index in self._whole:
                runs = resident.parts[index]
                if not (runs and (oldest := runs[0]).start <= page and end <= oldest.end):  # `covered_to`, inlined
                    end = covered_to(runs, page, end)
            if end > page:
                spans.append(child)
                if depth:
                    found.append(resident)
                page = end
            if end < common or common < child.end:
                break
            span = child
        branch = 0
        if self._finds_branches and 0 < page < limit:
            branch = self._branch_of(span if child is None or child.start >= page else child, content, page)
        length = self._longest(found, page) if page and self._has_less else page
        if self._notes_branch:
            branch = page
        while spans and spans[-1].start >= length:
            spans.pop()
        match = RunMatch(content, root, spans, length)
        if branch > length:
            match.branch = branch
        if depth:
            match.pieces = self._pieces(found, length)
        return match

    def match_across(
        self, content: Content, limit: int, other: SpanTree, lists: Sequence[int], *, depth: int = 0
    ) -> RunMatch:
        """Return the match of `content` with the parts of `other` as well, by group from each of `lists` of its spans.

        Parts of the device and of the first `depth` tiers are preferred. The match has no spans if this tree lacks a
        span for one of its pages.
        """
        own, known = self.walk(content, limit)
        there, end = other.walk(content, limit)
        cuts = sorted({0, known, end, *(span.start for span in own)})
        page = at = place = 0
        found: list[Span] = []
        for start, stop in pairwise(cuts):
            # The last spans, and runs of them, may end after the pages that they have in common with `content`.
            while at < len(own) and own[at].end <= start:
                at += 1
            of_device = [[]] * self.num_groups if start >= known else self._with_below(own[at], depth).parts
            resident = Span(content, b"", start, stop, None, 0)
            resident.parts = [[run for run in runs if run.start < stop and start < run.end] for runs in of_device]
            while place < len(there) and there[place].end <= start:
                place += 1
            for number in range(place, len(there) if start < end else 0):
                each = there[number]
                if each.start >= stop:
                    break
                for index, runs in enumerate(resident.parts):
                    for first in lists:
                        runs += [run for run in each.parts[first + index] if run.start < stop and start < run.end]
            covered = stop
            for index in self._whole:
                covered = covered_to(resident.parts[index], page, covered)
            if covered > page:
                found.append(resident)
                page = covered
            if covered < stop:
                break
        length = self._longest(found, page) if page else 0
        spans = [span for span in own if span.start < length] if length <= known else []
        match = RunMatch(content, self.root(content.salt), spans, length)
        match.pieces = self._pieces(found, length)
        return match

    def _branch_of(self, span: Span, content: Content, page: int) -> int:
        """Return `page` if another content than `content` continues there, with known tokens; else 0.

        Its next page must be resident. `span` has the page before, and groups that keep all tokens have `content` up to
        there.
        """
        key = content.key(page)
        nexts = [(span.content.key(page), span)] if page < span.end else list(span.children.items())
        for key_of_next, other in nexts:
            if key_of_next == key or not isinstance(key_of_next, bytes):
                continue
            for index in self._whole:
                if any(run.start <= page < run.end for run in other.parts[index]):
                    return page
        return 0

    def _with_below(self, span: Span, depth: int) -> Span:
        """Return a span like `span`, in no tree, with the parts of the device and of the first `depth` tiers."""
        count = self.num_groups
        all_parts = span.parts[:count]
        for place in range(depth):
            first = first_list(place, count)
            below = span.parts[first : first + count]
            if any(below):
                all_parts = [faster + slower for faster, slower in zip(all_parts, below, strict=True)]
        every = Span(span.content, span.key, span.start, span.end, None, 0)
        every.parts = all_parts
        return every

    def walk(self, content: Content, end: int) -> tuple[list[Span], int]:
        """Return the spans of the first `end` pages of `content`, as far as pages have one, and how many have.

        The last span may reach beyond.
        """
        span = self.root(content.salt)
        spans: list[Span] = []
        page = 0
        while page < end and (child := span.children.get(content.key(page))) is not None:
            if child.is_moving:
                self._look(child)
            spans.append(child)
            page = common_end(child, content, min(end, child.end))
            if page < child.end:
                break
            span = child
        return spans, page

    def _longest(self, spans: list[Span], length: int) -> int:
        """Return the largest number of pages, at most `length`, that groups that keep less can resume from as well."""
        settled = -1
        while length != settled:
            settled = length
            for index in self._bounded:
                length = self._longest_of(index, spans, length)
            if self._states:
                length = self._longest_of_states(spans, length)
            if not self._whole and length and not self._has_page(spans, length - 1):
                length -= 1
        return length

    def _longest_of(self, index: int, spans: list[Span], length: int) -> int:
        """Return the same for one group with windows or chunks."""
        page_size, span_tokens = self.page_size, self._lengths[index]
        while length:
            sink, first = self.needed(index, length * page_size)
            if first < length:
                begin = covered_from(index, spans, length, first)
                if begin > first:
                    # No shorter prefix can resume with the pages from `begin` on, except at the end of a chunk of the
                    # layer, where no page is needed.
                    shorter = begin if begin < length else covered_end(index, spans, length)
                    if self._chunks[index]:
                        num_pages = span_tokens // gcd(span_tokens, page_size)
                        shorter = max(shorter, (length - 1) // num_pages * num_pages)
                    length = shorter
                    continue
            if not sink or (head := self._head(index, spans, sink)) >= sink:
                return length
            # Only a prefix that needs no more of the sink than is resident.
            length = min(length - 1, ((head + 1) * page_size + span_tokens - 2) // page_size)
        return 0

    def _longest_of_states(self, spans: list[Span], length: int) -> int:
        """Return the same for groups of states; each needs a snapshot."""
        while length:
            ends = [_last_end(index, spans, length) for index in self._states]
            if min(ends) == length:
                return length
            length = min(ends)
        return 0

    def _head(self, index: int, spans: list[Span], sink: int) -> int:
        """Return how many pages a group has from the first on, up to `sink`."""
        page = 0
        for span in spans:
            page = covered_to(span.parts[index], page, min(span.end, sink))
            if page < span.end:
                break
        return page

    def _has_page(self, spans: list[Span], page: int) -> bool:
        """Return whether any group has `page`."""
        return any(
            run.start <= page < run.end
            for span in spans
            if span.start <= page < span.end
            for runs in span.parts[: self.num_groups]
            for run in runs
        )

    def reach(self, content: Content, limit: int) -> tuple[int, ...]:
        """Return, per group, the longest prefix of at most `limit` full pages that the group alone could resume from.

        Not longer than to the last page with a part in any group.
        """
        spans, page = self.walk(content, limit)
        count = self.num_groups
        every = [run for span in spans for runs in span.parts[:count] for run in runs if run.start < page]
        length = max((min(run.end, page) for run in every), default=0)
        longest: list[int] = []
        for index, group in enumerate(self.groups):
            if group.is_state:
                longest.append(_last_end(index, spans, length))
            elif group.is_bounded:
                longest.append(self._longest_of(index, spans, length))
            else:
                longest.append(self._head(index, spans, length))
        return tuple(longest)

    # Parts of a match ----------------------------------------------------------------------------------------

    def pieces(self, match: RunMatch) -> list[list[tuple[PartRun, int, int]]]:
        """Return the parts with which a sequence begins after `match`, by group and page; among copies, the oldest."""
        if match.pieces is None:
            match.pieces = self._pieces(match.spans, match.num_pages)
        return match.pieces

    def _pieces(self, spans: list[Span], length: int) -> list[list[tuple[PartRun, int, int]]]:
        pieces: list[list[tuple[PartRun, int, int]]] = []
        for index in range(self.num_groups):
            sink, first = (0, 0) if self._keeps_all[index] else self.needed(index, length * self.page_size)
            found: list[tuple[PartRun, int, int]] = []
            for span in spans:
                start, end = span.start, span.end
                if start < sink:
                    find(span.parts[index], start, min(sink, end), found)
                if end > first and first < length and start < length:
                    if start < first:
                        start = first
                    if end > length:
                        end = length
                    runs = span.parts[index]
                    if runs and (oldest := runs[0]).start <= start and end <= oldest.end:  # `find`, inlined
                        found.append((oldest, start, end))
                    else:
                        find(runs, start, end, found)
            pieces.append(found)
        return pieces

    def num_shared(self, match: RunMatch, index: int, first_page: int) -> int:
        """Return how many of the parts with which a sequence begins after `match` others hold.

        Counts only the parts of the sink, and those that a token uses that needs pages from `first_page` on.
        """
        count, sink = 0, self.sinks[index]
        pieces = self.pieces(match) if match.pieces is None else match.pieces
        for run, first, end in pieces[index]:
            start = first
            if run.holders and run.list_index == index:
                if start < sink:
                    count += (end if end < sink else sink) - start
                    start = sink
                if start < first_page:
                    start = first_page
                if start < end:
                    count += end - start
        return count

    def num_with_held_copy(self, match: RunMatch, index: int) -> int:
        """Return how many of the parts that a sequence begins with after `match` nothing holds, but a copy of them."""
        count = 0
        for run, start, end in self.pieces(match)[index]:
            if not run.holders and run.span is not None:
                for copy in run.span.parts[index]:
                    if copy.holders:
                        count += max(0, min(end, copy.end) - max(start, copy.start))
        return count

    def num_idle(self, match: RunMatch, index: int) -> int:
        """Return how many snapshots with which a sequence begins after `match` are not held, or must be loaded."""
        return sum(not run.holders or run.list_index != index for run, _, _ in self.pieces(match)[index])

    # Spans ------------------------------------------------------------------------------------------------

    def every(self) -> Iterator[Span]:
        """Yield all spans but the roots, each before those that follow it."""
        todo = list(self.roots.values())
        while todo:
            span = todo.pop()
            todo += span.children.values()
            if span.parent is not None:
                yield span

    def root(self, salt: str | None) -> Span:
        """Return the root of a tenant's tree, which precedes the first page."""
        root = self.roots.get(salt)
        if root is None:
            root = self.roots[salt] = Span(NOTHING, b"", 0, 0, None, 0)
        return root

    def split(self, span: Span, page: int) -> Span:
        """Split `span`, which must be up to date, before `page`; return the first part, a new span."""
        parent, content = span.parent, span.content
        assert parent is not None and span.start < page < span.end
        head = Span(content, span.key, span.start, page, parent, self._num_lists)
        parent.children[span.key] = head
        span.key = content.key(page)
        head.children[span.key] = span
        head.is_moving = span.is_moving
        span.parent, span.start = head, page
        for index, runs in enumerate(span.parts):
            end = page - page % self.block_pages[index]
            for run in tuple(runs):
                if run.end <= end:
                    first = run
                elif run.start < end:
                    first = run.split(end)
                    if first.span is None:
                        continue  # its stream had evicted it
                else:
                    continue
                runs.remove(first)
                first.span = head
                head.parts[index].append(first)
        if not (span.num_users or span.children or any(span.parts)):
            del head.children[span.key]  # its parts were evicted
        return head

    def last_after(self, run: PartRun) -> PartRun:
        """Return the run to evict in place of `run`, in a group that keeps all tokens: the deepest that follows it.

        That is `run` if nothing follows it, or if its last page has a copy. The returned run is cut so that the same
        holds for each of its pages when the pages after it are evicted.
        """
        span, place = run.span, run.list_index
        assert span is not None
        copies = [other.start for other in span.parts[place] if other is not run and other.start < run.end <= other.end]
        if copies:
            if run.start < copies[0]:
                run.split(copies[0])
            return run
        last = _last_listed(span, place, run.end)
        if last is None:
            return run
        assert last.span is not None
        ends = [other.end for other in last.span.parts[place] if other.is_listed and last.start < other.end < last.end]
        if ends:
            last.split(max(ends))
        return last

    def last_of(self, table: RunTable) -> Span:
        """Return the span with the last full page of `table`; without full pages, the root."""
        page, last = table.num_named, table.last
        if last.start < page or last.parent is None:
            return last
        before = last  # split since
        while last.start >= page and last.parent is not None:
            last = last.parent
        last.num_users += 1
        table.last = last
        before.num_users -= 1
        if not before.num_users:
            before.prune()
        return last

    @contextmanager
    def spans_of(self, content: Content, end: int) -> Iterator[list[tuple[Span, int, int]]]:
        """Yield the spans of the first `end` pages of `content`, with the pages of each; create missing ones.

        Those that are empty afterwards are removed.
        """
        root = self.root(content.salt)
        root.num_users += 1
        table = RunTable(content, root, 0, self.page_size, self.num_groups)
        yield self.extend(table, end)
        last = self.last_of(table)
        last.num_users -= 1
        last.prune()

    def extend(self, table: RunTable, end: int) -> list[tuple[Span, int, int]]:
        """Create the missing spans of the pages of `table` up to `end`; return the spans with the pages of each."""
        content, last, page = table.content, table.last, table.num_named
        if last.start >= page and last.parent is not None:
            last = self.last_of(table)
        table.num_named = end
        self.first_new = NEVER
        if last.end == page and page < end:
            self.first_new = page
            if last.content is content and last.num_users == 1 and not last.children:
                last.end = end
                return [(last, page, end)]
            key = content.key(page)
            if key not in last.children:
                child = table.last = last.children[key] = Span(content, key, page, end, last, self._num_lists)
                child.num_users = 1
                last.num_users -= 1
                return [(child, page, end)]
            self.first_new = NEVER
        before = last
        spans: list[tuple[Span, int, int]] = []
        while page < end:
            if page < last.end:
                child = last
                if child.is_moving:
                    self._look(child)
                common = child.content.common_pages(content, page, min(end, child.end))
            else:
                key = content.key(page)
                of_key = last.children.get(key)
                if of_key is not None and of_key.is_moving:
                    self._look(of_key)
                    of_key = last.children.get(key)  # it may have been pruned
                if of_key is None:
                    self.first_new = page
                    of_key = last.children[key] = Span(content, key, page, end, last, self._num_lists)
                child = of_key
                common = common_end(child, content, min(end, child.end))
            if common < end and common < child.end:
                child = self.split(child, common)
            if common > page:
                spans.append((child, page, common))
            last, page = child, common
        last.num_users += 1
        table.last = last
        before.num_users -= 1
        if not before.num_users:
            before.prune()
        return spans


def _last_listed(span: Span, place: int, start: int) -> PartRun | None:
    """Return the deepest run that is listed, and ends after page `start` of `span`, there or in a span after it.

    The youngest of spans that follow the same page is examined first, and the oldest of copies.
    """
    todo = [(span, reversed(span.children.values()))]
    while todo:
        last, children = todo[-1]
        child = next(children, None)
        if child is not None:
            todo.append((child, reversed(child.children.values())))
            continue
        todo.pop()
        listed = [run for run in last.parts[place] if run.end > start and run.is_listed]
        if listed:
            return max(listed, key=_end)
    return None


def _end(run: PartRun) -> int:
    return run.end


def common_end(span: Span, content: Content, end: int) -> int:
    """Return the page, at most `end`, up to which `span` and `content` are equal; their first page is."""
    first = span.start + 1
    if span.content is content or end <= first:
        return end
    return span.content.common_pages(content, first, end)


def covered_to(runs: list[PartRun], page: int, end: int) -> int:
    """Return the first page from `page` on, at most `end`, that none of `runs` has."""
    is_found = len(runs) > 0
    while is_found:
        is_found = False
        for run in runs:
            if run.start <= page < run.end:
                page = run.end
                if page >= end:
                    return end
                is_found = len(runs) > 1
    return page


def covered_from(index: int, spans: list[Span], end: int, first: int) -> int:
    """Return the first page from which a group has all pages up to `end`; `first` or less if it has all from there."""
    page = end
    for span in reversed(spans):
        if span.start >= page:
            continue
        runs = span.parts[index]
        is_found = True
        while is_found and page > first:
            is_found = False
            for run in reversed(runs):
                if run.start < page <= run.end:
                    page, is_found = run.start, True
        if page > span.start or page <= first:
            break
    return page


def covered_end(index: int, spans: list[Span], length: int) -> int:
    """Return the largest number of pages, at most `length`, whose last page a group has; 0 for none."""
    for span in reversed(spans):
        best = 0
        for run in span.parts[index]:
            if run.start < length and run.end > best:
                best = run.end
        if best:
            return min(best, length, span.end)
    return 0


def _last_end(index: int, spans: list[Span], length: int) -> int:
    """Return the largest number of pages, at most `length`, after which a group of states has a snapshot."""
    return max(
        (min(run.end, span.end, length) for span in spans for run in span.parts[index] if run.start < length), default=0
    )


def find(runs: list[PartRun], start: int, end: int, found: list[tuple[PartRun, int, int]]) -> None:
    """Add the runs that have pages of [start, end) to `found`, by page; among copies, the oldest."""
    if not runs:
        return
    oldest = runs[0]
    if oldest.start <= start and end <= oldest.end:
        found.append((oldest, start, end))
        return
    # Usually each run follows the one before.
    num_before, page = len(found), start
    for run in runs:
        if run.end <= page or run.start >= end:
            continue
        if run.start > page:
            page = -1
            break
        stop = run.end if run.end < end else end
        found.append((run, page, stop))
        page = stop
        if page == end:
            return
    if page >= 0:
        return
    del found[num_before:]
    todo = [(start, end)]
    pieces: list[tuple[PartRun, int, int]] = []
    for run in runs:
        left: list[tuple[int, int]] = []
        for begin, stop in todo:
            first, last = max(begin, run.start), min(stop, run.end)
            if first >= last:
                left.append((begin, stop))
                continue
            pieces.append((run, first, last))
            if begin < first:
                left.append((begin, first))
            if last < stop:
                left.append((last, stop))
        todo = left
        if not todo:
            break
    if len(pieces) > 1:
        pieces.sort(key=lambda piece: piece[1])
    found += pieces

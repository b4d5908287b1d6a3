"""Which parts are found: spans in a tree for each tenant, and the longest prefix that every group can go on from."""

from __future__ import annotations

from math import gcd

from kvarts.content import Content
from kvarts.kv.decodes import Decodes
from kvarts.kv.first_seen import FirstSeen
from kvarts.kv.group_memory import GroupMemory
from kvarts.kv.node import NOTHING
from kvarts.kv.spans import PartRun, RunHolding, RunMatch, Span

__all__ = ["SpanTree", "find"]


class SpanTree:
    """Owner of all spans. `decodes`: says how far the runs of streams have come. `has_below`: there is a tier below."""

    def __init__(self, memory: GroupMemory, page_size: int, decodes: Decodes, *, has_below: bool = False) -> None:
        groups = self.groups = memory.groups
        self.num_groups = len(groups)
        self._num_lists = (3 if has_below else 1) * len(groups)
        self.page_size = page_size
        self.roots: dict[str | None, Span] = {}
        """What is before the first page of each tenant."""
        self._decodes = decodes
        self._whole = [index for index, group in enumerate(groups) if group.layer.kind in ("full", "latent")]
        self._bounded = [index for index, group in enumerate(groups) if group.is_bounded]
        self._states = [index for index, group in enumerate(groups) if group.is_state]
        self._first_seen = [FirstSeen(group.layer, page_size) for group in groups]
        self._chunks = [group.layer.kind == "chunk" for group in groups]
        self._lengths = [group.layer.span or 1 for group in groups]
        """The tokens of the window or chunk of each group."""
        self._sinks = [-(-group.layer.sink // page_size) for group in groups]

    def needed(self, index: int, num_tokens: int) -> tuple[int, int]:
        """Return (s, f): of the pages of `num_tokens` tokens, later ones need the first s and those from page f on."""
        if self.groups[index].is_state:
            is_page_end = num_tokens and not num_tokens % self.page_size
            return 0, num_tokens // self.page_size - 1 if is_page_end else -(-num_tokens // self.page_size)
        first = self._first_seen[index].page(num_tokens)
        sink = self._sinks[index]
        return (sink if sink < first else first), first

    # Matching ---------------------------------------------------------------------------------------------

    def match(self, content: Content, limit: int, *, with_below: bool = False) -> RunMatch:
        """Return the longest prefix of `content`, at most `limit` full pages, that every group can go on from.

        `with_below`: with what the tier below has as well; what the device has of it comes from there.
        """
        root = span = self.root(content.salt)
        spans: list[Span] = []
        found = [] if with_below else spans
        """The same spans, with what device and tier have of each."""
        page = 0
        while page < limit:
            child = span.children.get(content.key(page))
            if child is None:
                break
            if child.is_moving:
                self._decodes.look(child)
            common = end = _common(child, content, min(limit, child.end))
            resident = self._with_below(child) if with_below else child
            for index in self._whole:
                end = _covered_to(resident.parts[index], page, end)
            if end > page:
                spans.append(child)
                if with_below:
                    found.append(resident)
                page = end
            if end < common or common < child.end:
                break
            span = child
        length = self._longest(found, page) if page else 0
        while spans and spans[-1].start >= length:
            spans.pop()
        match = RunMatch(root, spans, length)
        if with_below:
            match.pieces = self._pieces(found, length)
        return match

    def _with_below(self, span: Span) -> Span:
        """Return a span like `span`, and in no tree, the parts of which are those of the device and of the tier."""
        count = self.num_groups
        if not any(span.parts[count : 2 * count]):
            return span
        both = Span(span.content, span.key, span.start, span.end, None, 0)
        both.parts = [span.parts[index] + span.parts[count + index] for index in range(count)]
        return both

    def walk(self, content: Content, end: int) -> tuple[list[Span], int]:
        """Return the spans of the first `end` pages of `content`, as far as pages have one, and how many have.

        The last span may reach beyond.
        """
        span = self.root(content.salt)
        spans: list[Span] = []
        page = 0
        while page < end and (child := span.children.get(content.key(page))) is not None:
            if child.is_moving:
                self._decodes.look(child)
            spans.append(child)
            page = _common(child, content, min(end, child.end))
            if page < child.end:
                break
            span = child
        return spans, page

    def _longest(self, spans: list[Span], length: int) -> int:
        """Return the largest number of pages, at most `length`, that groups that keep less can go on from as well."""
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
                begin = _covered_from(index, spans, length, first)
                if begin > first:
                    # No shorter prefix can go on with the pages from `begin` on, but where a chunk ends nothing is
                    # needed of it.
                    shorter = begin if begin < length else _covered_end(index, spans, length)
                    if self._chunks[index]:
                        num_pages = span_tokens // gcd(span_tokens, page_size)
                        shorter = max(shorter, (length - 1) // num_pages * num_pages)
                    length = shorter
                    continue
            if not sink or (head := self._head(index, spans, sink)) >= sink:
                return length
            # Only a prefix that needs no more of the sink than is there.
            length = min(length - 1, ((head + 1) * page_size + span_tokens - 2) // page_size)
        return 0

    def _longest_of_states(self, spans: list[Span], length: int) -> int:
        """Return the same for groups of states, all of which need a snapshot."""
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
            page = _covered_to(span.parts[index], page, min(span.end, sink))
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

        No longer than some group has a part of the last page.
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

    # What is found ----------------------------------------------------------------------------------------

    def pieces(self, match: RunMatch) -> list[list[tuple[PartRun, int, int]]]:
        """Return what a sequence begins with after `match`, for each group by page; of copies the oldest."""
        if match.pieces is None:
            match.pieces = self._pieces(match.spans, match.num_pages)
        return match.pieces

    def _pieces(self, spans: list[Span], length: int) -> list[list[tuple[PartRun, int, int]]]:
        pieces: list[list[tuple[PartRun, int, int]]] = []
        for index in range(self.num_groups):
            sink, first = self.needed(index, length * self.page_size)
            found: list[tuple[PartRun, int, int]] = []
            for span in spans:
                if span.start < sink:
                    find(span.parts[index], span.start, min(sink, span.end), found)
                if span.end > first and first < length and span.start < length:
                    find(span.parts[index], max(first, span.start), min(length, span.end), found)
            pieces.append(found)
        return pieces

    def num_shared(self, match: RunMatch, index: int, first_page: int) -> int:
        """Return how many of the parts that a sequence begins with after `match` others hold.

        Only those that a token counts which needs pages from `first_page` on, and those of the sink.
        """
        count, sink = 0, self._sinks[index]
        pieces = self.pieces(match) if match.pieces is None else match.pieces
        for run, start, end in pieces[index]:
            if run.holders and run.place == index:
                count += max(0, min(end, sink) - start) + max(0, end - max(start, sink, first_page))
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
        """Return how many snapshots a sequence begins with after `match` that nothing holds or that come by a load."""
        return sum(not run.holders or run.place != index for run, _, _ in self.pieces(match)[index])

    # Spans ------------------------------------------------------------------------------------------------

    def root(self, salt: str | None) -> Span:
        """Return what is before the first page of a tenant."""
        root = self.roots.get(salt)
        if root is None:
            root = self.roots[salt] = Span(NOTHING, b"", 0, 0, None, 0)
        return root

    def split(self, span: Span, page: int) -> Span:
        """Split `span`, which was looked at, before `page`; return the first part, a new one."""
        parent, content = span.parent, span.content
        assert parent is not None and span.start < page < span.end
        head = Span(content, span.key, span.start, page, parent, self._num_lists)
        parent.children[span.key] = head
        span.key = content.key(page)
        head.children[span.key] = span
        head.is_moving = span.is_moving
        span.parent, span.start = head, page
        for index, runs in enumerate(span.parts):
            for run in tuple(runs):
                if run.end <= page:
                    first = run
                elif run.start < page:
                    first = run.split(page)
                    if first.span is None:
                        continue  # its stream had evicted it
                else:
                    continue
                runs.remove(first)
                first.span = head
                head.parts[index].append(first)
        if not (span.num_users or span.children or any(span.parts)):
            del head.children[span.key]  # what it had was evicted
        return head

    def last_of(self, holding: RunHolding) -> Span:
        """Return the span that has the last full page of `holding`; where it has none, what is before its first."""
        page, last = holding.num_named, holding.last
        if last.start < page or last.parent is None:
            return last
        before = last  # which was split since
        while last.start >= page and last.parent is not None:
            last = last.parent
        last.num_users += 1
        holding.last = last
        before.num_users -= 1
        if not before.num_users:
            before.prune()
        return last

    def extend(self, holding: RunHolding, end: int) -> list[tuple[Span, int, int]]:
        """Let the pages of `holding` up to `end` have spans, made if need be; return these with the pages of each."""
        content, last, page = holding.content, self.last_of(holding), holding.num_named
        holding.num_named = end
        if last.content is content and last.num_users == 1 and not last.children and last.end == page:
            last.end = end
            return [(last, page, end)]
        before = last
        spans: list[tuple[Span, int, int]] = []
        while page < end:
            if page < last.end:
                child = last
                if child.is_moving:
                    self._decodes.look(child)
                common = child.content.common_pages(content, page, min(end, child.end))
            else:
                key = content.key(page)
                of_key = last.children.get(key)
                if of_key is not None and of_key.is_moving:
                    self._decodes.look(of_key)
                    of_key = last.children.get(key)  # nothing may be left of it
                if of_key is None:
                    of_key = last.children[key] = Span(content, key, page, end, last, self._num_lists)
                child = of_key
                common = _common(child, content, min(end, child.end))
            if common < end and common < child.end:
                child = self.split(child, common)
            if common > page:
                spans.append((child, page, common))
            last, page = child, common
        last.num_users += 1
        holding.last = last
        before.num_users -= 1
        if not before.num_users:
            before.prune()
        return spans


def _common(span: Span, content: Content, end: int) -> int:
    """Return up to which page, at most `end`, `span` and `content` are the same; they are in its first page."""
    first = span.start + 1
    if span.content is content or end <= first:
        return end
    return span.content.common_pages(content, first, end)


def _covered_to(runs: list[PartRun], page: int, end: int) -> int:
    """Return the first page from `page` on, at most `end`, that none of `runs` has."""
    is_found = True
    while is_found:
        is_found = False
        for run in runs:
            if run.start <= page < run.end:
                page, is_found = run.end, True
                if page >= end:
                    return end
    return page


def _covered_from(index: int, spans: list[Span], end: int, first: int) -> int:
    """Return the first page from which on a group has all pages up to `end`; `first` or less if it has those."""
    page = end
    for span in reversed(spans):
        if span.start >= page:
            continue
        runs = span.parts[index]
        is_found = True
        while is_found and page > first:
            is_found = False
            for run in runs:
                if run.start < page <= run.end:
                    page, is_found = run.start, True
        if page > span.start or page <= first:
            break
    return page


def _covered_end(index: int, spans: list[Span], length: int) -> int:
    """Return the largest number of pages, at most `length`, the last of which a group has; 0 for none."""
    for span in reversed(spans):
        best = 0
        for run in span.parts[index]:
            if run.start < length and run.end > best:
                best = run.end
        if best:
            return min(best, length)
    return 0


def _last_end(index: int, spans: list[Span], length: int) -> int:
    """Return the largest number of pages, at most `length`, after which a group of states has a snapshot."""
    return max((run.end for span in spans for run in span.parts[index] if run.end <= length), default=0)


def find(runs: list[PartRun], start: int, end: int, found: list[tuple[PartRun, int, int]]) -> None:
    """Add the runs that have pages of [start, end) to `found`, by page; of copies the oldest."""
    if not runs:
        return
    oldest = runs[0]
    if oldest.start <= start and end <= oldest.end:
        found.append((oldest, start, end))
        return
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

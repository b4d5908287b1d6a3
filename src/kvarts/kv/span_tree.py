"""Which parts are found: spans in a tree for each tenant, and how they are split."""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

from kvarts.content import Content
from kvarts.kv.group_memory import GroupMemory
from kvarts.kv.node import NOTHING
from kvarts.kv.spans import PartRing, PartRun, RunMatch, Span

__all__ = ["SpanTree"]


class SpanTree:
    """Owner of all spans. `released`: runs that nothing holds, which are split with their spans."""

    def __init__(self, memory: GroupMemory, page_size: int, released: PartRing) -> None:
        groups = self.groups = memory.groups
        self.page_size = page_size
        self.roots: dict[str | None, Span] = {}
        """What is before the first page of each tenant."""
        self._released = released
        self._is_state = [group.is_state for group in groups]
        self._of_tokens = [index for index, group in enumerate(groups) if not group.is_state]
        self._whole = [index for index, group in enumerate(groups) if group.layer.kind in ("full", "latent")]
        self._less = [index for index, group in enumerate(groups) if index not in self._whole]
        self._chunk_spans = [group.layer.span or 1 for group in groups if group.layer.kind == "chunk"]

    # What groups need -------------------------------------------------------------------------------------

    def needed(self, index: int, num_tokens: int) -> tuple[int, int]:
        """Return (s, f): of the pages of `num_tokens` tokens, later ones need the first s and those from page f on."""
        group = self.groups[index]
        if group.is_state:
            is_page_end = num_tokens and not num_tokens % self.page_size
            return 0, num_tokens // self.page_size - 1 if is_page_end else -(-num_tokens // self.page_size)
        first = group.layer.first_seen(num_tokens) // self.page_size
        return min(-(-group.layer.sink // self.page_size), first), first

    def match(self, content: Content, limit: int) -> RunMatch:
        """Return the longest prefix of `content`, at most `limit` full pages, that every group can go on from."""
        root = span = self.root(content.salt)
        spans: list[Span] = []
        stretches = dict.fromkeys(self._less, 0)
        """For each group that keeps less, the page from which on it has all up to here."""
        heads = dict(stretches)
        """Pages in a row from the first on."""
        longest = num_spans = page = 0
        while page < limit:
            child = span.children.get(content.key(page))
            if child is None:
                break
            if child.is_eaten:
                child = self._whole_part(child)
            end = _common(child, content, min(limit, child.end))
            copies = child.copies
            if not all(copies[index] for index in self._whole):
                break
            spans.append(child)
            for index in self._less:
                if not self._is_state[index] and copies[index]:
                    if stretches[index] == 0:
                        heads[index] = end
                else:
                    stretches[index] = end
            for length in self._candidates(page, end):
                if self._can_go_on(child, length, stretches, heads):
                    longest, num_spans = length, len(spans)
                    break
            if end < child.end:
                break
            span, page = child, end
        return RunMatch(root, spans[:num_spans], longest)

    def _candidates(self, start: int, end: int) -> Iterable[int]:
        """Return lengths in (start, end], longest first, one of which is the longest to go on from, if any is.

        If all of a window is there for a length, it is for the lengths after it, and so for those of one chunk. Where a
        chunk ends nothing of it is needed.
        """
        if not self._chunk_spans:
            return (end,)
        if len(self._chunk_spans) > 1:
            return range(end, start, -1)
        span = self._chunk_spans[0]
        num_pages = span // gcd(span, self.page_size)
        last = end // num_pages * num_pages
        return (end, last) if start < last < end else (end,)

    def _can_go_on(self, span: Span, length: int, stretches: dict[int, int], heads: dict[int, int]) -> bool:
        """Return whether every group can go on after `length` pages, the last of which is one of `span`."""
        of_page = self._of_tokens if length < span.end else range(len(self.groups))
        if not any(span.copies[index] for index in of_page):
            return False
        for index in self._less:
            if self._is_state[index]:
                if length != span.end or not span.copies[index]:
                    return False
                continue
            sink, first = self.needed(index, length * self.page_size)
            # Where `span` has no parts of a group, the stretch begins after it.
            if first < length and stretches[index] > first:
                return False
            if heads[index] < sink:
                return False
        return True

    def num_shared(self, match: RunMatch, index: int, first_page: int) -> int:
        """Return how many of the parts that a sequence begins with after `match` others hold.

        Only those that a token counts which needs pages from `first_page` on, and those of the sink.
        """
        length = match.num_pages
        sink, first = self.needed(index, length * self.page_size)
        all_sink = -(-self.groups[index].layer.sink // self.page_size)
        count = 0
        for span in match.spans:
            copies = span.copies[index]
            if not copies or not copies[0].holders:
                continue
            start, end = span.start, min(span.end, length)
            count += max(0, min(end, sink) - start)
            start = max(start, first)
            if start < end:
                count += max(0, min(end, all_sink) - start)
                count += max(0, end - max(start, first_page, min(end, all_sink)))
        return count

    def num_idle(self, match: RunMatch, index: int) -> int:
        """Return how many snapshots of a group of states a sequence begins with after `match` that nothing holds."""
        return int(bool(match.spans) and not match.spans[-1].copies[index][0].holders)

    # Spans ------------------------------------------------------------------------------------------------

    def root(self, salt: str | None) -> Span:
        """Return what is before the first page of a tenant."""
        root = self.roots.get(salt)
        if root is None:
            root = self.roots[salt] = Span(NOTHING, b"", 0, 0, None, 0)
        return root

    def split(self, span: Span, page: int) -> Span:
        """Split `span` before `page`; return the first part, a new one. The rest keeps its identity, and snapshots."""
        parent, content = span.parent, span.content
        assert parent is not None and span.start < page < span.end
        head = Span(content, span.key, span.start, page, parent, len(self.groups))
        parent.children[span.key] = head
        span.key = content.key(page)
        head.children[span.key] = span
        span.parent, span.start = head, page
        head.is_eaten = span.is_eaten
        for index in self._of_tokens:
            runs = span.copies[index]
            if not runs:
                continue
            for run in runs:
                if run.end <= page:
                    run.span = head
                    head.copies[index].append(run)
                    continue
                first = PartRun(index, head, run.holders.copy(), is_kept=run.is_kept)
                head.copies[index].append(first)
                for holder in run.holders:
                    held = holder.held[index]
                    held.insert(held.index(run), first)
                if run.newer is not None:
                    self._released.put_after(run, first)
            if span.is_eaten:
                span.copies[index] = [run for run in runs if run.span is span]
        if span.is_eaten:
            span.prune()  # nothing may be left of it
        return head

    def _whole_part(self, span: Span) -> Span:
        """Split `span`, of which runs were eaten, where the first of them ends; return the first part.

        The rest is split where it is looked at.
        """
        ends = {run.end for index in self._of_tokens for run in span.copies[index]}
        first = min(ends, default=span.end)
        if first < span.end:
            head = self.split(span, first)
            span.is_eaten = len(ends) > 2 or (len(ends) == 2 and span.end not in ends)
            span = head
        span.is_eaten = False
        return span

    def after(self, span: Span, content: Content, start: int, end: int) -> Span:
        """Return a span of pages from `start` on, after `span`, that ends at `end` or before; made if need be."""
        key = content.key(start)
        child = span.children.get(key)
        if child is None:
            child = span.children[key] = Span(content, key, start, end, span, len(self.groups))
            return child
        common = _common(child, content, min(end, child.end))
        return child if common == child.end else self.split(child, common)

    def cut(self, last: Span, page: int) -> None:
        """Let a span that `last` is or follows begin with `page`, if one has it."""
        span = last
        while span.start > page and span.parent is not None:
            span = span.parent
        if span.start < page < span.end:
            self.split(span, page)


def _common(span: Span, content: Content, end: int) -> int:
    """Return up to which page, at most `end`, `span` and `content` are the same; they are in its first page."""
    common = span.content.common_pages(content, span.start + 1, end) if span.start + 1 < end else end
    return max(common, span.start + 1)

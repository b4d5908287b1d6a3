"""Events of a cache with KV groups: runs of pages of one group that became findable, were evicted or were released."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from kvarts.content import Content
from kvarts.event_log import Tell
from kvarts.events import CopiesRemoved, PagesRemoved, PagesStored, PartsGivenBack

if TYPE_CHECKING:
    from kvarts.kv.spans import PartRun, Span

__all__ = ["RunEvents"]


class RunEvents:
    """Emits the events of a RunCache. Consecutive runs are one event, emitted by `told`.

    `medium`: the tier; `offset`: the index of that tier's first group among the lists of a span.
    """

    def __init__(self, tell: Tell, *, medium: str = "device", offset: int = 0) -> None:
        self._tell = tell
        self._medium = medium
        self._offset = offset
        self._came: list[list[tuple[int, int, Content | None]]] = []
        """By group, runs that became findable: pages, and the content before the first of them."""
        self._by: Content | None = None
        """The content with which they became findable."""
        # The last evicted pages, and the fields that they have in common with those before them.
        self._span: Span | None = None
        self._content: Content | None = None
        self._start = 0
        self._end = 0
        self._group = 0
        self._copy: int | None = None
        self._is_dropped = False

    def came(self, content: Content, group: int, span: Span, start: int, end: int) -> None:
        """Record that pages [start, end) of `span`, which `content` has, become findable in a group.

        Pages that have a resident copy are left out. The pages of a group must be recorded in their order.
        """
        while len(self._came) <= group:
            self._came.append([])
        self._by = content
        runs = self._came[group]
        for first, stop in _uncovered(span.parts[self._offset + group], start, end):
            if runs and runs[-1][1] == first:
                runs[-1] = (runs[-1][0], stop, runs[-1][2])
            else:
                runs.append((first, stop, _content_before(span, first)))

    def goes(self, run: PartRun, start: int, end: int, *, is_dropped: bool) -> None:
        """Record that pages [start, end) of `run`, which is still findable, are evicted, the last one first."""
        span, group = run.span, run.group
        assert span is not None
        siblings = span.parts[self._offset + group]
        # The pages between two cuts have the same copies.
        cuts: set[int] | None = None
        for other in siblings:
            if other is not run and other.start < end and start < other.end:
                cuts = cuts or {start, end}
                cuts.update((max(start, other.start), min(end, other.end)))
        if cuts is None:
            self._gone(span, group, start, end, None, is_dropped=is_dropped)
            return
        stops = sorted(cuts, reverse=True)
        for stop, first in pairwise(stops):
            copies = [other for other in siblings if other.start <= first and stop <= other.end]
            copy = None if len(copies) == 1 else copies.index(run)
            self._gone(span, group, first, stop, copy, is_dropped=is_dropped)

    def given_back(self, content: Content, group: int, start: int, end: int) -> None:
        """Emit the release of pages [start, end) by a running request."""
        self._tell(PartsGivenBack(content, start, end, group))

    def told(self) -> None:
        """Emit the events recorded since the last call, before anything else is emitted."""
        if self._span is not None:
            self._tell_gone()
        if self._by is None:
            return
        by, self._by = self._by, None
        for group, runs in enumerate(self._came):
            for start, end, before in runs:
                self._tell(PagesStored(by, start, end, before, self._medium, group))
            runs.clear()

    def _gone(self, span: Span, group: int, start: int, end: int, copy: int | None, *, is_dropped: bool) -> None:
        last = self._span
        follows = (
            last is not None and self._start == end and (last is span or (last.parent is span and last.start == end))
        )
        if not follows or (group, copy, is_dropped) != (self._group, self._copy, self._is_dropped):
            if last is not None:
                self._tell_gone()
            self._content, self._end = span.content, end
            self._group, self._copy, self._is_dropped = group, copy, is_dropped
        self._span, self._start = span, start

    def _tell_gone(self) -> None:
        assert self._content is not None
        run = self._content, self._start, self._end
        self._span = None
        if self._copy is None:
            self._tell(PagesRemoved(*run, self._medium, group=self._group, is_dropped=self._is_dropped))
        else:
            self._tell(CopiesRemoved(*run, self._copy, self._group, self._is_dropped))


def _content_before(span: Span, page: int) -> Content | None:
    """Return a content that has the page before `page` of `span`; None at the root."""
    if page > span.start:
        return span.content
    parent = span.parent
    return None if parent is None or parent.parent is None else parent.content


def _uncovered(runs: list[PartRun], start: int, end: int) -> list[tuple[int, int]]:
    """Return the pages of [start, end) that none of `runs` has, as runs in order."""
    if not runs:
        return [(start, end)]
    left = [(start, end)]
    for run in runs:
        parts: list[tuple[int, int]] = []
        for first, stop in left:
            if run.end <= first or stop <= run.start:
                parts.append((first, stop))
                continue
            if first < run.start:
                parts.append((first, run.start))
            if run.end < stop:
                parts.append((run.end, stop))
        left = parts
    return left

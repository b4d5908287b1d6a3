"""What a cache with KV groups tells of its parts: runs of pages of one group that came, went, or were given back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from kvarts.core.content import Content
from kvarts.core.event_log import Emit
from kvarts.core.events import CopiesRemoved, PagesRemoved, PagesStored, PartsGivenBack

from oracles.parts import PageName, Part

__all__ = ["PartEvents", "reach"]


class PartEvents:
    """Tells events for a GroupedCache. Parts that come or go one after the other, as pages do, are one event."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._came: dict[int, list[PageName]] = {}
        """By group, the pages of the parts that came."""
        self._by: Content | None = None
        """What they came with."""
        self._last: PageName | None = None
        """The page of the last part that went, and what is to be told of it and of those that went before it."""
        self._content: Content | None = None
        self._end_page = 0
        self._group = 0
        self._copy: int | None = None
        self._is_dropped = False

    def comes(self, content: Content, group: int, name: PageName) -> None:
        """Take note that a part of the page `name` of `content` becomes findable, unless another is. See `told`."""
        if not name.copies[group]:
            self._came.setdefault(group, []).append(name)
            self._by = content

    def goes(self, part: Part, *, is_dropped: bool) -> None:
        """Take note of a part that is still among the copies of its page and goes now. See `told`."""
        name, group = part.name, part.group
        assert name is not None
        copies = name.copies[group]
        copy = None if len(copies) == 1 else copies.index(part)
        follows = self._last is not None and self._last.parent is name
        if not follows or (group, copy, is_dropped) != (self._group, self._copy, self._is_dropped):
            self._emit_gone()
            self._content, self._end_page = name.content, name.page + 1
            self._group, self._copy, self._is_dropped = group, copy, is_dropped
        self._last = name

    def told(self) -> None:
        """Emit the events of parts that came or went since the last call, before any other event."""
        self._emit_gone()
        if self._by is None:
            return
        for group, names in sorted(self._came.items()):
            start = 0
            for index in range(1, len(names) + 1):
                if index == len(names) or names[index].parent is not names[index - 1]:
                    parent = names[start].parent
                    assert parent is not None
                    pages = names[start].page, names[index - 1].page + 1
                    self._emit(PagesStored(self._by, *pages, parent.content, group=group))
                    start = index
        self._came = {}
        self._by = None

    def given_back(self, content: Content, group: int, pages: Sequence[int]) -> None:
        """Emit the event that a running request releases its parts of pages, in their order."""
        end = len(pages)
        for index in range(end - 1, -1, -1):
            if not index or pages[index - 1] != pages[index] - 1:
                self._emit(PartsGivenBack(content, pages[index], pages[end - 1] + 1, group))
                end = index

    def _emit_gone(self) -> None:
        if self._last is None:
            return
        assert self._content is not None
        run = self._content, self._last.page, self._end_page
        self._last = None
        if self._copy is None:
            self._emit(PagesRemoved(*run, group=self._group, is_dropped=self._is_dropped))
        else:
            self._emit(CopiesRemoved(*run, self._copy, self._group, self._is_dropped))


def reach(
    names: Sequence[PageName], needs: Sequence[Callable[[int], tuple[int, int]]], page_size: int
) -> tuple[int, ...]:
    """Return for each group from how many of the pages `names` it could go on by itself.

    As far as any group has a part of a page. `needs`: of each group, of how many tokens it needs which pages: the first
    so many, and those from a page on.
    """
    num_pages = len(names)
    while num_pages and not any(names[num_pages - 1].copies):
        num_pages -= 1
    longest: list[int] = []
    for group, needed in enumerate(needs):
        missing = [0, *accumulate(not name.copies[group] for name in names)]
        length = num_pages
        while length:
            sink, first = needed(length * page_size)
            if not missing[sink] and missing[length] == missing[first]:
                break
            length -= 1
        longest.append(length)
    return tuple(longest)

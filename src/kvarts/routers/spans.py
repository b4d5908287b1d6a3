"""A tree of what several workers have of many prompts: runs of pages, and per run and worker a number.

A span is a run of pages that no prompt in the tree leaves half-way. What is known of a worker is in the span, so a
lookup walks one path however many workers there are. The tree knows no worker's memory: what is written here was told,
and may be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvarts.content import Content, PageKey

__all__ = ["Span", "SpanTree"]

NOTHING = Content(b"", num_tokens=0, page_size=1, owner=-1)


class Span:
    """Pages [start, end) of `content`, counted from the first token.

    `counts`: by kind of count, a number per worker; a worker of which nothing is known is not in it.
    """

    __slots__ = ("children", "content", "counts", "end", "key", "parent", "start")

    def __init__(
        self,
        content: Content,
        key: PageKey,
        start: int,
        end: int,
        parent: Span | None,
        counts: tuple[dict[int, int], ...],
    ) -> None:
        self.content = content
        self.key = key
        self.start = start
        self.end = end
        self.parent = parent
        self.counts = counts
        self.children: dict[PageKey, Span] = {}


class SpanTree:
    """Owner of the spans. Tenants share nothing: each salt has a root. `num_kinds`: kinds of counts."""

    def __init__(self, num_kinds: int = 1) -> None:
        self._num_kinds = num_kinds
        self._roots: dict[str | None, Span] = {}
        self.num_spans = 0

    def path(self, content: Content, limit: int) -> list[tuple[Span, int]]:
        """Return the spans along the first `limit` pages of `content`, each with where the two part or end."""
        found: list[tuple[Span, int]] = []
        node = self._roots.get(content.salt)
        position = 0
        while node is not None and position < limit and node.children:
            child = node.children.get(content.key(position))
            if child is None:
                break
            position = content.common_pages(child.content, position, min(child.end, limit))
            found.append((child, position))
            if position < child.end:
                break
            node = child
        return found

    def cover(self, content: Content, start: int, end: int) -> list[Span]:
        """Return the spans of pages [start, end) of `content`, made or split so that they are exactly these.

        Pages before `start` that the tree does not have are made as well, with nothing known of them.
        """
        if end <= start:
            return []
        node = self._roots.get(content.salt)
        if node is None:
            node = self._roots[content.salt] = self._new(NOTHING, b"", 0, 0, None)
        found: list[Span] = []
        position = 0
        while position < end:
            child = node.children.get(content.key(position))
            if child is None:
                stop = start if position < start else end
                child = self._new(content, content.key(position), position, stop, node)
                node.children[child.key] = child
            else:
                cut = content.common_pages(child.content, position, min(child.end, end))
                if child.start < start < cut:
                    cut = start
                if cut < child.end:
                    child = self.split(child, cut)
            node = child
            position = node.end
            if node.start >= start:
                found.append(node)
        return found

    def split(self, span: Span, page: int) -> Span:
        """Split `span` before `page`; return the head, which is new. The tail keeps its identity.

        It is dropped if nothing is known of it and nothing follows.
        """
        parent = span.parent
        assert parent is not None and span.start < page < span.end
        head = self._new(span.content, span.key, span.start, page, parent)
        parent.children[span.key] = head
        span.start, span.parent, span.key = page, head, span.content.key(page)
        head.children[span.key] = span
        self.divide(head, span)
        if not any(span.counts):
            self.prune(span)
        return head

    def divide(self, head: Span, tail: Span) -> None:
        """Give `head`, just split off, its part of the counts of `tail`."""
        raise NotImplementedError

    def prune(self, span: Span) -> None:
        """Drop `span`, and what comes before it, as far as nothing is known and nothing follows."""
        node = span
        while node.parent is not None and not node.children and not any(node.counts):
            parent = node.parent
            if parent.children.get(node.key) is not node:
                return  # it is gone already
            del parent.children[node.key]
            self.num_spans -= 1
            node = parent

    def spans(self) -> Iterator[Span]:
        """Return all spans, each after what comes before it."""
        waiting = [child for root in self._roots.values() for child in root.children.values()]
        while waiting:
            span = waiting.pop()
            yield span
            waiting += span.children.values()

    def _new(self, content: Content, key: PageKey, start: int, end: int, parent: Span | None) -> Span:
        self.num_spans += parent is not None
        return Span(content, key, start, end, parent, tuple({} for _ in range(self._num_kinds)))

"""A tree of the prompts that several workers have: runs of pages, with a number per run and worker.

A span is an unbranched run of pages: no prompt in the tree leaves it half-way. The data of each worker are stored
in the span, so a lookup walks one path regardless of the number of workers. The tree does not see the workers' memory:
its contents are reports, and may be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvarts.content import Content, PageKey

__all__ = ["IndexSpan", "IndexTree"]

NOTHING = Content(b"", num_tokens=0, page_size=1, owner=-1)


class IndexSpan:
    """Pages [start, end) of `content`, counted from the first token.

    `counts`: by kind of count, a number per worker; a worker without data is absent.
    """

    __slots__ = ("children", "content", "counts", "end", "key", "parent", "start")

    def __init__(
        self,
        content: Content,
        key: PageKey,
        start: int,
        end: int,
        parent: IndexSpan | None,
        counts: tuple[dict[int, int], ...],
    ) -> None:
        self.content = content
        self.key = key
        self.start = start
        self.end = end
        self.parent = parent
        self.counts = counts
        self.children: dict[PageKey, IndexSpan] = {}


class IndexTree:
    """Owner of the spans. Tenants share nothing: each salt has a root. `num_kinds`: number of kinds of counts."""

    def __init__(self, num_kinds: int = 1) -> None:
        self._num_kinds = num_kinds
        self._roots: dict[str | None, IndexSpan] = {}
        self.num_spans = 0

    def path(self, content: Content, limit: int) -> list[tuple[IndexSpan, int]]:
        """Return the spans along the first `limit` pages of `content`, each with the page where they part or end."""
        found: list[tuple[IndexSpan, int]] = []
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

    def cover(self, content: Content, start: int, end: int) -> list[IndexSpan]:
        """Return the spans of pages [start, end) of `content`, created or split so that they match exactly.

        Missing pages before `start` are also created, without data.
        """
        if end <= start:
            return []
        node = self._roots.get(content.salt)
        if node is None:
            node = self._roots[content.salt] = self._new(NOTHING, b"", 0, 0, None)
        found: list[IndexSpan] = []
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

    def split(self, span: IndexSpan, page: int) -> IndexSpan:
        """Split `span` before `page`; return the head, which is new. The tail keeps its identity.

        The tail is dropped if it has neither data nor successors.
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

    def divide(self, head: IndexSpan, tail: IndexSpan) -> None:
        """Give `head`, just split off, its part of the counts of `tail`."""
        raise NotImplementedError

    def prune(self, span: IndexSpan) -> None:
        """Drop `span`, and the spans before it, as far as they have neither data nor successors."""
        node = span
        while node.parent is not None and not node.children and not any(node.counts):
            parent = node.parent
            if parent.children.get(node.key) is not node:
                return  # it was dropped already
            del parent.children[node.key]
            self.num_spans -= 1
            node = parent

    def spans(self) -> Iterator[IndexSpan]:
        """Return all spans, each after the one before it."""
        waiting = [child for root in self._roots.values() for child in root.children.values()]
        while waiting:
            span = waiting.pop()
            yield span
            waiting += span.children.values()

    def _new(self, content: Content, key: PageKey, start: int, end: int, parent: IndexSpan | None) -> IndexSpan:
        self.num_spans += parent is not None
        return IndexSpan(content, key, start, end, parent, tuple({} for _ in range(self._num_kinds)))

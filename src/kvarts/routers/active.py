"""Blocks in use by the requests placed on each worker, each distinct block counted once per worker."""

from __future__ import annotations

from kvarts.content import Content
from kvarts.routers.spans import IndexSpan, IndexTree

__all__ = ["ActiveBlocks"]


class ActiveBlocks(IndexTree):
    """Full blocks of prompts in flight, per worker. A span's count is the number of requests that use it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_blocks: dict[int, int] = {}
        """Distinct blocks in use per worker."""

    def shared(self, content: Content, limit: int) -> dict[int, int]:
        """Return, per worker, how many of the first `limit` blocks of `content` are already in use there."""
        found: dict[int, int] = {}
        for span, reached in reversed(self.path(content, limit)):
            for worker in span.counts[0]:
                if worker not in found:
                    found[worker] = reached
        return found

    def add(self, worker: int, content: Content, num_blocks: int) -> None:
        """Count a request of `num_blocks` blocks."""
        added = 0
        for span in self.cover(content, 0, num_blocks):
            uses = span.counts[0]
            if worker not in uses:
                added += span.end - span.start
            uses[worker] = uses.get(worker, 0) + 1
        self.num_blocks[worker] = self.num_blocks.get(worker, 0) + added

    def remove(self, worker: int, content: Content, num_blocks: int) -> None:
        """Undo `add` for a request."""
        removed = 0
        deepest: IndexSpan | None = None
        for span, _ in self.path(content, num_blocks):
            uses = span.counts[0]
            deepest = span
            if uses[worker] > 1:
                uses[worker] -= 1
            else:
                del uses[worker]
                removed += span.end - span.start
        self.num_blocks[worker] -= removed
        if deepest is not None:
            self.prune(deepest)

    def divide(self, head: IndexSpan, tail: IndexSpan) -> None:
        """Copy the counts: the same requests use both halves."""
        head.counts[0].update(tail.counts[0])

"""Prefix index built from placements: the router assumes for a while that a worker caches the prompts sent to it."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import msgspec

from kvarts.content import Content
from kvarts.routers.spans import IndexSpan, IndexTree

__all__ = ["ActiveBlocks", "IndexRule", "PlacementIndex"]

MOST_STALE = 64
"""Outdated entries allowed in an order of recency, in addition to as many as there are valid ones."""
STAMP_BITS = 40


class IndexRule(msgspec.Struct, frozen=True, kw_only=True):
    """Eviction rule of a placement index.

    `block_tokens`: tokens per block; None for the engine's page size. `most_tokens`: only that many first tokens of a
    prompt are indexed; None for all. `most_blocks`: limit per worker; None for unbounded. `every_ns`: time between
    evictions; 0 enforces the limit at all times. `ttl_ns`: a block not placed for that long is forgotten; None for
    never.
    """

    block_tokens: int | None = None
    most_tokens: int | None = None
    most_blocks: int | None = None
    every_ns: int = 0
    ttl_ns: int | None = None


class PlacementIndex(IndexTree):
    """Blocks by worker, as far as placements imply them. Owner of their order of recency, one per worker.

    A placement makes all blocks of its prompt the most recent. The least recent block is evicted first, and of blocks
    placed together the deepest, so that the rest of a prompt is always a prefix of it.
    """

    def __init__(self, rule: IndexRule, page_size: int) -> None:
        super().__init__(2)
        self.rule = rule
        self.block_tokens = rule.block_tokens or page_size
        self._num_placed = 0
        self._orders: dict[int, list[tuple[int, int, int, IndexSpan]]] = {}
        """Heap per worker of (stamp, -first block, number, span), including outdated entries.

        A stamp combines the time and the number of a placement in one integer.
        """
        self._num_entries = 0
        self._num_at_sweep: dict[int, int] = {}
        """Length of an order at which its outdated entries are next dropped."""
        self._forgets = rule.most_blocks is not None or rule.ttl_ns is not None
        self.num_blocks: dict[int, int] = {}
        self._next_eviction_ns = rule.every_ns

    def read(self, content: Content, num_tokens: int) -> tuple[Content, int]:
        """Return `content` in blocks of this index, and the number of whole blocks of `num_tokens` that are indexed."""
        most = self.rule.most_tokens
        if most is not None and num_tokens > most:
            num_tokens = most
        if content.page_size != self.block_tokens:
            units = content.units if isinstance(content.units, bytes) else bytes(content.units)
            content = Content(
                units,
                num_tokens=content.num_known_tokens,
                page_size=self.block_tokens,
                unit_tokens=content.unit_tokens,
                owner=content.owner,
                salt=content.salt,
            )
        return content, min(num_tokens // self.block_tokens, content.num_known_pages)

    def matches(self, content: Content, num_blocks: int, now_ns: int) -> dict[int, int]:
        """Return the length in blocks of the longest matching prefix, per worker with a match.

        `content` is as returned by `read`.
        """
        self._expire(now_ns)
        found: dict[int, int] = {}
        for span, reached in reversed(self.path(content, num_blocks)):
            for worker, end in span.counts[0].items():
                if worker not in found:
                    found[worker] = min(end, reached)
        return found

    def place(self, worker: int, content: Content, num_blocks: int, now_ns: int) -> None:
        """Record that a prompt was sent to `worker`."""
        self._num_placed += 1
        stamp = now_ns << STAMP_BITS | self._num_placed
        added = 0
        for span in self.cover(content, 0, num_blocks):
            ends, stamps = span.counts
            added += span.end - ends.get(worker, span.start)
            ends[worker] = span.end
            stamps[worker] = stamp
            self._enter(worker, span, stamp)
        self.num_blocks[worker] = self.num_blocks.get(worker, 0) + added
        rule = self.rule
        if rule.most_blocks is None:
            return
        if not rule.every_ns:
            self._shrink(worker, rule.most_blocks)
        elif now_ns >= self._next_eviction_ns:
            self._next_eviction_ns = now_ns - now_ns % rule.every_ns + rule.every_ns
            for each in sorted(self.num_blocks):
                self._shrink(each, rule.most_blocks)

    def forget(self, worker: int) -> None:
        """Forget everything about a worker that has left."""
        for span in list(self.spans()):
            for counts in span.counts:
                counts.pop(worker, None)
            self.prune(span)
        self._orders.pop(worker, None)
        self.num_blocks.pop(worker, None)

    def divide(self, head: IndexSpan, tail: IndexSpan) -> None:
        """Divide the counts at the first block of `tail`; both halves keep their place in the order."""
        cut = tail.start
        ends, stamps = head.counts
        for worker, end in list(tail.counts[0].items()):
            stamp = stamps[worker] = tail.counts[1][worker]
            ends[worker] = min(end, cut)
            self._enter(worker, head, stamp)
            if end <= cut:
                del tail.counts[0][worker], tail.counts[1][worker]
            else:
                self._enter(worker, tail, stamp)

    # Inside -----------------------------------------------------------------------------------------------

    def _enter(self, worker: int, span: IndexSpan, stamp: int) -> None:
        if not self._forgets:
            return
        self._num_entries += 1
        order = self._orders.setdefault(worker, [])
        heappush(order, (stamp, -span.start, self._num_entries, span))
        if len(order) > self._num_at_sweep.get(worker, MOST_STALE):
            order[:] = [entry for entry in order if _is_live(entry, worker)]
            heapify(order)
            self._num_at_sweep[worker] = 2 * len(order) + MOST_STALE

    def _oldest(self, worker: int) -> tuple[int, int, int, IndexSpan] | None:
        """Return the entry of the next run to evict; None if the worker is empty."""
        order = self._orders.get(worker)
        while order:
            if _is_live(order[0], worker):
                return order[0]
            heappop(order)
        return None

    def _shrink(self, worker: int, most_blocks: int) -> None:
        while (excess := self.num_blocks[worker] - most_blocks) > 0:
            entry = self._oldest(worker)
            assert entry is not None
            self._drop(worker, entry[3], excess)

    def _expire(self, now_ns: int) -> None:
        ttl_ns = self.rule.ttl_ns
        if ttl_ns is None:
            return
        for worker in self._orders:
            while (entry := self._oldest(worker)) is not None and (entry[0] >> STAMP_BITS) + ttl_ns <= now_ns:
                self._drop(worker, entry[3], entry[3].end - entry[3].start)

    def _drop(self, worker: int, span: IndexSpan, most: int) -> None:
        """Forget up to `most` blocks from the end of `span`."""
        ends, stamps = span.counts
        end = max(span.start, ends[worker] - most)
        self.num_blocks[worker] -= ends[worker] - end
        if end > span.start:
            ends[worker] = end
        else:
            del ends[worker], stamps[worker]
            self.prune(span)


def _is_live(entry: tuple[int, int, int, IndexSpan], worker: int) -> bool:
    """Return whether an entry of the order of recency still has the last placement time of its run."""
    stamp, start, _, span = entry
    return span.counts[1].get(worker) == stamp and span.start == -start


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

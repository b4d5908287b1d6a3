"""Directories of routers: indices of what workers cache, built from placements or from cache events.

Built from placements, an index assumes for a while that a worker caches the prompts sent to it. Both are a tree of the
prompts that several workers have. A span is an unbranched run of pages: no prompt in the tree leaves it half-way. The
data of each worker are stored in the span, so a lookup walks one path regardless of the number of workers. The tree
does not see the workers' memory: its contents are reports, and may be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import cast

import msgspec

from kvarts.core.content import Content, PageKey
from kvarts.core.event_log import EventLog
from kvarts.core.events import (
    Event,
    LeapDone,
    PagesRemoved,
    PagesStored,
    StepDone,
    StepEnded,
    StepStarted,
    TransferEnded,
)
from kvarts.core.kv.groups import GroupMemory
from kvarts.core.kv.runs import PartRun, Span, first_list
from kvarts.core.kv.span_tree import SpanTree
from kvarts.core.kv.transfer import Offer, PeersGain

__all__ = [
    "ActiveBlocks",
    "CacheFeed",
    "EventIndex",
    "IndexRule",
    "IndexSpan",
    "IndexTree",
    "PartIndex",
    "PlacementIndex",
]

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


Changed = PagesStored | PagesRemoved


class EventIndex(IndexTree):
    """Pages by worker and tier, according to events. `tiers`: names of the tiers, the fastest first.

    Other tiers are ignored, such as a store that all workers share: it is no reason to choose one of them.

    A worker has the first pages of a span in a tier; the count is their end. Events obey the invariant of caches that a
    page is never without the page before it in the same or a faster tier.
    """

    def __init__(self, tiers: Sequence[str] = ("device",)) -> None:
        super().__init__(len(tiers))
        self._kinds = {name: kind for kind, name in enumerate(tiers)}
        self.num_tiers = len(tiers)

    def store(self, worker: int, content: Content, start: int, end: int, tier: str, group: int | None = None) -> None:
        """Record that pages [start, end) of `content` can be found on `worker`. `group`: None, as pages are whole."""
        kind = self._kinds.get(tier)
        if kind is None:
            return
        if start:
            path = self.path(content, start)
            if path:
                last, reached = path[-1]
                if reached == start == last.end and not last.children and last.counts[kind].get(worker) == start:
                    # Without successors, the span can grow; the counts of other workers still end where they did.
                    last.content, last.end = content, end
                    last.counts[kind][worker] = end
                    return
        for span in self.cover(content, start, end):
            span.counts[kind][worker] = span.end

    def remove(self, worker: int, content: Content, start: int, end: int, tier: str, group: int | None = None) -> None:
        """Record that pages [start, end) of `content` can no longer be found on `worker`."""
        kind = self._kinds.get(tier)
        if kind is None:
            return
        path = self.path(content, end)
        for span, reached in reversed(path):
            if reached <= start:
                break
            counts = span.counts[kind]
            last = counts.get(worker)
            if last is None:
                continue
            if last > reached:
                # Later pages stay: they are in a tier below, and a faster tier has those before them.
                self.split(span, reached)
                self._cut(span.parent, kind, worker, start)
            else:
                self._cut(span, kind, worker, start)

    def forget(self, worker: int) -> None:
        """Forget everything about a worker that has left."""
        for span in list(self.spans()):
            for counts in span.counts:
                counts.pop(worker, None)
            self.prune(span)

    def divide(self, head: IndexSpan, tail: IndexSpan) -> None:
        """Divide the counts at the first page of `tail`."""
        cut = tail.start
        for ends, last in zip(head.counts, tail.counts, strict=True):
            for worker, end in list(last.items()):
                ends[worker] = min(end, cut)
                if end <= cut:
                    del last[worker]

    def matches(self, content: Content, limit: int) -> dict[int, tuple[int, ...]]:
        """Return, per worker with a match, the pages of the longest prefix that it can resume from, by tier.

        A page counts for the fastest tier that has it.
        """
        path = self.path(content, limit)
        found: dict[int, tuple[int, ...]] = {}
        if not path:
            return found
        if self.num_tiers == 1:
            # Deepest first: a worker with pages in a span has all spans before it.
            for span, reached in reversed(path):
                for worker, end in span.counts[0].items():
                    if worker not in found:
                        found[worker] = (min(end, reached),)
            return found
        workers = {worker for counts in path[0][0].counts for worker in counts}
        for worker in sorted(workers):
            found[worker] = self._match(worker, path)
        return found

    def saved_elsewhere(
        self, content: Content, starts: Sequence[int], limit: int, num_tokens: int, gain: PeersGain
    ) -> list[float]:
        """Return, per worker, how many pages it saves that reads what it lacks of `limit` pages from another one."""
        runs = self.elsewhere(content, sorted(set(starts)), limit, gain.tier)
        saved = {
            start: gain.saved_pages(start, num_pages, num_tokens) if num_pages else 0.0
            for start, num_pages in runs.items()
        }
        return [saved[start] for start in starts]

    def elsewhere(self, content: Content, starts: Iterable[int], limit: int, tier: str) -> dict[int, int]:
        """Return, for each of `starts`, the most consecutive pages from there on that any worker has in `tier`.

        Of the first `limit` pages of `content`.
        """
        path, kind = self.path(content, limit), self._kinds[tier]
        runs: dict[int, int] = {}
        for start in starts:
            ends: dict[int, int] = {}
            """The end of the run of each worker that has had all pages so far."""
            position = start
            for span, reached in path:
                if reached <= start:
                    continue
                is_first = span.start <= start
                if not is_first and not ends:
                    break
                counts = span.counts[kind]
                ends = {
                    worker: min(count, reached)
                    for worker, count in counts.items()
                    if count > start and (is_first or ends.get(worker) == span.start)
                }
                position = max([position, *ends.values()])
            runs[start] = position - start
        return runs

    def _match(self, worker: int, path: Sequence[tuple[IndexSpan, int]]) -> tuple[int, ...]:
        pages = [0] * self.num_tiers
        position = 0
        for span, reached in path:
            for kind, counts in enumerate(span.counts):
                end = min(counts.get(worker, 0), reached)
                if end > position:
                    pages[kind] += end - position
                    position = end
            if position < reached:
                break
        return tuple(pages)

    def _cut(self, span: IndexSpan | None, kind: int, worker: int, start: int) -> None:
        assert span is not None
        if start > span.start:
            span.counts[kind][worker] = start
        else:
            del span.counts[kind][worker]
            if not any(span.counts):
                self.prune(span)


class PartIndex:
    """Parts of pages in the KV groups of `memory`, by worker and tier, according to events. `tiers`: as of EventIndex.

    Each worker has a tree like that of its cache, with the runs that its events have reported. The prefix from which
    every group can resume follows from the rules of the cache itself.
    """

    def __init__(self, memory: GroupMemory, page_size: int, tiers: Sequence[str] = ("device",)) -> None:
        self._memory = memory
        self._page_size = page_size
        self._num_groups = len(memory.groups)
        self._first_lists = {
            name: first_list(place - 1, self._num_groups) if place else 0 for place, name in enumerate(tiers)
        }
        self.num_tiers = len(tiers)
        self._trees: dict[int, SpanTree] = {}

    def store(self, worker: int, content: Content, start: int, end: int, tier: str, group: int | None = None) -> None:
        """Record that the parts of pages [start, end) of `content` in a group can be found on `worker`."""
        first = self._first_lists.get(tier)
        if first is None or group is None:
            return
        tree = self._trees.get(worker)
        if tree is None:
            tree = self._trees[worker] = self._open_tree()
        before, known = tree.walk(content, start)
        if before and before[-1].end == start == known and not before[-1].children:
            before[-1].content, before[-1].end = content, end  # without successors, the span can grow
        with tree.spans_of(content, end) as spans:
            pages = tree.block_pages[group]
            for span, page, span_end in spans:  # a block is in the span of its last page
                begin, stop = max(page, start), span_end - span_end % pages
                if stop > begin:
                    self._add(span, first + group, group, begin - begin % pages, stop, worker)

    def remove(self, worker: int, content: Content, start: int, end: int, tier: str, group: int | None = None) -> None:
        """Record that the parts of pages [start, end) of `content` in a group can no longer be found on `worker`."""
        first, tree = self._first_lists.get(tier), self._trees.get(worker)
        if first is None or group is None or tree is None:
            return
        spans, known = tree.walk(content, end)
        for span in reversed(spans):
            for run in tuple(span.parts[first + group]):
                begin, stop = max(start, run.start), min(known, run.end)
                if begin < stop:
                    run.cut(begin, stop).forget()

    def forget(self, worker: int) -> None:
        """Forget everything about a worker that has left."""
        self._trees.pop(worker, None)

    def matches(self, content: Content, limit: int) -> dict[int, tuple[int, ...]]:
        """Return, per worker with a match, the pages of the longest prefix that it can resume from, by tier.

        A tier adds the pages that every group can resume from with its parts and those of the faster tiers.
        """
        found: dict[int, tuple[int, ...]] = {}
        for worker, tree in sorted(self._trees.items()):
            pages, position = [], 0
            for depth in range(self.num_tiers):
                end = max(position, tree.match(content, limit, depth=depth).num_pages)
                pages.append(end - position)
                position = end
            if position:
                found[worker] = tuple(pages)
        return found

    def saved_elsewhere(
        self, content: Content, starts: Sequence[int], limit: int, num_tokens: int, gain: PeersGain
    ) -> list[float]:
        """Return, per worker, how many pages it saves that reads some of `limit` pages from another one."""
        saved = []
        for worker, start in enumerate(starts):
            offer = self._elsewhere(worker, content, start, limit, gain)
            saved.append(0.0 if offer is None else gain.saved_by(offer, start, num_tokens))
        return saved

    def _open_tree(self) -> SpanTree:
        from kvarts.core.kv.block_sizes import tree_of  # imported only for engines with KV groups

        return tree_of(self._memory, self._page_size, _never_moving, num_below=self.num_tiers - 1)

    def _add(self, span: Span, place: int, group: int, start: int, end: int, worker: int) -> None:
        """Add the parts of pages [start, end) to the list at `place` of a span, which has none of them there."""
        runs = span.parts[place]
        is_state = self._memory.groups[group].is_state
        if not is_state and runs and runs[-1].end == start:
            runs[-1].end = end
            return
        for first in range(start, end) if is_state else (start,):  # a snapshot is a run of its own
            run = PartRun(group, span, first, first + 1 if is_state else end, [], is_kept=True, list_index=place)
            run.writer = worker
            runs.append(run)

    def _elsewhere(self, worker: int, content: Content, start: int, limit: int, gain: PeersGain) -> Offer | None:
        """Return the parts of that other worker with which `worker` could resume from most pages.

        None if no worker has any for pages beyond `start`.
        """
        own = self._trees.get(worker)
        if own is None:
            own = self._open_tree()
        depth, first = self.num_tiers - 1, self._first_lists[gain.tier]
        best, source = own.match(content, limit, depth=depth), -1
        for other, tree in sorted(self._trees.items()):
            if other != worker:
                match = own.match_across(content, limit, tree, (first,), depth=depth)
                if match.num_pages > best.num_pages:
                    best, source = match, other
        if source < 0 or best.num_pages <= start:
            return None
        assert best.pieces is not None
        part_bytes = [group.part_bytes // self._memory.block_bytes * gain.unit_bytes for group in self._memory.groups]
        runs = [
            (0, begin, end, part_bytes[index])
            for index, pieces in enumerate(best.pieces)
            for run, begin, end in pieces
            if run.writer == source
        ]
        num_pages = best.num_pages - start
        most_front = 0 if self._memory.has_states else best.most_front(start)
        return Offer(num_pages, (num_pages,), (tuple(runs),), (most_front,))


def _never_moving(span: Span) -> None:
    raise AssertionError("no decode has runs in an index")


class CacheFeed:
    """An EventReader that forwards, with times, which pages can be found and which no longer can.

    `at_end`: changes of a step are sent when the step ends; otherwise when it is scheduled. The feed also reads events
    that wait in the log, because its reader may be queried during a step.
    """

    wants_details = True

    def __init__(self, emit: Callable[[Changed, int], object], *, at_end: bool) -> None:
        self._emit = emit
        self._at_end = at_end
        self._log: EventLog | None = None
        self._num_read = 0
        self._time_ns = 0
        self._in_step: list[tuple[int, Changed]] = []
        """Changes of the step or leap in progress, with the number of the step."""
        self._step = -1

    def follow(self, log: EventLog) -> None:
        """Also read events that wait in `log`."""
        self._log = log

    def observe(self, events: Sequence[Event]) -> None:
        """Read events passed on by the log."""
        self._read(events, 0 if self._log is None else self._log.num_events)

    def read(self) -> None:
        """Read events that wait in the log."""
        if self._log is not None:
            self._read(cast("list[Event]", self._log.waiting), self._log.num_events)  # this reader takes no rows

    def note_time(self, now_ns: int) -> None:
        """Record that events from now on that are in no step happen at `now_ns` or later."""
        self.read()
        self._time_ns = max(self._time_ns, now_ns)

    def _read(self, events: Sequence[Event], num_before: int) -> None:
        """Read the new ones of `events`, which `num_before` others precede."""
        start = self._num_read - num_before
        if start >= len(events):
            return
        self._num_read = num_before + len(events)
        for event in events[start:] if start else events:
            if isinstance(event, Changed):
                if self._step >= 0 and self._at_end:
                    self._in_step.append((self._step, event))
                else:
                    self._emit(event, self._time_ns)
            elif isinstance(event, StepStarted):
                if event.step < self._step or self._step < 0:
                    self._end_steps({}, self._time_ns)
                self._step, self._time_ns = event.step, event.start_ns
            elif isinstance(event, StepDone):
                self._end_steps({}, event.start_ns + event.duration_ns)
            elif isinstance(event, LeapDone):
                self._end_leap(event)
            elif isinstance(event, StepEnded):
                self._step, self._time_ns = -1, event.end_ns
            elif isinstance(event, TransferEnded):
                self._step, self._time_ns = -1, event.time_ns

    def _end_leap(self, leap: LeapDone) -> None:
        if not self._in_step:
            return
        ends_ns: dict[int, int] = {}
        end_ns = leap.start_ns
        for index, duration_ns in enumerate(leap.durations_ns):
            end_ns += duration_ns
            ends_ns[leap.step + index] = end_ns
        self._end_steps(ends_ns, end_ns)

    def _end_steps(self, ends_ns: dict[int, int], last_ns: int) -> None:
        for step, event in self._in_step:
            self._emit(event, ends_ns.get(step, last_ns))
        self._in_step.clear()

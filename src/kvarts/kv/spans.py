"""Runs of parts in KV groups, and the spans of pages by which they are found.

A span is a run of pages with one history in every group: where one of its pages was taken, given back, found or
evicted, all were. Wherever that ends to be so it is split, in all groups at once; but what is evicted from its tail is
only noted at the run, until the span is looked at again. Most never are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvarts.content import Content, PageKey
from kvarts.kv.node import NOTHING

__all__ = ["PartRing", "PartRun", "RunHolding", "RunMatch", "Span"]


class PartRun:
    """The parts of the pages of `span` in one group, or a snapshot of states at the end of its last page.

    `end`: the page after its last; before that of the span where parts were evicted. `holders`: the sequences that hold
    it; without any it is listed, between `older` and `newer`, since `stamp` where ages are known. `is_kept`: it is
    listed when nothing holds it any more; else it is empty then.
    """

    __slots__ = ("end", "group", "holders", "is_kept", "newer", "older", "span", "stamp")

    def __init__(self, group: int, span: Span, holders: list[RunHolding], *, is_kept: bool) -> None:
        self.group = group
        self.span = span
        self.end = span.end
        self.holders = holders
        self.is_kept = is_kept
        self.older: PartRun | None = None
        self.newer: PartRun | None = None
        self.stamp = 0


class Span:
    """Pages [start, end) of `content`. `copies`: for each group the resident runs of their parts, the oldest first.

    `key` names its first page among its siblings. `num_users`: sequences of which it has the last full pages.
    `is_eaten`: parts were evicted from the tail of a run.
    """

    __slots__ = ("children", "content", "copies", "end", "is_eaten", "key", "num_users", "parent", "start")

    def __init__(
        self, content: Content, key: PageKey, start: int, end: int, parent: Span | None, num_groups: int
    ) -> None:
        self.content = content
        self.key = key
        self.start = start
        self.end = end
        self.parent = parent
        self.children: dict[PageKey, Span] = {}
        self.copies: list[list[PartRun]] = [[] for _ in range(num_groups)]
        self.num_users = 0
        self.is_eaten = False

    def prune(self) -> None:
        """Forget it if nothing needs it, and then those before it."""
        span = self
        while not (span.num_users or span.children or any(span.copies)) and span.parent is not None:
            del span.parent.children[span.key]
            span = span.parent

    def chain(self) -> list[Span]:
        """Return the spans from the first page to its last."""
        spans = []
        span = self
        while span.parent is not None:
            spans.append(span)
            span = span.parent
        spans.reverse()
        return spans


class RunMatch:
    """The first `num_pages` pages that every group can go on from; the last of `spans` may reach beyond."""

    __slots__ = ("num_pages", "root", "spans")

    def __init__(self, root: Span, spans: list[Span], num_pages: int) -> None:
        self.root = root
        self.spans = spans
        self.num_pages = num_pages


class RunHolding:
    """What one running sequence holds. Written by RunCache.

    `num_tokens`: tokens that are computed, or are about to be in this step. `last`: the span of its last full page.
    `held`: for each group, runs in order of position. `num_open`: pages after these that cannot be found, with a part
    in every group that keeps tokens. `num_states`: for each group, its own states, 0 or 1.
    """

    __slots__ = ("content", "held", "is_open", "last", "num_open", "num_states", "num_tokens")

    def __init__(self, content: Content, last: Span, num_tokens: int, num_groups: int) -> None:
        self.content = content
        self.last = last
        self.num_tokens = num_tokens
        self.held: list[list[PartRun]] = [[] for _ in range(num_groups)]
        self.num_open = 0
        self.num_states = [0] * num_groups
        self.is_open = True


class PartRing:
    """Runs that nothing holds, the least recently released first. Of a run, the last page goes first."""

    __slots__ = ("_ring", "tick")

    def __init__(self) -> None:
        self.tick: Callable[[], int] | None = None
        """Answers the stamp of a run as it is released, where ages are to be known."""
        # One sentinel closes the list to a ring: newer of it is the oldest run, older of it the youngest.
        ring = PartRun(-1, Span(NOTHING, b"", 0, 0, None, 0), [], is_kept=True)
        ring.older = ring.newer = ring
        self._ring = ring

    def __iter__(self) -> Iterator[PartRun]:
        run = self._ring.newer
        while run is not self._ring:
            assert run is not None
            yield run
            run = run.newer

    def append(self, run: PartRun) -> None:
        """List `run` as the youngest."""
        youngest = self._ring.older
        assert youngest is not None
        self.put_after(youngest, run)
        if self.tick is not None:
            run.stamp = self.tick()

    def put_after(self, older: PartRun, run: PartRun) -> None:
        """List `run` right after `older`, as old as that."""
        newer = older.newer
        assert newer is not None
        run.older, run.newer = older, newer
        older.newer = newer.older = run
        run.stamp = older.stamp

    def remove(self, run: PartRun) -> None:
        """Unlist `run`."""
        older, newer = run.older, run.newer
        assert older is not None and newer is not None
        older.newer, newer.older = newer, older
        run.older = run.newer = None

    def oldest(self) -> PartRun:
        """Return the run that is evicted next. There is one."""
        run = self._ring.newer
        assert run is not None and run is not self._ring, "parts are missing, and none is cached"
        return run

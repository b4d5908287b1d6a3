"""Store policies for a device with KV groups: which runs of parts are stored below it, and when.

All policies store the parts that RunCache selects: every page in groups that keep all tokens; in windows and chunks
only those from which another sequence can resume, the tails of prompts and of finished requests. The same prompt is
such a sequence: if it ends with a page, it resumes a page earlier, to compute its last token. Parts in between serve
no hit that a tail does not serve nearly as well, and would be most of the bytes. A state after a page is a tail by
itself: where the device keeps those in between, every one is stored, as vLLM's connector does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from kvarts.core.content import Content
from kvarts.core.kv.run_cache import RunCache
from kvarts.core.kv.runs import PartRun, RunTable
from kvarts.core.kv.span_tree import find
from kvarts.core.tiers.part_tier import PartTier

__all__ = ["EagerParts", "ExclusiveParts", "LazyParts", "PartPolicy"]

ANY = 1 << 62

PartPolicy: TypeAlias = "EagerParts | LazyParts"
"""Chooses runs to store: each with its first page and the page after its last.

Promises: the run that it yielded last is yielded again until `passed` is called, for pages in order. `goes_first`:
whether stored parts go before all that an eviction order of the device lists. `takes_back`: parts that are loaded are
complete again, as if they had been computed. `exclusive_pages`: so many of those that a tier evicts next are spilled;
None: all that arrives.
"""


class EagerParts:
    """Runs are stored in the step after they became complete."""

    goes_first = takes_back = False
    exclusive_pages: int | None = None

    def __init__(self, cache: RunCache) -> None:
        self._tree = cache.tree
        self._wanted: deque[tuple[Content, int, int, int]] = deque()
        """Contents, each with a group and its pages."""
        self._preempted: deque[tuple[Content, int, int, int]] = deque()
        """The same of preempted requests: they need them sooner than others do, and are chosen first."""
        self._chosen = self._wanted
        """The queue of the run that was yielded last."""
        self._fresh: list[tuple[Content, int, int, int]] = []
        """The same of the step that computes them."""
        self._computing: dict[RunTable | PartRun, int] = {}
        """Sequences and snapshots that this step computes, from which page on: there is nothing to copy yet."""
        cache.wants = self

    def complete(self, content: Content, group: int, start: int, end: int) -> None:
        """Queue the pages from the next step on."""
        self._fresh.append((content, group, start, end))

    def begin_step(self) -> None:
        """Queue the pages that the last step computed."""
        self._wanted += self._fresh
        self._fresh.clear()
        self._computing.clear()

    def computes(self, owner: RunTable | PartRun, start: int) -> None:
        """Do not store its pages from `start` on in this step."""
        self._computing.setdefault(owner, start)

    def _computed_to(self, run: PartRun) -> int:
        """Return the page of `run` from which on it is computed in this step."""
        page = self._computing.get(run, run.end)
        for holder in run.holders:
            page = min(page, self._computing.get(holder, run.end))
        return page

    def choose(self) -> Iterator[tuple[PartRun, int, int]]:
        """Yield queued runs in order of completion. If there are copies, the oldest is chosen."""
        walked: tuple[Content, int] | None = None
        while wanted := self._preempted or self._wanted:
            self._chosen = wanted
            content, group, start, end = wanted[0]
            if walked != (content, end):  # the groups of a sequence follow each other
                walked = content, end
                spans, known = self._tree.walk(content, end)
            for span in spans:
                if span.end <= start:
                    continue
                found: list[tuple[PartRun, int, int]] = []
                find(span.parts[group], max(start, span.start), min(known, span.end), found)
                for run, first, last in found:
                    there = min(last, self._computed_to(run))
                    if first < there:
                        wanted[0] = content, group, first, end  # the device has lost those before it
                        yield run, first, there
            wanted.popleft()

    def passed(self, run: PartRun, start: int, end: int) -> None:
        """Remove these pages from the queue."""
        content, group, _, last = self._chosen[0]
        self._chosen[0] = content, group, end, last

    def preempted(self, content: Content, group: int, start: int, end: int) -> None:
        """Queue the pages for the step being planned."""
        self._preempted.append((content, group, start, end))

    def resumed(self, content: Content, groups: Sequence[int], page: int) -> None:
        """Take these snapshots out of the queues."""
        for queue in (self._preempted, self._wanted, self._fresh):
            for entry in [each for each in queue if each[0] is content and each[1] in groups and each[3] == page]:
                queue.remove(entry)

    def ended(self, content: Content) -> None:
        """Take the pages that only this request could find out of the queue."""
        wanted, self._preempted = self._preempted, deque()
        known_end = content.num_known_pages
        for each, group, start, end in wanted:
            last = min(end, known_end) if each is content else end
            if start < last:
                self._preempted.append((each, group, start, last))

    def forget(self) -> None:
        """Empty the queues."""
        self._wanted.clear()
        self._preempted.clear()
        self._fresh.clear()
        self._computing.clear()

    @property
    def has_work(self) -> bool:
        """Whether pages are queued."""
        return bool(self._wanted or self._preempted or self._fresh)


class LazyParts:
    """Cached runs are stored when they near eviction, so that the next `target_bytes` taken lose nothing."""

    goes_first = True
    takes_back = False
    exclusive_pages: int | None = None

    def __init__(self, cache: RunCache, target_bytes: int) -> None:
        self._cache = cache
        self._target_bytes = target_bytes
        self._fresh: list[tuple[Content, int, int, int]] = []
        """Contents, each with a group and its pages, of the step that computes them."""
        cache.wants = self

    def complete(self, content: Content, group: int, start: int, end: int) -> None:
        """Want it from the next step on."""
        self._fresh.append((content, group, start, end))

    def computes(self, owner: RunTable | PartRun, start: int) -> None:
        """Do nothing: runs are wanted from the next step on."""

    def begin_step(self) -> None:
        """Mark the runs that the last step completed: they are wanted until they are stored."""
        for content, group, start, end in self._fresh:
            self.preempted(content, group, start, end)
        self._fresh.clear()

    def preempted(self, content: Content, group: int, start: int, end: int) -> None:
        """Mark the runs: they are wanted until they are stored."""
        self._mark(content, group, start, end, is_wanted=True)

    def resumed(self, content: Content, groups: Sequence[int], page: int) -> None:
        """Want them not from the next step on; the device has lost them, or does not list them."""
        self._fresh = [each for each in self._fresh if each[0] is not content or each[1] not in groups]

    def ended(self, content: Content) -> None:
        """Unmark the runs of unknown tokens."""
        for group in range(len(self._cache.groups)):
            self._mark(content, group, content.num_known_pages, ANY, is_wanted=False)

    def _mark(self, content: Content, group: int, start: int, end: int, *, is_wanted: bool) -> None:
        spans, end = self._cache.tree.walk(content, end)
        for span in spans if start < end else ():
            for run in tuple(span.parts[group]) if span.end > start else ():
                if run.start < end and run.end > start:
                    run.cut(max(start, run.start), min(end, run.end)).is_wanted = is_wanted

    def choose(self) -> Iterator[tuple[PartRun, int, int]]:
        """Yield the wanted runs nearest to eviction. If there are copies, the oldest is chosen."""
        cache = self._cache
        num_missing = self._target_bytes - cache.vacant_bytes
        chosen: list[tuple[PartRun, int]] = []
        for entry in cache.entries():
            if num_missing <= 0:
                break
            if not entry.next_bytes(cache):
                continue  # a store holds it
            assert isinstance(entry, PartRun), "a lazy tier follows no decodes"
            part_bytes = cache.part_bytes[entry.group]
            start = entry.end + -num_missing // part_bytes
            if start < entry.start:
                start = entry.start
            num_missing -= (entry.end - start) * part_bytes
            if entry.is_wanted:
                chosen.append((entry, start))
        for run, start in chosen:
            assert run.span is not None, "a part that cannot be found was cached"
            found: list[tuple[PartRun, int, int]] = []
            find(run.span.parts[run.group], max(start, run.start), run.end, found)
            yield from found

    def passed(self, run: PartRun, start: int, end: int) -> None:
        """Do not store these pages again while the device has them, in any copy."""
        assert run.span is not None
        for copy in tuple(run.span.parts[run.group]):
            if copy.is_wanted and copy.start < end and copy.end > start:
                copy.cut(max(start, copy.start), min(end, copy.end)).is_wanted = False

    def forget(self) -> None:
        """Want nothing of the last step."""
        self._fresh.clear()

    @property
    def has_work(self) -> bool:
        """False: stores depend on the device alone."""
        return False


class ExclusiveParts(LazyParts):
    """The same, and what `host` has of parts that the device has again is evicted there first.

    The device has them again because they were computed or loaded. If they are still there when they near eviction on
    the device, they need not be stored again. Slower tiers keep what they have: a small host memory would evict parts
    faster than they carry them. `num_pages` is a target in pages, since the device counts parts in blocks, and tiers
    count them in bytes.
    """

    takes_back = True

    def __init__(self, cache: RunCache, num_pages: int, host: PartTier) -> None:
        super().__init__(cache, num_pages * cache.page_bytes)
        self.exclusive_pages = num_pages
        self._host = host

    def begin_step(self) -> None:
        """Let host memory evict the parts first that the last step completed or a load has brought, and mark them."""
        for arrived in self._fresh:
            self._host.evict_first(*arrived)
        super().begin_step()

    def passed(self, run: PartRun, start: int, end: int) -> None:
        """Let host memory keep these parts: the device will lose them."""
        super().passed(run, start, end)
        assert run.span is not None
        self._host.evict_last(run.span, run.group, start, end)

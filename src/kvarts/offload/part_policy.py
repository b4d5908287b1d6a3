"""Which runs of parts are stored below a device with KV groups, and when.

Both policies store what RunCache says is worth it: every page in groups that keep all tokens, but of windows and chunks
only what another sequence can go on from, the tails of prompts and of requests that ended. What lies between is seen by
no hit that a tail does not serve nearly as well, and would be most of the bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from kvarts.content import Content
from kvarts.kv.run_cache import RunCache, Wants
from kvarts.kv.span_tree import find
from kvarts.kv.spans import PartRun

__all__ = ["EagerParts", "LazyParts", "PartPolicy"]


class PartPolicy(Wants, Protocol):
    """Chooses runs to store. Promises: what it has yielded last is its to yield again until `passed` is called."""

    goes_first: bool
    """Whether the device evicts next what was stored, rather than last."""

    def choose(self) -> Iterator[tuple[PartRun, int, int]]:
        """Yield runs to store, each with its first page and that after its last."""

    def passed(self, run: PartRun, start: int, end: int) -> None:
        """Take note that pages [start, end) of what was yielded last are stored, or need not be, or find no room.

        `run` has them; pages are passed in their order.
        """


class EagerParts:
    """Runs are stored in the step after they became complete."""

    goes_first = False

    def __init__(self, cache: RunCache) -> None:
        self._tree = cache.tree
        self._wanted: deque[tuple[Content, int, int, int]] = deque()
        """Contents, each with a group and its pages."""
        cache.wants = self

    def complete(self, content: Content, group: int, start: int, end: int, runs: list[PartRun]) -> None:
        """Want it."""
        self._wanted.append((content, group, start, end))

    def choose(self) -> Iterator[tuple[PartRun, int, int]]:
        """Yield what is wanted, in the order in which it became so; of copies the oldest."""
        wanted = self._wanted
        walked: tuple[Content, int] | None = None
        while wanted:
            content, group, start, end = wanted[0]
            if walked != (content, end):  # the groups of a sequence follow each other
                walked = content, end
                spans, known = self._tree.walk(content, end)
            for span in spans:
                if span.end <= start:
                    continue
                found: list[tuple[PartRun, int, int]] = []
                find(span.parts[group], max(start, span.start), min(known, span.end), found)
                yield from found
            wanted.popleft()

    def passed(self, run: PartRun, start: int, end: int) -> None:
        """Want it no more."""
        content, group, _, last = self._wanted[0]
        self._wanted[0] = content, group, end, last

    @property
    def has_work(self) -> bool:
        """Whether something is wanted."""
        return bool(self._wanted)


class LazyParts:
    """Cached runs are stored when they come near eviction, so that the next `target_bytes` taken lose nothing."""

    goes_first = True

    def __init__(self, cache: RunCache, target_bytes: int) -> None:
        self._cache = cache
        self._target_bytes = target_bytes
        cache.wants = self

    def complete(self, content: Content, group: int, start: int, end: int, runs: list[PartRun]) -> None:
        """Mark the runs: they are wanted until they are stored."""
        for run in tuple(runs):
            if run.start < end and run.end > start:
                run.cut(max(start, run.start), min(end, run.end)).is_wanted = True

    def choose(self) -> Iterator[tuple[PartRun, int, int]]:
        """Yield the runs nearest to eviction that are wanted; of copies the oldest."""
        cache = self._cache
        num_missing = self._target_bytes - cache.empty_bytes
        chosen: list[tuple[PartRun, int]] = []
        for entry in cache.entries():
            if num_missing <= 0:
                break
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
        """Do not store it again while the device has it, in any copy."""
        assert run.span is not None
        for copy in tuple(run.span.parts[run.group]):
            if copy.is_wanted and copy.start < end and copy.end > start:
                copy.cut(max(start, copy.start), min(end, copy.end)).is_wanted = False

    @property
    def has_work(self) -> bool:
        """False: what is chosen depends on the device alone."""
        return False

"""Prefix index built from the cache events of workers, as a router receives them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvarts.content import Content
from kvarts.event_log import EventLog
from kvarts.events import (
    Event,
    LeapDone,
    PagesRemoved,
    PagesStored,
    StepDone,
    StepEnded,
    StepStarted,
    TransferEnded,
)
from kvarts.routers.spans import IndexSpan, IndexTree

__all__ = ["CacheFeed", "EventIndex"]

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

    def store(self, worker: int, content: Content, start: int, end: int, tier: str) -> None:
        """Record that pages [start, end) of `content` can be found on `worker`."""
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

    def remove(self, worker: int, content: Content, start: int, end: int, tier: str) -> None:
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


class CacheFeed:
    """An EventReader that forwards, with times, which pages can be found and which no longer can.

    `at_end`: changes of a step are sent when the step ends; otherwise when it is scheduled. The feed also reads events
    that wait in the log, because its reader may be queried during a step.
    """

    wants_details = True

    def __init__(self, tell: Callable[[Changed, int], object], *, at_end: bool) -> None:
        self._tell = tell
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
            self._read(self._log.waiting, self._log.num_events)

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
                    self._tell(event, self._time_ns)
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
            self._tell(event, ends_ns.get(step, last_ns))
        self._in_step.clear()

"""Pages that the windows of decodes release, one at a time, at regular intervals of steps.

The release of a page does no work for that page: its stream is listed once more (Turns), and that entry stands for the
stream's next page. The position of a stream follows from the step, and is computed when its runs are examined.

An example: with pages of 4 tokens, the window of A passes a page at the end of steps 1, 5 and 9, that of B at the end
of steps 3 and 7. Each time the stream is listed once more, without the page:

    turns      A     B     A     B     A
    page       0     0     1     1     2     the page is not stored: it is `low` of the stream when its turn comes
               evicted----------|
                                at = 3, A.low = 2, B.low = 1

Evicting three parts takes the first three turns: pages 0 of A and of B, and page 1 of A. The turn at 3 is B's and
stands for B's page 1, its `low`. If another sequence finds A's page 2 meanwhile, the page becomes a hole of A: its turn
is skipped, and no entry has to be searched for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvarts.kv.part_account import Listed, PartAccount

if TYPE_CHECKING:
    from kvarts.kv.spans import PartRun, RunHolding

__all__ = ["NEVER", "Stream", "Turns"]

NEVER = 1 << 62
MOST_EATEN = 1 << 12
"""The number of evicted turns after which their entries are deleted."""


class Stream:
    """Pages that `holding` releases in a group, in order.

    `keeps`: they are listed; otherwise they become empty at once. `slot`: the slot of the steps of its releases. `low`:
    the page that is evicted next. `high`: the first page that is not released, as far as `runs` are up to date: these
    have the pages in between, except for the ranges of `holes`, which it no longer lists. `last`: no page from there on
    is released; NEVER while it continues. `gate`: the page at which the first of `runs` has nothing left, if that is
    known.
    """

    __slots__ = ("admission", "gate", "group", "high", "holding", "holes", "keeps", "last", "low", "runs", "slot")

    def __init__(self, holding: RunHolding, group: int, page: int, slot: int, *, keeps: bool) -> None:
        self.holding = holding
        self.admission = holding.admission
        self.group = group
        self.slot = slot
        self.keeps = keeps
        self.low = self.high = page
        self.last = NEVER
        self.gate = NEVER
        self.runs: list[PartRun] = []
        self.holes: list[tuple[int, int]] = []

    def add(self, run: PartRun) -> None:
        """Add `run`, which follows the others."""
        run.stream = self
        run.is_passed = True
        self.runs.append(run)

    def insert(self, run: PartRun, before: PartRun) -> None:
        """Add `run`, which was split off the beginning of another."""
        run.stream = self
        self.runs.insert(self.runs.index(before), run)
        self.set_gate()

    def set_gate(self) -> None:
        """Remove runs without pages left, and set `gate` to the end of the first of the others."""
        runs = self.runs
        while runs and runs[0].end <= self.low:
            run = runs.pop(0)
            run.stream = None
            run.forget()
        self.gate = runs[0].end if len(runs) > 1 or (runs and self.last != NEVER) else NEVER

    def trim(self, run: PartRun) -> bool:
        """Cut evicted pages off the beginning of one of its runs; return whether any are left."""
        if run.start < self.low:
            run.start = min(self.low, run.end)
        return run.start < run.end

    def take_out(self, run: PartRun) -> None:
        """Stop listing one of its runs."""
        self.holes.append((run.start, run.end))
        self.runs.remove(run)
        run.stream = None
        self.set_gate()

    def is_hole(self, page: int) -> bool:
        """Return whether a page is no longer listed by it."""
        return any(start <= page < end for start, end in self.holes)


class Turns(Listed):
    """Streams in the order in which each released one page; the turns before `at` are evicted."""

    __slots__ = ("at", "streams")

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Stream] = []
        self.at = 0

    def next_bytes(self, account: PartAccount) -> int:
        """Return the bytes of its next part; turns without one are skipped."""
        while self.at < len(self.streams):
            stream = self.streams[self.at]
            if not stream.is_hole(stream.low):
                return account.part_bytes[stream.group]
            self.at += 1
            stream.low += 1
        return 0

    def eat(self, account: PartAccount, num_bytes: int) -> None:
        """Evict the pages of its first turns until `num_bytes` are empty or all turns are evicted."""
        streams, at = self.streams, self.at
        end = len(streams)
        missing_bytes = num_bytes - account.empty_bytes
        while missing_bytes > 0 and at < end:
            index = streams[at].group
            part_bytes = account.part_bytes[index]
            count = 0
            while missing_bytes > 0 and at < end:
                stream = streams[at]
                if stream.group != index:
                    break
                at += 1
                page = stream.low
                stream.low = page + 1
                if not stream.holes or not stream.is_hole(page):
                    count += 1
                    missing_bytes -= part_bytes
                if page + 1 >= stream.gate:
                    stream.set_gate()
            account.note_evicted(index, count, count * part_bytes)
        if at == end:
            self.unlist()
        elif at > MOST_EATEN:
            del streams[:at]
            at = 0
        self.at = at

"""Runs of parts that are held and released, on the device or in a tier below it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvarts.hints import Hints
from kvarts.kv.eviction import EvictionOrder
from kvarts.kv.part_account import PartAccount, Spot
from kvarts.kv.spans import PartRun, RunHolding

__all__ = ["RunAccount"]


class RunAccount(PartAccount):
    """A PartAccount that records the holders of each run."""

    def hold(self, run: PartRun, holding: RunHolding) -> None:
        """Make `holding` a holder of a run, which follows the runs that it already holds in the group."""
        if run.holders:
            if run.spot is not None and not holding.is_transfer:
                run.leave_spot()
            self.disturb(run)
        else:
            if run.stream is None:
                run.unlist()
            else:
                run.stream.take_out(run)
            self.note_used(run.group, run.end - run.start)
        run.holders.append(holding)
        holding.held[run.group].append(run)

    def hold_in_place(self, run: PartRun, holding: RunHolding) -> None:
        """Make a transfer a holder of `run`, which keeps its place in the list, unless a window has passed it."""
        spot: Spot | None = None
        if not (run.holders or run.is_passed or run.listed_by is not None):
            spot = Spot()
            spot.list_after(run)
        self.hold(run, holding)
        if spot is not None:
            run.spot = spot

    def note_begin(self) -> None:
        """Let the order know the time, as a sequence begins."""
        if self.note_request is not None:
            self.note_request(None, self.now_ns)

    def hold_path(self, path: Sequence[PartRun], holding: RunHolding) -> None:
        """Hold the runs of `path` in one group, in order of page: a hit, with which a sequence begins."""
        order = self.eviction_order
        if order is not None and path:
            listed = [run for run in path if run.listed_by is not None]
            order.pinned(listed, path)
            for run in listed:
                run.leave_order()
        for run in path:
            self.hold(run, holding)

    def disturb(self, run: PartRun) -> None:
        """Process that a held run gets another holder."""

    def lost_holder(self, run: PartRun) -> None:
        """Process that a run that is still held has lost one of its holders."""

    def release(self, index: int, runs: Iterable[PartRun], holding: RunHolding, *, is_passed: bool = False) -> None:
        """End the hold on `runs` of a group, one after the other; they are already removed from `holding.held`.

        `is_passed`: the sequence continues without them.
        """
        before: PartRun | None = None
        num_cached = num_empty = 0
        events, order = self.events, self.eviction_order
        listed: list[PartRun] = []
        for run in runs:
            holders = run.holders
            holders.remove(holding)
            if not holding.is_transfer:
                run.is_passed = is_passed
            if holders:
                self.lost_holder(run)
                before = None
                continue
            count = run.end - run.start
            if run.is_kept:
                num_cached += count
                if run.spot is not None:
                    run.take_spot()
                    before = None
                elif order is not None:
                    listed.append(run)
                elif before is None or not before.join(run):
                    self.append(run)
                    before = run
            else:
                num_empty += count
                if events is not None and run.span is not None:
                    events.goes(run, run.start, run.end, is_dropped=True)
                if run.ids:
                    self.give_ids(run.ids)
                    run.ids = []
                run.forget()
        if events is not None:
            events.told()
        if order is not None and listed:
            self._list_in(order, listed, holding.content.hints)
        if num_cached:
            self.note_cached(index, num_cached)
        if num_empty:
            self.note_empty(index, num_empty)

    def _list_in(self, order: EvictionOrder, runs: Sequence[PartRun], hints: Hints | None) -> None:
        """Let `order` list runs of one group, the deepest first, of a request with `hints`."""
        if self.reads_ranges and hints is not None and hints.retain:
            content = runs[0].content
            num_pages = max(runs[0].end, content.num_known_pages)
            self._list_parts(order, list(runs), hints.parts(content.page_size, num_pages))
            return
        stamp = 0 if self.shared is None else self.shared.tick()
        for run in runs:
            run.listed_by, run.stamp = order, stamp
        note = self.note_request
        if note is None:
            order.released(runs)
        else:
            note(hints, self.now_ns)
            order.released(runs)
            note(None, self.now_ns)

    def _list_parts(self, order: EvictionOrder, runs: list[PartRun], parts: Sequence[tuple[int, Hints]]) -> None:
        """List runs of one group part by part, the deepest first; `parts`: the first page and the hints of each."""
        for first, hints in reversed(parts):
            listed: list[PartRun] = []
            while runs and runs[0].end > first:
                run = runs[0]
                if run.start < first:
                    runs[0] = run.split(first)
                else:
                    del runs[0]
                listed.append(run)
            if listed:
                self._list_in(order, listed, hints)

    def release_all(self, holding: RunHolding, order: Sequence[int]) -> None:
        """End all holds of `holding`, by group in `order`, the latest first."""
        for index in order:
            held = holding.held[index]
            if held:
                holding.held[index] = []
                held.reverse()
                self.release(index, held, holding)

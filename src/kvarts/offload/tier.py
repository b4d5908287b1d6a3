"""A tier of whole pages, which keeps them in memory or only counts them.

Operations that take time have two halves, and their pages are pinned in between: a store is prepared and completed, and
so is a load. Failure is a kind of completion. A holder is the number on behalf of which pages are pinned.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mypy_extensions import mypyc_attr

from kvarts.content import Content
from kvarts.kv.transfer import Coming
from kvarts.offload.index import ALL, NodeState, Placement, Segment, TierIndex, TierRun, check_index

__all__ = ["MemoryTier", "OnRemoved", "OnStored", "TierLoad", "TierStore"]

OnStored = Callable[[Content, int, int, Content | None], object]
"""Called for a run that becomes findable: content, first page, page after the last, the content before it."""

OnRemoved = Callable[[Content, int, int], object]
"""Called for a run that stops being findable: content, first page, page after the last."""


class TierMove:
    """A running store or load. `segments`: the `num_pages` pages of `content` and the tier's, in order of position."""

    __slots__ = ("content", "is_open", "num_pages", "segments", "ticket")

    def __init__(self, content: Content, segments: tuple[Segment, ...], num_pages: int, ticket: object) -> None:
        self.content = content
        self.segments = segments
        self.num_pages = num_pages
        self.ticket = ticket
        self.is_open = True


class TierStore(TierMove):
    """A running store: its segments have the targets."""

    __slots__ = ()


class TierLoad(TierMove):
    """A running load: its segments have the sources."""

    __slots__ = ()


@mypyc_attr(allow_interpreted_subclasses=True)
class Pin:
    """Pages [start, end) of `content` that are pinned in `index`; `run` has the last of them."""

    __slots__ = ("content", "end", "index", "run", "start")

    def __init__(self, content: Content, start: int, end: int, run: TierRun, index: TierIndex) -> None:
        self.content = content
        self.start = start
        self.end = end
        self.run = run
        self.index = index


@mypyc_attr(allow_interpreted_subclasses=True)
class MemoryTier:
    """`num_pages` whole pages kept below the device, with ids (`slots`) if an executor copies into them.

    Promises: no page is findable before its store is complete; pinned pages stay; a second completion of the same
    transfer changes nothing and is counted.

    `on_stored` and `on_removed` are called for runs that become or stop being findable:
    content, first page, page after the last, and for the former the content before it.
    """

    def __init__(
        self,
        name: str,
        num_pages: int,
        *,
        with_slots: bool = False,
        on_stored: OnStored | None = None,
        on_removed: OnRemoved | None = None,
    ) -> None:
        self.name = name
        self.num_pages = num_pages
        self.num_stray_completions = 0
        self.index = TierIndex(num_pages, with_slots=with_slots)
        self.listen(on_stored, on_removed)
        self.find = self.index.find
        self.find_whole = self.index.find_whole
        self.lose = self.index.lose
        self.vacate = self.index.vacate
        self._pins: dict[int, Pin] = {}
        self.num_guests = 0
        """Pins of other engines, which read pages from here."""

    def listen(self, on_stored: OnStored | None, on_removed: OnRemoved | None) -> None:
        """Set the callbacks for runs that become findable or stop being findable."""
        self.index.on_stored = None if on_stored is None else partial(_tell_stored, on_stored)
        self.index.on_removed = on_removed

    @property
    def num_refused(self) -> int:
        """Pages that were to be stored and found no room."""
        return self.index.num_refused

    @property
    def num_used_blocks(self) -> int:
        """Pages that are pinned or coming."""
        index = self.index
        pool = index.pool
        return pool.total - pool.num_empty - index.num_cached  # `num_used`, inlined: every step is reported with it

    @property
    def num_cached_blocks(self) -> int:
        """Pages that can be found and are not pinned."""
        return self.index.num_cached

    @property
    def num_evicted_blocks(self) -> int:
        """Pages that were evicted to make room."""
        return self.index.num_evicted

    @property
    def has_holes(self) -> bool:
        """Whether the tier has pages that follow pages which only a faster tier has."""
        return self.index.num_holes > 0

    @property
    def has_offers(self) -> bool:
        """Whether pages are pinned because `lookup` returned them."""
        return bool(self._pins) or self.num_guests > 0

    def is_stored(self, store: TierStore) -> bool:
        """Return whether all pages of a completed store are here."""
        assert isinstance(store.ticket, Placement)
        return store.ticket.run.state is NodeState.STORED

    def held(self, content: Content, start: int, end: int) -> list[tuple[int, int]]:
        """Return the stretches of pages [start, end) that are here, whether or not earlier pages are."""
        return [(max(first, start), last) for first, last in self.index.stored(content, end) if last > start]

    def offered(self, holder: int) -> int:
        """Return how many pages are pinned for `holder`."""
        pin = self._pins.get(holder)
        return 0 if pin is None else pin.end - pin.start

    def coming(self, content: Content, start: int, limit: int, now_ns: int) -> Coming | None:
        """Return the pages from `start` on that other engines are storing: none, unless the tier is shared."""
        return None

    def await_write(self, write: int) -> None:
        """Never called, as there are no such writes."""
        raise NotImplementedError

    def read(self, content: Content, start: int, end: int) -> TierLoad | None:
        """Begin to read those of pages [start, end) that `find` counts, for the next tier; None without pages.

        They are not pinned for a holder. `end_read` must follow.
        """
        run = self.index.pin_stored(content, start, end)
        if run is None:
            return None
        end = run.end
        return TierLoad(
            content,
            (Segment(start, end, self.index.slots_of(run, start)),),
            end - start,
            Pin(content, start, end, run, self.index),
        )

    def end_read(self, load: TierLoad) -> None:
        """End a read. It does not count as a use of the pages, so their recency is unchanged."""
        load.is_open = False
        assert isinstance(load.ticket, Pin)
        self.index.unpin(load.ticket.run)

    def lookup(self, holder: int, content: Content, start: int, limit: int) -> int:
        """Find pages as `find` does and pin them for `holder`, in place of its previous pins."""
        if self._pins:
            self.forget(holder)
        run = self.index.pin_stored(content, start, limit)
        if run is None:
            return 0
        self._pins[holder] = Pin(content, start, run.end, run, self.index)
        return run.end - start

    def forget(self, holder: int) -> None:
        """End the pin of `lookup` for `holder`, if there is one."""
        pin = self._pins.pop(holder, None)
        if pin is not None:
            pin.index.unpin(pin.run)

    def prepare_store(
        self, content: Content, start: int, end: int, *, deepest_first: bool = False, limit: int = ALL
    ) -> TierStore | None:
        """Make room for those of pages [start, end) that are neither stored nor coming; None without any.

        If there is not room for all, store as many as possible, and at most `limit`: the first, or the last if
        `deepest_first`.
        """
        placement = self.index.place(content, start, end, deepest_first=deepest_first, limit=limit)
        if placement is None:
            return None
        return TierStore(content, placement.segments, placement.num_pages, placement)

    def complete_store(self, store: TierStore, *, is_stored: bool = True) -> bool:
        """End a store: its pages become findable, or are dropped. Return False if it had ended before."""
        if not store.is_open:
            self.num_stray_completions += 1
            return False
        store.is_open = False
        assert isinstance(store.ticket, Placement)
        self._note_ended(store, self.index.settle(store.ticket, is_stored=is_stored))
        return True

    def _note_ended(self, store: TierStore, here: list[tuple[int, int]]) -> None:
        """Take note that a store has ended, of which the pages `here` can be found."""

    def prepare_load(self, holder: int, num_pages: int | None = None, num_front: int = 0) -> TierLoad:
        """Begin to load the next `num_pages` pages that were offered to `holder` after the first `num_front`, or all.

        They must have stayed in the tier since: after `reset`, or when pages were found broken, look up again.
        """
        pin = self._pins.pop(holder)
        assert pin.run.state is NodeState.STORED, f"what was offered to {holder} has left the tier since"
        pin.start += num_front
        offered = pin.end - pin.start
        if num_pages is not None and num_pages < offered:
            assert num_pages > 0, "a load of nothing"
            pin.end = pin.start + num_pages
            run = pin.index.pin(pin.content, pin.end)
            pin.index.unpin(pin.run)
            pin.run = run
        slots = pin.index.slots_of(pin.run, pin.start)
        return TierLoad(pin.content, (Segment(pin.start, pin.end, slots),), pin.end - pin.start, pin)

    def complete_load(self, load: TierLoad, num_good_pages: int | None = None) -> bool:
        """End a load. Pages after the first `num_good_pages` were broken and are dropped.

        Return False if it had ended before.
        """
        if not load.is_open:
            self.num_stray_completions += 1
            return False
        load.is_open = False
        pin = load.ticket
        assert isinstance(pin, Pin)
        index = pin.index
        if num_good_pages is not None and num_good_pages < pin.end - pin.start:
            index.drop(pin.content, pin.start + num_good_pages)
        index.touch(pin.run)
        index.unpin(pin.run)
        return True

    def drop(self, content: Content, page: int) -> None:
        """Drop `page` and all later pages."""
        self.index.drop(content, page)

    def reset(self) -> None:
        """Drop all pages. Running transfers end without effect."""
        self.index.reset()

    def take_dropped(self) -> tuple[bytes, ...]:
        """Return nothing: the tier is without files."""
        return ()

    def check(self, is_above: Callable[[Content, int], bool]) -> None:
        """Assert laws L1 to L3. `is_above`: whether a faster tier has the first n pages of a content."""
        check_index(self.index, is_above)


def _tell_stored(on_stored: OnStored, run: TierRun) -> None:
    parent = run.parent
    on_stored(run.content, run.start, run.end, None if parent is None or not run.start else parent.content)

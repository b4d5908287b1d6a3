"""A tier of whole pages, which keeps them in memory or only counts them.

Operations that take time have two halves, and their pages are pinned in between: a store is prepared and completed, and
so is a load. Failure is a kind of completion. A holder is the number on behalf of which pages are pinned.
"""

from __future__ import annotations

from collections.abc import Callable

from mypy_extensions import mypyc_attr

from kvarts.core.content import Content
from kvarts.core.kv.pool import PageId
from kvarts.core.kv.transfer import Coming
from kvarts.core.tiers.index import ALL, NodeState, OnRemoved, OnStored, Placement, TierIndex, TierRun, check_index

__all__ = ["MemoryTier", "Pin"]


@mypyc_attr(allow_interpreted_subclasses=True)
class Pin:
    """Pages [start, end) of `content` that are pinned in `index`, to be read; `run` has the last of them.

    `slots`: the ids of these pages, if they have any, once they are being read.
    """

    __slots__ = ("content", "end", "index", "run", "slots", "start")

    def __init__(self, content: Content, start: int, end: int, run: TierRun, index: TierIndex) -> None:
        self.content = content
        self.start = start
        self.end = end
        self.run = run
        self.index = index
        self.slots: tuple[PageId | bytes, ...] | None = None

    @property
    def num_pages(self) -> int:
        """The number of its pages."""
        return self.end - self.start


@mypyc_attr(allow_interpreted_subclasses=True)
class MemoryTier:
    """`num_pages` whole pages kept below the device, with ids (`slots`) if an executor copies into them.

    Promises: no page is findable before its store is complete; pinned pages stay. `index`: one that others use as well.
    """

    def __init__(self, name: str, num_pages: int, *, with_slots: bool = False, index: TierIndex | None = None) -> None:
        self.name = name
        self.num_pages = num_pages
        self.index = TierIndex(num_pages, with_slots=with_slots) if index is None else index
        self._pins: dict[int, Pin] = {}
        self.num_guests = 0
        """Pins of other engines, which read pages from here."""

    def listen(self, on_stored: OnStored | None, on_removed: OnRemoved | None) -> None:
        """Set the callbacks for runs that become findable or stop being findable."""
        self.index.on_stored, self.index.on_removed = on_stored, on_removed

    @property
    def num_refused(self) -> int:
        """Pages that were to be stored and found no room."""
        return self.index.num_refused

    @property
    def num_used_blocks(self) -> int:
        """Pages that are pinned or coming."""
        return self.index.num_used

    @property
    def num_cached_blocks(self) -> int:
        """Pages that can be found and are not pinned."""
        return self.index.num_cached

    @property
    def num_evicted_blocks(self) -> int:
        """Pages that were evicted to make room."""
        return self.index.num_evicted

    @property
    def num_empty_blocks(self) -> int:
        """Pages without content."""
        return self.index.pool.num_empty

    @property
    def has_holes(self) -> bool:
        """Whether the tier has pages that follow pages which only a faster tier has."""
        return self.index.num_holes > 0

    @property
    def has_offers(self) -> bool:
        """Whether pages are pinned because `lookup` returned them."""
        return bool(self._pins) or self.num_guests > 0

    def find(self, content: Content, start: int, limit: int) -> int:
        """Return how many consecutive pages of `content` in [start, limit) are stored, from `start` on."""
        return self.index.find(content, start, limit)

    def missing(self, content: Content, start: int, end: int) -> int:
        """Return how many of the pages [start, end) are neither here nor coming."""
        return self.index.missing(content, start, end)

    def lose(self, content: Content, start: int, end: int) -> None:
        """Note that the device no longer has pages [start, end): pages after a hole in them cannot be used."""
        self.index.lose(content, start, end)

    def move_out(self, content: Content, start: int, end: int) -> None:
        """Release those of pages [start, end) that are here and not pinned: the device has them."""
        self.index.move_out(content, start, end)

    def vacate(self, content: Content, end: int, count: int) -> None:
        """Evict up to `count` of the first `end` pages of `content`, the deepest first."""
        self.index.vacate(content, end, count)

    def note_spilled(self, content: Content, start: int, end: int) -> None:
        """Note that those of pages [start, end) that are here have been copied to the next tier."""
        self.index.note_spilled(content, start, end)

    def num_forsaken(self, limit: int) -> int:
        """Return how many of the next `limit` evictions have waited twice as long as any page that was used."""
        return self.index.num_forsaken(limit)

    def held(self, content: Content, start: int, end: int) -> list[tuple[int, int]]:
        """Return the stretches of pages [start, end) that are here, whether or not earlier pages are."""
        return self.index.stored(content, start, end)

    def absent(self, content: Content, start: int, end: int) -> list[tuple[int, int]]:
        """Return the stretches of pages [start, end) that are neither here nor coming."""
        return self.index.absent(content, start, end)

    def offered(self, holder: int) -> int:
        """Return how many pages are pinned for `holder`."""
        pin = self._pins.get(holder)
        return 0 if pin is None else pin.num_pages

    def coming(self, content: Content, start: int, limit: int, now_ns: int) -> Coming | None:
        """Return the pages from `start` on that other engines are storing: none, unless the tier is shared."""
        return None

    def await_write(self, write: int) -> None:
        """Never called, as there are no such writes."""
        raise NotImplementedError

    def read(self, content: Content, start: int, end: int) -> Pin | None:
        """Begin to read those of pages [start, end) that `find` counts, for the next tier; None without pages.

        They are not pinned for a holder. `end_read` must follow.
        """
        run = self.index.pin_stored(content, start, end)
        if run is None:
            return None
        pin = Pin(content, start, run.end, run, self.index)
        pin.slots = self.index.slots_of(run, start)
        return pin

    def end_read(self, pin: Pin) -> None:
        """End a read. It does not count as a use of the pages, so their recency is unchanged."""
        self.index.unpin(pin.run)

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
    ) -> Placement | None:
        """Make room for those of pages [start, end) that are neither stored nor coming; None without any.

        If there is not room for all, store as many as possible, and at most `limit`: the first, or the last if
        `deepest_first`.
        """
        return self.index.place(content, start, end, deepest_first=deepest_first, limit=limit)

    def complete_store(self, store: Placement, *, is_stored: bool = True) -> None:
        """End a store: its pages become findable, or are dropped."""
        self.index.settle(store, is_stored=is_stored)

    def prepare_load(self, holder: int, num_pages: int | None = None, num_front: int = 0) -> Pin:
        """Begin to load the next `num_pages` pages that were offered to `holder` after the first `num_front`, or all.

        They must have stayed in the tier since: after `reset`, or when pages were found broken, look up again.
        """
        pin = self._pins.pop(holder)
        assert pin.run.state is NodeState.STORED, f"what was offered to {holder} has left the tier since"
        pin.start += num_front
        if num_pages is not None and num_pages < pin.num_pages:
            assert num_pages > 0, "a load of nothing"
            pin.end = pin.start + num_pages
            run = pin.index.pin(pin.content, pin.end)
            pin.index.unpin(pin.run)
            pin.run = run
        pin.slots = pin.index.slots_of(pin.run, pin.start)
        return pin

    def complete_load(self, load: Pin, num_good_pages: int | None = None) -> None:
        """End a load. Pages after the first `num_good_pages` were broken and are dropped."""
        index = load.index
        if num_good_pages is not None and num_good_pages < load.num_pages:
            index.drop(load.content, load.start + num_good_pages)
        index.note_use(load.run, load.start)
        index.touch(load.run)
        index.unpin(load.run)

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

"""A tier below the device: what it promises, and the one that keeps pages in memory, or only counts them.

Everything that takes time is in two halves, and pinned in between: a store is prepared and completed, and so is a load.
Failure is a kind of completion. A holder is whoever asks on behalf of a request, by number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from kvarts.content import Content
from kvarts.offload.channel import Channel
from kvarts.offload.index import NodeState, Placement, Segment, TierIndex, TierRun

__all__ = ["ConnectedTier", "MemoryTier", "OnRemoved", "OnStored", "Tier", "TierLoad", "TierStore"]

OnStored = Callable[[Content, int, int, Content | None], object]
"""Is told of a run that can be found from now on: content, first page, page after the last, the content before it."""

OnRemoved = Callable[[Content, int, int], object]
"""Is told of a run that can no longer be found: content, first page, page after the last."""


class TierStore(msgspec.Struct, eq=False):
    """A store under way. `segments`: the `num_pages` pages of `content` and where they go, root side first."""

    content: Content
    segments: tuple[Segment, ...]
    num_pages: int
    ticket: object
    is_open: bool = True


class TierLoad(msgspec.Struct, eq=False):
    """A load under way. `segments`: the `num_pages` pages of `content` and where they are, root side first."""

    content: Content
    segments: tuple[Segment, ...]
    num_pages: int
    ticket: object
    is_open: bool = True


class Tier(Protocol):
    """Promises: nothing is findable before its store is complete; what is pinned stays; a completion that comes twice
    changes nothing and is counted."""

    name: str
    num_pages: int
    num_stray_completions: int

    @property
    def num_refused(self) -> int:
        """Pages that were to be stored and found no room."""

    @property
    def has_holes(self) -> bool:
        """Whether something here follows what only a faster tier has."""

    @property
    def has_offers(self) -> bool:
        """Whether something is pinned because `lookup` answered it."""

    @property
    def num_evicted(self) -> int:
        """Pages that had to make room for others."""

    @property
    def num_used(self) -> int:
        """Pages that are pinned or coming."""

    @property
    def num_cached(self) -> int:
        """Pages that can be found and are not pinned."""

    def find(self, content: Content, start: int, limit: int) -> int:
        """Pages of `content` that are here from page `start` on, one after the other, up to page `limit`."""

    def held(self, content: Content, start: int, end: int) -> list[tuple[int, int]]:
        """Return the stretches of pages [start, end) that are here, whatever is before them."""

    def lookup(self, holder: int, content: Content, start: int, limit: int) -> int:
        """As `find`, and pin what is answered for `holder`, in place of what was pinned for it before."""

    def offered(self, holder: int) -> int:
        """Return how many pages are pinned for `holder`."""

    def forget(self, holder: int) -> None:
        """Ends what `lookup` pinned for `holder`, if anything."""

    def prepare_store(self, content: Content, start: int, end: int, *, deepest_first: bool = False) -> TierStore | None:
        """Makes room for those of pages [start, end) that are neither here nor coming, or for as many as possible: the
        first, or the last if `deepest_first`. None if these are none."""

    def complete_store(self, store: TierStore, *, is_stored: bool = True) -> bool:
        """The store ended: from now on its pages can be found, or it never was. False if it had ended before."""

    def prepare_load(self, holder: int, num_pages: int | None = None) -> TierLoad:
        """Takes the first `num_pages` that were offered to `holder`, or all."""

    def complete_load(self, load: TierLoad, num_good_pages: int | None = None) -> bool:
        """The load ended. Pages after the first `num_good_pages` were broken: they leave the index. False if it had
        ended before."""

    def is_stored(self, store: TierStore) -> bool:
        """Return whether all of a store that ended is here."""

    def read(self, content: Content, start: int, end: int) -> TierLoad:
        """Begin to read pages [start, end), which are stored, on their way to the next tier; no holder asked for them.

        `end_read` must follow.
        """

    def end_read(self, load: TierLoad) -> None:
        """End what `read` began; it was no use of these pages that should keep them longer."""

    def lose(self, content: Content, start: int, end: int) -> None:
        """Take note that pages [start, end) have left every faster tier."""

    def reset(self) -> None:
        """Forget everything; transfers under way end without being registered."""

    def take_dropped(self) -> tuple[bytes, ...]:
        """Return the keys of files that have to go since last asked; none for a tier without files."""

    def listen(self, on_stored: OnStored | None, on_removed: OnRemoved | None) -> None:
        """From now on tell these of runs that become findable, and of runs that no longer are."""

    def check(self, is_above: Callable[[Content, int], bool]) -> None:
        """Assert laws L1 to L3. `is_above`: whether the first so many pages of a content are in faster tiers."""


class ConnectedTier(msgspec.Struct, frozen=True):
    """A tier, and the channels by which pages go to it and come from it."""

    tier: Tier
    write: Channel
    read: Channel


class _Pin(msgspec.Struct, eq=False):
    content: Content
    start: int
    end: int
    run: TierRun


class MemoryTier:
    """A Tier of `num_pages` pages of memory, with ids (`slots`) where an executor copies into them.

    `on_stored` and `on_removed` are told of runs that become findable and that no longer are: content, first page, page
    after the last, and for the former the content before it.
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
        self.lose = self.index.lose
        self._pins: dict[int, _Pin] = {}

    def listen(self, on_stored: OnStored | None, on_removed: OnRemoved | None) -> None:
        """From now on tell these of runs that become findable, and of runs that no longer are."""
        self.index.on_stored = None if on_stored is None else lambda run: on_stored(*_as_stored(run))
        self.index.on_removed = on_removed

    @property
    def num_refused(self) -> int:
        """Pages that were to be stored and found no room."""
        return self.index.num_refused

    @property
    def num_used(self) -> int:
        """See Tier."""
        return self.index.num_used

    @property
    def num_cached(self) -> int:
        """See Tier."""
        return self.index.num_cached

    @property
    def num_evicted(self) -> int:
        """See Tier."""
        return self.index.num_evicted

    @property
    def has_holes(self) -> bool:
        """Whether something here follows what only the device has."""
        return self.index.num_holes > 0

    @property
    def has_offers(self) -> bool:
        """Whether something is pinned because it was offered."""
        return bool(self._pins)

    def is_stored(self, store: TierStore) -> bool:
        """Whether all of a store that ended is here."""
        assert isinstance(store.ticket, Placement)
        return store.ticket.run.state is NodeState.STORED

    def held(self, content: Content, start: int, end: int) -> list[tuple[int, int]]:
        """The stretches of pages [start, end) that are here, whatever is before them."""
        return [(max(first, start), last) for first, last in self.index.stored(content, end) if last > start]

    def offered(self, holder: int) -> int:
        """Pages that are pinned for `holder`."""
        pin = self._pins.get(holder)
        return 0 if pin is None else pin.end - pin.start

    def read(self, content: Content, start: int, end: int) -> TierLoad:
        """A load that nobody was offered: of pages [start, end), which are stored."""
        pin = _Pin(content, start, end, self.index.pin(content, end))
        return TierLoad(content, (Segment(start, end, self.index.slots_of(pin.run, start)),), end - start, pin)

    def end_read(self, load: TierLoad) -> None:
        """Ends what `read` began; it was no use of these pages that should keep them longer."""
        load.is_open = False
        assert isinstance(load.ticket, _Pin)
        self.index.unpin(load.ticket.run)

    def lookup(self, holder: int, content: Content, start: int, limit: int) -> int:
        """As `find`, and pin what is answered for `holder`."""
        if self._pins:
            self.forget(holder)
        num_pages = self.index.find(content, start, limit)
        if num_pages:
            end = start + num_pages
            self._pins[holder] = _Pin(content, start, end, self.index.pin(content, end))
        return num_pages

    def forget(self, holder: int) -> None:
        """See Tier."""
        pin = self._pins.pop(holder, None)
        if pin is not None:
            self.index.unpin(pin.run)

    def prepare_store(self, content: Content, start: int, end: int, *, deepest_first: bool = False) -> TierStore | None:
        """See Tier."""
        end = min(end, content.num_known_pages)
        placement = self.index.place(content, start, end, deepest_first=deepest_first)
        if placement is None:
            return None
        return TierStore(content, placement.segments, placement.num_pages, placement)

    def complete_store(self, store: TierStore, *, is_stored: bool = True) -> bool:
        """See Tier."""
        if not store.is_open:
            self.num_stray_completions += 1
            return False
        store.is_open = False
        assert isinstance(store.ticket, Placement)
        self.index.settle(store.ticket, is_stored=is_stored)
        return True

    def prepare_load(self, holder: int, num_pages: int | None = None) -> TierLoad:
        """See Tier."""
        pin = self._pins.pop(holder)
        offered = pin.end - pin.start
        if num_pages is not None and num_pages < offered:
            assert num_pages > 0, "a load of nothing"
            pin.end = pin.start + num_pages
            run = self.index.pin(pin.content, pin.end)
            self.index.unpin(pin.run)
            pin.run = run
        slots = self.index.slots_of(pin.run, pin.start)
        return TierLoad(pin.content, (Segment(pin.start, pin.end, slots),), pin.end - pin.start, pin)

    def complete_load(self, load: TierLoad, num_good_pages: int | None = None) -> bool:
        """See Tier."""
        if not load.is_open:
            self.num_stray_completions += 1
            return False
        load.is_open = False
        pin = load.ticket
        assert isinstance(pin, _Pin)
        index = self.index
        if num_good_pages is not None and num_good_pages < pin.end - pin.start:
            index.drop(pin.content, pin.start + num_good_pages)
        index.touch(pin.run)
        index.unpin(pin.run)
        return True

    def drop(self, content: Content, page: int) -> None:
        """Forgets `page` and everything that follows it: it is broken."""
        self.index.drop(content, page)

    def reset(self) -> None:
        """See Tier."""
        self.index.reset()

    def take_dropped(self) -> tuple[bytes, ...]:
        """Return nothing: there are no files."""
        return ()

    def check(self, is_above: Callable[[Content, int], bool]) -> None:
        """Assert laws L1 to L3; see TierIndex.check."""
        self.index.check(is_above)


def _as_stored(run: TierRun) -> tuple[Content, int, int, Content | None]:
    parent = run.parent
    return run.content, run.start, run.end, None if parent is None or not run.start else parent.content

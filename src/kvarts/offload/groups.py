"""A tier for models with several kinds of layers: each KV group keeps pages of its own, and a hit is what all agree on.

A group of full attention needs every page of a prefix. A group with a sliding window needs only the pages that the next
token can look back to; earlier pages are null on the device and are never stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvarts.content import Content
from kvarts.errors import ConfigError
from kvarts.offload.index import Segment
from kvarts.offload.tier import MemoryTier, TierLoad, TierOffer, TierStore

__all__ = ["GroupedTier", "KVGroup"]


class KVGroup(msgspec.Struct, frozen=True):
    """Layers whose KV has pages of its own. `window`: how many tokens they look at, the own one included; None: all.

    Raises ConfigError for a window of no tokens.
    """

    name: str
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ConfigError(f"must be at least 1, got {self.window}", field="window")

    def first_needed(self, num_pages: int, page_size: int) -> int:
        """The first page that the token after `num_pages` pages looks back to."""
        if self.window is None:
            return 0
        return max(0, (num_pages * page_size - (self.window - 1)) // page_size)


class _GroupTicket(msgspec.Struct, eq=False):
    """The parts of one store or load, by group."""

    stores: dict[str, TierStore]
    loads: dict[str, TierLoad]
    start: int = 0


class GroupedTier:
    """A Tier of several MemoryTiers, `num_pages` pages for each of `groups`. Segments are by group, in their order.

    Raises ConfigError for no groups, or two of one name.
    """

    def __init__(
        self, name: str, groups: Sequence[KVGroup], num_pages: int, *, page_size: int, with_slots: bool = False
    ) -> None:
        if not groups or len({group.name for group in groups}) < len(groups):
            raise ConfigError("every group needs a name of its own", field="groups")
        self.name = name
        self.num_pages = num_pages * len(groups)
        self.groups = tuple(groups)
        self.num_stray_completions = 0
        self.parts = {group.name: MemoryTier(group.name, num_pages, with_slots=with_slots) for group in groups}
        self._page_size = page_size
        self._offers: dict[int, tuple[Content, int, int]] = {}

    @property
    def num_used(self) -> int:
        """See Tier."""
        return sum(part.num_used for part in self.parts.values())

    @property
    def num_cached(self) -> int:
        """See Tier."""
        return sum(part.num_cached for part in self.parts.values())

    @property
    def num_evicted(self) -> int:
        """See Tier."""
        return sum(part.num_evicted for part in self.parts.values())

    def find(self, content: Content, start: int, limit: int) -> int:
        """See Tier. The longest hit that every group can serve."""
        end = limit
        while end > start:
            agreed = end
            for group in self.groups:
                agreed = self._longest(group, content, start, agreed)
            if agreed == end:
                return end - start
            end = agreed
        return 0

    def lookup(self, holder: int, content: Content, start: int, limit: int) -> TierOffer:
        """See Tier."""
        self.forget(holder)
        num_pages = self.find(content, start, limit)
        if num_pages:
            self._pin(holder, content, start, start + num_pages)
        return TierOffer(num_pages, is_async=True)

    def forget(self, holder: int) -> None:
        """See Tier."""
        if self._offers.pop(holder, None) is not None:
            for part in self.parts.values():
                part.forget(holder)

    def prepare_store(
        self,
        content: Content,
        start: int,
        end: int,
        *,
        deepest_first: bool = False,
        held_from: Mapping[str, int] | None = None,
    ) -> TierStore | None:
        """See Tier. `held_from`: the first page of each group that the device still has; those before are null."""
        stores = {}
        for name, part in self.parts.items():
            first = max(start, (held_from or {}).get(name, 0))
            if first < end and (store := part.prepare_store(content, first, end, deepest_first=deepest_first)):
                stores[name] = store
        if not stores:
            return None
        segments = tuple(segment for store in stores.values() for segment in store.segments)
        num_pages = sum(store.num_pages for store in stores.values())
        return TierStore(content, segments, num_pages, _GroupTicket(stores, {}))

    def complete_store(self, store: TierStore, *, is_stored: bool = True) -> bool:
        """See Tier."""
        if not store.is_open:
            self.num_stray_completions += 1
            return False
        store.is_open = False
        assert isinstance(store.ticket, _GroupTicket)
        for name, part in store.ticket.stores.items():
            self.parts[name].complete_store(part, is_stored=is_stored)
        return True

    def prepare_load(self, holder: int, num_pages: int | None = None) -> TierLoad:
        """See Tier. Where fewer pages are taken than were offered, all groups have to agree on so many."""
        content, start, end = self._offers[holder]
        if num_pages is not None and start + num_pages < end:
            end = start + self.find(content, start, start + num_pages)
            self.forget(holder)
            if end > start:
                self._pin(holder, content, start, end)
        self._offers.pop(holder, None)
        ticket = _GroupTicket({}, {}, start)
        segments: list[Segment] = []
        for group in self.groups if end > start else ():
            part = self.parts[group.name]
            if not part.offered(holder):
                continue
            load = ticket.loads[group.name] = part.prepare_load(holder)
            segments += load.segments
        num_pages = sum(load.num_pages for load in ticket.loads.values())
        return TierLoad(content, tuple(segments), num_pages, ticket)

    def complete_load(self, load: TierLoad, num_good_pages: int | None = None) -> bool:
        """See Tier. `num_good_pages` counts positions, not pages of each group."""
        if not load.is_open:
            self.num_stray_completions += 1
            return False
        load.is_open = False
        ticket = load.ticket
        assert isinstance(ticket, _GroupTicket)
        for name, part in ticket.loads.items():
            if num_good_pages is not None:
                self.parts[name].drop(load.content, ticket.start + num_good_pages)
            self.parts[name].complete_load(part)
        return True

    def lose(self, content: Content, start: int, end: int) -> None:
        """See Tier."""
        for group in self.groups:
            if group.window is None:
                self.parts[group.name].lose(content, start, end)

    def reset(self) -> None:
        """See Tier."""
        self._offers.clear()
        for part in self.parts.values():
            part.reset()

    def _pin(self, holder: int, content: Content, start: int, end: int) -> None:
        self._offers[holder] = content, start, end
        for group in self.groups:
            first = max(start, group.first_needed(end, self._page_size))
            if first < end:
                self.parts[group.name].lookup(holder, content, first, end)

    def _longest(self, group: KVGroup, content: Content, start: int, end: int) -> int:
        """The longest hit up to page `end` that `group` can serve, if the device has everything up to `start`."""
        index = self.parts[group.name].index
        if group.window is None:
            return start + index.find(content, start, end)
        if group.first_needed(end, self._page_size) >= end:
            return end  # it looks back to nothing
        for first, last in reversed(index.stored(content, end)):
            if last <= start:
                break
            # From `last` down, the window covers ever earlier pages; they must lie in this stretch or on the device.
            if max(start, group.first_needed(last, self._page_size)) >= first:
                return last
        return start

"""L1 to L3 and the order of eviction in a tier below the device: against a dictionary and a list of pages."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvarts.core.content import Content
from kvarts.core.tiers.index import Placement
from kvarts.core.tiers.store_policy import Duplicates
from kvarts.core.tiers.tier import MemoryTier, Pin

from builders.pages import page_name
from oracles.naive_tier import Entry, NaivePlacement, NaiveTier, Name, follows

pytestmark = pytest.mark.laws


@dataclass
class StoreUnderWay:
    store: Placement
    naive: NaivePlacement


@dataclass
class LoadUnderWay:
    load: Pin
    names: list[Name]
    start: int
    pinned: list[Entry]


class TierMachine(RuleBasedStateMachine):
    """The device is a set of pages that is closed under prefixes; what is stored from it is held there."""

    with_slots = False

    @initialize(num_pages=st.integers(1, 8) | st.integers(1, 24), page_size=st.sampled_from([1, 2]))
    def build(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.removed: list[Name] = []
        self.tier = MemoryTier("host", num_pages, with_slots=self.with_slots)
        self.tier.listen(None, self.on_removed)
        self.model = NaiveTier(num_pages)
        self.duplicates = Duplicates([self.tier], num_free=0, num_here=self.num_here)
        self.again: list[Name] = []
        self.device: set[Name] = set()
        self.contents: list[Content] = []
        self.stores: list[StoreUnderWay] = []
        self.loads: list[LoadUnderWay] = []
        self.offers: dict[int, tuple[Content, int, int, list[Entry]]] = {}

    def on_removed(self, content: Content, start: int, end: int) -> None:
        self.removed += self.names(content, end)[start:]

    def names(self, content: Content, end: int) -> list[Name]:
        return [page_name(content, page) for page in range(end)]

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), tenant=st.sampled_from([None, None, "a"]))
    def arrive(self, tokens: list[int], tenant: str | None) -> None:
        content = Content.from_tokens(tokens, page_size=self.page_size, owner=len(self.contents), salt=tenant)
        self.contents.append(content)

    @precondition(lambda self: self.contents)
    @rule(data=st.data(), start=st.sampled_from([0, 0, 0, 1, 2, 4]), length=st.integers(1, 12))
    def prepare_store(self, data: st.DataObject, start: int, length: int) -> None:
        content = data.draw(st.sampled_from(self.contents))
        end = min(start + length, content.num_known_pages)
        if start >= end:
            return
        names = self.names(content, end)
        self.device.update(names)
        store = self.tier.prepare_store(content, start, end)
        expected = self.model.place(names, start)
        assert (store is None) == (expected is None)
        if store is None or expected is None:
            return
        places = [page for segment in store.segments for page in range(segment.start, segment.end)]
        assert [names[page] for page in places] == [entry.name for entry in expected.new]
        self.stores.append(StoreUnderWay(store, expected))

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), is_stored=st.sampled_from([True, True, True, False]))
    def complete_store(self, data: st.DataObject, is_stored: bool) -> None:
        done = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
        self.tier.complete_store(done.store, is_stored=is_stored)
        self.model.settle(done.naive, is_stored=is_stored)

    @precondition(lambda self: self.contents)
    @rule(data=st.data(), holder=st.integers(0, 2))
    def lookup(self, data: st.DataObject, holder: int) -> None:
        content = data.draw(st.sampled_from(self.contents))
        limit = data.draw(st.integers(0, content.num_known_pages))
        names = self.names(content, limit)
        num_on_device = next((i for i, name in enumerate(names) if name not in self.device), limit)
        start = data.draw(st.integers(0, num_on_device))
        if holder in self.offers:
            self.model.unpin(self.offers.pop(holder)[3])
        expected = self.model.find(names, start)
        assert self.tier.find(content, start, limit) == expected
        assert self.tier.lookup(holder, content, start, limit) == expected
        if expected:
            self.offers[holder] = (content, start, start + expected, self.model.pin(names[: start + expected]))

    @precondition(lambda self: self.offers)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted(self.offers)))
        self.tier.forget(holder)
        self.tier.forget(holder)
        self.model.unpin(self.offers.pop(holder)[3])

    @precondition(lambda self: self.offers)
    @rule(data=st.data())
    def prepare_load(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted(self.offers)))
        content, start, end, pinned = self.offers[holder]
        names = self.names(content, end)
        if any(entry.state != "stored" for entry in pinned[start:]):
            return  # dropped since, even if stored anew; an engine asks again in the step in which it loads
        del self.offers[holder]
        accepted = data.draw(st.integers(1, end - start))
        load = self.tier.prepare_load(holder, data.draw(st.sampled_from([accepted, accepted, None])))
        accepted = load.num_pages
        self.model.unpin(pinned[start + accepted :])
        self.loads.append(LoadUnderWay(load, names[: start + accepted], start, pinned[: start + accepted]))

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), is_whole=st.sampled_from([True, True, False]))
    def complete_load(self, data: st.DataObject, is_whole: bool) -> None:
        done = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        num_good = None if is_whole else data.draw(st.integers(0, done.load.num_pages))
        self.tier.complete_load(done.load, num_good)
        if num_good is not None and num_good < done.load.num_pages:
            name = done.names[done.start + num_good]
            if name in self.model.entries:
                self.model.drop(name)
        self.model.note_use(done.pinned[done.start :])
        self.model.touch(done.pinned)
        self.model.unpin(done.pinned)

    @precondition(lambda self: self.device)
    @rule(data=st.data())
    def device_evicts(self, data: st.DataObject) -> None:
        held = {entry.name for under_way in self.stores for entry in under_way.naive.pinned}
        held |= {name for load in self.loads for name in load.names[: load.start]}
        leaves = [
            (content, page)
            for content in self.contents
            for page, name in enumerate(self.names(content, content.num_known_pages))
            if name in self.device - held and not any(other != name and follows(other, name) for other in self.device)
        ]
        if leaves:
            content, page = data.draw(st.sampled_from(leaves))
            name = self.names(content, page + 1)[page]
            self.device.discard(name)
            self.tier.lose(content, page, page + 1)
            self.model.lose(name)

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def move_out(self, data: st.DataObject) -> None:
        content = data.draw(st.sampled_from(self.contents))
        end = data.draw(st.integers(0, content.num_known_pages))
        start = data.draw(st.integers(0, end))
        names = self.names(content, end)
        if not self.device.issuperset(names):
            return
        self.tier.move_out(content, start, end)
        for name in names[start:]:
            if name in self.model.entries:
                self.model.move_out(name)

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def is_spilled(self, data: st.DataObject) -> None:
        """The next tier has copies of some pages."""
        content = data.draw(st.sampled_from(self.contents))
        end = data.draw(st.integers(0, content.num_known_pages))
        start = data.draw(st.integers(0, end))
        self.tier.note_spilled(content, start, end)
        for name in self.names(content, end)[start:]:
            if self.model.is_stored(name):
                self.model.entries[name].is_spilled = True

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def comes_again(self, data: st.DataObject) -> None:
        """The device has a page, and those before it, again."""
        content = data.draw(st.sampled_from(self.contents))
        end = data.draw(st.integers(0, content.num_known_pages))
        start = data.draw(st.integers(0, end))
        names = self.names(content, end)
        if start < end and self.device.issuperset(names):
            self.duplicates.add(content, start, end)
            self.again += names[start:]

    @rule(num_pages=st.integers(0, 8))
    def make_room(self, num_pages: int) -> None:
        self.duplicates.make_room(num_pages)
        self.model.release_duplicates(self.again, self.device, num_pages)

    def num_here(self, content: Content, end: int) -> int:
        """Return how many of the first pages of a content the device has."""
        return next((n for n, name in enumerate(self.names(content, end)) if name not in self.device), end)

    @rule()
    def reset(self) -> None:
        if len(self.contents) % 5 == 4:
            self.tier.reset()
            self.model.reset()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "tier"):
            return
        tier, model = self.tier, self.model

        def is_above(content: Content, num_pages: int) -> bool:
            return all(name in self.device for name in self.names(content, num_pages))

        tier.check(is_above)
        assert tier.index.pool.num_empty == model.num_empty
        assert tier.num_cached_blocks == model.num_cached()
        assert tier.num_used_blocks + tier.num_cached_blocks + model.num_empty == self.num_pages
        in_order = [
            (page_name(run.content, page), run.is_spilled)
            for run in tier.index.recency()
            for page in range(run.end - 1, run.start - 1, -1)
        ]
        assert in_order == [(entry.name, entry.is_spilled) for entry in model.recency]
        assert sorted(map(str, self.removed)) == sorted(map(str, model.removed))
        assert tier.index.longest_wait == model.longest_wait
        for limit in range(4):
            assert tier.num_forsaken(limit) == min(limit, model.num_forsaken())
        if not (self.stores or self.loads or self.offers):
            assert tier.num_used_blocks == 0, "L2: at rest something is held"


class SlotMachine(TierMachine):
    with_slots = True


TestCountedTier = TierMachine.TestCase
TestTierWithSlots = SlotMachine.TestCase
for case in (TestCountedTier, TestTierWithSlots):
    case.settings = settings(stateful_step_count=50)
del case

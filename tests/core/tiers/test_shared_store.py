"""A store that engines share, against one page by page that knows who stored what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvarts.core.content import Content
from kvarts.core.tiers.index import Placement
from kvarts.core.tiers.links import StoreLinks
from kvarts.core.tiers.shared_store import SharedStore
from kvarts.core.tiers.tier import Pin

from builders.pages import page_name
from oracles.naive_store import NaiveStore
from oracles.naive_tier import Entry, NaivePlacement, Name

pytestmark = pytest.mark.laws


@dataclass
class StoreUnderWay:
    worker: int
    store: Placement
    naive: NaivePlacement


@dataclass
class LoadUnderWay:
    worker: int
    load: Pin
    pinned: list[Entry]


class StoreMachine(RuleBasedStateMachine):
    """Three engines, whose devices keep what the others do not: a page may be stored without those before it."""

    @initialize(num_pages=st.integers(1, 24), page_size=st.sampled_from([1, 2]))
    def build(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.shared = SharedStore(num_pages, 1, StoreLinks(1e9, 1e9, 0))
        self.model = NaiveStore(num_pages)
        self.told: list[set[Name]] = [set() for _ in range(3)]
        self.owners: list[set[int]] = [set() for _ in range(3)]
        """The requests with whose pages each engine stores."""
        for worker in range(3):
            self.shared.open_view(worker, None, 1, None)
            self.shared.views[worker].listen(self.hears_of(worker, is_stored=True), self.hears_of(worker))
        self.loaded: list[Counter[int]] = [Counter() for _ in range(3)]
        self.moving = [0, 0, 0]
        self.contents: list[Content] = []
        self.stores: list[StoreUnderWay] = []
        self.loads: list[LoadUnderWay] = []

    def hears_of(self, worker: int, *, is_stored: bool = False):  # type: ignore[no-untyped-def]
        def hear(content: Content, start: int, end: int, _: object = None) -> None:
            assert content.owner in self.owners[worker]
            names = set(self.names(content, end)[start:])
            assert not (names & self.told[worker] if is_stored else names - self.told[worker])
            self.told[worker] ^= names

        return hear

    def names(self, content: Content, end: int) -> list[Name]:
        return [page_name(content, page) for page in range(end)]

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), tenant=st.sampled_from([None, None, "a"]))
    def arrive(self, tokens: list[int], tenant: str | None) -> None:
        content = Content.from_tokens(tokens, page_size=self.page_size, owner=len(self.contents), salt=tenant)
        self.contents.append(content)

    @precondition(lambda self: self.contents)
    @rule(data=st.data(), worker=st.integers(0, 2), start=st.sampled_from([0, 0, 0, 1, 4]), length=st.integers(1, 12))
    def prepare_store(self, data: st.DataObject, worker: int, start: int, length: int) -> None:
        content = data.draw(st.sampled_from(self.contents))
        end = min(start + length, content.num_known_pages)
        if start >= end:
            return
        names = self.names(content, end)
        self.owners[worker].add(content.owner)
        store = self.shared.views[worker].prepare_store(content, start, end)
        expected = self.model.store(worker, names, start)
        assert (store is None) == (expected is None)
        if store is None or expected is None:
            return
        places = [page for segment in store.segments for page in range(segment.start, segment.end)]
        assert [names[page] for page in places] == [entry.name for entry in expected.new]
        self.moving[worker] += len(places)
        self.stores.append(StoreUnderWay(worker, store, expected))

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), is_stored=st.sampled_from([True, True, True, False]))
    def complete_store(self, data: st.DataObject, is_stored: bool) -> None:
        done = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
        self.shared.views[done.worker].complete_store(done.store, is_stored=is_stored)
        self.model.settle(done.naive, is_stored=is_stored)
        self.moving[done.worker] -= len(done.naive.new)

    @precondition(lambda self: self.contents)
    @rule(data=st.data(), worker=st.integers(0, 2), is_wanted=st.booleans())
    def load(self, data: st.DataObject, worker: int, is_wanted: bool) -> None:
        content = data.draw(st.sampled_from(self.contents))
        limit = data.draw(st.integers(0, content.num_known_pages))
        start = data.draw(st.integers(0, limit))
        names = self.names(content, limit)
        view = self.shared.views[worker]
        expected = self.model.find(names, start)
        assert view.find(content, start, limit) == expected
        assert view.lookup(7, content, start, limit) == expected
        if not expected or not is_wanted:
            view.forget(7)
            return
        accepted = data.draw(st.integers(1, expected))
        load = view.prepare_load(7, accepted)
        assert load.num_pages == accepted
        self.loaded[worker].update(self.model.writers[name] for name in names[start : start + accepted])
        self.moving[worker] += accepted
        self.loads.append(LoadUnderWay(worker, load, self.model.pin(names[: start + accepted])))

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), is_whole=st.booleans())
    def complete_load(self, data: st.DataObject, is_whole: bool) -> None:
        """What did not arrive is still in the store."""
        done = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        self.shared.views[done.worker].complete_load(done.load, None if is_whole else 0)
        self.model.touch(done.pinned)
        self.model.unpin(done.pinned)
        self.moving[done.worker] -= done.load.num_pages

    @rule(worker=st.integers(0, 2))
    def lose_worker(self, worker: int) -> None:
        self.shared.views[worker].reset()

    @precondition(lambda self: self.contents)
    @rule(data=st.data(), worker=st.integers(0, 2))
    def evict_on_device(self, data: st.DataObject, worker: int) -> None:
        content = data.draw(st.sampled_from(self.contents))
        self.shared.views[worker].lose(content, 0, content.num_known_pages)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "shared"):
            return
        index, model = self.shared.index, self.model
        self.shared.views[0].check(lambda _content, _num_pages: False)
        assert (index.pool.num_empty, index.num_cached) == (model.num_empty, model.num_cached())
        in_order = [
            page_name(run.content, page) for run in index.recency() for page in range(run.end - 1, run.start - 1, -1)
        ]
        assert in_order == [entry.name for entry in model.recency]
        assert index.num_evicted == len(model.evicted)
        for worker, view in self.shared.views.items():
            assert self.told[worker] == model.of_writer(worker)
            assert self.shared.num_loaded()[worker] == dict(self.loaded[worker])
            assert (view.num_used_blocks, view.num_cached_blocks) == (self.moving[worker], 0)
        assert sum(view.num_evicted_blocks for view in self.shared.views.values()) == index.num_evicted


TestStore = StoreMachine.TestCase
TestStore.settings = settings(stateful_step_count=40)


def test_an_engine_that_stores_what_precedes_the_pages_of_another_tells_of_its_own_request() -> None:
    shared = SharedStore(8, 1, StoreLinks(1e9, 1e9, 0))
    told: list[list[tuple[int, int, int]]] = [[], []]

    def hears_of(worker: int) -> Callable[..., None]:
        return lambda content, start, end, _=None: told[worker].append((content.owner, start, end))

    for worker in range(2):
        view = shared.open_view(worker, None, 1, None)
        view.listen(hears_of(worker), hears_of(worker))
    for worker, start in ((1, 2), (0, 0)):
        content = Content.from_tokens(range(4), page_size=1, owner=10 + worker)
        store = shared.views[worker].prepare_store(content, start, 4)
        assert store is not None
        shared.views[worker].complete_store(store)
    assert told == [[(10, 0, 2)], [(11, 2, 4)]]
    assert shared.views[0].prepare_store(Content.from_tokens(range(9, 17), page_size=1, owner=12), 0, 8) is not None
    assert told == [[(10, 0, 2)] * 2, [(11, 2, 4)] * 2]

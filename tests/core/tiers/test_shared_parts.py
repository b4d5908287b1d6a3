"""A store that engines with KV groups share, against one part by part of which every engine has a view."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvarts.core.content import Content
from kvarts.core.events import Event, PagesRemoved, PagesStored
from kvarts.core.kv.groups import GroupMemory, PartGroup, Retention
from kvarts.core.kv.layers import KvLayer
from kvarts.core.kv.run_cache import RunCache
from kvarts.core.kv.runs import table_of_transfer
from kvarts.core.tiers.links import StoreLinks
from kvarts.core.tiers.part_tier import PartTier
from kvarts.core.tiers.shared_parts import SharedParts

from builders.grouped import FULL, WINDOW
from builders.tiered_machine import TieredMachine, part_groups, prompts
from builders.tiers import store_parts
from oracles.naive_group_tier import NaiveBelow, NaiveTier, NaiveTieredGroups

pytestmark = pytest.mark.laws

NUM_ENGINES = 3


class StoreMachine(TieredMachine):
    """Engines with host memory, files, or nothing between their devices and the store; all rules act on one of them."""

    @initialize(
        first=part_groups(("full", "full", "window", "latent", "chunk")),
        others=st.lists(part_groups(("full", "window", "window", "chunk", "state")), max_size=2),
        page_size=st.integers(1, 3),
        num_blocks=st.sampled_from([8, 12, 20, 40]),
        store_blocks=st.sampled_from([3, 10, 40, 100]),
        sizes=st.lists(
            st.sampled_from([[], [], [3], [10], [40], [10, 40], [5, 10, 40]]),
            min_size=NUM_ENGINES,
            max_size=NUM_ENGINES,
        ),
        limit=st.sampled_from([1, 4, 100]),
        keeps=st.sampled_from(["all", "tails"]),
    )
    def build(
        self,
        first: PartGroup,
        others: list[PartGroup],
        page_size: int,
        num_blocks: int,
        store_blocks: int,
        sizes: list[list[int]],
        limit: int,
        keeps: Retention,
    ) -> None:
        memory = GroupMemory((first, *others), keeps)
        self.num_owners = 0
        self.tokens_of = {}
        self.served = []
        links, most_above = StoreLinks(1e9, 1e9, 0), max(map(len, sizes))
        self.shared = SharedParts(store_blocks, 1, links, memory=memory, page_size=page_size, most_above=most_above)
        self.shared.before_removal = self.caught_up
        self.last_caught_up = -1
        self.told: list[set[Any]] = [set() for _ in range(NUM_ENGINES)]
        naive = NaiveTier(
            store_blocks * memory.block_bytes, [group.part_bytes for group in memory.groups], is_shared=True
        )
        of_all = set(self.__dict__)
        self.engines: list[dict[str, Any]] = []
        for engine in range(NUM_ENGINES):
            view = self.shared.open_view(engine, memory, page_size, self.hears_of(engine))
            self.open_engine(memory, page_size, num_blocks, sizes[engine], limit, more=(view, naive.view()))
            self.names = set(self.__dict__) - of_all - {"engines", "names"}
            self.engines.append({name: getattr(self, name) for name in self.names})
        self.engine = NUM_ENGINES - 1

    def caught_up(self, engine: int) -> None:
        self.last_caught_up = engine

    def hears_of(self, engine: int):  # type: ignore[no-untyped-def]
        def hear(event: Event) -> None:
            assert isinstance(event, PagesStored | PagesRemoved)
            assert event.medium == "store"
            names = {
                (event.group, self.name_of(event.content, page)) for page in range(event.start_page, event.end_page)
            }
            if isinstance(event, PagesStored):
                assert not names & self.told[engine]
            else:
                assert not names - self.told[engine]
            self.told[engine] ^= names

        return hear

    def has_host(self) -> bool:
        return len(self.tiers) > 1

    def account_of(self, tier: PartTier) -> PartTier:
        return self.shared.parts if tier.is_elsewhere else tier

    @rule(engine=st.integers(0, NUM_ENGINES - 1))
    def switch(self, engine: int) -> None:
        """Let the next rules act on another engine."""
        self.engines[self.engine] = {name: getattr(self, name) for name in self.names}
        self.__dict__.update(self.engines[engine])
        self.engine = engine

    @rule(data=st.data(), engine=st.integers(0, NUM_ENGINES - 1), tokens=prompts())
    def serve_elsewhere(self, data: st.DataObject, engine: int, tokens: list[int]) -> None:
        """Another engine stores a prompt, and this one has nothing of it."""
        before = self.engine
        self.switch(engine)
        self.serve(tokens)
        self.switch(before)
        self.forget_device()

    @precondition(lambda self: self.served)
    @rule(data=st.data())
    def look_for_what_comes(self, data: st.DataObject) -> None:
        """A request may wait for what other engines store."""
        tokens = [*data.draw(st.sampled_from(self.served)), 1]
        for number, write in enumerate(self.shared.writes.values()):
            write.transfer = number
        limit = (len(tokens) - 1) // self.cache.page_size
        start = self.model.hit_below(tokens, None, limit, len(self.tiers))
        length, coming = self.model.hit_with_coming(tokens, None, limit)
        found = self.offloader.coming(self.content_of(tokens, None), start, limit)
        if length == start:
            assert found is None
        else:
            assert coming
            assert found is not None and found.num_pages == length - start
            self.offloader.await_write(found.write)
            assert next(write.waiting for write in self.shared.writes.values() if write.number == found.write)

    @rule()
    def lose_engine(self) -> None:
        """What an engine that fails has stored stays."""
        self.shared.views[self.engine].reset()

    @precondition(lambda self: hasattr(self, "shared"))
    @rule()
    def writers_know_what_they_have_stored(self) -> None:
        known: set[Any] = set().union(*self.told)
        naive = self.model.below[-1]
        assert known == set(naive.here)
        assert sum(map(len, self.told)) == len(known), "two engines have stored the same part"

    def teardown(self) -> None:
        if not hasattr(self, "shared"):
            return
        self.writers_know_what_they_have_stored()
        for engine in range(NUM_ENGINES):
            self.switch(engine)
            super().teardown()
        assert not self.shared.pins and not self.shared.writes
        parts = self.shared.parts
        parts.evict(parts.total_bytes)
        assert not any(root.children for root in self.shared.tree.roots.values()), "a span outlives its parts"


TestSharedParts = StoreMachine.TestCase
TestSharedParts.settings = settings(stateful_step_count=40)


class Drawn:
    """Draws these values."""

    def __init__(self, *values: Any) -> None:
        self._values = list(values)

    def draw(self, _strategy: object) -> Any:
        return self._values.pop(0)


def test_a_load_is_a_use_of_the_store_although_its_device_has_lost_all_that_it_brought() -> None:
    """A step used it early, and its request has ended before it."""
    machine: Any = StoreMachine()
    machine.build(
        first=PartGroup(FULL, 1), others=[], page_size=1, num_blocks=8, store_blocks=10, sizes=[[]] * NUM_ENGINES,
        limit=100, keeps="all",
    )  # fmt: skip
    machine.serve_elsewhere(Drawn(), engine=1, tokens=[1, 0, 1])
    machine.load(
        Drawn(False), tokens=[1, 0, 1, 1], tenant=None, is_forgotten=False, is_cleared=False, ends=False, depths=(),
        has_front=False,
    )  # fmt: skip
    machine.use_early(Drawn(*machine.loads))
    machine.close(Drawn(0))
    machine.serve_elsewhere(Drawn(), engine=1, tokens=[0, 0])
    machine.forget_device()
    machine.end_used(Drawn(0))
    machine.agrees()
    assert [part.key[1][1] for part in machine.model.below[-1].idle()] == [(0, 0), (0,), (1, 0, 1), (1, 0), (1,)]
    machine.teardown()


def test_runs_of_one_span_that_two_engines_have_stored_stay_apart() -> None:
    """Each is told the eviction of what it has stored, although both were used together."""
    memory = GroupMemory((PartGroup(KvLayer(kind="full", num_heads=1, head_numbers=2), part_bytes=1),))
    shared = SharedParts(6, 1, StoreLinks(1e9, 1e9, 0), memory=memory, page_size=1)
    told: list[list[tuple[type, int, int]]] = [[], []]

    def reader(engine: int) -> Any:
        return lambda event: told[engine].append((type(event), event.start_page, event.end_page))

    views = [shared.open_view(engine, memory, 1, reader(engine)) for engine in range(2)]
    content = Content.from_tokens(range(6), page_size=1, owner=0)
    with shared.tree.spans_of(content, 6) as ((span, _, _),):
        for engine, start in enumerate((0, 3)):
            pin = table_of_transfer(1)
            views[engine].place(span, 0, start, start + 3, pin)
            views[engine].settle(pin, is_stored=True)
    views[0].touch(content, 6)
    shared.parts.evict(6)
    assert told == [[(PagesStored, 0, 3), (PagesRemoved, 0, 3)], [(PagesStored, 3, 6), (PagesRemoved, 3, 6)]]


ZEROS, PARTED = [0] * 8, [0] * 5 + [1] * 3


@example(
    first=PartGroup(FULL, 1),
    others=[WINDOW],
    page_size=1,
    parts=[(True, ZEROS, 0, 0, 8), (True, ZEROS, 1, 0, 5), (False, PARTED, 1, 3, 5)],
    wanted=PARTED,
)
@example(
    first=PartGroup(FULL, 1),
    others=[WINDOW],
    page_size=1,
    parts=[(True, PARTED, 0, 0, 8), (False, ZEROS, 1, 0, 8), (True, PARTED, 1, 6, 1)],
    wanted=PARTED,
)
@given(
    first=part_groups(("full", "full", "window", "latent", "chunk")),
    others=st.lists(part_groups(("full", "window", "window", "chunk", "state")), max_size=2),
    page_size=st.integers(1, 2),
    parts=st.lists(
        st.tuples(st.booleans(), prompts(), st.integers(0, 2), st.integers(0, 12), st.integers(1, 14)), max_size=12
    ),
    wanted=prompts(),
)
def test_a_match_across_trees_finds_what_a_match_by_part_finds(
    first: PartGroup,
    others: list[PartGroup],
    page_size: int,
    parts: list[tuple[bool, list[int], int, int, int]],
    wanted: list[int],
) -> None:
    """Any parts of any sequences are in the tree of an engine, or in that of the store, and of each as many as fit."""
    memory = GroupMemory((first, *others))
    cache = RunCache(memory, page_size=page_size, total_bytes=100, num_below=1)
    shared = SharedParts(1000, 1, StoreLinks(1e9, 1e9, 0), memory=memory, page_size=page_size)
    sizes = [group.part_bytes for group in memory.groups]
    naive = NaiveTieredGroups(
        [(group.layer, group.part_bytes) for group in memory.groups], page_size, 100, keeps_all=True,
        below=[NaiveTier(10**6, sizes), NaiveTier(10**6, sizes)],
    )  # fmt: skip
    tiers = PartTier("host", 1000, memory, cache.tree), shared.parts
    trees = cache.tree, shared.tree
    for owner, (is_shared, tokens, number, first_page, length) in enumerate(parts):
        group = number % len(memory.groups)
        tier, tree = tiers[is_shared], trees[is_shared]
        content = Content.from_tokens(tokens, page_size=page_size, owner=owner)
        end = min(first_page + length, len(tokens) // page_size)
        if first_page >= end:
            continue
        start = end - 1 if memory.groups[group].is_state else first_page
        store_parts(tier, tree, content, group, start, end)
        for page in range(start, end):
            key = group, naive.name(tokens, None, page)
            naive.below[is_shared].here[key] = NaiveBelow(key)
    limit = len(wanted) // page_size
    content = Content.from_tokens(wanted, page_size=page_size, owner=100)
    match = cache.tree.match_across(content, limit, shared.tree, shared.parts.lists, depth=1)
    assert match.num_pages == naive.hit_below(wanted, None, limit, 2)
    found = [
        (run.list_index > 3 * len(memory.groups), group, page)
        for group, pieces in enumerate(match.pieces or ())
        for run, start, end in pieces
        for page in range(start, end)
    ]
    needs = naive.needs(wanted, None, match.num_pages)
    assert found == [(key not in naive.below[0].here, key[0], naive.page_of(key)) for key in needs]

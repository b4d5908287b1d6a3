"""Ids of pages as runs, against lists of them, and the page tables that a cache of KV groups makes of them."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvarts.core.content import Content
from kvarts.core.kv.cache import PageReserve
from kvarts.core.kv.group_pages import GroupPages
from kvarts.core.kv.groups import STATE_SPAN, GroupMemory, PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.core.kv.pool import IdPool, PageError, PageId, PageIds, are_all_once

from builders.grouped import FULL

pytestmark = pytest.mark.laws

NUM_PAGES = 12
BY_PAGE = PartGroup(KvLayer(kind="state", state_bytes=1, span=STATE_SPAN), 3)
Ids = st.lists(st.integers(0, NUM_PAGES - 1).map(PageId))


class Runs(RuleBasedStateMachine):
    """Every call does what it does to a list."""

    @initialize(page_ids=Ids)
    def begin(self, page_ids: list[PageId]) -> None:
        self.naive, self.ids = page_ids, PageIds(page_ids)

    @rule(first=st.integers(0, NUM_PAGES - 1), length=st.integers(0, 4), step=st.sampled_from([-1, 1]))
    def extend(self, first: int, length: int, step: int) -> None:
        more = [PageId(first + step * place) for place in range(length)]
        self.naive += more
        self.ids.extend(PageIds(more))

    @rule(more=Ids)
    def add(self, more: list[PageId]) -> None:
        assert list(self.ids.with_more(PageIds(more))) == self.naive + more
        self.ids.add(more)
        self.naive += more

    @precondition(lambda self: self.naive)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.naive)))
        match data.draw(st.sampled_from(["first", "cut", "pop"])):
            case "first":
                assert list(self.ids.take_first(at)) == self.naive[:at]
                self.naive = self.naive[at:]
            case "cut":
                assert list(self.ids.cut(at)) == self.naive[at:]
                self.naive = self.naive[:at]
            case _:
                assert list(self.ids.pop(len(self.naive) - at)) == self.naive[at:][::-1]
                self.naive = self.naive[:at]

    @rule(start=st.integers(0, 20), end=st.integers(0, 20), step=st.integers(1, 5))
    def look(self, start: int, end: int, step: int) -> None:
        assert list(self.ids.part(start, end)) == self.naive[start:end]
        assert self.ids.every(step, start) == self.naive[start::step]
        assert list(self.ids.backwards()) == self.naive[::-1]

    @invariant()
    def is_the_same(self) -> None:
        assert (list(self.ids), len(self.ids), bool(self.ids)) == (self.naive, len(self.naive), bool(self.naive))
        assert are_all_once([self.ids], len(self.naive)) == (sorted(self.naive) == list(range(len(self.naive))))


class Pools(RuleBasedStateMachine):
    """Ids are taken in the order of a stack of them, the least first in the beginning."""

    @initialize(total=st.integers(0, 40))
    def begin(self, total: int) -> None:
        self.total, self.pool = total, IdPool(total)
        self.naive = list(range(total - 1, -1, -1))
        self.taken: list[list[PageId]] = []

    @rule(count=st.integers(0, 12), in_runs=st.booleans())
    def take(self, count: int, in_runs: bool) -> None:
        if count > len(self.naive):
            with pytest.raises(PageError):
                self.pool.take_runs(count)
            return
        taken = list(self.pool.take_runs(count)) if in_runs else self.pool.take(count)
        assert taken == [self.naive.pop() for _ in range(count)]
        self.taken.append(taken)

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), in_runs=st.booleans())
    def give(self, data: st.DataObject, in_runs: bool) -> None:
        given = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        at = data.draw(st.integers(0, len(given)))
        given, kept = given[:at], given[at:]
        self.taken.append(kept)
        if in_runs:
            self.pool.give_runs(PageIds(given))
        else:
            self.pool.give(len(given), given)
        self.naive += given

    @invariant()
    def is_the_same(self) -> None:
        assert list(self.pool.empty_ids) == self.naive
        assert (self.pool.num_empty, self.pool.num_taken) == (len(self.naive), self.total - len(self.naive))
        assert are_all_once([self.pool.empty, *map(PageIds, self.taken)], self.total)


TestRuns = Runs.TestCase
TestPools = Pools.TestCase


def test_a_block_with_two_owners_and_a_lost_one_are_found() -> None:
    for every in ([[0, 1], [1]], [[0], [2]], [[0, 1, 2, 1]], [[1, 2]], [[0, 1, 2, 3]]):
        assert not are_all_once([PageIds(map(PageId, ids)) for ids in every], 3)
    assert are_all_once([PageIds([PageId(2)]), PageIds([PageId(1), PageId(0)])], 3)


@given(seed=st.integers(0, 1000), aligns=st.booleans(), page_size=st.sampled_from([1, 4]))
def test_a_table_of_states_names_the_first_block_of_each(seed: int, aligns: bool, page_size: int) -> None:
    """One table for a group of states by page, one for each block of the others; blocks of a page are its columns."""
    random = Random(seed)
    memory = GroupMemory((PartGroup(FULL, 2), BY_PAGE), aligns=aligns)
    cache = GroupPages(memory, IdPool(5 * 20), page_size=page_size, most_new_tokens=8)
    scattered = PageReserve(cache)
    scattered.extend(9)
    scattered._free_ids.sort(key=lambda _: random.random())
    scattered.shrink(9)
    content = Content.from_tokens(range(40), page_size=page_size, owner=0)
    table = cache.open(cache.match(content, 0))
    end = 0
    while end < 8 * page_size:
        most = page_size - end % page_size if end % page_size else 2 * page_size
        end += random.randint(1, most)  # a chunk of several pages begins with one
        cache.extend(table, end, is_end=False)
        cache.free_skipped(table, end)
        cache.count()
        tables = cache.tables(table, end)
        of_parts: list[list[tuple[int, list[PageId]]]] = []
        for index, group in enumerate(memory.groups):
            parts = [(run.start, run.end, run.ids) for run in table.parts.held[index]]
            parts.append((table.parts.first_open[index], table.parts.num_taken, table.parts.open_ids[index]))
            of_parts.append([])
            for first, last, ids in parts:
                cut = [list(ids)[at : at + group.part_bytes] for at in range(0, len(ids), group.part_bytes)]
                of_parts[-1] += zip(range(first, last), cut, strict=True)
        assert len(tables) == 2 + 1 == sum(memory.part_tables)
        for page, blocks in of_parts[0]:
            assert [tables[0][page], tables[1][page]] == blocks
        for page, blocks in of_parts[1]:
            assert tables[2][page] == blocks[0]
        last_page = -(-end // page_size) - 1
        assert cache.blocks_of_page(table, last_page) == tuple(table[last_page] for table in tables)
        cache.check([(table, len(tables[0]))])
    cache.close(table, end // page_size, -(-end // page_size))

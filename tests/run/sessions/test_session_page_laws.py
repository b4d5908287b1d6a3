"""The pages of sessions against a memory in which every slot is looked at.

The naive model knows tokens only: a session is a list of tokens of which some are computed, and what a later token sees
is by definition. A step writes tokens to the slots that page tables name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvarts.core.kv.cache import Cache, PageReserve
from kvarts.core.kv.eviction import LruOrder
from kvarts.core.kv.group_pages import GroupPages
from kvarts.core.kv.groups import GroupMemory, PartGroup, SinkWindow, most_blocks, retained_by_group
from kvarts.core.kv.layers import KvLayer
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.kv.pool import IdPool, PageId
from kvarts.core.kv.session_pages import ChunkRoom, SessionPages, SessionPageTable
from kvarts.core.kv.tree import PrefixTree

from builders.session_pages import KnownPages, PagesMachine
from oracles.naive_kv_groups import kept_for, seen_by_both

CHUNK_PAGES = 3
FULL = KvLayer(kind="full", num_heads=1, head_numbers=2)


class Known(KnownPages):
    @property
    def keeps(self) -> SinkWindow:
        return self.pages.keeps

    def seen_from(self, position: int, layer: KvLayer) -> set[int]:
        """The positions before `position` that a token there sees in a layer."""
        return seen_by_both(layer, self.keeps, position) - {position}


class SessionPagesMachine(PagesMachine[Known]):
    """Chunks of several sessions in one step, decodes, forks, cuts and ends."""

    @initialize(page_size=st.sampled_from([1, 2, 3, 4, 8]))
    def begin(self, page_size: int) -> None:
        self.begin_with(page_size, PageCache(IdPool(400), PrefixTree(LruOrder())), [FULL])

    def begin_with(self, page_size: int, cache: Cache, layers: list[KvLayer]) -> None:
        """`layers`: those of each page table."""
        self.layers = layers
        self.set_up(page_size, cache, len(layers), CHUNK_PAGES * len(layers))

    def open(self, keeps: SinkWindow) -> SessionPages:
        return SessionPages(keeps, self.reserve, self.room)

    def most_of(self, session: Known) -> int:
        return self.most_pages(session.keeps)

    def most_pages(self, keeps: SinkWindow) -> int:
        return -(-keeps.sink // self.page_size) + -(-keeps.window // self.page_size) + 1

    def tables_of(self, pages: SessionPages) -> list[tuple[SessionPageTable, Sequence[PageId]]]:
        """Every page table: those of its group, and its page ids."""
        return [(table, block) for table in pages.tables for block in table.by_block]

    def page_of(self, table: SessionPageTable, block: Sequence[PageId], position: int) -> PageId:
        page = position // self.page_size
        return block[page if page < table.num_sink_pages else page - table.num_dropped]

    def is_gone(self, table: SessionPageTable, positions: set[int]) -> bool:
        """Whether some of these are in pages that were dropped, or none is after them."""
        first = table.num_sink_pages * self.page_size
        gone = range(first, first + table.num_dropped * self.page_size)
        return any(position in gone for position in positions) or max(positions) < gone.stop

    def write(self, session: Known, start: int) -> None:
        """Write the tokens from `start` on where the page tables say."""
        for position in range(start, len(session.history)):
            for number, (table, block) in enumerate(self.tables_of(session.pages)):
                page = self.page_of(table, block, position)
                assert not self.is_shared(page), "a page that another has is written"
                self.memory[page, position % self.page_size] = number, session.history[position]

    @rule(sink=st.integers(0, 9), window=st.integers(1, 20))
    @precondition(lambda self: len(self.sessions) < 5)
    def create(self, sink: int, window: int) -> None:
        keeps = SinkWindow(sink, window)
        self.reserve.extend(self.most_pages(keeps))
        self.sessions.append(Known(pages=self.open(keeps)))

    @rule(parts=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30), st.booleans()), min_size=1, max_size=4))
    @precondition(lambda self: self.sessions)
    def step(self, parts: list[tuple[int, int, bool]]) -> None:
        """Chunks, some of which begin with the last token that is computed, as generations do."""
        chunks = {index % len(self.sessions): (count, again) for index, count, again in parts}
        starts: list[tuple[Known, int]] = []
        for index, (count, again) in chunks.items():
            session = self.sessions[index]
            start = max(0, len(session.history) - again)
            wanted = count + len(session.history) - start
            most = session.pages.most_tokens(start, wanted)
            assert 1 <= most <= wanted
            end = start + most
            if end > len(session.history):
                session.history += self.new_tokens(end - len(session.history))
            elif end < len(session.history):
                continue
            session.pages.settle(start)
            session.pages.grow(start, end)
            starts.append((session, start))
        self.copy([session for session, _ in starts])
        for session, start in starts:
            self.write(session, start)
        for session, _ in starts:
            session.pages.settle(len(session.history) - 1)
        assert self.room.num_used == 0

    @rule(index=st.integers(0, 4), count=st.integers(1, 20))
    @precondition(lambda self: self.sessions)
    def decode(self, index: int, count: int) -> None:
        """Tokens one at a time; pages are looked at in steps at two places of a page only."""
        session = self.some(index)
        if not session.history:
            return
        last = len(session.history) - 1
        session.pages.settle(last)
        session.pages.grow(last, last + 1)
        self.copy([session])
        self.write(session, last)
        for _ in range(count):
            position = len(session.history)
            if position % self.page_size in (0, *session.pages.places):
                session.pages.settle(position)
                session.pages.grow(position, position + 1)
            session.history += self.new_tokens(1)
            assert not session.pages.take_copies(), "a page is shared in the middle of a generation"
            self.write(session, position)
            self.check(session)

    @rule(index=st.integers(0, 4), label=st.booleans())
    @precondition(lambda self: 0 < len(self.sessions) < 5)
    def fork(self, index: int, label: bool) -> None:
        session = self.some(index)
        self.reserve.extend(self.most_pages(session.keeps))
        self.sessions.append(Known(pages=session.pages.fork(), history=list(session.history)))

    @rule(index=st.integers(0, 4), cut=st.integers(0, 40))
    @precondition(lambda self: self.sessions)
    def shorten(self, index: int, cut: int) -> None:
        """Only to where the last token, which is computed again, sees what it saw."""
        session = self.some(index)
        length = max(0, len(session.history) - cut)
        if not session.pages.can_shorten(length):
            assert any(
                self.is_gone(table, session.seen_from(length - 1, layer) | {length - 1})
                for (table, _), layer in zip(self.tables_of(session.pages), self.layers, strict=True)
            )
            return
        del session.history[length:]
        session.pages.shorten(length, length)

    def check(self, session: Known) -> None:
        pages, length = session.pages, len(session.history)
        last = max(0, length - 1)  # it may be computed again
        for number, ((table, block), layer) in enumerate(zip(self.tables_of(pages), self.layers, strict=True)):
            for position in session.seen_from(length, layer) | session.seen_from(last, layer):
                page = self.page_of(table, block, position)
                assert self.memory[page, position % self.page_size] == (number, session.history[position])
            kept = {position // self.page_size for position in (*kept_for(layer, session.keeps, last), last)}
            assert len(block) == table.num_pages <= len(kept), "a page is kept that no later token sees"


@pytest.mark.laws
def test_pages_of_sessions() -> None:
    run_state_machine_as_test(SessionPagesMachine, settings=settings(stateful_step_count=25))


class GroupPagesMachine(SessionPagesMachine):
    """The same of a model with KV groups: a page table for each block of a page."""

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4, 8]),
        groups=st.lists(
            st.tuples(st.one_of(st.none(), st.integers(1, 24)), st.sampled_from([0, 0, 2, 7]), st.integers(1, 2)),
            min_size=1,
            max_size=3,
        ),
    )
    def begin(self, page_size: int, groups: list[tuple[int | None, int, int]]) -> None:
        spans = [
            (
                FULL if span is None else KvLayer(kind="window", num_heads=1, head_numbers=2, span=span, sink=sink),
                blocks,
            )
            for span, sink, blocks in groups
        ]
        self.groups = GroupMemory(tuple(PartGroup(layer, 4 * blocks, blocks) for layer, blocks in spans))
        layers = [
            group.layer for group in self.groups.groups for _ in range(group.part_bytes // self.groups.block_bytes)
        ]
        self.begin_with(
            page_size,
            GroupPages(self.groups, IdPool(2400), page_size=page_size, most_new_tokens=8),
            layers,
        )

    def open(self, keeps: SinkWindow) -> SessionPages:
        return SessionPages(keeps, self.reserve, self.room, retained_by_group(self.groups, keeps))

    def most_pages(self, keeps: SinkWindow) -> int:
        return most_blocks(self.groups, keeps, self.page_size)


@pytest.mark.laws
def test_pages_of_sessions_by_group() -> None:
    run_state_machine_as_test(GroupPagesMachine, settings=settings(stateful_step_count=25))


def test_with_a_state_any_rollback_is_possible_since_all_is_computed_again() -> None:
    reserve = PageReserve(PageCache(IdPool(40), PrefixTree(LruOrder())))
    reserve.extend(40)
    for num_state_blocks in (0, 2):
        pages = SessionPages(SinkWindow(0, 4), reserve, ChunkRoom(3, 2, 1), num_state_blocks=num_state_blocks)
        for end in range(4, 21, 4):
            pages.settle(end - 4)
            pages.grow(end - 4, end)
        assert pages.tables[0].num_dropped
        assert pages.can_shorten(6) is (num_state_blocks > 0)
    assert pages.shorten(6, 20) == 0
    assert not pages.page_ids


class CountedReserve:
    """A reserve that counts how often pages are taken or released."""

    def __init__(self, reserve: PageReserve) -> None:
        self.reserve = reserve
        self.count = 0

    def take(self, num_pages: int = 1) -> PageId:
        self.count += 1
        return self.reserve.take(num_pages)

    def release(self, page_id: PageId) -> None:
        self.count += 1
        self.reserve.release(page_id)

    def is_shared(self, page_id: PageId) -> bool:
        return self.reserve.is_shared(page_id)

    def taken_with(self, page_id: PageId) -> Sequence[PageId]:
        return self.reserve.taken_with(page_id)


def test_a_page_of_many_blocks_is_taken_and_released_as_often_as_one_of_a_block() -> None:
    """A state by page takes thousands of blocks."""
    counts = []
    for num_blocks in (1, 3_000):
        state = KvLayer(kind="state", num_heads=0, head_numbers=0, span=2)
        groups = GroupMemory((PartGroup(FULL, 4, 1), PartGroup(state, 4 * num_blocks, num_blocks)))
        page_blocks = 1 + num_blocks
        cache = GroupPages(groups, IdPool(20 * page_blocks), page_size=2, most_new_tokens=8)
        reserve, room = PageReserve(cache), ChunkRoom(4 * page_blocks, 2, page_blocks)
        reserve.extend(cache.num_free)
        keeps = SinkWindow(0, 6)
        counted: Any = CountedReserve(reserve)
        pages = SessionPages(keeps, counted, room, retained_by_group(groups, keeps))
        for start in range(0, 64, 8):
            pages.settle(start)
            pages.grow(start, start + 8)
        pages.settle(63)
        assert room.num_used == 0
        assert reserve.num_taken == len(set(pages.page_ids)) == len(pages.page_ids)
        assert len(pages.page_tables) == sum(groups.part_tables) == 2
        pages.release()
        assert reserve.num_taken == 0
        counts.append(counted.count)
    assert counts == [2 * 32 * 2] * 2, "a page of each group is taken and released once"

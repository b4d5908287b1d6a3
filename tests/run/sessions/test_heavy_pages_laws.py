"""Pages that sessions keep by attention, in page tables of one block or several, beside a state or without one.

They are held against a table of what each page has received; attention is drawn at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvarts.core.kv.eviction import LruOrder
from kvarts.core.kv.groups import HeavyPages
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.kv.pool import IdPool, PageId
from kvarts.core.kv.session_pages import HeavyTable, SessionPages
from kvarts.core.kv.tree import PrefixTree

from builders.session_pages import KnownPages, PagesMachine
from oracles.naive_heavy_pages import NaiveHeavyPages

CHUNK_TOKENS = 60
MOST_SESSIONS = 4


@dataclass(kw_only=True)
class Known(KnownPages):
    """A session, and what its pages should be."""

    naive: NaiveHeavyPages

    @property
    def keeps(self) -> HeavyPages:
        assert isinstance(self.pages.keeps, HeavyPages)
        return self.pages.keeps

    @property
    def table(self) -> HeavyTable:
        (table,) = self.pages.tables
        assert isinstance(table, HeavyTable)
        return table


class HeavyPagesMachine(PagesMachine[Known]):
    @initialize(
        page_size=st.sampled_from([1, 3, 4, 8, 70]), num_blocks=st.integers(1, 3), num_state_blocks=st.integers(0, 2)
    )
    def begin(self, page_size: int, num_blocks: int, num_state_blocks: int) -> None:
        self.num_blocks, self.num_state_blocks = num_blocks, num_state_blocks
        room_pages = -(-CHUNK_TOKENS // page_size) * num_blocks
        self.set_up(page_size, PageCache(IdPool(8000), PrefixTree(LruOrder())), num_blocks, room_pages)

    def most_of(self, session: Known) -> int:
        return self.most_pages(session.naive)

    def most_pages(self, naive: NaiveHeavyPages) -> int:
        """As guides say, and a state."""
        size, tokens = self.page_size, (naive.sink, naive.window, naive.interval)
        most = sum(-(-count // size) for count in tokens) + naive.num_heavy + 1
        return most * self.num_blocks + self.num_state_blocks

    @rule(
        sink=st.integers(0, 9),
        window=st.integers(1, 90),
        num_heavy=st.integers(1, 6),
        keep=st.sampled_from(["h2o", "snapkv"]),
    )
    @precondition(lambda self: len(self.sessions) < MOST_SESSIONS)
    def create(self, sink: int, window: int, num_heavy: int, keep: str) -> None:
        keeps = HeavyPages(sink, window, num_heavy=num_heavy, keep=keep, page_size=self.page_size)
        naive = NaiveHeavyPages(sink, window, num_heavy, self.page_size, keep)
        assert self.most_pages(naive) == keeps.most_pages(self.page_size) * self.num_blocks + self.num_state_blocks
        self.reserve.extend(self.most_pages(naive))
        pages = SessionPages(
            keeps, self.reserve, self.room, [(keeps, self.num_blocks)], HeavyTable, self.num_state_blocks
        )
        self.sessions.append(Known(pages=pages, naive=naive))

    @rule(
        parts=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1, 7, 64, 64])), min_size=1, max_size=3),
        seed=st.integers(0, 9),
    )
    @precondition(lambda self: self.sessions)
    def step(self, parts: list[tuple[int, int]], seed: int) -> None:
        """Chunks of several sessions; then each may go on to the next decision."""
        random = Random(seed)
        begun: list[tuple[Known, int]] = []
        for index, count in {index % len(self.sessions): count for index, count in parts}.items():
            session = self.sessions[index]
            start = len(session.history)
            most = session.pages.most_tokens(start, count)
            assert 1 <= most <= count
            self.begin_chunk(session, start, start + most)
            begun.append((session, start))
        self.end_step(begun, random)

    @rule(index=st.integers(0, 3), count=st.integers(1, 70), seed=st.integers(0, 9))
    @precondition(lambda self: self.sessions)
    def decode(self, index: int, count: int, seed: int) -> None:
        session, random = self.some(index), Random(seed)
        for _ in range(count):
            start = len(session.history)
            self.begin_chunk(session, start, start + 1)
            self.end_step([(session, start)], random)

    @rule(index=st.integers(0, 3), seed=st.integers(0, 9))
    @precondition(lambda self: self.sessions and not self.num_state_blocks)
    def compute_last_again(self, index: int, seed: int) -> None:
        """As generations do, which need what follows the last token. What it gives counts once."""
        session = self.some(index)
        if session.history:
            self.begin_chunk(session, len(session.history) - 1, len(session.history))
            self.end_step([(session, len(session.history) - 1)], Random(seed))

    def begin_chunk(self, session: Known, start: int, end: int) -> None:
        session.pages.settle(start)
        session.naive.begin(start)
        session.pages.grow(start, end)
        session.naive.compute(start, end)
        session.history += self.new_tokens(end - len(session.history))

    def end_step(self, begun: Sequence[tuple[Known, int]], random: Random) -> None:
        self.copy([session for session, _ in begun])
        for session, start in begun:
            end = len(session.history)
            for number, block in enumerate(session.table.by_block):
                for position in range(start, end):
                    page = self.block_of(session, block, position)
                    assert not self.is_shared(page), "a page that another has is written"
                    self.memory[page, position % self.page_size] = number, session.history[position]
            for state in session.pages.state:  # of a state its last token, at place 0
                assert not self.is_shared(state)
                self.memory[state, 0] = -1, session.history[-1]
            numbers = session.table.page_numbers().tolist()
            if len(session.keeps.observed(start, end)):
                scores = [random.randrange(3) for _ in numbers]
                session.pages.observe(start, end, np.array(scores, np.float32))
                session.naive.receive(start, end, dict(zip(numbers, scores, strict=True)))
            session.pages.settle(end - 1)
            session.naive.begin(end - 1)
        assert self.room.num_used == 0

    def block_of(self, session: Known, block: Sequence[PageId], position: int) -> PageId:
        numbers: list[int] = session.table.page_numbers().tolist()
        return block[numbers.index(position // self.page_size)]

    @rule(index=st.integers(0, 3))
    @precondition(lambda self: 0 < len(self.sessions) < MOST_SESSIONS)
    def fork(self, index: int) -> None:
        session = self.some(index)
        self.reserve.extend(self.most_pages(session.naive))
        self.sessions.append(
            Known(pages=session.pages.fork(), naive=session.naive.fork(), history=list(session.history))
        )

    @rule(index=st.integers(0, 3), cut=st.sampled_from([0, 1, 5, 30, 65]))
    @precondition(lambda self: self.sessions)
    def go_back(self, index: int, cut: int) -> None:
        """With a state, all is computed again."""
        session = self.some(index)
        length = max(0, len(session.history) - cut)
        if self.num_state_blocks:
            assert session.pages.can_shorten(length)
            assert session.pages.shorten(length, len(session.history)) == 0
            naive = session.naive
            session.naive = NaiveHeavyPages(naive.sink, naive.window, naive.num_heavy, naive.page_size, naive.keep)
            session.history.clear()
            return
        can_go_back = session.naive.can_go_back(length)
        assert session.pages.can_shorten(length) is can_go_back
        if can_go_back:
            assert session.pages.shorten(length, len(session.history)) == length
            session.naive.go_back(length)
            del session.history[length:]

    def check(self, session: Known) -> None:
        pages, naive, table = session.pages, session.naive, session.table
        numbers = table.page_numbers().tolist()
        assert numbers == sorted(naive.held)
        assert table.scores().tolist() == [naive.score(page) for page in numbers]
        num_held = 0
        for number, block in enumerate(table.by_block):
            assert len(block) == len(numbers)
            for position, token in enumerate(session.history):
                if position // self.page_size in naive.held:
                    place = self.block_of(session, block, position), position % self.page_size
                    assert self.memory[place] == (number, token)
                    num_held += number == 0
        if session.history:
            assert pages.keeps.num_retained(len(session.history)) == num_held
        assert len(pages.state) == (self.num_state_blocks if session.history else 0)
        assert {self.memory[block, 0] for block in pages.state} <= {(-1, token) for token in session.history[-1:]}


@pytest.mark.laws
def test_heavy_pages_of_sessions() -> None:
    run_state_machine_as_test(HeavyPagesMachine, settings=settings(stateful_step_count=25))

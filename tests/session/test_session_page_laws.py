"""The pages of sessions against a memory in which every slot is looked at.

The naive model knows tokens only: a session is a list of tokens of which some are computed, and what a later token sees
is by definition. A step writes tokens to the slots that page tables name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvarts.kv.cache import PageCache
from kvarts.kv.eviction import LruOrder
from kvarts.kv.pool import IdPool
from kvarts.kv.reserve import PageReserve
from kvarts.kv.sink_window import SinkWindow
from kvarts.kv.tree import PrefixTree
from kvarts.session.pages import ChunkRoom, SessionPages

CHUNK_PAGES = 3


@dataclass
class Known:
    """A session: its pages, and its tokens, all of which are computed. No two tokens are equal."""

    pages: SessionPages
    history: list[int] = field(default_factory=list)

    @property
    def keeps(self) -> SinkWindow:
        return self.pages.keeps

    def seen_from(self, position: int) -> list[int]:
        """The positions before `position` that a token there sees."""
        return [q for q in range(position) if q < self.keeps.sink or q >= position - self.keeps.window]


class SessionPagesMachine(RuleBasedStateMachine):
    """Chunks of several sessions in one step, decodes, forks, cuts and ends."""

    @initialize(page_size=st.sampled_from([1, 2, 3, 4, 8]))
    def begin(self, page_size: int) -> None:
        self.page_size = page_size
        pool = IdPool(400)
        self.cache = PageCache(pool, PrefixTree(LruOrder()))
        self.reserve = PageReserve(self.cache)
        self.room = ChunkRoom(CHUNK_PAGES, page_size)
        self.reserve.extend(CHUNK_PAGES)
        self.memory: dict[tuple[int, int], int] = {}
        self.sessions: list[Known] = []
        self.num_tokens = 0

    def some(self, index: int) -> Known:
        return self.sessions[index % len(self.sessions)]

    def new_tokens(self, count: int) -> list[int]:
        self.num_tokens += count
        return list(range(self.num_tokens - count, self.num_tokens))

    def write(self, session: Known, start: int) -> None:
        """Write the tokens from `start` on where the page table says."""
        pages, size = session.pages, self.page_size
        for position in range(start, len(session.history)):
            page = pages.page_ids[position // size - pages.num_dropped]
            assert not self.reserve.is_shared(page), "a page that another has is written"
            self.memory[page, position % size] = session.history[position]

    def copy(self, sessions: list[Known]) -> None:
        for session in sessions:
            for source, target in session.pages.take_copies():
                for slot in range(self.page_size):
                    if (source, slot) in self.memory:
                        self.memory[target, slot] = self.memory[source, slot]

    @rule(sink=st.integers(0, 9), window=st.integers(1, 20))
    @precondition(lambda self: len(self.sessions) < 5)
    def create(self, sink: int, window: int) -> None:
        keeps = SinkWindow(sink, window)
        self.reserve.extend(keeps.most_pages(self.page_size))
        self.sessions.append(Known(SessionPages(keeps, self.reserve, self.room)))

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
            if position % self.page_size in (0, session.keeps.window % self.page_size):
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
        self.reserve.extend(session.keeps.most_pages(self.page_size))
        self.sessions.append(Known(session.pages.fork(), list(session.history)))

    @rule(index=st.integers(0, 4), cut=st.integers(0, 40))
    @precondition(lambda self: self.sessions)
    def shorten(self, index: int, cut: int) -> None:
        """Only to where the last token, which is computed again, sees what it saw."""
        session = self.some(index)
        length = max(0, len(session.history) - cut)
        gone = session.pages.num_dropped
        first_gone = session.keeps.num_sink_pages(self.page_size) * self.page_size
        gap = range(first_gone, first_gone + gone * self.page_size)
        if any(position in gap for position in session.seen_from(length - 1)) or length - 1 in gap:
            return
        if length > first_gone and length <= gap.stop:
            return  # nothing that it sees was dropped, but tokens beside were: sessions refuse that
        del session.history[length:]
        session.pages.shorten(length)

    @rule(index=st.integers(0, 4))
    @precondition(lambda self: self.sessions)
    def release(self, index: int) -> None:
        session = self.sessions.pop(index % len(self.sessions))
        session.pages.release()
        self.reserve.shrink(session.keeps.most_pages(self.page_size))

    def check(self, session: Known) -> None:
        pages, size, length = session.pages, self.page_size, len(session.history)
        held = len(pages.page_ids)
        most = -(-session.keeps.sink // size) + -(-session.keeps.window // size) + 1
        assert held <= most == session.keeps.most_pages(size)
        assert pages.most_held <= most + CHUNK_PAGES
        assert len(set(pages.page_ids)) == held
        for position in {*session.seen_from(length), *session.seen_from(max(0, length - 1))}:
            place = position - pages.num_dropped * size
            sink_pages = session.keeps.num_sink_pages(size)
            page = pages.page_ids[position // size if position < sink_pages * size else place // size]
            assert self.memory[page, position % size] == session.history[position]

    @invariant()
    def all_is_held(self) -> None:
        if not hasattr(self, "sessions"):
            return
        for session in self.sessions:
            self.check(session)
        held = {page for session in self.sessions for page in session.pages.page_ids}
        assert self.reserve.num_taken == len(held)
        wanted = sum(session.keeps.most_pages(self.page_size) for session in self.sessions)
        assert self.reserve.num_pages == wanted + CHUNK_PAGES
        holding = self.reserve.holding()
        assert holding is not None and holding.page_ids is not None
        assert len(set(holding.page_ids)) == self.reserve.num_pages
        assert held <= set(holding.page_ids)
        for page in held:
            num_sharing = sum(page in session.pages.page_ids for session in self.sessions)
            assert self.reserve.is_shared(page) == (num_sharing > 1)
        self.cache.check([(holding, holding.num_pages)])

    def teardown(self) -> None:
        if hasattr(self, "sessions"):
            while self.sessions:
                self.release(0)
            self.reserve.shrink(CHUNK_PAGES)
            self.cache.check([])
            assert self.cache.num_used == 0


@pytest.mark.laws
def test_pages_of_sessions() -> None:
    run_state_machine_as_test(SessionPagesMachine, settings=settings(stateful_step_count=25))

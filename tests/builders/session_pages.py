"""Pages of several sessions in one reserve, and a memory in which every slot is looked at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvarts.core.kv.cache import Cache, PageReserve
from kvarts.core.kv.pool import PageId
from kvarts.core.kv.session_pages import ChunkRoom, SessionPages

__all__ = ["KnownPages", "PagesMachine"]


@dataclass(kw_only=True)
class KnownPages:
    """A session: its pages, and its tokens, all of which are computed. No two tokens are equal."""

    pages: SessionPages
    history: list[int] = field(default_factory=list)


Known = TypeVar("Known", bound=KnownPages)


class PagesMachine(RuleBasedStateMachine, Generic[Known]):
    """Sessions that end, and what holds whatever they keep."""

    def set_up(self, page_size: int, cache: Cache, num_tables: int, room_pages: int) -> None:
        """`num_tables`: page tables of a session. `room_pages`: pages for the chunks of a step."""
        self.page_size = page_size
        self.cache = cache
        self.reserve = PageReserve(cache)
        self.room_pages = room_pages
        self.room = ChunkRoom(room_pages, page_size, num_tables)
        self.reserve.extend(room_pages)
        self.memory: dict[tuple[PageId, int], tuple[int, int]] = {}
        """By page and place: the number of the page table, and the token."""
        self.sessions: list[Known] = []
        self.num_tokens = 0

    def most_of(self, session: Known) -> int:
        """The most pages that it may have between steps."""
        raise NotImplementedError

    def check(self, session: Known) -> None:
        """It has the pages that it should, with the right tokens."""
        raise NotImplementedError

    def some(self, index: int) -> Known:
        return self.sessions[index % len(self.sessions)]

    def new_tokens(self, count: int) -> list[int]:
        self.num_tokens += count
        return list(range(self.num_tokens - count, self.num_tokens))

    def copy(self, sessions: list[Known]) -> None:
        for session in sessions:
            for source, target in session.pages.take_copies():
                for slot in range(self.page_size):
                    if (source, slot) in self.memory:
                        self.memory[target, slot] = self.memory[source, slot]

    def is_shared(self, page: PageId) -> bool:
        return sum(page in session.pages.page_ids for session in self.sessions) > 1

    @rule(index=st.integers(0, 4))
    @precondition(lambda self: self.sessions)
    def release(self, index: int) -> None:
        session = self.sessions.pop(index % len(self.sessions))
        session.pages.release()
        self.reserve.shrink(self.most_of(session))

    @invariant()
    def all_is_held(self) -> None:
        if not hasattr(self, "sessions"):
            return
        for session in self.sessions:
            held_by_one = session.pages.page_ids
            assert len(set(held_by_one)) == len(held_by_one) <= self.most_of(session)
            assert session.pages.most_held <= self.most_of(session) + self.room_pages
            self.check(session)
        held = {page for session in self.sessions for page in session.pages.page_ids}
        assert self.reserve.num_taken == len(held)
        wanted = sum(self.most_of(session) for session in self.sessions)
        assert self.reserve.num_pages == wanted + self.room_pages
        table = self.reserve.table()
        assert table is not None and table.page_ids is not None
        assert len(set(table.page_ids)) == self.reserve.num_pages
        assert held <= set(table.page_ids)
        firsts = {page for session in self.sessions for table in session.pages.tables for page in table.by_block[0]}
        for page in firsts:
            assert self.reserve.is_shared(page) == self.is_shared(page)
        self.cache.check([(table, table.num_pages)])

    def teardown(self) -> None:
        if hasattr(self, "sessions"):
            while self.sessions:
                self.release(0)
            self.reserve.shrink(self.room_pages)
            self.cache.check([])
            assert self.cache.num_used == 0

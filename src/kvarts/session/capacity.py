"""Owners' shares of the resources of all sessions, and the choice of sessions to evict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvarts.limits import MOST_COUNT
from kvarts.owners.shares import Shares, owner_of
from kvarts.session.config import SessionsConfig
from kvarts.session.session import Session
from kvarts.session.values import SessionsExhaustedError

__all__ = ["Capacity"]


class Capacity:
    """Owner of three accounts: sessions, pages reserved for them, and tokens of their histories.

    `num_pages`: pages or blocks that sessions may reserve. `shares`: of owners, relative to each other. With several
    owners, none can take everything: half of each share stays free for its owner. With at most one, all is available.
    """

    def __init__(self, config: SessionsConfig, num_pages: int, shares: Mapping[str, float]) -> None:
        self._is_shared = len(shares) > 1
        most_sessions = MOST_COUNT if config.max_sessions is None else config.max_sessions
        self.sessions = Shares(most_sessions, shares)
        self.pages = Shares(max(0, num_pages), shares)
        self.tokens = Shares(config.max_history_tokens, shares)

    def add(self, session: Session, num_pages: int) -> None:
        """Count a new session, with its reserved pages and its history."""
        self.sessions.force(session.owner)
        self.pages.force(session.owner, num_pages)
        self.recount(session)

    def remove(self, session: Session, num_pages: int) -> None:
        """Stop counting a session."""
        self.sessions.give(session.owner)
        self.pages.give(session.owner, num_pages)
        self.tokens.give(session.owner, session.num_counted)
        session.num_counted = 0

    def recount(self, session: Session) -> None:
        """Update the count of a session's history to its current length."""
        more = session.history_length - session.num_counted
        if more >= 0:
            self.tokens.force(session.owner, more)
        else:
            self.tokens.give(session.owner, -more)
        session.num_counted = session.history_length

    def check_tokens(self, owner: str, num_tokens: int) -> None:
        """Raise SessionsExhaustedError if the histories of `owner` cannot grow by `num_tokens`."""
        room = self.tokens.room(owner)
        if num_tokens > room:
            raise SessionsExhaustedError(
                f"{num_tokens} more tokens do not fit: histories hold {self.tokens.used(owner)} of this owner, "
                f"{self.tokens.num_used} of all, and {self.tokens.total} at most",
                field="max_history_tokens",
                hint="Close a session, or allow more.",
            )

    def leaving(
        self, owner: str, idle: Iterable[Session], *, num_sessions: int, num_pages: int, pages_of: Mapping[str, int]
    ) -> list[Session]:
        """Return sessions of `idle` to evict for `num_sessions` and `num_pages` more; too few if there are not enough.

        `owner` takes from others only what these hold beyond their guarantees, and only up to its own guarantee; beyond
        that, its own sessions are evicted. `idle`: the longest idle first. `pages_of`: the reserved pages of each
        session by id, without zeros.
        """
        account = owner_of(owner) if self._is_shared else ""
        candidates: dict[str, list[Session]] = {}
        for session in idle:
            candidates.setdefault(owner_of(session.owner) if self._is_shared else "", []).append(session)
        freed = {id(self.sessions): dict.fromkeys(candidates, 0), id(self.pages): dict.fromkeys(candidates, 0)}
        found: list[Session] = []
        while num_sessions > 0 or num_pages > 0:
            shares, wanted = (self.sessions, num_sessions) if num_sessions > 0 else (self.pages, num_pages)

            def over(name: str, shares: Shares = shares) -> int:
                return shares.over(name) - freed[id(shares)].get(name, 0)

            able = {
                name: there
                for name, there in candidates.items()
                if num_sessions > 0 or any(pages_of.get(session.session_id) for session in there)
            }
            others = [name for name in able if name != account and over(name) > 0]
            if self._is_shared and others and over(account) + wanted <= 0:
                name = min(others, key=lambda name: (-over(name), name))
            elif account in able:
                name = account
            else:
                break
            there = candidates[name]
            place = next(
                place for place, session in enumerate(there) if num_sessions > 0 or pages_of.get(session.session_id)
            )
            session = there.pop(place)
            if not there:
                del candidates[name]
            found.append(session)
            num_its_pages = pages_of.get(session.session_id, 0)
            num_sessions -= 1
            num_pages -= num_its_pages
            freed[id(self.sessions)][name] += 1
            freed[id(self.pages)][name] += num_its_pages
        return found

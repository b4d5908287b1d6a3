"""Appending tokens to histories, with rollback if the operation that needs them fails. In the engine's thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvarts.content import UNIT_BYTES
from kvarts.session.history import Histories
from kvarts.session.session import Session
from kvarts.session.table import SessionTable
from kvarts.session.values import SessionNotReadyError

__all__ = ["Appending"]


class Appending:
    """Appends to the sessions of `table`, and undoes failed appends. `histories`: the copies on disk, if any."""

    def __init__(self, table: SessionTable, histories: Histories | None) -> None:
        self._table = table
        self._histories = histories

    def max_positions(self, session: Session) -> int | None:
        """Return the maximum length of a history; None: unlimited."""
        settings = session.settings
        if settings.positions == "cache" or settings.past_max_positions:
            return None
        return self._table.host.max_positions

    def check(self, session: Session, num_tokens: int, expected_length: int | None) -> int:
        """Return the length of the history, after checking that `num_tokens` tokens can be appended.

        Raise UnknownSessionError if the session ended while this waited for its turn, SessionNotReadyError for a
        history of unexpected length or one that would get too long, and SessionsExhaustedError if histories are full.
        """
        self._table.get(session.owner, session.session_id)
        length = session.history_length
        if expected_length is not None and expected_length != length:
            raise SessionNotReadyError(
                f"the history has {length} tokens, and {expected_length} were expected",
                field="expected_length",
                hint="The tokens may be there already: compare with what was sent.",
            )
        most, longer = self.max_positions(session), length + num_tokens
        if num_tokens and most is not None and longer > most:
            raise SessionNotReadyError(
                f"the history would have {longer} tokens, and the model was trained for {most} positions",
                field="token_ids",
                hint="Create the session with positions='cache', or with past_max_positions.",
            )
        self._table.capacity.check_tokens(session.owner, num_tokens)
        return length

    @contextmanager
    def done(self, session: Session, packed: bytes, expected_length: int | None) -> Iterator[None]:
        """Append tokens, 8 bytes each, for the work in the block; if the block raises, remove them again."""
        before = self.check(session, len(packed) // UNIT_BYTES, expected_length)
        if packed:
            session.content.append(packed)
            self._table.capacity.recount(session)
        try:
            yield
        except BaseException:
            if packed:
                self._table.shorten(session, before)
                if self._histories is not None:  # queued ahead of any later append
                    self._histories.truncate(session.session_id, before)
                    session.is_written = False  # the outcome on disk is unknown here
            raise
